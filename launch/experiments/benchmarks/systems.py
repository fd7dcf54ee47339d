"""Systems to measure, as one rank runs them: our engine and its alternatives."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch.nn.parallel import DistributedDataParallel

from data.corpus import build as build_corpus
from data.loader import MicroBatch
from launch.deepspeed_fixes import zero0
from launch.experiments.benchmarks.clock import Clock, now
from launch.experiments.benchmarks.nano_gpt import NanoGpt
from launch.experiments.benchmarks.specification import Specification
from launch.machine import abilities, compiled_ops
from launch.training import compiling
from launch.training.agreement import StepExchange, StepReport
from launch.training.engine import build_engine, own_optimizer, parameter_groups, train_step
from launch.training.job import Job, plan_job
from launch.training.micro_batches import for_plain, normalise, padded_arguments, salts_of_step
from launch.training.run import next_batch
from launch.training.schedule import Schedule, learning_rate
from launch.training.training_batches import training_batches
from modeling import cost
from modeling.cost.operation_count import Product, head_products, layer_products
from modeling.families import family_of, model_shape
from modeling.formats.families import conversion_of
from modeling.initialization import DTYPES, Init
from modeling.parallel.process_grid import ProcessGrid
from modeling.parallel.random_state import seed_step
from recipes.schema import Recipe

SQUARE = 2048, 8192  # rows and columns of the products for the matrix rate, on a CPU and on a GPU
# Methods of the engine's optimizer, of which at most one calls another of the same phase.
WITHIN = {
    "copies": ("copy_grads_in_partition", "_update_hp_grad", "partition_grads", "_take_gradients"),
    "norm": ("_norm", "scaled_global_norm", "_get_norm_groups"),
    "rounding": ("update_lp_params", "round_weights", "_reassign_or_swap_out_partitioned_parameters"),
}
PIPELINE_PHASES = {
    schedule.LoadMicroBatch: "data",
    schedule.ForwardPass: "forward",
    schedule.BackwardPass: "backward",
    schedule.OptimizerStep: "optimizer",
    schedule.ReduceGrads: "reduction",
    schedule.ReduceTiedGrads: "reduction",
    schedule.SendActivation: "between stages",
    schedule.RecvActivation: "between stages",
    schedule.SendGrad: "between stages",
    schedule.RecvGrad: "between stages",
}


class Work(NamedTuple):
    """Tokens and operations of a step, without padding."""

    tokens: int
    operations: int  # of matrix products, forward and backward, without recomputation

    def __add__(self, other: Any) -> Work:
        return Work(self.tokens + other.tokens, self.operations + other.operations)


def work_of(recipe: Recipe, batch: MicroBatch) -> Work:
    """Return the work of one micro-batch."""
    count = cost.exact_flops_per_step
    if "lengths" not in batch:
        samples, length = batch["tokens"].shape
        return Work(samples * length, count(recipe.model, length, samples))
    lengths, predicted = batch["lengths"].tolist(), (batch["weights"] > 0).sum(1).tolist()
    each = (count(recipe.model, s, 1, predictions=p) for s, p in zip(lengths, predicted, strict=True))
    return Work(sum(lengths), sum(each))


class System(Protocol):
    """A measured system. `step` trains one step on the next batches; `clock` times its phases."""

    clock: Clock
    loss: float  # of the last step

    def step(self) -> Work: ...


class Data:
    """The batches of a training, from its own loader."""

    def __init__(self, spec: Specification) -> None:
        self.recipe = spec.load()
        machine = abilities.detect_machine(spec.emulate_fp16)
        self.plan = plan_job(
            self.recipe, spec.ds_config, machine, compiled=spec.compiled, initial_weights=None
        )
        degrees = self.plan.layout
        self.grid = ProcessGrid(degrees.tp, degrees.pp, degrees.dp)
        self.batches = training_batches(
            self.plan, build_corpus(self.recipe, say=lambda text: None), self.grid, None
        )
        self.device = torch.device(get_accelerator().current_device_name())
        self.dtype = DTYPES[self.plan.precision]
        self.done = 0

    def take(self) -> tuple[list[MicroBatch], Work]:
        """Return the micro-batches of the next step, and their work over all ranks."""
        seed_step(self.recipe.seed, self.done, self.grid.at)
        batches = next_batch(self.batches)
        self.done += 1
        own = sum((work_of(self.recipe, batch) for batch in batches), Work(0, 0))
        return batches, Work(own.tokens * self.grid.dp, own.operations * self.grid.dp)


class Ours:
    """Our engine and our model, with the steps of launch/training/loop.py."""

    def __init__(self, spec: Specification) -> None:
        self.data, self.clock, self.said = Data(spec), Clock(), list[str]()
        job = Job(self.data.plan, spec.name, Path("unused"), compiled=spec.compiled)
        self.engine = build_engine(job, self.data.grid, self.said.append)
        clock_engine(self.engine, self.clock)

    def step(self) -> Work:
        data, engine = self.data, self.engine
        with self.clock("data"):
            batches, work = data.take()
        salts = salts_of_step(data.plan, data.grid.at.dp, data.done - 1, engine.device)
        read_outcome = train_step(engine, batches, data.grid, salts)
        telling = StepExchange(StepReport(), data.grid.control_group)
        self.loss = read_outcome().loss
        telling.wait()
        return work


def clock_engine(engine: Any, clock: Clock) -> None:
    """Have the parts of the engine's step on the clock, and the waiting for other ranks within them."""
    works: Any = torch.distributed.Work
    works.wait = clock.timed("communication", works.wait)
    if isinstance(engine, PipelineEngine):
        timed = {kind: clock.timed(PIPELINE_PHASES[kind], f) for kind, f in engine._INSTRUCTION_MAP.items()}
        engine._INSTRUCTION_MAP = timed
        return
    for phase, name in (("forward", "forward"), ("backward", "backward"), ("optimizer", "step")):
        setattr(engine, name, clock.timed(phase, getattr(engine, name)))
    for phase, names in WITHIN.items():
        for name in names:
            if method := getattr(engine.optimizer, name, None):
                setattr(engine.optimizer, name, clock.timed(phase, method))
    engine.basic_optimizer.step = clock.timed("update", engine.basic_optimizer.step)


class Transformers:
    """The model of `transformers` under the same resolved DeepSpeed JSON, in a loop without anything else."""

    def __init__(self, spec: Specification) -> None:
        self.data, self.clock = Data(spec), Clock()
        plan, recipe = self.data.plan, self.data.recipe
        conversion = conversion_of(recipe.model)
        config = conversion.config(recipe.model, recipe.positions, recipe.dropout)
        config.use_cache = False
        kind = conversion.model_class(recipe.model)
        compiled_ops.prepare(plan.ds, self.data.grid.control_group, lambda text: None)
        if plan.zero_stage == 3:
            with deepspeed.zero.Init(config_dict_or_path=plan.ds):
                model = kind(config)
            for parameter in model.parameters():  # transformers' own initialisation saw empty tensors
                with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                    if parameter.dim() > 1:
                        torch.nn.init.normal_(parameter, std=recipe.init_std)
        else:
            model = kind(config)
        if recipe.checkpoint_interval:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if spec.compiled:
            model.compile()
        how: dict[str, Any] = dict(
            model=model,
            config=plan.ds,
            optimizer=own_optimizer(plan.ds, self.data.grid),
            lr_scheduler=lambda optimizer: Schedule(optimizer, recipe),
            model_parameters=parameter_groups(model, recipe.optimizer.weight_decay),
        )
        if plan.zero_stage == 0:
            self.engine = zero0.initialize(**how, mpu=self.data.grid)
        else:
            self.engine = deepspeed.initialize(**how)[0]
        self.engine.train()
        clock_engine(self.engine, self.clock)

    def step(self) -> Work:
        with self.clock("data"):
            batches, work = self.data.take()
        losses = []
        for batch in batches:
            loss = self.engine(**transformers_inputs(batch, self.engine.device)).loss
            self.engine.backward(loss)
            self.engine.step()
            losses.append(loss.detach())
        self.loss = torch.stack(losses).mean().item()
        return work


def transformers_inputs(batch: MicroBatch, device: torch.device) -> dict[str, torch.Tensor]:
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
    kept = torch.arange(tokens.shape[1], device=device)[None] < batch["lengths"].to(device)[:, None]
    found = {"input_ids": tokens, "token_type_ids": types, "attention_mask": kept.long(), "labels": full}
    return {**found, "next_sentence_label": sentences} if bool(batch["sentence_weights"].any()) else found


class Bare:
    """Our model in a bare PyTorch loop: flat fp32 master weights, torch's fused AdamW, clipping."""

    def __init__(self, spec: Specification) -> None:
        self.data, self.clock = Data(spec), Clock()
        recipe, plan = self.data.recipe, self.data.plan
        init = Init(recipe.seed, recipe.init_std, recipe.model.layers)
        shape = model_shape(recipe, plan.padded_vocab)
        self.model = family_of(recipe.model).plain(shape, group=None, init=init).to(self.data.device)
        groups = parameter_groups(self.model, recipe.optimizer.weight_decay)
        self.parameters = [list(group["params"]) for group in groups]
        self.masters = [torch.cat([p.detach().float().flatten() for p in of]) for of in self.parameters]
        self.model.to(self.data.dtype).train()
        for master in self.masters:
            master.grad = torch.empty_like(master)
        decays = [
            {"params": [m], "weight_decay": g["weight_decay"]}
            for m, g in zip(self.masters, groups, strict=True)
        ]
        chosen = recipe.optimizer
        self.optimizer = torch.optim.AdamW(
            decays, lr=chosen.lr, betas=chosen.betas, eps=chosen.eps, fused=True
        )
        compiling.prepare(self.model, plan)
        if spec.compiled:
            self.model.compile()
        self.called = data_parallel(self.model)

    def step(self) -> Work:
        clock, recipe = self.clock, self.data.recipe
        with clock("data"):
            batches, work = self.data.take()
            salts = salts_of_step(self.data.plan, self.data.grid.at.dp, self.data.done - 1, self.data.device)
            batches = list(normalise(batches, self.data.grid, self.data.device))
        losses = []
        for batch, salt in zip(batches, salts, strict=True):
            with clock("forward"):
                given, salted = for_plain(batch, self.data.device, salt)
                loss = self.called(*given, **salted)
                loss = (loss[0] if isinstance(loss, tuple) else loss) / len(batches)
            with clock("backward"):
                loss.backward()
            losses.append(loss.detach())
        with clock("optimizer"), torch.no_grad():
            with clock("copies"):
                for master, parameters in zip(self.masters, self.parameters, strict=True):
                    views = _views(master.grad, parameters)
                    torch._foreach_copy_(views, [p.grad for p in parameters])
            with clock("norm"):
                torch.nn.utils.clip_grad_norm_(self.masters, recipe.optimizer.clip)
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(recipe, self.data.done - 1)
            with clock("update"):
                self.optimizer.step()
            with clock("rounding"):
                for master, parameters in zip(self.masters, self.parameters, strict=True):
                    torch._foreach_copy_(parameters, _views(master, parameters))
            self.model.zero_grad(set_to_none=True)
        self.loss = sum(losses).item()
        return work


def data_parallel(model: torch.nn.Module) -> Any:
    """Have torch average the model's gradients over the ranks, after every backward pass."""
    return DistributedDataParallel(model) if torch.distributed.get_world_size() > 1 else model


def _views(flat: Any, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    parts = flat.split([p.numel() for p in like])
    return [part.view_as(p) for part, p in zip(parts, like, strict=True)]


class Nano:
    """A plain GPT-2 in the manner of nanoGPT: pure bf16 on a CPU, autocast on a GPU, fused AdamW."""

    def __init__(self, spec: Specification) -> None:
        self.data, self.clock = Data(spec), Clock()
        recipe, self.device = self.data.recipe, self.data.device
        if recipe.model.family != "gpt2":
            raise ValueError("there is no plain loop for BERT here")
        self.model: Any = NanoGpt(recipe).to(self.device)
        if self.device.type == "cpu":
            self.model.to(self.data.dtype)
        chosen = recipe.optimizer
        decayed: tuple[list[torch.Tensor], ...] = ([], [])
        for parameter in self.model.parameters():
            decayed[parameter.dim() < 2].append(parameter)
        groups = [
            {"params": p, "weight_decay": d} for p, d in zip(decayed, (chosen.weight_decay, 0), strict=True)
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=chosen.lr, betas=chosen.betas, fused=True)
        on_gpu = self.device.type != "cpu" and self.data.dtype != torch.float32
        self.autocast = torch.autocast(self.device.type, self.data.dtype, enabled=on_gpu)
        self.scaler = torch.amp.GradScaler(enabled=on_gpu and self.data.dtype == torch.float16)
        if spec.compiled:
            self.model.compile()
        self.called = data_parallel(self.model)

    def step(self) -> Work:
        clock = self.clock
        with clock("data"):
            batches, work = self.data.take()
        losses = []
        for batch in batches:
            with clock("forward"), self.autocast:
                tokens, labels = (batch[name].to(self.device) for name in ("tokens", "labels"))
                loss = self.called(tokens, labels) / len(batches)
            with clock("backward"):
                self.scaler.scale(loss).backward()
            losses.append(loss.detach())
        with clock("optimizer"):
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.data.recipe.optimizer.clip)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
        self.loss = sum(losses).item()
        return work


class MatrixRate:
    """The machine's matrix rate: for a large square product, and for the model's own products."""

    clock = Clock()

    def __init__(self, spec: Specification) -> None:
        self.device = torch.device(get_accelerator().current_device_name())
        self.data = Data(spec)
        self.dtype, self.size = self.data.dtype, SQUARE[self.device.type != "cpu"] if not spec.tiny else 256
        layout, recipe = self.data.plan.layout, self.data.recipe
        tokens, model = layout.micro * recipe.sequence_length, recipe.model
        heads = head_products(
            model, layout.micro, recipe.sequence_length, model.vocab_size, 1, recipe.predictions
        )
        self.products = [*layer_products(model, tokens, recipe.sequence_length), *heads]
        self.times = [model.layers] * (len(self.products) - len(heads)) + [1] * len(heads)

    def rates(self, repeats: int) -> dict[str, float]:
        """Return operations per second of a square product, and of the model's with both gradients."""
        left, right = (torch.randn(self.size, self.size, device=self.device).to(self.dtype) for _ in "ab")
        square = 2 * self.size**3 / self._seconds(lambda: left @ right, repeats)
        operations = seconds = 0.0
        for product, times in zip(self.products, self.times, strict=True):
            operations += 3 * times * product.operations
            seconds += times * self._seconds(self._pass(product), repeats)
        return {"square": square, "products": operations / seconds}

    def _pass(self, product: Product) -> Any:
        m, n, k = (int(each) for each in product[:3])
        made = lambda *size: torch.randn(size, device=self.device).to(self.dtype)  # noqa: E731
        stream, weight, given = made(m, k).requires_grad_(), made(n, k).requires_grad_(), made(m, n)
        return lambda: torch.autograd.grad(F.linear(stream, weight), (stream, weight), given)

    def _seconds(self, work: Any, repeats: int) -> float:
        found = []
        for _ in range(repeats + 1):
            started = now()
            work()
            found.append(now() - started)
        return statistics.median(found[1:])
