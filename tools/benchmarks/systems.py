"""Systems to measure, as one rank runs them: our engine and its alternatives."""

from __future__ import annotations

import statistics
import timeit
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from torch._utils import _unflatten_dense_tensors as views_like
from torch.nn.parallel import DistributedDataParallel

from data.loader import MicroBatch
from launch.machine import compiled_ops
from launch.training import compiling
from launch.training.agreement import StepExchange, StepReport
from launch.training.engine import (
    build_engine,
    initialize,
    parameter_groups,
    train_step,
)
from launch.training.job import Job
from launch.training.micro_batches import (
    for_plain,
    normalise,
    padded_arguments,
    salts_of_step,
)
from launch.training.schedule import learning_rate
from modeling.cost.products import Product, head_products, layer_products
from modeling.families import conversion_of, family_of, model_shape
from modeling.initialization import Init
from recipes.schema import Recipe
from tools.benchmarks.measured_system import Clock, MeasuredSystem, Work, now
from tools.benchmarks.nano_gpt import NanoGpt
from tools.benchmarks.specification import Specification

# rows and columns of the products for the matrix rate, on a CPU and on a GPU
SQUARE = 2048, 8192
# Methods of the engine's optimizer, of which at most one calls another of the same phase.
WITHIN = {
    "copies": (
        "copy_grads_in_partition",
        "_update_hp_grad",
        "partition_grads",
        "take_gradients",
    ),
    "norm": ("_norm", "scaled_global_norm", "_get_norm_groups"),
    "rounding": (
        "update_lp_params",
        "round_weights",
        "_reassign_or_swap_out_partitioned_parameters",
    ),
}


class Ours(MeasuredSystem):
    """Our engine and our model, with the steps of launch/training/loop.py."""

    def __init__(self, spec: Specification) -> None:
        super().__init__(spec)
        job = Job(self.plan, spec.name, Path("unused"), compiled=spec.compiled)
        self.engine = build_engine(job, self.grid, self.said.append)
        clock_engine(self.engine, self.clock)

    def step(self) -> Work:
        with self.clock("data"):
            batches, work = self.take()
        salts = salts_of_step(
            self.plan, self.grid.at.dp, self.done - 1, self.engine.device
        )
        read_outcome = train_step(self.engine, batches, self.grid, salts)
        telling = StepExchange(StepReport(), self.grid.control_group)
        self.loss = read_outcome().loss
        telling.wait()
        return work


def clock_engine(engine: Any, clock: Clock) -> None:
    """Have the parts of the engine's step on the clock, and the waiting for other ranks within them."""
    works: Any = torch.distributed.Work
    works.wait = clock("communication")(works.wait)
    for phase, name in (
        ("forward", "forward"),
        ("backward", "backward"),
        ("optimizer", "step"),
    ):
        setattr(engine, name, clock(phase)(getattr(engine, name)))
    for phase, names in WITHIN.items():
        for name in names:
            method = getattr(engine.optimizer, name, None)
            if method:
                setattr(engine.optimizer, name, clock(phase)(method))
    engine.basic_optimizer.step = clock("update")(engine.basic_optimizer.step)


class Transformers(MeasuredSystem):
    """The model of `transformers` under the same resolved DeepSpeed JSON, in a loop without anything else."""

    def __init__(self, spec: Specification) -> None:
        super().__init__(spec)
        plan = self.plan
        recipe = self.recipe
        compiled_ops.prepare(plan.ds, self.grid.control_group, lambda text: None)
        partitioned = plan.zero_stage == 3
        with deepspeed.zero.Init(config_dict_or_path=plan.ds, enabled=partitioned):
            model = transformers_model(recipe)
        # Partitioned, transformers' own initialisation saw empty tensors.
        for parameter in model.parameters() if partitioned else ():
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                if parameter.dim() > 1:
                    torch.nn.init.normal_(parameter, std=recipe.init_std)
        if recipe.checkpoint_interval:
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        if spec.compiled:
            model.compile()
        self.engine = initialize(plan, model, self.grid)
        self.engine.train()
        clock_engine(self.engine, self.clock)

    def step(self) -> Work:
        with self.clock("data"):
            batches, work = self.take()
        losses = []
        for batch in batches:
            loss = self.engine(**transformers_inputs(batch, self.engine.device)).loss
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
    kept = (
        torch.arange(tokens.shape[1], device=device)[None]
        < batch["lengths"].to(device)[:, None]
    )
    found = {
        "input_ids": tokens,
        "token_type_ids": types,
        "attention_mask": kept.long(),
        "labels": full,
    }
    return (
        {**found, "next_sentence_label": sentences}
        if bool(batch["sentence_weights"].any())
        else found
    )


class PlainLoop(MeasuredSystem):
    """A model in a plain PyTorch loop; `called` computes its loss."""

    called: Callable[..., Any]
    scaler = torch.amp.GradScaler(enabled=False)

    def forward(self, given: Any) -> torch.Tensor:
        """Return the loss of one of the micro-batches of `take`."""
        raise NotImplementedError

    def optimize(self) -> None:
        raise NotImplementedError

    def step(self) -> Work:
        with self.clock("data"):
            every, work = self.take()
        losses = []
        for given in every:
            with self.clock("forward"):
                loss = self.forward(given) / len(every)
            with self.clock("backward"):
                self.scaler.scale(loss).backward()
            losses.append(loss.detach())
        with self.clock("optimizer"):
            self.optimize()
        self.loss = torch.stack(losses).sum().item()
        return work


class Bare(PlainLoop):
    """Our model in a bare PyTorch loop: flat fp32 master weights, torch's fused AdamW, clipping."""

    def __init__(self, spec: Specification) -> None:
        super().__init__(spec)
        recipe = self.recipe
        chosen = self.recipe.optimizer
        init = Init(recipe.seed, recipe.init_std, recipe.model.layers)
        shape = model_shape(recipe, self.plan.padded_vocab)
        self.model = (
            family_of(recipe.model).plain(shape, group=None, init=init).to(self.device)
        )
        groups = parameter_groups(self.model, chosen.weight_decay)
        self.parameters = [list(group["params"]) for group in groups]
        self.masters = [_master_of(own) for own in self.parameters]
        self.model.to(self.dtype).train()
        for group, master in zip(groups, self.masters, strict=True):
            master.grad = torch.empty_like(master)
            group["params"] = [master]
        self.optimizer = torch.optim.AdamW(
            groups, lr=chosen.lr, betas=chosen.betas, eps=chosen.eps, fused=True
        )
        compiling.prepare(self.model, self.plan)
        if spec.compiled:
            self.model.compile()
        self.called = data_parallel(self.model)

    def take(self) -> tuple[Sequence[Any], Work]:
        batches, work = super().take()
        salts = salts_of_step(self.plan, self.grid.at.dp, self.done - 1, self.device)
        return [
            *zip(normalise(batches, self.grid, self.device), salts, strict=True)
        ], work

    def forward(self, given: Any) -> torch.Tensor:
        batch, salts = given
        arguments, salted = for_plain(batch, self.device, salts)
        return loss_of(self.called(*arguments, **salted))

    @torch.no_grad()
    def optimize(self) -> None:
        with self.clock("copies"):
            for master, parameters in zip(self.masters, self.parameters, strict=True):
                torch._foreach_copy_(
                    views_like(master.grad, parameters), [p.grad for p in parameters]
                )
        with self.clock("norm"):
            torch.nn.utils.clip_grad_norm_(self.masters, self.recipe.optimizer.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.recipe, self.done - 1)
        with self.clock("update"):
            self.optimizer.step()
        with self.clock("rounding"):
            for master, parameters in zip(self.masters, self.parameters, strict=True):
                torch._foreach_copy_(parameters, views_like(master, parameters))
        self.model.zero_grad(set_to_none=True)


def _master_of(parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
    """Return the fp32 copies of parameters in one flat tensor."""
    return torch.cat([parameter.detach().float().flatten() for parameter in parameters])


def loss_of(outcome: Any) -> torch.Tensor:
    """Return the loss, of a model that may return parts of it, too."""
    return outcome[0] if isinstance(outcome, tuple) else outcome


def data_parallel(model: torch.nn.Module) -> Any:
    """Have torch average the model's gradients over the ranks, after every backward pass."""
    return (
        DistributedDataParallel(model)
        if torch.distributed.get_world_size() > 1
        else model
    )


class Nano(PlainLoop):
    """A plain GPT-2 in the manner of nanoGPT: pure bf16 on a CPU, autocast on a GPU, fused AdamW."""

    def __init__(self, spec: Specification) -> None:
        super().__init__(spec)
        if self.recipe.model.family != "gpt2":
            raise ValueError("there is no plain loop for BERT here")
        on_cpu = self.device.type == "cpu"
        chosen = self.recipe.optimizer
        stored = self.dtype if on_cpu else torch.float32
        self.model = NanoGpt(self.recipe).to(self.device, stored)
        groups = parameter_groups(self.model, chosen.weight_decay)
        self.optimizer = torch.optim.AdamW(
            groups, lr=chosen.lr, betas=chosen.betas, fused=True
        )
        mixed = not on_cpu and self.dtype != torch.float32
        self.autocast = torch.autocast(self.device.type, self.dtype, enabled=mixed)
        self.scaler = torch.amp.GradScaler(
            enabled=mixed and self.dtype == torch.float16
        )
        if spec.compiled:
            self.model.compile()
        self.called = data_parallel(self.model)

    def forward(self, given: Any) -> torch.Tensor:
        with self.autocast:
            return self.called(
                given["tokens"].to(self.device), given["labels"].to(self.device)
            )

    def optimize(self) -> None:
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), self.recipe.optimizer.clip
        )
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)


class MatrixRate(MeasuredSystem):
    """The machine's matrix rate: for a large square product, and for the model's own products."""

    def __init__(self, spec: Specification) -> None:
        super().__init__(spec)
        recipe = self.recipe
        model = self.recipe.model
        micro = self.plan.layout.micro
        self.size = 256 if spec.tiny else SQUARE[self.device.type != "cpu"]
        length = recipe.sequence_length
        layers = layer_products(model, micro * length)
        heads = head_products(
            model, micro, length, model.vocab_size, 1, recipe.predictions
        )
        self.products = [
            *((each, model.layers) for each in layers),
            *((each, 1) for each in heads),
        ]

    def rates(self, repeats: int) -> dict[str, float]:
        """Return operations per second of a square product, and of the model's with both gradients."""
        left, right = (self._random(self.size, self.size) for _ in "ab")
        square = 2 * self.size**3 / median_seconds(lambda: left @ right, repeats)
        operations = seconds = 0.0
        for product, times in self.products:
            operations += 3 * times * product.operations
            seconds += times * median_seconds(self._pass(product), repeats)
        return {"square": square, "products": operations / seconds}

    def _pass(self, product: Product) -> Callable[[], Any]:
        m, n, k = (int(each) for each in product[:3])
        stream, weight = (self._random(rows, k).requires_grad_() for rows in (m, n))
        given = self._random(m, n)
        return lambda: torch.autograd.grad(
            F.linear(stream, weight), (stream, weight), given
        )

    def _random(self, rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, device=self.device).to(self.dtype)


def median_seconds(work: Callable[[], Any], repeats: int) -> float:
    """Return the median seconds of the work, without those of a first time."""
    return statistics.median(
        timeit.repeat(work, timer=now, repeat=repeats + 1, number=1)[1:]
    )


SYSTEMS: dict[str, type[MeasuredSystem]] = {
    "ours": Ours,
    "transformers": Transformers,
    "bare": Bare,
    "nano": Nano,
    "rate": MatrixRate,
}
