"""Score a model on tasks, print the scores, and keep them with the run."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data import corpus
from data.tasks.windows import Window, encode_texts, full_context_windows, overlapping_windows
from data.text.encoder import UNSPACED, Encoder, end_of_document
from data.text.records import SkippedRecords
from data.text.sources import FileSource
from data.text.vocabulary import unused_numbers
from launch.console import terminal
from launch.console.output import place_problem
from launch.evaluation.likelihoods import Likelihoods
from launch.evaluation.protocols import exponential
from launch.evaluation.scorer import Scorer, WindowScore, load_model
from launch.evaluation.scores import Score, describe, keep, to_json
from launch.evaluation.scoring_plan import PERPLEXITY, ScoringJob
from launch.machine import description
from launch.ranks import processes
from launch.ranks.meeting import Meeting
from launch.ranks.watchdog import Watchdog
from modeling import cost
from modeling.parallel.layers import leave_out
from modeling.parallel.process_grid import ProcessGrid
from recipes.problems import Problem, ProblemsError

if TYPE_CHECKING:
    from launch.evaluation.harness import Task

_ALONE = "".join(UNSPACED.values())
_WORD = re.compile(rf"[{_ALONE}]|[^\s{_ALONE}]+")


@dataclass(frozen=True, eq=False)
class OwnText:
    """The windows of "perplexity", and facts on its text.

    Attributes:
        variant: "documents" or "held out".
        words, bytes: of the text; None: not counted.
        examples: documents or samples.
        broken: records that were left out, each with its reason.
    """

    variant: str
    source: str
    windows: tuple[Window, ...]
    examples: int
    words: int | None = None
    bytes: int | None = None
    broken: tuple[str, ...] = ()


def own_text(job: ScoringJob, say: Callable[[str], None]) -> OwnText:
    """Read the text of --text, or the recipe's held-out samples. Raises ValueError if it is unreadable."""
    wishes = job.wishes
    if wishes.text is not None:
        found = _documents(job, wishes.text)
    else:
        built = corpus.build(job.plan.recipe, say=say)
        chosen = built.validation.take(range(len(built.validation))[: wishes.limit])
        windows = tuple(Window(tokens, len(tokens) - 1) for tokens in chosen["window"])
        found = OwnText("held out", str(built.summary["source"]), windows, len(windows))
    if not found.windows:
        first = f", the first: {found.broken[0]}" if found.broken else ""
        rule = f"{len(found.broken)} broken records{first}"
        raise ProblemsError([Problem("--text", f"{found.source}: nothing is left to score", rule)])
    return found


def _documents(job: ScoringJob, source: str) -> OwnText:
    """Cut every document into windows; an end-of-document token stands before its first token.

    Whitespace separates words; a character of a script without blanks is one. With stride = length the
    windows equal those of `loglikelihood_rolling` of lm-evaluation-harness.
    """
    skipped = SkippedRecords()
    (origin,) = job.plan.recipe.data.origins
    documents = islice(FileSource(origin, skipped=skipped).documents(), job.wishes.limit)
    texts = [document.text for document in documents if document.text.strip()]
    encoder = Encoder(job.model.tokenizer)
    end = np.array([end_of_document(job.model.tokenizer)], dtype=np.uint32)
    windows = list[Window]()
    for tokens in encode_texts(encoder, texts):
        whole = np.concatenate([end, tokens])
        windows += full_context_windows(whole, job.window, job.stride(PERPLEXITY))
    words = sum(len(_WORD.findall(text)) for text in texts)
    size = sum(len(text.encode()) for text in texts)
    broken = tuple(skipped.found())
    return OwnText("documents", source, tuple(windows), len(texts), words, size, broken)


def per_token(windows: Sequence[Window], scores: Sequence[WindowScore]) -> dict[str, float]:
    """Return the figures per token that counts."""
    nll = math.fsum(score.nll for score in scores)
    tokens = sum(window.counted for window in windows)
    return {
        "loss_per_token": nll / tokens,
        "perplexity_per_token": exponential(nll / tokens),
        "accuracy_per_token": sum(score.right for score in scores) / tokens,
    }


def figures_of_text(text: OwnText, scores: Sequence[WindowScore]) -> dict[str, float]:
    """Return the figures of "perplexity" by name, the main figure first."""
    nll = math.fsum(score.nll for score in scores)
    every = per_token(text.windows, scores)
    found = {"perplexity": every["perplexity_per_token"]}
    if text.words:
        found["perplexity_per_word"] = exponential(nll / text.words)
        found["tokens_per_word"] = sum(window.counted for window in text.windows) / text.words
    if text.bytes:
        found["bits_per_byte"] = nll / text.bytes / math.log(2)
    return {**found, **every}


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
    model = load_model(job.plan, grid, None if wishes.from_scratch else str(job.model.weights))
    leave_out(model, unused_numbers(job.model.tokenizer))
    watchdog = Watchdog(None, job.plan.recipe.run.hang_after, meeting)
    scorer = Scorer(model, job.plan, grid, watchdog)
    made: list[Score] = []
    with watchdog.running():
        for task in tasks:
            for score in _scores(job, task, scorer):
                made.append(score)
                if first:
                    _show_and_keep(score, job, out, say)
    if first and out:
        out.write_text(to_json(made))


def _read(job: ScoringJob, say: Callable[[str], None]) -> list[OwnText | Task]:
    """Read the data of all tasks. Raises ValueError."""
    wishes = job.wishes
    of_harness = dict[str, Any]()
    if wishes.of_harness:
        from launch.evaluation import harness

        given = dict(file=wishes.data, variant=wishes.variant, column=wishes.column, limit=wishes.limit)
        stated = {name: value for name, value in given.items() if value is not None}
        loaded = harness.load(wishes.of_harness, stated, wishes.include_path)
        of_harness = {task.name: task for task in loaded}
    return [of_harness[name] if name in of_harness else own_text(job, say) for name in wishes.tasks]


def _scores(job: ScoringJob, task: OwnText | Task, scorer: Scorer) -> Iterator[Score]:
    """Score the model on one task; yield a score, or one of each task of a group. Collective."""
    began = time.perf_counter()
    if isinstance(task, OwnText):
        scorer.title = PERPLEXITY
        scores = scorer.score(task.windows)
        seconds = time.perf_counter() - began
        yield replace(
            _score_of(job, PERPLEXITY, figures_of_text(task, scores), task.windows, seconds),
            variant=task.variant,
            source=task.source,
            examples=task.examples,
            words=task.words,
            broken=task.broken,
            stride=job.stride(PERPLEXITY),
        )
        return
    from launch.evaluation import harness

    scorer.title = task.name
    stride = job.stride(task.name) if task.name == "wikitext103" else None
    rolling = partial(overlapping_windows, length=job.window, stride=stride) if stride else None
    likelihoods = Likelihoods(scorer, job.model.tokenizer, job.window, rolling)
    results = harness.measure(task, likelihoods, job.wishes.limit)
    seconds = time.perf_counter() - began
    for result in results:
        figures = result.figures
        if task.text is not None:
            figures = _own_figures(task.text.words, figures, likelihoods)
        score = _score_of(job, result.name, figures, likelihoods.windows, seconds)
        score = replace(
            score, source=harness.SOURCE, examples=result.examples, stride=stride, cut=likelihoods.cut
        )
        if task.text is not None:
            score = replace(score, **vars(task.text))
        yield score


def _own_figures(words: int | None, found: Mapping[str, float], scored: Likelihoods) -> dict[str, float]:
    """Return the figures of one of our tasks by name, the main figure first."""
    scores = scored.scores
    every = per_token(scored.windows, scores)
    if words is None:
        last = sum(score.last_right for score in scores) / len(scores)
        names = ("accuracy", "perplexity_of_last_word")
        return {**{name: found[name] for name in names}, "accuracy_of_last_token": last, **every}
    perplexity = found["perplexity_per_word"]
    tokens = sum(window.counted for window in scored.windows)
    first = {"perplexity": perplexity, "perplexity_per_word": perplexity, "tokens_per_word": tokens / words}
    return {**first, **every}


def _score_of(
    job: ScoringJob, task: str, figures: Mapping[str, float], windows: Sequence[Window], seconds: float
) -> Score:
    """Return a score without the facts of its task's data."""
    plan = job.plan
    wishes = job.wishes
    return Score(
        model=wishes.model,
        parameters=cost.parameters(plan.recipe.model, plan.recipe.positions),
        step=None if wishes.from_scratch else job.model.step,
        task=task,
        variant="",
        source="",
        figures=figures,
        examples=0,
        windows=len(windows),
        tokens=sum(window.counted for window in windows),
        words=None,
        limited=wishes.limit is not None,
        broken=(),
        cut=0,
        window=job.window,
        stride=None,
        batch=plan.layout.micro,
        precision=plan.precision,
        layout=f"tp {plan.layout.tp} x dp {plan.layout.dp}",
        hardware=description.summary(description.describe()),
        seconds=seconds,
        from_scratch=wishes.from_scratch,
    )


def _show_and_keep(score: Score, job: ScoringJob, out: Path | None, say: Callable[[str], None]) -> None:
    print(describe(score, terminal.columns()))
    place = None if job.wishes.from_scratch else job.model.run
    if place is not None and not (out and place_problem(place)):  # else it is another user's
        say(f"kept in {keep(place, score)}")


def _silence(_: object) -> None:
    """Ignore what other ranks than the first would show."""
