"""Training through `transformers.Trainer` and accelerate, as Hugging Face's run_clm.py does it under DeepSpeed.

For recipes with model.implementation=transformers. The modules, the loop, accelerate and the way to DeepSpeed are theirs. Ours
are the inputs and what is kept, so that such a run is comparable with every other:

- micro-batches, and the weighted mean of the loss: Trainer shifts labels and counts tokens itself, our labels are shifted already;
- initial weights, the schedule, and AdamW's two groups of parameters: with an optimizer in the DeepSpeed JSON Trainer would decay
  biases and LayerNorms too;
- dropout's random state, a function of (seed, step), so that a resumed run needs no file of random states;
- checkpoints: Trainer's have no mark of completeness, are found by the number in their name and so also when a save was killed,
  and keep weights in one layout only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator

import deepspeed
import torch
from accelerate.state import AcceleratorState, GradientState
from deepspeed.accelerator import get_accelerator
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from ds_configs.plan import Plan
from launch.deepspeed_fixes import zero0
from launch.deepspeed_fixes.loss_scale_growth import postpone_growth
from launch.machine import compiled_ops, stop_request
from launch.training import micro_batches, transformers_model
from launch.training.engine import (
    Before,
    closing,
    data_parallel_mean,
    explained_floor,
    outcome_of_step,
    parameter_groups,
)
from launch.training.micro_batches import MicroBatch
from launch.training.run import TrainingRun
from launch.training.schedule import Schedule
from modeling.parallel.cross_entropy import weighted_loss
from modeling.parallel.process_grid import ProcessGrid
from modeling.parallel.random_state import seed_step


def train(job, metrics, corpus, grid: ProcessGrid) -> str | None:
    """What `pretrain.train` is for our own model."""
    plan = job.plan
    run = TrainingRun(job, metrics, corpus, grid)
    if run.done >= plan.recipe.steps:  # Trainer takes at least one step
        return None
    compiled_ops.prepare(plan.ds, grid.control_group, metrics.say)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_own_accelerate_state())
        arguments = training_arguments(plan, str(job.directory))
        model = transformers_model.build(plan.recipe, job.initial_weights, metrics.say)
        if plan.zero_stage == 0:
            stack.enter_context(_plain_data_parallel(grid))
        stop = stack.enter_context(stop_request.StopRequest(job.directory / "STOP"))
        steps = Steps(run, stop, stack)
        trainer = RecipeTrainer(steps, model=model, args=arguments, callbacks=[steps])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return steps.stopped


def training_arguments(plan: Plan, directory: str) -> TrainingArguments:
    """Trainer's settings. It compares those that the DeepSpeed JSON has as well, and refuses the run where they differ."""
    recipe, layout, optimizer = plan.recipe, plan.layout, plan.recipe.optimizer
    threads = torch.get_num_threads()
    arguments = TrainingArguments(
        output_dir=directory,
        deepspeed={
            "zero_optimization": {"stage": plan.zero_stage},
            **plan.ds,
        },  # accelerate wants the section, even at stage 0
        use_cpu=get_accelerator().device_name() == "cpu",
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
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        report_to=[],
        disable_tqdm=True,
        log_level="error",
        log_level_replica="error",
        logging_nan_inf_filter=False,  # it would wait for the device after every micro-batch
    )
    torch.set_num_threads(threads)  # accelerate gives a rank all cores of the machine
    return arguments


class Steps(TrainerCallback):
    """Hands the steps that Trainer performs to the run, and takes its decisions back."""

    def __init__(self, run: TrainingRun, stop: stop_request.StopRequest, stack: contextlib.ExitStack):
        self.run, self.stop, self._stack = run, stop, stack
        self.started = self.waited = (
            0.0  # wall time at the beginning of the step; seconds of it waited for its batch
        )
        self.losses: list[torch.Tensor] = []  # of the step's micro-batches
        self.stopped: str | None = None

    def on_train_begin(self, args, state, control, *, model, **_):
        """The engine exists: go on from the checkpoint, or validate."""
        engine = self.engine = self.trainer.model_wrapped
        self._stack.enter_context(closing(engine))
        if engine.fp16_enabled():
            postpone_growth(engine)
        self.run.begin(engine, forward)
        self._stack.callback(self.run.close)
        state.global_step = self.run.done

    def on_step_begin(self, args, state, control, **_):
        self.before = Before.step(self.engine)
        self.losses.clear()
        seed_step(self.run.recipe.seed, state.global_step, self.run.grid.at)

    def on_step_end(self, args, state, control, **_):
        loss = data_parallel_mean(torch.stack(self.losses).mean(0), self.run.grid)
        report = outcome_of_step(self.engine, self.before, loss)
        seconds = time.perf_counter() - self.started
        self.stopped = self.run.completed(state.global_step, report, seconds, self.waited, self.stop)
        control.should_training_stop |= self.stopped is not None


class RecipeTrainer(Trainer):
    """Trainer on the recipe's batches, loss, groups of parameters and schedule."""

    def __init__(self, steps: Steps, **arguments):
        super().__init__(**arguments)
        self.steps, self.recipe = steps, steps.run.recipe
        steps.trainer = self

    def get_train_dataloader(self) -> Iterator[MicroBatch]:
        return _flat(self.steps.run)

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """The micro-batches of one optimizer step. Tokens are not counted: the weights of the batches make the loss a mean."""
        self.steps.started = time.perf_counter()
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.steps.waited = time.perf_counter() - self.steps.started
        assert len(batches) == num_batches, f"{len(batches)} micro-batches of {num_batches}"
        return batches, None

    def create_optimizer(self, model=None):
        """Accelerate's stand-in for the optimizer of the DeepSpeed JSON, with our groups."""
        self.optimizer.params = parameter_groups(self.model, self.recipe.optimizer.weight_decay)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        if self.lr_scheduler is None:
            self.lr_scheduler = Schedule(optimizer, self.recipe)
        return self.lr_scheduler

    def training_step(self, model, inputs, num_items_in_batch=None) -> torch.Tensor:
        with explained_floor(model):
            return super().training_step(model, inputs, num_items_in_batch)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None) -> torch.Tensor:
        """Mean loss of the micro-batch, which Trainer divides by the number of micro-batches."""
        (loss,) = forward(model, inputs)
        self.steps.losses.append(loss.detach().float())
        return loss

    def _prepare_inputs(self, inputs: MicroBatch) -> MicroBatch:
        """As they are: Trainer would round the weights of the loss to the precision of the model."""
        return inputs

    def floating_point_ops(self, inputs) -> int:
        """Not counted here but in launch/runs/metrics.py."""
        return 0


def forward(engine, batch: MicroBatch) -> tuple[torch.Tensor]:
    """(loss) of one micro-batch, by a GPT2LMHeadModel."""
    tokens, labels, weights = micro_batches.for_plain(batch, engine.device)
    logits = engine(input_ids=tokens, use_cache=False).logits  # (B, S, V)
    return (weighted_loss(logits, labels, weights, None),)


def _flat(run: TrainingRun) -> Iterator[MicroBatch]:
    """Micro-batch after micro-batch. Trainer asks for those of one step at once, so that the loader stands at a step's end."""
    for step in run.batches:
        yield from step


@contextlib.contextmanager
def _plain_data_parallel(grid: ProcessGrid):
    """Our engine for ZeRO stage 0 (launch/deepspeed_fixes/zero0.py) where accelerate calls DeepSpeed's: it takes no engine from its caller."""
    original = deepspeed.initialize

    def initialize(*, config_params: dict, **arguments):
        engine = zero0.initialize(config=config_params, mpu=grid, **arguments)
        return engine, engine.optimizer, None, engine.lr_scheduler

    deepspeed.initialize = initialize
    try:
        yield
    finally:
        deepspeed.initialize = original


@contextlib.contextmanager
def _own_accelerate_state():
    """Undo what accelerate and transformers keep per process, so that another run can follow in this one; keep them quiet."""
    if os.environ.get("MEGARECIPES_VERBOSE") != "1":
        logging.getLogger("accelerate").setLevel(logging.ERROR)
    before = {key: value for key, value in os.environ.items() if key.startswith("ACCELERATE_")}
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        unset_hf_deepspeed_config()
        for key in [key for key in os.environ if key.startswith("ACCELERATE_") and key not in before]:
            del os.environ[key]
