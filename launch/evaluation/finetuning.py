"""Fine-tuning by `transformers.Trainer`: a BERT's class with a head, on the examples of a task.

Modules, loop, order of a step, dropout, accelerate, DeepSpeed's engine and checkpoints are the libraries'.
Ours are the initial weights, the order of the examples, AdamW's groups of parameters and the schedule (as in
`launch.training.transformers_trainer`), and the records.

    RUN/checkpoints/checkpoint-N/      Trainer's, also a directory of `save_pretrained` with the vocabulary
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import Sampler
from transformers import (
    DataCollatorForMultipleChoice,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedTokenizerFast,
    PrinterCallback,
    TrainerCallback,
)
from transformers.utils import logging

from data.samples.fields import EpochOrders
from data.tasks.corpus import TaskCorpus
from launch.checkpoints.run_checkpoints import Checkpoint
from launch.deepspeed_fixes.freed_gradients import keep_while_reduced
from launch.deepspeed_fixes.loss_scale import postpone_growth
from launch.evaluation import finetuning_predictions
from launch.machine import compiled_ops
from launch.ranks import ending, processes
from launch.ranks.watchdog import Phase
from launch.records.facts import SaveOutcome, TaskScore, Validation
from launch.training import engine as steps
from launch.training.agreement import StepExchange, StepReport
from launch.training.early_ends import (
    REASONS,
    EarlyEnd,
    EarlyStop,
    FigureBounds,
    SkipCounter,
    StopRequest,
)
from launch.training.job import Job
from launch.training.run import Start, due, run_watchdog
from launch.training.transformers_trainer import (
    OwnOptimizerTrainer,
    isolate_accelerate,
    own_plain_engine,
    training_arguments,
)
from launch.weights.export import write_model
from modeling.families import conversion_of, family_of, model_shape
from modeling.initialization import NEW_HEADS, Init, canonical_name
from recipes.schema import Recipe

STATE = "trainer_state.json"  # which Trainer writes last


@dataclass(frozen=True)
class TrainerCheckpoint(Checkpoint):
    """A checkpoint of Trainer, which keeps no manifest."""

    manifest: Any = None

    @property
    def step(self) -> int:
        return int(self.directory.name.rpartition("-")[2])


def checkpoints(root: Path) -> list[TrainerCheckpoint]:
    """Return the checkpoints of Trainer with their state, the newest first."""
    every = [TrainerCheckpoint(file.parent) for file in root.glob(f"*/{STATE}")]
    return sorted(every, key=lambda each: each.step, reverse=True)


def train(
    start: Start, corpus: TaskCorpus, scores: list[TaskScore]
) -> EarlyStop | None:
    """Fine-tune on this rank, predict every split, and add the scores on rank 0. Collective."""
    job = start.job
    plan = job.plan
    recipe = plan.recipe
    with contextlib.ExitStack() as stack:
        watchdog = stack.enter_context(run_watchdog(start))
        compiled_ops.prepare(plan.ds, start.grid.control_group, start.recorder.say)
        stack.enter_context(isolate_accelerate())
        stack.enter_context(own_plain_engine(plan, start.grid))
        logging.disable_progress_bar()
        zero = plan.ds.get("zero_optimization", {})
        if plan.zero_stage == 3:
            zero = {**zero, "stage3_gather_16bit_weights_on_model_save": True}
            plan = replace(plan, ds={**plan.ds, "zero_optimization": zero})
        arguments = training_arguments(
            plan,
            str(job.checkpoints),
            seed=recipe.seed,
            per_device_eval_batch_size=plan.layout.micro,
            eval_on_start=start.first,
            save_total_limit=recipe.run.keep_checkpoints,
        )
        model = _model(start, corpus.tokenizer)
        stop = stack.enter_context(StopRequest(job.stop_file))
        trainer = TaskTrainer(
            recipe,
            watchdog,
            model=model,
            args=arguments,
            train_dataset=corpus.train,
            eval_dataset=corpus.predicted[0].samples,
            data_collator=_collator(recipe, corpus.tokenizer),
            processing_class=corpus.tokenizer,
            compute_metrics=_figures,
        )
        trainer.start = start
        trainer.examples = len(corpus.train)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(RecordSteps(start, trainer, stop, stack))
        stack.enter_context(ending.keep_error_of_block(job.directory, but=EarlyEnd))
        resumed = str(start.checkpoint.directory) if start.checkpoint else None
        trainer.train(resume_from_checkpoint=resumed)
        if trainer.stopped is None:
            scores += _predict(trainer, corpus, job.directory)
        return trainer.stopped


def _collator(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Any:
    """Return what pads the samples of a micro-batch to the longest of them."""
    if recipe.model.task_head == "choice":
        return DataCollatorForMultipleChoice(tokenizer)
    return DataCollatorWithPadding(tokenizer)


def _model(start: Start, tokenizer: PreTrainedTokenizerFast) -> Any:
    """Build the model, under ZeRO-3 partitioned at once, of what rank 0 exports. Collective."""
    job = start.job
    recipe = job.plan.recipe
    kind = conversion_of(recipe.model).model_class(recipe.model)
    place = job.directory / "start"
    if start.checkpoint is not None:
        place = start.checkpoint.directory
    elif start.grid.rank == 0:
        _export(job, tokenizer, place)
    torch.distributed.barrier(group=start.grid.control_group)
    model = kind.from_pretrained(place, dtype=torch.float32, local_files_only=True)
    torch.distributed.barrier(group=start.grid.control_group)
    if start.checkpoint is None and start.grid.rank == 0:
        shutil.rmtree(place)
    if recipe.checkpoint_interval:
        how = {"use_reentrant": False}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
    model.loss_parts = ("accuracy",)  # read with the figures of a step
    return model


def _export(job: Job, tokenizer: PreTrainedTokenizerFast, place: Path) -> None:
    """Write the model as `save_pretrained` does: the given encoder, and what it lacks drawn from the seed."""
    recipe = job.plan.recipe
    given = job.initial_weights.read(recipe) if job.initial_weights else None
    how: dict[str, Any] = dict(given=given, new=NEW_HEADS)
    init = Init(recipe.seed, recipe.init_std, recipe.model.layers, **how)
    shape = model_shape(recipe, recipe.model.vocab_size)
    module = family_of(recipe.model).plain(shape, group=None, init=init)
    weights = {canonical_name(each): each.detach() for each in module.parameters()}
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    write_model(recipe, weights, tokenizer, place, torch.float32)


class ExampleOrder(Sampler[int]):
    """The examples of all epochs after each other, each in an order of its own, up to the last full step."""

    def __init__(self, recipe: Recipe, examples: int):
        self.recipe = recipe
        self.orders = EpochOrders(examples)

    def __len__(self) -> int:
        return self.recipe.sizes.samples(self.recipe.steps)

    def __iter__(self) -> Iterator[int]:
        for place in range(len(self)):
            yield self.orders.locate(place, self.recipe.seed)[1]


class TaskTrainer(OwnOptimizerTrainer):
    """Trainer on a task's examples, with the accuracy of a step next to its loss."""

    start: Start
    examples: int  # of training

    def _get_train_sampler(self, *_: Any) -> ExampleOrder:
        return ExampleOrder(self.recipe, self.examples)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, *_: Any, **__: Any
    ) -> Any:
        self.watchdog.advance()
        outputs = model(**inputs)
        logits, targets = _pairs(outputs, inputs)
        loss = _loss(logits, targets)  # the model's own is one of half precision there
        if model.training:
            accuracy = _right(logits, targets).float().mean()
            self.losses.append(torch.stack([loss.detach(), accuracy]))
        return (loss, outputs) if return_outputs else loss

    def evaluate(self, *given: Any, **how: Any) -> dict[str, float]:
        self.watchdog.enter(Phase.VALIDATING)
        found: dict[str, float] = super().evaluate(*given, **how)
        outcome = Validation(found["eval_mean"], {"accuracy": found["eval_accuracy"]})
        self.start.recorder.validation(self.state.global_step, outcome)
        return found

    def _save_checkpoint(self, *given: Any) -> None:
        self.watchdog.enter(Phase.SAVING)
        began = time.perf_counter()
        super()._save_checkpoint(*given)
        torch.distributed.barrier(group=self.start.grid.control_group)
        step = self.state.global_step
        place = self.start.job.checkpoints / f"checkpoint-{step}"
        size = sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
        seconds = time.perf_counter() - began
        self.start.recorder.save(SaveOutcome(step, size, seconds, seconds, False))


def _pairs(outputs: Any, inputs: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return logits and targets of classes or choices, or those of beginnings and ends of spans."""
    if "start_logits" in outputs:
        targets = (inputs["start_positions"], inputs["end_positions"])
        return (outputs.start_logits, outputs.end_logits), targets
    return (outputs.logits,), (inputs["labels"],)


def _loss(logits: Sequence[Any], targets: Sequence[Any]) -> Any:
    """Return the mean cross-entropy in float32, of a span that of both ends."""
    pairs = zip(logits, targets, strict=True)
    losses = [cross_entropy(each.float(), target) for each, target in pairs]
    return torch.stack(losses).mean()


def _right(logits: Sequence[Any], targets: Sequence[Any]) -> Any:
    """Return which examples (n,) have the largest of their logits (n, C) at each target (n,)."""
    right = [x.argmax(-1) == y for x, y in zip(logits, targets, strict=True)]
    return right[0] & right[-1]


def _figures(outcome: EvalPrediction) -> dict[str, float]:
    """Return accuracy and loss over all examples; Trainer's loss is a mean over batches of unequal sizes."""
    found = []
    for values in (outcome.predictions, outcome.label_ids):
        arrays = values if isinstance(values, tuple) else (values,)
        found.append([torch.from_numpy(each) for each in arrays])
    accuracy = _right(*found).float().mean()
    return {"accuracy": float(accuracy), "mean": float(_loss(*found))}


class RecordSteps(TrainerCallback):
    """Record Trainer's steps, and say when it validates, saves and stops."""

    def __init__(
        self,
        start: Start,
        trainer: TaskTrainer,
        stop: StopRequest,
        stack: contextlib.ExitStack,
    ) -> None:
        self.start = start
        self.recipe = start.job.plan.recipe
        self.trainer = trainer
        self.stop = stop
        self.stack = stack
        self.skipped = SkipCounter(start.job.plan.precision)
        self.bounds = FigureBounds(start.recorder.say)
        self.saved_at = time.monotonic()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.engine = self.trainer.model_wrapped
        self.stack.enter_context(steps.release_at_end(self.engine))
        if self.engine.fp16_enabled():
            postpone_growth(self.engine)
        keep_while_reduced(self.engine.optimizer)
        self.start.recorder.mark("engine")
        self.start.recorder.mark("weights")

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.before = steps.state_before_step(self.engine)
        self.trainer.losses.clear()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        step = state.global_step
        trainer = self.trainer
        run = self.recipe.run
        grid = self.start.grid
        means = torch.stack(trainer.losses).mean(0)
        figures = steps.HostCopy(steps.data_parallel_mean(means, grid))
        every = run.save_every_minutes
        overdue = bool(every) and time.monotonic() - self.saved_at >= 60 * (every or 0)
        stop = REASONS.index(self.stop.look())
        report = StepReport(stop, trainer.waited, overdue=overdue)
        exchange = StepExchange(report, grid.control_group)
        outcome = steps.read_outcome(self.engine, self.before, figures)
        trainer.watchdog.enter(Phase.COMPUTED)
        news = exchange.wait()
        trainer.watchdog.enter(Phase.RECORDING)
        seconds = time.perf_counter() - trainer.started
        record = replace(outcome, seconds=seconds, data_seconds=trainer.waited)
        self.start.recorder.step(record)
        self.skipped.see(record)
        self.bounds.see(record)
        last = step == self.recipe.steps
        control.should_evaluate = last or due(step, run.validate_every)
        due_now = due(step, run.save_every) or news.overdue
        if due_now or news.stopped or (last and run.save_last):
            control.should_save = True
            self.saved_at = time.monotonic()
        if last:
            self.bounds.check_end()
        elif news.stopped:
            control.should_evaluate = False
            control.should_training_stop = True
            trainer.stopped = EarlyStop(news.stopped, step, self.recipe.steps)


def _predict(
    trainer: TaskTrainer, corpus: TaskCorpus, directory: Path
) -> tuple[TaskScore, ...]:
    """Predict every split; rank 0 writes and returns the scores. Collective."""
    trainer.watchdog.enter(Phase.VALIDATING)
    logits = {}
    for split in corpus.predicted:
        found = trainer.predict(split.samples).predictions
        if isinstance(found, tuple):
            found = _spans(found, split.samples["input_ids"])
        logits[split.name] = found.astype(np.float32)
    if processes.rank() != 0:
        return ()
    folder = directory / finetuning_predictions.FOLDER
    return finetuning_predictions.keep(folder, corpus.predicted, logits)


def _spans(ends: Sequence[np.ndarray], tokens: Sequence[Sequence[int]]) -> np.ndarray:
    """Join the logits of beginnings and ends, each (n, S), to (n, S, 2), with -inf at padding."""
    joined = np.stack(ends, -1)
    for row, own in zip(joined, tokens, strict=True):
        row[len(own) :] = -np.inf
    return joined
