"""The result of a search as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from launch.console.text_table import Page
from launch.planning.prediction.forecast_text import (
    CATEGORIES,
    error,
    errors,
    memory_error,
    recomputation,
)
from launch.planning.search.candidates import Candidate, SearchQuestion
from launch.planning.search.largest import Largest
from modeling import cost
from recipes import catalog
from recipes.problems import amount, counted
from recipes.schema import Recipe
from recipes.tables import FOLDER, read_table

HEADINGS = (
    "#",
    "layout",
    "batch",
    "GB",
    "of GPU",
    "s/step",
    "tokens/s",
    "MFU",
    "model states",
)
LEGEND = (
    "layout: tensor x pipeline x data parallel; batch: micro-batch x accumulation; offload: the optimizer on "
    "the host, or all model states; SNUG: fits once torch's allocator gives back what it keeps. The fastest "
    "stands first, snug ones last; predicted: "
)
LARGEST_LEGEND = (
    "B: billion parameters; layers x hidden size, which grow together as in GPT-3; layout: tensor x pipeline "
    "x data parallel. Every layer is recomputed, unless activation_checkpointing is set. With what torch "
    "reserves, neither a wider nor a deeper model fits, predicted "
)
# Of the table of largest models, and what the documents print: tables of largest models, and their practical
# upper bound of a GPU ("Optimizing Large-Scale GPT Models Pretraining", SberDevices).
LARGEST = ["model states", "largest model", "layout", "which fills"]
LARGEST_TABLES = (
    "jeanzay_megatron_max_size_16gb",
    "jeanzay_megatron_max_size_32gb",
    "jeanzay_hf_deepspeed_max_size",
)
# billion parameters
PRINTED_BOUNDS = {"v100-32": 2, "v100-32-pcie": 2, "2080ti": 0.7}


def page(
    question: SearchQuestion,
    ranking: Sequence[Candidate],
    name: str,
    most: int,
    width: int | None = None,
) -> Page:
    """Describe the question and the first candidates, at most `most`, one of each layout and way."""
    recipe = question.recipe
    size = cost.parameters(recipe.model, recipe.positions)
    shape = f"{recipe.model.layers} layers of {recipe.model.hidden}, {recipe.model.heads} heads"
    count = Counter(candidate.forecast.verdict for candidate in ranking)
    fitting = f"{count['fits']:,} fit, {count['snug']:,} are snug"
    model = f"{size / 1e9:,.3g} billion parameters ({shape})"
    shown = Page(width)
    shown.facts(
        ("recipe", f"{name}: {model}, {_samples(recipe)}"),
        ("hardware", _hardware(question)),
        ("searched", f"{len(ranking):,} layouts: {fitting}"),
    )
    best = ranking[0]
    if not best.fits:
        full = best.forecast.binding
        place = "per GPU" if full.place == "GPU" else "of host memory per node"
        lacks = f"out of memory by {amount(full.missing)} {place}"
        shown.text(f"NOTHING FITS. Nearest: {words(best)}, {lacks}")
        return shown
    firsts: dict[tuple[object, ...], Candidate] = {}
    for candidate in ranking:
        work = candidate.forecast.work
        key = work.layout.tp, work.layout.pp, work.sequence_parallel, candidate.way
        if candidate.fits:
            firsts.setdefault(key, candidate)
    _add_layouts(shown, [*firsts.values()][:most])
    return shown


def _samples(recipe: Recipe) -> str:
    return f"{recipe.batch.global_:,} samples of {recipe.sequence_length:,} tokens per step"


def _hardware(question: SearchQuestion) -> str:
    node = question.node
    return (
        f"{_gpus(question)}: {node.title} ({node.name}), "
        f"{amount(node.gpu.memory_bytes)} each"
    )


def _gpus(question: SearchQuestion) -> str:
    return f"{counted(question.ranks, 'GPU')} on {counted(question.nodes, 'node')}"


def largest_page(
    question: SearchQuestion, models: Sequence[Largest], width: int | None
) -> Page:
    """Describe the largest models in a table, with the printed sizes below it."""
    node = question.node
    recipe = question.recipe
    micro = counted(recipe.batch.micro or 1, "sample")
    precisions = (each.best.plan.precision for each in models if each.best)
    precision = next(precisions, recipe.precision)
    model = f"a {recipe.model.family} in {precision}, {_samples(recipe)}, micro-batches of {micro}"
    shown = Page(width)
    shown.facts(("hardware", _hardware(question)), ("model", model))
    rows = []
    refused = []
    for way, best, problems in models:
        if problems:
            rules = "; ".join(str(problem.rule or problem.came) for problem in problems)
            refused.append(f"{way} cannot be run: {rules}")
        else:
            rows.append([way, *(_largest(best) if best else ["none fits"])])
    below = f"{LARGEST_LEGEND}{memory_error(precision)}."
    shown.table(rows, LARGEST, "llll", below=[below])
    printed = "; ".join(_printed_sizes(question))
    if printed:
        shown.text(f"printed of {_gpus(question)} of this kind: {printed}")
    alone = node.gpu.memory_bytes / 16e9
    rule = f"the documents' rule, memory over 16 bytes a parameter: {alone:.2f} B for one GPU"
    bound = PRINTED_BOUNDS.get(node.gpu.name)
    if bound:
        rule += f"; they print {bound} B for this GPU as the practical upper bound"
    shown.text(rule)
    shown.text(*refused, hang=2)
    return shown


def _largest(best: Candidate) -> list[str]:
    """Return the size, the layout, and what fills the memory."""
    model = best.plan.recipe.model
    size = cost.parameters(model, best.plan.recipe.positions)
    full = best.forecast.binding
    fills = f"host memory {full.share:.0%}"
    if full.place == "GPU":
        on_gpu = best.forecast.fullest_rank.on_gpu
        name = max(on_gpu, key=on_gpu.__getitem__)
        fills = f"GPU: {CATEGORIES[name]} {on_gpu[name] / full.needed:.0%}"
    shape = f"{size / 1e9:,.2f} B, {model.layers}x{model.hidden}"
    return [shape, _degrees(best), fills]


def _degrees(candidate: Candidate) -> str:
    layout = candidate.plan.layout
    return f"{layout.tp}x{layout.pp}x{layout.dp}"


def _printed_sizes(question: SearchQuestion) -> Iterator[str]:
    """Yield the documents' largest models on as many such nodes."""
    for table in LARGEST_TABLES:
        for row in read_table(FOLDER / f"{table}.yaml").rows:
            recipe = catalog.load(f"{table}/{row}")
            own = recipe.hardware
            published = recipe.published
            asked = question.node.name, question.ranks
            if own and published and (own.node, own.gpus) == asked:
                system = published.framework or recipe.ds_config
                shape = f"{recipe.model.layers}x{recipe.model.hidden}"
                yield f"{published.size_label}, {shape} ({system})"


def _add_layouts(shown: Page, best: list[Candidate]) -> None:
    rows = []
    for number, candidate in enumerate(best, 1):
        layout = candidate.plan.layout
        predicted = candidate.forecast
        needed = predicted.fullest_rank.total
        rates = predicted.speed
        assert rates
        row = (
            number,
            _degrees(candidate),
            f"{layout.micro}x{layout.accumulation}",
            f"{needed / 1e9:.1f}",
            f"{needed / predicted.node.gpu.memory_bytes:.0%}",
            f"{candidate.seconds:.4g}",
            f"{rates.tokens:,.0f}",
            f"{rates.mfu:.1%}",
            _states(candidate),
        )
        rows.append(row)
    below = [f"{LEGEND}{errors(best[0].forecast)}."]
    if any(candidate.forecast.waits for candidate in best):
        below.append(f"WAITS: time {error('waiting')}.")
    shown.table(rows, HEADINGS, "rllrrrrrl", below=below)


def _states(candidate: Candidate) -> str:
    """Name the place of model states, recomputation, and further features of a layout."""
    recipe = candidate.plan.recipe
    parts = [candidate.way]
    if recipe.activation_checkpointing != "none":
        parts.append(recomputation(candidate.forecast.work))
    parts += ["sequence parallel"] * recipe.parallel.sequence
    parts += ["SNUG"] * (candidate.forecast.verdict == "snug")
    parts += ["WAITS"] * candidate.forecast.waits
    return ", ".join(parts)


def words(candidate: Candidate) -> str:
    """Describe a layout in a few words."""
    layout = candidate.plan.layout
    return f"{layout.degrees()}, micro-batch {layout.micro}, {_states(candidate)}"
