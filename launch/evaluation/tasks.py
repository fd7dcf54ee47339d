"""A task as the user asks for it, checked, and its data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from data import corpus
from data.tasks.rows import FLAG, local_file
from data.tasks.scored_text import WIKITEXT103, Variant, documents, held_out, lambada, wikitext103
from data.tasks.windows import TaskData, TaskName
from launch.evaluation.scored_model import ScoredModel
from recipes.problems import Problem, ProblemsError

STRIDE = 32  # tokens; of WikiText-103 (arXiv 1909.08053, appendix E.1)


@dataclass(frozen=True)
class Asked:
    """What is scored, as the flags say; None: the task's own.

    Attributes:
        data: a local file.
        window, stride: tokens that are read at once, and from one window to the next.
        limit: examples or windows.
    """

    task: TaskName
    variant: Variant
    data: str | None = None
    column: str = "text"
    window: int | None = None
    stride: int | None = None
    limit: int | None = None

    def check(self, model: ScoredModel) -> tuple[int, int]:
        """Window and stride. Raises ProblemsError with everything that does not fit the model."""
        positions, length = model.recipe.positions, model.recipe.sequence_length
        window = self.window or length
        stride = self.stride or (min(STRIDE, window) if self.task == "wikitext103" else window)
        problems = []
        if window > positions:
            rule = f"the model has {positions:,} positions"
            problems.append(Problem("--window", f"--window {window}", rule, f"give {positions} or less"))
        if stride > window:
            rule = "tokens between two windows would be left out"
            problems.append(
                Problem(
                    "--stride", f"--stride {stride} with a window of {window}", rule, f"give {window} or less"
                )
            )
        whole = self.task == "lambada" or (self.task == "perplexity" and self.data is None)
        if self.stride and whole:
            rule = "passages and held-out samples are read once"
            problems.append(Problem("--stride", f"--stride with --task {self.task}", rule, "leave it out"))
        if self.window and self.window != length and self.task == "perplexity" and self.data is None:
            rule = f"held-out samples have {length:,} tokens"
            fix = f"leave it out, or give text with {FLAG} FILE"
            problems.append(Problem("--window", f"--window {window}", rule, fix))
        if self.data is not None:
            try:
                local_file(self.data)
            except ProblemsError as error:
                problems += error.problems
        elif self.task == "perplexity":
            try:
                corpus.check_sources(model.recipe)
            except ProblemsError as error:
                problems += error.problems
        if problems:
            raise ProblemsError(problems)
        return window, stride


def read_task(
    asked: Asked, model: ScoredModel, window: int, stride: int, say: Callable[[str], None]
) -> TaskData:
    """The task as the model meets it. Raises ValueError: its data cannot be read, or nothing is left."""
    place = Path(local_file(asked.data)) if asked.data is not None else None
    tokenizer, column, limit = model.trained.tokenizer, asked.column, asked.limit
    if asked.task == "wikitext103":
        data = wikitext103(tokenizer, window, stride, place or WIKITEXT103, column, limit)
    elif asked.task == "lambada":
        data = lambada(tokenizer, window, asked.variant, place, column, limit)
    elif place:
        data = documents(tokenizer, window, stride, place, column, limit)
    else:
        built = corpus.build(model.recipe, say=say)
        data = held_out(built.validation, str(built.summary["source"]), limit)
    if not data.windows:
        first = f", the first: {data.broken[0]}" if data.broken else ""
        came, rule = f"{data.source}: nothing is left to score", f"{len(data.broken)} broken examples{first}"
        raise ProblemsError([Problem(FLAG, came, rule, "give another file")])
    return data
