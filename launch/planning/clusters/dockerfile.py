"""The image: CUDA with its compiler, torch's wheel with kernels for the GPU, and the pinned requirements."""

from __future__ import annotations

from dataclasses import dataclass

from launch.planning.clusters.job import Job, filled


@dataclass(frozen=True)
class Wheel:
    """A build of torch 2.13 for Linux x86-64.

    Attributes:
        cuda: CUDA's version, of the base image too: DeepSpeed compiles its ops with that one's nvcc.
        index: of torch's builds; None: PyPI has it.
        least, most: compute capabilities for which it holds kernels.
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
    """The first build with kernels for GPUs of that capability; PyPI's where it is not known."""
    if capability is None:
        return WHEELS[0]
    return next((wheel for wheel in WHEELS if wheel.least <= capability <= wheel.most), WHEELS[0])


def dockerfile(job: Job) -> str:
    """The text of the Dockerfile, to be built with the checkout as its context."""
    capability = job.node.capability
    return filled(
        "Dockerfile",
        name=job.name,
        image=job.image,
        wheel=wheel_for(capability),
        capability=capability,
        dotted=f"{capability // 10}.{capability % 10}" if capability else None,
    )


def ignored() -> str:
    """The text of Dockerfile.dockerignore, which Docker reads next to a Dockerfile of any folder."""
    return filled("Dockerfile.dockerignore")
