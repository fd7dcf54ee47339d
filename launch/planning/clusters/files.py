"""The files of a cluster, filled from the templates in `templates/`."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from launch.machine.model_states import state_widths
from launch.planning.clusters.job import Job
from modeling import cost

TEMPLATES = Path(__file__).with_name("templates")
# hostfile, Slurm's batch script, PyTorchJob of kubeflow's training operator, image
NAMES = ("hosts", "job.sbatch", "pytorchjob.yaml", "Dockerfile", "Dockerfile.dockerignore")
WRITTEN_BY = "launch/plan.py cluster"
OTHER_BYTES = 50e9  # bytes of a claim for text, caches and logs
GIB = 2**30


@dataclass(frozen=True)
class Wheel:
    """A build of torch 2.13 for Linux x86-64.

    Attributes:
        cuda: version of CUDA, also of the base image, whose nvcc compiles DeepSpeed's ops.
        index: address of torch's builds; None: PyPI.
        least, most: range of the compute capabilities with kernels.
    """

    cuda: str
    index: str | None
    least: int
    most: int


# RELEASE.md of pytorch/pytorch, "PyTorch CUDA Support Matrix", which lists the same for 2.12, 2.13 and 2.14
# (pull requests 182849 and 197555). PyPI has the build for CUDA 13.0. CUDA 13 compiles for sm_75 and newer
# only; CUDA 12.8 lost sm_70 in 2.11 (issue 172352). cu126 ends with 2.15 (issue 190385).
WHEELS = (Wheel("13.0.2", None, 75, 120), Wheel("12.6.3", "https://download.pytorch.org/whl/cu126", 50, 90))


def wheel_for(capability: int | None) -> Wheel:
    """Return the first build with kernels for a compute capability; PyPI's for an unknown one."""
    fitting = (wheel for wheel in WHEELS if capability and wheel.least <= capability <= wheel.most)
    return next(fitting, WHEELS[0])


def claimed_bytes(job: Job) -> float:
    """Count the bytes of all kept checkpoints, another one being written, and a run's other files."""
    recipe = job.plan.recipe
    parameters = cost.parameters(recipe.model, recipe.positions)
    saved = recipe.steps // recipe.run.save_every if recipe.run.save_every else 0
    kept = recipe.run.keep_checkpoints or saved + recipe.run.save_last
    return (min(kept, saved + 1) + 1) * state_widths(job.plan).saved * parameters + OTHER_BYTES


def text(job: Job, name: str) -> str:
    """Return the text of one of the files."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # here: a forecast does without

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES, encoding="utf-8"),
        autoescape=False,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        # Shells write ${#name}: a comment of a template begins otherwise.
        comment_start_string="{##",
        comment_end_string="##}",
    )
    environment.filters |= {"clock": _clock, "shell": shlex.quote, "json": json.dumps, "word": _word}
    return environment.get_template(name).render(
        written_by=WRITTEN_BY,
        job=job,
        wheel=wheel_for(job.node.capability),
        storage=f"{-(-claimed_bytes(job) // GIB):.0f}Gi",
        run=f"/runs/{job.run_directory.strip('/').removeprefix('runs/')}",
    )


def _clock(seconds: int) -> str:
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def _word(word: str) -> str:
    """Quote a word of a manifest's command or environment: in Kubernetes $(NAME) is a variable, $$ is a $."""
    return json.dumps(word.replace("$", "$$"), ensure_ascii=False)
