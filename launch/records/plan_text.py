"""The resolved plan as text on the screen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_configs.plan import Plan
from launch.console.text_table import Page
from launch.machine.memory import describe_states
from launch.records.titles import kind_of, title_of
from modeling import cost
from recipes.consistency import untrained
from recipes.layout import BatchSchedule
from recipes.problems import counted
from recipes.schema import DEEPSPEED_SCHEDULES, Branch, Model, Recipe

OPTIMIZERS = {"adamw": "AdamW", "lamb": "LAMB", "muon": "Muon and AdamW"}

NO_CURVE = "none: no curve of this recipe was measured (launch/recipe.py curve)"


@dataclass(frozen=True)
class Surroundings:
    """The lines next to a plan on the screen."""

    hardware: str
    # of banded layers on this machine; None: all layers are dense
    band_kernel: str | None = None
    run_directory: Path | None = None  # None: nothing is started
    data: Mapping[str, Any] | None = None  # the corpus' summary; None: not known yet
    text: str | None = None  # what is known of the text before it is read
    recipe_of: Path | None = None  # the run whose recipe was taken
    reference: object = None  # the run next to the curve of its recipe, in words
    # processes of this launch; None: not to be compared with the plan
    started: int | None = None
    seconds: float | None = None  # of computing; None: not estimated
    # of a process in words; None: its model states are counted
    memory: str | None = None


def describe_plan(
    plan: Plan, name: str, surroundings: Surroundings, width: int | None = None
) -> str:
    """Describe the plan in a block of aligned lines of `width` columns."""
    recipe = plan.recipe
    layout = plan.layout
    model = recipe.model
    o = recipe.optimizer
    length = recipe.sequence_length
    parameters = cost.parameters(model, recipe.positions)
    apart = f" of {recipe.positions} positions" if recipe.positions > length else ""
    asked = (
        ""
        if surroundings.started in (None, layout.world)
        else ", planned; not started here"
    )
    degrees = layout.degrees(recipe.parallel.sequence)
    chunks = f"chunks of {counted(recipe.checkpoint_interval, 'layer')}"
    recomputed = {
        0: "attention's scores" if recipe.recomputes_core else "nothing",
        1: "every layer",
    }
    shape = (
        f"{family_of(model)}, {counted(model.layers, 'layer')}"
        f"{' that share parameters' * model.shared_layers}, "
        f"hidden size {model.hidden}, {counted(model.heads, 'head')}, sequence length {length}{apart}, "
        f"vocabulary {model.vocab_size} (padded to {plan.padded_vocab})"
    )
    rule = (
        f"lr {o.lr:g}, betas {o.betas[0]:g} {o.betas[1]:g}, weight decay {o.weight_decay:g}, clip {o.clip:g}"
        f"{', no bias correction' * (not o.bias_correction)}"
    )
    if o.name == "muon":
        own = o.of_muon
        rule += f"; AdamW's lr {own['adam_lr']:g}, Muon's momentum {own['momentum']:g}"
    first = recipe.begins_after
    samples = recipe.sizes.samples(recipe.steps) - recipe.sizes.samples(first)
    read = samples * model.sequences * length
    length_of_run = f"{counted(recipe.steps - first, 'step')}, {read:,} tokens"
    if surroundings.data:
        length_of_run += f", {describe_epochs(recipe, surroundings.data)}"
    if surroundings.seconds is not None:
        length_of_run += f"; {about(surroundings.seconds)} by rough rates"
    ramp = recipe.batch.rampup
    grown = recipe.sizes.stretches[-1][0] + 1
    growth = (
        f" from step {grown:,} on, {ramp.start} at first, by {ramp.increment} more"
        if ramp
        else ""
    )
    lines: list[tuple[str, object]] = [
        ("recipe", f"{name}: {title_of(recipe)}"),
        ("  taken from", surroundings.recipe_of),
        *describe_branch(recipe.branch),
        ("model", shape),
        *describe_attention(model, surroundings.band_kernel),
        ("parameters", f"{parameters:,}"),
        ("layout", f"{degrees} = {counted(layout.world, 'process')}{asked}"),
        ("batch", f"{layout.identity()}{growth}"),
        ("precision", describe_precision(plan)),
        (
            "ZeRO stage",
            f"{plan.zero_stage}, offload: {plan.offload}   ({plan.ds_name}.json)",
        ),
        ("memory", surroundings.memory or describe_states(plan)),
        ("recomputed", recomputed.get(recipe.checkpoint_interval, chunks)),
        ("optimizer", f"{OPTIMIZERS[o.name]}, {rule}"),
        ("schedule", describe_schedule(recipe)),
        ("training", length_of_run),
        ("data", describe_data(surroundings.data)),
        ("data", surroundings.text),
        ("reference", surroundings.reference),
        ("hardware", surroundings.hardware),
        ("run directory", surroundings.run_directory),
    ]
    page = Page(width)
    page.facts(*(line for line in lines if line[1]))
    page.text(*(str(each) for each in plan.notices if not each.differs), hang=2)
    for notice in plan.notices:
        if notice.differs:
            page.notes([notice])
    return str(page)


def describe_branch(branch: Branch | None) -> list[tuple[str, str]]:
    """Name the run that a branch goes on from, what is changed and where its data go on; [] without."""
    if branch is None:
        return []
    read = BatchSchedule(branch.stretches).samples(branch.step)
    data = f"the data go on after {read - branch.data_from:,} samples"
    if branch.data_from == read:
        data = f"the data are read from their beginning, after {read:,} samples of the other run"
    return [("branch of", str(branch)), ("  changed", branch.changes), ("  data", data)]


def describe_precision(plan: Plan) -> str:
    """Name the precision of a run, and another one of its gradient sums."""
    over_batches = (plan.ds.get("data_types") or {}).get("grad_accum_dtype")
    over_ranks = plan.ds.get("communication_data_type")
    sums = ((over_batches, "micro-batches"), (over_ranks, "data-parallel ranks"))
    longer = [
        what for dtype, what in sums if dtype == "fp32" and plan.precision != "fp32"
    ]
    summed = f", gradients summed over {' and '.join(longer)} in fp32" if longer else ""
    return f"{plan.precision}{summed}"


def describe_schedule(recipe: Recipe) -> str:
    """Name the kind of the learning rate's schedule, its warm-up and decay, and what is not trained of it."""
    s = recipe.schedule
    end = recipe.decay_steps
    last = counted(s.wsd_decay_steps or 0, "step")
    shape = (
        f", {s.wsd_decay_style or 'exponential'} over the last {last}"
        if s.kind == "wsd"
        else ""
    )
    power = f", power {s.power:g}" if s.power else ""
    least = f", at least {s.min_lr:g}" if s.kind == "inverse_sqrt" else ""
    to = f", to {s.min_lr:g} at step {end}" if end else least
    kind = f"{s.kind} by samples" if s.counts == "samples" else s.kind
    if s.kind in DEEPSPEED_SCHEDULES:
        first = s.warmup_min_lr if s.kind == "WarmupCosineLR" else s.min_lr
        kind = f"DeepSpeed's {kind}, {s.warmup_type or 'log'} from {first or 0:g}"
    lacks = "".join(f"; {why}" for why, _ in untrained(recipe))
    return f"{kind}, {counted(s.warmup_steps, 'warm-up step')}{shape}{power}{to}{lacks}"


def describe_data(data: Mapping[str, Any] | None) -> str | None:
    """Name the source of the text, its tokens and what is held out; None: not known yet."""
    if not data:
        return None
    tokens = (
        f"{data['train_tokens']:,} training tokens, " if "train_tokens" in data else ""
    )
    read = "" if data.get("samples_per_epoch") else "streamed; "
    samples = counted(data["validation_samples"], "validation sample")
    held_out = (
        f"; {data['held_out']}" if "held_out" in data else " of held-out documents"
    )
    return f"{data['source']}, {tokens}{read}{samples}{held_out}"


def describe_epochs(recipe: Recipe, data: Mapping[str, Any]) -> str:
    """Name the share of the text that the run reads; "streamed" where its size is not known."""
    epoch = data.get("samples_per_epoch")
    if not epoch:
        return "streamed"
    share = recipe.sizes_in_data.samples(recipe.steps) / epoch
    return f"{share:.2f} epochs" if share >= 0.01 else "less than 0.01 epochs"


def about(seconds: float) -> str:
    """Write a rough time in the largest unit that it has one of."""
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= size:
            return f"about {counted(round(seconds / size), unit)}"
    return "less than a minute"


def describe_attention(model: Model, band_kernel: str | None) -> list[tuple[str, str]]:
    """Describe the sparse layers of a model and their kernel; [] without sparse layers."""
    if model.attention_window is None:
        return []
    sparse = sum(window is not None for window in model.windows)
    which = f"layers {', '.join(model.attention)}, repeated: {sparse} of {model.layers}"
    kinds = f"{which} see {model.attention_window} positions"
    if model.attention_columns:
        kinds += f", fixed ones a window and {model.attention_columns} columns of each before it"
    return [
        ("attention", kinds),
        *([("  sparse by", band_kernel)] if band_kernel else []),
    ]


def family_of(model: Model) -> str:
    """Name the family, with LayerNorm and head of a BERT."""
    title = kind_of(model)
    if model.config or not model.facts.masked:
        return title
    head = (
        "no sentence head"
        if model.sentence_head == "none"
        else f"{model.sentence_head.upper()} head"
    )
    if model.task_head != "none":
        classes = "" if model.task_head == "span" else f" of {model.head_classes}"
        head = f"{model.task_head} head{classes}"
    return f"{title} ({model.layer_norm}-LN, {head})"
