"""Scores of a report: of runs by task, and of fine-tuned models next to their pretraining row's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from launch.console.text_table import number, ratio
from launch.evaluation import finetuning_seeds
from launch.evaluation.finetuning_seeds import SUMMARY, Summary
from launch.evaluation.scores import Score, figure_name, figure_text, published_next_to
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


SHARES = ("accuracy", "middle_accuracy", "high_accuracy", "f1", "exact")


@dataclass(frozen=True)
class FinetunedModel:
    """A fine-tuned model, or several models of one task.

    Attributes:
        run: the run of the model, or one of several.
        scores: split -> metric -> share of 1.
        label: in words.
        path: of the run, or of the summary.
        models: their number; `together`: they answer together, as an ensemble.
    """

    run: ReportedRun
    scores: Mapping[str, Mapping[str, float]]
    label: str
    path: Path
    models: int = 1
    together: bool = False

    @property
    def task(self) -> Task:
        recipe = self.run.recipe
        assert recipe is not None and recipe.task is not None, "a fine-tuning run"
        return recipe.task

    @property
    def is_tiny(self) -> bool:
        return self.run.pretrained is not None and self.run.pretrained.tiny

    @property
    def how(self) -> str:
        return f"{self.label}{' (TINY)' * self.is_tiny}"

    def is_of(self, row: PublishedRow, recipe_of: RecipeOf) -> bool:
        """Check that the weights are of the row's pretraining, which rows of several tables may share."""
        pretrained = self.run.pretrained
        if pretrained is None or pretrained.recipe == row.full_name:
            return pretrained is not None
        ours = recipe_of(pretrained.recipe)
        if row.recipe is None or ours is None:
            return False
        same_length = row.recipe.steps == ours.steps
        return same_length and catalog.digest(row.recipe) == catalog.digest(ours)

    def score(self, figure: Figure) -> float | None:
        return self.scores.get(figure.split, {}).get(figure.metric)


@dataclass(frozen=True)
class FinetunedLine:
    """A figure of a row, published or measured or both; shares of 1.

    Attributes:
        why_not: the reason against a ratio; "" with a ratio, or with nothing to compare.
    """

    row: PublishedRow
    figure: Figure
    published: float | None
    measured: float | None = None
    finetuned: FinetunedModel | None = None
    why_not: str = ""

    @property
    def ratio(self) -> float | None:
        """Return measured / published."""
        if self.measured is None or not self.published or self.why_not:
            return None
        return self.measured / self.published

    @property
    def status(self) -> str:
        if self.measured is not None:
            return "measured"
        return NOT_SCORED if self.finetuned else NOT_RUN

    @property
    def cells(self) -> tuple[str, ...]:
        """Return the line as text in the columns of FINETUNED_HEADINGS."""
        compared = f"not compared: {self.why_not}" if self.why_not else ""
        return (
            self.row.name,
            TASKS[self.figure.task].title.split(",")[0],
            self.figure.name,
            percent(self.published, "not published"),
            percent(self.measured, self.status),
            compared if self.ratio is None else ratio(self.ratio),
            self.finetuned.how if self.finetuned else "",
        )


def finetuned_frame(lines: Sequence[FinetunedLine]) -> ReportTable | None:
    if not lines:
        return None
    kinds = ("name", "text", "text", "number", "number", "words", "words")
    cells = [line.cells for line in lines]
    return ReportTable(FINETUNED_HEADINGS, kinds, cells, "Fine-tuned", EXPLAINED)


def finetuned_models(
    runs: Sequence[ReportedRun], problems: list[str]
) -> list[FinetunedModel]:
    """Return the fine-tuned models among the runs; for runs with a summary only median and ensemble.

    Unreadable summaries are added to `problems`.
    """
    models = dict[Path, list[FinetunedModel]]()
    for run in runs:
        scores = run.result.task_scores
        is_tuned = run.recipe and run.recipe.task and run.result.status == "ok"
        if not is_tuned or not scores:
            continue
        above = run.path.parent
        summary = None
        try:
            summary = finetuning_seeds.read(above)
        except (ValueError, OSError) as error:
            fix = "start the same command again, or leave its runs out"
            problems.append(f"{' '.join(str(error).split())}: {fix}")
        if summary and run.path.name in {each.name for each in summary.seeds}:
            models[above] = list(_of_summary(run, summary))
        else:
            models[run.path] = [
                FinetunedModel(run, _values(scores), run.label, run.path)
            ]
    return list(chain.from_iterable(models.values()))


def _of_summary(run: ReportedRun, summary: Summary) -> Iterator[FinetunedModel]:
    """Yield the median and the ensemble of a summary; `run` is one of its runs."""
    above = run.path.parent
    count = len(summary.sound)
    of: dict[str, Any] = dict(run=run, path=above / SUMMARY, models=count)
    median = f"{above.name}, median of {count} seeds"
    yield FinetunedModel(scores=summary.median, label=median, **of)
    if summary.ensemble:
        of |= dict(scores=_values(summary.ensemble), together=True)
        yield FinetunedModel(label=f"{above.name}, {count} together", **of)


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
            downstream = row.published.downstream if row.published else None
            printed = getattr(getattr(downstream, figure.task, None), figure.key, None)
            published = None if printed is None else round(printed / 100, 6)
            on_task = [each for each in own if each.task.name == figure.task]
            if published is not None and not on_task:
                yield FinetunedLine(row, figure, published)
            for each in on_task:
                measured = each.score(figure)
                why_not = ""
                if row.published and published is not None:
                    why_not = ", ".join(_why_not(each, row.published))
                if measured is not None or published is not None:
                    yield FinetunedLine(row, figure, published, measured, each, why_not)


def _why_not(finetuned: FinetunedModel, published: Published) -> Iterator[str]:
    """Yield the reasons why measured and published scores cannot be compared."""
    pretrained = finetuned.run.pretrained
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
    if bool(published.ensemble) != finetuned.together:
        models = "models that answer together" if published.ensemble else "one model"
        yield f"published of {models}"


def percent(share: float | None, without: str = "") -> str:
    return without if share is None else f"{100 * share:.1f} %"


def frame(
    runs: Sequence[ReportedRun], finetuned: Iterable[FinetunedModel]
) -> ReportTable | None:
    """Return the table of all scores, each by its task's main figure. `finetuned`: models without a row."""
    rows = [*_score_rows(runs)]
    for each in finetuned:
        parameters = number(each.run.result.parameters)
        for split, metrics in each.scores.items():
            for metric in SHARES:
                if metric in metrics:
                    figure = f"{metric}, {split}".replace("_", " ")
                    measured = (each.how, percent(metrics[metric]), parameters)
                    rows.append((each.task.name, figure, *measured, "fine-tuned"))
    kinds = ("text", "text", "name", "number", "number", "words")
    return ReportTable(HEADINGS, kinds, rows) if rows else None


def _score_rows(runs: Sequence[ReportedRun]) -> Iterator[tuple[str, ...]]:
    """Yield the runs of each task, followed by the published scores."""
    by_name: dict[str, list[tuple[ReportedRun, Score]]] = {}
    for run in runs:
        for score in run.scores:
            by_name.setdefault(score.name, []).append((run, score))
    for name, scored in sorted(by_name.items()):
        for run, score in scored:
            step = "" if score.step is None else f", step {score.step:,}"
            figure, value = next(iter(score.figures.items()))
            yield (
                name,
                figure_name(figure),
                f"{run.label}{step}",
                figure_text(figure, value),
                number(score.parameters),
                f"{score.data}, {score.windowed}, {score.precision}",
            )
        for each in published_next_to(score.task):
            model = f"published: {each.model}"
            figure = figure_name(each.figure)
            yield name, figure, model, each.printed, "", each.source
