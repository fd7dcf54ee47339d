"""Scores of the runs of a report, task after task, next to the published ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from launch.console.numbers import number
from launch.evaluation.published import published_next_to
from launch.evaluation.result import WORDS, Score, figure_text
from launch.reports.finetuned import SHARES, Finetuned, percent
from launch.reports.runs import Run

HEADINGS = ("task", "figure", "model", "score", "parameters", "how")
PUBLISHED = "published: "


@dataclass(frozen=True)
class ScoreLine:
    """A row of the table of scores: a run's, or a published one."""

    task: str
    figure: str
    model: str
    value: str
    parameters: str
    how: str

    @property
    def cells(self) -> tuple[str, ...]:
        """In the order of HEADINGS."""
        return (self.task, self.figure, self.model, self.value, self.parameters, self.how)

    @property
    def published(self) -> bool:
        return self.model.startswith(PUBLISHED)


def score_lines(runs: Sequence[Run]) -> list[ScoreLine]:
    """Every score by the figure that its task is known by; after those of a task the published ones."""
    by_task: dict[tuple[str, str], list[tuple[Run, Score]]] = {}
    for run in runs:
        for score in run.scores:
            by_task.setdefault((score.task, score.variant), []).append((run, score))
    lines = []
    for (task, _), found in sorted(by_task.items()):
        lines += [_line(run, score) for run, score in found]
        name = found[0][1].name
        lines += [
            ScoreLine(name, WORDS[each.figure], f"{PUBLISHED}{each.model}", each.printed, "", each.source)
            for each in published_next_to(task)
        ]
    return lines


def task_lines(finetuned: Iterable[Finetuned]) -> list[ScoreLine]:
    """Every score of fine-tuned models that belong to no row."""
    lines = []
    for each in finetuned:
        how = f"{each.weights}{', on files of its own' if each.own_files else ''}"
        for split, metrics in each.scores.items():
            for metric in (name for name in SHARES if name in metrics):
                figure = f"{metric.replace('_', ' ')}, {split.replace('_', ' ')}"
                values = (each.how, percent(metrics[metric]), number(each.parameters), how)
                lines.append(ScoreLine(each.task, figure, *values))
    return lines


def _line(run: Run, score: Score) -> ScoreLine:
    figure = next(iter(score.figures))
    step = "" if score.step is None else f", step {score.step:,}"
    stride = f", stride {score.stride}" if score.stride else ""
    part = ", a part of it" if score.limited else ""
    left_out = f", {len(score.broken)} broken examples left out" if score.broken else ""
    how = f"{score.source}{part}, window {score.window}{stride}, {score.precision}{left_out}"
    value = figure_text(figure, score.figures[figure])
    model = f"{run.label}{step}"
    return ScoreLine(score.name, WORDS[figure], model, value, number(score.parameters), how)
