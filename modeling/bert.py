"""BERT (Devlin et al., arXiv 1810.04805): its shape, layers and losses, and the model as one module.

Two placements of LayerNorm. Post-LN is the original; it normalises the embeddings and after each residual
sum. Pre-LN is Megatron-BERT's (arXiv 1909.08053, section 3 and figure 1b); it normalises before each branch
and once after the last layer, and not the embeddings, as `transformers` has it in MegatronBert. Both have the
same number of parameters.

Shapes: B samples, S positions, P predicted positions per sample, H hidden size, V vocabulary (V/t: of this
tensor rank).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from modeling.cost.families import SENTENCE_CLASSES, TOKEN_TYPES
from modeling.family import Family, common_shape
from modeling.generation import fill_prompt
from modeling.huggingface import bert
from modeling.initialization import Init, Shard
from modeling.layer_list import LayerDefinition, ModelShape, Stack, transformer_layers, word_embedding
from modeling.parallel.cross_entropy import weighted_loss
from modeling.parallel.layers import ColumnParallelLinear, VocabParallelEmbedding
from modeling.parallel.random_state import dropout
from modeling.transformer import BERT_NORM_EPS, LayerNorm, LayerShape
from recipes.schema import Recipe

LOSS_PARTS = ("mlm_loss", "sentence_loss", "sentence_accuracy")


@dataclass(frozen=True)
class BertShape(ModelShape):
    """With what a BERT can choose."""

    post_norm: bool = False
    sentence_head: Literal["none", "nsp", "sop"] = "none"

    def layer_at(self, index: int) -> LayerShape:
        return LayerShape(
            self.hidden, self.heads, self.hidden_dropout, self.attention_dropout,
            causal=False, post_norm=self.post_norm, tanh_gelu=False, norm_eps=BERT_NORM_EPS,
        )  # fmt: skip


def shape_of(recipe: Recipe, padded_vocab: int) -> BertShape:
    """The recipe's model, with `padded_vocab` rows of the embedding."""
    model = recipe.model
    return BertShape(
        **common_shape(recipe, padded_vocab),
        post_norm=model.layer_norm == "post",
        sentence_head=model.sentence_head,
    )


class Embedding(nn.Module):
    """Adds learned positions and token types (segments A and B) to the word embeddings.

    LayerNorm if post-LN, then dropout.
    """

    def __init__(
        self, positions: int, hidden: int, probability: float, normalised: bool, *, init: Init, std: float
    ):
        super().__init__()
        self.dropout = probability
        self.position = init.normal("position", (positions, hidden), std)
        self.token_type = init.normal("token_type", (TOKEN_TYPES, hidden), std)
        self.norm = LayerNorm(hidden, init=init.child("norm"), eps=BERT_NORM_EPS) if normalised else None

    def forward(
        self, x: torch.Tensor, token_types: torch.Tensor
    ) -> torch.Tensor:  # (B, S, H), (B, S) of 0 and 1 -> (B, S, H)
        x = x + self.position[: x.shape[1]] + F.embedding(token_types, self.token_type)
        return dropout(x if self.norm is None else self.norm(x), self.dropout, self.training)


class Head(nn.Module):
    """What comes before the tied decoder, and the sentence head; duplicated on every tensor rank.

    Masked tokens: dense, GELU, LayerNorm, at the predicted positions alone. Sentences: pooler (dense and tanh
    of [CLS]), then two logits.
    """

    def __init__(self, hidden: int, sentences: bool, *, init: Init):
        super().__init__()
        linear = partial(ColumnParallelLinear, hidden, group=None, std=init.std)
        self.transform = linear(hidden, init=init.child("transform"))
        self.norm = LayerNorm(hidden, init=init.child("norm"), eps=BERT_NORM_EPS)
        self.pooler = linear(hidden, init=init.child("pooler")) if sentences else None
        self.sentence = linear(SENTENCE_CLASSES, init=init.child("sentence")) if sentences else None

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the decoder takes (B, P, H), and sentence logits (B, 2) or None, of x (B, S, H).

        positions: (B, P), or None for all S.
        """
        chosen = x if positions is None else x.gather(1, positions.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        decoded = self.norm(F.gelu(self.transform(chosen)))
        if self.pooler is None or self.sentence is None:
            return decoded, None
        return decoded, self.sentence(torch.tanh(self.pooler(x[:, 0])))


class DecoderBias(nn.Module):
    """The decoder's own bias, cut over the vocabulary like the embedding that it is tied to."""

    def __init__(self, vocab: int, padded: int, *, group: dist.ProcessGroup | None, init: Init):
        super().__init__()
        self.bias = init.zeros("bias", (vocab,), shard=Shard.over(group, 0, padded))

    def forward(self, logits: torch.Tensor) -> torch.Tensor:  # (B, P, V/t), without padding when t = 1
        return logits + self.bias[: logits.shape[-1]]


# What each layer does with the stream: (tokens, token types, lengths, positions) -> (x, lengths, positions)
# -> (logits, sentence logits)


def _embed_words(word: nn.Module, stream: tuple) -> tuple:
    tokens, *others = stream
    return (word(tokens), *others)


def _embed(embedding: nn.Module, stream: tuple) -> tuple:
    x, token_types, lengths, positions = stream
    return embedding(x, token_types), lengths, positions


def _attend(layer: nn.Module, stream: tuple) -> tuple:
    x, lengths, positions = stream
    return layer(x, lengths), lengths, positions


def _normalise(norm: nn.Module, stream: tuple) -> tuple:
    x, *others = stream
    return (norm(x), *others)


def _head(head: nn.Module, stream: tuple) -> tuple:
    x, _, positions = stream
    return head(x, positions)


def _decode(word: nn.Module, stream: tuple) -> tuple:
    x, sentence_logits = stream
    return word(x, project=True), sentence_logits


def _add_bias(decoder_bias: nn.Module, stream: tuple) -> tuple:
    logits, sentence_logits = stream
    return decoder_bias(logits), sentence_logits


def layer_list(shape: BertShape, *, group: dist.ProcessGroup | None, init: Init) -> list[LayerDefinition]:
    """(tokens, token types, lengths, positions) -> (logits (B, P, V/t), sentence logits (B, 2) or None)."""
    word = word_embedding(shape, group, init)
    embedding = dict(
        positions=shape.positions, hidden=shape.hidden, probability=shape.hidden_dropout,
        normalised=shape.post_norm,
        init=init.child("embedding"), std=init.std,
    )  # fmt: skip
    final_norm = dict(hidden=shape.hidden, init=init.child("final_norm"), eps=BERT_NORM_EPS)
    head = dict(hidden=shape.hidden, sentences=shape.sentence_head != "none", init=init.child("head"))
    bias = dict(vocab=shape.vocab, padded=shape.padded_vocab, group=group, init=init.child("decoder_bias"))
    return [
        LayerDefinition("word", VocabParallelEmbedding, word, _embed_words, tied=True),
        LayerDefinition("embedding", Embedding, embedding, _embed),
        *transformer_layers(shape, group, init, _attend),
        *([] if shape.post_norm else [LayerDefinition("final_norm", LayerNorm, final_norm, _normalise)]),
        LayerDefinition("head", Head, head, _head),
        LayerDefinition("word", VocabParallelEmbedding, word, _decode, tied=True),
        LayerDefinition("decoder_bias", DecoderBias, bias, _add_bias),
    ]


def pretraining_loss(
    logits: torch.Tensor,
    sentence_logits: torch.Tensor | None,
    labels: torch.Tensor,
    weights: torch.Tensor,
    sentence_labels: torch.Tensor,
    sentence_weights: torch.Tensor,
    group: dist.ProcessGroup | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(masked-token loss + sentence loss, its parts in the order of `LOSS_PARTS`, without gradient), float32.

    Without a sentence head the masked-token loss is the only part.

    Args:
        logits: (B, P, V/t); labels and weights: (B, P). Weights are 0 where a sample predicts less than P
            tokens, and scaled so that micro-batches and ranks average to the mean over the predictions of the
            step.
        sentence_logits: (B, 2), or None without a sentence head; sentence_labels and sentence_weights: (B,).
    """
    mlm = weighted_loss(logits, labels, weights, group)
    if sentence_logits is None:
        return mlm, mlm.detach().view(1)
    sentence = (
        F.cross_entropy(sentence_logits.float(), sentence_labels, reduction="none") * sentence_weights
    ).sum()
    right = ((sentence_logits.argmax(-1) == sentence_labels) * sentence_weights).sum()
    return mlm + sentence, torch.stack([mlm, sentence, right]).detach()


def loss_parts(shape: BertShape) -> tuple[str, ...]:
    """Names of the parts that `pretraining_loss` returns."""
    return LOSS_PARTS[:1] if shape.sentence_head == "none" else LOSS_PARTS


class Bert(Stack):
    """The plain form."""

    def __init__(self, shape: BertShape, *, group: dist.ProcessGroup | None, init: Init):
        super().__init__(
            layer_list(shape, group=group, init=init), shape,
            group=group, loss=pretraining_loss, loss_parts=loss_parts(shape),
        )  # fmt: skip

    def forward(
        self,
        tokens: torch.Tensor,
        token_types: torch.Tensor,
        lengths: torch.Tensor | None,
        positions: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
        sentence_labels: torch.Tensor | None = None,
        sentence_weights: torch.Tensor | None = None,
    ) -> Any:
        """The losses of a micro-batch, or its logits.

        tokens, token_types (B, S); lengths (B,) or None where nothing is padded; positions, labels, weights
        (B, P); the rest (B,).

        Returns what `pretraining_loss` does; without labels (logits (B, P, V/t), sentence logits (B, 2) or
        None), where positions None stands for all S.
        """
        logits, sentence_logits = self.run((tokens, token_types, lengths, positions))
        if labels is None:
            return logits, sentence_logits
        targets = labels, weights, sentence_labels, sentence_weights
        return self.loss(logits, sentence_logits, *targets, self.group)


FAMILY = Family(
    name="bert",
    shape=shape_of,
    layer_list=layer_list,
    plain=Bert,
    loss=pretraining_loss,
    loss_parts=loss_parts,
    conversion=bert.CONVERSION,
    answer=fill_prompt,
)
