"""Fine-tuning by `transformers.Trainer`: a BERT's class with a head, on the examples of a task.

Modules, loop, order of a step, dropout, accelerate, DeepSpeed's engine and checkpoints are the libraries'.
Ours are the initial weights, the order of the examples, AdamW's groups of parameters and the schedule (as in
`launch.training.transformers_trainer`), and the records.

    RUN/checkpoints/checkpoint-N/      Trainer's, also a directory of `save_pretrained` with the vocabulary
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import (
    DataCollatorForMultipleChoice,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from data.samples.fields import EpochOrders
from data.tasks.corpus import TaskCorpus
from launch.checkpoints.run_checkpoints import Checkpoint
from launch.evaluation.finetuning_seeds import PREDICTIONS, keep_predictions
from launch.ranks import processes
from launch.ranks.watchdog import Phase
from launch.records.facts import SaveOutcome, StepRecord, TaskScore, Validation
from launch.training.callbacks import watchers
from launch.training.early_ends import EarlyStop
from launch.training.job import Job
from launch.training.run import Start, TrainingRun, due
from launch.training.saves import SaveSchedule
from launch.training.transformers_trainer import (
    RecordedTrainer,
    surrounded,
    training_arguments,
)
from launch.weights.export import write_model
from modeling.families import conversion_of, drawn_parameters
from modeling.initialization import NEW_HEADS
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
    recipe = job.plan.recipe
    with surrounded(start) as around:
        logging.disable_progress_bar()
        arguments = training_arguments(
            job.plan,
            str(job.checkpoints),
            seed=recipe.seed,
            train_sampling_strategy="sequential",
            per_device_eval_batch_size=job.plan.layout.micro,
            eval_on_start=start.first,
            save_total_limit=recipe.run.keep_checkpoints,
        )
        pad: Any = DataCollatorWithPadding
        if recipe.model.task_head == "choice":
            pad = DataCollatorForMultipleChoice
        order = example_order(recipe, len(corpus.train))
        trainer = TaskTrainer(
            start,
            around,
            lambda run: [*watchers(run), TrainerOrders(run, trainer)],
            model=_model(start, corpus.tokenizer),
            args=arguments,
            train_dataset=corpus.train.select(order),
            eval_dataset=corpus.predicted[0].samples,
            data_collator=pad(corpus.tokenizer),
            processing_class=corpus.tokenizer,
            compute_metrics=_figures,
        )
        resumed = str(start.checkpoint.directory) if start.checkpoint else None
        trainer.train(resume_from_checkpoint=resumed)
        if trainer.stopped is None:
            scores += _predict(trainer, corpus, job.directory)
    return trainer.stopped


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
    drawn = drawn_parameters(recipe, given=given, new=NEW_HEADS)
    weights = {name: each.detach() for name, each in drawn.items()}
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    write_model(recipe, weights, tokenizer, place, torch.float32)


def example_order(recipe: Recipe, examples: int) -> list[int]:
    """List the examples of all epochs, each in an order of its own, up to the last full step."""
    orders = EpochOrders(examples)
    places = range(recipe.sizes.samples(recipe.steps))
    return [orders.locate(place, recipe.seed)[1] for place in places]


class TaskTrainer(RecordedTrainer):
    """Trainer on a task's examples, with the accuracy of a step next to its loss."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, *_: Any, **__: Any
    ) -> Any:
        if not model.training:  # the run counts the others
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


class TrainerOrders:
    """Has Trainer validate and save after a step: a callback in the place of ours."""

    def __init__(self, run: TrainingRun, trainer: TaskTrainer) -> None:
        self._run = run
        self._trainer = trainer
        self._schedule = SaveSchedule(run)
        run.recorder.mark("weights")

    def after_step(self, record: StepRecord) -> None:
        recipe = self._run.recipe
        step = record.step
        control = self._trainer.control
        control.should_save = self._schedule.begins(step)
        validates = (
            due(step, recipe.run.validate_every) and not self._run.reports.stopped
        )
        control.should_evaluate = step == recipe.steps or validates

    def end(self, error: BaseException | None) -> None: ...


def _predict(
    trainer: TaskTrainer, corpus: TaskCorpus, directory: Path
) -> tuple[TaskScore, ...]:
    """Predict every split; rank 0 writes and returns the scores. Collective."""
    trainer.watchdog.enter(Phase.VALIDATING)
    logits = {}
    for each in corpus.predicted:
        found = trainer.predict(each.samples).predictions
        if isinstance(found, tuple):
            found = _spans(found, each.samples["input_ids"])
        logits[each.split.name] = found.astype(np.float32)
    if processes.rank() != 0:
        return ()
    return keep_predictions(directory / PREDICTIONS, corpus.predicted, logits)


def _spans(ends: Sequence[np.ndarray], tokens: Sequence[Sequence[int]]) -> np.ndarray:
    """Join the logits of beginnings and ends, each (n, S), to (n, S, 2), with -inf at padding."""
    joined = np.stack(ends, -1)
    for row, own in zip(joined, tokens, strict=True):
        row[len(own) :] = -np.inf
    return joined
