"""Scores of fine-tuned models next to the published scores of their pretraining row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launch.console.numbers import ratio
from launch.evaluation import finetuning_summary
from launch.evaluation.finetuning_summary import SUMMARY, Summary
from launch.evaluation.pretrained import Pretrained
from launch.records.facts import TaskScore
from launch.reports.frames import Frame
from launch.reports.runs import Run
from launch.reports.tables import PublishedRow
from recipes import catalog
from recipes.schema import Published, Recipe, TaskName
from recipes.tasks import TASKS

NOT_RUN, NOT_SCORED = "not run", "not scored"
HEADINGS = ("recipe", "task", "figure", "published", "measured", "measured / published", "fine-tuning")
EXPLAINED = (
    "Fine-tuning runs whose weights are of the row's own pretraining. Published scores are medians over five "
    "seeds, or of models that answer together."
)
PERCENT = 100
SHARES = ("accuracy", "middle_accuracy", "high_accuracy", "f1", "exact")  # of the metrics of tasks


@dataclass(frozen=True)
class Figure:
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
    Figure("mnli", "mismatched", "accuracy, mismatched dev set", "dev_mismatched", "accuracy"),
    Figure("qqp", "accuracy", "accuracy, dev set", "dev", "accuracy"),
    *(
        Figure(task, key, f"{name}, dev set", "dev", metric)
        for task in ("squad1", "squad2")
        for key, name, metric in (("f1", "F1", "f1"), ("em", "exact match", "exact"))
    ),
    Figure("race", "accuracy", "accuracy, test set", "test", "accuracy"),
    Figure("race", "middle", "accuracy, middle schools", "test", "middle_accuracy"),
    Figure("race", "high", "accuracy, high schools", "test", "high_accuracy"),
)


@dataclass(frozen=True)
class FinetunedModel:
    """A fine-tuned model, or several models of one task.

    Attributes:
        kind: one run, the median of seeds, or an ensemble of seeds; `models`: their number.
        scores: split -> metric -> share of 1.
        own_files: trained on the user's files instead of the hub's data set.
        cut: ended before its last epoch (--steps).
    """

    label: str
    path: Path
    task: TaskName
    pretrained: Pretrained | None
    scores: Mapping[str, Mapping[str, float]]
    parameters: int | None
    own_files: bool
    cut: bool
    kind: Literal["run", "median", "ensemble"] = "run"
    models: int = 1

    @property
    def how(self) -> str:
        """Return the label with the number of seeds, in words."""
        several = {
            "run": "",
            "median": f", median of {self.models} seeds",
            "ensemble": f", {self.models} together",
        }
        tiny = " (TINY)" if self.pretrained and self.pretrained.tiny else ""
        return f"{self.label}{tiny}{several[self.kind]}"

    @property
    def weights(self) -> str:
        """Return the origin of the weights, in words."""
        if self.pretrained is None:
            return "weights of no pretraining run, or drawn at random"
        tiny = ", tiny" if self.pretrained.tiny else ""
        return f"weights of {self.pretrained.recipe}{tiny}, step {self.pretrained.step:,}"


@dataclass(frozen=True)
class FinetunedLine:
    """A figure of a row, published or measured or both; shares of 1.

    Attributes:
        why_not: the reason against a ratio; "" with a ratio, or with nothing to compare.
    """

    row: PublishedRow
    figure: Figure
    published: float | None
    finetuned: FinetunedModel | None
    why_not: str = ""

    @property
    def measured(self) -> float | None:
        found = self.finetuned
        return found.scores.get(self.figure.split, {}).get(self.figure.metric) if found else None

    @property
    def ratio(self) -> float | None:
        """Return measured / published."""
        if self.measured is None or not self.published or self.why_not:
            return None
        return self.measured / self.published

    @property
    def cells(self) -> tuple[str, ...]:
        """Return the line as text in the columns of HEADINGS."""
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


def frame(lines: Sequence[FinetunedLine]) -> Frame | None:
    kinds = ("name", "text", "text", "number", "number", "words", "words")
    return Frame(HEADINGS, kinds, [line.cells for line in lines], "Fine-tuned", EXPLAINED) if lines else None


def finetuned_models(runs: Sequence[Run], problems: list[str]) -> list[FinetunedModel]:
    """Return the fine-tuned models among the runs; for runs with a summary only median and ensemble.

    Unreadable summaries are added to `problems`.
    """
    found: list[FinetunedModel] = []
    summaries: dict[Path, Summary | None] = {}
    shown: set[Path] = set()
    for run in runs:
        above = run.path.parent
        if not (run.recipe and run.recipe.task) or run.result.status != "ok" or not run.result.task_scores:
            continue
        if above not in summaries:
            summaries[above] = _summary(above, problems)
        summary = summaries[above]
        if summary is None or run.path.name not in {each.name for each in (*summary.grid, *summary.seeds)}:
            found.append(_of_run(run, run.label, run.path, _values(run.result.task_scores)))
        elif above not in shown:
            shown.add(above)
            found += _of_summary(run, summary)
    return found


def _summary(folder: Path, problems: list[str]) -> Summary | None:
    try:
        return finetuning_summary.read(folder)
    except (ValueError, OSError) as error:
        fix = "start the same command again, or leave its runs out"
        problems.append(f"{' '.join(str(error).split())}: {fix}")
        return None


def _of_summary(run: Run, summary: Summary) -> Iterator[FinetunedModel]:
    """Yield the median and the ensemble of a summary; `run` is one of its runs."""
    label, path = run.path.parent.name, run.path.parent / SUMMARY
    sound = sum(bool(each.scores) for each in summary.seeds)
    yield _of_run(run, label, path, summary.median, "median", sound)
    if summary.ensemble:
        joined = _values(summary.ensemble)
        yield _of_run(run, label, path, joined, "ensemble", summary.ensemble_of or sound)


def _of_run(
    run: Run,
    label: str,
    path: Path,
    scores: Mapping[str, Mapping[str, float]],
    kind: Literal["run", "median", "ensemble"] = "run",
    models: int = 1,
) -> FinetunedModel:
    assert run.recipe is not None and run.recipe.task is not None, "a fine-tuning run"
    task = run.recipe.task
    cut = any(each.kind == "recipe" and each.key == "steps" for each in run.result.deviations)
    own, parameters = task.train is not None, run.result.parameters
    return FinetunedModel(label, path, task.name, run.pretrained, scores, parameters, own, cut, kind, models)


def _values(scores: Sequence[TaskScore]) -> dict[str, Mapping[str, float]]:
    return {score.split: score.metrics for score in scores}


def finetuned_lines(
    rows: Sequence[PublishedRow],
    finetuned: Sequence[FinetunedModel],
    recipe_of: Callable[[str], Recipe | None],
) -> list[FinetunedLine]:
    """Return a line for each figure of each row, published or measured with its weights.

    `recipe_of` returns the recipe of a name. Rows of several tables may share one pretraining.
    """
    lines: list[FinetunedLine] = []
    for row in rows:
        own = [each for each in finetuned if _is_of(each, row, recipe_of)]
        lines += [line for figure in FIGURES for line in _lines_of(row, figure, own)]
    return lines


def _is_of(finetuned: FinetunedModel, row: PublishedRow, recipe_of: Callable[[str], Recipe | None]) -> bool:
    if (pretrained := finetuned.pretrained) is None:
        return False
    if pretrained.recipe == row.full_name:
        return True
    recipes = (row.recipe, recipe_of(pretrained.recipe))
    trainings = {(catalog.digest(each), each.steps) if each else None for each in recipes}
    return len(trainings) == 1 and None not in trainings


def _lines_of(
    row: PublishedRow, figure: Figure, finetuned: Sequence[FinetunedModel]
) -> Iterator[FinetunedLine]:
    """Yield the lines of one figure. `finetuned`: models of the row's weights, on any task."""
    published = row.published
    of_task = getattr(published.downstream, figure.task, None) if published else None
    percent = getattr(of_task, figure.key, None)
    printed = None if percent is None else round(percent / PERCENT, 6)
    own = [each for each in finetuned if each.task == figure.task]
    for each in own:
        why_not = ", ".join(_why_not(each, published)) if published and printed is not None else ""
        line = FinetunedLine(row, figure, printed, each, why_not)
        if printed is not None or line.measured is not None:
            yield line
    if printed is not None and not own:
        yield FinetunedLine(row, figure, printed, None)


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
    if finetuned.own_files:
        yield "on other files than the hub's"
    if finetuned.cut:
        yield "fine-tuning was cut short (--steps)"
    if bool(published.ensemble) != (finetuned.kind == "ensemble"):
        yield "published of models that answer together" if published.ensemble else "published of one model"


def percent(share: float) -> str:
    return f"{PERCENT * share:.1f} %"
