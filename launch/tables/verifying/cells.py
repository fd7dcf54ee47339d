"""The recipe against the cells of its row: nothing differs from what is printed without saying so."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from launch.tables.verifying.printed_values import Printed
from launch.tables.verifying.rows import Check, Key, Row, related

NUMBERS = (
    "size_label", "parameters", "parameters_per_rank", "time_per_iteration_s", "samples_per_s", "tflops",
    "cached_gb", "weak_scaling_percent", "peak_percent",
)  # fmt: skip
_NUMBERS = re.compile(r"\d+(?:\.\d+)?")
# What a table need not print, and then has to come from somewhere.
OWED = (
    "sequence_length", "activation_checkpointing", "precision", "optimizer", "schedule", "dropout", "steps",
    "data", "batch.micro", "batch.global",
)  # fmt: skip


def checks(row: Row) -> Iterator[Check]:
    """One check per cell, per published number, per declaration, and of what is owed a source."""
    for check in (*_cells(row), *_published_numbers(row), *_declarations(row), *_owed(row)):
        yield replace(check, transcribed=True)


def _cells(row: Row) -> Iterator[Check]:
    count, columns = len((row.published.row or "").split("|")), len(row.table.columns)
    yield row.compare("cells", columns, count, count == columns)
    for heading, cell in row.cells:
        if key := row.key_of(heading):
            yield _cell(row, f'cell "{heading}"', cell, key)
        else:
            why = "free text, or of another run: no key of the recipe"
            yield row.unchecked("cell", why, f"{heading}: {cell}")


def _cell(row: Row, quantity: str, cell: str, key: Key) -> Check:
    own, declared = row.own(key.name), row.published.printed.get(key.name)
    if cell == "OOM":
        return row.compare(quantity, cell, f"published.oom={row.published.oom}", row.published.oom)
    if not cell:
        blank = own is None or not key.name.startswith("published.")
        return row.compare(quantity, "blank", "blank" if blank else f"{key.name}={own}", blank)
    how: bool | str = prints(cell, key, own)
    if not how and prints(cell, key, declared):
        how = f"declared: the run has {own}"
    return row.compare(quantity, cell, f"{key.name}={own}", how)


def prints(cell: str, key: Key, value: object) -> bool:
    """Whether a cell prints this value of a key, all numbers of it where the key has parts."""
    if key.parts:
        stated = (getattr(value, part, None) for part in key.parts)
        return [*map(float, _NUMBERS.findall(cell))] == [each for each in stated if each is not None]
    if key.name == "activation_checkpointing":
        return cell == ("no" if value == "none" else "yes")
    if key.name == "published.date":
        return cell == value
    number = Printed.read(cell, key.factor)
    if number is None or value is None:
        return False
    if key.name == "published.size_label":
        own = Printed.read(str(value))
        return own is not None and own.value == number.value and (cell[-1].isdigit() or cell == value)
    return isinstance(value, (int, float)) and abs(number.value - value) <= 1e-9 * abs(number.value)


def _published_numbers(row: Row) -> Iterator[Check]:
    """Every number under `published` stands in its column or in a cell of free text; so does an OOM."""
    if row.published.oom:
        found = "OOM" in (cell for _, cell in row.cells)
        yield row.compare("published.oom", "OOM" if found else "no OOM", "published.oom=True", found)
    free = (cell for heading, cell in row.cells if not row.key_of(heading))
    words = {word for cell in free for word in re.split(r"[\s,;()]+", cell)}
    for name in NUMBERS:
        value = getattr(row.published, name)
        if value is not None and row.cell_of(f"published.{name}") is None:
            yield row.compare(f"published.{name}", row.published.row or "", value, str(value) in words)


def _declarations(row: Row) -> Iterator[Check]:
    """`published.printed` names what differs; `inferred` names nothing that is printed."""
    for name, value in row.published.printed.items():
        cell, own, quantity = row.cell_of(name), row.own(name), f"published.printed {name}"
        how = None if value == own else "declared: it differs"
        yield row.compare(quantity, value, f"{name}={own}", how)
        if cell is not None and not prints(cell, Key(name), value):
            yield row.compare(f"{quantity} cell", cell, value, None)
    for name in row.recipe.inferred:
        if cell := row.cell_of(name):
            yield row.compare(f"inferred {name}", cell, "declared as not printed", None)


def _owed(row: Row) -> Iterator[Check]:
    for key in (key for key in OWED if not row.cell_of(key)):
        said = any(related(key, name) for name in (*row.recipe.inferred, *row.recipe.unknown))
        computed, how = ("inferred or unknown", "declared") if said else ("no source", None)
        yield row.compare(f"source of {key}", "no cell", computed, how)
