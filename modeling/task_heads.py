"""BERT for fine-tuning: the layers of `bert.py` with a head for a task, and its loss.

Classification is `transformers`' BertForSequenceClassification, choices are BertForMultipleChoice, and spans
BertForQuestionAnswering, except that the softmax here leaves padding out.

Shapes: B samples, S positions, H hidden size, C classes or choices, N examples: B, or B / C where each choice
is a sample of its own. The plain form also takes samples without their padding (`modeling/unpadding.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modeling import bert
from modeling.bert import BertShape
from modeling.cost.parameter_count import head_outputs
from modeling.family import Family
from modeling.hidden_dropout import HiddenDropout
from modeling.initialization import Init
from modeling.layer_list import LayerDefinition, Loss
from modeling.parallel.collectives import gather_positions
from modeling.parallel.layers import ColumnParallelLinear
from modeling.parallel.process_grid import Group
from modeling.unpadding import Row, padding_mask
from recipes.schema import Recipe

LOSS_PARTS = ("accuracy",)


@dataclass(frozen=True)
class TaskShape(BertShape):
    """Shape of a BERT with a task head: kind, logits per sample (spans: per token), choices per example."""

    task_head: str = "classification"
    outputs: int = 2
    choices: int = 1


def shape_of(recipe: Recipe, padded_vocab: int) -> TaskShape:
    """Return the shape of the recipe's model, with `padded_vocab` rows of the embedding."""
    model, encoder = recipe.model, vars(bert.shape_of(recipe, padded_vocab))
    choices = model.head_classes if model.task_head == "choice" else 1
    return TaskShape(**encoder, task_head=model.task_head, outputs=head_outputs(model), choices=choices)


class SampleHead(nn.Module):
    """Logits of whole samples: pooler (dense and tanh of [CLS]), dropout, dense. On every tensor rank."""

    def __init__(self, shape: TaskShape, *, init: Init, cut_over: Group = None):
        super().__init__()
        self.logits, self.cut_over = shape.outputs * shape.choices, cut_over
        linear = partial(ColumnParallelLinear, shape.hidden, group=None)
        self.pooler = linear(shape.hidden, init=init.child("pooler"))
        self.dropout = HiddenDropout(shape.hidden, shape.hidden_dropout, init=init.child("dropout"))
        self.classifier = linear(shape.outputs, init=init.child("classifier"))

    def forward(self, x: Tensor, lengths: Tensor | Row | None, salts: Tensor | None = None) -> Tensor:
        """x (B, S, H) or a row -> (N, C)."""
        # Every rank computes the same from here on.
        x = _first(gather_positions(x, self.cut_over, summed=False), lengths)
        if salts is not None:
            salts = _first(gather_positions(salts, self.cut_over, summed=False), lengths)
        pooled = self.dropout(torch.tanh(self.pooler(x)), salts)
        logits: Tensor = self.classifier(pooled).view(-1, self.logits)
        return logits


def _first(x: Tensor, lengths: Tensor | Row | None) -> Tensor:
    """Return the [CLS] entries (B, 1, ...) of (B, S, ...) or of a row (1, T, ...)."""
    return x[0, lengths.firsts.long()][:, None] if isinstance(lengths, Row) else x[:, :1]


class SpanHead(nn.Module):
    """Two logits of every token, for the start and the end of an answer. On every tensor rank."""

    def __init__(self, shape: TaskShape, *, init: Init, cut_over: Group = None):
        super().__init__()
        self.cut_over = cut_over
        self.span = ColumnParallelLinear(shape.hidden, shape.outputs, group=None, init=init.child("span"))

    def forward(self, x: Tensor, lengths: Tensor | Row | None, salts: Tensor | None = None) -> Tensor:
        """x (B, S, H) or a row -> (B, S, 2) in float32, -inf at padding; a row's S is its longest length."""
        logits = self.span(gather_positions(x, self.cut_over, summed=False)).float()
        if isinstance(lengths, Row):
            counts = lengths.offsets.diff()[:-1].long()
            places = torch.arange(lengths.longest, device=x.device)
            at = lengths.firsts.long()[:, None] + places.minimum(counts[:, None] - 1)
            logits, lengths = logits[0, at], counts
        if lengths is None:
            return logits
        real = padding_mask(lengths, logits.shape[1])[:, 0, 0, :, None]
        return logits.masked_fill(~real, float("-inf"))


def _head(head: nn.Module, stream: tuple) -> Tensor:
    logits: Tensor = head(*stream)
    return logits


def layer_list(shape: TaskShape, *, group: Group, init: Init) -> list[LayerDefinition]:
    """Return the layers: (tokens, token types, lengths) -> logits (N, C) or (B, S, 2)."""
    head = dict(shape=shape, init=init.child("head"), cut_over=shape.positions_group(group))
    kind = SpanHead if shape.task_head == "span" else SampleHead
    return [*bert.encoder(shape, group, init, inputs=3), LayerDefinition("head", kind, head, _head)]


def class_loss(logits: Tensor, labels: Tensor, weights: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Return (weighted sum of cross-entropies, accuracy (1,) without gradient), float32.

    logits (N, C); labels, weights (N,). Every tensor rank has all logits: `group` is not used.
    """
    losses = F.cross_entropy(logits.float(), labels, reduction="none")
    right = ((logits.argmax(-1) == labels) * weights).sum()
    return (losses * weights).sum(), right.detach().view(1)


def span_loss(
    logits: Tensor, starts: Tensor, ends: Tensor, weights: Tensor, group: Group
) -> tuple[Tensor, Tensor]:
    """Return (mean of the losses of both ends, weighted share of samples with both right), as `class_loss`.

    logits (B, S, 2); starts, ends and weights (B,).
    """
    losses = sum(
        F.cross_entropy(logits[..., end].float(), labels, reduction="none")
        for end, labels in enumerate((starts, ends))
    )
    best = logits.argmax(1)
    right = (((best[:, 0] == starts) & (best[:, 1] == ends)) * weights).sum()
    return (losses * weights).sum() / 2, right.detach().view(1)


LOSSES: Mapping[str, Loss] = {"classification": class_loss, "span": span_loss, "choice": class_loss}
FAMILIES: Mapping[str, Family] = {
    head: Family(head, shape_of, layer_list, loss, lambda shape: LOSS_PARTS) for head, loss in LOSSES.items()
}
