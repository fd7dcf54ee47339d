"""A model as one list of layers, in the plain form and in DeepSpeed's pipeline form.

A family (`gpt2.py`, `bert.py`) defines its layers once, each with how it acts on the *stream*: what one layer
hands to the next. That is one tensor, or a tuple whose first entry is the residual stream x (B, S, H) and
whose others ride along: integers that later layers need, such as lengths. `Stack` holds all layers as one
module (ZeRO 0-3, with or without tensor parallelism); `pipeline_module` hands them to DeepSpeed's
`PipelineModule` (pipeline and 3D parallelism).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn

from modeling.initialization import Init
from modeling.parallel.process_grid import ProcessGrid
from modeling.transformer import LayerShape, TransformerLayer

Stream = Any  # a tensor, or a tuple of tensors and None
Apply = Callable[[nn.Module, Any], Any]  # (layer, stream) -> stream
# (what the last layer gives, targets, group) -> the loss, or (the loss, its parts without gradient)
Loss = Callable[..., Any]


def call(module: nn.Module, stream: Stream) -> Stream:
    """The layer takes the stream as it is."""
    return module(stream)


@dataclass(frozen=True)
class LayerDefinition:
    """One entry of the model: how its module is made and what it does with the stream.

    Entries of one name share one module; later ones are the tied uses of it (`tied` says so for both).
    """

    name: str
    kind: type[nn.Module]
    arguments: dict[str, Any]
    apply: Apply = call
    tied: bool = False


@dataclass(frozen=True)
class ModelShape:
    """What defines a model of any family, besides its weights."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    padded_vocab: int
    positions: int
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    checkpoint_interval: int = 0  # layers per recomputed chunk; 0: all activations are kept

    def layer_at(self, index: int) -> LayerShape:
        """Shape of one transformer layer."""
        raise NotImplementedError

    def layer_kinds(self) -> dict[LayerShape, int]:
        """How many layers there are of each shape, in the order in which the shapes first occur."""
        layers = [self.layer_at(i) for i in range(self.layers)]
        return {kind: layers.count(kind) for kind in dict.fromkeys(layers)}


LayerList = Callable[..., list[LayerDefinition]]  # (shape, group=, init=) -> the layers in order


def word_embedding(shape: ModelShape, group: dist.ProcessGroup | None, init: Init) -> dict[str, Any]:
    """Arguments of the tied word embedding, called "word"."""
    return dict(
        vocab=shape.vocab, padded=shape.padded_vocab, hidden=shape.hidden,
        group=group, init=init.child("word"), std=init.std,
    )  # fmt: skip


def transformer_layers(
    shape: ModelShape, group: dist.ProcessGroup | None, init: Init, apply: Apply = call
) -> list[LayerDefinition]:
    """The layers between the embeddings and the final norm or the heads, called "layers.N"."""

    def layer(i: int) -> LayerDefinition:
        arguments = dict(shape=shape.layer_at(i), group=group, init=init.child(f"layers.{i}"))
        return LayerDefinition(f"layers.{i}", TransformerLayer, arguments, apply)

    return [layer(i) for i in range(shape.layers)]


class Stack(nn.Module):
    """The plain form: every layer in one module, of which `layers` holds the transformer layers.

    `loss` is what the family computes from the last layer; `loss_parts` are the names of its parts.
    """

    def __init__(
        self,
        definitions: Sequence[LayerDefinition],
        shape: ModelShape,
        *,
        group: dist.ProcessGroup | None,
        loss: Loss,
        loss_parts: tuple[str, ...] = (),
    ):
        super().__init__()
        self.shape, self.group, self.loss, self.loss_parts = shape, group, loss, loss_parts
        built: dict[str, nn.Module] = {}
        for d in definitions:
            if d.name not in built:
                built[d.name] = d.kind(**d.arguments)
        transformer = [module for name, module in built.items() if name.startswith("layers.")]
        for name, module in built.items():
            if not name.startswith("layers."):
                self.add_module(name, module)
        self.layers = nn.ModuleList(transformer)
        self._in_order = [(d.apply, built[d.name]) for d in definitions]

    def run(self, stream: Stream) -> Stream:
        """Every layer in turn."""
        interval = self.shape.checkpoint_interval if self.training else 0
        # DeepSpeed's checkpointing restores both streams of dropout.
        return run_layers(self._in_order, stream, interval, deepspeed.checkpointing.checkpoint)


class PipelineLoss:
    """The loss of the last stage, on the stream and on its targets; keeps its parts for `take_parts`."""

    def __init__(self, function: Loss, group: dist.ProcessGroup | None, part_names: tuple[str, ...]):
        self.function, self.group, self.part_names = function, group, part_names
        self.parts: list[torch.Tensor] = []  # of the micro-batches since `take_parts`

    def __call__(self, stream: Stream, targets: tuple[torch.Tensor, ...]) -> torch.Tensor:
        outputs = stream if isinstance(stream, tuple) else (stream,)
        outcome = self.function(*outputs, *targets, self.group)
        loss, *parts = outcome if isinstance(outcome, tuple) else (outcome,)
        self.parts += parts
        return loss

    def take_parts(self) -> torch.Tensor | None:
        """(micro-batches, parts) since the last call; None on the other stages."""
        taken, self.parts = self.parts, []
        return torch.stack(taken) if taken else None


class Pipeline(PipelineModule):
    """DeepSpeed's stage, with recomputed chunks that begin at a transformer layer.

    DeepSpeed cuts chunks from the first layer of the stage, whatever it is, and recomputes none that holds an
    embedding.
    """

    def __init__(self, definitions: Sequence[LayerDefinition], loss: PipelineLoss, **options: Any):
        super().__init__([_specification(d) for d in definitions], loss_fn=loss, **options)
        self.loss_parts = loss.part_names
        self._applies = [d.apply for d in definitions[self._local_start : self._local_stop]]

    def forward(self, stream: Stream) -> Stream:
        interval = self.activation_checkpoint_interval if self.training else 0
        layers = list(zip(self._applies, self.forward_funcs, strict=True))
        return run_layers(layers, stream, interval, self.activation_checkpoint_func)


def _specification(d: LayerDefinition) -> LayerSpec:
    return TiedLayerSpec(d.name, d.kind, **d.arguments) if d.tied else LayerSpec(d.kind, **d.arguments)


def pipeline_module(
    definitions: Sequence[LayerDefinition], loss: PipelineLoss, *, grid: ProcessGrid, checkpoint_interval: int
) -> Pipeline:
    """The layers as DeepSpeed pipeline stages with equally many transformer layers."""
    return Pipeline(
        definitions,
        loss,
        topology=PipeModelDataParallelTopology(num_pp=grid.pp, num_mp=grid.tp, num_dp=grid.dp),
        partition_method=f"type:^{TransformerLayer.__name__}$",
        activation_checkpoint_interval=checkpoint_interval,
        checkpointable_layers=[TransformerLayer.__name__],
    )


def run_layers(
    layers: Sequence[tuple[Apply, nn.Module]], stream: Stream, interval: int, checkpoint: Callable
) -> Stream:
    """Every layer in turn; `checkpoint` recomputes transformer layers in chunks of `interval` (0: none)."""
    for chunk, recomputed in recomputed_chunks(layers, interval):
        if not recomputed:
            stream = _in_turn(chunk, stream)
        elif isinstance(stream, torch.Tensor):
            stream = checkpoint(partial(_in_turn, chunk), stream)
        else:  # only x changes in a transformer layer; what rides along is no output of the recomputation
            x, *others = stream
            stream = (checkpoint(partial(_first_in_turn, chunk), x, *others), *others)
    return stream


def _in_turn(layers: Sequence[tuple[Apply, nn.Module]], stream: Stream) -> Stream:
    for apply, layer in layers:
        stream = apply(layer, stream)
    return stream


def _first_in_turn(layers: Sequence[tuple[Apply, nn.Module]], *stream: torch.Tensor | None) -> torch.Tensor:
    return _in_turn(layers, stream)[0]


def recomputed_chunks(layers: Sequence[tuple[Apply, nn.Module]], interval: int) -> list[tuple[list, bool]]:
    """(consecutive layers, whether to keep only their input) in order.

    Transformer layers by `interval`, others as they are.
    """
    chunks: list[tuple[list, bool]] = []
    for apply, layer in layers:
        recomputed = interval > 0 and isinstance(layer, TransformerLayer)
        if recomputed and chunks and chunks[-1][1] and len(chunks[-1][0]) < interval:
            chunks[-1][0].append((apply, layer))
        else:
            chunks.append(([(apply, layer)], recomputed))
    return chunks
