"""Score windows of tokens with a model under any layout.

The model is built as for training, with another loss: the negative log-likelihood of every target, and
whether the target is the likeliest token. A vocabulary split over tensor-parallel ranks stays split. Logits
start at the first target that counts. The padding of a window depends only on its own length and targets,
and every batch is full. Layout and batch therefore change figures only by rounding.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from data.loader import MicroBatch
from data.tasks.scored_text import TaskData, Window
from data.text.vocabulary import unused_numbers
from ds_configs.plan import Plan
from launch.console import terminal
from launch.console.output import place_problem
from launch.console.progress import bar
from launch.evaluation.scores import Score, describe, keep, to_json
from launch.evaluation.scoring_job import ScoringJob, read_task
from launch.machine import compiled_ops, description, memory
from launch.ranks import ending, processes
from launch.ranks.meeting import Meeting
from launch.ranks.processes import gathered
from launch.ranks.watchdog import Phase, Watchdog
from launch.training import micro_batches
from launch.training.build_model import build_module
from launch.training.engine import move_buffers
from launch.weights.foreign_weights import read
from modeling import cost
from modeling.initialization import DTYPES
from modeling.layer_list import Pipeline, PipelineLoss
from modeling.parallel.cross_entropy import token_scores
from modeling.parallel.layers import leave_out
from modeling.parallel.process_grid import Group, ProcessGrid
from modeling.unpadding import round_up
from recipes.problems import Problem, ProblemsError

LENGTH_MULTIPLE = 32  # padding of windows and of their logits
MEETING = 16  # steps between barriers of data-parallel ranks, which reveal a hanging rank
LARGEST_EXPONENT = 700.0  # of e, in float64


@dataclass(frozen=True)
class WindowScore:
    """Score of a window: summed loss in nats, number of correct targets, and whether the last is correct."""

    nll: float
    right: int
    last_right: bool


class Step(NamedTuple):
    """Windows scored together by all ranks."""

    windows: Sequence[int]  # indices, rank after rank, filled up with the last window
    length: int  # of the padded windows
    scored: int  # number of last positions with logits


def build_scoring_engine(
    plan: Plan, grid: ProcessGrid, weights: str | None, say: compiled_ops.Say
) -> DeepSpeedEngine:
    """Build an engine without optimizer from a directory of weights; None draws them. Collective."""
    if plan.offload != "none":
        memory.pin_no_more_than_asked()
    compiled_ops.prepare(plan.ds, grid.control_group, say)
    deepspeed.checkpointing.configure(grid, deepspeed_config=plan.ds)
    module = build_module(plan, grid, None if weights is None else read(weights, plan.recipe))
    if isinstance(module, Pipeline):
        module.loss_fn = PipelineLoss(_sum_and_scores, grid.tensor_group, ())
    else:
        module.loss = _scores
    mpu = None if isinstance(module, Pipeline) else grid
    engine = deepspeed.initialize(model=module, mpu=mpu, config=plan.ds)[0]
    move_buffers(module, engine.device)
    if plan.zero_stage < 3:
        engine.module.to(DTYPES[plan.precision])
    engine.eval()
    return engine


def _scores(logits: Tensor, labels: Tensor, weights: Tensor, group: Group) -> Tensor:
    """Return (2, B, scored): losses in nats, and 1 where the label is the likeliest token."""
    losses, likeliest = token_scores(logits, labels, group)
    return torch.stack([losses, likeliest.to(losses.dtype)])


def _sum_and_scores(logits: Tensor, labels: Tensor, weights: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Return the summed loss, which the pipeline engine requires, and the scores."""
    scores = _scores(logits, labels, weights, group)
    return scores[0].sum(), scores


@torch.no_grad()
def score(
    engine: DeepSpeedEngine,
    plan: Plan,
    grid: ProcessGrid,
    windows: Sequence[Window],
    watchdog: Watchdog,
    seen: Callable[[int], object] = lambda number: None,
) -> list[WindowScore]:
    """Score every window; return all scores on every rank. Collective.

    `watchdog` is told the phase of each step; `seen` receives the number of windows of each step. Raises
    Failed if losses are not finite.
    """
    layout = plan.layout
    passes = layout.accumulation if grid.pp > 1 else 1
    own: dict[int, WindowScore] = {}
    of_rank = layout.micro * passes
    before = 0
    for number, step in enumerate(steps_of(windows, of_rank * grid.dp, plan), 1):
        watchdog.enter(Phase.DATA, number)
        indices = step.windows[grid.at.dp * of_rank : (grid.at.dp + 1) * of_rank]
        batches = [
            _micro_batch([windows[i] for i in indices[at : at + layout.micro]], step)
            for at in range(0, of_rank, layout.micro)
        ]
        watchdog.enter(Phase.COMPUTING)
        engine.module.last_positions = step.scored
        if isinstance(engine, PipelineEngine):
            if step.length != before:
                engine.reset_activation_shape()
            scores = _pipeline_scores(engine, batches)
        else:
            scores = _plain_scores(engine, batches)
        watchdog.enter(Phase.COMPUTED)
        if number % MEETING == 0:
            dist.barrier(grid.control_group)
        before = step.length
        if scores is not None and grid.at.tp == 0:
            own |= {
                i: _window_score(windows[i], row, step)
                for i, row in zip(indices, scores.unbind(1), strict=True)
            }
        seen(len(set(step.windows)))
    everyone: dict[int, WindowScore] = {}
    for each in gathered(own, grid.control_group, dict[int, WindowScore]):
        everyone |= each
    watchdog.enter(Phase.SAVING)  # a rank that has already left must not count as hanging
    dist.barrier(grid.control_group)
    found = [everyone[i] for i in range(len(windows))]
    odd = sum(not math.isfinite(each.nll) for each in found)
    if odd:
        fix = "" if plan.precision == "fp32" else "; --precision fp32 has more room"
        came = f"{odd} of {len(found)} windows have a loss that is no number in {plan.precision}"
        raise ending.Failed(f"{came}{fix}")
    return found


def steps_of(windows: Sequence[Window], together: int, plan: Plan) -> Iterator[Step]:
    """Group windows of the same padded length and logits, the longest first, `together` at a time."""
    multiple = math.lcm(LENGTH_MULTIPLE, plan.layout.tp)
    cut_over_ranks = plan.recipe.parallel.sequence and plan.layout.tp > 1
    alike: dict[tuple[int, int], list[int]] = {}
    for index, window in enumerate(windows):
        length = min(plan.recipe.positions, round_up(window.length, multiple))
        needed = length if cut_over_ranks else length - (window.length - window.counted)
        alike.setdefault((length, min(length, round_up(needed, LENGTH_MULTIPLE))), []).append(index)
    for (length, scored), indices in sorted(alike.items(), reverse=True):
        for at in range(0, len(indices), together):
            part = indices[at : at + together]
            yield Step([*part, *[part[-1]] * (together - len(part))], length, scored)


def _micro_batch(windows: Sequence[Window], step: Step) -> MicroBatch:
    tokens = torch.zeros((len(windows), step.length), dtype=torch.int64)
    labels = torch.zeros_like(tokens)
    for row, window in enumerate(windows):
        taken = torch.from_numpy(window.tokens.astype("int64"))
        tokens[row, : window.length] = taken[:-1]
        labels[row, : window.length] = taken[1:]
    labels = labels[:, -step.scored :]
    return {"tokens": tokens, "labels": labels, "weights": torch.ones(labels.shape)}


def _plain_scores(engine: DeepSpeedEngine, batches: Sequence[MicroBatch]) -> Tensor:
    """Return the scores (2, windows, scored) on the host."""
    found = []
    for batch in batches:
        given, named = micro_batches.for_plain(batch, engine.device)
        found.append(engine(*given, **named))
    return torch.cat(found, 1).cpu()


def _pipeline_scores(engine: PipelineEngine, batches: Sequence[MicroBatch]) -> Tensor | None:
    """Return the scores (2, windows, scored) on the last stage, None on the others."""
    pairs = (micro_batches.for_pipeline(batch, None, engine.device) for batch in batches)
    engine.eval_batch(pairs, num_micro_batches=len(batches), bcast_loss=False)
    taken = engine.module.loss_fn.take_parts()
    return None if taken is None else torch.cat(list(taken), 1).cpu()


def _window_score(window: Window, scores: Tensor, step: Step) -> WindowScore:
    """Sum the scores (2, scored) of a window over the targets that count."""
    last = window.length - (step.length - step.scored)
    losses, right = scores[:, last - window.counted : last].double().tolist()
    return WindowScore(math.fsum(losses), int(sum(right)), bool(right[-1]))


def figures(data: TaskData, scores: Sequence[WindowScore]) -> dict[str, float]:
    """Return the task's figures by name, its main figure first."""
    nll = math.fsum(score.nll for score in scores)
    right = sum(score.right for score in scores)
    tokens = data.tokens
    per_token = {
        "loss_per_token": nll / tokens,
        "perplexity_per_token": _exponential(nll / tokens),
        "accuracy_per_token": right / tokens,
    }
    if data.task == "lambada":
        whole = sum(s.right == w.counted for s, w in zip(scores, data.windows, strict=True))
        return {
            "accuracy": whole / len(scores),
            "perplexity_of_last_word": _exponential(nll / len(scores)),
            "accuracy_of_last_token": sum(score.last_right for score in scores) / len(scores),
            **per_token,
        }
    of_text = {}
    if data.words is not None:
        of_text = {
            "perplexity_per_word": _exponential(nll / data.words),
            "tokens_per_word": tokens / data.words,
        }
    if data.bytes is not None:
        of_text["bits_per_byte"] = nll / data.bytes / math.log(2)
    first = "per_word" if data.task == "wikitext103" else "per_token"
    every = {**of_text, **per_token}
    return {"perplexity": every[f"perplexity_{first}"], **every}


def _exponential(nats: float) -> float:
    return math.exp(min(nats, LARGEST_EXPONENT))


def run(job: ScoringJob, out: Path | None, meeting: Meeting) -> None:
    """Read the data, build the model, score it, and write the scores. Collective."""
    layout = job.plan.layout
    first = processes.rank() == 0
    from_scratch = job.wishes.from_scratch
    grid = ProcessGrid(layout.tp, layout.pp, layout.dp, processes.TIMEOUT)
    say = partial(terminal.say, stream=sys.stderr) if first else _silence
    data = meeting.settle(lambda: read_task(job, say))
    forms = len(set(gathered(data.checksum, grid.control_group)))
    if forms > 1:
        came = f"ranks read {forms} different forms of {data.source}"
        rule = "all of them score the same windows"
        raise ProblemsError([Problem("--data", came, rule, "make the machines' files and libraries equal")])
    for line in () if from_scratch else job.model.said():
        say(line)
    engine = build_scoring_engine(job.plan, grid, None if from_scratch else str(job.model.weights), say)
    leave_out(engine.module, unused_numbers(job.model.tokenizer))
    began = time.perf_counter()
    watchdog = Watchdog(None, job.plan.recipe.run.hang_after, meeting)
    shown: Any = nullcontext()
    if first:
        shown = bar(sys.stderr, total=len(data.windows), unit="window", desc=data.task)
    with watchdog.running(), shown:
        seen = shown.update if first else _silence
        found = score(engine, job.plan, grid, data.windows, watchdog, seen)
    seconds = time.perf_counter() - began
    if first:
        made = _score_of(job, data, figures(data, found), seconds)
        print(describe(made, terminal.columns()))
        place = None if from_scratch else job.model.run
        if place is not None and not (out and place_problem(place)):  # else it is another user's
            say(f"kept in {keep(place, made)}")
        if out:
            out.write_text(to_json(made))


def _score_of(job: ScoringJob, data: TaskData, found: dict[str, float], seconds: float) -> Score:
    plan = job.plan
    layout = job.plan.layout
    wishes = job.wishes
    degrees = f"tp {layout.tp} x pp {layout.pp} x dp {layout.dp}, ZeRO-{plan.zero_stage}"
    offload = f", offload {plan.offload}" if plan.offload != "none" else ""
    names = ("task", "variant", "source", "examples", "tokens", "words", "broken", "cut")
    of_data: dict[str, Any] = {name: getattr(data, name) for name in names}
    return Score(
        model=wishes.model,
        parameters=cost.parameters(plan.recipe.model, plan.recipe.positions),
        step=None if wishes.from_scratch else job.model.step,
        figures=found,
        windows=len(data.windows),
        limited=wishes.limit is not None,
        window=job.window,
        stride=None if data.task == "lambada" else job.stride,
        hardware=description.summary(description.describe()),
        seconds=seconds,
        from_scratch=wishes.from_scratch,
        batch=layout.micro,
        precision=plan.precision,
        layout=degrees + offload,
        **of_data,
    )


def _silence(_: object) -> None:
    """Ignore what other ranks than the first would show."""
