"""Printed scores of tasks in words."""

from __future__ import annotations

from collections.abc import Iterator

from recipes.schema import Downstream, Published

NAMES = {
    "wikitext103": "WikiText-103 perplexity", "lambada": "LAMBADA", "mnli": "MNLI m/mm", "qqp": "QQP",
    "squad1": "SQuAD 1.1 F1/EM", "squad2": "SQuAD 2.0 F1/EM", "race": "RACE",
}  # fmt: skip


def scores(downstream: Downstream | None) -> Iterator[tuple[str, str]]:
    """Yield task and numbers of printed scores, as in ("RACE", "89.5 (91.8/88.6)")."""
    for task, name in NAMES.items():
        score = getattr(downstream, task, None)
        if score:
            values = score.model_dump(exclude_none=True).values()
            first, *rest = (f"{value:g}" for value in values)
            if task == "race" and rest:
                yield name, f"{first} ({'/'.join(rest)})"
            else:
                yield name, "/".join([first, *rest])


def score_lines(published: Published) -> Iterator[tuple[str, str]]:
    """Yield lines about the scores: each task, the best before it, and the ensemble."""
    before = dict(scores(published.previous))
    for name, value in scores(published.downstream):
        if name in before:
            value += f", {before[name]} before"
        yield name, value
    if published.ensemble:
        count = (
            "several" if published.ensemble == "unstated" else f"{published.ensemble}"
        )
        yield "answers of", f"{count} fine-tuned models together"
    if published.trained_tokens is not None:
        times = f"{published.trained_tokens:g} x"
        yield "trained tokens", f"{times} those of the table's smallest model"
