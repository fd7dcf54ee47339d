"""Write a report as CSV, with the same columns for all tables.

One line per row and run; one more line per fine-tuning figure, published or measured.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launch.records.metrics import PARTS
from launch.records.result import Result
from launch.reports.document import ReportDocument
from launch.reports.entries import MEASURED, RATIO_NAMES, SPLITS, RowEntry
from launch.reports.scores import FinetunedLine
from launch.tables.scores import scores
from recipes.families import MINIMISED, values_of

PUBLISHED = (
    "size_label",
    "parameters",
    "time_per_iteration_s",
    "samples_per_s",
    "tflops",
    "cached_gb",
    "weak_scaling_percent",
    "peak_percent",
    "tflops_by",
    "validation_loss",
    "oom",
)
# by the keys of metrics.jsonl: "loss" is what is minimised
LOSSES = [f"{split}_{key}" for split in SPLITS.values() for key in (MINIMISED, *PARTS)]
COMPUTED = ("=", "+", "-", "@", "\t", "\r")  # beginnings of formulas
# half of the steps lie between them
SPREAD = ("time_quartile_1_s", "time_quartile_3_s")
COLUMNS = (
    "table",
    "recipe",
    "published_columns",
    "published_row",
    *(f"published_{key}" for key in PUBLISHED),
    "published_scores",
    "errata",
    "run",
    "started",
    "status",
    "tiny",
    *(column.key for column in MEASURED),
    *LOSSES,
    *SPREAD,
    "parameters_summed_over_tp_ranks",
    *(f"ratio_{key}" for key in RATIO_NAMES),
    "no_ratio",
    "hardware",
    "precision",
    "ds_config",
    "deviations",
    "task",
    "figure",
    "published_score",
    "score",
    "ratio_score",
    "models",
)


def write(document: ReportDocument) -> str:
    """Return the CSV (RFC 4180): headings, unrounded numbers, empty if not measured, lists joined by ";"."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, COLUMNS, lineterminator="\r\n")
    writer.writeheader()
    for section in document.sections:
        table = {
            "table": section.table.name,
            "published_columns": " | ".join(section.table.columns),
        }
        for entry in section.entries:
            writer.writerow(_inert({**table, **_cells(entry)}))
        for each in section.finetuned:
            writer.writerow(_inert({**table, **_finetuned(each)}))
    return buffer.getvalue()


def _inert(cells: Mapping[str, Any]) -> dict[str, Any]:
    """Put an apostrophe before texts that a spreadsheet would compute."""
    inert = dict(cells)
    for key, value in cells.items():
        if isinstance(value, str | Path) and str(value).startswith(COMPUTED):
            inert[key] = f"'{value}"
    return inert


def _cells(entry: RowEntry) -> dict[str, Any]:
    row = entry.row
    run = entry.run
    published = row.published
    printed = scores(published.downstream) if published else ()
    cells = {
        "recipe": row.full_name,
        "published_row": " | ".join(row.cells),
        **{f"published_{key}": getattr(published, key, None) for key in PUBLISHED},
        "published_scores": "; ".join(f"{name} {value}" for name, value in printed),
        "errata": "; ".join(map(str, row.errata)),
        "status": entry.status,
    }
    if run is None:
        return cells
    result = run.result
    return {
        **cells,
        "run": run.path,
        "started": run.launch.started if run.launch else None,
        "tiny": run.tiny,
        **{column.key: column.of(result) for column in MEASURED},
        **dict(zip(SPREAD, result.speed.quartiles_s or (None, None), strict=True)),
        **dict(_losses(result)),
        "parameters_summed_over_tp_ranks": result.parameters_summed_over_tp_ranks,
        **{f"ratio_{key}": value for key, value in entry.ratios.items()},
        "no_ratio": entry.no_ratio,
        "hardware": result.hardware,
        "precision": result.precision_text,
        "ds_config": result.ds_config,
        "deviations": "; ".join(map(str, entry.deviations)),
    }


def _losses(result: Result) -> Iterator[tuple[str, float | None]]:
    for split, name in SPLITS.items():
        losses = getattr(result.losses, split)
        if losses:
            for key, value in values_of(losses).items():
                yield f"{name}_{key}", value


def _finetuned(line: FinetunedLine) -> dict[str, Any]:
    row = line.row
    finetuned = line.finetuned
    values: dict[str, Any] = {
        "recipe": row.full_name,
        "published_row": " | ".join(row.cells),
        "task": line.figure.task,
        "figure": line.figure.key,
        "published_score": line.published,
        "status": line.status,
    }
    if finetuned:
        values |= {
            "run": finetuned.path,
            "tiny": finetuned.is_tiny,
            "score": line.measured,
            "ratio_score": line.ratio,
            "no_ratio": line.why_not,
            "models": finetuned.models,
        }
    return values
