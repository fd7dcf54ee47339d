"""The differences between a run and its recipe, and whether its numbers may stand next to published ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from ds_configs.findings import ConfigError, Findings, find, lookup, read
from ds_configs.plan import ANY_GPU, Plan
from ds_configs.sections import zero
from launch.records.facts import RunFacts
from recipes.key_paths import DEVIATING, WORK, changes, flatten, is_part
from recipes.layout import Layout, share_batch
from recipes.problems import Problem
from recipes.schema import Recipe
from recipes.tiny import tiny as shrink

# Fields that --tiny makes smaller: the deviation "tiny" covers them. Its other changes are stated.
SHRUNK = (
    "model",
    "sequence_length",
    "batch",
    "steps",
    "schedule",
    "activation_checkpointing",
    "data",
)
# Fields whose remarks in a recipe ("differs", "unknown") do not hold for the tiny run.
REPLACED = (
    "model.layers",
    "model.hidden",
    "model.heads",
    "model.vocab_size",
    "model.positions",
    "sequence_length",
    "batch",
    "steps",
    "data",
    "parallel",
)
# of the layout -> of a JSON's `parallel` section
DEGREES = {"tp": "tensor", "pp": "pipeline"}
REASONS = {
    "tiny": "tiny, another model",
    "unreadable": "the recipe cannot be read",
    "emulated": "fp16 emulated on a CPU",
}

SENTENCES = {
    "status": "{key}: {is_}",
    "notice": "{is_}",
    "tiny": "tiny: the recipe was shrunk (--tiny), so its numbers are not those of the model it names",
    "recipe": "{key}: {is_}, the recipe's is {was}",
    "shrunk": "{key}: {is_}, tiny's is {was}",
    "raised": "{key}: {is_} (tiny raises it), the recipe's is {was}",
    "ds_config": "ds_config: run with {is_}, the recipe's is {was}",
    "differs": "{key}: not as in the source; {is_}",
    "unknown": "{key}: not published; {is_}",
    "branch": "branch: of {is_}",
    "hardware": "hardware: run on {is_}, the recipe's is {was}",
    "emulated": "precision: fp16 is emulated on a CPU, so its speed means nothing",
    "steps": "steps: {is_} of the recipe's {was}",
    "unfinished": "unfinished: no result.json of it yet; taken from metrics.jsonl, after step {is_} (the run "
    "continues, or was killed)",
    "republished": "published numbers: the table has changed since this run; ratios are to those shown here",
    "otherwise": "{key}: run with {is_}; speed and memory are not of these steps",
    "measured": "speed and memory: of {key}, run with {is_}",
}


@dataclass(frozen=True)
class Deviation:
    """One difference between a run and its recipe."""

    kind: str  # key of `SENTENCES`
    # of the recipe; for "status" the status, for "notice" the notice's key
    key: str = ""
    was: Any = None
    is_: Annotated[Any, Field(alias="is")] = None  # the run's value, or a remark on it

    def __str__(self) -> str:
        return SENTENCES[self.kind].format(key=self.key, was=self.was, is_=self.is_)


def deviations(run: RunFacts, steps: int) -> list[Deviation]:
    """Return all deviations of a run of `steps` optimizer steps."""
    every = list(_differences(run, steps))
    return [each for number, each in enumerate(every) if each not in every[:number]]


def _differences(run: RunFacts, steps: int) -> Iterator[Deviation]:  # noqa: C901
    plan = run.plan
    recipe = run.plan.recipe
    original = run.original
    tiny = run.tiny
    reference = original or recipe
    for notice in plan.notices:
        yield Deviation("notice", notice.key, is_=notice.text)
    branch = recipe.branch
    if branch is not None:
        yield Deviation("branch", "branch", is_=f"{branch}: {branch.changes}")
    if tiny:
        yield Deviation("tiny")
    if original is not None:
        yield from _changed_fields(original, recipe, tiny)
    own = Path(reference.ds_config).name.removesuffix(".json")
    if plan.ds_name != own:
        yield Deviation("ds_config", "ds_config", own, plan.ds_name)
    yield from _changed_layout(reference, plan, tiny)
    for kind, texts in (("differs", recipe.differs), ("unknown", recipe.unknown)):
        for key, text in texts.items():
            if not (tiny and (key == "model" or is_part(key, REPLACED))):
                yield Deviation(kind, key, is_=text)
    if reference.hardware:
        yield Deviation("hardware", "hardware", str(reference.hardware), run.hardware)
    if not any(notice.key == "precision" for notice in plan.notices):
        if recipe.precision not in (plan.precision, "auto"):
            yield Deviation("recipe", "precision", recipe.precision, plan.precision)
        if run.emulated_fp16 and plan.precision == "fp16":
            yield Deviation("emulated", "precision")
    if steps < recipe.steps:
        yield Deviation("steps", "steps", recipe.steps, steps)


def _changed_fields(
    original: Recipe, recipe: Recipe, tiny: bool
) -> Iterator[Deviation]:
    """Yield changed fields; fields that --tiny makes smaller are compared with the shrunk recipe."""
    own = dict(flatten(original.compared()))
    small = dict(flatten(shrink(original).compared())) if tiny else own
    used = dict(flatten(recipe.compared()))
    for key in {**own, **small, **used}:
        written, shrunk, value = (
            fields.get(key, "absent") for fields in (own, small, used)
        )
        if key not in DEVIATING:
            continue
        if written != shrunk and is_part(key, SHRUNK):
            if value != shrunk:
                yield Deviation("shrunk", key, shrunk, value)
        elif value != written:
            # optimizer.lr
            yield Deviation(
                "raised" if value == shrunk else "recipe", key, written, value
            )


def _changed_layout(reference: Recipe, plan: Plan, tiny: bool) -> Iterator[Deviation]:
    """Yield degrees and batch shares other than the reference states or implies."""
    sequence = plan.recipe.parallel.sequence
    cut = reference.parallel.sequence
    if sequence != cut:
        yield Deviation("recipe", "parallel.sequence", cut, sequence)
    own = _stated_layout(reference)
    asked = _stated_layout(shrink(reference)) if tiny else own
    for key, value in asked.items():
        used = getattr(plan.layout, key.partition(".")[2])
        if value is not None and used != value:
            yield Deviation(
                "recipe" if own.get(key) == value else "shrunk", key, value, used
            )


def _stated_layout(reference: Recipe) -> dict[str, int | None]:
    parallel = reference.parallel
    batch = reference.batch
    # The ds_config or the launcher chooses a degree that the recipe does not state.
    stated = {f"parallel.{key}": degree for key, degree in parallel.degrees.items()}
    shares: tuple[int | None, int | None] | Problem = (batch.micro, batch.accumulation)
    if parallel.dp is not None and shares != (None, None):
        sizes = (batch.micro, batch.accumulation, batch.global_)
        shares = share_batch(*sizes, parallel.dp, parallel.pp or 1)
    if not isinstance(shares, Problem):
        stated |= dict(zip(("batch.micro", "batch.accumulation"), shares, strict=True))
    return stated


@dataclass(frozen=True)
class Incomparable:
    """The reason why the numbers of a run cannot be compared with its row."""

    # of `REASONS`, or other work by `keys`
    reason: Literal["tiny", "unreadable", "other", "emulated"]
    keys: tuple[str, ...] = ()
    # and offload, of the run and of the row, if "ds_config" is a key
    sharding: tuple[str, str] | None = None

    def __str__(self) -> str:
        if self.reason in REASONS:
            return REASONS[self.reason]
        used = ""
        if self.sharding:
            used = f" ({self.sharding[0]}; the row's is {self.sharding[1]})"
        return f"other {', '.join(self.keys)}{used}"


def not_comparable(
    row: Recipe | None, plan: Plan | None, *, tiny: bool, emulated_fp16: bool = False
) -> Incomparable | None:
    """Return the reason against comparing a run of `plan` with the row; None: they can be compared.

    `row` or `plan` is None if it cannot be read. Other hardware or precision is a deviation, but no reason.
    """
    if tiny:
        return Incomparable("tiny")
    if row is None or plan is None:
        return Incomparable("unreadable")
    there = sharding(_config(row.ds_config))
    here = sharding(plan.ds)
    sharded = (here, there) if there and here and there != here else None
    keys = [*changed_work(row, plan.recipe), *changed_degrees(row, plan.layout)]
    keys += ["ds_config"] * bool(sharded)
    if keys:
        return Incomparable("other", tuple(keys), sharded)
    emulated = emulated_fp16 and plan.precision == "fp16"
    return Incomparable("emulated") if emulated else None


def changed_work(row: Recipe, run: Recipe) -> list[str]:
    """Return the keys in which the recipes differ in their amount of work."""
    return [key for key, _, _ in changes(row, run, WORK)]


def changed_degrees(row: Recipe, layout: Layout) -> list[str]:
    """Return the keys of other degrees than the row's: they change a rank's work and messages.

    If the row does not state tp or pp, its ds_config decides; if it does not state dp, any dp is right.
    """
    config = _config(row.ds_config)
    own = row.parallel.degrees
    for key, name in DEGREES.items():
        written = (
            lookup(config, f"parallel.{part}{name}") for part in ("", "default_")
        )
        own[key] = own[key] or next(
            (degree for degree in written if isinstance(degree, int)), 1
        )
    return [
        f"parallel.{key}"
        for key, degree in own.items()
        if degree not in (None, getattr(layout, key))
    ]


def sharding(config: Mapping[str, Any]) -> str | None:
    """Name a JSON's ZeRO stage and offload, as "ZeRO-3, offload optimizer"; None for {}."""
    if not config:
        return None
    ignored = Findings("", config)
    stage = zero.stage(ignored)
    parts = [f"ZeRO-{stage}", f"offload {zero.offload(stage, ANY_GPU, ignored)}"]
    if lookup(config, "activation_checkpointing.cpu_checkpointing"):
        parts.append("activations in CPU memory")
    return ", ".join(parts)


def _config(name: str) -> dict[str, Any]:
    """Read the JSON as written; {} if it cannot be read."""
    try:
        return read(find(name))
    except ConfigError:
        return {}
