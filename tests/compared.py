"""What compare_layouts printed and left, for the tests of layouts."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import broken_layouts
from launching import ROOT, WORKERS, run, run_ranks

from launch.experiments.parity.comparison import Difference, RunOutcome, compare, read_outcome, table
from launch.experiments.parity.layout_cases import CASES, FORCED, REFERENCE, LayoutCase
from launch.experiments.parity.layout_runs import run_cases
from recipes import catalog

# They divide by nothing, and the embedding is large enough for a norm in float32 to be wrong.
ODD_SHAPES = [
    *("model.heads=6", "model.hidden=96", "model.layers=5", "model.vocab_size=8191", "model.positions=101"),
    *("sequence_length=77", "batch.micro=3", "batch.accumulation=5", "batch.global=15"),
]
COMMAND = [sys.executable, str(ROOT / "launch" / "compare_layouts.py"), "--tiny"]


def train_and_compare(
    out: Path, names: Sequence[str], recipe: str, settings: Sequence[str], steps: int
) -> str:
    """The table of `compare_layouts --tiny` for some layouts, whose ranks are forked."""
    shrunk = catalog.load(recipe, [*FORCED, *settings], tiny=True, steps=steps)
    cases = [REFERENCE, *(case for case in CASES if case.name in names)]
    reference, *others = run_cases(shrunk, cases, out, start=start_forked)
    return table(reference, [compare(reference, other) for other in others], {})


def check_all_layouts(out: Path, *flags: str) -> None:
    """Run the command with every layout; all agree but tp3, which four heads cannot have."""
    done = run([*COMMAND, *flags, "--out", str(out)], timeout=1700)
    assert done.returncode == 0, done.stdout[-6000:]
    assert rows_of(done.stdout) == {case.name: "not run" if case.name == "tp3" else "yes" for case in CASES}
    assert "20 steps" in done.stdout


def check_compiled_layouts(out: Path, names: Sequence[str], steps: int, *flags: str) -> None:
    """Run the command with some layouts, each also compiled; all agree."""
    flags = *flags, "--compile", "--steps", str(steps), "--out", str(out)
    done = run([*COMMAND, *flags, "--only", *names], timeout=900)
    assert done.returncode == 0, done.stdout[-6000:]
    rows = rows_of(done.stdout)
    assert {f"{name} compiled" for name in names} < set(rows) and set(rows.values()) == {"yes"}


def start_forked(processes: int, jobs: Path, log: Path) -> None:
    log.write_text(
        run_ranks(processes, ROOT / "launch/experiments/parity/layout_runs.py", jobs, timeout=400).stdout
    )


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


def outcome(out: Path, which: str | LayoutCase) -> RunOutcome:
    """The outcome of a layout; its name suffices where weights and states are in fp32."""
    case = LayoutCase(which, 1, 1, 1, "") if isinstance(which, str) else which
    return read_outcome(case, out / case.folder, out / "no log")


def folder(name: str) -> str:
    """The run directory of a layout."""
    return LayoutCase(name, 1, 1, 1, "").folder


def train_broken(recipe: Path, out: Path) -> Path:
    """Run directories, in `out`, of the family's broken layouts, all trained by one launch of two ranks."""
    (out / "recipe.yaml").write_text(recipe.read_text())
    done = run_ranks(broken_layouts.PROCESSES, WORKERS / "broken_layouts.py", out, timeout=400)
    assert done.returncode == 0, done.stdout[-6000:]
    return out


def check_noticed(reference: RunOutcome, found: RunOutcome, breakage: broken_layouts.Breakage) -> Difference:
    """The comparison says no, and names the tensor nearest to the fault or sees the wrong norm."""
    difference = compare(reference, found)
    assert found.failure is None, "it has to train, and wrongly: a crash proves nothing"
    assert not difference.agrees
    assert difference.diverging is not None
    if breakage.first:
        assert difference.diverging.startswith(f"{breakage.first} (gradient of step 1"), difference.diverging
    if breakage.by_norm:
        assert math.isclose(found.losses[0], reference.losses[0], rel_tol=1e-6)
        assert abs(found.norms[0] / reference.norms[0] - 1) > 0.05
    return difference
