"""A recipe on a cluster, from which every file is written."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.console import launch_lines
from launch.planning.clusters.nodes import ClusterNode
from launch.planning.clusters.placement import Placement
from recipes.layout import Layout

WRITTEN_BY = "launch/plan.py cluster"
TEMPLATES = Path(__file__).with_name("templates")
LONGEST = 48  # characters of a name, which pods end with "-worker-1023" within 63
PORT = 29500  # torchrun's own


@dataclass(frozen=True)
class Wishes:
    """What the user asks of the scheduler; None: nothing.

    Attributes:
        seconds: of a job, after which it is requeued.
        cores: physical ones of each process.
    """

    seconds: int
    partition: str | None = None
    account: str | None = None
    constraint: str | None = None
    cores: int | None = None


@dataclass(frozen=True)
class Job:
    """A recipe on the nodes of a cluster.

    Attributes:
        name: of the recipe, as table/row.
        words: what pretrain.py is given, besides --out and --resume.
        run_directory: on a file system that all nodes see; relative to the checkout.
        hosts: names of the nodes, in the order of ranks.
        named: whether the user gave them.
        image: of the container.
    """

    name: str
    words: tuple[str, ...]
    placement: Placement
    node: ClusterNode
    run_directory: str
    hosts: tuple[str, ...]
    named: bool
    wishes: Wishes
    image: str

    @property
    def layout(self) -> Layout:
        return self.placement.plan.layout

    @property
    def nodes(self) -> int:
        return self.placement.nodes

    @property
    def gpus(self) -> int:
        """That it takes of each node, with a process on each."""
        return self.placement.gpus

    @property
    def slug(self) -> str:
        """Its name as schedulers take names: lower case, digits and hyphens, a letter first (RFC 1035)."""
        slug = "run-" + re.sub("[^a-z0-9]+", "-", self.name.lower()).strip("-")
        if len(slug) <= LONGEST:
            return slug
        told_apart = hashlib.sha256(self.name.encode()).hexdigest()[:6]
        return f"{slug[: LONGEST - 7].rstrip('-')}-{told_apart}"

    @property
    def cores(self) -> int | None:
        """Physical cores of each process; None: not known."""
        return self.wishes.cores or (self.node.cores // self.node.gpus if self.node.cores else None)

    @property
    def constraint(self) -> str | None:
        return self.wishes.constraint or self.node.constraint

    @property
    def command(self) -> str:
        """Python's arguments that start it, besides --out and --resume."""
        return f"{launch_lines.SCRIPT} {launch_lines.quoted(self.words)}"


def hostfile(job: Job) -> str:
    """DeepSpeed's: a line for every node, in the order of ranks."""
    lines = [f"{host} slots={job.gpus}" for host in job.hosts]
    return "\n".join([f"# Written by {WRITTEN_BY} for {job.name}.", *lines, ""])


def filled(template: str, **values: Any) -> str:
    """A file of templates/ with its values, which are quoted already as the file needs them."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # here: a forecast does without

    loader = FileSystemLoader(TEMPLATES, encoding="utf-8")
    strict: dict[str, Any] = {"undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(loader=loader, autoescape=False, keep_trailing_newline=True, **strict)
    # Shells write ${#name}: a comment of a template begins otherwise.
    environment = environment.overlay(comment_start_string="{##", comment_end_string="##}")
    return environment.get_template(template).render(written_by=WRITTEN_BY, **values)
