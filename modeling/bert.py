"""BERT (Devlin et al., arXiv 1810.04805): its shape, layers and losses, and its heads for tasks.

Two placements of LayerNorm, with equally many parameters. Post-LN is the original: on the embeddings and
after each residual sum. Pre-LN is Megatron-BERT's (arXiv 1909.08053, section 3 and figure 1b): before each
branch and once after the last layer, and not on the embeddings, as `transformers` has it in MegatronBert.

A task's classification is `transformers`' BertForSequenceClassification, choices are BertForMultipleChoice,
and spans BertForQuestionAnswering, except that the softmax here leaves padding out.

Shapes: B samples, S positions, P predicted positions, H hidden size, V vocabulary (V/t: of this tensor rank);
of a task C classes or choices, N examples: B, or B / C where each choice is a sample of its own.
The plain form also takes samples without their padding, as one row (`modeling/unpadding.py`): then B is 1
except in the sentence objective, S counts the tokens of the row, and P all of its predictions.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    Loss,
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
from modeling.unpadding import PackedRow, padding_mask
from recipes.families import MASKED_FIGURES, TASK_FIGURES, parts_of
from recipes.schema import Recipe


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
        salts: Tensor | None = None,
        places: Tensor | None = None,
    ) -> Tensor:
        """x (B, S, H), token_types (B, S) of 0 and 1; salts (B, S, 2) of hidden dropout in training.

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
        return self.dropout(x, salts)


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
# The first two end with the salts of hidden dropout where there are any. Instead of lengths, a Row.
# A task's streams lack the positions: `inputs` is the number of tensors before the salts, 4 or 3.


def _embed(embedding: nn.Module, stream: tuple, cut_over: Group, inputs: int) -> tuple:
    """Add positions and token types to the stream; `cut_over`: the group that shares its positions."""
    x, token_types, lengths = stream[:3]
    token_types, *salts = (
        own_positions(each, cut_over) for each in (token_types, *stream[inputs:])
    )
    placed = (
        {"places": own_positions(lengths.places, cut_over)}
        if isinstance(lengths, PackedRow)
        else {}
    )
    return (
        embedding(x, token_types, *salts, **placed),
        lengths,
        *stream[3:inputs],
        *salts,
    )


def _attend(layer: nn.Module, stream: tuple, inputs: int) -> tuple:
    x, lengths, *others = stream
    return layer(x, lengths, *others[inputs - 3 :]), lengths, *others


def _head(head: nn.Module, stream: tuple) -> tuple:
    x, lengths, positions, *_ = stream
    firsts = lengths.firsts if isinstance(lengths, PackedRow) else None
    return head(x, positions, firsts)


def encoder(
    shape: BertShape, group: Group, init: Init, inputs: int
) -> list[LayerDefinition]:
    """Return the layers before the heads: `inputs` tensors -> (x, lengths, ...), whatever head follows."""
    cut_over: Any = dict(cut_over=shape.positions_group(group))
    embedding = dict(shape=shape, init=init.child("embedding"), **cut_over)
    final_norm = dict(
        hidden=shape.hidden,
        init=init.child("final_norm"),
        eps=BERT_NORM_EPS,
        **cut_over,
    )
    embed = partial(_embed, **cut_over, inputs=inputs)
    attend = partial(_attend, inputs=inputs)
    tied = inputs == 4  # to the output layer, which a task has not
    return [
        word_layer(shape, group, init, cut=shape.sequence_parallel, tied=tied),
        LayerDefinition("embedding", Embedding, embedding, embed),
        *transformer_layers(shape, group, init, attend),
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
        *encoder(shape, group, init, inputs=4),
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


# Fine-tuning: the encoder with a head for a task


@dataclass(frozen=True)
class TaskShape(BertShape):
    """Shape of a BERT with a task head: kind, logits per sample (spans: per token), choices per example."""

    task_head: str = "classification"
    outputs: int = 2
    choices: int = 1


def task_shape_of(recipe: Recipe, padded_vocab: int) -> TaskShape:
    """Return the shape of the recipe's model, with `padded_vocab` rows of the embedding."""
    model = recipe.model
    encoder = vars(shape_of(recipe, padded_vocab))
    choices = model.head_classes if model.task_head == "choice" else 1
    return TaskShape(
        **encoder,
        task_head=model.task_head,
        outputs=head_outputs(model),
        choices=choices,
    )


class SampleHead(nn.Module):
    """Logits of whole samples: pooler (dense and tanh of [CLS]), dropout, dense. On every tensor rank."""

    def __init__(self, shape: TaskShape, *, init: Init, cut_over: Group = None):
        super().__init__()
        self.logits = shape.outputs * shape.choices
        self.cut_over = cut_over
        linear = partial(ColumnParallelLinear, shape.hidden, group=None)
        self.pooler = linear(shape.hidden, init=init.child("pooler"))
        self.dropout = HiddenDropout(
            shape.hidden, shape.hidden_dropout, init=init.child("dropout")
        )
        self.classifier = linear(shape.outputs, init=init.child("classifier"))

    def forward(
        self, x: Tensor, lengths: Tensor | PackedRow | None, salts: Tensor | None = None
    ) -> Tensor:
        """x (B, S, H) or a row -> (N, C)."""
        # Every rank computes the same from here on.
        x = _first(gather_positions(x, self.cut_over, summed=False), lengths)
        if salts is not None:
            salts = _first(
                gather_positions(salts, self.cut_over, summed=False), lengths
            )
        pooled = self.dropout(torch.tanh(self.pooler(x)), salts)
        logits: Tensor = self.classifier(pooled).view(-1, self.logits)
        return logits


def _first(x: Tensor, lengths: Tensor | PackedRow | None) -> Tensor:
    """Return the [CLS] entries (B, 1, ...) of (B, S, ...) or of a row (1, T, ...)."""
    return (
        x[0, lengths.firsts.long()][:, None]
        if isinstance(lengths, PackedRow)
        else x[:, :1]
    )


class SpanHead(nn.Module):
    """Two logits of every token, for the start and the end of an answer. On every tensor rank."""

    def __init__(self, shape: TaskShape, *, init: Init, cut_over: Group = None):
        super().__init__()
        self.cut_over = cut_over
        self.span = ColumnParallelLinear(
            shape.hidden, shape.outputs, group=None, init=init.child("span")
        )

    def forward(
        self, x: Tensor, lengths: Tensor | PackedRow | None, salts: Tensor | None = None
    ) -> Tensor:
        """x (B, S, H) or a row -> (B, S, 2) in float32, -inf at padding; a row's S is its longest length."""
        logits = self.span(gather_positions(x, self.cut_over, summed=False)).float()
        if isinstance(lengths, PackedRow):
            counts = lengths.offsets.diff()[:-1].long()
            places = torch.arange(lengths.longest, device=x.device)
            at = lengths.firsts.long()[:, None] + places.minimum(counts[:, None] - 1)
            logits = logits[0, at]
            lengths = counts
        if lengths is None:
            return logits
        real = padding_mask(lengths, logits.shape[1])[:, 0, 0, :, None]
        return logits.masked_fill(~real, float("-inf"))


def task_layer_list(
    shape: TaskShape, *, group: Group, init: Init
) -> list[LayerDefinition]:
    """Return the layers: (tokens, token types, lengths) -> logits (N, C) or (B, S, 2)."""
    head = dict(
        shape=shape, init=init.child("head"), cut_over=shape.positions_group(group)
    )
    kind = SpanHead if shape.task_head == "span" else SampleHead
    return [
        *encoder(shape, group, init, inputs=3),
        LayerDefinition("head", kind, head, lambda head, stream: head(*stream)),
    ]


def class_loss(
    logits: Tensor, labels: Tensor, weights: Tensor, group: Group
) -> tuple[Tensor, Tensor]:
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
    of_starts = F.cross_entropy(logits[..., 0].float(), starts, reduction="none")
    of_ends = F.cross_entropy(logits[..., 1].float(), ends, reduction="none")
    losses = of_starts + of_ends
    best = logits.argmax(1)
    begins_right = best[:, 0] == starts
    ends_right = best[:, 1] == ends
    right = ((begins_right & ends_right) * weights).sum()
    return (losses * weights).sum() / 2, right.detach().view(1)


TASK_LOSSES: Mapping[str, Loss] = {
    "classification": class_loss,
    "span": span_loss,
    "choice": class_loss,
}


def _task_family(head: str) -> Family:
    return Family(
        head,
        task_shape_of,
        task_layer_list,
        TASK_LOSSES[head],
        lambda shape: parts_of(TASK_FIGURES),
    )


TASK_FAMILIES: Mapping[str, Family] = {head: _task_family(head) for head in TASK_LOSSES}
