"""Model sizes: to the unit where they are printed so, per rank, and by their labels."""

from __future__ import annotations

from collections.abc import Iterator

from ds_configs.sections.transformers_modules import embedding_rows
from launch.tables.verifying.check import Check
from launch.tables.verifying.counts import arithmetic
from launch.tables.verifying.printed_values import Printed, agreement, label_unit
from launch.tables.verifying.rows import Row
from modeling import cost
from modeling.counting import RankCounts

DEGREES = (1, 2, 4, 8, 16)  # tensor-parallel degrees whose count a wrong size may be


def checks(row: Row, counts: RankCounts) -> Iterator[Check]:
    """The modules against the arithmetic at every rank, then both printed sizes and the label against the modules."""
    yield _modules(row, counts)
    published = row.published
    if published.parameters is not None:
        yield _to_the_unit(row, "parameters", published.parameters, sum(counts.stages), 1)
    if published.parameters_per_rank is not None:
        tp, _ = row.recipe.parallel.model_parallel
        yield _to_the_unit(
            row, "parameters per rank", published.parameters_per_rank, sum(counts.stages) // tp, tp
        )
    if published.size_label is not None:
        yield _label(row, counts)
    if (published.parameters, published.size_label) == (None, None):
        yield row.say("not checkable", "parameters", f"{sum(counts.stages)}", "the row prints no model size")


def _modules(row: Row, counts: RankCounts) -> Check:
    """Rank by rank; a disagreement is a mistake of this project, never of a source."""
    expected = arithmetic(row.recipe)
    ranks = sum(map(len, counts.held))
    if counts == expected:
        return row.compare(
            "modules against cost.py", str(expected.once), f"{counts.once} on {ranks} ranks", "exact"
        )
    wrong = [
        f"stage {stage}: {got} for {want}"
        for stage, (got, want) in enumerate(zip(counts.held, expected.held, strict=True))
        if got != want
    ]
    found = "; ".join(wrong[:2]) or f"once {counts.once}, layers {set(counts.layers)}"
    return row.compare("modules against cost.py", str(expected.once), found, None)


def _to_the_unit(row: Row, quantity: str, printed: int, computed: int, share: int) -> Check:
    if reason := row.unknown("model"):
        return row.say("not checkable", quantity, str(computed), reason, str(printed))
    if printed == computed:
        return row.compare(quantity, str(printed), str(computed), "exact")
    model = row.recipe.model
    sums = {
        tp: tp
        * cost.parameters_per_rank(model, row.recipe.sequence_length, embedding_rows(row.recipe, tp), tp)
        for tp in DEGREES
    }
    fitting = [
        f"tp {tp}{f' / {share}' if share > 1 else ''}"
        for tp, total in sums.items()
        if total == printed * share
    ]
    hint = f" (the printed one is the count at {fitting[0]})" if fitting else ""
    return row.compare(quantity, str(printed), f"{computed}{hint}", None)


def _label(row: Row, counts: RankCounts) -> Check:
    """In 10^9 or 10^6, every parameter once; where that fails, the other units that these sources use are named."""
    label = row.published.size_label
    unit = label_unit(label)
    printed = Printed.read(label)
    assert printed is not None, f"{row.full_name}: size label {label!r} has no number"
    plain = f"{counts.once / unit:.4g}{label[-1:]}"
    if reason := row.unknown("model"):
        return row.say("not checkable", "size label", plain, f"the model stands in: {reason}", label)
    how = agreement(printed, counts.once / unit)
    if how in ("exact", "rounded"):
        return row.compare("size label", label, plain, how)
    others = {"in 2^30": counts.once / 2**30, "of all ranks in 2^20 x 1000": counts.all_ranks / 2**20 / 1000}
    fits = [
        f"; {value:.2f} {name}"
        for name, value in others.items()
        if unit == 1e9 and agreement(printed, value) == "rounded"
    ]
    return row.compare("size label", label, plain + "".join(fits), None)
