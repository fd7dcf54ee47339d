"""Every model on the meta device, moved there as DeepSpeed moves it to a GPU: nothing may stay behind.

"meta" is not "cpu": attention, GELU, the loss and unpadding take the branches of a GPU. Tensors have shapes
and no values, so reading one on the host raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import deepspeed
import pytest
import torch
import torch.utils.checkpoint
from random_batch import random_batch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from launch.training.engine import move_buffers
from launch.training.micro_batches import for_pipeline, for_plain, padded_arguments
from modeling import bert, gpt2, unpadding
from modeling.bert import BertShape
from modeling.gpt2 import GPT2Shape
from modeling.hidden_dropout import HiddenDropout, dropout_seeds_of
from modeling.initialization import Init
from modeling.layer_list import Family, Stack
from modeling.parallel.layers import seed_step
from modeling.unpadding import PackedRow
from recipes.families import Fixed
from recipes.layout import Coordinates
from tools.tables.counting import tensor_rank

B, S, P, V = 4, 256, 8, 90
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
SOP = {"sentence_head": "sop"}


class DeviceOnly(TorchDispatchMode):
    """Refuse an operation on a tensor in host memory; numbers (no dimensions) may come from there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, torch.Tensor) and not x.is_meta and x.ndim:
                raise RuntimeError(f"{func}: a tensor {tuple(x.shape)} is on the {x.device}")
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Case:
    """A model and the form in which it gets its micro-batch; `tp`: ranks of a fake tensor group."""

    family: Family = gpt2.FAMILY
    options: Mapping[str, Any] = field(default_factory=dict)
    form: str = "plain"  # as training hands it over; "padded": with lengths, cut; "lengths": never cut
    length: int = S
    full: bool = False  # no sample is padded
    varlen: bool = False
    tp: int = 1

    def shape(self) -> Any:
        kind = {"gpt2": GPT2Shape, "bert": BertShape}[self.family.name]
        sizes = dict(layers=2, hidden=32, heads=4, vocab=V, padded_vocab=128, positions=self.length)
        return kind(**sizes, **self.options)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        batch = random_batch(self.family.fields, B, self.length, P, V)
        if self.full:
            batch["lengths"] = torch.full((B,), self.length)
        samples = torch.arange(B, device="meta")
        dropout_seeds = (
            dropout_seeds_of(1, 0, samples, self.length) if self.options.get("hidden_dropout") else None
        )
        if self.form == "plain":
            return for_plain(
                batch, "meta", dropout_seeds, self.tp if self.options.get("sequence_parallel") else 1
            )
        named = {} if dropout_seeds is None else {"dropout_seeds": dropout_seeds}
        if self.form == "padded":
            return padded_arguments(batch, "meta"), named
        inputs, targets = for_pipeline(batch, None, "meta")
        return (*(inputs if isinstance(inputs, tuple) else (inputs,)), *targets), named


SEQUENCE = {"sequence_parallel": True}
CASES = {
    "GPT-2": Case(),
    "GPT-2, dropout": Case(options=DROPOUT),
    "GPT-2, attention recomputed": Case(options={**DROPOUT, "recomputes_core": True}),
    "GPT-2, layers recomputed": Case(options={**DROPOUT, "checkpoint_interval": 1}),
    "GPT-2, tensor parallel": Case(options=DROPOUT, tp=2),
    "GPT-2, sequence parallel": Case(options={**DROPOUT, **SEQUENCE}, tp=2),
    "GPT-2, sequence parallel, recomputed": Case(options={**SEQUENCE, "recomputes_core": True}, tp=2),
    "GPT-2, shared layers": Case(options={**DROPOUT, "shared_layers": True}),
    "banded, by blocks": Case(options={**DROPOUT, "windows": (32, None)}),
    "banded, by a mask": Case(options={"windows": (32, None)}, length=64),
    "fixed": Case(options={**DROPOUT, "windows": (Fixed(32, 4, 2), None)}, tp=2),
    "banded, window of all positions": Case(options={"windows": (64, 64)}, length=64),
    "BERT, a row": Case(bert.FAMILY, SOP),
    "BERT, a row by FlashAttention": Case(bert.FAMILY, {**SOP, **DROPOUT}, varlen=True),
    "BERT, a row, dropout": Case(bert.FAMILY, {**SOP, **DROPOUT}),
    "BERT, nothing padded": Case(bert.FAMILY, {**SOP, **DROPOUT}, full=True),
    "BERT, padded": Case(bert.FAMILY, {**SOP, **DROPOUT}, form="padded"),
    "BERT, lengths of a pipeline": Case(bert.FAMILY, {**DROPOUT, "checkpoint_interval": 1}, form="lengths"),
    "BERT, post-LN": Case(bert.FAMILY, {**DROPOUT, "post_norm": True}),
    "BERT, sequence parallel": Case(bert.FAMILY, {**SOP, **DROPOUT, **SEQUENCE}, tp=2),
}


def moved(model: Stack, zero_stage: int, buffers: bool = True) -> Stack:
    """Move to "meta" what DeepSpeed moves to a GPU: all, or under ZeRO-3 parameters alone, then `buffers`."""
    if zero_stage < 3:
        return model.to("meta", torch.bfloat16)
    for module in model.modules():
        for name, parameter in [*module._parameters.items()]:
            module._parameters[name] = nn.Parameter(parameter.detach().to("meta", torch.bfloat16))
    if buffers:
        move_buffers(model, torch.device("meta"))
    return model


def walk(case: Case, zero_stage: int, buffers: bool = True) -> None:
    """Make a forward and a backward pass."""
    with tensor_rank(1, case.tp) if case.tp > 1 else nullcontext() as group:
        init = Init(seed=1, std=0.02, layers=2)
        model = moved(case.family.plain(case.shape(), group=group, init=init), zero_stage, buffers).train()
        arguments, named = case.arguments()
        with DeviceOnly():
            outcome = model(*arguments, **named)
            loss = outcome[0] if isinstance(outcome, tuple) else outcome
            loss.backward()
    assert loss.is_meta and loss.dtype == torch.float32
    assert not [name for name, p in model.named_parameters() if p.grad is None]


@pytest.fixture(autouse=True)
def as_in_training(monkeypatch) -> None:
    """Seeds of a step; DeepSpeed's own recomputation needs its process group."""
    recompute = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    monkeypatch.setattr(deepspeed.checkpointing, "checkpoint", recompute)
    seed_step(1, 0, Coordinates(tp=0, pp=0, dp=0))


@pytest.mark.parametrize("zero_stage", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_forward_and_backward_leave_nothing_on_the_host(name, zero_stage, monkeypatch):
    monkeypatch.setattr(unpadding, "has_varlen", lambda qkv: CASES[name].varlen)
    walk(CASES[name], zero_stage)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.options.get("hidden_dropout")])
def test_the_walk_finds_buffers_left_on_the_host(name):
    """The words of hidden dropout, where nobody moves them after zero.Init."""
    with pytest.raises(RuntimeError, match=r"a tensor \(32,\) is on the cpu"):
        walk(CASES[name], zero_stage=3, buffers=False)


def test_the_walk_finds_a_number_read_on_the_host(monkeypatch):
    drop = HiddenDropout.forward
    monkeypatch.setattr(
        HiddenDropout, "forward", lambda self, x, dropout_seeds: drop(self, x, dropout_seeds) * x.sum().item()
    )
    with pytest.raises(RuntimeError, match="item"):
        walk(CASES["GPT-2, dropout"], zero_stage=1)


def test_a_row_reaches_the_model_as_one(monkeypatch):
    """The cases above are what their names say."""
    assert isinstance(CASES["BERT, a row"].arguments()[0][2], PackedRow)
    assert CASES["BERT, nothing padded"].arguments()[0][2] is None
    assert CASES["BERT, lengths of a pipeline"].arguments()[0][2].shape == (B,)
