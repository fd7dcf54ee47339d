"""What the other rooms ask a family of models.

A third family is one file like `gpt2.py`, and its line in `families.py`; CONTRIBUTING.md lists its conversion
and the tables that hold what is needed without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from modeling.formats.huggingface.conversion import Conversion
from modeling.generation import Answer
from modeling.initialization import Init
from modeling.layer_list import LayerList, Loss, Pipeline, PipelineLoss
from modeling.parallel.process_grid import Group, ProcessGrid
from recipes.micro_batch import FIELDS, TASK_FIELDS, MicroBatchFields
from recipes.schema import Recipe


@dataclass(frozen=True)
class Family:
    """One family of models.

    Attributes:
        name: `model.family` of its recipes; `model.task_head` of a BERT that is fine-tuned.
        shape: (recipe, rows of the embedding) -> the shape of its model, a `ModelShape`.
        layer_list: (shape, group=, init=) -> the layers in order, of which both forms are made.
        plain: (shape, group=, init=) -> the `Stack` of all layers.
        loss: (what the last layer gives, targets, group) -> the loss, or (the loss, its parts).
        loss_parts: shape -> names of these parts.
        conversion: to and from `transformers`.
        answer: what a trained model makes of a prompt.
        continues: whether that is what follows it (its plain form has `decode`), and not its masks filled in.
    """

    name: str
    shape: Callable[[Recipe, int], Any]
    layer_list: LayerList
    plain: Callable[..., Any]
    loss: Loss
    conversion: Conversion
    answer: Answer
    loss_parts: Callable[[Any], tuple[str, ...]] = lambda shape: ()
    continues: bool = False

    @property
    def fields(self) -> MicroBatchFields:
        """Inputs and targets."""
        return {**FIELDS, **TASK_FIELDS}[self.name]

    def pipeline(
        self, shape: Any, *, grid: ProcessGrid, group: Group, init: Init, stages: Sequence[int]
    ) -> Pipeline:
        """The pipeline form: the first stage takes `fields.inputs`, the last one `fields.targets`.

        `stages`: transformer layers of each.
        """
        loss = PipelineLoss(self.loss, group, self.loss_parts(shape))
        layers = self.layer_list(shape, group=group, init=init)
        return Pipeline(layers, loss, grid, shape.checkpoint_interval, stages)


def common_shape(recipe: Recipe, padded_vocab: int) -> dict[str, Any]:
    """What every `ModelShape` has, from a recipe and the rows of the embedding."""
    model = recipe.model
    return dict(
        layers=model.layers, hidden=model.hidden, heads=model.heads, vocab=model.vocab_size,
        padded_vocab=padded_vocab, positions=recipe.positions,
        hidden_dropout=recipe.dropout.hidden, attention_dropout=recipe.dropout.attention,
        checkpoint_interval=recipe.checkpoint_interval, recomputes_core=recipe.recomputes_core,
        sequence_parallel=recipe.parallel.sequence,
    )  # fmt: skip
