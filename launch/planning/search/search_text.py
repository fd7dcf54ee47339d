"""What a search found, as a person reads it, and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, get_args

from launch.console.terminal import wrapped
from launch.console.text_table import aligned, table
from launch.planning.search.candidates import Dimension
from launch.planning.search.layout_search import WORTH, Answer, Family, Tried, recomputation
from modeling import cost
from recipes.plural import counted

HEADINGS = ["#", "layout", "batch", "GB", "of GPU", "s/step", "tokens/s", "model states"]
LEGEND = (
    "layout: tensor x pipeline x data parallel; batch: micro-batch x accumulation; offload: the optimizer on "
    f"the host, or all model states. First stands the simplest that is within {WORTH - 1:.0%} of the fastest."
)
# Heading -> causes of a step's time.
SPLIT = {
    "products": ("matrix",), "between": ("elementwise",), "tensor": ("tensor",),
    "pipeline": ("boundary", "bubble"), "data": ("data",), "offload": ("offload",), "update": ("update",),
}  # fmt: skip
ORDER = {name: place for place, name in enumerate(get_args(Dimension))}


def describe(answer: Answer, *, name: str, most: int, width: int | None = None) -> str:
    """A page: the question, the best layouts with memory, time and its split, and why not the others."""
    question, recipe = answer.question, answer.question.recipe
    size = cost.parameters(recipe.model, recipe.positions)
    shape = f"{recipe.model.layers} layers of {recipe.model.hidden}, {recipe.model.heads} heads"
    samples = f"{recipe.batch.global_:,} samples of {recipe.sequence_length:,} tokens per step"
    node = question.node
    gpus = f"{counted(question.ranks, 'GPU')} on {counted(question.nodes, 'node')}"
    lines = [
        ("recipe", f"{name}: {size / 1e9:,.3g} billion parameters ({shape}), {samples}"),
        ("hardware", f"{gpus}: {node.form.title} ({node.name}), {node.gpu.memory_bytes / 1e9:.1f} GB each"),
        (
            "searched",
            f"{answer.tried:,} layouts, of which {len(answer.ranked):,} fit ({question.software.name})",
        ),
    ]
    parts = [aligned(lines, indent=2, width=width)]
    if best := answer.best_of_each(most):
        parts += [_layouts(answer, best, width), _split(answer, best, width)]
    else:
        parts.append(wrapped("  NOTHING FITS. What came nearest is below.", width))
    return "\n\n".join([*parts, "\n".join(_why_not(answer, width))])


def _layouts(answer: Answer, best: list[Tried], width: int | None) -> str:
    memory = answer.question.node.gpu.memory_bytes
    rows = []
    for number, tried in enumerate(best, 1):
        layout = tried.work.layout
        rows.append([
            number, f"{layout.tp}x{layout.pp}x{layout.dp}", f"{layout.micro}x{layout.accumulation}",
            f"{tried.memory.total / 1e9:.1f}", f"{tried.memory.total / memory:.0%}", f"{tried.seconds:.4g}",
            f"{answer.speed(tried).tokens:,.0f}", _states(tried) + ", SNUG" * (tried.verdict == "snug"),
        ])  # fmt: skip
    return table(rows, HEADINGS, "rllrrrrl", width) + "\n" + wrapped(LEGEND, width)


def _split(answer: Answer, best: list[Tried], width: int | None) -> str:
    """MFU, and shares of the time; causes that no layout has are left out."""
    rows, shares = [], []
    for tried in best:
        assert tried.time is not None, "a layout that fits has a time"
        split = tried.time.split
        shares.append([sum(split[cause] for cause in causes) / tried.seconds for causes in SPLIT.values()])
    shown = [index for index in range(len(SPLIT)) if any(row[index] >= 5e-4 for row in shares)]
    for number, (tried, row) in enumerate(zip(best, shares, strict=True), 1):
        rows.append([number, f"{answer.speed(tried).mfu:.1%}", *(f"{row[index]:.1%}" for index in shown)])
    headings = ["#", "MFU", *(list(SPLIT)[index] for index in shown)]
    return table(rows, headings, "r" * len(headings), width)


def _states(tried: Tried) -> str:
    """Where model states lie, what is recomputed, and what the layout has besides."""
    work = tried.work
    words = [tried.way.name if work.software.states is None else "its own"]
    again = recomputation(work)
    words += [] if again == "nothing" else [f"{again} recomputed"]
    words += ["sequence parallel"] * work.sequence_parallel
    words += [f"{work.interleave} chunks"] * (work.interleave > 1)
    return ", ".join(words)


def _why_not(answer: Answer, width: int | None) -> list[str]:
    """A line for each choice that the winner does not have; those with one reason share theirs."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for family in sorted(answer.families, key=_place):
        implied = family.dimension == "data" and family.why != "divisibility"  # by tensor and pipeline
        if family.why != "best" and not implied:
            # The same rule of the resolver is one reason, whatever it was asked for.
            alike = "" if family.why == "DeepSpeed cannot" else family.dimension
            reasons.setdefault((alike, _reason(family)), []).append(_label(family))
    lines = []
    for (dimension, reason), labels in reasons.items():
        several = [label.removeprefix(f"{dimension} ") for label in labels[1:]]
        lines.append((", ".join([labels[0], *several]), reason))
    return [
        "why not, against layout 1" if answer.winner else "why not",
        *(wrapped(f"  {label}: {reason}", width, hang=4) for label, reason in lines),
    ]


def _place(family: Family) -> tuple[int, int, str]:
    number = family.value if isinstance(family.value, int) else 0
    return ORDER[family.dimension], number, str(family.value)


def _label(family: Family) -> str:
    if family.dimension == "model states":
        return str(family.value)
    if family.dimension == "recomputation":
        return f"recomputing {family.value}"
    return f"{family.dimension} {family.value}"


def _reason(family: Family) -> str:
    if family.best is None:
        cannot = family.why == "DeepSpeed cannot"
        return f"cannot be run: {family.rule}" if cannot else f"not divisible: {family.rule}"
    if family.why == "memory":
        place = "of host memory per node" if family.best.on_host else "per GPU"
        return f"out of memory by {family.best.missing / 1e9:,.1f} GB {place} ({layout_words(family.best)})"
    return f"{family.slower:.2f} x the time ({layout_words(family.best)})"


def layout_words(tried: Tried) -> str:
    """A layout in a few words."""
    layout = tried.work.layout
    return f"{layout.tp}x{layout.pp}x{layout.dp}, micro-batch {layout.micro}, {_states(tried)}"


def as_json(answer: Answer, most: int) -> dict[str, Any]:
    """Every number, in bytes and seconds."""
    question = answer.question
    return {
        "hardware": question.node.name,
        "nodes": question.nodes,
        "gpus": question.ranks,
        "software": question.software.name,
        "parameters": cost.parameters(question.recipe.model, question.recipe.positions),
        "tried": answer.tried,
        "fit": len(answer.ranked),
        "layouts": [
            {**_facts(tried), "speed": asdict(answer.speed(tried))} for tried in answer.best_of_each(most)
        ],
        "families": [
            {
                "dimension": family.dimension, "value": family.value, "why": family.why, "rule": family.rule,
                "slower": family.slower, "best": family.best and _facts(family.best),
            }
            for family in answer.families
        ],
    }  # fmt: skip


def _facts(tried: Tried) -> dict[str, Any]:
    work = tried.work
    return {
        "layout": asdict(work.layout), "model_states": tried.way.name, "zero_stage": work.zero_stage,
        "recomputed": recomputation(work), "sequence_parallel": work.sequence_parallel,
        "chunks": work.interleave, "verdict": tried.verdict, "bytes": tried.memory.total,
        "memory": tried.memory.on_gpu, "missing_bytes": tried.missing, "missing_on_host": tried.on_host,
        "seconds": tried.time and {**tried.time.split, "total": tried.time.total},
    }  # fmt: skip
