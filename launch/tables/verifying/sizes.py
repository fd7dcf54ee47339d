"""Model sizes: to the unit, per rank, by their labels, and as logs and other tables print them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ds_configs.sections.transformers_modules import embedding_rows
from launch.tables.verifying.counts import arithmetic
from launch.tables.verifying.evidence import Evidence, Part
from launch.tables.verifying.printed_values import Printed, agreement, label_unit
from launch.tables.verifying.rows import Check, Row
from modeling import cost
from modeling.counting import RankCounts

DEGREES = (1, 2, 4, 8, 16)  # tensor-parallel degrees whose count a wrong size may be
PARTS: dict[Part, Callable[[RankCounts], int]] = {
    "each once": lambda counts: counts.once,
    "all ranks": lambda counts: counts.all_ranks,
    "first stage": lambda counts: counts.held[0][0],
    "middle stages": lambda counts: counts.held[1][0],
    "last stage": lambda counts: counts.held[-1][0],
}


def checks(row: Row, counts: RankCounts, evidence: Evidence) -> Iterator[Check]:
    """The modules against the arithmetic at every rank, then every printed size against the modules."""
    yield _modules(row, counts)
    published, total = row.published, sum(counts.stages)
    if published.parameters is not None:
        yield _to_the_unit(row, "parameters", published.parameters, total, 1)
    if published.parameters_per_rank is not None:
        yield _to_the_unit(row, "parameters per rank", published.parameters_per_rank, total // row.tp, row.tp)
    if published.size_label is not None:
        yield _label(row, counts, published.size_label)
    if (published.parameters, published.size_label) == (None, None):
        yield row.unchecked("parameters", "the row prints no model size", computed=total)
    for sizes in evidence.sizes:
        for part, size in sizes.rows.get(row.name, {}).items():
            yield _elsewhere(row, part, str(size), PARTS[part](counts), sizes.source)


def _modules(row: Row, counts: RankCounts) -> Check:
    """Rank by rank; a disagreement is a mistake of this project, never of a source."""
    expected = arithmetic(row.recipe)
    pairs = enumerate(zip(counts.held, expected.held, strict=True))
    wrong = [f"stage {stage}: {got} for {want}" for stage, (got, want) in pairs if got != want]
    found = "; ".join(wrong[:2]) or f"once {counts.once}, layers {set(counts.layers)}"
    if counts == expected:
        found = f"{counts.once} on {sum(map(len, counts.held))} ranks"
    return row.compare("modules against cost.py", expected.once, found, counts == expected)


def _to_the_unit(row: Row, quantity: str, printed: int, computed: int, share: int) -> Check:
    if reason := row.unknown("model"):
        return row.unchecked(quantity, reason, printed, computed)
    if printed == computed:
        return row.compare(quantity, printed, computed, how=True)
    hint, divided = "", f" / {share}" if share > 1 else ""
    for tp in DEGREES:
        padded = embedding_rows(row.recipe, tp)
        per_rank = cost.parameters_per_rank(row.recipe.model, row.recipe.positions, padded, tp)
        if tp * per_rank == printed * share:
            hint = hint or f" (the printed one is the count at tp {tp}{divided})"
    return row.compare(quantity, printed, f"{computed}{hint}", None)


def _label(row: Row, counts: RankCounts, label: str) -> Check:
    """In 10^9 or 10^6, every parameter once; names the other units of these sources where those fit."""
    unit, printed = label_unit(label), Printed.read(label)
    assert printed is not None, f"{row.full_name}: size label {label!r} has no number"
    plain = f"{counts.once / unit:.4g}{label[-1:]}"
    if reason := row.unknown("model"):
        return row.unchecked("size label", f"the model stands in: {reason}", label, plain)
    how = agreement(printed, counts.once / unit)
    if how in ("exact", "rounded"):
        return row.compare("size label", label, plain, how)
    others = {"in 2^30": counts.once / 2**30, "of all ranks in 2^20 x 1000": counts.all_ranks / 2**20 / 1000}
    for name, value in others.items():
        if unit == 1e9 and agreement(printed, value) == "rounded":
            plain += f"; {value:.2f} {name}"
    return row.compare("size label", label, plain, None)


def _elsewhere(row: Row, part: Part, size: str, computed: int, source: str) -> Check:
    """A size that a log or another table prints of the row's model."""
    printed = Printed.read(size, label_unit(size))
    how = agreement(printed, computed) if printed else None
    return row.compare(f"parameters, {part}", size, computed, f"{how}: {source}" if how else None)
