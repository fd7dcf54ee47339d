"""The launches of a proof: one process first, then every layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launch.experiments.launching import run_and_wait, torchrun
from launch.experiments.proving.task import Task, found_by, write_tasks

WORKER = Path(__file__).with_name("worker.py")
MOST_SHOWN = 2000  # characters of a failure, from its end
# in the lines that torchrun writes once a rank has failed
TORCHRUN = "torch/distributed/elastic/multiprocessing/api.py"


def launch(tasks: Sequence[Task], ranks: int) -> str:
    """Train tasks in turn on so many ranks; return the failure, or "" if there is none."""
    out = Path(tasks[0].out)
    out.mkdir(parents=True, exist_ok=True)
    file = out / "tasks.json"
    write_tasks(file, [*tasks])
    log = out / "log.txt"
    code = run_and_wait([*torchrun(ranks), str(WORKER), str(file)], log)
    for task in tasks:
        missing = [
            rank for rank in range(ranks) if not found_by(task.out, rank).exists()
        ]
        if code or missing:
            return _failure(Path(task.out), log, ranks)
    return ""


def _failure(out: Path, log: Path, ranks: int) -> str:
    for rank in range(ranks):
        stack = out / f"rank-{rank}-stack.txt"
        text = stack.read_text() if stack.exists() else ""
        if text:
            return f"rank {rank} came to no end of a step; it was at\n{text.strip()[:MOST_SHOWN]}"
    ranks_said, _, _ = log.read_text(errors="replace").partition(TORCHRUN)
    return ranks_said.strip()[-MOST_SHOWN:]
