"""Score a model on tasks, print the scores, and keep them with the run."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data import corpus
from data.tasks.windows import (
    Window,
    encode_texts,
    full_context_windows,
    overlapping_windows,
)
from data.text.encoder import UNSPACED, Encoder, end_of_document
from data.text.records import SkippedRecords
from data.text.sources import FileSource
from data.text.vocabulary import unused_numbers
from launch.console import terminal
from launch.console.arguments import place_problem
from launch.evaluation.likelihoods import Likelihoods
from launch.evaluation.protocols import TASKS, TaskText, exponential
from launch.evaluation.scorer import Scorer, WindowScore, load_model
from launch.evaluation.scores import WORDS, Score, describe, keep, to_json
from launch.evaluation.scoring_plan import PERPLEXITY, ScoringJob
from launch.machine import description
from launch.ranks import processes
from launch.ranks.meeting import Meeting
from launch.ranks.watchdog import Watchdog
from modeling import cost
from modeling.parallel.layers import leave_out
from modeling.parallel.process_grid import ProcessGrid
from recipes.problems import ProblemsError

if TYPE_CHECKING:
    from launch.evaluation.harness import HarnessTask

_ALONE = "".join(UNSPACED.values())
_WORD = re.compile(rf"[{_ALONE}]|[^\s{_ALONE}]+")


@dataclass(frozen=True, eq=False)
class OwnText:
    """What "perplexity" reads. `examples`: documents or samples; `bytes`: of the text; None: not counted."""

    facts: TaskText
    windows: tuple[Window, ...]
    examples: int
    bytes: int | None = None


def own_text(job: ScoringJob, say: Callable[[str], None]) -> OwnText:
    """Read the text of --text, or the recipe's held-out samples. Raises ValueError if it is unreadable."""
    wishes = job.wishes
    if wishes.text is not None:
        found = _documents(job, wishes.text)
    else:
        built = corpus.build(job.plan.recipe, say=say)
        chosen = built.validation.take(range(len(built.validation))[: wishes.limit])
        windows = tuple(Window(tokens, len(tokens) - 1) for tokens in chosen["window"])
        found = OwnText(
            TaskText("held out", str(built.summary["source"]), None, ()),
            windows,
            len(windows),
        )
    if not found.windows:
        came = f"{found.facts.source}: nothing is left to score"
        rule = SkippedRecords.describe(found.facts.broken)
        raise ProblemsError.of("--text", came, rule, "give another text")
    return found


def _documents(job: ScoringJob, source: str) -> OwnText:
    """Cut every document into windows; an end-of-document token stands before its first token.

    Whitespace separates words; a character of a script without blanks is one. With stride = length the
    windows equal those of `loglikelihood_rolling` of lm-evaluation-harness.
    """
    skipped = SkippedRecords()
    (origin,) = job.plan.recipe.data.origins
    documents = islice(
        FileSource(origin, skipped=skipped).documents(), job.wishes.limit
    )
    texts = [document.text for document in documents if document.text.strip()]
    end = [end_of_document(job.model.tokenizer)]
    windows = list[Window]()
    for tokens in encode_texts(Encoder(job.model.tokenizer), texts):
        whole = np.concatenate([end, tokens])
        windows += full_context_windows(whole, job.window, job.stride(PERPLEXITY))
    words = sum(len(_WORD.findall(text)) for text in texts)
    size = sum(len(text.encode()) for text in texts)
    facts = TaskText("documents", source, words, tuple(skipped.found()))
    return OwnText(facts, tuple(windows), len(texts), size)


def figures_of(
    windows: Sequence[Window],
    scores: Sequence[WindowScore],
    words: int | None,
    size: int | None = None,
) -> dict[str, float]:
    """Return the figures of a text of so many words and bytes, and those per token that counts."""
    nll = math.fsum(score.nll for score in scores)
    tokens = sum(window.counted for window in windows)
    found = dict[str, float]()
    if words:
        found |= {
            "perplexity_per_word": exponential(nll / words),
            "tokens_per_word": tokens / words,
        }
    if size:
        found["bits_per_byte"] = nll / size / math.log(2)
    return {
        **found,
        "loss_per_token": nll / tokens,
        "perplexity_per_token": exponential(nll / tokens),
        "accuracy_per_token": sum(score.right for score in scores) / tokens,
    }


def run(job: ScoringJob, out: Path | None, meeting: Meeting) -> None:
    """Read the data, load the model, score it on every task, and write the scores. Collective."""
    layout = job.plan.layout
    wishes = job.wishes
    first = processes.rank() == 0
    grid = ProcessGrid(layout.tp, layout.pp, layout.dp, processes.TIMEOUT)
    say = partial(terminal.say, stream=sys.stderr) if first else _silence
    tasks = meeting.settle(lambda: _read(job, say))
    for line in () if wishes.from_scratch else job.model.said():
        say(line)
    model = load_model(
        job.plan, grid, None if wishes.from_scratch else str(job.model.weights)
    )
    leave_out(model, unused_numbers(job.model.tokenizer))
    watchdog = Watchdog(None, job.plan.recipe.run.hang_after, meeting)
    borders = job.plan.recipe.data.borders
    border = end_of_document(job.model.tokenizer) if borders else None
    scorer = Scorer(model, job.plan, grid, watchdog, border=border)
    made: list[Score] = []
    with watchdog.running():
        for task in tasks:
            for score in _scores(job, task, scorer):
                made.append(score)
                if first:
                    _show_and_keep(score, job, out, say)
    if first and out:
        out.write_text(to_json(made))


def _read(job: ScoringJob, say: Callable[[str], None]) -> list[OwnText | HarnessTask]:
    """Read the data of all tasks. Raises ValueError."""
    wishes = job.wishes
    of_harness = dict[str, Any]()
    if wishes.of_harness:
        from launch.evaluation import harness

        given = dict(
            file=wishes.data,
            variant=wishes.variant,
            column=wishes.column,
            limit=wishes.limit,
        )
        stated = {name: value for name, value in given.items() if value is not None}
        loaded = harness.load(wishes.of_harness, stated, wishes.include_path)
        of_harness = {task.name: task for task in loaded}
    return [
        of_harness[name] if name in of_harness else own_text(job, say)
        for name in wishes.tasks
    ]


def _scores(
    job: ScoringJob, task: OwnText | HarnessTask, scorer: Scorer
) -> Iterator[Score]:
    """Score the model on one task; yield a score, or one of each task of a group. Collective."""
    began = time.perf_counter()
    if isinstance(task, OwnText):
        scorer.title = PERPLEXITY
        scores = scorer.score(task.windows)
        figures = figures_of(task.windows, scores, task.facts.words, task.bytes)
        figures = {"perplexity": figures["perplexity_per_token"], **figures}
        facts = dict(
            **vars(task.facts),
            examples=task.examples,
            stride=job.stride(PERPLEXITY),
            cut=0,
        )
        yield _score(job, PERPLEXITY, figures, task.windows, began, facts)
        return
    from launch.evaluation import harness

    scorer.title = task.name
    stride = job.stride(task.name) if task.name == "wikitext103" else None
    rolling = (
        partial(overlapping_windows, length=job.window, stride=stride)
        if stride
        else None
    )
    seen = Likelihoods(scorer, job.model.tokenizer, job.window, rolling)
    for name, found, examples in harness.measure(task, seen, job.wishes.limit):
        known = task.text or TaskText("", harness.SOURCE, None, ())
        facts = dict(**vars(known), examples=examples, stride=stride, cut=seen.cut)
        figures = _own_figures(found, seen, known.words) if task.text else found
        yield _score(job, name, figures, seen.windows, began, facts)


def _own_figures(
    found: dict[str, float], seen: Likelihoods, words: int | None
) -> dict[str, float]:
    """Add to lm-eval's figures of one of our tasks those of its tokens; put the main figure first."""
    every = figures_of(seen.windows, seen.scores, words) | found
    if words:
        return {"perplexity": every["perplexity_per_word"], **every}
    last = sum(score.last_right for score in seen.scores) / len(seen.scores)
    first = {name: found[name] for name in ("accuracy", "perplexity_of_last_word")}
    return {**first, "accuracy_of_last_token": last, **every}


def _score(
    job: ScoringJob,
    task: str,
    figures: dict[str, float],
    windows: Sequence[Window],
    began: float,
    facts: dict[str, Any],
) -> Score:
    plan = job.plan
    wishes = job.wishes
    return Score(
        model=wishes.model,
        parameters=cost.parameters(plan.recipe.model, plan.recipe.positions),
        step=None if wishes.from_scratch else job.model.step,
        task=task,
        figures={
            name: value
            for name, value in figures.items()
            if task not in TASKS or name in WORDS
        },
        windows=len(windows),
        tokens=sum(window.counted for window in windows),
        limited=wishes.limit is not None,
        window=job.window,
        batch=plan.layout.micro,
        precision=plan.precision,
        layout=f"tp {plan.layout.tp} x dp {plan.layout.dp}",
        hardware=description.summary(description.describe()),
        seconds=time.perf_counter() - began,
        from_scratch=wishes.from_scratch,
        **facts,
    )


def _show_and_keep(
    score: Score, job: ScoringJob, out: Path | None, say: Callable[[str], None]
) -> None:
    print(describe(score, terminal.columns()))
    place = None if job.wishes.from_scratch else job.model.run
    # else it is another user's
    if place is not None and not (out and place_problem(place)):
        say(f"kept in {keep(place, score)}")


def _silence(_: object) -> None:
    """Ignore what other ranks than the first would show."""
