"""The text of a result at the end of a run."""

from __future__ import annotations

from collections.abc import Iterator

from launch.console.text_table import Page, flops, number
from launch.records.facts import OURS
from launch.records.result import TFLOPS_BY, Result
from recipes.problems import amount

NOT_MEASURED = "not measured"
EXACT = (
    "the source names no definition; the numbers of NVIDIA's repository count every matrix product, so that "
    "our exact count stands next to them, not the formula"
)


def result_text(result: Result, width: int | None = None) -> str:
    """Return measured and published numbers and the deviations, in lines of `width` columns."""
    page = Page(width, indent=0)
    page.facts(*_lines(result), gap=1)
    if result.comparison:
        _add_comparison(page, result)
    stated = [f"  - {each}" for each in result.deviations]
    page.text(*stated, hang=2, heading=["deviations from the recipe"])
    return str(page)


def _lines(result: Result) -> list[tuple[str, str]]:
    speed = result.speed
    memory = result.memory
    how = f"{result.way}, activation checkpointing {result.activation_checkpointing}"
    skipped = f" ({result.skipped_steps:,} skipped)" if result.skipped_steps else ""
    waited = speed.data_wait_share
    peak = NOT_MEASURED
    if memory.peak_bytes is not None:
        peak = f"{amount(memory.peak_bytes)} ({memory.kind})"
    samples = _number(speed.samples_per_s, " samples/s")
    tokens = _number(speed.tokens_per_s, " tokens/s")
    formula = NOT_MEASURED
    if speed.exact_tflops is not None:
        formula = f"{flops(speed.exact_tflops)} by exact count"
    if speed.tflops is not None:
        formula = f"{flops(speed.tflops)} by the published formula, {formula}"
    lines = [*_losses(result)]
    lines += [(f"score on {each.split}", str(each)) for each in result.task_scores]
    lines += [
        ("recipe", f"{result.recipe}: {result.title}"),
        ("status", result.status + (f": {result.reason}" if result.reason else "")),
        ("run with", f"{result.ds_config}: {how}"),
        *[("implementation", str(result.implementation))]
        * (result.implementation != OURS),
        ("hardware", str(result.hardware)),
        ("parameters", number(result.parameters)),
        ("steps", f"{result.steps:,}{skipped}"),
        (
            "time per step",
            _number(speed.seconds_per_step, f" s ({speed.measured_over})"),
        ),
        (
            "waiting for data",
            NOT_MEASURED if waited is None else f"{100 * waited:.2f} % of the time",
        ),
        ("throughput", f"{samples}, {tokens}"),
        ("compute rate", formula),
        ("peak memory", peak),
    ]
    if result.start:
        lines.append(("start", str(result.start)))
    return lines


def _last(steps: int) -> str:
    return "the only step" if steps == 1 else f"mean of the last {steps} steps"


def _add_comparison(page: Page, result: Result) -> None:
    rows = [
        (
            each.quantity,
            "not published" if each.published is None else number(each.published),
            NOT_MEASURED if each.measured is None else number(each.measured),
            "" if each.ratio is None else f"{each.ratio:.4g}",
            each.unit,
        )
        for each in result.comparison
    ]
    lines = []
    if result.not_comparable:
        lines.append(f"no ratios: {result.not_comparable}")
    exact = TFLOPS_BY["exact"][0]
    if any(
        each.unit == exact and each.published is not None for each in result.comparison
    ):
        lines.append(f"TFLOPS: {EXACT}")
    lines.append(f"source: {result.published_source}")
    page.table(rows, ("", "published", "measured", "ratio", ""), "lrrrl", below=lines)


def _losses(result: Result) -> Iterator[tuple[str, str]]:
    """Yield the losses and accuracies of the splits that were read."""
    losses = result.losses
    step = losses.validation and losses.validation.step
    over = f"{_last(losses.training.steps)}, {result.figures[0].unit}"
    references = [str(result.judgement)]
    if result.judgement is None:
        references = [
            f"{kind} {entropy:.4f}"
            for kind, entropy in vars(result.entropies).items()
            if entropy is not None
        ]
    after = ", ".join([f"after step {step}", *references])
    yield from _split(result, "validation", after)
    yield from _split(result, "training", over)
    if losses.test:
        documents = "held-out test documents, after the last step"
        yield from _split(result, "test", documents)


def _split(result: Result, split: str, remark: str) -> Iterator[tuple[str, str]]:
    """Yield the figures of one split; `remark`: on the first of them."""
    first, *others = result.figures
    yield f"{split} {first.name}", _loss(result.told(split, first), remark)
    for figure in others:
        yield f"  {figure.name}", _loss(result.told(split, figure), figure.unit)


def _loss(value: float | None, remark: str) -> str:
    return NOT_MEASURED if value is None else f"{value:.4f} ({remark})"


def _number(value: float | None, unit: str = "") -> str:
    return NOT_MEASURED if value is None else f"{number(value)}{unit}"
