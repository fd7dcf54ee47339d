"""Training through `transformers.Trainer` and accelerate, as Hugging Face's run_clm.py does it.

For recipes with model.implementation=transformers. Modules, loop, accelerate and the way to DeepSpeed are
transformers'. Inputs and records are ours, so that such a run is comparable with every other:

- micro-batches, and the weighted mean of the loss: Trainer shifts labels and counts tokens itself, our labels
  are shifted already;
- initial weights, the schedule, and AdamW's two groups of parameters: with an optimizer in the DeepSpeed JSON
  Trainer would decay biases and LayerNorms too;
- dropout's random state, a function of (seed, step), so that a resumed run needs no file of random states;
- checkpoints: Trainer's have no mark of completeness, so that a killed save counts as one, and keep weights
  in one layout only.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import deepspeed
import torch
from accelerate.state import AcceleratorState, GradientState
from deepspeed.runtime.engine import DeepSpeedEngine
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from data.loader import MicroBatch, StepBatches
from ds_configs.plan import Plan
from launch.deepspeed_fixes import zero0
from launch.deepspeed_fixes.freed_gradients import keep_while_reduced
from launch.deepspeed_fixes.loss_scale import postpone_growth
from launch.deepspeed_fixes.whole_buffers import keep_buffers
from launch.machine import compiled_ops
from launch.ranks import ending, processes
from launch.ranks.watchdog import Watchdog
from launch.training import callbacks, micro_batches, transformers_model
from launch.training import engine as steps
from launch.training.early_ends import EarlyEnd, EarlyStop, StopRequest
from launch.training.engine import parameter_groups
from launch.training.micro_batches import training_batches
from launch.training.run import Callback, Start, TrainingRun, next_batch, run_watchdog
from launch.training.schedule import LearningRateSchedule
from modeling.parallel.cross_entropy import weighted_loss
from modeling.parallel.layers import seed_step
from modeling.parallel.process_grid import ProcessGrid
from recipes.families import fields_of


def train(start: Start) -> EarlyStop | None:
    """Train by Trainer's loop; the counterpart of `launch.training.loop.train`."""
    job = start.job
    plan = job.plan
    if start.done >= plan.recipe.steps:  # Trainer takes at least one step
        return None
    with surrounded(start) as around:
        arguments = training_arguments(plan, str(job.directory))
        drawn = start.checkpoint is None
        given = job.initial_weights
        tokenizer = start.corpus.tokenizer
        model = transformers_model.build(
            plan.recipe, given, drawn=drawn, tokenizer=tokenizer
        )
        batches = training_batches(plan, start.corpus, start.grid, start.checkpoint)
        around.stack.enter_context(contextlib.closing(batches))

        trainer = RecipeTrainer(
            start,
            around,
            callbacks.begin,
            batches,
            forward,
            model=model,
            args=arguments,
        )
        trainer.train()
    return trainer.stopped


@dataclass(frozen=True)
class Surroundings:
    """What a loop of Trainer stands in: a stack to leave at its end, and the user's requests to stop."""

    stack: contextlib.ExitStack
    watchdog: Watchdog
    stop: StopRequest


@contextlib.contextmanager
def surrounded(start: Start) -> Iterator[Surroundings]:
    plan = start.job.plan
    with contextlib.ExitStack() as stack:
        watchdog = stack.enter_context(run_watchdog(start))
        compiled_ops.prepare(plan.ds, start.grid.control_group, start.recorder.say)
        stack.enter_context(isolate_accelerate())
        stack.enter_context(own_plain_engine(plan, start.grid))
        stop = stack.enter_context(StopRequest(start.job.stop_file))
        yield Surroundings(stack, watchdog, stop)


def training_arguments(plan: Plan, directory: str, **more: Any) -> TrainingArguments:
    """Return Trainer's settings. Trainer refuses values other than those of the DeepSpeed JSON.

    `more`: settings of a fine-tuning.
    """
    recipe = plan.recipe
    layout = plan.layout
    optimizer = plan.recipe.optimizer
    threads = torch.get_num_threads()
    # accelerate wants the section, even at stage 0, and a model that is saved whole the second key
    zero = {"stage": plan.zero_stage, "stage3_gather_16bit_weights_on_model_save": True}
    zero |= plan.ds.get("zero_optimization", {})
    silent: dict[str, Any] = dict.fromkeys(
        ("logging_strategy", "save_strategy", "eval_strategy"), "no"
    )
    silent |= dict.fromkeys(("log_level", "log_level_replica"), "error")
    arguments = TrainingArguments(
        output_dir=directory,
        deepspeed={**plan.ds, "zero_optimization": zero},
        use_cpu=not processes.device().own_memory,
        max_steps=recipe.steps,
        per_device_train_batch_size=layout.micro,
        gradient_accumulation_steps=layout.accumulation,
        learning_rate=optimizer.lr,
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        adam_epsilon=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.clip,
        fp16=plan.precision == "fp16",
        bf16=plan.precision == "bf16",
        **silent,
        report_to=[],
        disable_tqdm=True,
        # it would wait for the device after every micro-batch
        logging_nan_inf_filter=False,
        **more,
    )
    torch.set_num_threads(threads)  # accelerate gives a rank all cores of the machine
    return arguments


class RecordedTrainer(Trainer, TrainerCallback):
    """Trainer with the recipe's groups of parameters and schedule, in whose steps a `TrainingRun` is called."""

    # Accelerate puts stand-ins and DeepSpeed's engine where Trainer's annotations promise torch's classes.
    model_wrapped: Any
    optimizer: Any
    lr_scheduler: Any
    run: TrainingRun

    def __init__(
        self,
        start: Start,
        surroundings: Surroundings,
        begin: Callable[[TrainingRun], Sequence[Callback]],
        batches: StepBatches | None = None,
        forward: steps.Forward = steps.forward,
        **arguments: Any,
    ) -> None:
        """Take what `TrainingRun` takes but the engine, which Trainer makes, and `arguments` of Trainer."""
        super().__init__(**arguments)
        self.remove_callback(PrinterCallback)
        self.add_callback(self)
        self.of_run = (begin, batches, forward)
        self.batches: Any = batches
        self.start = start
        self.put_back_buffers = keep_buffers(arguments["model"])
        self.recipe = start.job.plan.recipe
        self.around = surroundings
        self.watchdog = surroundings.watchdog
        self.within = contextlib.ExitStack()  # of the run
        self.losses: list[torch.Tensor] = []  # of the micro-batches of the current step
        self.stopped: EarlyStop | None = None  # how the run was stopped early

    def train(self, *given: Any, **how: Any) -> Any:
        """Train, and end the run."""
        with self.within:
            return super().train(*given, **how)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        engine = self.model_wrapped
        if engine.fp16_enabled():
            postpone_growth(engine)
        keep_while_reduced(engine.optimizer)
        self.put_back_buffers()
        self.start.recorder.mark("engine")
        start = self.start
        around = self.around
        around.stack.enter_context(steps.release_at_end(engine))
        keeping = ending.keep_error_of_block(start.job.directory, but=EarlyEnd)
        around.stack.enter_context(keeping)
        run = TrainingRun(start, engine, around.stop, around.watchdog, *self.of_run)
        self.run = self.within.enter_context(run)
        state.global_step = start.done

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.before = steps.state_before_step(self.model_wrapped)
        self.losses.clear()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        means = torch.stack(self.losses).mean(0).view(-1)
        figures = steps.HostCopy(steps.data_parallel_mean(means, self.start.grid))
        of_step = (self.model_wrapped, self.before, figures)
        read_outcome = functools.partial(steps.read_outcome, *of_step)
        self.stopped = self.run.end_step(state.global_step, read_outcome)
        control.should_training_stop |= self.stopped is not None

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], None]:
        """Return the micro-batches of one step, uncounted: the loss of each is a mean already."""
        self.run.begin_step(self.state.global_step + 1)
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.run.begin_computing()
        assert len(batches) == num_batches, (
            f"{len(batches)} micro-batches of {num_batches}"
        )
        return batches, None

    def create_optimizer(self, model: torch.nn.Module | None = None) -> Any:
        """Put our groups into accelerate's stand-in for the optimizer of the DeepSpeed JSON."""
        assert self.model is not None
        self.optimizer.params = parameter_groups(
            self.model, self.recipe.optimizer.weight_decay
        )
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None:
            self.lr_scheduler = LearningRateSchedule(optimizer, self.recipe)
        return self.lr_scheduler

    def training_step(
        self, model: DeepSpeedEngine, *inputs: Any, **how: Any
    ) -> torch.Tensor:
        with steps.explain_floor(model):
            return super().training_step(model, *inputs, **how)

    def floating_point_ops(self, inputs: Any) -> int:
        """Return 0: `launch.records.result` counts operations."""
        return 0


class RecipeTrainer(RecordedTrainer):
    """Trainer on the recipe's batches and loss."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        super().on_step_begin(args, state, control)
        seed_step(self.recipe.seed, state.global_step, self.start.grid.at)

    def get_batch_samples(self, *given: Any) -> tuple[list[Any], None]:
        """Return the micro-batches of one step, weighted for its mean."""
        batches, _ = super().get_batch_samples(*given)
        device = self.model_wrapped.device
        return [*micro_batches.normalise(batches, self.start.grid, device)], None

    def get_train_dataloader(self) -> Any:
        """Return an iterator over micro-batches."""
        return each_micro_batch(self.batches)

    def compute_loss(
        self, model: DeepSpeedEngine, inputs: MicroBatch, *_: Any, **__: Any
    ) -> torch.Tensor:
        """Return the micro-batch's mean loss; Trainer divides it by the number of micro-batches."""
        loss, *parts = forward(model, inputs)
        self.losses.append(torch.cat([loss.detach().float().view(1), *parts]))
        return loss

    def _prepare_inputs(self, inputs: MicroBatch) -> MicroBatch:
        """Leave inputs alone: Trainer would round the loss's weights to the model's precision."""
        return inputs


def forward(engine: DeepSpeedEngine, batch: MicroBatch) -> tuple[torch.Tensor, ...]:
    """Return (loss) of one micro-batch; of masked tokens it is its own part, too."""
    given = micro_batches.padded_arguments(batch, engine.device)
    values: dict[str, Any] = dict(zip(fields_of(batch).names, given, strict=True))
    tokens = values["tokens"]
    mask = None
    masked = "lengths" in batch
    if masked:
        lengths = batch["lengths"].to(tokens.device)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        mask = (places < lengths[:, None]).long()
    logits = engine(input_ids=tokens, attention_mask=mask).logits  # (B, S, V)
    if masked:
        rows = torch.arange(len(tokens), device=tokens.device)
        logits = logits[rows[:, None], values["positions"]]
    loss = weighted_loss(logits, values["labels"], values["weights"], None)
    return (loss, loss.detach().float().view(1)) if masked else (loss,)


def each_micro_batch(batches: StepBatches) -> Iterator[MicroBatch]:
    """Yield micro-batches; Trainer takes a whole step's, so that the loader stands at a step's end."""
    while True:
        yield from next_batch(batches)


@contextlib.contextmanager
def own_plain_engine(plan: Plan, grid: ProcessGrid) -> Iterator[None]:
    """Give accelerate our engine for ZeRO stage 0 in the place of DeepSpeed's."""

    def plain(config_params: dict[str, Any], **how: Any) -> tuple[Any, ...]:
        engine = zero0.initialize(config=config_params, mpu=grid, **how)
        return engine, engine.optimizer, None, engine.lr_scheduler

    initialize = plain if plan.zero_stage == 0 else deepspeed.initialize
    with mock.patch.object(deepspeed, "initialize", initialize):
        yield


@contextlib.contextmanager
def isolate_accelerate() -> Iterator[None]:
    """Keep accelerate quiet, and reset its and transformers' global state in the end."""
    if os.environ.get("MEGARECIPES_VERBOSE") != "1":
        logging.getLogger("accelerate").setLevel(logging.ERROR)
    before = {*os.environ}
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        unset_hf_deepspeed_config()
        for key in {*os.environ} - before:
            if key.startswith("ACCELERATE_"):
                del os.environ[key]
