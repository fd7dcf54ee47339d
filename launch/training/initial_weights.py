"""Whether given weights fit a recipe, seen from their config.json before anything is started."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.machine import ending
from recipes.schema import Recipe
from recipes.vocabularies import BERT_UNCASED_VOCABULARY, GPT2_VOCABULARY, PUBLISHED_VOCABULARIES

Fixed = tuple[tuple[str, Any, tuple], ...]  # (key, default, values that our model has)


@dataclass(frozen=True)
class Form:
    """How a `transformers` model type states its shape; absent keys have its defaults."""

    shape: Mapping[str, tuple[str, int]]  # our key -> (theirs, their default)
    inner: str  # key of the MLP's width
    fixed: Fixed


_BERT_FIXED: Fixed = (
    ("hidden_act", "gelu", ("gelu",)),
    ("layer_norm_eps", 1e-12, (1e-12,)),
    ("type_vocab_size", 2, (2,)),
    ("position_embedding_type", "absolute", ("absolute", None)),
    ("is_decoder", False, (False,)),
    ("add_cross_attention", False, (False,)),
    ("tie_word_embeddings", True, (True,)),
)


def _bert_form(layers: int, hidden: int, heads: int, vocabulary: int) -> Form:
    shape = {
        "model.layers": ("num_hidden_layers", layers),
        "model.hidden": ("hidden_size", hidden),
        "model.heads": ("num_attention_heads", heads),
        "model.vocab_size": ("vocab_size", vocabulary),
        "sequence_length": ("max_position_embeddings", 512),
    }
    return Form(shape, "intermediate_size", _BERT_FIXED)


FORMS = {
    "gpt2": Form(
        {
            "model.layers": ("n_layer", 12),
            "model.hidden": ("n_embd", 768),
            "model.heads": ("n_head", 12),
            "model.vocab_size": ("vocab_size", GPT2_VOCABULARY),
            "sequence_length": ("n_positions", 1024),
        },
        "n_inner",
        (
            ("activation_function", "gelu_new", ("gelu_new", "gelu_pytorch_tanh")),
            ("layer_norm_epsilon", 1e-5, (1e-5,)),
            ("scale_attn_weights", True, (True,)),
            ("scale_attn_by_inverse_layer_idx", False, (False,)),
            ("add_cross_attention", False, (False,)),
            ("tie_word_embeddings", True, (True,)),
        ),
    ),
    "bert": _bert_form(12, 768, 12, BERT_UNCASED_VOCABULARY),
    "megatron-bert": _bert_form(24, 1024, 16, 29056),
}
TOKENIZERS = {
    size: kind for kind, size in PUBLISHED_VOCABULARIES.items()
}  # published vocabularies by their size


def model_type(recipe: Recipe) -> str:
    """The `transformers` model type of the recipe's model."""
    if recipe.model.family == "gpt2":
        return "gpt2"
    return "bert" if recipe.model.layer_norm == "post" else "megatron-bert"


def check(path: str | Path, recipe: Recipe) -> None:
    """Refuse initial weights that are not a `transformers` model of the recipe's kind and shape; say what else differs. Reads no weights.

    Raises ValueError with every mismatch, and what to put on the command line instead.
    """
    directory = Path(path)
    if not directory.is_dir():
        what = "is a file" if directory.exists() else "does not exist"
        raise ValueError(
            f"--init_from {path} {what}: give a directory that save_pretrained or launch/export_hf.py wrote"
        )
    problems = []
    if not any(any(directory.glob(pattern)) for pattern in ("*.safetensors", "pytorch_model*.bin")):
        problems.append(
            "holds no weights, *.safetensors or pytorch_model*.bin: give a directory that save_pretrained wrote"
        )
    try:
        config = json.loads((directory / "config.json").read_text())
        if not isinstance(config, dict):
            raise ValueError("not a mapping")
    except (OSError, ValueError) as e:
        problems.append(
            f"has no readable config.json ({e.__class__.__name__}): give a directory that save_pretrained wrote"
        )
    else:
        problems += _problems(config, recipe)
    if problems:
        raise ValueError("\n".join(f"--init_from {path}: {problem}" for problem in problems))
    for remark in remarks(recipe):
        ending.explain(f"--init_from {path}: {remark}")


def remarks(recipe: Recipe) -> list[str]:
    """In what a model of the recipe differs from the one that weights of the same shape were trained in."""
    model = recipe.model
    banded = [str(i) for i, window in enumerate(model.windows) if window is not None]
    if not banded:
        return []
    return [
        f"these weights were trained in dense layers, and layers {', '.join(banded)} are banded here: they see {model.attention_window} of "
        f"{recipe.sequence_length} positions (model.attention_window), so the loss starts above that of the dense model"
    ]


def _problems(config: dict, recipe: Recipe) -> list[str]:
    """Settings of a config.json that differ from the recipe's model."""
    wanted = model_type(recipe)
    if config.get("model_type") != wanted:
        other = {"bert": "post", "megatron-bert": "pre"}.get(str(config.get("model_type")))
        fix = f"; add --set model.layer_norm={other}" if other and recipe.model.family == "bert" else ""
        family = recipe.model.family + (
            f" with model.layer_norm={recipe.model.layer_norm}" if recipe.model.family == "bert" else ""
        )
        return [
            f"is a model of type {config.get('model_type')!r}: only {wanted} can be given to model.family={family}{fix}"
        ]
    form = FORMS[wanted]
    found, fixes = [], []
    for key, (theirs, default) in form.shape.items():
        value, ours = config.get(theirs, default), _value(recipe, key)
        if value != ours:
            found.append(f"{theirs}={value}, but the recipe's {key} is {ours}")
            fixes.append(f"--set {key}={value}")
            tokenizer = TOKENIZERS.get(value) if key == "model.vocab_size" else None
            if tokenizer and recipe.data.tokenizer.kind != tokenizer:
                fixes.append(f"--set data.tokenizer.kind={tokenizer}")
    if fixes:
        found[-1] += f"; to train a model of this shape add {' '.join(fixes)}"
    hidden, default = form.shape["model.hidden"]
    wide = 4 * config.get(hidden, default)
    # Absent, GPT-2's n_inner means four times the hidden size and BERT's intermediate_size its own default.
    inner = (
        form.inner,
        None if wanted == "gpt2" else 4 * default,
        (None, wide) if wanted == "gpt2" else (wide,),
    )
    for theirs, standard, allowed in (*form.fixed, inner):
        if config.get(theirs, standard) not in allowed:
            own = next(value for value in allowed if value is not None)
            found.append(
                f"{theirs}={config.get(theirs, standard)}: our {wanted} has {own}, and no switch; give other weights"
            )
    return found


def _value(recipe: Recipe, key: str) -> Any:
    value: Any = recipe
    for part in key.split("."):
        value = getattr(value, part)
    return value
