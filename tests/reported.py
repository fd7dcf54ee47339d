"""Run directories and tables for the tests of reports, and what is read from a page."""

from __future__ import annotations

import base64
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

from ds_configs.plan import Plan, plan_to_json
from launch.records import metrics, result
from launch.records.directory import Launch, RunDirectory
from launch.records.facts import Ending, Entropies, Peaks, RunFacts, StepRecord
from launch.reports import runs as reading
from launch.reports.tables import Tables
from recipes.layout import Layout
from recipes.schema import Recipe
from recipes.tiny import tiny as shrink

EVIL = '<script>alert("x")</script> & $5 | *b*'
TABLE = """\
title: 'Widgets <script>alert("x")</script> & $5 | *b*'
source: "A document & its table <1>"
columns: [GPUs, Size, "time <s>", TFlops, Notes]
note: Times are <b>rounded</b>.
defaults:
  model: {layers: 4, hidden: 64, heads: 4, vocab_size: 300}
  sequence_length: 64
  batch: {micro: 2, accumulation: 4, global: 8}
  parallel: {tp: 1, pp: 1, dp: 1}
  steps: 40
  optimizer: {lr: 1e-3}
  hardware: {name: Abacus, gpus: 1}
  inferred: {optimizer: "a public script <i>"}
  unknown: {steps: no source says}
rows:
  fast:
    title: the fast one
    published: {source: S, row: "64 | 48B | 2.0s | 4000 | 05-26", time_per_iteration_s: 2.0, tflops: 4000.0,
        size_label: "48B"}
    note: Impossible as printed.
  slow:
    title: the slow one
    published: {source: S, row: "8 | 7B | 90.5s | 0.25 |", time_per_iteration_s: 90.5, tflops: 0.25}
  oom:
    title: too large
    published: {source: S, row: "8 | 99B | OOM | |", oom: true}
"""
QUIET = """\
title: never run
source: another document
columns: [num_gpu, samples/sec]
rows:
  only:
    title: only row
    model: {layers: 2, hidden: 32, heads: 2, vocab_size: 300}
    sequence_length: 16
    batch: {global: 4}
    steps: 10
    optimizer: {lr: 1e-3}
    published: {source: S, row: "8 | 83.2", samples_per_s: 83.2}
    inferred: {optimizer: the paper}
"""
MACHINE = {
    "host": "h",
    "cpu": "Abacus 9",
    "cores": 2,
    "memory_gb": 8.0,
    "accelerator": "cpu",
    "accelerators": 0,
    "accelerator_memory_gb": None,
    "cuda": None,
    "versions": {"python": "3.11", "torch": "2.13.0"},
    "git": {"commit": "abc", "dirty": False},
}


def step(number: int, loss: float | None = None, seconds: float = 0.5) -> StepRecord:
    loss = 6.0 - math.log(number) / 2 if loss is None else loss
    return StepRecord(
        step=number,
        loss=loss,
        lr=1e-3,
        grad_norm=1.0,
        loss_scale=1.0,
        skipped=False,
        seconds=seconds,
        data_seconds=0.0,
        samples_per_s=8 / seconds,
        tokens_per_s=512 / seconds,
        tflops=0.1,
        exact_tflops=0.1,
        peak_memory_bytes=10**9,
        memory_kind="resident set",
        launch_step=number,
    )


def validations(last: int, loss: float = 5.0) -> list[metrics.ValidationRecord]:
    return [metrics.ValidationRecord(number, loss) for number in (0, last)]


def lines(records: list[metrics.Record]) -> str:
    return "".join(map(metrics.to_line, records))


def make_run(  # noqa: PLR0913 - tests name what they change
    folder: Path,
    tables: Path,
    row: str,
    *,
    tiny=False,
    status="ok",
    started="2026-07-01T10:00:00+0000",
    records=None,
    cached=None,
    finished=True,
    overrides=None,
    environment=None,
    unigram=5.2,
    **facts,
) -> Path:
    """A run directory as `launch/pretrain.py` leaves it, its result made by the function that makes them.

    `facts`: of the plan.
    """
    original = Tables(tables).recipe(row)
    recipe = shrink(original) if tiny else original
    if overrides:
        values = recipe.model_dump(by_alias=True, exclude_unset=True)
        recipe = Recipe.model_validate({**values, **overrides})
    whole = recipe.batch.global_
    plan = Plan(
        **{
            "recipe": recipe,
            "layout": Layout(1, 1, 1, 2, whole // 2, whole),
            "zero_stage": 1,
            "offload": "none",
            "precision": "fp32",
            "padded_vocab": 384,
            "notices": (),
            "ds_name": "zero1",
            "ds": {"zero_optimization": {"stage": facts.get("zero_stage", 1)}},
            **facts,
        }
    )
    records = [step(n) for n in range(1, 41)] + validations(40) if records is None else records
    at = RunDirectory(folder)
    folder.mkdir(parents=True)
    at.metrics_jsonl.write_text(lines(records))
    machine = {**MACHINE, **(environment or {})}
    shown = {key: value for key, value in plan_to_json(plan).items() if key not in ("recipe", "ds")}
    launch = Launch(
        started, ("launch/pretrain.py",), "/", row + ("-tiny" if tiny else ""), tiny, False, shown, machine
    )
    at.write_description(plan, [launch])
    if finished:
        made = result.make_result(
            RunFacts(plan, launch.recipe, MACHINE, original, tiny, entropies=Entropies(5.7, unigram)),
            metrics.read_metrics(at.metrics_jsonl),
            Ending(status, peaks=Peaks(cached_bytes=cached)),
        )
        result.write_result(at.result_json, made)
    return folder


def write_tables(folder: Path) -> Path:
    """Two tables, widgets and quiet."""
    (folder / "widgets.yaml").write_text(TABLE)
    (folder / "quiet.yaml").write_text(QUIET)
    return folder


def read_of(run: Path, tables: Path, label: str = "r") -> reading.ReportedRun:
    return reading.read_run(run, label, Tables(tables).recipe)


class Page(HTMLParser):
    """Tags, links, visible text and tables of a page; a tag that is closed wrongly is an error."""

    VOID = {"meta", "br", "hr", "img", "input", "link"}

    def __init__(self) -> None:
        super().__init__()
        self.tags, self.references, self.text, self.tables, self.open = set(), [], [], [], []

    def handle_starttag(self, tag, attributes) -> None:
        self.tags.add(tag)
        self.references += [
            value
            for key, value in attributes
            if key in ("href", "src", "xlink:href", "data", "action", "srcset")
        ]
        assert not [key for key, _ in attributes if key.startswith("on")], "an event handler"
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag, attributes) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        self.text.append(data)
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data


def plots(page: str) -> list[ElementTree.Element]:
    """The images of a page."""
    return [
        ElementTree.fromstring(base64.b64decode(each))
        for each in re.findall(r'"data:image/svg\+xml;base64,([^"]+)"', page)
    ]
