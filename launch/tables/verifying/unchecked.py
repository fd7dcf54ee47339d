"""Printed numbers that nothing recomputes: each with the reason, so that a report does not pass over them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Set

from launch.tables.verifying.check import Check
from launch.tables.verifying.claims import Claim
from launch.tables.verifying.rows import Row

VALUE = re.compile(r'value\(\s*(row|"[^"]+")\s*,\s*"([^"]+)"\s*\)')


def claimed(claims: Iterable[Claim]) -> set[tuple[str, str]]:
    """(row, key) that formulas of claims compare with what is printed elsewhere."""
    pairs = ((claim.row or "" if name == "row" else name.strip('"'), key)
             for claim in claims for name, key in VALUE.findall(claim.formula or ""))  # fmt: skip
    return {(name, key) for name, key in pairs if name}


def checks(row: Row, said: Set[str]) -> Iterator[Check]:
    """`said`: keys of the row that a text, a script or a claim gives as well."""
    for heading, cell in row.cells:
        key = (row.key_of(heading) or ("",))[0]
        if not cell or not key or key in said:
            continue
        if reason := _reason(row, key):
            yield row.say("not checkable", f"printed {key}", how=reason, printed=cell)


def _reason(row: Row, key: str) -> str:
    published = row.published
    if key == "published.date":
        return "nothing follows from a date"
    if key == "published.cached_gb":
        return "bounded by the model states and by the GPU's memory; activations and the allocator decide the rest"
    if key == "model.heads":
        return "no size depends on the number of heads, beyond that tp divides it"
    if published.oom:
        return "it ran out of memory: no rate follows from the batch" if key == "batch.micro" else ""
    if (
        key == "published.time_per_iteration_s"
        and published.samples_per_s is None
        and published.tflops is None
    ):
        return "neither a rate nor TFLOPS are printed beside it: only its share of the GPU's peak is bounded"
    if published.time_per_iteration_s is None and published.samples_per_s is not None:
        if key == "published.samples_per_s":
            return "no time is printed beside it: only its share of the GPU's peak is bounded"
        if key == "batch.micro":
            return "no time is printed: samples/s alone do not give the batch"
    return ""
