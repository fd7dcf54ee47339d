"""GPT-2 (Radford et al. 2019): its shape, its list of layers, and the model as one module."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from modeling.initialization import Init
from modeling.layer_list import LayerDefinition, ModelShape, Stack, pipeline_module
from modeling.parallel.cross_entropy import weighted_loss
from modeling.parallel.layers import VocabParallelEmbedding
from modeling.parallel.random_state import dropout
from modeling.transformer import LayerNorm, LayerShape, TransformerLayer


@dataclass(frozen=True)
class GPT2Shape(ModelShape):
    """Of a GPT-2; layers differ in their attention alone."""

    def layer_at(self, index: int) -> LayerShape:
        return LayerShape(
            self.hidden, self.heads, self.hidden_dropout, self.attention_dropout, window=self.window(index)
        )


class PositionEmbedding(nn.Module):
    """Adds learned positions to the word embeddings, then dropout."""

    def __init__(self, positions: int, hidden: int, probability: float, *, init: Init, std: float):
        super().__init__()
        self.dropout = probability
        self.weight = init.normal("weight", (positions, hidden), std)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, S, H), S <= positions
        return dropout(x + self.weight[: x.shape[1]], self.dropout, self.training)


def _project(word: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return word(x, project=True)


def layer_list(shape: GPT2Shape, *, group: dist.ProcessGroup | None, init: Init) -> list[LayerDefinition]:
    """tokens (B, S) -> logits (B, S, V/t). Each layer takes one tensor and returns one; the first and the last share a module."""
    word = dict(
        vocab=shape.vocab,
        padded=shape.padded_vocab,
        hidden=shape.hidden,
        group=group,
        init=init.child("word"),
        std=init.std,
    )
    position = dict(
        positions=shape.positions,
        hidden=shape.hidden,
        probability=shape.hidden_dropout,
        init=init.child("position"),
        std=init.std,
    )
    return [
        LayerDefinition("word", VocabParallelEmbedding, word, tied=True),
        LayerDefinition("position", PositionEmbedding, position),
        *(
            LayerDefinition(
                f"layers.{i}",
                TransformerLayer,
                dict(shape=shape.layer_at(i), group=group, init=init.child(f"layers.{i}")),
            )
            for i in range(shape.layers)
        ),
        LayerDefinition("final_norm", LayerNorm, dict(hidden=shape.hidden, init=init.child("final_norm"))),
        LayerDefinition("word", VocabParallelEmbedding, word, _project, tied=True),
    ]


class GPT2(Stack):
    """The plain form: forward(tokens, labels, weights) -> loss, or logits when labels are None."""

    def __init__(self, shape: GPT2Shape, *, group: dist.ProcessGroup | None, init: Init):
        super().__init__(layer_list(shape, group=group, init=init), shape.checkpoint_interval)
        self.shape, self.group, self.loss = shape, group, weighted_loss

    def forward(
        self, tokens: torch.Tensor, labels: torch.Tensor | None = None, weights: torch.Tensor | None = None
    ):
        """tokens, labels, weights (B, S) -> scalar loss; without labels -> logits (B, S, V/t)."""
        logits = self.run(tokens)
        return logits if labels is None else self.loss(logits, labels, weights, self.group)


class PipelineLoss:
    """The loss of the last stage, on its logits and on (labels, weights)."""

    def __init__(self, group: dist.ProcessGroup | None):
        self.group, self.function = group, weighted_loss

    def __call__(self, logits: torch.Tensor, targets: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return self.function(logits, *targets, self.group)


def gpt2_pipeline(shape: GPT2Shape, *, grid, group: dist.ProcessGroup | None, init: Init):
    """The pipeline form: inputs are tokens (B, S), targets are (labels, weights)."""
    definitions = layer_list(shape, group=group, init=init)
    return pipeline_module(
        definitions, PipelineLoss(group), grid=grid, checkpoint_interval=shape.checkpoint_interval
    )
