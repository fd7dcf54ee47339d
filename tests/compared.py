"""What compare_layouts printed and left, for the tests of layouts."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from launching import ROOT

from launch import compare_layouts
from launch.parity import Outcome, read_outcome

COMMAND = [sys.executable, str(ROOT / "launch" / "compare_layouts.py"), "--tiny"]


def rows_of(output: str) -> dict[str, str]:
    """Layout -> verdict, of the printed table."""
    lines = output.splitlines()
    (header,) = [i for i, line in enumerate(lines) if line.startswith("layout ")]
    rows = {}
    for line in lines[header + 1 :]:
        if line.startswith("loss: "):  # the legend
            return rows
        name, _, _, _, _, _, _, verdict = re.split(r"\s{2,}", line, maxsplit=7)
        rows[name] = verdict
    raise AssertionError(f"no legend after the table:\n{output}")


def outcome(out: Path, name: str) -> Outcome:
    return read_outcome(name, 0, out / compare_layouts.slug(name), out / "no log")
