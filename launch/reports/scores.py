"""Scores of the runs of a report, task after task, next to the published ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from launch.console.numbers import number
from launch.evaluation.scores import WORDS, Score, figure_text, published_next_to
from launch.reports.finetuned import SHARES, Finetuned, percent
from launch.reports.frames import Frame
from launch.reports.runs import Run

HEADINGS = ("task", "figure", "model", "score", "parameters", "how")


def frame(runs: Sequence[Run], finetuned: Iterable[Finetuned]) -> Frame | None:
    """Every score by the figure that its task is known by; `finetuned`: those that belong to no row."""
    rows = [*_scored(runs), *_finetuned(finetuned)]
    kinds = ("text", "text", "name", "number", "number", "words")
    return Frame(HEADINGS, kinds, rows) if rows else None


def _scored(runs: Sequence[Run]) -> Iterator[tuple[str, ...]]:
    """The runs of each task, and after them the published scores."""
    by_task: dict[tuple[str, str], list[tuple[Run, Score]]] = {}
    for run in runs:
        for score in run.scores:
            by_task.setdefault((score.task, score.variant), []).append((run, score))
    for (task, _), found in sorted(by_task.items()):
        for run, score in found:
            yield _of_run(run, score)
        name = found[0][1].name
        for each in published_next_to(task):
            yield name, WORDS[each.figure], f"published: {each.model}", each.printed, "", each.source


def _of_run(run: Run, score: Score) -> tuple[str, ...]:
    figure = next(iter(score.figures))
    step = "" if score.step is None else f", step {score.step:,}"
    stride = f", stride {score.stride}" if score.stride else ""
    part = ", a part of it" if score.limited else ""
    left_out = f", {len(score.broken)} broken examples left out" if score.broken else ""
    how = f"{score.source}{part}, window {score.window}{stride}, {score.precision}{left_out}"
    value = figure_text(figure, score.figures[figure])
    return score.name, WORDS[figure], f"{run.label}{step}", value, number(score.parameters), how


def _finetuned(finetuned: Iterable[Finetuned]) -> Iterator[tuple[str, ...]]:
    for each in finetuned:
        how = f"{each.weights}{', on files of its own' if each.own_files else ''}"
        for split, metrics in each.scores.items():
            for metric in (name for name in SHARES if name in metrics):
                figure = f"{metric.replace('_', ' ')}, {split.replace('_', ' ')}"
                value, parameters = percent(metrics[metric]), number(each.parameters)
                yield each.task, figure, each.how, value, parameters, how
