"""The launches of a proof: one process first, then every layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launch.experiments.launching import run_and_wait, torchrun
from launch.experiments.proving.task import Task, found_by, write_tasks

WORKER = Path(__file__).with_name("worker.py")
WAITED = "Timeout"  # first word of what faulthandler writes
MOST_SHOWN = 2000  # characters of a failure, from its end
# in the lines that torchrun writes once a rank has failed
TORCHRUN = "torch/distributed/elastic/multiprocessing/api.py"


def start(ranks: int, file: Path, log: Path) -> None:
    """Train the tasks of a file on so many ranks."""
    run_and_wait([*torchrun(ranks), str(WORKER), str(file)], log)


def launch(tasks: Sequence[Task], ranks: int, rest: bool = True) -> dict[str, str]:
    """Train tasks in turn on so many ranks; return failures by the tasks' directories.

    `rest`: after a failure another launch trains the rest.
    """
    failures = {}
    waiting = [*tasks]
    while waiting:
        out = Path(waiting[0].out)
        out.mkdir(parents=True, exist_ok=True)
        file = out / "tasks.json"
        write_tasks(file, waiting)
        log = out / "log.txt"
        start(ranks, file, log)
        while waiting:
            task = waiting.pop(0)
            if not all(found_by(task.out, rank).exists() for rank in range(ranks)):
                failures[task.out] = _failure(task, log, ranks)
                waiting = waiting if rest else []
                break
    return failures


def _failure(task: Task, log: Path, ranks: int) -> str:
    """Return the traceback of the rank that failed first, or where all of them wait, else the output's end."""
    stacks = [Path(task.out) / f"rank-{rank}-stack.txt" for rank in range(ranks)]
    told = [each for each in stacks if each.exists() and each.stat().st_size]
    if not told:
        lines = log.read_text(errors="replace").splitlines()
        of_ranks = "\n".join(line for line in lines if TORCHRUN not in line)
        return of_ranks.strip()[-MOST_SHOWN:]
    first = min(told, key=lambda each: each.stat().st_mtime_ns)
    text = first.read_text(errors="replace")
    if not text.startswith(WAITED):
        return f"rank {stacks.index(first)}: {text.strip()[-MOST_SHOWN:]}"
    lines = [f"no step came to its end in {task.timeout:g} s"]
    for rank, stack in enumerate(stacks):
        # the main thread's come last, its innermost first
        frames = stack.read_text().split("\n\n")[-1].splitlines()[1:]
        own = [frame for frame in frames[1:] if task.adapter in frame]
        lines += [f"rank {rank}:", *frames[:1], *own]
    return "\n".join(lines)
