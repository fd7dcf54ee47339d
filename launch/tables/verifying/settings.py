"""Settings of a row against texts and public scripts, and the printed numbers that nothing can check."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from launch.tables.verifying.evidence import Evidence, Statement
from launch.tables.verifying.printed_values import Printed, agreement
from launch.tables.verifying.rows import SAMPLES, TIME, Check, Row

NEVER_CHECKED = {
    "published.date": "nothing follows from a date",
    "published.cached_gb": "bounded by the model states and the GPU's memory; activations and the allocator "
    "decide the rest",
    "model.heads": "no size depends on the number of heads, beyond that tp divides it",
}
SCORES = ("published.downstream.", "published.previous.")


def checks(row: Row, evidence: Evidence) -> Iterator[Check]:
    """One check per value that a source gives for the row, and per printed number that nothing else gives."""
    said = set()
    for statement in evidence.statements(row.name):
        said.add(statement.key)
        yield replace(_setting(row, statement), stated=True)
    for heading, cell in row.cells:
        key = row.key_of(heading)
        if cell and key and key.name not in said and (reason := _unchecked(row, key.name)):
            yield row.unchecked(f"printed {key.name}", reason, cell)


def _setting(row: Row, said: Statement) -> Check:
    """A number under `published` may be printed with other digits by the text."""
    own, printed = row.own(said.key), row.printed(said.key) if said.key.startswith("published.") else None
    text = Printed.read(_shown(said.value))
    agrees = _same(said.value, own)
    if printed and text and not agrees:
        agrees = bool(agreement(printed, text.value) or agreement(text, printed.value))
    borrowed = "stands in, from " if row.unknown(said.key) else ""
    how = f'{borrowed}{said.source}: "{said.quotation}"' if agrees else None
    return row.compare(f"setting {said.key}", _shown(said.value), _shown(own), how)


def _same(said: Any, own: Any) -> bool:
    if isinstance(said, list):
        return isinstance(own, (list, tuple)) and len(said) == len(own) and all(map(_same, said, own))
    if isinstance(said, (bool, str)) or isinstance(own, (bool, str)) or own is None:
        return type(said) is type(own) and said == own
    return bool(abs(said - own) <= 1e-9 * abs(said))


def _shown(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_shown, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _unchecked(row: Row, key: str) -> str:
    """Why nothing recomputes a printed number; empty where something does."""
    published = row.published
    if key in NEVER_CHECKED:
        return NEVER_CHECKED[key]
    if key.startswith(SCORES):
        return "a score of a trained model: its parts and its place among other scores are checked"
    if published.oom:
        return "it ran out of memory: no rate follows from the batch" if key == "batch.micro" else ""
    rate, bounded = published.samples_per_s, "only its share of the GPU's peak is bounded"
    if key == TIME.name and rate is None and published.tflops is None:
        return f"neither a rate nor TFLOPS are printed next to it: {bounded}"
    if rate is not None and published.time_per_iteration_s is None:
        if key == SAMPLES.name:
            return f"no time is printed next to it: {bounded}"
        if key == "batch.micro":
            return "no time is printed: samples/s alone do not give the batch"
    return ""
