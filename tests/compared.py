"""What compare_layouts printed and left, for the tests of layouts."""

from __future__ import annotations

import contextlib
import math
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import broken_layouts
from launching import ROOT, run, run_ranks

from launch.experiments.parity.layout_cases import CASES, FORCED, RUN, LayoutCase
from launch.experiments.parity.layout_runs import Layouts
from launch.experiments.proving import runs
from launch.experiments.proving.proving import Reference
from launch.experiments.proving.task import Found, found_by, read_found
from launch.experiments.proving.verdict import Row
from recipes import catalog

# They divide by nothing, and the embedding is large enough for a norm in float32 to be wrong.
ODD_SHAPES = [
    *("model.heads=6", "model.hidden=96", "model.layers=5", "model.vocab_size=8191", "model.positions=101"),
    *("sequence_length=77", "batch.micro=3", "batch.accumulation=5", "batch.global=15"),
]
COMMAND = [sys.executable, str(ROOT / "launch" / "compare_layouts.py"), "--tiny"]


def layouts_of(
    out: Path, settings: Sequence[str], recipe: str = catalog.DEFAULT_RECIPE, steps: int = 3
) -> Layouts:
    """The layouts of `compare_layouts --tiny`, which leave in `out` what they find."""
    return Layouts(catalog.load(recipe, [*FORCED, *settings], tiny=True, steps=steps), out)


@contextlib.contextmanager
def forked(script: Path = runs.WORKER, env: dict[str, str] | None = None) -> Iterator[None]:
    """Ranks of a proof are forks, which have the libraries already."""

    def start(ranks: int, file: Path, log: Path) -> None:
        log.write_text(run_ranks(ranks, script, file, env=env, timeout=500).stdout)

    with mock.patch.object(runs, "start", start):
        yield


def rows_by_name(layouts: Layouts, cases: Iterable[LayoutCase], script: Path = runs.WORKER) -> dict[str, Row]:
    """Each case next to one process."""
    with forked(script):
        return {row.layout.name: row for row in layouts.proven([*cases]).rows}


def train(
    layouts: Layouts, cases: Iterable[LayoutCase], env: dict[str, str] | None = None
) -> dict[str, Found]:
    """What rank 0 finds of each case, which has to train, next to none."""
    chosen = [*cases]
    found = {}
    for processes in sorted({case.processes for case in chosen}):
        tasks = {case.name: layouts.task(case) for case in chosen if case.processes == processes}
        with forked(env=env):
            failures = runs.launch([*tasks.values()], processes)
        assert not failures, failures
        for name, task in tasks.items():
            found[name] = read_found(found_by(task.out, 0))
    return found


def check_all_layouts(out: Path, *flags: str) -> None:
    """Run the command with every layout; all agree but tp3, which four heads cannot have."""
    done = run([*COMMAND, *flags, "--out", str(out)], timeout=1700)
    assert done.returncode == 0, done.stdout[-6000:]
    assert rows_of(done.stdout) == {case.name: "yes" for case in CASES if case.name != "tp3"}
    assert "20 steps" in done.stdout


def check_compiled_layouts(out: Path, names: Sequence[str], steps: int, *flags: str) -> None:
    """Run the command with some layouts, each also compiled; all agree."""
    flags = *flags, "--compile", "--steps", str(steps), "--out", str(out)
    done = run([*COMMAND, *flags, "--only", *names], timeout=900)
    assert done.returncode == 0, done.stdout[-6000:]
    rows = rows_of(done.stdout)
    assert {f"{name} compiled" for name in names} < set(rows) and set(rows.values()) == {"yes"}


def rows_of(output: str) -> dict[str, str]:
    """Layout -> verdict, of the printed table."""
    lines = output.splitlines()
    (header,) = [i for i, line in enumerate(lines) if line.startswith("layout ")]
    rows = {}
    for line in lines[header + 1 :]:
        if line.startswith("loss: "):  # the legend
            return rows
        name, _, _, _, _, _, verdict = re.split(r"\s{2,}", line, maxsplit=6)
        rows[name] = verdict
    raise AssertionError(f"no legend after the table:\n{output}")


def folder(name: str) -> str:
    """The run directory of a layout."""
    return f"{LayoutCase(name, 1, 1, 1, '').folder}/{RUN}"


def check_noticed(reference: Reference, row: Row, breakage: broken_layouts.Breakage) -> None:
    """The proof says no, and names the tensor nearest to the fault or sees the wrong norm."""
    assert not row.failure, "it has to train, and wrongly: a crash proves nothing"
    assert not row.agrees and row.first is not None
    if breakage.first:
        assert (row.first.name, row.first.kind) == (breakage.first, breakage.kind), row.first
    if breakage.by_norm:
        assert math.isclose(row.losses[1], reference.found.losses[1], rel_tol=1e-6)
        assert row.norm > 0.05
