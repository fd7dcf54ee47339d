"""Conversion between canonical weights and those of `transformers`, by one name map for each family.

A family's map (`gpt2.py`, `bert.py`) lists every parameter: our name, theirs (several if fused), the form.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import transformers
from torch import Tensor

from modeling.formats.huggingface.weight_files import read_state_dict
from modeling.lazy_weights import LazyWeights, same_numbers
from recipes.schema import Dropout, Model

NO_DROPOUT = Dropout()
Tensors = Mapping[str, Tensor]
Logits = tuple[Tensor, ...]  # of tokens without padding (tokens, V); of a sentence head (B, 2)


class Form(NamedTuple):
    """The two functions between a canonical tensor and its `transformers` tensors; both take the heads."""

    to_theirs: Callable[[Tensor, int], Sequence[Tensor]]
    to_ours: Callable[[Sequence[Tensor], int], Tensor]


SAME = Form(lambda ours, heads: (ours,), lambda theirs, heads: theirs[0])
TRANSPOSED = Form(lambda ours, heads: (ours.t(),), lambda theirs, heads: theirs[0].t())


class Selection(NamedTuple):
    """Tensors of a state dict, by their names in the class of the model with its heads.

    Attributes:
        tensors: each once.
        copies: (name of the copy, name of the tensor) -> the copy, for tied tensors stored twice.
        twice: names under which two tensors were stored.
        stored: name -> the name under which it was stored.
    """

    tensors: dict[str, Tensor]
    copies: dict[tuple[str, str], Tensor]
    twice: list[str]
    stored: dict[str, str]

    def untied(self) -> list[tuple[str, str]]:
        """Return (copy, tensor) for each copy that differs from its tensor. Reads their numbers."""
        pairs = ((names, copy, self.tensors[names[1]]) for names, copy in self.copies.items())
        return [names for names, copy, tensor in pairs if not same_numbers(copy, tensor)]


class Entry(NamedTuple):
    """Names of one parameter, and its conversion."""

    ours: str
    theirs: tuple[str, ...]
    form: Form = SAME


@dataclass(frozen=True)
class Conversion:
    """A family's counterpart in `transformers`.

    Attributes:
        class_name: name of the class of the model with its heads.
        config: (model, positions, dropout, end= a document of GPT-2, pad= a BERT's sample) -> configuration.
        name_map: every parameter of the model.
        select: (a state dict, model) -> its tensors, without buffers and without heads foreign to the model.
        why_missing: (missing names, model) -> an explanation; "": none.
        from_transformers: a state dict -> canonical float32 weights; raises ValueError naming missing and
            unexpected tensors, and tied ones that differ.
        copies: names of tied copies, left out of every export.
        logits: (a `transformers` model, tokens (B, S), token types (B, S) or None, mask (B, S): no padding).
        usage: lines of Python that use an exported `{directory}` on a `{prompt}`.
    """

    class_name: Callable[[Model], str]
    config: Callable[..., transformers.PretrainedConfig]
    name_map: Callable[[Model], Iterable[Entry]]
    select: Callable[[Tensors, Model], Selection]
    why_missing: Callable[[Collection[str], Model], str]
    from_transformers: Callable[[Tensors, Model], LazyWeights]
    copies: frozenset[str]
    logits: Callable[..., Logits]
    usage: str

    def model_class(self, model: Model) -> Any:
        """Return the `transformers` class of the model with its heads."""
        return getattr(transformers, self.class_name(model))

    def to_transformers(self, ours: Tensors, model: Model) -> dict[str, Tensor]:
        """Turn canonical weights into the state dict of `model_class`, without tied copies.

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

    def read(self, directory: str | Path, model: Model) -> LazyWeights:
        """Read canonical weights from `directory`. Raises ValueError if they are not the model's."""
        return self.from_transformers(read_state_dict(directory), model)


def select_tensors(
    theirs: Tensors, rename: Callable[[str], str | None], tied: Mapping[str, str]
) -> Selection:
    """Select the tensors of a state dict, each once.

    Args:
        rename: a stored name -> the name in the class with all heads; None: a buffer, left out.
        tied: name of a copy -> name of the tensor; a state dict may hold either or both.
    """
    found, stored, twice = dict[str, Tensor](), dict[str, str](), list[str]()
    for written, tensor in theirs.items():
        if (name := rename(written)) is not None:
            twice += [name] if name in found else []
            found[name], stored[name] = tensor, written
    stored_copies = {names: found.pop(names[0]) for names in tied.items() if names[0] in found}
    copies = {names: copy for names, copy in stored_copies.items() if names[1] in found}
    found |= {names[1]: copy for names, copy in stored_copies.items() if names not in copies}
    return Selection(found, copies, twice, stored)


def check_tied(selected: Selection) -> None:
    """Check that tied tensors equal their copies, else raise ValueError."""
    for copy, original in selected.untied():
        came = f"transformers weights have a {copy} of its own"
        raise ValueError(f"{came}: in our model it is the same tensor as {original}")


def to_canonical(
    found: Tensors, entries: Iterable[Entry], heads: int, keys: str = "model.layers and model.family"
) -> LazyWeights:
    """Convert the tensors of `entries` from a state dict; raises as `check_names` does."""
    entries = list(entries)
    check_names(set(found), {n for entry in entries for n in entry.theirs}, "transformers weights", keys)

    def convert(entry: Entry) -> Tensor:
        return entry.form.to_ours([found[name] for name in entry.theirs], heads)

    return LazyWeights({entry.ours: partial(convert, entry) for entry in entries})


def check_convertible(model: Model) -> None:
    """Check that a `transformers` model can compute the same as `model`, else raise ValueError."""
    if any(window is not None for window in model.windows):
        raise ValueError(
            f"{model.sparse_keys}: "
            "transformers' GPT-2 has dense layers alone, and with these weights it would compute something "
            "else; only a run with model.attention=[dense] can be exported. The weights stay in the run's "
            "checkpoints, from which launch/pretrain.py --resume continues it"
        )


def check_names(
    found: set[str], expected: set[str], what: str, keys: str = "model.layers and model.family"
) -> None:
    """Check for missing and unexpected tensors; ValueError names them and the recipe's `keys` that decide."""
    if found != expected:
        missing, more = (sorted(names)[:5] or "nothing" for names in (expected - found, found - expected))
        came = f"{what} are not those of this model: missing {missing}, unexpected {more}"
        raise ValueError(f"{came}; check {keys}")
