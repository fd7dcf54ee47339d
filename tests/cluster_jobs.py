"""Recipes on clusters, for the tests of what is written for them."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from launch.planning.clusters import cluster_command, files
from launch.planning.clusters.job import Job

# A recipe on the nodes that it was measured on, one of an open degree, one on part of a node, one on nodes of
# which nobody knows anything.
CASES = {
    "3d": "--recipe jeanzay_megatron_deepspeed_3d/48b-pp16-ga256-mb4 --hardware v100-32x4",
    "open": "--recipe openwebtext/gpt2-124m --hardware a100-80x8 --nodes 2 --hosts a b",
    "part": "--recipe parallel_kinds/3d --hardware dgx2",
    "unknown": "--recipe parallel_kinds/3d --gpus-per-node 2",
}


def parsed(line: str) -> argparse.Namespace:
    """The flags of plan.py cluster, as a user writes them."""
    parser = argparse.ArgumentParser()
    cluster_command.add_parser(parser.add_subparsers())
    return parser.parse_args(["cluster", *shlex.split(line)])


def job(line: str) -> Job:
    """The job of flags, or of a case."""
    return cluster_command.job_of(parsed(CASES.get(line, line)))


def text(line: str, name: str) -> str:
    """One of the files of a job."""
    return files.text(job(line), name)


def program(path: Path, script: str) -> None:
    """Write a stand-in for a program."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(script)
    path.chmod(0o755)


def search_path(stand_ins: Path) -> str:
    """PATH with the stand-ins first, then this Python: not every system has one that is called python."""
    return f"{stand_ins}:{Path(sys.executable).parent}:{os.environ['PATH']}"
