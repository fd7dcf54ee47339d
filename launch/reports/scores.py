"""Scores of a report's runs by task, next to published scores."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from launch.console.numbers import number
from launch.evaluation.scores import OTHER_DATA, WORDS, Score, figure_text, published_next_to
from launch.reports.finetuned import SHARES, FinetunedModel, percent
from launch.reports.frames import Frame
from launch.reports.runs import Run

HEADINGS = ("task", "figure", "model", "score", "parameters", "how")


def frame(runs: Sequence[Run], finetuned: Iterable[FinetunedModel]) -> Frame | None:
    """Return the table of all scores, each by its task's main figure. `finetuned`: models without a row."""
    rows = [*_score_rows(runs), *_finetuned_rows(finetuned)]
    kinds = ("text", "text", "name", "number", "number", "words")
    return Frame(HEADINGS, kinds, rows) if rows else None


def _score_rows(runs: Sequence[Run]) -> Iterator[tuple[str, ...]]:
    """Yield the runs of each task, followed by the published scores."""
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
    part += f", {OTHER_DATA}" * score.on_other_data
    how = f"{score.source}{part}, window {score.window}{stride}, {score.precision}{left_out}"
    value = figure_text(figure, score.figures[figure])
    return score.name, WORDS[figure], f"{run.label}{step}", value, number(score.parameters), how


def _finetuned_rows(finetuned: Iterable[FinetunedModel]) -> Iterator[tuple[str, ...]]:
    for each in finetuned:
        how = f"{each.weights}{', on files of its own' if each.own_files else ''}"
        for split, metrics in each.scores.items():
            for metric in (name for name in SHARES if name in metrics):
                figure = f"{metric.replace('_', ' ')}, {split.replace('_', ' ')}"
                value, parameters = percent(metrics[metric]), number(each.parameters)
                yield each.task, figure, each.how, value, parameters, how
