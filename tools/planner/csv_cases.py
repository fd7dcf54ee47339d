"""Published rows from CSV files, ours or a user's: columns, defaults, refusals.

`other_documents.csv` next to this file shows the form. A cell that is empty states nothing.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    ValidationError,
)

from launch.planning.prediction import rank_memory
from launch.planning.prediction.hardware import GIB, Node, find, names
from launch.planning.prediction.published_step import TflopsRule, seconds_of
from launch.planning.prediction.software import SYSTEMS, as_it_runs
from launch.planning.prediction.step_time import step_time
from launch.planning.prediction.workload import Workload, buffers_of
from modeling.cost import FP32, MIXED, Place
from recipes import files
from recipes.families import FAMILIES, PUBLISHED_VOCABULARIES
from recipes.layout import Layout, divisors, padded_vocab, share_batch
from recipes.problems import Problem, ProblemsError
from recipes.schema import (
    Count,
    Dropout,
    Layers,
    Model,
    TaskName,
    Tokens,
    Vocabulary,
    Width,
)
from recipes.tasks import TASKS
from tools.planner.cases import QUANTITIES, Case, of_published_tables
from tools.planner.fitting import initial_constants

OTHER_DOCUMENTS = Path(__file__).with_name("other_documents.csv")
# What stands in the place of a node's name -> the usual node of such, the first that is found.
USUAL_NODES = {
    "v100[^0-9]*16": "v100-16x4",
    "v100": "v100-32x8",
    r"\ba100\b[^0-9]*40": "a100-40x8",
    r"\ba100\b": "a100-80x8",
    r"\bh100\b(?!.*(nvl|pcie))": "h100-80x8",
    r"\bh200\b(?!.*(nvl|pcie))": "h200x8",
}
RECOMPUTED = "^(none|full|yes|selective|[1-9][0-9]*)$"
OFFLOADED = r"^(none|((optimizer|parameters|activations)(\+|$))+)$"
MOST_MICRO = 16  # samples that are tried where a row states no micro-batch


class NotPredictable(Exception):
    """A row with too few numbers, or with impossible ones."""


def _system(name: str) -> str:
    if name not in SYSTEMS:
        raise ValueError("no such system")
    return name


def column(description: str, default: Any = None) -> Any:
    return Field(default, description=description)


ANY_CASE = BeforeValidator(str.lower)


class CsvRow(BaseModel, frozen=True, allow_inf_nan=False):
    """A line of the file. Its columns are the fields, and `--columns` shows their descriptions."""

    document: str = column(
        "short name of the source; constants are fitted leaving one out (default: the file's name)",
        "",
    )
    row: str = column("name of the row", "")
    family: Annotated[Literal["gpt2", "bert"], ANY_CASE] = column(
        "gpt2 (default) or bert", "gpt2"
    )
    task: Annotated[TaskName | None, ANY_CASE] = column(
        f"fine-tuning of a bert, whose head stands in place of those of pretraining: {', '.join(TASKS)}"
    )
    layers: Layers | None = column("transformer layers")
    hidden: Width | None = column("hidden size")
    heads: Width | None = column("attention heads (default: hidden / 128)")
    vocab_size: Vocabulary | None = column(
        "tokens of the vocabulary before padding (default: 50257, bert 30522)"
    )
    sequence_length: Tokens | None = column(
        "tokens per sample (default: 1024, bert 512)"
    )
    tp: Width = column("tensor-parallel degree (default: 1)", 1)
    pp: Width = column("pipeline stages (default: 1)", 1)
    dp: Width | None = column("data-parallel degree (default: gpus / (tp x pp))")
    interleave: Count = column(
        "model chunks per pipeline stage (default: 1, plain 1F1B)", 1
    )
    gpus: Count | None = column("of the whole run (default: tp x pp x dp)")
    micro_batch: Count | None = column(
        "samples per forward pass and replica (default: the one that the planner finds fastest)"
    )
    global_batch: Count | None = column(
        "samples per step (default: micro_batch x dp x gradient_accumulation)"
    )
    gradient_accumulation: Count | None = column(
        "micro-batches per step and replica (default: what global_batch asks)"
    )
    activation_checkpointing: Annotated[str, ANY_CASE, Field(pattern=RECOMPUTED)] = (
        column(
            "none, full (or yes), selective, or N layers per chunk (default: what fits)",
            "",
        )
    )
    sequence_parallel: bool = column("yes or no (default)", False)
    attention: Annotated[Literal["plain", "flash"] | None, ANY_CASE] = column(
        "plain keeps its scores, flash does not (default: the software's)"
    )
    precision: Annotated[Literal["fp16", "bf16", "fp32"], ANY_CASE] = column(
        "fp16 (default), bf16 or fp32", "fp16"
    )
    zero_stage: Annotated[int, Field(ge=0, le=3)] = column("0 (default) to 3", 0)
    offload: Annotated[str, ANY_CASE, Field(pattern=OFFLOADED)] = column(
        "none (default), or of optimizer, parameters, activations, joined by +: to the host",
        "none",
    )
    hardware: str = column(
        "node of the catalogue, FILE.yaml:NODE, or V100, A100 40GB, … for its usual node",
        "",
    )
    software: Annotated[str | None, ANY_CASE, AfterValidator(_system)] = column(
        f"{', '.join(SYSTEMS)} (default: megatron; for a task transformers, with ZeRO "
        "megatron-deepspeed); no year is guessed from the GPU"
    )
    time_per_iteration_s: NonNegativeFloat | None = column(
        "seconds per step, as published"
    )
    samples_per_s: NonNegativeFloat | None = column(
        "samples per second over all GPUs, as published"
    )
    tflops: NonNegativeFloat | None = column(
        "per GPU, as published; stands for the time where none is"
    )
    tflops_by: Annotated[TflopsRule, ANY_CASE] = column(
        "exact (default): every product; model: no recomputed ones; formula: 2 x parameters",
        "exact",
    )
    cached_gb: NonNegativeFloat | None = column(
        "memory of the fullest GPU that PyTorch cached (reserved), GiB"
    )
    allocated_gb: NonNegativeFloat | None = column(
        "of that, memory that PyTorch allocated at the most, GiB"
    )
    memory_by: Annotated[Literal["torch", "device"], ANY_CASE] = column(
        "torch (default); device: as nvidia-smi shows it, with CUDA's context", "torch"
    )
    status: Annotated[Literal["ok", "oom", "doubtful"], ANY_CASE] = column(
        "ok, OOM, or doubtful: shown and not compared", "ok"
    )
    source: str = column("where it is from", "")
    note: str = column("what else is known of it", "doubtful")

    def case(self, table: str) -> Case:
        """Make the case of the row. Raises ProblemsError, NotPredictable."""
        node = self.node()
        work = self.workload(node)
        gpus = work.layout.world
        if self.gpus not in (None, gpus):
            raise NotPredictable(f"{self.gpus} GPUs are not tp x pp x dp = {gpus}")
        seconds = self.seconds(work)
        oom = self.status == "oom"
        ended: bool | None = oom
        if oom:
            seconds = None
        elif not (seconds or self.cached_gb):
            ended = None  # the row does not say whether it ran
        excluded = {}
        if self.status == "doubtful":
            excluded = dict.fromkeys(QUANTITIES, self.note)
        return Case(
            self.document,
            table,
            self.row,
            node,
            work,
            seconds=seconds,
            cached=self.cached_gb and self.cached_gb * GIB,
            allocated=self.allocated_gb and self.allocated_gb * GIB,
            by_device=self.memory_by == "device",
            oom=ended,
            excluded=excluded,
            assumed=not self.software,
        )

    def seconds(self, work: Workload) -> float | None:
        """Return the seconds of a step as stated, or from a stated rate or TFLOPS."""
        if self.time_per_iteration_s:
            return self.time_per_iteration_s
        if self.samples_per_s:
            return work.layout.global_batch / self.samples_per_s
        return (
            seconds_of(work, self.tflops, work.layout.world, self.tflops_by)
            if self.tflops
            else None
        )

    def node(self) -> Node:
        """Return the node by its name in the catalogue, or the usual node of a named GPU."""
        written = self.hardware
        if written in names() or written.partition(":")[0].endswith((".yaml", ".yml")):
            return find(written)
        for words, name in USUAL_NODES.items():
            if re.search(words, written.lower()):
                return find(name)
        raise NotPredictable(f"hardware {written!r} is no known GPU or node")

    def workload(self, node: Node) -> Workload:
        """Make the workload; of what the row leaves open, the fastest choice that fits."""
        base = self.base(node)
        constants = initial_constants()
        if base.precision not in node.gpu.tflops:
            raise NotPredictable(f"{node.gpu.title} has no {base.precision}")

        def rank(work: Workload) -> tuple[bool, float]:
            need = rank_memory.fullest_rank(work, node.gpu, constants).least
            return need > node.gpu.memory_bytes, step_time(work, node, constants).total

        options = []
        for layout in self.layouts(base.layout):
            for recomputed, selective in self.recomputations():
                options.append(
                    replace(
                        base, layout=layout, recomputed=recomputed, selective=selective
                    )
                )
        return options[0] if len(options) == 1 else min(options, key=rank)

    def base(self, node: Node) -> Workload:
        """Make the workload of one micro-batch with one sample."""
        model = self.model()
        masked = FAMILIES[self.family].masked
        system = as_it_runs(self.system(), masked=masked)
        tp = self.tp
        pp = self.pp
        if model.heads % tp or model.layers < pp:
            sizes = f"{model.heads} heads and {model.layers} layers"
            raise NotPredictable(f"{sizes} cannot be cut by tp={tp}, pp={pp}")
        if self.attention:
            system = replace(system, keeps_scores=self.attention == "plain")
        dp = self.dp or max(1, (self.gpus or 1) // (tp * pp))
        away = self.offload.split("+")
        optimizer_at: Place = (
            "host" if self.zero_stage and "optimizer" in away else "gpu"
        )
        weights_at: Place = (
            "host" if self.zero_stage == 3 and "parameters" in away else "gpu"
        )
        checkpoints_at: Place = "host" if "activations" in away else "gpu"
        widths = FP32 if self.precision == "fp32" else MIXED
        buffered_stage = 0 if system.states else self.zero_stage
        return Workload(
            model=model,
            dropout=Dropout(hidden=0.1, attention=0.1),
            sequence_length=self.sequence_length or FAMILIES[model.family].length,
            predictions=None,
            padded_vocab=padded_vocab(model.vocab_size, tp),
            layout=Layout(tp, pp, dp, 1, 1, dp),
            precision=self.precision,
            recomputed=0,
            zero_stage=self.zero_stage,
            software=system,
            widths=widths,
            optimizer_at=optimizer_at,
            weights_at=weights_at,
            checkpoints_at=checkpoints_at,
            buffers=buffers_of(buffered_stage, {}),
            sequence_parallel=self.sequence_parallel,
            interleave=self.interleave,
        )

    def model(self) -> Model:
        """Make the shape of the model."""
        if not (self.layers and self.hidden):
            raise NotPredictable(
                f"{'hidden' if self.layers else 'layers'} is not stated"
            )
        facts = FAMILIES[self.family]
        task = dict[str, Any]()
        if self.task:
            if not facts.masked:
                raise NotPredictable(f"a {self.family} has no task {self.task}")
            task = {
                "task_head": TASKS[self.task].head,
                "head_classes": TASKS[self.task].classes,
            }
        return Model(
            family=self.family,
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads or max(1, self.hidden // 128),
            vocab_size=self.vocab_size or PUBLISHED_VOCABULARIES[facts.published],
            **task,
        )

    def layouts(self, base: Layout) -> list[Layout]:
        """Return the layout with the stated micro-batch, or one for each divisor of a replica's share."""
        micro = self.micro_batch
        accumulation = self.gradient_accumulation
        total = self.global_batch
        if not micro and not total:
            raise NotPredictable("neither micro_batch nor global_batch is stated")
        total = total or (micro or 1) * (accumulation or 1) * base.dp
        share = share_batch(micro, accumulation, total, base.dp, 1)
        if isinstance(share, Problem):
            raise NotPredictable(str(replace(share, fix="")))
        per_rank = share[0] * share[1]
        sizes = [size for size in divisors(per_rank) if size <= MOST_MICRO]
        if micro or accumulation:
            sizes = [share[0]]
        found = []
        for size in sizes:
            accumulated = per_rank // size
            found.append(
                replace(base, micro=size, accumulation=accumulated, global_batch=total)
            )
        return found

    def recomputations(self) -> list[tuple[int, bool]]:
        """Return (layers per chunk, scores only) as stated, or all choices of the planner."""
        written = self.activation_checkpointing
        if not written:
            return [(0, False), (1, False)]
        if written.isdigit():
            return [(int(written), False)]
        return [(int(written in ("full", "yes")), written == "selective")]

    def system(self) -> str:
        """Return the stated system, or the usual one for the task and the ZeRO stage."""
        if self.software or self.task:
            return self.software or "transformers"
        return "megatron-deepspeed" if self.zero_stage else "megatron"


COLUMNS = {name: field.description or "" for name, field in CsvRow.model_fields.items()}


def published_cases() -> list[Case]:
    """Return the rows of recipes/ and of other documents."""
    return [*of_published_tables(), *read(OTHER_DOCUMENTS)]


def read(path: Path) -> list[Case]:
    """Read every row of a CSV file. Raises ProblemsError with the number of every unreadable line."""
    lines = csv.DictReader(StringIO(files.read_text(path)))
    columns = {name: name.strip().lower() for name in lines.fieldnames or ()}
    problems = list(_problems_of_columns(path, columns.values()))
    if problems:
        raise ProblemsError(problems)
    cases = []
    for number, texts in enumerate(lines, 2):
        cells = {"document": path.stem, "row": f"line {number}"}
        cells |= {
            column: text
            for name, column in columns.items()
            if (text := (texts[name] or "").strip())
        }
        try:
            cases.append(CsvRow.model_validate(cells).case(path.stem))
        except NotPredictable as why:
            excluded = dict.fromkeys(QUANTITIES, str(why))
            cases.append(
                Case(
                    cells["document"],
                    path.stem,
                    cells["row"],
                    None,
                    None,
                    excluded=excluded,
                )
            )
        except ValidationError as error:
            for wrong in error.errors():
                key = str(wrong["loc"][0])
                came = (
                    f"{path.name}, line {number}, {key}: {cells[key]}: {wrong['msg']}"
                )
                problems.append(
                    Problem("--table", came, COLUMNS[key], "correct the cell")
                )
        except ProblemsError as error:
            problems += error.problems
    if problems:
        raise ProblemsError(problems)
    return cases


def _problems_of_columns(path: Path, columns: Collection[str]) -> Iterator[Problem]:
    known = f"the columns are {', '.join(COLUMNS)}"
    unknown = sorted({*columns} - COLUMNS.keys())
    if unknown:
        fix = "rename or remove it; tools/fit_planner.py --columns says what each is"
        came = f"{path}: unknown column {', '.join(map(repr, unknown))}"
        yield Problem("--table", came, known, fix)
    missing = sorted({"layers", "hidden", "hardware"} - {*columns})
    if missing:
        yield Problem(
            "--table", f"{path}: no column {', '.join(missing)}", known, "add it"
        )
