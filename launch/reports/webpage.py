"""A report as one HTML page that needs nothing else: plots are inside, and no script runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from launch.console.numbers import number
from launch.reports.document import Document

FOLDER = Path(__file__).resolve().parent
MARKER = '<meta name="generator" content="megarecipes launch/report.py">'
STATUS_CLASSES = {
    "measured": "good",
    "not run": "idle",
    "unfinished": "idle",
    "saving": "idle",
}  # others: bad


def write(document: Document) -> str:
    # Everything is escaped but what this project wrote itself: the marker and the style sheet.
    options: dict[str, Any] = {"undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(loader=FileSystemLoader(FOLDER), autoescape=True, **options)
    environment.filters["number"] = number
    environment.filters["unbroken"] = unbroken
    style = Markup((FOLDER / "style.css").read_text(encoding="utf-8"))
    page = environment.get_template("page.html")
    return page.render(document=document, marker=Markup(MARKER), style=style, status_classes=STATUS_CLASSES)


def unbroken(text: str) -> str:
    """The text with 3.9e-03 kept in one line: the hyphen of an exponent is one at which no line breaks."""
    return re.sub(r"(?<=\de)-(?=\d)", "\N{NON-BREAKING HYPHEN}", text)
