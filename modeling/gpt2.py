"""GPT-2 (Radford et al. 2019): its shape and its list of layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from modeling.hidden_dropout import HiddenDropout
from modeling.initialization import Init
from modeling.layer_list import (
    Apply,
    Family,
    LayerDefinition,
    ModelShape,
    Stream,
    common_shape,
    transformer_layers,
    word_layer,
)
from modeling.parallel.collectives import own_positions, with_summed_gradients
from modeling.parallel.cross_entropy import weighted_loss
from modeling.parallel.layers import group_size
from modeling.parallel.process_grid import Group
from modeling.transformer import LayerNorm, LayerShape
from recipes.families import Window
from recipes.schema import Recipe


@dataclass(frozen=True)
class GPT2Shape(ModelShape):
    """Shape of a GPT-2; its layers differ only in their attention."""

    # of sparse attention, by layer; None: dense; (): all layers are dense
    windows: tuple[Window, ...] = ()
    # with borders: layers attend within documents, positions begin anew with each
    within_documents: bool = False
    restarts_positions: bool = False

    def layer_at(self, index: int) -> LayerShape:
        assert len(self.windows) in (0, self.layers), (
            f"{len(self.windows)} windows for {self.layers} layers"
        )
        window = self.windows[index] if self.windows else None
        return LayerShape(
            **self.of_every_layer, window=window, within_documents=self.within_documents
        )


def shape_of(recipe: Recipe, padded_vocab: int) -> GPT2Shape:
    """Return the shape of the recipe's model, with `padded_vocab` rows of the embedding."""
    return GPT2Shape(
        **common_shape(recipe, padded_vocab),
        windows=recipe.model.windows,
        within_documents=recipe.data.attend == "document",
        restarts_positions=recipe.data.positions == "document",
    )


class PositionEmbedding(nn.Module):
    """Sum of word embeddings and learned positions, then dropout.

    `cut_over`: the group that shares the positions under sequence parallelism, or None.
    """

    def __init__(self, shape: GPT2Shape, *, init: Init, cut_over: Group = None):
        super().__init__()
        self.cut_over = cut_over
        self.weight = init.normal("weight", (shape.positions, shape.hidden), init.std)
        self.dropout = HiddenDropout(
            shape.hidden, shape.hidden_dropout, init=init.child("dropout")
        )

    def forward(
        self,
        x: Tensor,
        dropout_seeds: Tensor | None = None,
        places: Tensor | None = None,
    ) -> Tensor:
        """x (B, S, H), S <= positions; dropout_seeds (B, S, 2) of hidden dropout in training.

        places (B, S): positions of the tokens; None: 0, 1, ...
        """
        (weight,) = with_summed_gradients(self.cut_over, self.weight)
        if places is None:
            length = x.shape[1] * group_size(self.cut_over)
            of_places = own_positions(weight[None, :length], self.cut_over)
        else:
            of_places = F.embedding(places, weight)
        x = self.dropout(x + of_places, dropout_seeds)
        return x


# Streams: tokens -> x -> logits; with seeds of hidden dropout (tokens, seeds) -> (x, seeds) -> logits
# With borders of documents `modeling.documents` says what they are.


def _add_positions(layer: nn.Module, stream: Stream, cut_over: Group) -> Stream:
    """Add positions to the stream; cut its seeds, of which every rank has all."""
    if not isinstance(stream, Tensor):
        x, dropout_seeds = stream
        stream = x, own_positions(dropout_seeds, cut_over)
    return _drop(layer, stream)


def _drop(layer: nn.Module, stream: Stream) -> Stream:
    """Apply a layer with dropout; the seeds ride along."""
    if isinstance(stream, Tensor):
        return layer(stream)
    x, dropout_seeds = stream
    return layer(x, dropout_seeds=dropout_seeds), dropout_seeds


def _finish(norm: nn.Module, stream: Stream) -> Tensor:
    x: Tensor = norm(stream if isinstance(stream, Tensor) else stream[0])
    return x


def layer_list(shape: GPT2Shape, *, group: Group, init: Init) -> list[LayerDefinition]:
    """Return the layers, tokens (B, S) -> logits (B, S, V/t); the first and the last share a module."""
    cut = shape.sequence_parallel
    cut_over = shape.positions_group(group)
    position = dict(shape=shape, init=init.child("position"), cut_over=cut_over)
    final_norm = dict(
        hidden=shape.hidden, init=init.child("final_norm"), cut_over=cut_over
    )
    add_positions: Apply = partial(_add_positions, cut_over=cut_over)
    attend: Apply = _drop
    if shape.borders:
        from modeling.documents import applied

        within = shape.within_documents
        add_positions, attend = applied(within, shape.restarts_positions, cut_over)
    return [
        word_layer(shape, group, init, cut=cut),
        LayerDefinition("position", PositionEmbedding, position, add_positions),
        *transformer_layers(shape, group, init, attend),
        LayerDefinition("final_norm", LayerNorm, final_norm, _finish),
        word_layer(shape, group, init, cut=cut, project=True),
    ]


FAMILY = Family("gpt2", shape_of, layer_list, weighted_loss)
