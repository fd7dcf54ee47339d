"""BERT (Devlin et al., arXiv 1810.04805): its shape, layers and losses, and weights of heads for tasks.

Two placements of LayerNorm, with equally many parameters. Post-LN is the original: on the embeddings and
after each residual sum. Pre-LN is Megatron-BERT's (arXiv 1909.08053, section 3 and figure 1b): before each
branch and once after the last layer, and not on the embeddings, as `transformers` has it in MegatronBert.

Shapes: B samples, S positions, P predicted positions, H hidden size, V vocabulary (V/t: of this tensor rank).
The plain form also takes samples without their padding, as one row (`modeling/unpadding.py`): then B is 1
except in the sentence objective, S counts the tokens of the row, and P all of its predictions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modeling.cost.parameter_count import SENTENCE_CLASSES, TOKEN_TYPES, head_outputs
from modeling.hidden_dropout import HiddenDropout
from modeling.initialization import Init, Shard
from modeling.layer_list import (
    Family,
    LayerDefinition,
    ModelShape,
    common_shape,
    transformer_layers,
    word_layer,
)
from modeling.parallel.collectives import (
    gather_positions,
    own_positions,
    with_summed_gradients,
)
from modeling.parallel.cross_entropy import weighted_loss
from modeling.parallel.layers import ColumnParallelLinear, group_size
from modeling.parallel.process_grid import Group
from modeling.transformer import BERT_NORM_EPS, LayerNorm, LayerShape
from modeling.unpadding import PackedRow
from recipes.families import MASKED_FIGURES, parts_of
from recipes.schema import Model, Recipe


@dataclass(frozen=True)
class BertShape(ModelShape):
    """Shape of a BERT: the common fields, the place of LayerNorm and the sentence objective."""

    post_norm: bool = False
    sentence_head: Literal["none", "nsp", "sop"] = "none"

    def layer_at(self, index: int) -> LayerShape:
        original: dict[str, Any] = dict(
            causal=False, tanh_gelu=False, norm_eps=BERT_NORM_EPS
        )
        return LayerShape(**self.of_every_layer, post_norm=self.post_norm, **original)


def shape_of(recipe: Recipe, padded_vocab: int) -> BertShape:
    """Return the shape of the recipe's model, with `padded_vocab` rows of the embedding."""
    post_norm = recipe.model.layer_norm == "post"
    sentence_head = recipe.model.sentence_head
    common = common_shape(recipe, padded_vocab)
    return BertShape(**common, post_norm=post_norm, sentence_head=sentence_head)


class Embedding(nn.Module):
    """Sum of word, position and token-type embeddings (segments A and B); LayerNorm if post-LN; dropout.

    `cut_over`: the group that shares the positions under sequence parallelism, or None.
    """

    def __init__(self, shape: BertShape, *, init: Init, cut_over: Group = None):
        super().__init__()
        self.cut_over = cut_over
        self.position = init.normal(
            "position", (shape.positions, shape.hidden), init.std
        )
        self.token_type = init.normal(
            "token_type", (TOKEN_TYPES, shape.hidden), init.std
        )
        how: dict[str, Any] = dict(
            init=init.child("norm"), eps=BERT_NORM_EPS, cut_over=cut_over
        )
        self.norm = LayerNorm(shape.hidden, **how) if shape.post_norm else None
        self.dropout = HiddenDropout(
            shape.hidden, shape.hidden_dropout, init=init.child("dropout")
        )

    def forward(
        self,
        x: Tensor,
        token_types: Tensor,
        dropout_seeds: Tensor | None = None,
        places: Tensor | None = None,
    ) -> Tensor:
        """x (B, S, H), token_types (B, S) of 0 and 1; dropout_seeds (B, S, 2) of hidden dropout in training.

        places (1, T): positions of the tokens of a row; None: 0, 1, ...
        """
        position, token_type = with_summed_gradients(
            self.cut_over, self.position, self.token_type
        )
        if places is None:
            length = x.shape[1] * group_size(self.cut_over)
            of_places = own_positions(position[None, :length], self.cut_over)
        else:
            of_places = F.embedding(places, position)
        x = x + of_places + F.embedding(token_types, token_type)
        if self.norm is not None:
            x = self.norm(x)
        x = self.dropout(x, dropout_seeds)
        return x


class Head(nn.Module):
    """Transform before the tied decoder, and the sentence head; duplicated on every tensor rank.

    Masked tokens: dense, GELU, LayerNorm, only at the predicted positions. Sentences: pooler (dense and tanh
    of [CLS]), then two logits. `cut_over`: the group that shares the positions, or None.
    """

    def __init__(self, shape: BertShape, *, init: Init, cut_over: Group = None):
        super().__init__()
        self.cut_over = cut_over
        linear = partial(ColumnParallelLinear, shape.hidden, group=None)
        sentences = shape.sentence_head != "none"
        self.transform = linear(shape.hidden, init=init.child("transform"))
        self.norm = LayerNorm(shape.hidden, init=init.child("norm"), eps=BERT_NORM_EPS)
        self.pooler = (
            linear(shape.hidden, init=init.child("pooler")) if sentences else None
        )
        self.sentence = (
            linear(SENTENCE_CLASSES, init=init.child("sentence")) if sentences else None
        )

    def forward(
        self, x: Tensor, positions: Tensor | None, firsts: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """x (B, S, H), positions (B, P) or None: decoder input (B, P, H), sentence logits (B, 2) or None.

        firsts (B,): where [CLS] of the samples of a row are; None: at the first position.
        """
        x = gather_positions(x, self.cut_over, summed=False)
        chosen = (
            x
            if positions is None
            else x.gather(1, positions.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        )
        decoded = self.norm(F.gelu(self.transform(chosen)))
        if self.pooler is None or self.sentence is None:
            return decoded, None
        of_sample = x[:, 0] if firsts is None else F.embedding(firsts, x[0])
        return decoded, self.sentence(torch.tanh(self.pooler(of_sample)))


class DecoderBias(nn.Module):
    """The decoder's own bias, cut over the vocabulary like the tied embedding."""

    def __init__(self, vocab: int, padded: int, *, group: Group, init: Init):
        super().__init__()
        self.bias = init.zeros("bias", (vocab,), shard=Shard.over(group, 0, padded))

    def forward(self, logits: Tensor) -> Tensor:  # (B, P, V/t)
        return logits + self.bias


# Streams: (tokens, token types, lengths, positions) -> (x, lengths, positions) -> (logits, sentence logits)
# The first two end with the seeds of hidden dropout where there are any. Instead of lengths, a Row.
_Stream = tuple[Any, ...]


def _embed(embedding: nn.Module, stream: _Stream, cut_over: Group) -> _Stream:
    """Add positions and token types to the stream; `cut_over`: the group that shares its positions."""
    x, token_types, lengths, positions, *dropout_seeds = stream
    token_types, *dropout_seeds = (
        own_positions(each, cut_over) for each in (token_types, *dropout_seeds)
    )
    placed = (
        {"places": own_positions(lengths.places, cut_over)}
        if isinstance(lengths, PackedRow)
        else {}
    )
    return (
        embedding(x, token_types, *dropout_seeds, **placed),
        lengths,
        positions,
        *dropout_seeds,
    )


def _attend(layer: nn.Module, stream: _Stream) -> _Stream:
    x, lengths, positions, *dropout_seeds = stream
    return layer(x, lengths, *dropout_seeds), lengths, positions, *dropout_seeds


def _head(head: nn.Module, stream: _Stream) -> _Stream:
    x, lengths, positions, *_ = stream
    firsts = lengths.firsts if isinstance(lengths, PackedRow) else None
    # torch's modules return Any
    return head(x, positions, firsts)  # type: ignore[no-any-return]


def encoder(
    shape: BertShape, group: Group, init: Init, *, tied: bool
) -> list[LayerDefinition]:
    """Return the layers before the heads; `tied`: the output layer has the words' embedding."""
    cut_over: Any = dict(cut_over=shape.positions_group(group))
    embedding = dict(shape=shape, init=init.child("embedding"), **cut_over)
    final_norm = dict(
        hidden=shape.hidden,
        init=init.child("final_norm"),
        eps=BERT_NORM_EPS,
        **cut_over,
    )
    embed = partial(_embed, **cut_over)
    return [
        word_layer(shape, group, init, cut=shape.sequence_parallel, tied=tied),
        LayerDefinition("embedding", Embedding, embedding, embed),
        *transformer_layers(shape, group, init, _attend),
        *(
            []
            if shape.post_norm
            else [LayerDefinition("final_norm", LayerNorm, final_norm)]
        ),
    ]


def layer_list(shape: BertShape, *, group: Group, init: Init) -> list[LayerDefinition]:
    """Return the layers: (tokens, token types, lengths, positions) -> (logits (B, P, V/t), sentence logits).

    Sentence logits are (B, 2), or None without a sentence head.
    """
    head = dict(
        shape=shape, init=init.child("head"), cut_over=shape.positions_group(group)
    )
    bias = dict(
        vocab=shape.vocab,
        padded=shape.padded_vocab,
        group=group,
        init=init.child("decoder_bias"),
    )
    return [
        *encoder(shape, group, init, tied=True),
        LayerDefinition("head", Head, head, _head),
        # every rank has the predicted positions
        word_layer(shape, group, init, cut=False, project=True),
        LayerDefinition("decoder_bias", DecoderBias, bias),
    ]


def pretraining_loss(
    logits: Tensor,
    sentence_logits: Tensor | None,
    labels: Tensor,
    weights: Tensor,
    sentence_labels: Tensor,
    sentence_weights: Tensor,
    group: Group,
) -> tuple[Tensor, Tensor]:
    """Return (masked-token loss + sentence loss, its parts without gradient), float32.

    Without a sentence head the masked-token loss is the only part.

    Args:
        logits: (B, P, V/t); labels and weights: (B, P). Weights are 0 where a sample predicts less than P
            tokens; scaled, micro-batches and ranks average to the mean over the step's predictions.
        sentence_logits: (B, 2), or None without a sentence head; sentence_labels and sentence_weights: (B,).
    """
    mlm = weighted_loss(logits, labels, weights, group)
    if sentence_logits is None:
        return mlm, mlm.detach().view(1)
    losses = F.cross_entropy(sentence_logits.float(), sentence_labels, reduction="none")
    sentence = (losses * sentence_weights).sum()
    right = ((sentence_logits.argmax(-1) == sentence_labels) * sentence_weights).sum()
    return mlm + sentence, torch.stack([mlm, sentence, right]).detach()


FAMILY = Family(
    "bert",
    shape_of,
    layer_list,
    pretraining_loss,
    lambda shape: parts_of(MASKED_FIGURES[shape.sentence_head]),
)


# Fine-tuning: transformers' classes compute; ours hold their weights under our names


class TaskHead(nn.Module):
    """Parameters of a task's head: pooler and classifier, or for spans two logits of every token."""

    def __init__(self, model: Model, hidden: int, *, init: Init):
        super().__init__()
        spans = model.task_head == "span"
        name = "span" if spans else "classifier"
        linear = partial(ColumnParallelLinear, hidden, group=None)
        if not spans:
            self.pooler = linear(hidden, init=init.child("pooler"))
        setattr(self, name, linear(head_outputs(model), init=init.child(name)))


def task_family(model: Model) -> Family:
    """Return the family whose plain form holds the encoder and the head of a fine-tuned model.

    It has no forward pass: `launch/evaluation/finetuning.py` trains the class of `transformers`.
    """

    def layers(shape: BertShape, *, group: Group, init: Init) -> list[LayerDefinition]:
        head = dict(model=model, hidden=shape.hidden, init=init.child("head"))
        return [
            *encoder(shape, group, init, tied=False),
            LayerDefinition("head", TaskHead, head),
        ]

    return Family("bert", shape_of, layers, pretraining_loss)
