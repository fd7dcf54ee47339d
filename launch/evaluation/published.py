"""Published scores, which a score stands next to: those that the rows of a table of recipes/ print."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from data.tasks.windows import TaskName
from recipes import catalog
from recipes.schema import Downstream

TABLE = "megatron_paper_results"  # of language models scored on the tasks of launch/score.py


@dataclass(frozen=True)
class PublishedScore:
    """A figure as printed.

    Attributes:
        figure: its name in `figures`.
        value: a share of 1 where it is printed in percent.
    """

    model: str
    task: TaskName
    figure: str
    value: float
    printed: str
    source: str


def published_next_to(task: str) -> tuple[PublishedScore, ...]:
    """Those of the same task."""
    return tuple(each for each in published_scores() if each.task == task)


@cache
def published_scores() -> tuple[PublishedScore, ...]:
    """All of the table, each row's and then the best ones before it."""
    rows = [entry.name for entry in catalog.names() if entry.name.startswith(f"{TABLE}/")]
    found: list[PublishedScore] = []
    for name in rows:
        recipe = catalog.load(name)
        if (published := recipe.published) is not None:
            model = f"{recipe.model.facts.title} {published.size_label} ({published.framework})"
            found += _of(model, published.downstream, published.source)
            found += _of("best before it", published.previous, published.source)
    return tuple(found)


def _of(model: str, printed: Downstream | None, source: str) -> Iterator[PublishedScore]:
    if printed is not None and printed.wikitext103 is not None:
        perplexity = printed.wikitext103.perplexity
        yield PublishedScore(model, "wikitext103", "perplexity", perplexity, f"{perplexity:g}", source)
    if printed is not None and printed.lambada is not None:
        percent = printed.lambada.accuracy
        yield PublishedScore(model, "lambada", "accuracy", percent / 100, f"{percent:g} %", source)
