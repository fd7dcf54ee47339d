"""GPT-2 (Radford et al. 2019) as one list of layers, in the plain form and in DeepSpeed's pipeline form.

`layer_list` is the only definition of the model. `GPT2` runs it as one module (ZeRO 0-3, with or without tensor
parallelism); `pipeline_module` hands it to DeepSpeed's `PipelineModule` (pipeline and 3D parallelism).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn

from modeling.cross_entropy import weighted_loss
from modeling.initialization import Init
from modeling.random_state import dropout
from modeling.tensor_parallel import VocabParallelEmbedding
from modeling.transformer import LayerNorm, LayerShape, TransformerLayer


@dataclass(frozen=True)
class GPT2Shape:
    """What defines the model, beside its weights."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    padded_vocab: int
    positions: int
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    checkpoint_interval: int = 0  # layers per recomputed chunk; 0: all activations are kept


@dataclass(frozen=True)
class LayerDefinition:
    """One entry of the model: how its module is made, and whether it is the tied output projection."""

    name: str
    kind: type[nn.Module]
    arguments: dict[str, Any]
    project: bool = False


class PositionEmbedding(nn.Module):
    """Adds learned positions to the word embeddings, then dropout."""

    def __init__(self, positions: int, hidden: int, probability: float, *, init: Init, std: float):
        super().__init__()
        self.dropout = probability
        self.weight = init.normal("weight", (positions, hidden), std)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, S, H), S <= positions
        return dropout(x + self.weight[: x.shape[1]], self.dropout, self.training)


def layer_list(shape: GPT2Shape, *, group: dist.ProcessGroup | None, init: Init) -> list[LayerDefinition]:
    """The model as a sequence of layers; each takes one tensor and returns one. The first and the last share a module."""
    layer = LayerShape(shape.hidden, shape.heads, shape.hidden_dropout, shape.attention_dropout)
    word = dict(vocab=shape.vocab, padded=shape.padded_vocab, hidden=shape.hidden, group=group, init=init.child("word"), std=init.std)
    position = dict(
        positions=shape.positions, hidden=shape.hidden, probability=shape.hidden_dropout, init=init.child("position"), std=init.std
    )
    return [
        LayerDefinition("word", VocabParallelEmbedding, word),
        LayerDefinition("position", PositionEmbedding, position),
        *(
            LayerDefinition(f"layers.{i}", TransformerLayer, dict(shape=layer, group=group, init=init.child(f"layers.{i}")))
            for i in range(shape.layers)
        ),
        LayerDefinition("final_norm", LayerNorm, dict(hidden=shape.hidden, init=init.child("final_norm"))),
        LayerDefinition("word", VocabParallelEmbedding, word, project=True),
    ]


class GPT2(nn.Module):
    """The plain form: forward(tokens, labels, weights) -> loss, or logits when labels are None."""

    def __init__(self, shape: GPT2Shape, *, group: dist.ProcessGroup | None, init: Init):
        super().__init__()
        self.shape, self.group, self.loss = shape, group, weighted_loss
        definitions = layer_list(shape, group=group, init=init)
        built = {d.name: d.kind(**d.arguments) for d in definitions if not d.project}
        self.word, self.position, self.final_norm = built["word"], built["position"], built["final_norm"]
        self.layers = nn.ModuleList(built[f"layers.{i}"] for i in range(shape.layers))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None, weights: torch.Tensor | None = None):
        """tokens, labels, weights (B, S) -> scalar loss; without labels -> logits (B, S, V/t)."""
        x = self.position(self.word(tokens))
        interval = self.shape.checkpoint_interval if self.training else 0
        # DeepSpeed's checkpointing restores both streams of dropout.
        for layers, recomputed in recomputed_chunks(self.layers, interval):
            run = partial(_in_turn, layers)
            x = deepspeed.checkpointing.checkpoint(run, x) if recomputed else run(x)
        logits = self.word(self.final_norm(x), project=True)
        return logits if labels is None else self.loss(logits, labels, weights, self.group)



def _in_turn(layers, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


def recomputed_chunks(layers, interval: int) -> list[tuple[list, bool]]:
    """(consecutive layers, whether to keep only their input) in order: transformer layers by `interval`, others as they are."""
    chunks: list[tuple[list, bool]] = []
    for layer in layers:
        recomputed = interval > 0 and isinstance(layer, TransformerLayer)
        if recomputed and chunks and chunks[-1][1] and len(chunks[-1][0]) < interval:
            chunks[-1][0].append(layer)
        else:
            chunks.append(([layer], recomputed))
    return chunks


class Pipeline(PipelineModule):
    """DeepSpeed's stage, with recomputed chunks that begin at a transformer layer.

    DeepSpeed cuts chunks from the first layer of the stage, whatever it is, and recomputes none that holds an embedding.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        interval = self.activation_checkpoint_interval if self.training else 0
        for layers, recomputed in recomputed_chunks(self.forward_funcs, interval):
            run = partial(_in_turn, layers)
            x = self.activation_checkpoint_func(run, x) if recomputed else run(x)
        return x


def _project(module: VocabParallelEmbedding, x: torch.Tensor) -> torch.Tensor:
    return module(x, project=True)


def pipeline_module(shape: GPT2Shape, *, grid, group: dist.ProcessGroup | None, init: Init) -> PipelineModule:
    """The same layers as DeepSpeed pipeline stages with equally many transformer layers; first and last share the embedding."""

    def specification(d: LayerDefinition) -> LayerSpec:
        if d.name == "word":
            return TiedLayerSpec("word", d.kind, forward_fn=_project if d.project else None, **d.arguments)
        return LayerSpec(d.kind, **d.arguments)

    def loss(logits, labels_and_weights):
        labels, weights = labels_and_weights
        return weighted_loss(logits, labels, weights, group)

    return Pipeline(
        [specification(d) for d in layer_list(shape, group=group, init=init)],
        topology=PipeModelDataParallelTopology(num_pp=grid.pp, num_mp=grid.tp, num_dp=grid.dp),
        loss_fn=loss,
        partition_method=f"type:^{TransformerLayer.__name__}$",
        activation_checkpoint_interval=shape.checkpoint_interval,
        checkpointable_layers=[TransformerLayer.__name__],
    )
