"""The place of a process in its launch, as Slurm, Open MPI and other MPIs state it, in torchrun's variables.

torchrun and deepspeed set RANK, LOCAL_RANK and WORLD_SIZE themselves, and what they set counts. What Slurm
sets: its src/common/env.c (`env_array_for_step`, `env_array_for_batch_job`).
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from launch.ranks.interfaces import DEFAULT_PORT, LOOPBACK
from recipes.problems import ProblemsError

Environ = Mapping[str, str]

# Below those from 32768 on, which Linux gives to outgoing connections.
FIRST_PORT = 15_000
PORTS = 16_000
PORTS_PER_JOB = 8
# Slurm numbers steps below; from there on are the batch script and other shells
STEPS = 0xFFFF_0000

# Beginnings of what every rank needs alike. Not every launcher carries it to other machines (deepspeed 0.19.8
# takes along what begins with PYTHON, NCCL, UCX, MV2 or MLFLOW). No tokens: ranks talk in the open.
CARRIED = (
    "MEGARECIPES_",
    "HF_",
    "GLOO_",
    "NCCL_",
    "PYTORCH_",
    "TORCH_FR_",
    "TORCH_NCCL_",
    "TORCH_EXTENSIONS_DIR",
    "CUDA_DEVICE_MAX_CONNECTIONS",
)
NOT_CARRIED = ("TOKEN", "SECRET", "MEGARECIPES_LOCAL_RANK", "NCCL_HOSTID")

# Rank, size, rank on the machine, size on the machine.
_KINDS = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{kind}" for kind in _KINDS)
MVAPICH = tuple(f"MV2_COMM_WORLD_{kind}" for kind in _KINDS)
# of hydra: MPICH and Intel MPI
PMI = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
CRAY = ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")
# the same on all ranks of an mpirun
OF_A_LAUNCH = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
PLACES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")  # what torchrun and deepspeed set, both
# over how many of its own a torchrun or deepspeed launches
LAUNCHES = ("GROUP_WORLD_SIZE", "CROSS_SIZE")
# How an MPI learns where rank 0 is.
ADDRESSED = {
    "Open MPI": "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500",
    "mpiexec": "mpiexec -genv MASTER_ADDR HOST -genv MASTER_PORT 29500",
    "MVAPICH2": "mpirun_rsh … MASTER_ADDR=HOST MASTER_PORT=29500",
}
_PASS_ON = "pass on all that srun sets, into containers too, and unset what a shell or a job script has set"


@dataclass(frozen=True)
class LaunchStart:
    """The start of this process among others.

    Attributes:
        by: the program that started it.
        named: the variables of the start, as set.
        address, port: rank 0's; address None if `by` does not say it.
    """

    by: str
    named: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str | None
    port: int


def missing_variables(environ: Environ, at_terminal: bool = False) -> dict[str, str]:
    """Return the variables that this process lacks to find its place; {} for a single process, or with all.

    `at_terminal`: a person types at its standard input. In a shell that `srun --pty` opened, a command is not
    one of srun's tasks, of which the others would be awaited for half an hour.

    Raises ProblemsError for missing or contradicting variables.
    """
    placed = all(name in environ for name in PLACES)
    if at_terminal and "SLURM_PTY_PORT" in environ:
        return {}
    try:
        start = started(environ)
    except ProblemsError:
        if placed:  # what is incomplete there is not needed
            return {}
        raise
    if start is None:
        alone = environ.get("RANK") == "0" and environ.get("WORLD_SIZE") == "1"
        # torch's env:// needs four variables, and this is not one of them.
        return {"LOCAL_RANK": "0"} if alone and "LOCAL_RANK" not in environ else {}
    if placed:
        _check_launcher(environ, start)
        return {}
    places = {"RANK": start.rank, "WORLD_SIZE": start.size}
    places |= {"LOCAL_RANK": start.local_rank, "LOCAL_WORLD_SIZE": start.local_size}
    for name, value in places.items():
        if environ.get(name, str(value)) != str(value):
            raise _refused(
                name,
                f"{name}={environ[name]} with {start.named}",
                f"{start.by} says {value}",
                f"unset {name}",
            )
    if start.size == 1 and not any(name in environ for name in PLACES):
        return {}
    if start.address is None and "MASTER_ADDR" not in environ:
        rule = f"{start.by} does not tell the ranks of several machines where rank 0 is"
        how = ADDRESSED.get(start.by, "export MASTER_ADDR=HOST")
        raise _refused(
            "MASTER_ADDR",
            f"{start.named} without MASTER_ADDR",
            rule,
            f"{how}, where HOST is the machine of rank 0",
        )
    wanted = {**places, "MASTER_ADDR": start.address, "MASTER_PORT": start.port}
    return {name: str(value) for name, value in wanted.items() if name not in environ}


def started(environ: Environ) -> LaunchStart | None:
    """Find out how this process was started among others; None for a single process.

    An MPI's own variables count before Slurm's: mpirun starts one task of Slurm on each machine, and its
    ranks inherit from that. Raises ProblemsError.
    """
    for by, names in (("Open MPI", OPEN_MPI), ("MVAPICH2", MVAPICH)):
        if any(name in environ for name in names[:2]):
            return _mpi(environ, by, names)
    slurm = _slurm(environ)
    place = (environ.get("PMI_RANK"), environ.get("PMI_SIZE"))
    # Set by `srun --mpi=pmi2` as well, which says the same.
    if place != (None, None) and not (
        slurm and place == (str(slurm.rank), str(slurm.size))
    ):
        names = CRAY if "PMI_LOCAL_RANK" in environ else PMI
        return _mpi(environ, "mpiexec", names)
    if slurm is None and "PMIX_RANK" in environ:
        raise _refused(
            "PMIX_RANK",
            f"PMIX_RANK={environ['PMIX_RANK']} alone",
            "it does not say how many ranks there are",
            "start with mpirun, srun, torchrun or deepspeed, or unset PMIX_RANK",
        )
    return slurm


def carried(environ: Environ) -> dict[str, str]:
    """Select the variables that ranks on other machines take from rank 0, unless they have their own."""
    values = {}
    for name, value in environ.items():
        if name.startswith(CARRIED) and not any(word in name for word in NOT_CARRIED):
            values[name] = value
    return values


def sees_own_device(environ: Environ, visible: Iterable[str]) -> bool:
    """Check that the only visible device belongs only to this process, not to all of its machine.

    `visible`: the variables that say which devices are visible. What torchrun and deepspeed start sees alike.
    """
    binding = environ.get("SLURM_GPU_BIND", "none").removeprefix("verbose,")
    if "SLURM_GPUS_PER_TASK" in environ or not binding.startswith("none"):
        return True
    named = [environ[name].split(",") for name in visible if name in environ]
    return not any(name in environ for name in LAUNCHES) and any(
        len(devices) == 1 for devices in named
    )


def forgotten_srun(environ: Environ) -> str | None:
    """Return a remark for a single process in a Slurm job with room for more, or None."""
    tasks = environ.get("SLURM_NTASKS", "")
    if not tasks.isdigit() or int(tasks) < 2:
        return None
    return f"this is one process, in a job of {tasks} tasks (SLURM_NTASKS): `srun python …` starts one for each"


def first_host(written: str) -> str:
    """Return the first of a Slurm list of hosts: of "node[003-006,010],gpu-b[1-2]" node003."""
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])*", written)
    first = match[0] if match else written
    return re.sub(r"\[([0-9]*)[^\]]*\]", r"\1", first)


def tasks_per_node(written: str) -> list[int]:
    """Parse the tasks of each node, in order: "4(x2),3" is 4, 4, 3."""
    counts = re.findall(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", written)
    tasks = list[int]()
    for count, times in counts:
        tasks += [int(count)] * int(times or 1)
    return tasks


def _slurm(environ: Environ) -> LaunchStart | None:
    """Return this task of a step by srun; None in a batch script or a shell of salloc."""
    step = environ.get("SLURM_STEP_ID", "")
    if not step.isdigit() or int(step) >= STEPS:
        if environ.get("SLURM_PROCID", "0") != "0":
            came = f"SLURM_PROCID={environ['SLURM_PROCID']} without SLURM_STEP_ID"
            raise _refused(
                "SLURM_STEP_ID",
                came,
                "this is not the only task, and srun sets both",
                _PASS_ON,
            )
        return None
    # The others are the job's, and not the step's, under `srun --preserve-env`.
    tasks = _set_one(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    counts = _set_one(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    nodes = _set_one(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    names = (tasks, "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
    size, rank, local_rank, node = _whole(environ, "srun", names)
    each = tasks_per_node(environ.get(counts, str(size)))
    named = f"{tasks}={size}, SLURM_PROCID={rank}"
    if (
        node >= len(each)
        or sum(each) != size
        or rank >= size
        or local_rank >= each[node]
    ):
        came = f"{named}, SLURM_LOCALID={local_rank}, SLURM_NODEID={node}, {counts}={environ.get(counts)}"
        raise _refused("SLURM_NTASKS", came, "they contradict each other", _PASS_ON)
    several = first_host(environ[nodes]) if environ.get(nodes) else None
    job = environ.get("SLURM_JOB_ID", "")
    launch = (
        int(job) * PORTS_PER_JOB + int(step) % PORTS_PER_JOB if job.isdigit() else None
    )
    address = LOOPBACK if len(each) == 1 else several
    return LaunchStart(
        "srun", named, rank, size, local_rank, each[node], address, _port(launch)
    )


def _set_one(environ: Environ, of_step: str, of_job: str) -> str:
    """Return the name of the variable to read: the job's only where the step's is not set."""
    return of_job if of_step not in environ and of_job in environ else of_step


def _mpi(environ: Environ, by: str, names: Sequence[str]) -> LaunchStart:
    rank, size, local_rank, local_size = _whole(environ, by, names)
    named = f"{names[0]}={rank}, {names[1]}={size}"
    if rank >= size or local_rank >= local_size or local_size > size:
        raise _refused(
            names[0],
            f"{named}, {names[2]}={local_rank}, {names[3]}={local_size}",
            "they contradict each other",
            f"start with {by} alone",
        )
    of_a_launch = next((environ[name] for name in OF_A_LAUNCH if name in environ), None)
    number = zlib.crc32(of_a_launch.encode()) if of_a_launch else None
    port = _port(number)
    address = LOOPBACK if local_size == size else None
    return LaunchStart(by, named, rank, size, local_rank, local_size, address, port)


def _check_launcher(environ: Environ, start: LaunchStart) -> None:
    """Refuse torchrun's variables if their launch does not cover all processes of `start`."""
    rank = environ["RANK"]
    world = environ["WORLD_SIZE"]
    launches = next((environ[name] for name in LAUNCHES if name in environ), world)
    unset = f"unset {', '.join(PLACES)}"
    if launches.isdigit() and int(launches) < start.size:
        fix = (
            f"{unset} for plain `srun python`; or start torchrun once on each machine, "
            "with --nnodes, --node_rank, --master_addr and --master_port"
        )
        raise _refused(
            "WORLD_SIZE",
            f"{start.named} with RANK={rank}, WORLD_SIZE={world}",
            f"{start.by} started {start.size} launches of {world}, which would all train for themselves",
            fix,
        )
    if launches == world == str(start.size) and rank != str(start.rank):
        raise _refused(
            "RANK",
            f"RANK={rank} with {start.named}",
            f"{start.by} says {start.rank}",
            unset,
        )


def _whole(environ: Environ, by: str, names: Sequence[str]) -> list[int]:
    """Read the whole numbers that `by` sets, all of them. Raises ProblemsError."""
    given = {name: environ.get(name, "") for name in names}
    wrong = [
        name for name, text in given.items() if not re.fullmatch("[0-9]{1,9}", text)
    ]
    if wrong:
        came = ", ".join(
            f"{name}={given[name]!r}" if given[name] else f"no {name}" for name in wrong
        )
        raise _refused(
            wrong[0],
            came,
            f"{by} sets {', '.join(names)} to whole numbers",
            f"pass on all that {by} sets, into containers too, or unset what is left of it",
        )
    return [int(text) for text in given.values()]


def _port(launch: int | None) -> int:
    """Return a port that another launch on the same machine is unlikely to have."""
    return DEFAULT_PORT if launch is None else FIRST_PORT + launch % PORTS


def _refused(key: str, came: str, rule: str, fix: str) -> ProblemsError:
    return ProblemsError.of(key, came, rule, fix)
