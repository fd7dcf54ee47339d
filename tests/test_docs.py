"""The documents: links lead to what is there, prose fits 110 columns, and commands are those of the parsers."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest
from launching import ROOT

DOCUMENTS = [
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"),
    *(ROOT / "tools" / "planner" / "README.md", ROOT / ".github" / "pull_request_template.md"),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted(ROOT.glob("*/README.md")),
]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")
WIDTH = 110


def prose(document: Path) -> str:
    """The document without code blocks and tables."""
    lines, fenced = [], False
    for line in document.read_text(encoding="utf-8").splitlines():
        fenced ^= line.startswith("```")
        if not fenced and not line.startswith(("    ", "|", "!")):
            lines.append(line)
    return "\n".join(lines)


def anchors(document: Path) -> set[str]:
    """The headings of a document as GitHub writes them into links."""
    headings = re.findall(r"^#+ (.+)$", prose(document), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere_and_prose_fits_the_page(document):
    for name, heading in LINK.findall(document.read_text(encoding="utf-8")):
        target = (document.parent / name).resolve() if name else document
        assert target.exists(), f"{document.name}: no {name}"
        assert not heading or heading in anchors(target), f"{document.name}: no heading {heading} in {name}"
    wide = [line for line in prose(document).splitlines() if len(line) > WIDTH]
    assert not wide, f"{document.name}: {wide[:3]}"


def commands(document: Path) -> list[list[str]]:
    """The words of the lines that start one of our commands, without those with holes (…, [, $, N)."""
    text = re.sub(r"\\\n\s*", "", document.read_text(encoding="utf-8"))
    lines = re.findall(r"^(?:    |\$ |python ).*?(launch/\w+\.py .*)$", text, re.M)
    words = [shlex.split(line, comments=True) for line in lines]
    return [each for each in words if not re.search(r"[…\[$|`]|\bN\b", " ".join(each))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_command_has_the_flags_that_a_document_shows(document):
    for script, *words in commands(document):
        parser = importlib.import_module(f"launch.{Path(script).stem}").build_parser()
        parser.parse_args(words)
