"""A field's values measured by a loop of runs, as docs/running.md has it, and what a report makes of them."""

from __future__ import annotations

import csv
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from launching import ROOT, run

from launch.records.result import MemoryUse, Result, Speed
from launch.reports import plots


def loop() -> str:
    """The loop of the document."""
    text = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")
    section = text.partition("## Measure over values of a field\n\n")[2]
    lines = re.match(r"(?:    .*\n)+", section)
    return lines[0] if lines else ""


def stand_in(folder: Path) -> Path:
    """A `python` that writes its words, and runs out of memory with 4 samples."""
    folder.mkdir()
    script = '#!/bin/bash\necho "$@" >> words\n[[ $* != *batch.micro=4* ]]\n'
    (folder / "python").write_text(script)
    (folder / "python").chmod(0o755)
    return folder


def test_the_documents_loop_goes_on_after_a_failed_run(tmp_path):
    """Also under a stand-in for Python, whose last run fails."""
    path = os.pathsep.join((str(stand_in(tmp_path / "bin")), os.environ["PATH"]))
    for micro in (1, 2, 4):
        (tmp_path / "runs" / f"micro-{micro}").mkdir(parents=True)
    assert run(["bash", "-c", loop()], env={"PATH": path}, cwd=tmp_path).returncode == 0
    words = (tmp_path / "words").read_text().splitlines()
    assert [line.split()[0] for line in words] == ["launch/pretrain.py"] * 3 + ["launch/report.py"]
    assert words[1].endswith("--set batch.micro=2 --set batch.global=2 --out runs/micro-2")
    assert words[3].split()[1:4] == ["runs/micro-1", "runs/micro-2", "runs/micro-4"]


@pytest.mark.long
def test_the_documents_loop_runs_as_written(tmp_path):
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    done = run(["bash", "-c", loop()], env={"PATH": path}, cwd=tmp_path, timeout=400)
    assert done.returncode == 0, done.stdout
    with (tmp_path / "reports" / "micro" / "report.csv").open() as file:
        rows = {row["run"]: row["status"] for row in csv.DictReader(file) if row["run"]}
    assert rows == {f"runs/micro-{micro}": "measured" for micro in (1, 2, 4)}
    assert (
        "Speed and memory of micro-4, micro-2, micro-1"
        in (tmp_path / "reports" / "micro" / "report.html").read_text()
    )


def ran(label: str, status: str, samples_per_s: float | None, peak: int | None) -> SimpleNamespace:
    result = Result("a/b", status, speed=Speed(1.0, samples_per_s=samples_per_s), memory=MemoryUse(peak))
    return SimpleNamespace(label=label, status="measured" if status == "ok" else status, result=result)


def test_the_plot_of_runs_names_the_one_that_found_no_memory():
    runs = [ran("micro-64", "OOM", 3.0, 9 * 10**9), ran("micro-2", "ok", 2.0, 10**9)]
    (plot,) = plots.of_runs(runs)
    shown = re.findall(r"<text[^>]*>([^<]*)</text>", plot.svg)
    assert shown.count("OOM") == 2 and shown.index("micro-2") < shown.index("micro-64")
    assert "Speed and memory of micro-64, micro-2" in shown
    assert plots.of_runs(runs[:1]) == []
