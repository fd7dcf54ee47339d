"""A recipe on a cluster: the values for every file."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from ds_configs.plan import Plan
from launch.console import launch_lines
from launch.planning.clusters.placement import ClusterNode
from recipes.layout import Layout
from recipes.problems import Problem, ProblemsError

MOST_CHARACTERS = 48  # characters of a name, which pods end with "-worker-1023" within 63
CLOCK = re.compile(r"(?:(\d{1,3})-)?(\d{1,3}):([0-5]\d):([0-5]\d)")


@dataclass(frozen=True)
class Job:
    """A recipe on the nodes of a cluster.

    Attributes:
        words: arguments of pretrain.py, without --out and --resume.
        gpus: number of GPUs and processes on each node.
        run_directory: on a file system shared by all nodes; relative to the checkout.
        seconds: time limit, after which the scheduler requeues the job.
        cores: physical cores of each process; None: not known.
    """

    name: str
    words: tuple[str, ...]
    plan: Plan
    node: ClusterNode
    nodes: int
    gpus: int
    run_directory: str
    hosts: tuple[str, ...]
    has_host_names: bool
    seconds: int
    partition: str | None
    account: str | None
    constraint: str | None
    cores: int | None
    image: str

    @property
    def layout(self) -> Layout:
        return self.plan.layout

    @property
    def identity(self) -> str:
        """Name and run directory in one line; the files of a job are replaced by the same job alone."""
        return " ".join(f"{self.name} in {self.run_directory}".split())

    @property
    def slug(self) -> str:
        """The name in the form of schedulers: lower case, digits and hyphens, a letter first (RFC 1035)."""
        slug = "run-" + re.sub("[^a-z0-9]+", "-", self.name.lower()).strip("-")
        if len(slug) <= MOST_CHARACTERS:
            return slug
        digest = hashlib.sha256(self.name.encode()).hexdigest()[:6]
        return f"{slug[: MOST_CHARACTERS - 7].rstrip('-')}-{digest}"

    @property
    def command(self) -> str:
        """The arguments of Python to start the run, without --out and --resume."""
        return f"{launch_lines.SCRIPT} {launch_lines.quoted(self.words)}"


def parse_clock(text: str) -> int:
    """Return the seconds of [DAYS-]HOURS:MINUTES:SECONDS. Raises ProblemsError."""
    found = CLOCK.fullmatch(text)
    days, hours, minutes, rest = (int(part or 0) for part in found.groups()) if found else (0, 0, 0, 0)
    total = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    if not total:
        rule = "[DAYS-]HOURS:MINUTES:SECONDS"
        raise ProblemsError([Problem("--time", f"--time {text[:40]}", rule, "e.g. --time 20:00:00")])
    return total
