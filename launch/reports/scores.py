"""Scores of a report: of runs by task, and of fine-tuned models next to their pretraining row's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from launch.console.text_table import number, ratio
from launch.evaluation import finetuning_seeds
from launch.evaluation.finetuning_seeds import SUMMARY, Summary
from launch.evaluation.pretrained import Pretrained
from launch.evaluation.scores import (
    OTHER_DATA,
    WORDS,
    Score,
    figure_name,
    figure_text,
    published_next_to,
)
from launch.records.facts import TaskScore
from launch.reports.frames import ReportTable
from launch.reports.runs import ReportedRun
from launch.reports.tables import PublishedRow
from recipes import catalog
from recipes.schema import Published, Recipe, Task, TaskName
from recipes.tasks import TASKS

NOT_RUN = "not run"
NOT_SCORED = "not scored"
HEADINGS = ("task", "figure", "model", "score", "parameters", "how")
FINETUNED_HEADINGS = (
    "recipe",
    "task",
    "figure",
    "published",
    "measured",
    "measured / published",
    "fine-tuning",
)
EXPLAINED = (
    "Fine-tuning runs whose weights are of the row's own pretraining. Published scores are medians over five "
    "seeds, or of models that answer together."
)
PERCENT = 100
# of the metrics of tasks
SHARES = ("accuracy", "middle_accuracy", "high_accuracy", "f1", "exact")
# table/row -> its recipe; None: missing or invalid
RecipeOf = Callable[[str], Recipe | None]


class Figure(NamedTuple):
    """A score as sources print it for a task, and its place in our results.

    Attributes:
        key: field of the task's published scores in `Downstream`.
        split, metric: keys of a run's scores.
    """

    task: TaskName
    key: str
    name: str
    split: str
    metric: str


FIGURES = (
    Figure("mnli", "matched", "accuracy, matched dev set", "dev", "accuracy"),
    Figure(
        "mnli",
        "mismatched",
        "accuracy, mismatched dev set",
        "dev_mismatched",
        "accuracy",
    ),
    Figure("qqp", "accuracy", "accuracy, dev set", "dev", "accuracy"),
    Figure("squad1", "f1", "F1, dev set", "dev", "f1"),
    Figure("squad1", "em", "exact match, dev set", "dev", "exact"),
    Figure("squad2", "f1", "F1, dev set", "dev", "f1"),
    Figure("squad2", "em", "exact match, dev set", "dev", "exact"),
    Figure("race", "accuracy", "accuracy, test set", "test", "accuracy"),
    Figure("race", "middle", "accuracy, middle schools", "test", "middle_accuracy"),
    Figure("race", "high", "accuracy, high schools", "test", "high_accuracy"),
)


@dataclass(frozen=True)
class FinetunedModel:
    """A fine-tuned model, or several models of one task.

    Attributes:
        run: the run of the model, or one of several.
        kind: one run, the median of seeds, or an ensemble of seeds; `models`: their number.
        scores: split -> metric -> share of 1.
    """

    run: ReportedRun
    label: str
    path: Path
    scores: Mapping[str, Mapping[str, float]]
    kind: Literal["run", "median", "ensemble"] = "run"
    models: int = 1

    @property
    def task(self) -> Task:
        assert self.run.recipe is not None and self.run.recipe.task is not None, (
            "a fine-tuning run"
        )
        return self.run.recipe.task

    @property
    def pretrained(self) -> Pretrained | None:
        return self.run.pretrained

    @property
    def how(self) -> str:
        """Return the label with the number of seeds, in words."""
        several = {"run": "", "median": f", median of {self.models} seeds"}
        tiny = " (TINY)" if self.pretrained and self.pretrained.tiny else ""
        return (
            f"{self.label}{tiny}{several.get(self.kind, f', {self.models} together')}"
        )

    @property
    def weights(self) -> str:
        """Return the origin of the weights, in words."""
        if self.pretrained is None:
            return "weights of no pretraining run, or drawn at random"
        tiny = ", tiny" if self.pretrained.tiny else ""
        return (
            f"weights of {self.pretrained.recipe}{tiny}, step {self.pretrained.step:,}"
        )

    def is_of(self, row: PublishedRow, recipe_of: RecipeOf) -> bool:
        """Check that the weights are of the row's pretraining, which rows of several tables may share."""
        if self.pretrained is None:
            return False
        if self.pretrained.recipe == row.full_name:
            return True
        recipes = (row.recipe, recipe_of(self.pretrained.recipe))
        trainings = {
            (catalog.digest(each), each.steps) if each else None for each in recipes
        }
        return len(trainings) == 1 and None not in trainings


@dataclass(frozen=True)
class FinetunedLine:
    """A figure of a row, published or measured or both; shares of 1.

    Attributes:
        why_not: the reason against a ratio; "" with a ratio, or with nothing to compare.
    """

    row: PublishedRow
    figure: Figure
    published: float | None
    finetuned: FinetunedModel | None = None
    why_not: str = ""

    @property
    def measured(self) -> float | None:
        found = self.finetuned
        return (
            found.scores.get(self.figure.split, {}).get(self.figure.metric)
            if found
            else None
        )

    @property
    def ratio(self) -> float | None:
        """Return measured / published."""
        if self.measured is None or not self.published or self.why_not:
            return None
        return self.measured / self.published

    @property
    def cells(self) -> tuple[str, ...]:
        """Return the line as text in the columns of FINETUNED_HEADINGS."""
        compared = f"not compared: {self.why_not}" if self.why_not else ""
        without = NOT_SCORED if self.finetuned else NOT_RUN
        return (
            self.row.name,
            TASKS[self.figure.task].title.split(",")[0],
            self.figure.name,
            "not published" if self.published is None else percent(self.published),
            without if self.measured is None else percent(self.measured),
            compared if self.ratio is None else ratio(self.ratio),
            self.finetuned.how if self.finetuned else "",
        )


def finetuned_frame(lines: Sequence[FinetunedLine]) -> ReportTable | None:
    kinds = ("name", "text", "text", "number", "number", "words", "words")
    cells = [line.cells for line in lines]
    return (
        ReportTable(FINETUNED_HEADINGS, kinds, cells, "Fine-tuned", EXPLAINED)
        if lines
        else None
    )


def finetuned_models(
    runs: Sequence[ReportedRun], problems: list[str]
) -> list[FinetunedModel]:
    """Return the fine-tuned models among the runs; for runs with a summary only median and ensemble.

    Unreadable summaries are added to `problems`.
    """
    found: list[FinetunedModel] = []
    summaries: dict[Path, Summary | None] = {}
    shown: set[Path] = set()
    for run in runs:
        above = run.path.parent
        if (
            not (run.recipe and run.recipe.task)
            or run.result.status != "ok"
            or not run.result.task_scores
        ):
            continue
        if above not in summaries:
            summaries[above] = _summary(above, problems)
        summary = summaries[above]
        if summary is None or run.path.name not in {
            each.name for each in summary.seeds
        }:
            found.append(
                FinetunedModel(
                    run, run.label, run.path, _values(run.result.task_scores)
                )
            )
        elif above not in shown:
            shown.add(above)
            found += _of_summary(run, summary)
    return found


def _summary(folder: Path, problems: list[str]) -> Summary | None:
    try:
        return finetuning_seeds.read(folder)
    except (ValueError, OSError) as error:
        fix = "start the same command again, or leave its runs out"
        problems.append(f"{' '.join(str(error).split())}: {fix}")
        return None


def _of_summary(run: ReportedRun, summary: Summary) -> Iterator[FinetunedModel]:
    """Yield the median and the ensemble of a summary; `run` is one of its runs."""
    label = run.path.parent.name
    path = run.path.parent / SUMMARY
    sound = len(summary.sound)
    yield FinetunedModel(run, label, path, summary.median, "median", sound)
    if summary.ensemble:
        yield FinetunedModel(
            run, label, path, _values(summary.ensemble), "ensemble", sound
        )


def _values(scores: Sequence[TaskScore]) -> dict[str, Mapping[str, float]]:
    return {score.split: score.metrics for score in scores}


def finetuned_lines(
    rows: Sequence[PublishedRow],
    finetuned: Sequence[FinetunedModel],
    recipe_of: RecipeOf,
) -> Iterator[FinetunedLine]:
    """Yield a line for each figure of each row, published or measured with its weights."""
    for row in rows:
        own = [each for each in finetuned if each.is_of(row, recipe_of)]
        for figure in FIGURES:
            of_task = row.published and getattr(
                row.published.downstream, figure.task, None
            )
            printed = getattr(of_task, figure.key, None)
            published = None if printed is None else round(printed / PERCENT, 6)
            on_task: list[FinetunedModel | None] = [
                each for each in own if each.task.name == figure.task
            ]
            for each in on_task or [None]:
                compared = (
                    _why_not(each, row.published) if each and row.published else ()
                )
                why_not = "" if published is None else ", ".join(compared)
                line = FinetunedLine(row, figure, published, each, why_not)
                if published is not None or line.measured is not None:
                    yield line


def _why_not(finetuned: FinetunedModel, published: Published) -> Iterator[str]:
    """Yield the reasons why measured and published scores cannot be compared."""
    pretrained = finetuned.pretrained
    assert pretrained is not None, "of a row"
    if pretrained.tiny:
        yield "tiny, another model"
    elif pretrained.changed is None:
        yield "the recipe of its pretraining cannot be read"
    elif pretrained.changed:
        yield f"pretrained with other {', '.join(pretrained.changed)}"
    if pretrained.step < pretrained.steps:
        yield f"pretrained for {pretrained.step:,} of {pretrained.steps:,} steps"
    if finetuned.task.train is not None:
        yield "on other files than the hub's"
    if any(
        each.kind == "recipe" and each.key == "steps"
        for each in finetuned.run.result.deviations
    ):
        yield "fine-tuning was cut short (--steps)"
    if bool(published.ensemble) != (finetuned.kind == "ensemble"):
        yield (
            "published of models that answer together"
            if published.ensemble
            else "published of one model"
        )


def percent(share: float) -> str:
    return f"{PERCENT * share:.1f} %"


def frame(
    runs: Sequence[ReportedRun], finetuned: Iterable[FinetunedModel]
) -> ReportTable | None:
    """Return the table of all scores, each by its task's main figure. `finetuned`: models without a row."""
    rows = [*_score_rows(runs), *_finetuned_rows(finetuned)]
    kinds = ("text", "text", "name", "number", "number", "words")
    return ReportTable(HEADINGS, kinds, rows) if rows else None


def _score_rows(runs: Sequence[ReportedRun]) -> Iterator[tuple[str, ...]]:
    """Yield the runs of each task, followed by the published scores."""
    by_task: dict[tuple[str, str], list[tuple[ReportedRun, Score]]] = {}
    for run in runs:
        for score in run.scores:
            by_task.setdefault((score.task, score.variant), []).append((run, score))
    for (task, _), found in sorted(by_task.items()):
        for run, score in found:
            yield _of_run(run, score)
        name = found[0][1].name
        for each in published_next_to(task):
            yield (
                name,
                WORDS[each.figure],
                f"published: {each.model}",
                each.printed,
                "",
                each.source,
            )


def _of_run(run: ReportedRun, score: Score) -> tuple[str, ...]:
    figure, value = next(iter(score.figures.items()))
    step = "" if score.step is None else f", step {score.step:,}"
    how = [
        score.source
        + ", a part of it" * score.limited
        + f", {OTHER_DATA}" * score.on_other_data,
        f"window {score.window}" + (f", stride {score.stride}" if score.stride else ""),
        score.precision,
    ]
    values = figure_text(figure, value), number(score.parameters), ", ".join(how)
    return score.name, figure_name(figure), f"{run.label}{step}", *values


def _finetuned_rows(finetuned: Iterable[FinetunedModel]) -> Iterator[tuple[str, ...]]:
    for each in finetuned:
        how = f"{each.weights}{', on files of its own' if each.task.train is not None else ''}"
        for split, metrics in each.scores.items():
            for metric in (name for name in SHARES if name in metrics):
                figure = f"{metric.replace('_', ' ')}, {split.replace('_', ' ')}"
                value = percent(metrics[metric])
                parameters = number(each.run.result.parameters)
                yield each.task.name, figure, each.how, value, parameters, how
