"""Steps of `benchmark.py gpu`, each some minutes on one GPU, the most important first."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from deepspeed.accelerator import get_accelerator

from ds_configs.resolver import resolve
from launch.console.text_table import table
from launch.experiments.benchmarks import step_speed, step_text
from launch.experiments.benchmarks.step_speed import RATE, Measurement, Pace, SpeedRow
from launch.experiments.benchmarks.turns import Specification
from launch.experiments.launching import ROOT, own_environment
from launch.machine import abilities, measuring
from launch.planning import memory_fit
from modeling import cost
from recipes import catalog

DEFAULT, GPT, BERT = catalog.DEFAULT_RECIPE, "openwebtext/gpt2-124m", "wikipedia/bert-336m"
LARGE, LARGEST = "a100_blog_table4/1.2b", "jeanzay_megatron_max_size_32gb/193b-g256"
MEDIUM = ("sber_path_to_13b/03-medium", "sber_path_to_13b/05-gpt3-medium")
SPARSE = "sber_path_to_13b/07-gpt3-large-sparse"
RATE_GOAL, TIMES_GOAL = 0.55, 1.5  # share of the matrix rate; speed over transformers' under the same JSON
CONFIGS = ("zero1", "zero3_offload", "zero0", "zero2", "zero3", "zero2_offload", "zero3_offload_optimizer")
STAGES = ("zero1", "zero3", "zero2", "zero0", "zero3_offload")
DROPOUT = ("dropout.hidden=0.1", "dropout.attention=0.1")
UNUSABLE = {"pipeline", "3d", "zero_infinity"}  # they need several processes, or a disk
SMALL = ("batch.global=64",)  # for GPT
FEW = ("batch.global=16", "batch.micro=16")
NO_ATTENTION_DROPOUT = ("precision=bf16", "dropout.attention=0")
PACKAGED = ("data.source=packaged", "data.validation_every=20")
LARGE_SIZES = ("batch.", "model.heads")  # prefixes of settings that do not fit a tiny recipe
PACE, WALK = Pace(3, 5, 5, apart=True), Pace(1, 1, 1, apart=True)
MOST_SAID = 8000  # characters of a command's output


@dataclass(frozen=True)
class Goal:
    """A goal and its measured value: at least `least` of `what`. `measured`: None if impossible."""

    what: str
    least: float
    measured: float | None

    def __str__(self) -> str:
        came = "not measured" if self.measured is None else f"measured {self.measured:.3g}"
        verdict = "" if self.measured is None else ", reached" if self.measured >= self.least else ", missed"
        return f"goal: {self.what} at least {self.least:g}: {came}{verdict}"


@dataclass(frozen=True)
class StepOutcome:
    """Numbers, text and goals of one step."""

    found: Any
    said: str
    goals: Sequence[Goal] = ()


@dataclass(frozen=True)
class Context:
    """Settings of all steps. `walks`: try two cases of each step with tiny shapes on a CPU."""

    walks: bool
    folder: Path
    say: Callable[[str], None] = field(repr=False)


class Step(NamedTuple):
    name: str
    title: str
    run: Callable[[Context], StepOutcome]


@dataclass(frozen=True)
class GpuCase:
    """A row of `recipes/` in one process on the packaged corpus, with its own micro-batch.

    Attributes:
        degree: "tp", "pp" or "dp" for two ranks that share the GPU through gloo; None: one rank.
    """

    name: str
    recipe: str
    settings: tuple[str, ...] = ()
    ds_config: str = "zero1"
    system: str = "ours"
    compiled: bool = False
    threads: int | None = None
    degree: str | None = None

    def specification(self, tiny: bool) -> Specification:
        row = catalog.load(self.recipe, tiny=tiny)
        changed = [each for each in self.settings if not (tiny and each.startswith(LARGE_SIZES))]
        changed += [f"parallel.{self.degree}=2"] if self.degree else []
        own = [f"parallel.{degree}=1" for degree in ("tp", "pp", "dp")]
        own += ["data.blend=[]"] if row.data.blend else []
        own += PACKAGED if row.data.blend or row.data.source != "packaged" else ()
        if row.batch.micro and not self.degree:
            own += [f"batch.global={row.batch.micro}", "batch.accumulation=null"]
        keys = {setting.partition("=")[0] for setting in changed}
        settings = (*(each for each in own if each.partition("=")[0] not in keys), *changed)
        spec = Specification(
            self.name,
            self.system,
            self.recipe,
            settings,
            tiny,
            self.ds_config,
            self.compiled,
            processes=2 if self.degree else 1,
            threads=self.threads,
            shared_device=bool(self.degree) and not tiny,
        )
        return replace(spec, emulate_fp16=tiny and spec.load().precision == "fp16")


Goals = Callable[[Mapping[str, SpeedRow]], Sequence[Goal]]


def speeds(
    cases: Sequence[GpuCase], context: Context, traced: bool = False, goals: Goals | None = None
) -> StepOutcome:
    """Measure the cases one after the other as `benchmark.py step`, and the machine's matrix rate."""
    specs = [case.specification(context.walks) for case in cases[: 2 if context.walks else None]]
    if not specs[0].emulate_fp16:
        rate = replace(cases[0], name=RATE, system=RATE, compiled=False, threads=None, degree=None)
        specs.append(rate.specification(context.walks))
    folder = context.folder / "traces" if traced else None
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
    measured = step_speed.measure(specs, WALK if context.walks else PACE, context.say, folder)
    rows = step_speed.speed_rows(measured)
    facts = {each.spec.name: facts_of(each, context) for each in measured if each.seconds}
    parts = [step_text.rates(measured), step_text.speeds(rows, rows[0].name)] if rows else []
    parts += [step_text.parts(measured), lines_of(facts)] if rows else []
    parts += [f"{each.spec.name}: {each.failed}" for each in measured if each.failed]
    found = {"rows": [asdict(row) for row in rows], "measured": [asdict(each) for each in measured]}
    reached = goals({row.name: row for row in rows}) if goals else ()
    return StepOutcome(found | {"facts": facts}, "\n\n".join(parts), reached)


def facts_of(measured: Measurement, context: Context) -> dict[str, Any]:
    """Return attention kernels, graphs of torch.compile, and measured over predicted memory."""
    found: dict[str, Any] = {}
    if measured.profile:
        found["kernels"] = measured.profile["attention"]
    if measured.graphs:
        found["graphs"] = measured.graphs
    spec = measured.spec
    if measured.peak_bytes and spec.system == "ours":
        machine = abilities.detect_machine(spec.emulate_fp16)
        plan = resolve(spec.load(), spec.ds_config or "", spec.processes, machine)
        needed = memory_fit.memory_of_plan(plan, gpus=not context.walks)
        # On a GPU torch's peak counts tensors alone.
        found["predicted_gb"] = (needed.total if context.walks else needed.allocated) / 1e9
        found["measured / predicted"] = measured.peak_bytes / 1e9 / found["predicted_gb"]
    return found


def lines_of(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a line of facts per name."""

    def shown(value: Any) -> str:
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    return table(
        (name, ", ".join(f"{k} {shown(v)}" for k, v in each.items())) for name, each in found.items()
    )


def commands(context: Context, folder: str, lines: Iterable[tuple[str, Sequence[str]]]) -> StepOutcome:
    """Run our commands one after the other; collect loss and seconds per step of trainings."""
    shutil.rmtree(context.folder / folder, ignore_errors=True)
    found: dict[str, dict[str, Any]] = {}
    said = []
    for name, line in lines:
        how: dict[str, Any] = dict(cwd=ROOT, env=own_environment())
        done = subprocess.run([sys.executable, *line], capture_output=True, text=True, **how)
        found[name] = {"code": done.returncode}
        result = Path(line[line.index("--out") + 1], "result.json") if "--out" in line else None
        if done.returncode not in (0, 1):
            found[name]["said"] = done.stderr.strip()[-MOST_SAID // 20 :]
        elif result and result.exists():
            values = json.loads(result.read_text(encoding="utf-8"))
            found[name]["validation loss"] = (values["losses"]["validation"] or {}).get("loss")
            found[name]["s per step"] = values["speed"]["seconds_per_step"]
        else:
            said.append(f"{name}\n{done.stdout.strip()[-MOST_SAID:]}")
        context.say(f"{name}: {found[name]}")
    return StepOutcome({"commands": found, "said": said}, "\n\n".join([lines_of(found), *said]))


def training(context: Context, out: str, *flags: str, settings: Sequence[str] = ()) -> list[str]:
    """Return the command of a training; a walk is tiny and emulates fp16."""
    line = ["launch/pretrain.py", *flags, "--out", str(context.folder / out)]
    line += [f"--set={setting}" for setting in ("run.prompt=null", *settings)]
    emulated = any("fp16" in word for word in line)
    return line + ["--tiny", *["--emulate_fp16"] * emulated] * context.walks


def trainings(
    context: Context, folder: str, cases: Iterable[tuple[str, str, Sequence[str]]], *flags: str
) -> StepOutcome:
    """Train each (recipe, DeepSpeed JSON, settings), without checkpoints."""
    lines = []
    for recipe, config, settings in cases:
        name = ", ".join((recipe, config, *settings))
        own = (*settings, "run.save_every=0", "run.save_last=false")
        chosen, out = ("--recipe", recipe, "--ds_config", config), re.sub("[^A-Za-z0-9.]+", "-", name)
        lines.append((name, training(context, f"{folder}/{out}", *chosen, *flags, settings=own)))
    return commands(context, folder, lines)


def firsts(context: Context) -> StepOutcome:
    """Train what is most likely wrong for three steps: every ZeRO stage with dropout, recomputation, BERT."""
    cases: list[tuple[str, str, Sequence[str]]] = [
        (DEFAULT, config, (f"precision={precision}", *DROPOUT))
        for precision in ("bf16", "fp16")
        for config in (STAGES[:1] if context.walks else STAGES)
    ]
    cases.append(("bert/sotu", "zero1", ("precision=bf16", *DROPOUT)))
    cases.append(("bert/sotu", "zero1", ("precision=bf16",)))  # without padding or dropout
    for config in ("zero3", "zero3_cpu_checkpointing"):
        cases.append((DEFAULT, config, (*DROPOUT, "activation_checkpointing=full")))
    return trainings(context, "first", cases, "--compile", "off", "--steps", "3")


def resumed(context: Context) -> StepOutcome:
    """Train two steps under each stage from the checkpoint of the one before; the losses have to go on."""
    configs = ("zero1", "zero3_offload", "zero2", "zero0")[: 2 if context.walks else None]
    lines = []
    for number, config in enumerate(configs, 1):
        flags = ("--ds_config", config, "--steps", str(2 * number), "--resume", "--compile", "off")
        lines.append((config, training(context, "resumed/run", *flags)))
    return commands(context, "resumed", lines)


def runs(context: Context) -> StepOutcome:
    """Train 30 steps of every one-GPU configuration, in both families and with `transformers`."""
    names = {path.stem for path in (ROOT / "ds_configs").glob("*.json")} - UNUSABLE
    configs = [*CONFIGS, *sorted(names - {*CONFIGS})][: 2 if context.walks else None]
    cases: list[tuple[str, str, Sequence[str]]] = [(DEFAULT, config, ()) for config in configs]
    cases += [("bert/sotu", config, ()) for config in ("zero1", "zero3")]
    if not context.walks:
        cases.append((DEFAULT, "zero3", ("model.implementation=transformers",)))
    return trainings(context, "runs", cases, "--steps", "2" if context.walks else "30")


def repeating(context: Context) -> StepOutcome:
    """Train two equal runs and a resumed one, and compare their losses in a report."""
    whole, half = ("4", "2") if context.walks else ("20", "10")
    lines = [
        (f"{name}, {steps} steps", training(context, f"repeating/{name}", "--steps", steps, "--resume"))
        for name, steps in (("first", whole), ("second", whole), ("resumed", half), ("resumed", whole))
    ]
    *compared, report = (
        str(context.folder / "repeating" / name) for name in ("first", "second", "resumed", "report")
    )
    lines.append(("compared", ["launch/report.py", *compared, "--out", report]))
    return commands(context, "repeating", lines)


def layouts(context: Context) -> StepOutcome:
    flags = ["--steps", "2", "--only", "accumulation 4"] if context.walks else ["--compile"]
    return commands(context, "layouts", [("layouts", ["launch/compare_layouts.py", "--tiny", *flags])])


def rates(context: Context) -> StepOutcome:
    measured = asdict(measuring.measured())
    get_accelerator().empty_cache()  # free this process's memory for the next steps
    return StepOutcome(measured, table(measured.items()))


NO_RECOMPUTATION = (*NO_ATTENTION_DROPOUT, "activation_checkpointing=none", "dropout.hidden=0")
CASES_1_2B = (  # the row unchanged (fp16, recomputation, dropout), and bf16 without recomputation
    GpuCase("bf16, compiled", LARGE, NO_RECOMPUTATION, compiled=True),
    GpuCase("bf16, eager", LARGE, NO_RECOMPUTATION),
    GpuCase("bf16, transformers", LARGE, NO_RECOMPUTATION, system="transformers"),
    GpuCase("bf16, bare loop", LARGE, NO_RECOMPUTATION, system="bare", compiled=True),
    GpuCase("the row, compiled", LARGE, compiled=True),
    GpuCase("the row, transformers", LARGE, system="transformers"),
)


def goals_1_2b(rows: Mapping[str, SpeedRow]) -> list[Goal]:
    row = catalog.load(LARGE)
    count = partial(cost.exact_flops_per_step, row.model, row.sequence_length, 1)
    repeated = count(checkpointing=row.checkpoint_interval > 0) / count()

    def share(name: str) -> float | None:
        return rows[name].share if name in rows else None

    def times(kind: str) -> float | None:
        ours, theirs = (rows.get(f"{kind}, {name}") for name in ("compiled", "transformers"))
        return theirs.seconds / ours.seconds if ours and theirs else None

    of_row = share("the row, compiled")
    recomputed = None if of_row is None else of_row * repeated
    return [
        Goal("share of the matrix rate, bf16, nothing recomputed", RATE_GOAL, share("bf16, compiled")),
        Goal("share with the recomputed forward counted, as the row stands", RATE_GOAL, recomputed),
        Goal("times transformers' speed, bf16", TIMES_GOAL, times("bf16")),
        Goal("times transformers' speed, as the row stands", TIMES_GOAL, times("the row")),
    ]


ATTENTION = (
    GpuCase("GPT-2", GPT, SMALL),
    GpuCase("padded BERT", BERT, FEW),
    GpuCase("GPT-2, dropout 0.1", GPT, (*SMALL, "dropout.attention=0.1")),
)
# gloo sends, receives and scatters no CUDA tensors for sure: a pipeline and ZeRO-3 need two GPUs.
ONE_DEVICE = (GpuCase("tp2", DEFAULT, degree="tp"), GpuCase("dp2 zero1", DEFAULT, degree="dp"))
PRECISIONS = tuple(
    GpuCase(f"{config}, {kind}", GPT, (*SMALL, f"precision={kind}"), config)
    for config, kind in product(CONFIGS[:6], ("bf16", "fp16"))
)
COMPILED = tuple(
    GpuCase(f"{name}, {config}{', compiled' * form}", recipe, settings, config, compiled=form)
    for name, recipe, settings, config in (
        ("GPT-2", GPT, SMALL, "zero1"),
        ("padded BERT", BERT, FEW, "zero1"),
        ("GPT-2", GPT, SMALL, "zero2"),
        ("GPT-2", GPT, SMALL, "zero3"),
    )
    for form in (False, True)
)
OF_345M = tuple(
    GpuCase(f"{recipe.partition('/')[2]}, {how}", recipe, ("precision=bf16",), system=system, compiled=form)
    for recipe in MEDIUM
    for how, system, form in (("compiled", "ours", True), ("transformers", "transformers", False))
)
MEMORY = (
    *(GpuCase(config, LARGE, ds_config=config) for config in ("zero1", "zero3_offload", "zero0", "zero3")),
    GpuCase("zero3_offload, one thread", LARGE, ds_config="zero3_offload", threads=1),
)
OF_193B = (GpuCase("one layer", LARGEST, ("model.layers=1", "batch.global=4", "precision=bf16")),)
WITHOUT_COLUMNS = (*NO_ATTENTION_DROPOUT, "model.attention_columns=null", "model.attention_patterns=1")
BANDS = (*WITHOUT_COLUMNS, "model.attention=[dense, banded]")
DENSE = (*WITHOUT_COLUMNS, "model.attention=[dense]", "model.attention_window=null")
BANDED = (
    *(
        GpuCase(
            f"heads of {1536 // heads}, recomputed: {recompute}{', compiled' * form}",
            SPARSE,
            (*BANDS, f"model.heads={heads}", f"activation_checkpointing={recompute}"),
            compiled=form,
        )
        for heads, recompute, form in product((16, 24), ("none", "full"), (False, True))
    ),
    GpuCase("fixed, compiled", SPARSE, NO_ATTENTION_DROPOUT, compiled=True),
    GpuCase("dense, compiled", SPARSE, DENSE, compiled=True),
)

_traced = partial(speeds, traced=True)
STEPS: Sequence[Step] = (
    Step("first", "a few steps of every ZeRO stage with dropout, bf16 and fp16, and recomputed", firsts),
    Step("resumed", "a run that goes on under another stage", resumed),
    Step("runs", "does everything run: every configuration of one GPU, both families", runs),
    Step("attention", "kernels of attention in GPT-2 and in a padded BERT", partial(_traced, ATTENTION)),
    Step("rates", "matrix rate and memory bandwidth", rates),
    Step(
        "1.2b",
        "the 1.2B row of the A100 document's table 4, and its goals",
        partial(speeds, CASES_1_2B, goals=goals_1_2b),
    ),
    Step("one_device", "tensor and data parallelism with two ranks on one GPU", partial(speeds, ONE_DEVICE)),
    Step("precisions", "bf16 and fp16 under ZeRO 0-3 and offload", partial(speeds, PRECISIONS)),
    Step("compile", "eager against compiled, with the graphs", partial(speeds, COMPILED)),
    Step("345m", "the 345M rows", partial(speeds, OF_345M)),
    Step("repeat", "two equal runs and a resumed one, bit for bit", repeating),
    Step("memory", "peak memory of the 1.2B row, predicted and measured", partial(speeds, MEMORY)),
    Step("193b", "one layer of the 193B row", partial(_traced, OF_193B)),
    Step("sparse", "flex_attention in the sparse rows", partial(_traced, BANDED)),
    Step("layouts", "compare_layouts", layouts),
)
