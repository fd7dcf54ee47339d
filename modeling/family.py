"""The interface of a family of models.

A third family is one file like `gpt2.py`, its facts in `recipes/families.py`, and its line in `families.py`;
a conversion comes on top (`modeling/formats/families.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from modeling.initialization import Init
from modeling.layer_list import LayerList, Loss, Pipeline, PipelineLoss, Stack
from modeling.parallel.process_grid import Group, ProcessGrid
from recipes.families import FAMILIES, TASK_FIELDS, MicroBatchFields
from recipes.schema import Recipe


@dataclass(frozen=True)
class Family:
    """One family of models.

    Attributes:
        name: `model.family` of its recipes; `model.task_head` of a BERT that is fine-tuned.
        shape: (recipe, rows of the embedding) -> the shape of its model, a `ModelShape`.
        layer_list: (shape, group=, init=) -> the layers in order, for both forms.
        loss: (output of the last layer, targets, group) -> the loss, or (the loss, its parts).
        loss_parts: shape -> names of these parts.
    """

    name: str
    shape: Callable[[Recipe, int], Any]
    layer_list: LayerList
    loss: Loss
    loss_parts: Callable[[Any], tuple[str, ...]] = lambda shape: ()

    @property
    def fields(self) -> MicroBatchFields:
        """Names of the inputs and targets of a micro-batch."""
        return TASK_FIELDS.get(self.name) or FAMILIES[self.name].fields

    def plain(self, shape: Any, *, group: Group, init: Init) -> Stack:
        """Build the plain form: it takes `fields.inputs`, then `fields.targets`."""
        layers, parts = self.layer_list(shape, group=group, init=init), self.loss_parts(shape)
        inputs = len(self.fields.inputs)
        return Stack(layers, shape, group=group, loss=self.loss, loss_parts=parts, inputs=inputs)

    def pipeline(
        self, shape: Any, *, grid: ProcessGrid, group: Group, init: Init, stages: Sequence[int]
    ) -> Pipeline:
        """Build the pipeline form: the first stage takes `fields.inputs`, the last one `fields.targets`.

        `stages`: transformer layers of each stage.
        """
        loss = PipelineLoss(self.loss, group, self.loss_parts(shape))
        layers = self.layer_list(shape, group=group, init=init)
        return Pipeline(layers, loss, grid, shape.checkpoint_interval, stages)


def common_shape(recipe: Recipe, padded_vocab: int) -> dict[str, Any]:
    """Return the fields common to every `ModelShape`, from a recipe and the rows of the embedding."""
    model = recipe.model
    return dict(
        layers=model.layers, hidden=model.hidden, heads=model.heads, vocab=model.vocab_size,
        padded_vocab=padded_vocab, positions=recipe.positions,
        hidden_dropout=recipe.dropout.hidden, attention_dropout=recipe.dropout.attention,
        checkpoint_interval=recipe.checkpoint_interval, recomputes_core=recipe.recomputes_core,
        sequence_parallel=recipe.parallel.sequence, shared_layers=model.shared_layers,
    )  # fmt: skip
