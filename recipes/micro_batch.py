"""The micro-batch: names and shapes of its tensors by family, which loader, models and engines share.

B samples of S tokens, of which a BERT predicts P; for a task N = B, or a B-th share where a choice is among
several samples. Token ids, lengths and positions are int64, weights
float32. The loss of a micro-batch is the sum of cross-entropies times weights.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class MicroBatchFields:
    """Tensor names in the order in which a model takes them -> their dimensions."""

    inputs: Mapping[str, str]  # what the first pipeline stage takes
    targets: Mapping[str, str]  # what the last one computes the loss from

    @property
    def names(self) -> tuple[str, ...]:
        """All of them, as the plain model takes them."""
        return (*self.inputs, *self.targets)

    @property
    def sizes(self) -> Mapping[str, str]:
        """The dimensions of all of them."""
        return {**self.inputs, **self.targets}

    @property
    def padded(self) -> bool:
        """Whether a sample may end before its S-th token: `lengths` says where."""
        return "lengths" in self.inputs

    @property
    def uneven(self) -> bool:
        """Whether samples predict different numbers of tokens, up to P."""
        return "P" in self.targets["weights"]


FIELDS: Mapping[str, MicroBatchFields] = {
    "gpt2": MicroBatchFields(inputs={"tokens": "BS"}, targets={"labels": "BS", "weights": "BS"}),
    "bert": MicroBatchFields(
        inputs={"tokens": "BS", "token_types": "BS", "lengths": "B", "positions": "BP"},
        targets={"labels": "BP", "weights": "BP", "sentence_labels": "B", "sentence_weights": "B"},
    ),
}

_TEXT = {"tokens": "BS", "token_types": "BS", "lengths": "B"}
_CLASS = {"labels": "N", "weights": "N"}
# By model.task_head of a BERT that is fine-tuned.
TASK_FIELDS: Mapping[str, MicroBatchFields] = {
    "classification": MicroBatchFields(inputs=_TEXT, targets=_CLASS),
    "span": MicroBatchFields(inputs=_TEXT, targets={"starts": "N", "ends": "N", "weights": "N"}),
    "choice": MicroBatchFields(inputs=_TEXT, targets=_CLASS),
}


def fields_of(names: Collection[str]) -> MicroBatchFields:
    """The fields of the micro-batch that holds tensors of these names; those of equal names share them."""
    every = (*FIELDS.values(), *TASK_FIELDS.values())
    return next(fields for fields in every if set(fields.names) == set(names))
