"""A report as CSV: one line per row and run of every table, with the same columns for all tables."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any

from launch.reports.document import Document, Section
from launch.reports.table_lines import MEASURED, RATIO_NAMES, Line, deviations_of

PUBLISHED = (
    "size_label", "parameters", "time_per_iteration_s", "samples_per_s", "tflops", "cached_gb", "weak_scaling_percent", "peak_percent",
    "tflops_by", "validation_loss", "oom",
)  # fmt: skip
OF_THE_RUN = ("parameters_summed_over_tp_ranks", "train_loss", "hardware", "precision", "ds_config")
COLUMNS = (
    "table", "recipe", "published_columns", "published_row", *(f"published_{key}" for key in PUBLISHED), "errata",
    "run", "started", "status", "tiny", *(column.key for column in MEASURED), "parameters_summed_over_tp_ranks", "train_loss",
    *(f"ratio_{key}" for key in RATIO_NAMES), "no_ratio", "hardware", "precision", "ds_config", "deviations",
)  # fmt: skip


def write(document: Document) -> str:
    """RFC 4180 with a heading. Numbers are unrounded; what was not measured is empty; lists are joined by "; "."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, COLUMNS, lineterminator="\r\n")
    writer.writeheader()
    for section in document.sections:
        writer.writerows(_records(section))
    return buffer.getvalue()


def _records(section: Section) -> Iterator[dict[str, Any]]:
    for line in section.lines:
        published = line.row.recipe.published if line.row.recipe else None
        yield {
            "table": section.table.name,
            "recipe": line.row.full_name,
            "published_columns": " | ".join(section.table.columns),
            "published_row": " | ".join(line.row.cells),
            **{f"published_{key}": getattr(published, key) for key in PUBLISHED if published},
            "errata": "; ".join(line.row.errata),
            "status": line.status,
            **(_measured(line) if line.run else {}),
        }


def _measured(line: Line) -> dict[str, Any]:
    run = line.run
    assert run is not None
    return {
        "run": str(run.path),
        "started": run.launch.get("started"),
        "tiny": run.tiny,
        **{column.key: column.value(run) for column in MEASURED},
        **{key: run.row.get(key) for key in OF_THE_RUN},
        **{f"ratio_{key}": value for key, value in line.ratios.items() if key in RATIO_NAMES},
        "no_ratio": line.no_ratio,
        "deviations": "; ".join(deviations_of(run, line.row)),
    }
