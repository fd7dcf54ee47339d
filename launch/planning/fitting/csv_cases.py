"""Published rows from CSV files, ours or a user's: columns, defaults, refusals.

Column names are those of `other_documents.csv` next to this file; some have a second spelling. A cell that
is empty states nothing.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

from launch.planning.fitting.cases import QUANTITIES, Case, of_published_tables
from launch.planning.fitting.fitting import initial_constants
from launch.planning.prediction import hardware, rank_memory
from launch.planning.prediction.published_step import seconds_of
from launch.planning.prediction.software import SYSTEMS
from launch.planning.prediction.step_time import step_time
from launch.planning.prediction.workload import Buffers, Workload, usual_buffers
from modeling.cost import FP32, MIXED
from recipes import files
from recipes.families import FAMILIES, PUBLISHED_VOCABULARIES
from recipes.layout import Layout, divisors, padded_vocab
from recipes.problems import Problem, ProblemsError
from recipes.schema import Dropout, Model
from recipes.tasks import TASKS

OTHER_DOCUMENTS = Path(__file__).with_name("other_documents.csv")
COLUMNS = {
    "document": "short name of the source; constants are fitted leaving one out (default: the file's name)",
    "row": "name of the row",
    "family": "gpt2 (default) or bert",
    "task": f"fine-tuning of a bert, whose head stands in place of those of pretraining: {', '.join(TASKS)}",
    "layers": "transformer layers",
    "hidden": "hidden size",
    "heads": "attention heads (default: hidden / 128)",
    "vocab_size": "tokens of the vocabulary before padding (default: 50257, bert 30522)",
    "sequence_length": "tokens per sample (default: 1024, bert 512)",
    "tp": "tensor-parallel degree (default: 1)",
    "pp": "pipeline stages (default: 1)",
    "dp": "data-parallel degree (default: gpus / (tp x pp))",
    "interleave": "model chunks per pipeline stage (default: 1, plain 1F1B)",
    "gpus": "of the whole run (default: tp x pp x dp)",
    "micro_batch": "samples per forward pass and replica (default: the one that the planner finds fastest)",
    "global_batch": "samples per step (default: micro_batch x dp x gradient_accumulation)",
    "gradient_accumulation": "micro-batches per step and replica (default: what global_batch asks)",
    "activation_checkpointing": "none, full (or yes), selective, or N layers per chunk (default: what fits)",
    "sequence_parallel": "yes or no (default)",
    "attention": "plain keeps its scores, flash does not (default: the software's)",
    "precision": "fp16 (default), bf16 or fp32",
    "zero_stage": "0 (default) to 3",
    "offload": "none (default), or of optimizer, parameters, activations, joined by +: to the host",
    "hardware": "node of the catalogue, FILE.yaml:NODE, or V100, A100 40GB, … for its usual node",
    "software": f"{', '.join(SYSTEMS)} (default: megatron; for a task "
    "transformers, with ZeRO megatron-deepspeed, on H100 megatron-core, on V100 without a pipeline "
    "megatron-2019)",
    "time_per_iteration_s": "seconds per step, as published",
    "samples_per_s": "samples per second over all GPUs, as published",
    "tflops": "per GPU, as published; stands for the time where none is",
    "tflops_by": "exact (default): every product; model: no recomputed ones; formula: 2 x parameters",
    "cached_gb": "memory of the fullest GPU that PyTorch cached (reserved), GiB",
    "allocated_gb": "of that, memory that PyTorch allocated at the most, GiB",
    "memory_by": "torch (default); device: as nvidia-smi shows it, with CUDA's context",
    "status": "ok, OOM, or doubtful: shown and not compared",
    "source": "where it is from",
    "note": "what else is known of it",
}
SPELLINGS = {  # column -> its other names
    "row": "row_id model name",
    "layers": "num_layers",
    "hidden": "hidden_size",
    "heads": "num_heads attention_heads",
    "vocab_size": "vocab",
    "sequence_length": "seq_len seq",
    "tp": "tensor_parallel",
    "pp": "pipeline_parallel",
    "dp": "data_parallel",
    "interleave": "virtual_stages",
    "gpus": "num_gpus",
    "micro_batch": "mbs micro_batch_size",
    "global_batch": "gbs global_batch_size batch",
    "activation_checkpointing": "checkpointing recompute",
    "zero_stage": "zero",
    "cached_gb": "memory_gb",
    "time_per_iteration_s": "time time_s",
}
COLUMN_OF = {name: column for column, names in SPELLINGS.items() for name in (column, *names.split())}
# What stands in the place of a node's name -> the usual node of such, the first that is found.
USUAL_NODES = {
    "dgx-?2": "dgx2",
    "jean ?zay.*16": "v100-16x4",
    "jean ?zay.*v100": "v100-32x4",
    "v100[^0-9]*16": "v100-16x4",
    "v100": "v100-32x8",
    r"\ba100\b[^0-9]*40": "a100-40x8",
    r"\ba100\b": "a100-80x8",
    r"\bh100\b(?!.*(nvl|pcie))": "h100-80x8",
    r"\bh200\b(?!.*(nvl|pcie))": "h200x8",
}
SOFTWARE = {"deepspeed": "megatron-deepspeed", "pytorch": "fsdp", "megatron-lm": "megatron"}
YES, NO = ("yes", "true", "1"), ("no", "false", "0")
CHOICES = {  # of a column, the default first
    "family": tuple(FAMILIES),
    "task": ("", *TASKS),
    "attention": ("plain", "flash"),
    "precision": ("fp16", "bf16", "fp32"),
    "sequence_parallel": (*NO, *YES),
    "activation_checkpointing": ("none", "full", "selective", *YES, *NO),
    "tflops_by": ("exact", "model", "formula"),
    "memory_by": ("torch", "device"),
    "status": ("ok", "oom", "doubtful"),
}
OFFLOADED = {"optimizer", "parameters", "activations"}
MOST_MICRO = 16  # samples that are tried where a row states no micro-batch


class NotPredictable(Exception):
    """A row with too few numbers, or with impossible ones."""


def published_cases() -> list[Case]:
    """Return the rows of recipes/ and of other documents."""
    return [*of_published_tables(), *read(OTHER_DOCUMENTS)]


def read(path: Path) -> list[Case]:
    """Read every row of a CSV file. Raises ProblemsError with the number of every unreadable line."""
    lines = csv.DictReader(StringIO(files.read_text(path)))
    plain = {name: name.strip().lower() for name in lines.fieldnames or ()}
    columns = {name: COLUMN_OF.get(written, written) for name, written in plain.items()}
    if unknown := [name for name, column in columns.items() if column not in COLUMNS]:
        came = f"{path}: unknown column {', '.join(map(repr, unknown))}"
        known = f"the columns are {', '.join(COLUMNS)}, of some also other spellings"
        fix = "rename or remove it; plan.py validate --columns says what each is"
        raise ProblemsError([Problem("--table", came, known, fix)])
    if missing := {"layers", "hidden", "hardware"} - set(columns.values()):
        came = f"{path}: no column {', '.join(sorted(missing))}"
        rule = (
            f"a table of rows has at least layers, hidden and hardware, of the columns {', '.join(COLUMNS)}"
        )
        raise ProblemsError([Problem("--table", came, rule, "add it")])
    cases, problems = list[Case](), list[Problem]()
    for number, texts in enumerate(lines, 2):
        cells: dict[str, str] = {}
        for name, column in columns.items():
            if text := (texts[name] or "").strip():
                cells.setdefault(column, text)
        line = _Line(path, number, cells)
        try:
            cases.append(line.case())
        except NotPredictable as why:
            excluded = dict.fromkeys(QUANTITIES, str(why))
            cases.append(Case(*line.place, None, None, excluded=excluded))
        except ProblemsError as error:
            problems += error.problems
    if problems:
        raise ProblemsError(problems)
    return cases


@dataclass(frozen=True)
class _Line:
    """A line of the file."""

    path: Path
    number: int
    cells: Mapping[str, str]

    @property
    def place(self) -> tuple[str, str, str]:
        """Document, table and row."""
        document = self.cells.get("document", self.path.stem)
        return document, self.path.stem, self.cells.get("row", f"line {self.number}")

    def case(self) -> Case:
        """Make the case of the line. Raises ProblemsError, NotPredictable."""
        node = self.node()
        work = self.workload(node)
        gpus = work.layout.world
        if (stated := self.whole("gpus")) and stated != gpus:
            raise NotPredictable(f"{stated} GPUs are not tp x pp x dp = {gpus}")
        seconds, cached, status = self.seconds(work), self.real("cached_gb"), self.choice("status")
        allocated = self.real("allocated_gb")
        excluded = {}
        if status == "doubtful":
            excluded = dict.fromkeys(QUANTITIES, self.cells.get("note", "doubtful"))
        return Case(
            *self.place,
            node,
            work,
            seconds=None if status == "oom" else seconds,
            cached=cached and cached * hardware.GIB,
            allocated=allocated and allocated * hardware.GIB,
            by_device=self.choice("memory_by") == "device",
            oom=status == "oom" if status == "oom" or seconds or cached else None,
            excluded=excluded,
        )

    def seconds(self, work: Workload) -> float | None:
        """Return the seconds of a step as stated, or from a stated rate or TFLOPS."""
        if seconds := self.real("time_per_iteration_s"):
            return seconds
        if rate := self.real("samples_per_s"):
            return work.layout.global_batch / rate
        tflops = self.real("tflops")
        return seconds_of(work, tflops, work.layout.world, self.choice("tflops_by")) if tflops else None

    def node(self) -> hardware.Node:
        """Return the node by its name in the catalogue, or the usual node of a named GPU."""
        written = self.cells.get("hardware", "")
        if written in hardware.names() or written.partition(":")[0].endswith((".yaml", ".yml")):
            return hardware.find(written)
        named = (node for words, node in USUAL_NODES.items() if re.search(words, written.lower()))
        if (node := next(named, None)) is None:
            raise NotPredictable(f"hardware {written!r} is no known GPU or node")
        return hardware.find(node)

    def workload(self, node: hardware.Node) -> Workload:
        """Make the workload; of open micro-batches and recomputations take the fastest that fits.

        They are compared by the first constants of a fit: fitted ones may have seen the row.
        """
        base, constants = self.base(), initial_constants()
        if base.precision not in node.gpu.tflops:
            raise NotPredictable(f"{node.gpu.title} has no {base.precision}")

        def rank(work: Workload) -> tuple[bool, float]:
            need = rank_memory.fullest_rank(work, node.gpu, constants).least
            return need > node.gpu.memory_bytes, step_time(work, node, constants).total

        options = [
            replace(base, layout=layout, recomputed=recomputed, selective=selective)
            for layout in self.layouts(base.layout)
            for recomputed, selective in self.recomputations()
        ]
        return options[0] if len(options) == 1 else min(options, key=rank)

    def base(self) -> Workload:
        """Make the workload of one micro-batch with one sample."""
        model, system = self.model(), SYSTEMS[self.software()]
        tp, pp, stage = (self.whole(key) or least for key, least in (("tp", 1), ("pp", 1), ("zero_stage", 0)))
        dp = self.whole("dp") or max(1, (self.whole("gpus") or tp * pp) // (tp * pp))
        if "attention" in self.cells:
            system = replace(system, keeps_scores=self.choice("attention") == "plain")
        away = {*self.cells.get("offload", "none").lower().split("+")} - {"none"}
        if away - OFFLOADED:
            self.refuse("offload", f"{'+'.join(sorted(away - OFFLOADED))} cannot be offloaded")
        if stage > 3:
            self.refuse("zero_stage", "ZeRO has the stages 0 to 3")
        if model.heads % tp or model.layers < pp:
            sizes = f"{model.heads} heads and {model.layers} layers"
            raise NotPredictable(f"{sizes} cannot be cut by tp={tp}, pp={pp}")
        precision = self.choice("precision")
        return Workload(
            model=model,
            dropout=Dropout(hidden=0.1, attention=0.1),
            sequence_length=self.whole("sequence_length") or FAMILIES[model.family].length,
            predictions=None,
            padded_vocab=padded_vocab(model.vocab_size, tp),
            layout=Layout(tp, pp, dp, 1, 1, dp),
            precision=precision,
            recomputed=0,
            zero_stage=stage,
            software=system,
            widths=FP32 if precision == "fp32" else MIXED,
            optimizer_at="host" if stage and "optimizer" in away else "gpu",
            weights_at="host" if stage == 3 and "parameters" in away else "gpu",
            checkpoints_at="host" if "activations" in away else "gpu",
            buffers=Buffers() if system.states else usual_buffers(stage),
            sequence_parallel=self.choice("sequence_parallel") in YES,
            interleave=self.whole("interleave") or 1,
        )

    def model(self) -> Model:
        """Make the shape of the model."""
        family, hidden, layers = self.choice("family"), self.required("hidden"), self.required("layers")
        vocab = self.whole("vocab_size") or PUBLISHED_VOCABULARIES[FAMILIES[family].published]
        heads = self.whole("heads") or max(1, hidden // 128)
        task: dict[str, Any] = {}
        if name := self.choice("task"):
            if not FAMILIES[family].masked:
                self.refuse("task", f"{name} with family {family}")
            task = {"task_head": TASKS[name].head, "head_classes": TASKS[name].classes}
        try:
            return Model(family=family, layers=layers, hidden=hidden, heads=heads, vocab_size=vocab, **task)
        except ValidationError as error:
            self.refuse("layers", error.errors()[0]["msg"])

    def layouts(self, base: Layout) -> list[Layout]:
        """Return the layout with the stated micro-batch, or one for each divisor of a replica's share."""
        micro, accumulation = self.whole("micro_batch"), self.whole("gradient_accumulation")
        stated, total = (micro or 1) * (accumulation or 1), self.whole("global_batch")
        if not micro and not total:
            raise NotPredictable("neither micro_batch nor global_batch is stated")
        if total and total % base.dp:
            raise NotPredictable(f"global_batch {total} is not divisible by dp={base.dp}")
        per_rank = total // base.dp if total else stated
        if per_rank % stated or (micro and accumulation and stated != per_rank):
            shares = f"micro_batch {micro or 'open'} x accumulation {accumulation or 'open'} x dp {base.dp}"
            raise NotPredictable(f"global_batch {total} is not {shares}")
        sizes = [size for size in divisors(per_rank) if size <= MOST_MICRO]
        if micro or accumulation:
            sizes = [micro or per_rank // (accumulation or 1)]
        return [
            replace(base, micro=size, accumulation=per_rank // size, global_batch=per_rank * base.dp)
            for size in sizes
        ]

    def recomputations(self) -> list[tuple[int, bool]]:
        """Return (layers per chunk, scores only) as stated, or all choices of the planner."""
        written = self.cells.get("activation_checkpointing", "")
        if not written:
            return [(0, False), (1, False)]
        if written.isdigit() and written != "0":
            return [(int(written), False)]
        chosen = self.choice("activation_checkpointing")
        return [(int(chosen in ("full", *YES)), chosen == "selective")]

    def software(self) -> str:
        """Return the stated system, or the usual one for ZeRO stage, GPU and pipeline."""
        if written := self.cells.get("software", "").lower():
            if (named := SOFTWARE.get(written, written)) not in SYSTEMS:
                self.refuse("software", f"{written} is none of these")
            return named
        # GPU and pipeline tell the years: Megatron-LM had no pipeline before 2021.
        gpu = self.node().gpu.compute_capability or ""
        if self.choice("task"):
            return "transformers"
        if self.whole("zero_stage"):
            return "megatron-deepspeed"
        if gpu.startswith("7") and (self.whole("pp") or 1) == 1:
            return "megatron-2019"
        return "megatron-core" if gpu.startswith("9") else "megatron"

    def choice(self, key: str) -> Any:
        """Return the choice of a cell of `CHOICES`."""
        options = CHOICES[key]
        written = self.cells.get(key, options[0]).lower()
        if written not in options:
            self.refuse(key, f"{written} is none of {', '.join(options)}")
        return written

    def whole(self, key: str) -> int | None:
        """Return a whole number; None for an empty cell."""
        number = self.real(key)
        if number is not None and number % 1:
            self.refuse(key, f"{self.cells[key]} is no whole number from 0")
        return None if number is None else int(number)

    def required(self, key: str) -> int:
        if value := self.whole(key):
            return value
        raise NotPredictable(f"{key} is not stated")

    def real(self, key: str) -> float | None:
        """Return a number; None for an empty cell."""
        if key not in self.cells:
            return None
        try:
            value = float(self.cells[key].replace(",", ""))
        except ValueError:
            value = -1
        if not 0 <= value < 1e15:
            self.refuse(key, f"{self.cells[key]} is no number from 0")
        return value

    def refuse(self, key: str, why: str) -> NoReturn:
        came = f"{self.path.name}, line {self.number}, {key}: {why}"
        raise ProblemsError([Problem("--table", came, COLUMNS[key], "correct the cell")])
