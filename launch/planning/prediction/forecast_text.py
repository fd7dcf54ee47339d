"""The planner's answer as a person reads it, and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from launch.console.terminal import wrapped
from launch.console.text_table import aligned, table
from launch.planning.prediction.forecast import Bill, Forecast, Remark
from recipes.plural import counted

CATEGORIES = {
    "weights": "weights", "gradients": "gradients", "optimizer": "optimizer states, fp32 weights",
    "buffers": "ZeRO's buffers", "activations": "activations kept", "working": "one layer at work",
    "logits": "logits and loss", "fragmentation": "fragmentation", "context": "CUDA context, NCCL",
}  # fmt: skip
CAUSES = {
    "matrix": "matrix products", "elementwise": "element-wise, kernel starts",
    "tensor": "tensor-parallel all-reduces",
    "boundary": "between pipeline stages", "bubble": "pipeline bubble", "data": "data parallel, not hidden",
    "offload": "offload transfers", "update": "optimizer step",
}  # fmt: skip
REMARKS = {
    "tensor across nodes": "tensor parallelism of {tp} crosses nodes of {gpus} GPUs: every layer's "
    "all-reduces go over the network; take a parallel.tp that divides {gpus}, and raise parallel.pp",
    "bubble": "the pipeline waits {share:.0%} of its time with {now} micro-batches; {chunks} (--set "
    "batch.accumulation={chunks} with a batch.global to match) would make that 10 %",
    "larger batch": "memory leaves room: micro-batch {largest} fits as well as {micro}",
    "recomputation": "micro-batch {micro} fits without recomputation: --set activation_checkpointing=none "
    "saves a quarter of the products",
    "no precision": "{gpu} has no {precision} (it has {has}): no time is predicted; --set precision={has}",
    "partly filled node": "the last node has {ranks} of {gpus} GPUs at work",
    "host memory": "offload needs {needed:,.0f} GB of a node's {there:,.0f} GB of host memory",
    "saving waits": "a checkpoint that is written while training goes on takes {needed:,.0f} GB of a node's "
    "{there:,.0f} GB of host memory: training will wait for each instead",
    "network unknown": "no network of {node} is known: the {rate:g} GB/s of its PCIe stand in for one",
    "kernel starts": "{share:.0%} of the step is not matrix products but what is between them and the "
    "start of kernels: the model, or the micro-batch, is small for this GPU",
    "nvme unknown": "no NVMe rate of {node} is known: its time is left out",
    "implausible": "{share:.1f} % of the peak is outside what published rows reach (3 to 52 %): "
    "something is wrong",
}  # fmt: skip


def describe(found: Forecast, *, name: str, bill: Bill | None, width: int | None = None) -> str:
    """A page: what runs where, memory by kind and stage, verdict, time by cause, the whole run, remarks."""
    work, node, layout = found.work, found.node, found.work.layout
    degrees = f"{layout.tp} tensor x {layout.pp} pipeline x {layout.dp} data parallel"
    gpus = f"{counted(layout.world, _unit(found))} on {counted(found.nodes, 'node')}"
    kept = "sequence parallel, " * work.sequence_parallel + _recomputation(found)
    lines = [
        ("recipe", name),
        ("hardware", f"{gpus}: {node.form.title} ({node.name}), {node.gpu.memory_gib:g} GiB each"),
        ("layout", f"{degrees}; {layout.identity()}"),
        ("how", f"ZeRO-{work.zero_stage}{_offload(found)}, {work.precision}, {kept} ({work.software.name})"),
    ]
    parts = [
        aligned(lines, indent=2, width=width), _memory(found, width), _verdict(found, width),
        _time(found, width),
    ]  # fmt: skip
    if bill:
        energy = "" if bill.kwh is None else f", about {_rounded(bill.kwh)} kWh at the boards' power limit"
        hours = f"{_rounded(bill.gpu_hours)} {_unit(found)}-hours"
        cost = f"{_duration(bill.seconds)}, {hours}{energy}"
        whole = f"{counted(bill.steps, 'step')}, {bill.tokens:,} tokens: {cost}"
        parts.append(aligned([("whole run", whole)], indent=2, width=width))
    parts += [wrapped(f"  ! {text}", width, hang=4) for text in map(remark_text, found.remarks)]
    return "\n\n".join(part for part in parts if part)


def _duration(seconds: float) -> str:
    """In the largest unit of which there is at least one."""
    sizes = (("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 1))
    unit, size = next((each for each in sizes if seconds >= each[1]), sizes[-1])
    return f"{seconds / size:,.3g} {unit}"


def _rounded(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.2g}"


def remark_text(remark: Remark) -> str:
    """A remark as a sentence."""
    return REMARKS[remark.kind].format(**remark.values)


def _unit(found: Forecast) -> str:
    """What holds a rank's memory and computes for it."""
    return "process" if found.node.is_cpu else "GPU"


def _recomputation(found: Forecast) -> str:
    chunk = found.work.recomputed
    if found.work.selective:
        return "attention scores recomputed"
    return {0: "nothing recomputed", 1: "every layer recomputed"}.get(
        chunk, f"chunks of {chunk} layers recomputed"
    )


def _offload(found: Forecast) -> str:
    work = found.work
    away = [
        ("optimizer", work.optimizer_at),
        ("weights", work.weights_at),
        ("activations", work.checkpoints_at),
    ]
    told = ", ".join(f"{what} on {place}" for what, place in away if place != "gpu")
    return f" ({told})" if told else ""


def _memory(found: Forecast, width: int | None) -> str:
    """Categories by stage; stages that need the same are one column."""
    groups: dict[tuple[float, ...], list[int]] = {}
    for rank in found.stages:
        groups.setdefault(tuple(rank.on_gpu.values()), []).append(rank.stage)
    shown = _columns(list(groups.values()))
    ranks = [found.stages[stages[0]] for stages in shown]
    names = {**CATEGORIES, "context": "imported libraries"} if found.node.is_cpu else CATEGORIES
    headings = [f"GB per {_unit(found)}", *(_stages(stages, len(found.stages)) for stages in shown)]
    rows = [
        [names[key], *(f"{rank.on_gpu[key] / 1e9:.2f}" for rank in ranks)]
        for key in CATEGORIES
        if any(rank.on_gpu[key] for rank in ranks)
    ]
    rows.append(["sum", *(f"{rank.total / 1e9:.2f}" for rank in ranks)])
    if not found.node.is_cpu:
        cached = (f"{rank.cached(found.node.gpu.memory_bytes) / 1e9:.2f}" for rank in ranks)
        rows.append(["torch would report cached", *cached])
    rows.append(["at its fullest in the", *(rank.moment for rank in ranks)])
    text = table(rows, headings, "l" + "r" * len(ranks), width)
    away = [("host memory", found.host), ("NVMe", found.nvme)]
    more = [f"{size / 1e9:,.3g} GB of {place} per node" for place, size in away if size]
    return "\n".join(["  " + line for line in text.splitlines()] + [f"  and {each}" for each in more])


def _columns(groups: list[list[int]], most: int = 4) -> list[list[int]]:
    """The first stages and the last one, where there are many that differ."""
    return groups if len(groups) <= most else [*groups[: most - 1], groups[-1]]


def _stages(stages: list[int], count: int) -> str:
    if count == 1:
        return ""
    return f"stage {stages[0]}" if len(stages) == 1 else f"stages {stages[0]}-{stages[-1]}"


def _verdict(found: Forecast, width: int | None) -> str:
    memory, largest = found.node.gpu.memory_bytes, found.largest
    share = found.fullest.total / memory
    margin = f"{abs(found.margin) / 1e9:.1f} GB {'left' if found.margin >= 0 else 'missing'}"
    recomputed = f"{largest.recomputed} with every layer recomputed, {largest.kept} with none"
    sizes = f"{largest.as_planned} as planned, {recomputed}"
    lines = [
        ("verdict", f"{found.verdict.upper()}: {share:.0%} of {memory / 1e9:.1f} GB, {margin}"),
        ("largest micro-batch", sizes),
    ]
    return aligned(lines, indent=2, width=width)


def _time(found: Forecast, width: int | None) -> str:
    if found.time is None or found.speed is None:
        return ""
    time, rates = found.time, found.speed
    rows = [
        [CAUSES[key], f"{seconds:.4g}", f"{seconds / time.total:.1%}"]
        for key, seconds in time.split.items()
        if seconds
    ]
    rows.append(["sum", f"{time.total:.4g}", ""])
    text = table(rows, ["seconds per step", "", ""], "lrr", width)
    lines = [
        ("throughput", f"{rates.samples:,.4g} samples/s, {rates.tokens:,.0f} tokens/s"),
        (
            f"TFLOPS per {_unit(found)}",
            f"{rates.tflops:.4g} by the published formula, {rates.exact_tflops:.4g} by exact count",
        ),
        ("MFU", f"{rates.mfu:.1%} of {found.node.gpu.tflops[found.work.precision]:g} TFLOPS"),
    ]
    return (
        "\n".join("  " + line for line in text.splitlines()) + "\n\n" + aligned(lines, indent=2, width=width)
    )


def as_json(found: Forecast, bill: Bill | None) -> dict[str, Any]:
    """Every number, in bytes and seconds."""
    return {
        "hardware": found.node.name,
        "nodes": found.nodes,
        "layout": asdict(found.work.layout),
        "software": found.work.software.name,
        "stages": [{**asdict(rank), "total": rank.total, "cached": rank.cached(found.node.gpu.memory_bytes)}
                   for rank in found.stages],
        "memory_bytes": found.node.gpu.memory_bytes,
        "host_bytes_per_node": found.host,
        "nvme_bytes_per_node": found.nvme,
        "verdict": found.verdict,
        "margin_bytes": found.margin,
        "largest_micro": asdict(found.largest),
        "seconds": found.time and {**found.time.split, "total": found.time.total},
        "speed": found.speed and asdict(found.speed),
        "run": bill and asdict(bill),
        "remarks": [{**asdict(remark), "text": remark_text(remark)} for remark in found.remarks],
    }  # fmt: skip
