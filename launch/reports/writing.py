"""report.md, report.csv and report.html in one directory, in place of a former report only."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from data.durable_files import write_atomically
from launch.reports import csvfile, markdown, webpage
from launch.reports.comparison import MOST_COMPARED
from launch.reports.document import Document
from launch.reports.search import is_run


@dataclass(frozen=True)
class Form:
    """`marker` stands near the beginning of every file of this form, by which a former report is known."""

    name: str
    write: Callable[[Document], str]
    marker: str


FORMS = (
    Form("report.md", markdown.write, markdown.MARKER),
    Form("report.csv", csvfile.write, ",".join(csvfile.COLUMNS[:4])),
    Form("report.html", webpage.write, webpage.MARKER),
)
MARKER_WITHIN = 1000  # characters


def default_directory(tables: Sequence[str], labels: Sequence[str], everything: bool) -> Path:
    """reports/<table>, reports/<run>-and-<run>, reports/all-tables or reports/runs."""
    if everything:
        name = "all-tables"
    elif len(tables) == 1:
        name = Path(tables[0]).stem
    elif not tables and len(labels) <= MOST_COMPARED // 2:
        name = "-and-".join(labels)
    else:
        name = "runs" if labels else "tables"
    return Path("reports") / (re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-.") or "runs")


def check(directory: Path) -> list[str]:
    """Names of a former report's files there.

    Raises:
        ValueError: the directory cannot be made or written, is a run, or holds other files of our names.
    """
    there = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not there.is_dir():
        raise ValueError(
            f"--out {directory} cannot be made ({there} is a file): name a directory you may write"
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(
            f"--out {directory} cannot be written ({there} is not yours to write): name a directory that is"
        )
    if is_run(directory):
        raise ValueError(
            f"--out {directory} is a run directory, which holds nothing but the run's own files: name "
            "another directory"
        )
    former = [form for form in FORMS if (directory / form.name).exists()]
    strangers = [form.name for form in former if not _is_former(directory / form.name, form.marker)]
    if strangers:
        raise ValueError(
            f"{directory} holds {', '.join(strangers)} that this command did not write, and it replaces only "
            "its own reports: name another directory with --out, or move the file"
        )
    return [form.name for form in former]


def write(document: Document, directory: Path) -> list[Path]:
    """Write the three files; their paths."""
    texts = [(directory / form.name, form.write(document)) for form in FORMS]  # all, before one is replaced
    directory.mkdir(parents=True, exist_ok=True)
    for path, text in texts:
        write_atomically(path, text)
    return [path for path, _ in texts]


def _is_former(path: Path, marker: str) -> bool:
    try:
        with open(path, encoding="utf-8") as file:
            return marker in file.read(MARKER_WITHIN)
    except (OSError, UnicodeDecodeError):
        return False
