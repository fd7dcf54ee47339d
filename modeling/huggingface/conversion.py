"""Conversion between canonical weights and those of `transformers`, by one name map for each family.

A family's map (`gpt2.py`, `bert.py`) lists every parameter: our name, theirs (several if fused), the form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from recipes.schema import Dropout, Model

NO_DROPOUT = Dropout()
Tensors = Mapping[str, Tensor]
Logits = tuple[Tensor, ...]  # of tokens that are not padding (tokens, V); of a sentence head (B, 2)


class Form(NamedTuple):
    """How a canonical tensor and those of `transformers` become each other, by the number of heads."""

    to_theirs: Callable[[Tensor, int], Sequence[Tensor]]
    to_ours: Callable[[Sequence[Tensor], int], Tensor]


SAME = Form(lambda ours, heads: (ours,), lambda theirs, heads: theirs[0])
TRANSPOSED = Form(lambda ours, heads: (ours.t(),), lambda theirs, heads: theirs[0].t())


class Entry(NamedTuple):
    """One parameter."""

    ours: str
    theirs: tuple[str, ...]
    form: Form = SAME


@dataclass(frozen=True)
class Conversion:
    """A family's counterpart in `transformers`.

    Attributes:
        class_name: of the class that holds the model with its heads.
        config: (model, positions, dropout, end= a document of GPT-2, pad= a BERT's sample) -> configuration.
        name_map: every parameter of the model.
        from_transformers: a state dict -> canonical float32 weights; raises ValueError naming missing and
            unexpected tensors.
        copies: names of tied tensors, which no export holds.
        logits: (a `transformers` model, tokens (B, S), token types (B, S) or None, mask (B, S): no padding).
        usage: lines of Python that use an exported `{directory}` on a `{prompt}`.
    """

    class_name: Callable[[Model], str]
    config: Callable[..., transformers.PretrainedConfig]
    name_map: Callable[[Model], Iterable[Entry]]
    from_transformers: Callable[[Tensors, Model], dict[str, Tensor]]
    copies: frozenset[str]
    logits: Callable[..., Logits]
    usage: str

    def model_class(self, model: Model) -> Any:
        """The class that `class_name` names."""
        return getattr(transformers, self.class_name(model))

    def to_transformers(self, ours: Tensors, model: Model) -> dict[str, Tensor]:
        """Canonical weights -> the state dict of `model_class`, tied copies left out.

        Raises ValueError as `check_convertible` does, or naming missing and unexpected tensors.
        """
        check_convertible(model)
        entries = list(self.name_map(model))
        check_names(set(ours), {entry.ours for entry in entries}, "canonical weights")
        return {
            name: part.contiguous()
            for mine, theirs, form in entries
            for name, part in zip(theirs, form.to_theirs(ours[mine], model.heads), strict=True)
        }

    def read(self, directory: str | Path, model: Model) -> dict[str, Tensor]:
        """Canonical weights of the model saved in `directory`. Raises ValueError where it holds none."""
        return self.from_transformers(read_state_dict(directory), model)


def to_canonical(
    found: Tensors, entries: Iterable[Entry], heads: int, keys: str = "model.layers and model.family"
) -> dict[str, Tensor]:
    """The float32 tensors of `entries` from the state dict that has them; raises as `check_names` does."""
    entries = list(entries)
    check_names(set(found), {n for entry in entries for n in entry.theirs}, "transformers weights", keys)
    return {
        ours: form.to_ours([found[name].float() for name in theirs], heads).contiguous()
        for ours, theirs, form in entries
    }


def check_convertible(model: Model) -> None:
    """Raises ValueError where no `transformers` model computes what `model` does."""
    if any(window is not None for window in model.windows):
        raise ValueError(
            f"model.attention={list(model.attention)}, model.attention_window={model.attention_window}: "
            "transformers' GPT-2 has dense layers alone, and with these weights it would compute something "
            "else; only a run with model.attention=[dense] can be exported. The weights stay in the run's "
            "checkpoints, from which launch/pretrain.py --resume continues it"
        )


def read_state_dict(directory: str | Path) -> dict[str, Tensor]:
    """All tensors that `save_pretrained` wrote (safetensors, else .bin). Raises ValueError where none."""
    directory, tensors = Path(directory), {}
    for file in sorted(directory.glob("*.safetensors")) or sorted(directory.glob("pytorch_model*.bin")):
        if file.suffix == ".bin":
            tensors.update(torch.load(file, map_location="cpu", weights_only=True))
        else:
            tensors.update(load_file(file))
    if not tensors:
        came = f"{directory} holds neither *.safetensors nor pytorch_model*.bin"
        raise ValueError(f"{came}: give a directory that save_pretrained wrote")
    return tensors


def check_names(
    found: set[str], expected: set[str], what: str, keys: str = "model.layers and model.family"
) -> None:
    """Raises ValueError naming missing and unexpected tensors, and the recipe's `keys` that decide."""
    if found != expected:
        missing, more = (sorted(names)[:5] or "nothing" for names in (expected - found, found - expected))
        came = f"{what} are not those of this model: missing {missing}, unexpected {more}"
        raise ValueError(f"{came}; check {keys}")
