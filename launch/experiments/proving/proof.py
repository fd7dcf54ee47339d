"""What an adapter's loop is handed: given weights and batches, and the comparison after each step."""

from __future__ import annotations

import faulthandler
import functools
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from launch.experiments.proving.layout import ACCUMULATION, layout_of
from launch.experiments.proving.reading import Reading, whole
from launch.experiments.proving.task import (
    INITIAL,
    Fact,
    Found,
    Task,
    found_by,
    key,
    tensors_of,
    wait_for,
    write_found,
)

Batch = dict[str, Tensor]
Shard = Callable[[str, Tensor], Tensor]  # (name, whole tensor) -> this rank's part
# of modules that wrap others: DDP and DeepSpeed's engine, torch.compile, torch's recomputation
WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
MOST_KEPT = 128  # tensors beyond their bounds, each with the numbers of its elements


class Proof:
    """One training, on one rank.

    Attributes:
        layout: asked for by name; `layout["dp"]` is a degree, `layout["zero"]` the number behind a word.
        rank: of this process.
        precision: "fp32" or "bf16".
        checkpoint: directory to save to after the last batch; None: none is asked for.
        stack: file of where this rank was when a step took too long, or failed.
        resumed: directory to load before the first batch; None: training begins anew.
        given: what the proof was started with for this adapter.
        out: directory of what the ranks find.
    """

    def __init__(self, task: Task, adapter: Any) -> None:
        self.layout = layout_of(task.layout, task.accumulation)
        self.rank = torch.distributed.get_rank()
        self.precision = task.precision
        self.checkpoint = Path(task.checkpoint) if task.checkpoint else None
        self.resumed = Path(task.resumed) if task.resumed else None
        self._task = task
        self._adapter = adapter
        self.given = task.given
        self.out = Path(task.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self._done = task.done
        self._found = Found()
        self._beyond = dict[str, Tensor]()
        self._faint = dict[str, Tensor]()
        self._shard: Shard | None = None
        self._named: Callable[[str], object] = str
        self._reading: Reading | None = None
        self.stack = (self.out / f"rank-{self.rank}-stack.txt").open("w")
        self._end = threading.Timer(0, self._leave)
        torch.manual_seed(task.seed)
        self._wait()

    def load(
        self,
        model: nn.Module,
        shard: Shard | None = None,
        names: Callable[[str], str] | None = None,
    ) -> None:
        """Give a model the initial weights, before anything wraps it. Raises ValueError.

        In one process it keeps its own, which every layout is given.
        `shard`: cuts a whole tensor for this rank, where it is not cut evenly in one dimension.
        `names`: gives the name that a parameter of this layout has in one process.
        """
        self._shard = shard
        self._named = names or self._named
        own = self._tensors(model)
        if not self._task.initial:
            save_file(
                {name: whole(each) for name, each in own.items()}, self.out / INITIAL
            )
            return
        given = load_file(self._task.initial)
        for name, tensor in own.items():
            if name not in given:
                raise ValueError(
                    f"{name} is no tensor of the model in one process, which has {', '.join(given)}: "
                    "say its name there with names="
                )
            tensor.detach().copy_(self.part(name, given[name], tensor))
        self.round_weights(own.values())

    def round_weights(self, weights: Iterable[Tensor]) -> None:
        """Round initial weights otherwise, in a run that shows what rounding does. `load` does it."""
        generator = torch.Generator().manual_seed(self._task.noise)
        for tensor in weights:
            if tensor.is_floating_point() and self._task.rounding:
                sign = torch.rand(tensor.shape, generator=generator).to(tensor) * 2 - 1
                with torch.no_grad():
                    tensor.mul_(1 + self._task.rounding * sign)

    def watch(
        self,
        model: Any,
        optimizer: Any = None,
        reading: Reading | None = None,
        shard: Shard | None = None,
    ) -> None:
        """Say what is trained: the wrapped model, or DeepSpeed's engine.

        `optimizer`: of any other; `reading`: reads what is sharded otherwise, which `shard` cuts.
        """
        self._shard = shard or self._shard
        self._reading = reading or Reading(
            self._tensors(model), optimizer or getattr(model, "optimizer", None)
        )
        self._norm = getattr(model, "get_global_grad_norm", lambda: None)
        moments = self._reading.moments() if self.resumed else {}
        self._compare({**moments, "weight": self._reading.weights()})

    def batches(self) -> Iterator[Batch]:
        """Return the global batches of the steps, of which a rank takes its own rows."""
        for step in range(self._task.done, self._task.done + self._task.steps):
            batch = self._adapter.batch(step)
            yield self.rows(batch, *self._task.share)

    def rows(self, batch: Batch, index: int, number: int) -> Batch:
        """Return the one with `index` of so many equal parts of a batch, cut by rows. Raises ValueError."""
        part = {}
        for name, tensor in batch.items():
            if len(tensor) % number:
                raise ValueError(
                    f"{name} has {len(tensor)} rows, which do not make {number} equal parts: "
                    "dp times accumulation of every layout has to divide the rows of batch()"
                )
            part[name] = tensor.chunk(number)[index]
        return part

    def micro_batches(self, batch: Batch, index: int) -> list[Batch]:
        """Return those of the data-parallel rank with `index`, by a step's accumulation. Raises ValueError."""
        own = self.rows(batch, index, self.layout["dp"])
        number = self.layout[ACCUMULATION]
        return [self.rows(own, each, number) for each in range(number)]

    def step(self, loss: Any = None, norm: Any = None) -> None:
        """Compare what the optimizer's step left with the reference.

        Args:
            loss: of the global batch; the mean over the ranks is compared. None: this rank has none.
            norm: of the gradients before clipping; None: as DeepSpeed's engine says it.
        """
        if self._reading is None:
            raise ValueError(
                "step() came before watch(): say what is trained, once it is wrapped"
            )
        self._done += 1
        norm = self._norm() if norm is None else norm
        for figures, value in ((self._found.losses, loss), (self._found.norms, norm)):
            if value is not None:
                figures[self._done] = float(value)
        task = self._task
        if not task.ends or self._done == task.done + 1:
            self._compare(self._reading.after_step())
        elif self._done == task.done + task.steps:
            self._compare({"weight": self._reading.weights()})
        self._wait()

    def validation(self, done: int, loss: float) -> None:
        """Compare the loss on held-out text after so many steps."""
        self._found.validations[done] = loss

    def part(self, name: str, of: Tensor, like: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor, as large as `like`. Raises ValueError."""
        part = self._shard(name, of) if self._shard else self._cut(of, like)
        if part.shape != like.shape:
            raise ValueError(
                f"{name} is {tuple(like.shape)} here and {tuple(of.shape)} in one process: "
                "say how it is cut with shard="
            )
        return part

    def end(self) -> None:
        """Write what was found."""
        faulthandler.cancel_dump_traceback_later()
        self._end.cancel()
        self.stack.close()
        if self._reading:
            self._found.unread.extend(self._reading.unread)
        self._found.unasked.extend(self.layout.words.keys() - self.layout.asked)
        save_file(self._beyond, self.out / f"rank-{self.rank}.safetensors")
        write_found(found_by(self.out, self.rank), self._found)

    def _cut(self, of: Tensor, like: Tensor) -> Tensor:
        tp = self.layout["tp"]
        for dim in range(of.dim()):
            parts = of.chunk(tp, dim)
            if len(parts) == tp and parts[-1].shape == like.shape:
                return parts[self.rank % tp]
        return of

    def _tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """Return parameters and buffers of a model by their names in one process."""
        named = [*model.named_parameters(), *model.named_buffers()]
        tensors = {}
        for name, tensor in named:
            bare = ".".join(part for part in name.split(".") if part not in WRAPPERS)
            tensors[str(self._named(bare))] = tensor
        return tensors

    def _compare(self, read: Mapping[str, Mapping[str, Tensor]]) -> None:
        step = self._done
        flat = {
            f"{kind}/{name}": tensor.to("cpu").contiguous()
            for kind, tensors in read.items()
            for name, tensor in tensors.items()
        }
        if not self._task.reference:
            if self.rank == 0:
                save_file(flat, tensors_of(self.out, step))
            return
        with safe_open(tensors_of(self._task.reference, step), "pt") as reference:
            names = set(reference.keys())
            for of, tensor in flat.items():
                kind, name = of.split("/", 1)
                if of not in names:
                    self._found.unknown.append(of)
                    continue
                self._note(step, kind, name, tensor, reference.get_tensor(of))

    def _note(
        self, step: int, kind: str, name: str, tensor: Tensor, of: Tensor
    ) -> None:
        """Note how a tensor compares; keep it if rounding does not explain that."""
        try:
            expected = self.part(name, of, tensor).double()
        except ValueError as why:
            self._found.misfits[name] = str(why)
            return
        own = tensor.double()
        bound = self._task.bounds.get(key(step, kind, name), float("inf"))
        if kind == "exp_avg" and self._task.bounds:
            # where this is nothing but rounding, Adam's step has its sign of that
            size = expected.abs()
            faint = (size > 0) & (size < bound / of.numel() ** 0.5)
            self._faint[name] = faint | self._faint.get(name, False)
        elif kind == "weight" and name in self._faint:
            own = own.where(~self._faint[name], expected)
        norm = expected.norm().clamp_min(1e-30)
        along = (own * expected).sum() / norm**2
        sizes = (own - expected, own - along * expected, expected)
        apart, across, of_expected = (float(each.norm()) for each in sizes)
        largest = 0.0
        if apart:
            largest = float((own - expected).abs().max())
        fact = Fact(step, kind, name, apart, across, of_expected, largest)
        self._found.facts.append(fact)
        if not apart <= bound and len(self._beyond) < MOST_KEPT:
            numbers = torch.arange(of.numel()).view(of.shape)
            elements = self.part(name, numbers, tensor).contiguous()
            self._beyond[key(step, kind, name)] = tensor
            self._beyond[f"{key(step, kind, name)}/elements"] = elements

    def _wait(self) -> None:
        """Have this process say where it is, and end, if the next step takes too long."""
        wait = self._task.timeout
        faulthandler.dump_traceback_later(wait, file=self.stack)
        self._end.cancel()
        self._end = threading.Timer(wait, self._leave)
        self._end.daemon = True
        self._end.start()

    def _leave(self) -> None:
        """End this process once every rank has said where it is: the end of one ends the others."""
        ranks = range(torch.distributed.get_world_size())
        stacks = [self.out / f"rank-{rank}-stack.txt" for rank in ranks]
        wait_for(stacks)
        time.sleep(1)  # while the last one writes
        os._exit(1)


@functools.cache
def open_adapter(file: str) -> Any:
    """Load an adapter's file; its folder comes first among the places of imports."""
    path = Path(file).resolve()
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(f"adapter_{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
