"""GPT-2 (Radford et al. 2019): its shape, its list of layers, and the model as one module."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from modeling.family import Family, common_shape
from modeling.generation import continue_prompt
from modeling.huggingface import gpt2
from modeling.initialization import Init
from modeling.layer_list import LayerDefinition, ModelShape, Stack, transformer_layers, word_embedding
from modeling.parallel.cross_entropy import weighted_loss
from modeling.parallel.layers import VocabParallelEmbedding
from modeling.parallel.process_grid import Group
from modeling.parallel.random_state import dropout
from modeling.transformer import LayerNorm, LayerShape
from recipes.schema import Recipe


@dataclass(frozen=True)
class GPT2Shape(ModelShape):
    """A GPT-2, whose layers differ in their attention alone."""

    windows: tuple[int | None, ...] = ()  # of banded attention, by layer; None: a dense one; (): all are

    def layer_at(self, index: int) -> LayerShape:
        assert len(self.windows) in (0, self.layers), f"{len(self.windows)} windows for {self.layers} layers"
        window = self.windows[index] if self.windows else None
        return LayerShape(self.hidden, self.heads, self.hidden_dropout, self.attention_dropout, window=window)


def shape_of(recipe: Recipe, padded_vocab: int) -> GPT2Shape:
    """The recipe's model, with `padded_vocab` rows of the embedding."""
    return GPT2Shape(**common_shape(recipe, padded_vocab), windows=recipe.model.windows)


class PositionEmbedding(nn.Module):
    """Adds learned positions to the word embeddings, then dropout."""

    def __init__(self, shape: GPT2Shape, *, init: Init):
        super().__init__()
        self.dropout = shape.hidden_dropout
        self.weight = init.normal("weight", (shape.positions, shape.hidden), init.std)

    def forward(self, x: Tensor) -> Tensor:  # (B, S, H), S <= positions
        return dropout(x + self.weight[: x.shape[1]], self.dropout, self.training)


def _project(word: nn.Module, x: Tensor) -> Tensor:
    return word(x, project=True)


def layer_list(shape: GPT2Shape, *, group: Group, init: Init) -> list[LayerDefinition]:
    """tokens (B, S) -> logits (B, S, V/t); the first layer and the last share a module."""
    word = word_embedding(shape, group, init)
    return [
        LayerDefinition("word", VocabParallelEmbedding, word, tied=True),
        LayerDefinition("position", PositionEmbedding, dict(shape=shape, init=init.child("position"))),
        *transformer_layers(shape, group, init),
        LayerDefinition("final_norm", LayerNorm, dict(hidden=shape.hidden, init=init.child("final_norm"))),
        LayerDefinition("word", VocabParallelEmbedding, word, _project, tied=True),
    ]


class GPT2(Stack):
    """The plain form: forward(tokens, labels, weights) -> loss, or logits when labels are None."""

    def __init__(self, shape: GPT2Shape, *, group: Group, init: Init):
        super().__init__(layer_list(shape, group=group, init=init), shape, group=group, loss=weighted_loss)

    def forward(self, tokens: Tensor, labels: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        """tokens, labels, weights (B, S) -> scalar loss; without labels -> logits (B, S, V/t)."""
        logits = self.run(tokens)
        return logits if labels is None else self.loss(logits, labels, weights, self.group)


FAMILY = Family("gpt2", shape_of, layer_list, GPT2, weighted_loss, gpt2.CONVERSION, continue_prompt)
