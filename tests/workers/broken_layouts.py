"""A proof's worker whose layouts have one thing broken on purpose: broken_layouts.py TASKS.json."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.engine import DeepSpeedEngine

from launch.experiments.parity.layout_cases import LayoutCase
from launch.experiments.proving.task import Task
from launch.experiments.proving.worker import work
from launch.ranks import processes
from launch.training import loop, micro_batches
from modeling import bert, gpt2
from modeling.hidden_dropout import HiddenDropout
from modeling.initialization import Init
from modeling.parallel import collectives, layers
from modeling.parallel.collectives import reduce_from_tensor_parallel
from modeling.parallel.layers import RowParallelLinear, VocabParallelEmbedding


def gradients_stay_apart_at_f() -> AbstractContextManager:
    backward = layers._Column.backward

    def apart(ctx, gradient):
        with nothing_summed():
            return backward(ctx, gradient)

    return mock.patch.object(layers._Column, "backward", staticmethod(apart))


def summands_stay_apart_at_g() -> AbstractContextManager:
    forward = layers._Row.forward

    def apart(ctx, *args):
        with nothing_summed():
            return forward(ctx, *args)

    stack = ExitStack()
    stack.enter_context(mock.patch.object(layers._Row, "forward", staticmethod(apart)))
    keep = staticmethod(lambda ctx, x, group: x.clone())
    stack.enter_context(mock.patch.object(collectives._G, "forward", keep))
    return stack


def nothing_summed() -> AbstractContextManager:
    return mock.patch.object(layers, "begin_sum", lambda x, group: x)


def norms_count_own_positions() -> AbstractContextManager:
    own = staticmethod(lambda ctx, *gradients: (*gradients, None))
    return mock.patch.object(collectives._SumGradients, "backward", own)


def gathered_gradients_stay_apart() -> AbstractContextManager:
    def own(ctx, gradient):
        return collectives.own_positions(gradient, ctx.group), None, None

    return mock.patch.object(collectives._GatherPositions, "backward", staticmethod(own))


def dropout_of_the_first_positions() -> AbstractContextManager:
    """Every tensor rank drops what the first one does of its own positions."""
    own = gpt2.own_positions

    def first(x, group):
        return x[:, : x.shape[1] // 2] if x.dtype == torch.int64 else own(x, group)

    return mock.patch.object(gpt2, "own_positions", first)


def no_parameter_marked() -> AbstractContextManager:
    return _after_parameter(lambda parameter: vars(parameter).pop("tensor_model_parallel", None))


def every_parameter_marked() -> AbstractContextManager:
    return _after_parameter(lambda parameter: setattr(parameter, "tensor_model_parallel", True))


def _after_parameter(change: Callable) -> AbstractContextManager:
    make = Init._parameter

    def changed(self, *args):
        parameter = make(self, *args)
        change(parameter)
        return parameter

    return mock.patch.object(Init, "_parameter", changed)


def tied_gradients_stay_apart() -> AbstractContextManager:
    return mock.patch.object(PipelineModule, "get_tied_weights_and_groups", lambda self: [])


def bias_on_every_rank() -> AbstractContextManager:
    def forward(self, x):
        return reduce_from_tensor_parallel(F.linear(x, self.weight, self.bias), self.group)

    return mock.patch.object(RowParallelLinear, "forward", forward)


def padding_gets_probability() -> AbstractContextManager:
    def logits(self, x, cut):
        return layers.column_parallel(x, self.weight, None, self.group)

    return mock.patch.object(VocabParallelEmbedding, "_logits", logits)


def data_ranks_stay_apart() -> AbstractContextManager:
    return mock.patch.object(DeepSpeedEngine, "allreduce_gradients", lambda self, *args, **kwargs: None)


def weights_of_another_layout() -> AbstractContextManager:
    """Every tensor rank draws its slice under a name of its own, as a draw of the slice alone would."""
    draw = Init._normal

    def by_rank(self, name, shape, std):
        return draw(self, f"{name}@{processes.rank()}", shape, std)

    return mock.patch.object(Init, "_normal", by_rank)


def padding_attended_to() -> AbstractContextManager:
    return mock.patch.object(bert, "_attend", lambda layer, stream, inputs: (layer(stream[0]), *stream[1:]))


def predictions_counted_by_rank() -> AbstractContextManager:
    def normalise(batches, grid, device):
        scale = len(batches) / sum(float(b["weights"].sum()) for b in batches)
        return [{**b, "weights": b["weights"] * scale} for b in batches]

    return mock.patch.object(micro_batches, "normalise", normalise)


def dropout_by_local_sample() -> AbstractContextManager:
    """Masks of the first data rank's samples on every one."""
    rows = micro_batches.rank_rows
    return mock.patch.object(micro_batches, "rank_rows", lambda layout, dp_rank, size: rows(layout, 0, size))


def dropout_by_local_micro_batch() -> AbstractContextManager:
    """Masks of the first micro-batch in every one."""
    right = loop.dropout_seeds_of_step

    def first_only(*of):
        dropout_seeds = right(*of)
        return dropout_seeds[:1] * len(dropout_seeds)

    return mock.patch.object(loop, "dropout_seeds_of_step", first_only)


def dropout_of_the_last_forward_pass() -> AbstractContextManager:
    """Recomputation takes the seeds that a forward pass used last, as from a buffer of the model."""
    drop, last = HiddenDropout.forward, {}

    def forward(self, x, dropout_seeds):
        if torch.is_grad_enabled() and id(self) in last:
            dropout_seeds = last[id(self)]
        else:
            last[id(self)] = dropout_seeds
        return drop(self, x, dropout_seeds)

    return mock.patch.object(HiddenDropout, "forward", forward)


@dataclass(frozen=True)
class Breakage:
    """A layout, what breaks it, and by what the comparison has to notice."""

    case: LayoutCase
    broken: Callable[[], AbstractContextManager]
    first: str | None = None  # the first tensor that diverges
    kind: str = "gradient"
    by_norm: bool = False  # the norm of the first step is wrong, though its loss is right


def _case(name: str, tp: int, pp: int, dp: int, ds_config: str) -> LayoutCase:
    return LayoutCase(name, tp, pp, dp, ds_config)


BREAKAGES = [
    Breakage(
        LayoutCase("f without all-reduce, pure bf16", 2, 1, 1, "pure_bf16", states="bf16"),
        gradients_stay_apart_at_f,
        first="final_norm.bias",
    ),
    Breakage(
        _case("f without all-reduce", 2, 1, 1, "zero0"), gradients_stay_apart_at_f, first="final_norm.bias"
    ),
    Breakage(
        _case("f without all-reduce, zero3", 2, 1, 1, "zero3"),
        gradients_stay_apart_at_f,
        first="final_norm.bias",
    ),
    Breakage(
        _case("g without all-reduce", 2, 1, 1, "zero0"), summands_stay_apart_at_g, first="final_norm.bias"
    ),
    Breakage(_case("sharded parameters not marked", 2, 1, 1, "zero0"), no_parameter_marked, by_norm=True),
    Breakage(
        _case("sharded parameters not marked, zero3", 2, 1, 1, "zero3"), no_parameter_marked, by_norm=True
    ),
    Breakage(_case("duplicated parameters marked", 2, 1, 1, "zero0"), every_parameter_marked, by_norm=True),
    Breakage(
        _case("duplicated parameters marked, zero1", 2, 1, 1, "zero1"), every_parameter_marked, by_norm=True
    ),
    Breakage(
        _case("tied gradients not summed", 1, 2, 1, "pipeline"),
        tied_gradients_stay_apart,
        first="word.weight",
    ),
    Breakage(_case("bias on every rank", 2, 1, 1, "zero0"), bias_on_every_rank),
    Breakage(_case("padding not masked", 2, 1, 1, "zero0"), padding_gets_probability),
    Breakage(_case("data ranks not averaged", 1, 1, 2, "zero0"), data_ranks_stay_apart, by_norm=True),
    Breakage(
        _case("weights drawn by rank", 2, 1, 1, "zero0"),
        weights_of_another_layout,
        first="word.weight",
        kind="weight",
    ),
    Breakage(
        LayoutCase("sequence: norms not summed", 2, 1, 1, "zero0", sequence=True),
        norms_count_own_positions,
        first="final_norm.bias",
    ),
    Breakage(
        LayoutCase("sequence: norms not summed, zero3", 2, 1, 1, "zero3", sequence=True),
        norms_count_own_positions,
        first="final_norm.bias",
    ),
    Breakage(
        LayoutCase("sequence: logits not summed", 2, 1, 1, "zero1", sequence=True),
        gathered_gradients_stay_apart,
        first="final_norm.bias",
    ),
]
BERT_BREAKAGES = [
    Breakage(
        LayoutCase("f without all-reduce, pure bf16", 2, 1, 1, "pure_bf16", states="bf16"),
        gradients_stay_apart_at_f,
        first="head.norm.bias",
    ),
    Breakage(
        _case("f without all-reduce", 2, 1, 1, "zero0"), gradients_stay_apart_at_f, first="head.norm.bias"
    ),
    Breakage(
        _case("tied decoder not summed", 1, 2, 1, "pipeline"), tied_gradients_stay_apart, first="word.weight"
    ),
    Breakage(_case("padding attended to", 1, 2, 1, "pipeline"), padding_attended_to),
    Breakage(_case("predictions counted by rank", 1, 1, 2, "zero0"), predictions_counted_by_rank),
    Breakage(_case("decoder bias not marked", 2, 1, 1, "zero0"), no_parameter_marked, by_norm=True),
    Breakage(
        LayoutCase("sequence: norms not summed", 2, 1, 1, "zero0", sequence=True), norms_count_own_positions
    ),
]
DROPOUT_BREAKAGES = [
    Breakage(_case("samples counted by rank", 1, 1, 2, "zero1"), dropout_by_local_sample),
    Breakage(
        LayoutCase("samples counted by micro-batch", 2, 1, 1, "zero1", accumulation=4),
        dropout_by_local_micro_batch,
    ),
    Breakage(
        LayoutCase("seeds in a buffer", 1, 2, 1, "pipeline", accumulation=4, checkpointing="full"),
        dropout_of_the_last_forward_pass,
    ),
    Breakage(
        LayoutCase("seeds of the first positions", 2, 1, 1, "zero1", sequence=True),
        dropout_of_the_first_positions,
    ),
]
# Last, so that it also shows that every breakage was undone.
CONTROL = Breakage(_case("nothing broken", 2, 1, 1, "zero0"), nullcontext)


def train(breakages: Sequence[Breakage]) -> None:
    """Train the tasks of a launch, each within what breaks the layout of its name."""
    broken = {breakage.case.name: breakage.broken for breakage in breakages}

    def around(task: Task) -> AbstractContextManager:
        return broken.get(json.loads(task.given)["case"]["name"], nullcontext)()

    work(Path(sys.argv[1]), around)


if __name__ == "__main__":
    train([*BREAKAGES, *BERT_BREAKAGES, *DROPOUT_BREAKAGES])
