"""A forecast as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ds_configs.plan import Plan
from launch.console.text_table import Page, duration
from launch.machine.memory import describe_states
from launch.planning.prediction.constants import fitted
from launch.planning.prediction.forecast import Bill, Forecast, PredictedSpeed, Remark
from launch.planning.prediction.hardware import Node
from launch.planning.prediction.step_time import StepTime
from launch.planning.prediction.workload import Workload
from modeling import cost
from recipes.problems import amount, counted

CATEGORIES = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer states, fp32 weights",
    "buffers": "ZeRO's buffers",
    "activations": "activations kept",
    "working": "one layer at work",
    "logits": "logits and loss",
}
# Of a rank, shown after its categories.
SUMS = {
    "allocated": "allocated by torch",
    "fragmentation": "kept by its allocator",
    "reserved": "reserved by torch",
    "context": "CUDA context, NCCL",
    "total": "sum",
}
CAUSES = {
    "matrix": "matrix products",
    "elementwise": "element-wise",
    "host": "waiting for the host",
    "tensor": "tensor-parallel all-reduces",
    "boundary": "between pipeline stages",
    "bubble": "pipeline bubble",
    "data": "data parallel, not hidden",
    "offload": "offload transfers",
    "update": "optimizer step",
}
REMARKS = {
    "tensor across nodes": "tensor parallelism of {tp} crosses nodes of {gpus} GPUs: every layer's "
    "all-reduces go over the network; take a parallel.tp that divides {gpus}, and raise parallel.pp",
    "bubble": "the pipeline waits {share:.0%} of its time with {now} micro-batches; {chunks} (--set "
    "batch.accumulation={chunks} with a batch.global to match) would make that 10 %",
    "snug": "torch would reserve {missing:.1f} GB more than there are: its allocator gives back what no "
    "tensor uses and asks again, which takes time and may not suffice",
    "larger batch": "memory leaves room: --set batch.micro={micro} --set batch.accumulation={accumulation} "
    "would save {gain:.0%} of the time",
    "recomputation": "micro-batch {micro} fits without recomputation: --set activation_checkpointing=none "
    "saves a quarter of the products",
    "no precision": "{gpu} has no {precision} (it has {has}): no time is predicted; --set precision={has}",
    "partly filled node": "the last node has {ranks} of {gpus} GPUs at work",
    "host memory": "offload needs {needed:,.0f} GB of a node's {there:,.0f} GB of host memory",
    "saving waits": "a checkpoint that is written while training goes on takes {needed:,.0f} GB of a node's "
    "{there:,.0f} GB of host memory: training will wait for each instead",
    "network unknown": "no network of {node} is known: the {rate:g} GB/s of its PCIe stand in for one",
    "kernel starts": "{share:.0%} of the step is not matrix products but what is between them and the "
    "host, which starts kernels: the model, or the micro-batch, is small for this GPU",
    "nvme unknown": "no NVMe rate of {node} is known: its time is left out",
    "implausible": "{share:.1f} % of the peak is outside what published rows reach (3 to 52 %): "
    "something is wrong",
}
# Keys of errors: of which published rows.
ROWS_OF = {
    "time": "in half precision by software that was fitted",
    "unseen": "in half precision by software that was not fitted",
    "fp32 time": "in fp32",
    "memory": "in half precision",
    "fp32 memory": "in fp32",
}
MOST_COLUMNS = 4  # of pipeline stages that differ


def page(
    predicted: Forecast, name: str, bill: Bill | None, width: int | None = None
) -> Page:
    """Describe the forecast: layout, memory, verdict, time, cost of the run, remarks."""
    shown = Page(width)
    memory = predicted.node.gpu.memory_bytes
    largest = predicted.largest
    rank = predicted.fullest_rank
    both = f"allocated {amount(rank.allocated)}, reserved {amount(rank.reserved)} of {amount(memory)}"
    share = f"{both}; {rank.total / memory:.0%} with CUDA's context"
    margin = f"{amount(abs(predicted.margin))} {'left' if predicted.margin >= 0 else 'missing'}"
    recomputed = (
        f"{largest.recomputed} with every layer recomputed, {largest.kept} with none"
    )
    shown.facts(("recipe", name), *_placed(predicted))
    _add_memory(shown, predicted)
    shown.facts(
        ("verdict", f"{predicted.verdict.upper()}: {share}, {margin}"),
        ("largest micro-batch", f"{largest.as_planned} as planned, {recomputed}"),
    )
    if predicted.time and predicted.speed:
        _add_time(shown, predicted, predicted.time, predicted.speed)
    if bill:
        shown.facts(("whole run", _bill(predicted, bill)))
    shown.facts(("error", errors(predicted)))
    shown.notes(map(remark_text, predicted.remarks))
    return shown


def counted_page(plan: Plan, name: str, node: Node, width: int | None) -> Page:
    """Describe what is counted of a model by its config: no activations."""
    recipe = plan.recipe
    each = cost.operations_of(recipe, plan.layout.global_batch, plan.padded_vocab)
    operations = f"{each:,} in the products of a step, by torch's counter"
    if not each:
        operations = "not counted: its numbers decide them"
    shown = Page(width)
    shown.facts(
        ("recipe", name),
        ("hardware", f"{node.name}, {node.memory}"),
        ("layout", plan.layout.identity()),
        ("parameters", f"{cost.parameters(recipe.model, recipe.positions):,}"),
        ("operations", operations),
        ("memory", describe_states(plan)),
    )
    return shown


def errors(predicted: Forecast) -> str:
    """Describe the errors that a prediction bears."""
    of_memory = memory_error(predicted.work.precision)
    return f"time {error(predicted.time_kind)}; memory {of_memory}"


def memory_error(precision: str) -> str:
    """Describe the error of a predicted memory."""
    return error(fitted().kind("memory", precision))


def error(kind: str) -> str:
    """Describe the planner's error on such published rows; "waiting": of steps whose GPU waits."""
    if kind == "waiting":
        told = fitted().waiting
        where = "whose GPU waits for the host, as here, and which nothing was fitted to"
        return f"±{told.median:.0%} in the median of {told.rows} published rows {where}"
    of_kind = fitted().errors[kind]
    documents = counted(of_kind.documents, "document")
    rows = f"{of_kind.rows} published rows of {documents} {ROWS_OF[kind]}"
    tenths = f"±{of_kind.percentile_90:.0%} in nine of ten"
    return f"±{of_kind.median:.0%} in the median of {rows}, {tenths}"


def remark_text(remark: Remark) -> str:
    """Return a remark as a sentence."""
    return REMARKS[remark.kind].format(**remark.values)


def add_published(
    shown: Page, plan: Plan, pairs: Sequence[tuple[str, float | str, float | str]]
) -> None:
    """Add a row's published numbers next to the prediction for its own system."""
    published = plan.recipe.published
    if not published or not pairs:
        return
    rows = []
    for quantity, ours, theirs in pairs:
        if isinstance(ours, str) or isinstance(theirs, str):
            rows.append([quantity, str(ours), str(theirs), ""])
        else:
            rows.append(
                [quantity, f"{ours:.4g}", f"{theirs:.4g}", f"{ours / theirs:.2f}"]
            )
    headings = [f"as {published.software} ran it", "predicted", "published", "ratio"]
    shown.table(rows, headings, "lrrr")


def recomputation(work: Workload) -> str:
    """Say what is recomputed."""
    if work.selective:
        return "attention scores recomputed"
    chunks = f"chunks of {work.recomputed} layers recomputed"
    whole = {0: "nothing recomputed", 1: "every layer recomputed"}
    return whole.get(work.recomputed, chunks)


def _placed(predicted: Forecast) -> list[tuple[str, str]]:
    """Describe hardware, layout, and place of the model states."""
    work = predicted.work
    node = predicted.node
    layout = work.layout
    gpus = f"{counted(layout.world, 'GPU')} on {counted(predicted.nodes, 'node')}"
    places = {
        "optimizer": work.optimizer_at,
        "weights": work.weights_at,
        "activations": work.checkpoints_at,
    }
    away = ", ".join(
        f"{what} on {place}" for what, place in places.items() if place != "gpu"
    )
    kept = [f"ZeRO-{work.zero_stage}{f' ({away})' if away else ''}", work.precision]
    kept += ["sequence parallel"] * work.sequence_parallel
    kept += [recomputation(work)]
    return [
        (
            "hardware",
            f"{gpus}: {node.title} ({node.name}), {node.gpu.memory_gib:g} GiB each",
        ),
        ("layout", f"{layout.degrees()}; {layout.identity()}"),
        ("how", f"{', '.join(kept)}, as {work.software.name} runs it"),
    ]


def _add_memory(shown: Page, predicted: Forecast) -> None:
    """Add a table of categories by stage; equal stages share a column, and few of many are shown."""
    groups: dict[tuple[float, ...], list[int]] = {}
    for rank in predicted.stages:
        groups.setdefault(tuple(rank.on_gpu.values()), []).append(rank.stage)
    columns = list(groups.values())
    if len(columns) > MOST_COLUMNS:
        columns = [*columns[: MOST_COLUMNS - 1], columns[-1]]
    ranks = [predicted.stages[stages[0]] for stages in columns]
    rows: list[list[str]] = []
    for key, name in (CATEGORIES | SUMS).items():
        sizes = [getattr(rank, key) for rank in ranks]
        if key in SUMS or any(sizes):
            rows.append([name, *(f"{size / 1e9:.2f}" for size in sizes)])
    rows.append(["at its fullest in the", *(rank.moment for rank in ranks)])
    headings = [
        "GB per GPU",
        *(_stages(stages, len(predicted.stages)) for stages in columns),
    ]
    away = {"host memory": predicted.host, "NVMe": predicted.nvme}
    below = [
        f"and {amount(size)} of {place} per node"
        for place, size in away.items()
        if size
    ]
    shown.table(rows, headings, "l" + "r" * len(ranks), below=below)


def _stages(stages: list[int], count: int) -> str:
    if count == 1:
        return ""
    first, *others = stages
    return f"stages {first}-{others[-1]}" if others else f"stage {first}"


def _add_time(
    shown: Page, predicted: Forecast, time: StepTime, rates: PredictedSpeed
) -> None:
    rows = []
    for cause, seconds in time.split.items():
        if seconds:
            rows.append(
                [CAUSES[cause], f"{seconds:.4g}", f"{seconds / time.total:.1%}"]
            )
    rows.append(["sum", f"{time.total:.4g}", ""])
    shown.table(rows, ["seconds per step", "", ""], "lrr")
    tflops = f"{rates.tflops:.4g} by the published formula, {rates.exact_tflops:.4g} by exact count"
    shown.facts(
        ("throughput", f"{rates.samples:,.4g} samples/s, {rates.tokens:,.0f} tokens/s"),
        ("TFLOPS per GPU", tflops),
        (
            "MFU",
            f"{rates.mfu:.1%} of {predicted.node.gpu.tflops[predicted.work.precision]:g} TFLOPS",
        ),
    )


def _bill(predicted: Forecast, bill: Bill) -> str:
    cost = f"{duration(bill.seconds)}, {_rounded(bill.gpu_hours)} GPU-hours"
    if bill.kwh is not None:
        cost += f", about {_rounded(bill.kwh)} kWh at the boards' power limit"
    price = "no price; --usd_per_gpu_hour"
    if bill.price and bill.usd:
        rate = f"${bill.price.usd_per_gpu_hour:g} a GPU-hour ({bill.price.where})"
        price = f"about ${_rounded(bill.usd)} at {rate}"
    cost += f"; {price}"
    small = f" ({bill.small:,} of the ramp-up)" if bill.small else ""
    return f"{counted(bill.steps, 'step')}{small}, {bill.tokens:,} tokens: {cost}"


def _rounded(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.2g}"


def as_json(predicted: Forecast, bill: Bill | None) -> dict[str, Any]:
    """Return every number, in bytes and seconds."""
    known = fitted()
    of_time = known.errors.get(predicted.time_kind, known.waiting)
    of_memory = known.errors[known.kind("memory", predicted.work.precision)]
    stages = []
    for rank in predicted.stages:
        sums = {
            name: getattr(rank, name) for name in ("allocated", "reserved", "total")
        }
        stages.append(asdict(rank) | sums)
    return {
        "hardware": predicted.node.name,
        "nodes": predicted.nodes,
        "layout": asdict(predicted.work.layout),
        "software": predicted.work.software.name,
        "stages": stages,
        "memory_bytes": predicted.node.gpu.memory_bytes,
        "host_bytes_per_node": predicted.host,
        "nvme_bytes_per_node": predicted.nvme,
        "errors": {"time": of_time.model_dump(), "memory": of_memory.model_dump()},
        "verdict": predicted.verdict,
        "margin_bytes": predicted.margin,
        "largest_micro": asdict(predicted.largest),
        "seconds": predicted.time
        and {**predicted.time.split, "total": predicted.time.total},
        "speed": predicted.speed and asdict(predicted.speed),
        "run": bill
        and asdict(bill)
        | {"price": bill.price and bill.price.model_dump(), "usd": bill.usd},
        "remarks": [
            {**asdict(remark), "text": remark_text(remark)}
            for remark in predicted.remarks
        ],
    }
