"""Small texts: their files, recipes and tokenizers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from recipes.schema import Recipe

SPECIAL = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}


def jsonl(path: Path, texts: Iterable[object], key: str = "text") -> Path:
    """A file of JSON lines with a text each."""
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts), encoding="utf-8")
    return path


def small_recipe(model: dict[str, Any], data: dict[str, Any], **more: Any) -> Recipe:
    """One layer of width 8 over 16 positions, trained for 3 steps of 4 samples."""
    return Recipe.model_validate(
        {
            "title": "test",
            "model": {"layers": 1, "hidden": 8, "heads": 1, **model},
            "sequence_length": 16,
            "batch": {"micro": 2, "global": 4},
            "steps": 3,
            "optimizer": {"lr": 1e-3},
            "data": data,
            **more,
        }
    )


def word_pieces(names: dict[str, int]) -> PreTrainedTokenizerFast:
    """A BERT's tokenizer of pieces and their numbers."""
    backend = Tokenizer(models.WordPiece(names, unk_token="[UNK]"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL)


def quiet(line: str) -> None:
    """Say nothing."""
