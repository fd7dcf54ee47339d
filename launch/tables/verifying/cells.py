"""The recipe against the cells of its row: nothing differs from what is printed without saying so."""

from __future__ import annotations

import re
from collections.abc import Iterator

from launch.tables.verifying.check import Check
from launch.tables.verifying.printed_values import Printed
from launch.tables.verifying.rows import Row

NUMBERS = (
    "size_label", "parameters", "parameters_per_rank", "time_per_iteration_s", "samples_per_s", "tflops", "cached_gb",
    "weak_scaling_percent", "peak_percent",
)  # fmt: skip
# What a table need not print, and then has to come from somewhere.
OWED = (
    "sequence_length", "activation_checkpointing", "precision", "optimizer", "schedule", "dropout", "steps", "data", "batch.micro",
    "batch.global",
)  # fmt: skip


def checks(row: Row) -> Iterator[Check]:
    """One check per cell, per published number, per declaration, and of what is owed a source."""
    count, columns = len((row.published.row or "").split("|")), len(row.table.columns)
    yield row.compare("cells", str(columns), str(count), "exact" if count == columns else None)
    for heading, cell in row.cells:
        yield _cell(row, heading, cell)
    yield from _published_numbers(row)
    yield from _declarations(row)
    yield from _owed(row)


def _cell(row: Row, heading: str, cell: str) -> Check:
    quantity, found = f'cell "{heading}"', row.key_of(heading)
    if found is None:
        return row.say(
            "not checkable", quantity, printed=cell, how="free text, or of another run: no key of the recipe"
        )
    key, factor = found
    if cell == "OOM":
        return row.compare(
            quantity, cell, f"published.oom={row.published.oom}", "exact" if row.published.oom else None
        )
    own = row.own(key)
    if not cell:
        computed = "blank" if own is None or not key.startswith("published.") else f"{key}={own}"
        return row.compare(quantity, "blank", computed, "exact" if computed == "blank" else None)
    if _prints(cell, factor, key, own):
        return row.compare(quantity, cell, f"{key}={own}", "exact")
    declared = row.published.printed.get(key)
    how = (
        f"declared: the run has {own}"
        if declared is not None and _prints(cell, factor, key, declared)
        else None
    )
    return row.compare(quantity, cell, f"{key}={own}", how)


def _prints(cell: str, factor: float, key: str, value: object) -> bool:
    """Whether a cell prints this value of a key."""
    if key == "activation_checkpointing":
        return cell == ("no" if value == "none" else "yes")
    if key == "published.date":
        return cell == value
    number = Printed.read(cell, factor)
    if number is None or value is None:
        return False
    if key == "published.size_label":
        own = Printed.read(str(value))
        return own is not None and own.value == number.value and (cell[-1].isdigit() or cell == value)
    return isinstance(value, (int, float)) and abs(number.value - value) <= 1e-9 * abs(number.value)


def _published_numbers(row: Row) -> Iterator[Check]:
    """Every number under `published` stands in the row, in its column or in a cell of free text; so does an OOM."""
    if row.published.oom:
        cells = [cell for _, cell in row.cells]
        yield row.compare(
            "published.oom",
            "OOM" if "OOM" in cells else "no OOM",
            "published.oom=True",
            "exact" if "OOM" in cells else None,
        )
    for name in NUMBERS:
        value = getattr(row.published, name)
        if value is None or row.cell_of(f"published.{name}") is not None:
            continue
        words = {
            word
            for heading, cell in row.cells
            if not row.key_of(heading)
            for word in re.split(r"[\s,;()]+", cell)
        }
        yield row.compare(
            f"published.{name}", row.published.row or "", str(value), "exact" if str(value) in words else None
        )


def _declarations(row: Row) -> Iterator[Check]:
    """`published.printed` names what differs; `inferred` names nothing that is printed."""
    for key, value in row.published.printed.items():
        cell, own = row.cell_of(key), row.own(key)
        same = value == own
        yield row.compare(
            f"published.printed {key}", str(value), f"{key}={own}", None if same else "declared: it differs"
        )
        if cell is not None and not _prints(cell, 1, key, value):
            yield row.compare(f"published.printed {key} cell", cell, str(value), None)
    for key in row.recipe.inferred:
        cell = row.cell_of(key)
        if cell:
            yield row.compare(f"inferred {key}", cell, "declared as not printed", None)


def _owed(row: Row) -> Iterator[Check]:
    sources = (*row.recipe.inferred, *row.recipe.unknown)
    for key in OWED:
        if row.cell_of(key):
            continue
        said = any(
            key == name or key.startswith(f"{name}.") or name.startswith(f"{key}.") for name in sources
        )
        yield row.compare(
            f"source of {key}",
            "no cell",
            "inferred or unknown" if said else "no source",
            "declared" if said else None,
        )
