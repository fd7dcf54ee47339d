"""A model as one list of layers, in the plain form and in DeepSpeed's pipeline form.

A family (`gpt2.py`, `bert.py`) defines its layers once, each with how it acts on the *stream*: what one layer hands to the
next. That is one tensor, or a tuple whose first entry is the residual stream x (B, S, H) and whose others ride along:
integers that later layers need, such as lengths. `Stack` holds all layers as one module (ZeRO 0-3, with or without tensor
parallelism); `pipeline_module` hands them to DeepSpeed's `PipelineModule` (pipeline and 3D parallelism).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn

from modeling.transformer import TransformerLayer

Stream = torch.Tensor | tuple[torch.Tensor | None, ...]
Apply = Callable[[nn.Module, Any], Any]  # (layer, stream) -> stream


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
    """What defines a model of any family, beside its weights."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    padded_vocab: int
    positions: int
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    checkpoint_interval: int = 0  # layers per recomputed chunk; 0: all activations are kept
    windows: tuple[
        int | None, ...
    ] = ()  # of banded attention, by layer; None: a dense layer; (): all are dense

    def window(self, layer: int) -> int | None:
        assert len(self.windows) in (0, self.layers), f"{len(self.windows)} windows for {self.layers} layers"
        return self.windows[layer] if self.windows else None


class Stack(nn.Module):
    """The plain form: every layer in one module; `layers` holds the transformer layers, the others go by their names."""

    def __init__(self, definitions: Sequence[LayerDefinition], checkpoint_interval: int):
        super().__init__()
        self.checkpoint_interval = (
            checkpoint_interval  # layers per recomputed chunk; 0: all activations are kept
        )
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
        interval = self.checkpoint_interval if self.training else 0
        # DeepSpeed's checkpointing restores both streams of dropout.
        return run_layers(self._in_order, stream, interval, deepspeed.checkpointing.checkpoint)


class Pipeline(PipelineModule):
    """DeepSpeed's stage, with recomputed chunks that begin at a transformer layer.

    DeepSpeed cuts chunks from the first layer of the stage, whatever it is, and recomputes none that holds an embedding.
    """

    def __init__(self, definitions: Sequence[LayerDefinition], **options):
        super().__init__([_specification(d) for d in definitions], **options)
        self._applies = [d.apply for d in definitions[self._local_start : self._local_stop]]

    def forward(self, stream: Stream) -> Stream:
        interval = self.activation_checkpoint_interval if self.training else 0
        layers = list(zip(self._applies, self.forward_funcs, strict=True))
        return run_layers(layers, stream, interval, self.activation_checkpoint_func)


def _specification(d: LayerDefinition) -> LayerSpec:
    return TiedLayerSpec(d.name, d.kind, **d.arguments) if d.tied else LayerSpec(d.kind, **d.arguments)


def pipeline_module(
    definitions: Sequence[LayerDefinition], loss: Callable, *, grid, checkpoint_interval: int
) -> Pipeline:
    """The layers as DeepSpeed pipeline stages with equally many transformer layers; tied entries are shared between stages.

    `loss(stream, labels)` is computed on the last stage.
    """
    return Pipeline(
        definitions,
        topology=PipeModelDataParallelTopology(num_pp=grid.pp, num_mp=grid.tp, num_dp=grid.dp),
        loss_fn=loss,
        partition_method=f"type:^{TransformerLayer.__name__}$",
        activation_checkpoint_interval=checkpoint_interval,
        checkpointable_layers=[TransformerLayer.__name__],
    )


def run_layers(
    layers: Sequence[tuple[Apply, nn.Module]], stream: Stream, interval: int, checkpoint: Callable
) -> Stream:
    """Every layer in turn; transformer layers are recomputed in chunks of `interval` (0: none) by `checkpoint`."""
    for chunk, recomputed in recomputed_chunks(layers, interval):
        if not recomputed:
            stream = _in_turn(chunk, stream)
        elif isinstance(stream, torch.Tensor):
            stream = checkpoint(partial(_in_turn, chunk), stream)
        else:  # only x changes in a transformer layer; what rides along stays out of the recomputation's outputs
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
    """(consecutive layers, whether to keep only their input) in order: transformer layers by `interval`, others as they are."""
    chunks: list[tuple[list, bool]] = []
    for apply, layer in layers:
        recomputed = interval > 0 and isinstance(layer, TransformerLayer)
        if recomputed and chunks and chunks[-1][1] and len(chunks[-1][0]) < interval:
            chunks[-1][0].append((apply, layer))
        else:
            chunks.append(([(apply, layer)], recomputed))
    return chunks
