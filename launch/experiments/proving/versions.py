"""Releases of packages, each installed in a folder of its own, for the ranks of a proof."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from launch.console import terminal
from recipes.problems import ProblemsError


def environments(versions: Sequence[str], out: Path) -> Iterator[str]:
    """Enter the environment of each choice of releases in turn; return its name. Raises ProblemsError.

    `versions`: as `PACKAGE=VERSION,VERSION`; none: this environment, whose name is "".
    """
    releases = [_releases(each) for each in versions]
    path = os.environ.get("PYTHONPATH", "")
    for chosen in itertools.product(*releases):
        folders = [str(_install(each, out / "installed")) for each in chosen]
        # an empty place would be the working directory
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*folders, path]))
        yield " ".join(chosen)
    os.environ["PYTHONPATH"] = path


def _releases(text: str) -> list[str]:
    package, _, versions = text.partition("=")
    if not package or not versions:
        raise ProblemsError.of(
            "--versions",
            f"--versions {text}",
            "it is PACKAGE=VERSION,VERSION",
            "write it so, as deepspeed=0.18.9,0.19.8",
        )
    return [f"{package}=={version}" for version in versions.split(",")]


def _install(release: str, out: Path) -> Path:
    folder = out / release
    if folder.exists():
        return folder
    terminal.say(f"installing {release}")
    words = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    words += ["--target", str(folder), release]
    environment = {**os.environ, "DS_BUILD_OPS": "0"}  # of DeepSpeed's own setup
    done = subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        shutil.rmtree(folder, ignore_errors=True)
        raise ProblemsError.of(
            "--versions",
            release,
            f"pip installs it: {done.stderr.strip()}",
            "name a release that the package index has",
        )
    return folder
