"""Conversion between canonical weights and those of `transformers`, by one name map for each family.

A family's map (`gpt2.py`, `bert.py`) lists every parameter: our name, theirs (several if fused), the form.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import transformers
from torch import Tensor

from modeling.cost.parameter_count import head_outputs
from modeling.lazy_weights import LazyWeights, same_numbers
from recipes.schema import Dropout, Model

NO_DROPOUT = Dropout()
# a row for each token, then padding
WITH_PADDING = ("word.weight", "decoder_bias.bias")
Tensors = Mapping[str, Tensor]
# what DistributedDataParallel and torch.compile put before names
_WRAPPED = re.compile(r"^(module\.|_orig_mod\.)+")
# of tokens without padding (tokens, V); of a sentence head (B, 2)
Logits = tuple[Tensor, ...]


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
        twice: names that two stored names stand for; `tensors` has the last one.
    """

    tensors: dict[str, Tensor]
    copies: dict[tuple[str, str], Tensor]
    twice: list[str]

    def untied(self) -> Iterator[tuple[str, str]]:
        """Yield (copy, tensor) for each copy that differs from its tensor. Reads their numbers."""
        for (copy, name), tensor in self.copies.items():
            if not same_numbers(tensor, self.tensors[name]):
                yield copy, name


class NameEntry(NamedTuple):
    """Names of one parameter, and its conversion."""

    ours: str
    theirs: tuple[str, ...]
    form: Form = SAME


@dataclass(frozen=True)
class Conversion:
    """A family's counterpart in `transformers`.

    Attributes:
        class_name: name of the class of the model with its heads.
        config: (model, positions, dropout, tokenizer, which names special tokens) -> configuration.
        name_map: every parameter of the model.
        rename: stored name -> the name in the class with all heads; None: a buffer in old checkpoints.
        tied: name of a copy, left out of every export -> name of its tensor.
        logits: (a `transformers` model, tokens (B, S), token types (B, S) or None, mask (B, S): no padding).
        usage: lines of Python that use an exported `{directory}` on a `{prompt}`.
    """

    class_name: Callable[[Model], str]
    config: Callable[..., transformers.PretrainedConfig]
    name_map: Callable[[Model], Iterable[NameEntry]]
    rename: Callable[[str], str | None]
    tied: Mapping[str, str]
    logits: Callable[..., Logits]
    usage: str

    def model_class(self, model: Model) -> Any:
        """Return the `transformers` class of the model with its heads."""
        return getattr(transformers, self.class_name(model))

    def to_transformers(self, ours: Tensors, model: Model) -> dict[str, Tensor]:
        """Turn canonical weights into the state dict of `model_class`, without tied copies."""
        check_convertible(model)
        parts = self.converted(ours, model)
        return {name: part.contiguous() for _, name, part in parts}

    def converted(
        self, ours: Tensors, model: Model
    ) -> Iterator[tuple[str, str, Tensor]]:
        """Yield (our name, their name, their tensor); canonical weights are read one after the other."""
        for mine, theirs, form in self.name_map(model):
            parts = form.to_theirs(ours[mine], model.heads)
            for name, part in zip(theirs, parts, strict=True):
                yield mine, name, part

    def select(self, theirs: Mapping[str, Any]) -> Selection:
        """Select the tensors of a state dict, which may hold either name of a tied tensor, or both."""
        tensors = {}
        times = Counter[str]()
        for stored, tensor in theirs.items():
            name = self.rename(_WRAPPED.sub("", stored))
            if name:
                tensors[name] = tensor
                times[name] += 1
        twice = [name for name, count in times.items() if count > 1]
        copies = {}
        for copy, name in self.tied.items():
            if copy in tensors:
                tensor = tensors.pop(copy)
                if name in tensors:
                    copies[copy, name] = tensor
                else:
                    tensors[name] = tensor
        return Selection(tensors, copies, twice)

    def to_canonical(
        self,
        theirs: Mapping[str, Any],
        model: Model,
        read: Callable[[Any], Tensor] = lambda tensor: tensor,
    ) -> LazyWeights:
        """Turn a state dict of a class of this family into canonical float32 weights.

        `read`: returns the tensor of one that is read on use, with a `shape`.
        Parameters of the model that it lacks are absent, and so is a classifier of another task's classes.
        `launch/weights` refuses before what lacks more than a task's head.
        """
        tensors = self.select(theirs).tensors

        def convert(name: str) -> Tensor:
            entry = entries[name]
            parts = [read(tensors[name]) for name in entry.theirs]
            whole = entry.form.to_ours(parts, model.heads)
            if entry.ours in WITH_PADDING:
                return whole[: model.vocab_size]
            return whole

        def usable(entry: NameEntry) -> bool:
            if any(name not in tensors for name in entry.theirs):
                return False
            own = not entry.ours.startswith("head.classifier.")
            return own or tensors[entry.theirs[0]].shape[0] == head_outputs(model)

        entries = {each.ours: each for each in self.name_map(model) if usable(each)}
        return LazyWeights(entries, convert)


def check_convertible(model: Model) -> None:
    """Check that a `transformers` model can compute the same as `model`, else raise ValueError."""
    if any(window is not None for window in model.windows):
        raise ValueError(
            f"{model.sparse_keys}: "
            "transformers' GPT-2 has dense layers alone, and with these weights it would compute something "
            "else; only a run with model.attention=[dense] can be exported. The weights stay in the run's "
            "checkpoints, from which launch/pretrain.py --resume continues it"
        )
