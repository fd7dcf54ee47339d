"""BERT (Devlin et al., arXiv 1810.04805): its shape, its list of layers, its losses, and the model as one module.

Two placements of LayerNorm. Post-LN is the original; it normalises the embeddings and after each residual sum. Pre-LN is
Megatron-BERT's (arXiv 1909.08053, section 3 and figure 1b); it normalises before each branch and once after the last layer, and
not the embeddings, as `transformers` has it in MegatronBert. Both have the same number of parameters.

Shapes: B samples, S positions, P predicted positions per sample, H hidden size, V vocabulary (V/t: of this tensor rank).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from modeling.initialization import Init, Shard
from modeling.layer_list import LayerDefinition, ModelShape, Stack, pipeline_module
from modeling.parallel.cross_entropy import weighted_loss
from modeling.parallel.layers import ColumnParallelLinear, VocabParallelEmbedding
from modeling.parallel.random_state import dropout
from modeling.transformer import LayerNorm, LayerShape, TransformerLayer

NORM_EPS = 1e-12  # of the original implementation
SENTENCE_CLASSES = 2  # nsp: B follows A, or is random; sop: in order, or swapped
LOSS_PARTS = ("mlm_loss", "sentence_loss", "sentence_accuracy")


@dataclass(frozen=True)
class BertShape(ModelShape):
    """With what a BERT can choose."""

    post_norm: bool = False
    sentence_head: Literal["none", "nsp", "sop"] = "none"

    @property
    def layer(self) -> LayerShape:
        return LayerShape(
            self.hidden, self.heads, self.hidden_dropout, self.attention_dropout,
            causal=False, post_norm=self.post_norm, tanh_gelu=False, norm_eps=NORM_EPS,
        )  # fmt: skip


class Embedding(nn.Module):
    """Adds learned positions and token types (segments A and B) to the word embeddings; LayerNorm if post-LN; dropout."""

    def __init__(
        self, positions: int, hidden: int, probability: float, normalised: bool, *, init: Init, std: float
    ):
        super().__init__()
        self.dropout = probability
        self.position = init.normal("position", (positions, hidden), std)
        self.token_type = init.normal("token_type", (2, hidden), std)
        self.norm = LayerNorm(hidden, init=init.child("norm"), eps=NORM_EPS) if normalised else None

    def forward(
        self, x: torch.Tensor, token_types: torch.Tensor
    ) -> torch.Tensor:  # (B, S, H), (B, S) of 0 and 1 -> (B, S, H)
        x = x + self.position[: x.shape[1]] + F.embedding(token_types, self.token_type)
        return dropout(x if self.norm is None else self.norm(x), self.dropout, self.training)


class Head(nn.Module):
    """What comes before the tied decoder, and the sentence head; duplicated on every tensor rank.

    Masked tokens: dense, GELU, LayerNorm, at the predicted positions alone. Sentences: pooler (dense and tanh of [CLS]), then two logits.
    """

    def __init__(self, hidden: int, sentences: bool, *, init: Init):
        super().__init__()
        dense = dict(group=None, std=init.std)
        self.transform = ColumnParallelLinear(hidden, hidden, init=init.child("transform"), **dense)
        self.norm = LayerNorm(hidden, init=init.child("norm"), eps=NORM_EPS)
        self.pooler = (
            ColumnParallelLinear(hidden, hidden, init=init.child("pooler"), **dense) if sentences else None
        )
        self.sentence = (
            ColumnParallelLinear(hidden, SENTENCE_CLASSES, init=init.child("sentence"), **dense)
            if sentences
            else None
        )

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x (B, S, H), positions (B, P) or None for all -> (B, P, H) for the decoder, sentence logits (B, 2) or None."""
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


# What each layer does with the stream: (tokens, token types, lengths, positions) -> (x, lengths, positions) -> (logits, sentence logits)


def _embed_words(word, stream):
    tokens, *others = stream
    return (word(tokens), *others)


def _embed(embedding, stream):
    x, token_types, lengths, positions = stream
    return embedding(x, token_types), lengths, positions


def _attend(layer, stream):
    x, lengths, positions = stream
    return layer(x, lengths), lengths, positions


def _normalise(norm, stream):
    x, *others = stream
    return (norm(x), *others)


def _head(head, stream):
    x, _, positions = stream
    return head(x, positions)


def _decode(word, stream):
    x, sentence_logits = stream
    return word(x, project=True), sentence_logits


def _add_bias(decoder_bias, stream):
    logits, sentence_logits = stream
    return decoder_bias(logits), sentence_logits


def layer_list(shape: BertShape, *, group: dist.ProcessGroup | None, init: Init) -> list[LayerDefinition]:
    """(tokens, token types, lengths, positions) -> (logits (B, P, V/t), sentence logits (B, 2) or None)."""
    word = dict(
        vocab=shape.vocab,
        padded=shape.padded_vocab,
        hidden=shape.hidden,
        group=group,
        init=init.child("word"),
        std=init.std,
    )
    embedding = dict(
        positions=shape.positions, hidden=shape.hidden, probability=shape.hidden_dropout, normalised=shape.post_norm,
        init=init.child("embedding"), std=init.std,
    )  # fmt: skip
    final_norm = dict(hidden=shape.hidden, init=init.child("final_norm"), eps=NORM_EPS)
    bias = dict(vocab=shape.vocab, padded=shape.padded_vocab, group=group, init=init.child("decoder_bias"))
    return [
        LayerDefinition("word", VocabParallelEmbedding, word, _embed_words, tied=True),
        LayerDefinition("embedding", Embedding, embedding, _embed),
        *(
            LayerDefinition(
                f"layers.{i}",
                TransformerLayer,
                dict(shape=shape.layer, group=group, init=init.child(f"layers.{i}")),
                _attend,
            )
            for i in range(shape.layers)
        ),
        *([] if shape.post_norm else [LayerDefinition("final_norm", LayerNorm, final_norm, _normalise)]),
        LayerDefinition(
            "head",
            Head,
            dict(hidden=shape.hidden, sentences=shape.sentence_head != "none", init=init.child("head")),
            _head,
        ),
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
        logits: (B, P, V/t); labels and weights: (B, P). Weights are 0 where a sample predicts less than P tokens, and scaled so
            that micro-batches and ranks average to the mean over the predictions of the step.
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


class Bert(Stack):
    """The plain form."""

    def __init__(self, shape: BertShape, *, group: dist.ProcessGroup | None, init: Init):
        super().__init__(layer_list(shape, group=group, init=init), shape.checkpoint_interval)
        self.shape, self.group, self.loss = shape, group, pretraining_loss

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
    ):
        """tokens, token_types (B, S); lengths (B,) or None where nothing is padded; positions, labels, weights (B, P); the rest (B,).

        Returns what `pretraining_loss` does; without labels (logits (B, P, V/t), sentence logits (B, 2) or None), where positions None
        stands for all S.
        """
        logits, sentence_logits = self.run((tokens, token_types, lengths, positions))
        if labels is None:
            return logits, sentence_logits
        return self.loss(
            logits, sentence_logits, labels, weights, sentence_labels, sentence_weights, self.group
        )


class PipelineLoss:
    """The loss of the last stage, on its logits and on (labels, weights, sentence_labels, sentence_weights)."""

    def __init__(self, group: dist.ProcessGroup | None, parts: int):
        self.group, self.function, self.part_count = group, pretraining_loss, parts
        self.parts: list[torch.Tensor] = []  # of the micro-batches since `take_parts`

    def __call__(self, stream, targets) -> torch.Tensor:
        loss, parts = self.function(*stream, *targets, self.group)
        self.parts.append(parts)
        return loss

    def take_parts(self) -> torch.Tensor | None:
        """(micro-batches, parts) since the last call; None on the other stages."""
        taken, self.parts = self.parts, []
        return torch.stack(taken) if taken else None


def bert_pipeline(shape: BertShape, *, grid, group: dist.ProcessGroup | None, init: Init):
    """The pipeline form: inputs are (tokens, token_types, lengths, positions), targets those of `PipelineLoss`."""
    definitions = layer_list(shape, group=group, init=init)
    loss = PipelineLoss(group, parts=1 if shape.sentence_head == "none" else len(LOSS_PARTS))
    return pipeline_module(definitions, loss, grid=grid, checkpoint_interval=shape.checkpoint_interval)
