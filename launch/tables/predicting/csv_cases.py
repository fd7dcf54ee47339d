"""Rows that a user gives as CSV: which columns there are, and what becomes of them.

Column names are those of `other_documents.csv` next to this file; some have a second spelling. A cell that
is empty states nothing.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from launch.planning import hardware, rank_memory
from launch.planning.constants import fitted
from launch.planning.software import SYSTEMS
from launch.planning.step_time import step_time
from launch.planning.workload import Buffers, Workload, usual_buffers
from launch.tables.predicting.cases import Case, seconds_of
from modeling.cost import Widths
from recipes import files
from recipes.layout import Layout, divisors, padded_vocab
from recipes.problems import Problem, ProblemsError
from recipes.schema import Dropout, Model

OURS = Path(__file__).with_name("other_documents.csv")
COLUMNS = {
    "document": "short name of the source; constants are fitted leaving one out (default: the file's name)",
    "row": "name of the row",
    "family": "gpt2 (default) or bert",
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
    "activation_checkpointing": "none, full, selective or N layers per chunk (default: none); yes is full",
    "sequence_parallel": "yes or no (default)",
    "attention": "plain keeps its scores, flash does not (default: the software's)",
    "precision": "fp16 (default), bf16 or fp32",
    "zero_stage": "0 (default) to 3",
    "offload": "none (default), optimizer, optimizer+parameters",
    "hardware": "node of the catalogue, or FILE.yaml:NODE",
    "software": f"{', '.join(SYSTEMS)} (default: megatron; deepspeed is megatron-deepspeed)",
    "time_per_iteration_s": "seconds per step, as published",
    "samples_per_s": "samples per second over all GPUs, as published",
    "tflops": "per GPU, as published; stands for the time where none is",
    "tflops_by": "exact (default): every product; model: no recomputed ones; formula: 2 x parameters",
    "cached_gb": "memory of the fullest GPU that PyTorch cached, GiB",
    "memory_by": "torch (default); device: as nvidia-smi shows it, with CUDA's context",
    "status": "ok, OOM, or doubtful: shown and not compared",
    "source": "where it is from",
    "note": "what else is known of it",
}
SPELLINGS = {
    "row_id": "row", "seq_len": "sequence_length", "model": "row", "memory_gb": "cached_gb",
    "time": "time_per_iteration_s",
    "num_gpus": "gpus", "name": "row", "framework": "",
}  # fmt: skip
SOFTWARE = {"deepspeed": "megatron-deepspeed", "pytorch": "fsdp", "megatron-lm": "megatron"}
YES, NO = ("yes", "true", "1"), ("no", "false", "0", "")
OFFLOADS = ("optimizer", "optimizer+parameters")
MOST_MICRO = 16  # samples that are tried where a row states no micro-batch


def read(path: Path) -> list[Case]:
    """Every row of a CSV file. Raises ProblemsError: every line that cannot be read, with its number."""
    lines = csv.DictReader(StringIO(files.read_text(path)))
    named = {
        name: SPELLINGS.get(name.strip().lower(), name.strip().lower()) for name in lines.fieldnames or ()
    }
    if missing := {"layers", "hidden", "hardware"} - set(named.values()):
        known = ", ".join(COLUMNS)
        rule = f"a table of rows has at least layers, hidden and hardware, of the columns {known}"
        raise ProblemsError(
            [Problem("--table", f"{path}: no column {', '.join(sorted(missing))}", rule, "add it")]
        )
    cases, problems = list[Case](), list[Problem]()
    for line, cells in enumerate(lines, 2):
        values = {}
        for name, cell in cells.items():
            key = named.get(name or "", "")
            if key in COLUMNS and (cell or "").strip() and key not in values:
                values[key] = cell.strip()
        try:
            cases.append(_Line(path, line, values).case())
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

    def case(self) -> Case:
        """Raises ProblemsError."""
        cells, name = self.cells, self.cells.get("row", f"line {self.number}")
        node = (
            hardware.find(self.cells["hardware"])
            if "hardware" in cells
            else self.refuse("hardware", "is empty")
        )
        work = self.workload(node)
        gpus = self.whole("gpus") or work.layout.world
        seconds = self.real("time_per_iteration_s")
        if not seconds and (rate := self.real("samples_per_s")):
            seconds = work.layout.global_batch / rate
        if not seconds and (tflops := self.real("tflops")):
            counted = self.choice("tflops_by", ("exact", "model", "formula"), "exact")
            seconds = seconds_of(work, tflops, gpus, counted)
        status = self.choice("status", ("ok", "oom", "doubtful"), "ok")
        cached, oom, doubtful = self.real("cached_gb"), status == "oom", status == "doubtful"
        document = cells.get("document", self.path.stem)
        return Case(
            document=document, table=document, name=name,
            node=node, work=work, seconds=None if oom else seconds, cached=cached and cached * hardware.GIB,
            by_device=self.choice("memory_by", ("torch", "device"), "torch") == "device",
            oom=oom if oom or seconds or cached else None,
            excluded=dict.fromkeys(("time", "memory"), cells.get("note", "doubtful")) if doubtful else None,
        )  # fmt: skip

    def workload(self, node: hardware.Node) -> Workload:
        """The step; a micro-batch that is not stated is the fastest that fits."""
        family = self.choice("family", ("gpt2", "bert"), "gpt2")
        hidden, length = (
            self.needed("hidden"),
            self.whole("sequence_length") or (512 if family == "bert" else 1024),
        )
        tp, pp = self.whole("tp") or 1, self.whole("pp") or 1
        dp = self.whole("dp") or max(1, (self.whole("gpus") or tp * pp) // (tp * pp))
        vocab = self.whole("vocab_size") or (30522 if family == "bert" else 50257)
        system = SYSTEMS[self.software()]
        if kernel := self.cells.get("attention"):
            system = replace(
                system, keeps_scores=self.choice("attention", ("plain", "flash"), kernel) == "plain"
            )
        recomputed, selective = self.recomputation()
        offload = self.choice("offload", ("none", *OFFLOADS), "none")
        stage, precision = (
            self.whole("zero_stage") or 0,
            self.choice("precision", ("fp32", "bf16", "fp16"), "fp16"),
        )
        try:
            model = Model(
                family=family, layers=self.needed("layers"), hidden=hidden, vocab_size=vocab,
                heads=self.whole("heads") or max(1, hidden // 128),
            )  # fmt: skip
        except ValidationError as error:
            self.refuse("layers", error.errors()[0]["msg"])
        if hidden % tp:
            self.refuse("tp", "does not divide hidden")

        def with_micro(micro: int, accumulation: int) -> Workload:
            return Workload(
                model=model, dropout=Dropout(hidden=0.1, attention=0.1), sequence_length=length,
                predictions=None,
                padded_vocab=padded_vocab(vocab, tp),
                layout=Layout(tp, pp, dp, micro, accumulation, micro * accumulation * dp),
                precision=precision, recomputed=recomputed, selective=selective, zero_stage=stage,
                software=system,
                widths=Widths() if precision != "fp32" else Widths(weight=4, gradient=4),
                optimizer_at="host" if stage and offload in OFFLOADS else "gpu",
                weights_at="host" if stage == 3 and offload == OFFLOADS[1] else "gpu",
                buffers=usual_buffers(stage) if not system.states else Buffers(),
                sequence_parallel=self.switch("sequence_parallel"), interleave=self.whole("interleave") or 1,
            )  # fmt: skip

        micro, accumulation = self.whole("micro_batch"), self.whole("gradient_accumulation")
        total = self.whole("global_batch")
        if micro:
            share = accumulation or (max(1, round(total / (micro * dp))) if total else 1)
            return with_micro(micro, share)
        total = total or self.refuse("micro_batch", "neither micro_batch nor global_batch is given")
        per_rank = max(1, total // dp)
        options = (with_micro(size, per_rank // size) for size in divisors(per_rank) if size <= MOST_MICRO)
        constants, room = fitted(), node.gpu.memory_bytes
        ranked = [(rank_memory.fullest(work, node.gpu, constants).total > room,
                   step_time(work, node, constants).total, work)
                  for work in options]  # fmt: skip
        return min(ranked, key=lambda option: option[:2])[2]

    def recomputation(self) -> tuple[int, bool]:
        """(layers per chunk, whether attention's scores alone)."""
        written = self.cells.get("activation_checkpointing", "none").lower()
        if written == "selective":
            return 0, True
        if written.isdigit() and written != "0":
            return int(written), False
        chosen = self.choice("activation_checkpointing", ("none", "full", *YES, *NO), written)
        return int(chosen in ("full", *YES)), False

    def software(self) -> str:
        written = self.cells.get("software", "megatron").lower()
        return self.choice("software", tuple(SYSTEMS), SOFTWARE.get(written, written))

    def switch(self, key: str) -> bool:
        return self.choice(key, (*YES, *NO), self.cells.get(key, "").lower()) in YES

    def choice(self, key: str, options: tuple[str, ...], default: str) -> Any:
        written = default if key in ("software", "attention") else self.cells.get(key, default).lower()
        written = default if key in ("activation_checkpointing", "sequence_parallel") else written
        return (
            written if written in options else self.refuse(key, f"{written} is none of {', '.join(options)}")
        )

    def whole(self, key: str) -> int | None:
        return self._number(key, lambda text: int(float(text)))

    def real(self, key: str) -> float | None:
        return self._number(key, float)

    def needed(self, key: str) -> int:
        return self.whole(key) or self.refuse(key, "is empty")

    def _number(self, key: str, read: Callable[[str], Any]) -> Any:
        if key not in self.cells:
            return None
        try:
            value = read(self.cells[key].replace(",", ""))
        except ValueError:
            value = -1
        return value if 0 <= value < 1e15 else self.refuse(key, f"{self.cells[key]} is no number from 0")

    def refuse(self, key: str, why: str) -> Any:
        came = f"{self.path.name}, line {self.number}, {key}: {why}"
        raise ProblemsError([Problem("--table", came, COLUMNS[key], "correct the cell")])
