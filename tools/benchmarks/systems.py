"""Systems whose training steps are measured: our engine, its alternatives, and the machine's matrix rate."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch.profiler import ProfilerActivity

from data.corpus import build as build_corpus
from data.loader import MicroBatch
from launch.machine import compiled_ops, description
from launch.machine.memory import peak_memory
from launch.ranks import processes
from launch.records.facts import RunFacts
from launch.training import compiling
from launch.training.agreement import StepReport, send_report
from launch.training.engine import (
    build_engine,
    initialize,
    parameter_groups,
    train_step,
)
from launch.training.job import Job, plan_job
from launch.training.micro_batches import (
    dropout_seeds_of_step,
    for_plain,
    normalise,
    padded_arguments,
    training_batches,
)
from launch.training.run import next_batch
from launch.training.schedule import learning_rate
from modeling import cost
from modeling.families import conversion_of, family_of, model_shape
from modeling.initialization import DTYPES, Init
from modeling.parallel.layers import seed_step
from modeling.parallel.process_grid import ProcessGrid
from recipes.schema import Recipe
from tools.benchmarks.nano_gpt import NanoGpt
from tools.benchmarks.results import Row
from tools.benchmarks.specification import Specification

SHOWN = 15  # lines of a profile
# rows and columns of the products for the matrix rate, on a CPU and on a GPU
SQUARE = 2048, 8192


class Work(NamedTuple):
    """Tokens and operations of a step, without padding."""

    tokens: int
    operations: int  # of matrix products, forward and backward, without recomputation


def work_of(recipe: Recipe, batch: MicroBatch) -> Work:
    """Return the work of one micro-batch."""
    samples, length = batch["tokens"].shape
    lengths = [length] * samples
    predicted = [None] * samples
    if "lengths" in batch:
        lengths = batch["lengths"].tolist()
        predicted = (batch["weights"] > 0).sum(1).tolist()
    operations = 0
    for s, p in zip(lengths, predicted, strict=True):
        operations += cost.exact_flops_per_step(recipe.model, s, 1, predictions=p)
    return Work(sum(lengths), operations)


def now() -> float:
    """Return the time in seconds, after the GPU has finished its work."""
    get_accelerator().synchronize()
    return time.perf_counter()


class MeasuredSystem:
    """The batches of a training from its own loader, and a `step` that trains on the next ones.

    Attributes:
        loss: of the last step.
    """

    def __init__(self, spec: Specification) -> None:
        self.loss: float | None = math.nan
        self.recipe = spec.load()
        self.plan = plan_job(
            self.recipe,
            spec.ds_config,
            description.detect_machine(),
            compiled=spec.compiled,
            initial_weights=None,
        )
        self.grid = ProcessGrid(1, 1, 1)
        corpus = build_corpus(self.recipe, say=lambda text: None)
        self.batches = training_batches(self.plan, corpus, self.grid, None)
        self.device = torch.device(get_accelerator().current_device_name())
        self.dtype = DTYPES[self.plan.precision]
        self.done = 0

    def take(self) -> tuple[Sequence[Any], Work]:
        """Return the micro-batches of the next step, and their work."""
        seed_step(self.recipe.seed, self.done, self.grid.at)
        batches = next_batch(self.batches)
        self.done += 1
        works = [work_of(self.recipe, batch) for batch in batches]
        return batches, Work(*map(sum, zip(*works, strict=True)))

    def dropout_seeds(self) -> Sequence[torch.Tensor | None]:
        """Return the seeds of dropout of each micro-batch that was taken last."""
        return dropout_seeds_of_step(self.plan, 0, self.done - 1, self.device)

    def step(self) -> Work:
        raise NotImplementedError

    def run(self, steps: int) -> list[tuple[float, int, int]]:
        """Run `steps` steps and return (seconds, tokens, operations) of each."""
        timed = []
        for _ in range(steps):
            started = now()
            work = self.step()
            timed.append((now() - started, *work))
        return timed

    def profile(self, trace: str, steps: int) -> list[Row]:
        """Write a Chrome trace; return the slowest operations with seconds and calls a step."""
        gpu = processes.device().own_memory
        kinds = torch.profiler.supported_activities() if gpu else {ProfilerActivity.CPU}
        with torch.profiler.profile(activities=kinds) as profiler:
            self.run(steps)
        profiler.export_chrome_trace(trace)
        lasting = "self_device_time_total" if gpu else "self_cpu_time_total"
        operations = []
        for event in profiler.key_averages():
            seconds = getattr(event, lasting) / 1e6 / steps
            row = {"operation": event.key[:80], "seconds": seconds}
            operations.append({**row, "calls": event.count / steps})
        return sorted(operations, key=lambda row: -row["seconds"])[:SHOWN]

    def graphs(self) -> dict[str, Any]:
        """Count the graphs of torch.compile so far, and the reasons of graph breaks."""
        from torch._dynamo.utils import counters

        return {
            "graphs": counters["stats"].get("unique_graphs", 0),
            "breaks": dict(counters["graph_break"]),
        }

    def peak_bytes(self) -> int:
        return peak_memory().bytes


class Ours(MeasuredSystem):
    """Our engine and our model, with the steps of launch/training/loop.py."""

    def __init__(self, spec: Specification) -> None:
        super().__init__(spec)
        job = Job(
            RunFacts(self.plan, spec.name), Path("unused"), compiled=spec.compiled
        )
        self.engine = build_engine(job, self.grid, print)

    def step(self) -> Work:
        batches, work = self.take()
        read_outcome = train_step(self.engine, batches, self.grid, self.dropout_seeds())
        hear = send_report(StepReport(), self.grid.control_group)
        self.loss = read_outcome().loss
        hear()
        return work


class Transformers(MeasuredSystem):
    """The model of `transformers` under the same resolved DeepSpeed JSON, in a loop without anything else."""

    def __init__(self, spec: Specification) -> None:
        super().__init__(spec)
        ds = self.plan.ds
        compiled_ops.prepare(ds, self.grid.control_group, print)
        partitioned = self.plan.zero_stage == 3
        with deepspeed.zero.Init(config_dict_or_path=ds, enabled=partitioned):
            model = transformers_model(self.recipe)
        # Partitioned, transformers' own initialisation saw empty tensors.
        for parameter in model.parameters() if partitioned else ():
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                if parameter.dim() > 1:
                    torch.nn.init.normal_(parameter, std=self.recipe.init_std)
        if self.recipe.checkpoint_interval:
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        if spec.compiled:
            model.compile()
        self.engine = initialize(self.plan, model, self.grid)
        self.engine.train()

    def step(self) -> Work:
        batches, work = self.take()
        losses = []
        for batch in batches:
            loss = self.engine(**transformers_inputs(batch, self.device)).loss
            self.engine.backward(loss)
            self.engine.step()
            losses.append(loss.detach())
        self.loss = torch.stack(losses).mean().item()
        return work


def transformers_model(recipe: Recipe) -> Any:
    """Make the recipe's model as `transformers` has it."""
    conversion = conversion_of(recipe.model)
    config = conversion.config(recipe.model, recipe.positions, recipe.dropout)
    config.use_cache = False
    return conversion.model_class(recipe.model)(config)


def transformers_inputs(
    batch: MicroBatch, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return the arguments of a `transformers` model, which computes its own loss."""
    if "lengths" not in batch:
        tokens = batch["tokens"].to(device)
        return {"input_ids": tokens, "labels": tokens}  # the model shifts them
    given: Any = padded_arguments(batch, device)
    tokens, types, _, positions, labels, weights, sentences, _ = given
    full = torch.full_like(tokens, -100)
    predicted = weights > 0
    rows = torch.arange(len(tokens), device=device)[:, None].expand_as(positions)
    full[rows[predicted], positions[predicted]] = labels[predicted]
    columns = torch.arange(tokens.shape[1], device=device)
    kept = columns < batch["lengths"].to(device)[:, None]
    inputs = {
        "input_ids": tokens,
        "token_type_ids": types,
        "labels": full,
        "attention_mask": kept.long(),
    }
    if batch["sentence_weights"].any():
        inputs["next_sentence_label"] = sentences
    return inputs


class PlainLoop(MeasuredSystem):
    """A model in a plain PyTorch loop with torch's fused AdamW; `called` computes its loss."""

    called: Any
    scaler = torch.amp.GradScaler(enabled=False)

    def adamw(self, groups: Any) -> torch.optim.Optimizer:
        """Make the recipe's optimizer."""
        chosen = self.recipe.optimizer
        return torch.optim.AdamW(
            groups, lr=chosen.lr, betas=chosen.betas, eps=chosen.eps, fused=True
        )

    def forward(self, given: Any) -> torch.Tensor:
        """Return the loss of one of the micro-batches of `take`."""
        raise NotImplementedError

    def optimize(self) -> None:
        raise NotImplementedError

    def step(self) -> Work:
        every, work = self.take()
        losses = []
        for given in every:
            loss = self.forward(given) / len(every)
            self.scaler.scale(loss).backward()
            losses.append(loss.detach())
        self.optimize()
        self.loss = torch.stack(losses).sum().item()
        return work


class Bare(PlainLoop):
    """Our model in a bare PyTorch loop: fp32 master weights, torch's fused AdamW, clipping."""

    def __init__(self, spec: Specification) -> None:
        super().__init__(spec)
        recipe = self.recipe
        model = family_of(recipe.model).plain(
            model_shape(recipe, self.plan.padded_vocab),
            group=None,
            init=Init(recipe.seed, recipe.init_std, recipe.model.layers),
        )
        model.to(self.device)
        groups = parameter_groups(model, recipe.optimizer.weight_decay)
        self.parameters: list[Any] = []
        self.masters: list[Any] = []
        for group in groups:
            self.parameters += group["params"]
            group["params"] = [p.detach().float().clone() for p in group["params"]]
            self.masters += group["params"]
        model.to(self.dtype).train()
        self.optimizer = self.adamw(groups)
        compiling.prepare(model, self.plan)
        if spec.compiled:
            model.compile()
        self.called = model

    def take(self) -> tuple[Sequence[Any], Work]:
        batches, work = super().take()
        batches = normalise(batches, self.grid, self.device)
        return [*zip(batches, self.dropout_seeds(), strict=True)], work

    def forward(self, given: Any) -> torch.Tensor:
        batch, dropout_seeds = given
        arguments, named = for_plain(batch, self.device, dropout_seeds)
        return loss_of(self.called(*arguments, **named))

    @torch.no_grad()
    def optimize(self) -> None:
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, self.recipe.optimizer.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.recipe, self.done - 1)
        self.optimizer.step()
        torch._foreach_copy_(self.parameters, self.masters)


def loss_of(outcome: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the loss, of a model that may return parts of it, too."""
    return outcome[0] if isinstance(outcome, tuple) else outcome


class Nano(PlainLoop):
    """A plain GPT-2 in the manner of nanoGPT: pure bf16 on a CPU, autocast on a GPU, fused AdamW."""

    def __init__(self, spec: Specification) -> None:
        super().__init__(spec)
        on_gpu = processes.device().own_memory
        model = NanoGpt(self.recipe)
        model.to(self.device, torch.float32 if on_gpu else self.dtype)
        groups = parameter_groups(model, self.recipe.optimizer.weight_decay)
        self.optimizer = self.adamw(groups)
        mixed = on_gpu and self.dtype != torch.float32
        self.autocast = torch.autocast(self.device.type, self.dtype, enabled=mixed)
        self.scaler = torch.amp.GradScaler(
            enabled=mixed and self.dtype == torch.float16
        )
        if spec.compiled:
            model.compile()
        self.called = model

    def forward(self, given: Any) -> torch.Tensor:
        tokens, labels = (given[name].to(self.device) for name in ("tokens", "labels"))
        with self.autocast:
            return loss_of(self.called(tokens, labels))

    def optimize(self) -> None:
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(
            self.called.parameters(), self.recipe.optimizer.clip
        )
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)


class MatrixRate(MeasuredSystem):
    """A large square product a step: the machine's matrix rate."""

    def __init__(self, spec: Specification) -> None:
        super().__init__(spec)
        size = 256 if spec.tiny else SQUARE[processes.device().own_memory]
        self.factor = torch.randn(size, size, device=self.device).to(self.dtype)

    def step(self) -> Work:
        torch.matmul(self.factor, self.factor)
        return Work(0, 2 * len(self.factor) ** 3)


SYSTEMS: dict[str, type[MeasuredSystem]] = {
    "rate": MatrixRate,
    "ours": Ours,
    "transformers": Transformers,
    "bare": Bare,
    "nano": Nano,
}
