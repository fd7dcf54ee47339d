"""The result of a search as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from string import ascii_uppercase
from typing import get_args

from launch.planning.page import Page
from launch.planning.prediction.forecast_text import (
    CATEGORIES,
    error,
    errors,
    memory_error,
)
from launch.planning.search import layout_search
from launch.planning.search.candidates import Dimension, SearchQuestion
from launch.planning.search.largest import Largest
from launch.planning.search.layout_search import (
    WORTH,
    Alternative,
    Candidate,
    SearchAnswer,
    recomputation,
)
from modeling import cost
from recipes import catalog
from recipes.problems import counted
from recipes.tables import FOLDER, read_table

HEADINGS = [
    "#",
    "group",
    "layout",
    "batch",
    "GB",
    "of GPU",
    "s/step",
    "tokens/s",
    "model states",
]
LEGEND = (
    "layout: tensor x pipeline x data parallel; batch: micro-batch x accumulation; offload: the optimizer on "
    "the host, or all model states; SNUG: fits once torch's allocator gives back what it keeps. First stands "
    f"the simplest within {WORTH - 1:.0%} of the fastest. Layouts of one group are closer in time than the "
    "planner's error: "
)
LARGEST_LEGEND = (
    "B: billion parameters; layers x hidden size, which grow together as in GPT-3; layout: tensor x pipeline "
    "x data parallel. Every layer is recomputed, unless activation_checkpointing is set. With what torch "
    "reserves, neither a wider nor a deeper model fits, predicted "
)
# Heading -> causes of a step's time.
SPLIT = {
    "products": ("matrix",),
    "between": ("elementwise",),
    "host": ("host",),
    "tensor": ("tensor",),
    "pipeline": ("boundary", "bubble"),
    "data": ("data",),
    "offload": ("offload",),
    "update": ("update",),
}
LEAST_SHARE = 5e-4  # of the time: a cause that no layout spends so much on is left out
LABELS = {"model states": "", "recomputation": "recomputing "}
# Of the table of largest models, and what the documents print: tables of largest models, and their practical
# upper bound of a GPU ("Optimizing Large-Scale GPT Models Pretraining", SberDevices).
LARGEST = ["model states", "largest model", "layout", "which fills"]
LARGEST_TABLES = (
    "jeanzay_megatron_max_size_16gb",
    "jeanzay_megatron_max_size_32gb",
    "jeanzay_hf_deepspeed_max_size",
)
PRINTED_BOUNDS = {"v100-32": 2.0e9, "v100-32-pcie": 2.0e9, "2080ti": 0.7e9}
ORDER = {name: place for place, name in enumerate(get_args(Dimension))}


def page(answer: SearchAnswer, name: str, most: int, width: int | None = None) -> Page:
    """Describe the question, the best layouts, and the reasons against the others."""
    question = answer.question
    recipe = answer.question.recipe
    node = answer.question.node
    size = cost.parameters(recipe.model, recipe.positions)
    shape = f"{recipe.model.layers} layers of {recipe.model.hidden}, {recipe.model.heads} heads"
    samples = f"{recipe.batch.global_:,} samples of {recipe.sequence_length:,} tokens per step"
    gpus = f"{counted(question.ranks, 'GPU')} on {counted(question.nodes, 'node')}"
    fitting = sum(candidate.forecast.verdict == "fits" for candidate in answer.ranking)
    number = f"{answer.predicted:,} layouts: {fitting:,} fit, {len(answer.ranking) - fitting:,} are snug"
    shown = Page(width)
    shown.facts(
        (
            "recipe",
            f"{name}: {size / 1e9:,.3g} billion parameters ({shape}), {samples}",
        ),
        (
            "hardware",
            f"{gpus}: {node.title} ({node.name}), {node.gpu.memory_bytes / 1e9:.1f} GB each",
        ),
        ("searched", f"{number}, as {question.software.name} runs them"),
    )
    best = answer.best_per_layout(most)
    if best:
        _add_layouts(shown, answer, best)
        _add_split(shown, best)
    else:
        shown.text("NOTHING FITS. What came nearest is below.")
    heading = "why not, against layout 1" if answer.winner else "why not"
    shown.text(heading, *(f"  {line}" for line in _why_not(answer)), hang=4)
    return shown


def largest_page(
    question: SearchQuestion, found: Sequence[Largest], width: int | None = None
) -> Page:
    """Describe the largest models in a table, with the printed sizes below it."""
    node = question.node
    recipe = question.recipe
    gpus = f"{counted(question.ranks, 'GPU')} on {counted(question.nodes, 'node')}"
    samples = f"{recipe.batch.global_:,} samples of {recipe.sequence_length:,} tokens per step"
    micro = counted(recipe.batch.micro or 1, "sample")
    precisions: list[str] = [each.best.work.precision for each in found if each.best]
    precision = (precisions or [recipe.precision])[0]
    shown = Page(width)
    shown.facts(
        (
            "hardware",
            f"{gpus}: {node.title} ({node.name}), {node.gpu.memory_bytes / 1e9:.1f} GB each",
        ),
        (
            "model",
            f"a {recipe.model.family} in {precision}, {samples}, micro-batches of {micro}",
        ),
    )
    rows = []
    refused = []
    for way, best, problems in found:
        if problems:
            rules = "; ".join(str(problem.rule or problem.came) for problem in problems)
            refused.append(f"{way.name} cannot be run: {rules}")
        else:
            rows.append([way.name, *(_largest(best) if best else ["none fits"])])
    shown.table(
        rows, LARGEST, "llll", below=[f"{LARGEST_LEGEND}{memory_error(precision)}."]
    )
    printed = _printed_sizes(question)
    if printed:
        shown.text(f"printed of {gpus} of this kind: {'; '.join(printed)}")
    alone = node.gpu.memory_bytes / 16e9
    rule = f"the documents' rule, memory over 16 bytes a parameter: {alone:.2f} B for one GPU"
    bound = PRINTED_BOUNDS.get(node.gpu.name)
    if bound:
        rule += (
            f"; they print {bound / 1e9:g} B for this GPU as the practical upper bound"
        )
    shown.text(rule)
    shown.text(*refused, hang=2)
    return shown


def _largest(best: Candidate) -> list[str]:
    """Return the size, the layout, and what fills the memory."""
    model = best.work.model
    layout = best.work.layout
    size = cost.parameters(model, best.work.positions)
    rank = best.forecast.fullest_rank
    node = best.forecast.node
    host = best.forecast.host / (node.host.memory_gb * 1e9)
    name, most = max(rank.on_gpu.items(), key=lambda part: part[1])
    fills = f"GPU: {CATEGORIES.get(name, name)} {most / rank.total:.0%}"
    if host > rank.total / node.gpu.memory_bytes:
        fills = f"host memory {host:.0%}"
    return [
        f"{size / 1e9:,.2f} B, {model.layers}x{model.hidden}",
        f"{layout.tp}x{layout.pp}x{layout.dp}",
        fills,
    ]


def _printed_sizes(question: SearchQuestion) -> list[str]:
    """Return the documents' largest models on as many such nodes."""
    sizes = []
    for table in LARGEST_TABLES:
        for row in read_table(FOLDER / f"{table}.yaml").rows:
            recipe = catalog.load(f"{table}/{row}")
            own = recipe.hardware
            published = recipe.published
            if (
                own
                and published
                and (own.node, own.gpus) == (question.node.name, question.ranks)
            ):
                shape = f"{recipe.model.layers}x{recipe.model.hidden}"
                sizes.append(
                    f"{published.size_label}, {shape} ({published.framework or recipe.ds_config})"
                )
    return sizes


def _add_layouts(shown: Page, answer: SearchAnswer, best: list[Candidate]) -> None:
    memory = answer.question.node.gpu.memory_bytes
    rows = []
    groups = layout_search.groups(best)
    for number, candidate in enumerate(best, 1):
        layout = candidate.work.layout
        needed = candidate.forecast.fullest_rank.total
        cells = [
            ascii_uppercase[min(groups[number - 1], 25)],
            f"{layout.tp}x{layout.pp}x{layout.dp}",
            f"{layout.micro}x{layout.accumulation}",
            f"{needed / 1e9:.1f}",
            f"{needed / memory:.0%}",
            f"{candidate.seconds:.4g}",
            f"{candidate.work.tokens_per_step / candidate.seconds:,.0f}",
            _states(candidate) + ", SNUG" * (candidate.forecast.verdict == "snug"),
        ]
        rows.append([number, *cells])
    below = [f"{LEGEND}{errors(best[0].forecast)}."]
    others = [each.best for each in answer.alternatives if each.best]
    if any(candidate.forecast.waits for candidate in (*best, *others)):
        below.append(f"WAITS: time {error('waiting')}.")
    shown.table(rows, HEADINGS, "rlllrrrrl", below=below)


def _share(candidate: Candidate, causes: Iterable[str]) -> float:
    """Return the share of a step's time that has these causes."""
    return sum(candidate.split[cause] for cause in causes) / candidate.seconds


def _add_split(shown: Page, best: list[Candidate]) -> None:
    """Add a table of MFU and shares of the time."""
    columns = {}
    for heading, causes in SPLIT.items():
        shares = [_share(each, causes) for each in best]
        if any(share >= LEAST_SHARE for share in shares):
            columns[heading] = shares
    mfu = [each.forecast.speed.mfu for each in best if each.forecast.speed]
    rows: list[list[object]] = []
    for number, row in enumerate(zip(mfu, *columns.values(), strict=True), 1):
        rows.append([number, *(f"{share:.1%}" for share in row)])
    headings = ["#", "MFU", *columns]
    shown.table(rows, headings, "r" * len(headings))


def _states(candidate: Candidate) -> str:
    """Name the place of model states, recomputation, and further features of a layout."""
    work = candidate.work
    again = recomputation(candidate.work)
    words = [candidate.way.name if work.software.states is None else "its own"]
    words += [] if again == "nothing" else [f"{again} recomputed"]
    words += ["sequence parallel"] * work.sequence_parallel
    words += [f"{work.interleave} chunks"] * (work.interleave > 1)
    words += ["WAITS"] * candidate.forecast.waits
    return ", ".join(words)


def _why_not(answer: SearchAnswer) -> list[str]:
    """Compare each choice with the winner's; choices of a dimension with one reason share a line."""
    choices: dict[tuple[str, str], list[str]] = {}
    for each in sorted(answer.alternatives, key=_place):
        if each.dimension != "data" or each.rule:  # tensor and pipeline imply it
            choices.setdefault((each.dimension, _reason(each, answer)), []).append(
                str(each.value)
            )
    lines = []
    for (dimension, reason), values in choices.items():
        label = LABELS.get(dimension, f"{dimension} ")
        lines.append(f"{label}{', '.join(values)}: {reason}")
    return lines


def _place(each: Alternative) -> tuple[int, int, str]:
    number = each.value if isinstance(each.value, int) else 0
    return ORDER[each.dimension], number, str(each.value)


def _reason(each: Alternative, answer: SearchAnswer) -> str:
    if each.best is None:
        return each.rule
    layout = layout_words(each.best)
    if answer.winner and each.best.fits:
        return f"{each.best.seconds / answer.winner.seconds:.2f} x the time ({layout})"
    place = (
        "per GPU"
        if each.best.forecast.binding.place == "GPU"
        else "of host memory per node"
    )
    return f"out of memory by {each.best.shortage / 1e9:,.1f} GB {place} ({layout})"


def layout_words(candidate: Candidate) -> str:
    """Describe a layout in a few words."""
    layout = candidate.work.layout
    return f"{layout.tp}x{layout.pp}x{layout.dp}, micro-batch {layout.micro}, {_states(candidate)}"
