"""Checks of a recipe against its row: cells, declarations, texts and public scripts."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from launch.tables.evidence import Statement
from tools.tables.lines import (
    HEADINGS,
    SAMPLES,
    TIME,
    Cell,
    CheckedRow,
    Checks,
    Line,
    LineCheck,
    related,
)
from tools.tables.printed import Printed, agreement

# Each stands in a column or in free text.
NUMBERS = [
    key
    for key in HEADINGS
    if re.fullmatch(r"published\.\w+", key) and key != "published.date"
]
_NUMBERS = re.compile(r"\d+(?:\.\d+)?")
# What a table need not print, and then has to come from somewhere.
NEEDS_SOURCE = (
    "sequence_length",
    "activation_checkpointing",
    "precision",
    "optimizer",
    "schedule",
    "dropout",
    "steps",
    "data",
    "batch.micro",
    "batch.global",
)
NEVER_CHECKED = {
    "published.date": "nothing follows from a date",
    "published.cached_gb": "bounded by the model states and the GPU's memory; activations and the allocator "
    "decide the rest",
    "model.heads": "no size depends on the number of heads, beyond that tp divides it",
}
SCORES = ("published.downstream.", "published.previous.")


def entries(row: CheckedRow) -> Checks:
    """Check cells, published numbers, declarations, and keys in need of a source."""
    for check in (
        *_cells(row),
        *_published_numbers(row),
        *_declarations(row),
        *_sources(row),
    ):
        yield replace(check, transcribed=True)


def other_model(line: Line) -> Checks:
    """Check the cells of a line without a recipe against its own numbers."""
    for check in _cells(line):
        if check.status != "not checkable":  # nothing else is checked of it
            yield replace(check, transcribed=True)


def _cells(line: Line) -> Checks:
    count = len((line.published.row or "").split("|"))
    columns = len(line.table.columns)
    yield line.compare("cells", columns, count, count == columns)
    for cell in line.cells:
        if cell.key:
            yield _cell(line, cell, cell.key, f'cell "{cell.heading}"')
        else:
            yield line.not_checkable(
                "cell",
                "free text, or of another run: no key of the recipe",
                f"{cell.heading}: {cell.text}",
            )


def _cell(line: Line, cell: Cell, key: str, quantity: str) -> LineCheck:
    own = line.value(key)
    oom = line.published.oom
    if cell.text == "OOM":
        return line.compare(quantity, cell.text, f"published.oom={oom}", oom)
    if not cell.text:
        blank = own is None or not key.startswith("published.")
        says = "blank" if blank else f"{key}={own}"
        return line.compare(quantity, "blank", says, blank)
    how: bool | str = prints(cell, own)
    if not how and prints(cell, line.published.printed.get(key)):
        how = f"declared: the run has {own}"
    return line.compare(quantity, cell.text, f"{key}={own}", how)


def prints(cell: Cell, value: object) -> bool:
    """Check whether a cell prints this value of its key, or all numbers of a value with parts."""
    if isinstance(value, BaseModel):
        stated = value.model_dump(exclude_none=True).values()
        return [*map(float, _NUMBERS.findall(cell.text))] == [*stated]
    if cell.key == "activation_checkpointing":
        return cell.text == ("no" if value == "none" else "yes")
    if cell.key == "published.date":
        return cell.text == value
    number = cell.number
    if number is None or value is None:
        return False
    if cell.key == "published.size_label":
        own = Printed.read(str(value))
        same_unit = cell.text[-1].isdigit() or cell.text == value
        return own is not None and own.value == number.value and same_unit
    return isinstance(value, int | float) and _close(number.value, value)


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-9 * abs(one)


def _published_numbers(row: CheckedRow) -> Checks:
    """Check that every number under `published`, and an OOM, stands in a cell."""
    if row.published.oom:
        in_cells = "OOM" in (cell.text for cell in row.cells)
        printed = "OOM" if in_cells else "no OOM"
        yield row.compare("published.oom", printed, "published.oom=True", in_cells)
    free = (cell.text for cell in row.cells if not cell.key)
    words = {word for text in free for word in re.split(r"[\s,;()]+", text)}
    for key in NUMBERS:
        value = row.value(key)
        if value is not None and row.cell_of(key) is None:
            yield row.compare(key, row.published.row or "", value, str(value) in words)


def _declarations(row: CheckedRow) -> Checks:
    """Check that `published.printed` names differences, and `inferred` nothing printed."""
    for key, value in row.published.printed.items():
        cell = row.cell_of(key)
        own = row.value(key)
        quantity = f"published.printed {key}"
        how = None if value == own else "declared: it differs"
        yield row.compare(quantity, value, f"{key}={own}", how)
        if cell and not prints(cell, value):
            yield row.compare(f"{quantity} cell", cell.text, value, None)
    for key in row.recipe.inferred:
        text = row.text_of(key)
        if text:
            yield row.compare(f"inferred {key}", text, "declared as not printed", None)


def _sources(row: CheckedRow) -> Checks:
    for key in (key for key in NEEDS_SOURCE if not row.text_of(key)):
        said = any(
            related(key, name) for name in (*row.recipe.inferred, *row.recipe.unknown)
        )
        computed, how = (
            ("inferred or unknown", "declared") if said else ("no source", None)
        )
        yield row.compare(f"source of {key}", "no cell", computed, how)


def settings(row: CheckedRow) -> Checks:
    """Check each value in a text or script, and report printed numbers without any other check."""
    said = set()
    for statement in row.source.evidence.statements(row.name):
        said.add(statement.key)
        yield replace(_setting(row, statement), stated=True)
    for cell in row.cells:
        if (
            cell.text
            and cell.key
            and cell.key not in said
            and (why := _unchecked(row, cell.key))
        ):
            yield row.not_checkable(f"printed {cell.key}", why, cell.text)


def _setting(row: CheckedRow, said: Statement) -> LineCheck:
    """Compare a stated value; a number under `published` may have other digits there."""
    own = row.value(said.key)
    text = Printed.read(_shown(said.value))
    printed = (
        row.printed_number(said.key) if said.key.startswith("published.") else None
    )
    agrees = _same(said.value, own)
    if printed and text and not agrees:
        agrees = bool(agreement(printed, text.value) or agreement(text, printed.value))
    borrowed = "stands in, from " if row.unknown_reason(said.key) else ""
    how = f'{borrowed}{said.source}: "{said.quotation}"' if agrees else None
    return row.compare(f"setting {said.key}", _shown(said.value), _shown(own), how)


def _same(said: Any, own: Any) -> bool:
    if isinstance(said, list):
        return (
            isinstance(own, (list, tuple))
            and len(said) == len(own)
            and all(map(_same, said, own))
        )
    if isinstance(said, (bool, str)) or isinstance(own, (bool, str)) or own is None:
        return type(said) is type(own) and said == own
    return _close(said, own)


def _shown(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_shown, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _unchecked(row: CheckedRow, key: str) -> str:
    """Return the reason why nothing recomputes a printed number; empty if something does."""
    published = row.published
    if key in NEVER_CHECKED:
        return NEVER_CHECKED[key]
    if key.startswith(SCORES):
        return "a score of a trained model: its parts and its place among other scores are checked"
    if published.oom:
        return (
            "it ran out of memory: no rate follows from the batch"
            if key == "batch.micro"
            else ""
        )
    rate = published.samples_per_s
    bounded = "only its share of the GPU's peak is bounded"
    if key == TIME and rate is None and published.tflops is None:
        return f"neither a rate nor TFLOPS are printed next to it: {bounded}"
    if rate is not None and published.time_per_iteration_s is None:
        if key == SAMPLES:
            return f"no time is printed next to it: {bounded}"
        if key == "batch.micro":
            return "no time is printed: samples/s alone do not give the batch"
    return ""
