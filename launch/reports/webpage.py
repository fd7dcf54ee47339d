"""A report as one HTML page that needs nothing else: plots are inside, and no script runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from launch.reports import numbers
from launch.reports.document import Document

FOLDER = Path(__file__).resolve().parent
MARKER = '<meta name="generator" content="megarecipes launch/report.py">'


def write(document: Document) -> str:
    # Everything is escaped by default; only what this project wrote itself (plots, the style sheet) is passed as Markup.
    environment = Environment(
        loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["number"] = numbers.number
    return environment.get_template("page.html").render(
        document=document, marker=Markup(MARKER), style=Markup((FOLDER / "style.css").read_text(encoding="utf-8")), svg=Markup,
        status_class=status_class,
    )  # fmt: skip


def status_class(status: Any) -> str:
    """A class of the style sheet."""
    return {"measured": "good", "not run": "idle", "unfinished": "idle", "saving": "idle"}.get(
        str(status), "bad"
    )
