"""Runs beside each other: what differs in how they were made, what came out, and whether their losses may be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch.reports import curves, numbers
from launch.reports.runs import UNREADABLE, Run
from recipes.nested import flatten

MOST_COMPARED = 6  # more columns than that are no table any more
ABSENT = "absent"

# Parts of a recipe that are said elsewhere or change nothing.
LEFT_OUT = (
    "title",
    "published",
    "inferred",
    "differs",
    "unknown",
    "note",
    "hardware",
    "parallel",
    "ds_config",
)
MACHINE = (
    "cpu",
    "cores",
    "memory_gb",
    "accelerator",
    "accelerators",
    "accelerator_memory_gb",
    "cuda",
    "host",
)
# What decides on which text the loss is measured, and in which tokens.
SAME_TEXT = ("data", "model.vocab_size", "model.family", "model.sentence_head")
SAME_TEXT_BUT = ("data.streaming",)
OF_BERT = "data.masking."

RESULTS = (  # quantity, key of Run.row, whether a difference or a ratio says more
    ("status", "status", None),
    ("steps", "steps", "difference"),
    ("skipped steps", "skipped_steps", "difference"),
    ("training loss (nats per token, last 10 steps)", "train_loss", "difference"),
    ("validation loss (nats per token)", "validation_loss", "difference"),
    ("test loss (nats per token)", "test_loss", "difference"),
    ("time per step (s)", "seconds_per_step", "ratio"),
    ("waiting for data (share of the time)", "data_wait_share", "difference"),
    ("samples/s", "samples_per_s", "ratio"),
    ("tokens/s", "tokens_per_s", "ratio"),
    ("TFLOPS per GPU, formula", "tflops", "ratio"),
    ("TFLOPS per GPU, exact count", "exact_tflops", "ratio"),
    ("peak memory (GB)", "peak_memory_bytes", "ratio"),
    ("cached memory (GB)", "cached_bytes", "ratio"),
    ("parameters", "parameters", "ratio"),
)
LOSSES = ("train_loss", "validation_loss", "test_loss")


@dataclass(frozen=True)
class Row:
    """One line of a table of differences: what, a value per run, and for each run after the first how it differs from it."""

    name: str
    values: tuple[str, ...]
    changes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """`configuration`: only what differs. `remarks`: what a reader has to know before comparing; `findings`: on the curves."""

    runs: tuple[Run, ...]
    configuration: tuple[Row, ...]
    results: tuple[Row, ...]
    remarks: tuple[str, ...]
    findings: tuple[str, ...]


def compare(runs: Sequence[Run]) -> Comparison:
    """The first of the runs that can be read with each of the others."""
    assert len(runs) >= 2, "a comparison of one run"
    first, asked = next((run for run in runs if readable(run)), runs[0]), runs[0]
    runs = [first, *(run for run in runs if run is not first)]
    comparable = {run.label: not incomparable(runs[0], run) for run in runs}
    remarks = (
        [f"{asked.label} cannot be read: the runs are compared with {first.label}"]
        if first is not asked
        else []
    )
    remarks += [line for run in runs[1:] for line in (*incomparable(runs[0], run), *cautions(runs[0], run))]
    findings = [line for run in runs[1:] if comparable[run.label] for line in curve_findings(runs[0], run)]
    return Comparison(
        tuple(runs),
        tuple(configuration(runs)),
        tuple(outcomes(runs, comparable)),
        tuple(dict.fromkeys(remarks)),
        tuple(findings),
    )


def readable(run: Run) -> bool:
    """Whether there is anything to compare other runs with."""
    return run.recipe is not None and run.status != UNREADABLE


def configuration(runs: Sequence[Run]) -> list[Row]:
    """Dotted keys in which the runs differ: recipe, layout, resolved DeepSpeed JSON, versions, machine, commit."""
    facts = [dict(flatten(_facts(run))) for run in runs]
    keys = dict.fromkeys(key for each in facts for key in each)
    rows = [(key, [each.get(key, ABSENT) for each in facts]) for key in keys]
    return [
        Row(key, tuple(_shown(value) for value in values))
        for key, values in rows
        if any(value != values[0] for value in values)
    ]


def outcomes(runs: Sequence[Run], comparable: Mapping[str, bool]) -> list[Row]:
    """Every result that at least one run has. A loss is given no difference where the losses are not comparable."""
    found = []
    for name, key, kind in (*RESULTS, *_parts(runs)):
        values = [_value(run, key) for run in runs]
        if all(value is None for value in values):
            continue
        changes = [
            "not comparable"
            if _is_loss(key) and not comparable[run.label]
            else _change(values[0], value, kind)
            for run, value in zip(runs[1:], values[1:], strict=True)
        ]
        shown = numbers.loss if _is_loss(key) else numbers.number
        found.append(Row(name, tuple(shown(value) for value in values), tuple(changes)))
    return found


def incomparable(a: Run, b: Run) -> list[str]:
    """Why the losses of two runs must not be compared; empty where they may."""
    if a.recipe is None or b.recipe is None:
        unread = a if a.recipe is None else b
        return [
            f"the losses of {a.label} and {b.label} are not comparable: the recipe of {unread.label} cannot be read"
        ]
    first, second = (
        dict(flatten(run.recipe.model_dump(mode="json", by_alias=True))) for run in (a, b) if run.recipe
    )
    keys = [
        key
        for key in {**first, **second}
        if first.get(key, ABSENT) != second.get(key, ABSENT) and _decides_text(key)
    ]
    if first["model.family"] == second["model.family"] == "gpt2":
        keys = [key for key in keys if not key.startswith(OF_BERT)]
    if keys:
        changed = ", ".join(
            f"{key}: {_shown(first.get(key, ABSENT))} / {_shown(second.get(key, ABSENT))}" for key in keys
        )
        return [
            f"the losses of {a.label} and {b.label} are not comparable, other data, vocabulary or objective ({changed})"
        ]
    same_size = a.recipe.run.validation_samples == b.recipe.run.validation_samples
    for kind in ("uniform_entropy", "unigram_entropy") if same_size else ():
        own, other = a.row.get(kind), b.row.get(kind)
        if own is not None and other is not None and abs(own - other) > 1e-6:
            return [
                f"the losses of {a.label} and {b.label} are not comparable: the {kind.replace('_', ' ')} of their validation text differs "
                f"({own:.4f} / {other:.4f}), so that they did not read the same text in the same tokens"
            ]
    return []


def cautions(a: Run, b: Run) -> list[str]:
    """What makes two comparable losses differ beside what one wants to compare."""
    if a.recipe is None or b.recipe is None:
        return []
    found = []
    pair = f"{a.label} and {b.label}"
    if a.recipe.batch.global_ != b.recipe.batch.global_:
        found.append(f"{pair} have different global batches ({a.recipe.batch.global_} / {b.recipe.batch.global_}): after the same step "
                     "they have read different amounts of text")  # fmt: skip
    if a.recipe.sequence_length != b.recipe.sequence_length:
        found.append(f"{pair} have different sequence lengths ({a.recipe.sequence_length} / {b.recipe.sequence_length}): a token with more "
                     "before it is easier to predict")  # fmt: skip
    if a.recipe.seed != b.recipe.seed:
        found.append(
            f"{pair} have different seeds ({a.recipe.seed} / {b.recipe.seed}): other initial weights and other batches"
        )
    if a.recipe.run.validation_samples != b.recipe.run.validation_samples:
        counts = f"{a.recipe.run.validation_samples} / {b.recipe.run.validation_samples}"
        found.append(
            f"{pair} validate on different numbers of samples ({counts}): compare their training losses"
        )
    if a.tiny != b.tiny:
        found.append(
            f"{a.label if a.tiny else b.label} is tiny, the other is not: its speed and its loss say nothing about the other's"
        )
    kinds = [run.row.get("memory_kind") for run in (a, b)]
    if (
        None not in kinds and kinds[0] != kinds[1]
    ):  # None: of a run that recorded no step, or of an earlier version
        found.append(f"{pair} count different kinds of memory ({kinds[0]} / {kinds[1]})")
    return found


def curve_findings(a: Run, b: Run) -> list[str]:
    """Where the losses of two comparable runs part, and by how much."""
    found = []
    for kind, name in (("step", "training"), ("validation", "validation")):
        parts = curves.parting(a, b, kind)
        steps = "steps" if kind == "step" else "validations"
        beginning = f"{name} loss of {a.label} and {b.label}, {parts.steps:,} common {steps}"
        if parts.largest is None:
            found.append(f"{beginning}: nothing to compare")
            continue
        largest = f"largest difference {parts.largest[1]:.2e} at step {parts.largest[0]:,}"
        rounding = f"rounding ({parts.tolerance:.1e} of the loss)"
        if parts.first is None:
            found.append(f"{beginning}: equal to {rounding}; {largest}")
        else:
            step, difference = parts.first
            found.append(
                f"{beginning}: first differ by more than {rounding} at step {step:,}, by {difference:.2e}; {largest}"
            )
    return found


def _facts(run: Run) -> dict[str, Any]:
    plan = run.launch.get("plan") or {}
    recipe = run.recipe.model_dump(mode="json", by_alias=True, exclude=set(LEFT_OUT)) if run.recipe else {}
    return {
        "recipe": run.name + (" (tiny)" if run.tiny else ""),
        "ds_config": run.row.get("ds_config") or plan.get("ds_name"),
        "implementation": run.row.get("implementation", ABSENT),
        "layout": run.row.get("layout") or plan.get("layout") or {},
        "precision": run.row.get("precision") or plan.get("precision"),
        "hardware": {key: run.launch.get(key) for key in MACHINE},
        "versions": run.launch.get("versions") or {},
        "commit": (run.launch.get("git") or {}).get("commit", "not known"),
        "uncommitted changes": (run.launch.get("git") or {}).get("dirty", "not known"),
        **{f"recipe.{key}": value for key, value in recipe.items()},
        **{f"deepspeed.{key}": value for key, value in run.ds_config.items()},
    }


def _parts(runs: Sequence[Run]) -> list[tuple[str, str, str]]:
    keys = dict.fromkeys(
        f"validation_parts.{name}" for run in runs for name in run.row.get("validation_parts") or {}
    )
    return [(f"of validation: {key.partition('.')[2]}", key, "difference") for key in keys]


def _value(run: Run, key: str) -> Any:
    if key == "status":
        return run.status + (" (tiny)" if run.tiny else "")
    outer, _, inner = key.partition(".")
    value = (run.row.get(outer) or {}).get(inner) if inner else run.row.get(outer)
    return numbers.gigabytes(value) if outer.endswith("_bytes") else value


def _change(first: Any, value: Any, kind: str | None) -> str:
    if kind is None:
        return "" if first == value else "differs"
    if not numbers.is_number(first) or not numbers.is_number(value):
        return numbers.NOTHING
    if kind == "ratio":
        return numbers.ratio(value / first) if first else numbers.NOTHING
    return f"{value - first:+,}" if isinstance(value - first, int) else f"{value - first:+.4g}"


def _is_loss(key: str) -> bool:
    return key in LOSSES or key.startswith("validation_parts")


def _decides_text(key: str) -> bool:
    return key not in SAME_TEXT_BUT and any(key == part or key.startswith(f"{part}.") for part in SAME_TEXT)


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
