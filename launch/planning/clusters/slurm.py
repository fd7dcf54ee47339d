"""The batch script for Slurm: one srun of plain python, requeued until the run is done."""

from __future__ import annotations

import re
import shlex

from launch.planning.clusters.job import Job, filled
from recipes.problems import Problem, ProblemsError

WARNING = 900  # seconds before the end at which Slurm warns: a step and a save have to fit into them
CLOCK = re.compile(r"(?:(\d{1,3})-)?(\d{1,3}):([0-5]\d):([0-5]\d)")


def script(job: Job) -> str:
    """The text of job.sbatch."""
    return filled(
        "job.sbatch",
        name=job.name,
        slug=job.slug,
        layout=job.layout,
        nodes=job.nodes,
        gpus=job.gpus,
        whole=job.gpus == job.node.gpus,
        cores=job.cores,
        constraint=job.constraint,
        partition=job.wishes.partition,
        account=job.wishes.account,
        time=_clock(job.wishes.seconds),
        warning=min(WARNING, job.wishes.seconds // 2),
        run_directory=shlex.quote(job.run_directory),
        command=job.command,
    )


def seconds(text: str) -> int:
    """Of [DAYS-]HOURS:MINUTES:SECONDS. Raises ProblemsError."""
    found = CLOCK.fullmatch(text)
    days, hours, minutes, rest = (int(part or 0) for part in found.groups()) if found else (0, 0, 0, 0)
    total = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    if not total:
        rule = "[DAYS-]HOURS:MINUTES:SECONDS"
        raise ProblemsError([Problem("--time", f"--time {text[:40]}", rule, "e.g. --time 20:00:00")])
    return total


def _clock(total: int) -> str:
    return f"{total // 3600:02}:{total // 60 % 60:02}:{total % 60:02}"
