"""Write report.csv and report.html to one directory; replace former reports only."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from data.durable_files import write_atomically
from launch.console import arguments, new_output
from launch.console.text_table import number
from launch.reports import csvfile
from launch.reports.comparison import MOST_COMPARED
from launch.reports.document import ReportDocument
from launch.reports.entries import spread
from launch.reports.runs import ReportedRun, is_run, labels
from recipes.problems import counted

FOLDER = Path(__file__).resolve().parent
PAGE_BEGINNING = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="generator" content="megarecipes launch/report.py">"""


def page(document: ReportDocument) -> str:
    """Render one self-contained HTML page: plots inside, no scripts, no absolute paths of runs."""
    # All text is escaped except the beginning and the style sheet, which are our own.
    environment = Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        autoescape=True,
        loader=FileSystemLoader(FOLDER),
    )
    environment.filters |= {"counted": counted, "number": number, "spread": spread}
    style = Markup((FOLDER / "style.css").read_text(encoding="utf-8"))
    html = environment.get_template("page.html").render(
        document=document, beginning=Markup(PAGE_BEGINNING), style=style
    )
    return without_places(html, document.runs)


def without_places(html: str, runs: Sequence[ReportedRun]) -> str:
    """Name each absolute path of a run by the fewest last parts that tell it from the others."""
    places = set[Path]().union(*(run.places for run in runs))
    longest_first = sorted(places, key=lambda each: len(str(each)), reverse=True)
    for place, name in zip(longest_first, labels(longest_first), strict=True):
        whole = re.escape(escape(place)) + r"(?![\w-])"
        html = re.sub(whole, escape(name).replace("\\", r"\\"), html)
    return html


# File name -> (its writer, the beginning of the file, which identifies a former report).
FORMS: dict[str, tuple[Callable[[ReportDocument], str], str]] = {
    "report.csv": (csvfile.write, ",".join(csvfile.COLUMNS[:4])),
    "report.html": (page, PAGE_BEGINNING),
}


def default_directory(
    tables: Sequence[str], labels: Sequence[str], everything: bool
) -> Path:
    """Return reports/<table>, reports/<run>-and-<run>, reports/all-tables or reports/runs."""
    named = tables or labels
    name = "all-tables" if everything else "runs"
    if not everything and len(named) <= MOST_COMPARED // 2:
        name = "-and-".join(named)
    plain = re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-.")
    return Path("reports") / (plain or "runs")


def check(directory: Path) -> list[str]:
    """Check that the directory can take a report; return the file names of a former report there.

    Raises:
        ProblemsError: the directory cannot be made or written, is a run, or holds other files of our names.
    """
    if is_run(arguments.directory("--out", directory)):
        raise arguments.refusal(
            "--out",
            directory,
            "is a run directory",
            "it holds nothing but the run's own files",
            "name another directory",
        )
    beginnings = {name: own for name, (_, own) in FORMS.items()}
    return new_output.own_files("--out", directory, beginnings)


def write(document: ReportDocument, directory: Path) -> list[Path]:
    """Write both files and return their paths."""
    # Both texts, before any file is replaced.
    texts = {directory / name: form(document) for name, (form, _) in FORMS.items()}
    directory.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        write_atomically(path, text)
    return list(texts)
