"""One row of a results table: published and measured side by side, with every deviation stated."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from data.durable_files import write_atomically
from launch.console.numbers import number
from launch.machine import description
from launch.planning.comparability import not_comparable
from launch.planning.deviations import deviations
from launch.runs.metrics import PART_NAMES
from launch.runs.throughput import WARMUP_STEPS, Throughput, steady_seconds
from modeling import cost

NOT_MEASURED = "not measured"
OURS = "megarecipes"  # as model.implementation names it
# What a source counts -> (unit, the measured number that counts the same).
TFLOPS_BY = {
    "formula": ("TFLOPS per GPU, formula", "tflops"),
    "exact": ("TFLOPS per GPU, exact count", "exact_tflops"),
}
EXACT = (
    "the source names no definition; the numbers of NVIDIA's repository count every matrix product, so that our exact count stands beside "
    "them, not the formula"
)
LAST_STEPS = 10  # the final training loss is a mean over this many steps: one batch alone is noise


def result_row(
    plan: Any,
    records: Sequence[dict[str, Any]],
    *,
    name: str,
    described: Mapping[str, Any],
    original: Any = None,
    entropies: Mapping[str, float | None] | None = None,
    cached_bytes: int | None = None,
    peak_memory_bytes: int | None = None,
    tiny: bool = False,
    emulated_fp16: bool = False,
    status: str = "ok",
    reason: str | None = None,
) -> dict[str, Any]:
    """The row as JSON values; null where something does not apply.

    `records`: of metrics.jsonl. `described`: `hardware.describe()`. `original`: the recipe before --tiny, --set and
    --steps. `entropies`: "uniform" and "unigram", nats per token on the validation text. `cached_bytes` and `peak_memory_bytes`: the
    largest of any rank (`agreement.peak_memory`); the records hold rank 0's. `status`: "ok", or what ended the run ("interrupted",
    "OOM", "diverged"; "saving": it is at its last checkpoint): failures are rows too. `reason`: of the status, said first.
    """
    recipe, layout = plan.recipe, plan.layout
    steps = [record for record in records if record["kind"] == "step"]
    validations = [record for record in records if record["kind"] == "validation"]
    tests = [record for record in records if record["kind"] == "test"]
    steady = steady_seconds(records)
    rates = Throughput(plan).rates(steady[0]) if steady else {}
    entropies = entropies or {}
    row = {
        "recipe": name,
        "title": recipe.title,
        "implementation": implementation(recipe.model),
        "status": status,
        "status_is": reason,
        "ds_config": plan.ds_name,
        "layout": {
            key: getattr(layout, key) for key in ("tp", "pp", "dp", "micro", "accumulation", "global_batch")
        },
        "processes": layout.tp * layout.pp * layout.dp,
        "precision": plan.precision + (" (emulated)" if emulated_fp16 and plan.precision == "fp16" else ""),
        "zero_stage": plan.zero_stage,
        "offload": plan.offload,
        "activation_checkpointing": recipe.activation_checkpointing,
        "parameters": cost.parameters(recipe.model, recipe.sequence_length),
        "parameters_summed_over_tp_ranks": _summed_parameters(plan),
        "steps": steps[-1]["step"] if steps else 0,
        "skipped_steps": sum(record["skipped"] for record in steps),
        "train_loss": _final_loss(steps),
        "train_loss_is": f"mean of the last {min(LAST_STEPS, len(steps))} steps, nats per token",
        "validation_loss": validations[-1]["loss"] if validations else None,
        "train_parts": _final_parts(steps),
        "validation_parts": _parts(validations[-1]) if validations else {},
        "test_loss": tests[-1]["loss"] if tests else None,
        "test_parts": _parts(tests[-1]) if tests else {},
        "validation_step": validations[-1]["step"] if validations else None,
        "uniform_entropy": entropies.get("uniform"),
        "unigram_entropy": entropies.get("unigram"),
        "seconds_per_step": steady[0] if steady else None,
        "seconds_per_step_is": steady[1] if steady else None,
        "data_wait_share": _wait_share(steps),
        "samples_per_s": rates.get("samples_per_s"),
        "tokens_per_s": rates.get("tokens_per_s"),
        "tflops": rates.get("tflops"),
        "exact_tflops": rates.get("exact_tflops"),
        "peak_memory_bytes": max([record["peak_memory_bytes"] for record in steps] + [peak_memory_bytes or 0])
        or None,
        "memory_kind": steps[-1]["memory_kind"] if steps else None,
        "cached_bytes": cached_bytes,
        "hardware": description.summary(
            {**described, "accelerators": described["accelerators"] and layout.tp * layout.pp * layout.dp}
        ),
    }
    row["deviations"] = deviations(plan, row, original=original, tiny=tiny, emulated_fp16=emulated_fp16)
    row["not_comparable"] = None
    if recipe.published:
        row["not_comparable"] = not_comparable(
            original or recipe, recipe, tiny=tiny, precision=row["precision"], layout=row["layout"], ds_name=plan.ds_name, ds=plan.ds,
        )  # fmt: skip
    row["comparison"] = comparison(recipe.published, row)
    row["published_source"] = recipe.published.source if recipe.published else None
    return row


def comparison(published: Any, row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Per published quantity: unit, published value (null: not printed), measured value or "not measured", ratio.

    No ratios where the row says that it is not comparable.
    """
    if published is None:
        return []
    cached = row["cached_bytes"]
    unit, key = TFLOPS_BY[published.tflops_by]
    measured = {
        "time_per_iteration_s": ("s", row["seconds_per_step"]),
        "samples_per_s": ("samples/s", row["samples_per_s"]),
        "tflops": (unit, row[key]),
        "cached_gb": ("GB per GPU", None if cached is None else cached / 1e9),
        "parameters": ("summed over tensor-parallel ranks", row["parameters_summed_over_tp_ranks"]),
        "oom": ("", row["status"] == "OOM"),
    }
    comparable = not row.get("not_comparable")
    return [
        _compare(key, unit, getattr(published, key), value, comparable)
        for key, (unit, value) in measured.items()
    ]


def format_row(row: Mapping[str, Any]) -> str:
    """The row as a small table for the terminal."""
    layout = row["layout"]
    memory = row["peak_memory_bytes"]
    lines = [
        ("recipe", f"{row['recipe']}: {row['title']}"),
        ("status", row["status"] + (f": {row['status_is']}" if row["status_is"] else "")),
        (
            "run with",
            f"{row['ds_config']}: tp {layout['tp']} x pp {layout['pp']} x dp {layout['dp']}, ZeRO-{row['zero_stage']}, "
            f"offload {row['offload']}, {row['precision']}, activation checkpointing {row['activation_checkpointing']}",
        ),
        *([("implementation", row["implementation"])] if row["implementation"] != OURS else []),
        ("hardware", row["hardware"]),
        ("parameters", f"{row['parameters']:,}"),
        (
            "steps",
            f"{row['steps']:,}" + (f" ({row['skipped_steps']:,} skipped)" if row["skipped_steps"] else ""),
        ),
        ("training loss", _loss(row["train_loss"], row["train_loss_is"])),
        ("validation loss", _validation(row)),
        *_format_parts("of validation", row["validation_parts"]),
        *(
            [("test loss", _loss(row["test_loss"], "held-out test documents, after the last step"))]
            if row["test_loss"]
            else []
        ),
        *_format_parts("of test", row["test_parts"]),
        ("time per step", _number(row["seconds_per_step"], "s", row["seconds_per_step_is"])),
        (
            "waiting for data",
            NOT_MEASURED
            if row["data_wait_share"] is None
            else f"{100 * row['data_wait_share']:.2f} % of the time",
        ),
        (
            "throughput",
            f"{_number(row['samples_per_s'], 'samples/s')}, {_number(row['tokens_per_s'], 'tokens/s')}",
        ),
        (
            "TFLOPS per GPU",
            f"{_number(row['tflops'])} by the published formula, {_number(row['exact_tflops'])} by exact count",
        ),
        ("peak memory", NOT_MEASURED if memory is None else f"{memory / 1e9:.2f} GB ({row['memory_kind']})"),
    ]
    text = "\n".join(f"{label:<16} {value}" for label, value in lines)
    return "\n".join(part for part in (text, _format_comparison(row), _format_deviations(row)) if part)


def implementation(model: Any) -> str:
    """Whose modules and loop: ours, or "transformers" with its version."""
    return (
        OURS
        if model.implementation == OURS
        else f"{model.implementation} {metadata.version(model.implementation)}"
    )


def write_result(path: Path, row: Mapping[str, Any]) -> None:
    """Write result.json, whole or not at all."""
    write_atomically(path, json.dumps(row, indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def _summed_parameters(plan: Any) -> int:
    """As Megatron-LM prints a model's size: what every tensor-parallel rank holds, duplicates and padding included."""
    recipe, tp = plan.recipe, plan.layout.tp
    return tp * cost.parameters_per_rank(recipe.model, recipe.sequence_length, plan.padded_vocab, tp)


def _final_loss(steps: Sequence[Mapping[str, Any]]) -> float | None:
    losses = [record["loss"] for record in steps[-LAST_STEPS:]]
    if not losses or None in losses:  # None stands for a loss that was not finite: no mean can hide that
        return None
    return math.fsum(losses) / len(losses)


def _parts(record: Mapping[str, Any]) -> dict[str, float | None]:
    return {name: record[name] for name in PART_NAMES if name in record}


def _final_parts(steps: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    last = [_parts(record) for record in steps[-LAST_STEPS:]]
    names = last[-1] if last else {}
    values = {name: [parts.get(name) for parts in last] for name in names}
    return {name: None if None in found else math.fsum(found) / len(found) for name, found in values.items()}  # type: ignore[arg-type]


def _format_parts(what: str, parts: Mapping[str, float | None]) -> list[tuple[str, str]]:
    shown = [
        f"{PART_NAMES[name]} {NOT_MEASURED if value is None else f'{value:.4f}'}"
        for name, value in parts.items()
    ]
    return [(f"  {what}", ", ".join(shown))] if shown else []


def _wait_share(steps: Sequence[Mapping[str, Any]]) -> float | None:
    """Share of the time of steps spent waiting for batches, the first steps of each launch left out."""
    steady = [record for record in steps if record["launch_step"] > WARMUP_STEPS] or steps
    total = math.fsum(record["seconds"] for record in steady)
    return math.fsum(record.get("data_seconds", 0.0) for record in steady) / total if total else None


def _compare(quantity: str, unit: str, published: Any, measured: Any, comparable: bool) -> dict[str, Any]:
    both = comparable and published is not None and measured is not None and not isinstance(published, bool)
    return {
        "quantity": quantity,
        "unit": unit,
        "published": published,
        "measured": NOT_MEASURED if measured is None else measured,
        "ratio": measured / published if both else None,
    }


def _format_comparison(row: Mapping[str, Any]) -> str:
    if not row["comparison"]:
        return ""
    lines = [f"\n{'':<22} {'published':>14} {'measured':>14} {'ratio':>10}"]
    for entry in row["comparison"]:
        ratio = "" if entry["ratio"] is None else f"{entry['ratio']:.4g}"
        published = "not published" if entry["published"] is None else number(entry["published"])
        columns = f"{entry['quantity']:<22} {published:>14} {number(entry['measured']):>14} {ratio:>10}"
        lines.append(f"{columns}  {entry['unit']}".rstrip())
    if row["not_comparable"]:
        lines.append(f"no ratios: {row['not_comparable']}")
    if any(
        entry["unit"] == TFLOPS_BY["exact"][0] and entry["published"] is not None
        for entry in row["comparison"]
    ):
        lines.append(f"TFLOPS: {EXACT}")
    return "\n".join([*lines, f"source: {row['published_source']}"])


def _format_deviations(row: Mapping[str, Any]) -> str:
    lines = [f"  - {line}" for line in row["deviations"]]
    return "\n".join(["\ndeviations from the recipe", *lines]) if lines else ""


def _validation(row: Mapping[str, Any]) -> str:
    entropies = {kind: row[f"{kind}_entropy"] for kind in ("uniform", "unigram")}
    references = [f"{kind} {entropy:.4f}" for kind, entropy in entropies.items() if entropy is not None]
    if references and row["validation_parts"]:
        references[0] = f"of masked tokens: {references[0]}"
    return _loss(row["validation_loss"], ", ".join([f"after step {row['validation_step']}", *references]))


def _loss(value: float | None, remark: str) -> str:
    return NOT_MEASURED if value is None else f"{value:.4f} ({remark})"


def _number(value: float | None, unit: str = "", remark: str | None = None) -> str:
    if value is None:
        return NOT_MEASURED
    return f"{number(value)}{f' {unit}' if unit else ''}{f' ({remark})' if remark else ''}"
