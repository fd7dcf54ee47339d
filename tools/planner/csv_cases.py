"""Published rows of `other_documents.csv`: columns, defaults, refusals. A cell that is empty states nothing."""

from __future__ import annotations

import csv
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, NonNegativeFloat, TypeAdapter

from launch.planning.prediction import rank_memory
from launch.planning.prediction.hardware import GIB, Node, find
from launch.planning.prediction.published_step import TflopsRule, seconds_of
from launch.planning.prediction.software import as_it_runs
from launch.planning.prediction.step_time import step_time
from launch.planning.prediction.workload import Workload, buffers_of
from modeling.cost import FP32, MIXED
from recipes import files
from recipes.families import FAMILIES
from recipes.layout import Layout, divisors, padded_vocab, share_batch
from recipes.problems import Problem
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
from tools.planner.cases import QUANTITIES, Case
from tools.planner.fitting import initial_constants

OTHER_DOCUMENTS = Path(__file__).with_name("other_documents.csv")
RECOMPUTED = "^(none|full|selective|[1-9][0-9]*)$"
MOST_MICRO = 16  # samples that are tried where a row states no micro-batch
SHAPE = {"family", "layers", "hidden", "heads", "vocab_size"}  # of `Model`, too


class CsvRow(BaseModel, frozen=True, allow_inf_nan=False, extra="forbid"):
    """A line of the file; its columns are the fields."""

    # short name of the source; constants are fitted leaving one out
    document: str
    row: str
    family: Literal["gpt2", "bert"] = "gpt2"
    # fine-tuning of a bert, whose head stands in place of those of pretraining
    task: TaskName | None = None
    layers: Layers
    hidden: Width
    heads: Width
    # tokens of the vocabulary before padding
    vocab_size: Vocabulary
    sequence_length: Tokens
    tp: Width = 1
    pp: Width = 1
    dp: Width = 1
    # model chunks per pipeline stage; 1: plain 1F1B
    interleave: Count = 1
    # of the whole run
    gpus: Count
    # samples per forward pass and replica (default: the one that the planner finds fastest)
    micro_batch: Count | None = None
    global_batch: Count
    # none, full, selective, or N layers per chunk (default: what fits)
    activation_checkpointing: Annotated[str, Field(pattern=RECOMPUTED)] = ""
    sequence_parallel: bool = False
    # plain keeps its scores, flash does not (default: the software's)
    attention: Literal["plain", "flash"] | None = None
    precision: Literal["fp16", "bf16", "fp32"] = "fp16"
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 0
    offload: Literal["none"] = "none"
    # node of the planner's catalogue
    hardware: str
    # of software.yaml; no year is guessed from the GPU
    software: str
    time_per_iteration_s: NonNegativeFloat | None = None
    # per GPU; stands for the time where none is
    tflops: NonNegativeFloat | None = None
    # exact: every product; model: no recomputed ones; formula: 2 x parameters
    tflops_by: TflopsRule = "exact"
    # memory of the fullest GPU that PyTorch cached (reserved), GiB
    cached_gb: NonNegativeFloat | None = None
    # of that, memory that PyTorch allocated at the most, GiB
    allocated_gb: NonNegativeFloat | None = None
    # device: as nvidia-smi shows it, with CUDA's context
    memory_by: Literal["torch", "device"] = "torch"
    # doubtful: shown and not compared
    status: Literal["ok", "oom", "doubtful"] = "ok"
    source: str
    # what else is known of it
    note: str = "doubtful"

    def case(self) -> Case:
        """Make the case of the row. Raises ProblemsError."""
        node = find(self.hardware)
        work = self.workload(node)
        oom = self.status == "oom"
        seconds = self.time_per_iteration_s
        if oom:
            seconds = None
        elif not seconds and self.tflops:
            seconds = seconds_of(work, self.tflops, self.gpus, self.tflops_by)
        doubtful = QUANTITIES if self.status == "doubtful" else ()
        return Case(
            self.document,
            OTHER_DOCUMENTS.stem,
            self.row,
            node,
            work,
            seconds=seconds,
            cached=self.cached_gb and self.cached_gb * GIB,
            allocated=self.allocated_gb and self.allocated_gb * GIB,
            by_device=self.memory_by == "device",
            # None: the row does not say whether it ran
            oom=oom if oom or seconds or self.cached_gb else None,
            excluded=dict.fromkeys(doubtful, self.note),
        )

    def workload(self, node: Node) -> Workload:
        """Make the workload; of what the row leaves open, the fastest choice that fits."""
        base = self.base()
        constants = initial_constants()

        def rank(work: Workload) -> tuple[bool, float]:
            need = rank_memory.fullest_rank(work, node.gpu, constants).least
            return need > node.gpu.memory_bytes, step_time(work, node, constants).total

        options = []
        for layout in self.layouts():
            for recomputed, selective in self.recomputations():
                work = replace(base, layout=layout, recomputed=recomputed)
                options.append(replace(work, selective=selective))
        return options[0] if len(options) == 1 else min(options, key=rank)

    def base(self) -> Workload:
        """Make the workload of one micro-batch with one sample."""
        system = as_it_runs(self.software, masked=FAMILIES[self.family].masked)
        if self.attention:
            system = replace(system, keeps_scores=self.attention == "plain")
        shape = self.model_dump(include=SHAPE)
        if self.task:
            head = TASKS[self.task]
            shape |= {"task_head": head.head, "head_classes": head.classes}
        return Workload(
            model=Model(**shape),
            dropout=Dropout(hidden=0.1, attention=0.1),
            sequence_length=self.sequence_length,
            predictions=None,
            padded_vocab=padded_vocab(self.vocab_size, self.tp),
            layout=Layout(self.tp, self.pp, self.dp, 1, 1, self.dp),
            precision=self.precision,
            recomputed=0,
            zero_stage=self.zero_stage,
            software=system,
            widths=FP32 if self.precision == "fp32" else MIXED,
            buffers=buffers_of(0 if system.states else self.zero_stage, {}),
            sequence_parallel=self.sequence_parallel,
            interleave=self.interleave,
        )

    def layouts(self) -> list[Layout]:
        """Return the layout with the stated micro-batch, or one for each divisor of a replica's share."""
        tp, pp, dp = self.tp, self.pp, self.dp
        share = share_batch(self.micro_batch, None, self.global_batch, dp, 1)
        if isinstance(share, Problem) or tp * pp * dp != self.gpus:
            came = f"{self.document}, {self.row}: {share}, {self.gpus} GPUs"
            files.refuse(OTHER_DOCUMENTS, came, "tp x pp x dp are the GPUs")
        per_rank = share[0] * share[1]
        sizes = [size for size in divisors(per_rank) if size <= MOST_MICRO]
        if self.micro_batch:
            sizes = [self.micro_batch]
        whole = self.global_batch
        return [Layout(tp, pp, dp, size, per_rank // size, whole) for size in sizes]

    def recomputations(self) -> list[tuple[int, bool]]:
        """Return (layers per chunk, scores only) as stated, or all choices of the planner."""
        written = self.activation_checkpointing
        if not written:
            return [(0, False), (1, False)]
        if written.isdigit():
            return [(int(written), False)]
        return [(int(written == "full"), written == "selective")]


def read(path: Path = OTHER_DOCUMENTS) -> list[Case]:
    """Read every row of the CSV file. Raises FileError with the number of the first unreadable line."""
    form = TypeAdapter(CsvRow)
    cases = []
    for number, texts in enumerate(csv.DictReader(StringIO(files.read_text(path))), 2):
        cells = {column: text for column, text in texts.items() if text}
        cases.append(files.checked(form, cells, path, number).case())
    return cases
