"""report.md, report.csv and report.html in one directory, in place of a former report only."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from data.durable_files import write_atomically
from launch.console import output
from launch.reports import csvfile, markdown, webpage
from launch.reports.comparison import MOST_COMPARED
from launch.reports.document import Document
from launch.reports.search import is_run

# Name -> (what writes it, what stands near the beginning of every such file: by it a former report is known).
FORMS: dict[str, tuple[Callable[[Document], str], str]] = {
    "report.md": (markdown.write, markdown.MARKER),
    "report.csv": (csvfile.write, ",".join(csvfile.COLUMNS[:4])),
    "report.html": (webpage.write, webpage.MARKER),
}
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
    if is_run(output.directory("--out", directory)):
        rule = "is a run directory, which holds nothing but the run's own files"
        raise ValueError(f"--out {directory} {rule}: name another directory")
    former = [name for name in FORMS if (directory / name).exists()]
    strangers = [name for name in former if not _is_former(directory / name, FORMS[name][1])]
    if strangers:
        raise ValueError(
            f"{directory} holds {', '.join(strangers)} that this command did not write, and it replaces only "
            "its own reports: name another directory with --out, or move the file"
        )
    return former


def write(document: Document, directory: Path) -> list[Path]:
    """Write the three files; their paths."""
    texts = {directory / name: form(document) for name, (form, _) in FORMS.items()}  # before one is replaced
    directory.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        write_atomically(path, text)
    return list(texts)


def _is_former(path: Path, marker: str) -> bool:
    try:
        with open(path, encoding="utf-8") as file:
            return marker in file.read(MARKER_WITHIN)
    except (OSError, UnicodeDecodeError):
        return False
