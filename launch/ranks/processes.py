"""The processes of a run: this one's place among them, the process group, and its device."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import functools
import glob
import json
import operator
import os
import re
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import TypeAdapter

from ds_configs.plan import HOST, Device
from launch.ranks import interfaces
from launch.ranks.interfaces import LOOPBACK
from recipes.problems import Problem, ProblemsError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup, Store

T = TypeVar("T")

WHOLE = re.compile("[0-9]{1,9}")
# What launchers set, with the least and the greatest value that makes sense.
_RANKS = (0, 10**6)
VARIABLES = {
    "RANK": _RANKS,
    "LOCAL_RANK": _RANKS,
    "WORLD_SIZE": (1, 10**6),
    "LOCAL_WORLD_SIZE": (1, 10**6),
    "LOCAL_SIZE": (1, 10**6),
    "MASTER_PORT": (1, 65535),
}
# beginnings of the variables that tell a process its place, or were left by what started it
OF_LAUNCHERS = (*VARIABLES, "SLURM_", "OMPI_", "MV2_", "PMI")
# as in the Makefile
DEVICE_FILES = ("nvidiactl", "kfd", "dxg", "dri", "accel", "davinci*")
# that ranks wait for each other: at the start, in a collective
TIMEOUT = datetime.timedelta(minutes=30)
UNSET = "start with deepspeed, torchrun, srun, mpirun or python; unset what a shell or a job script has set"
# As a launcher said it, once LOCAL_RANK is the number of the only device that this rank sees; DeepSpeed and
# accelerate take LOCAL_RANK for that.
OWN_LOCAL_RANK = "MEGARECIPES_LOCAL_RANK"


def rank() -> int:
    return _variable("RANK", 0)


def local_rank() -> int:
    """Return this process's number on its machine."""
    return _variable(OWN_LOCAL_RANK, _variable("LOCAL_RANK", 0))


def local_world_size() -> int:
    """Return the number of ranks on this machine."""
    return _variable("LOCAL_WORLD_SIZE", _variable("LOCAL_SIZE", 1))


def world_size() -> int:
    return _variable("WORLD_SIZE", 1)


def several(rule: str) -> Iterator[Problem]:
    """Yield the problem of several processes where one has to do all. `rule`: what it does."""
    if world_size() > 1:
        yield Problem(
            "WORLD_SIZE",
            f"{world_size()} processes",
            rule,
            "start it with python, or set WORLD_SIZE to 1",
        )


def several_machines() -> bool:
    """Check whether the ranks of this launch are on several machines, as far as the launcher says."""
    if local_world_size() >= world_size():
        return False
    return not interfaces.is_loopback(os.environ.get("MASTER_ADDR", "localhost"))


def one_machine() -> bool:
    """Check whether all ranks of this launch are on this machine."""
    near = os.environ.get("MASTER_ADDR", "localhost") in ("localhost", LOOPBACK)
    return near or local_world_size() == world_size()


def _variable(name: str, default: int) -> int:
    """Read a launcher's variable; a bad number counts as absent here, and `check_launch` refuses it."""
    written = os.environ.get(name, "")
    if WHOLE.fullmatch(written):
        return int(written)
    return default


def check_launch() -> None:
    """Check the launcher's variables of this process's place, and the port where all ranks meet.

    Variables of Slurm and MPIs are translated to torchrun's first. Raises ProblemsError for bad or missing
    variables, or a taken port.
    """
    if not any(name.startswith(OF_LAUNCHERS) for name in os.environ):
        return  # a plain `python`
    from launch.ranks import launch_environment

    os.environ.update(
        launch_environment.missing_variables(os.environ, at_terminal=os.isatty(0))
    )
    problems = []
    for name, (least, most) in VARIABLES.items():
        written = os.environ.get(name)
        if written is not None and not (
            WHOLE.fullmatch(written) and least <= int(written) <= most
        ):
            problems.append(
                Problem(
                    name,
                    f"{name}={written!r}",
                    f"a launcher sets a whole number from {least} to {most}",
                    UNSET,
                )
            )
    if not problems and "WORLD_SIZE" in os.environ and rank() >= world_size():
        came = f"RANK={rank()} with WORLD_SIZE={world_size()}"
        problems.append(
            Problem("RANK", came, "ranks count from 0 to WORLD_SIZE - 1", UNSET)
        )
    needed = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if name not in os.environ]
    launched = "RANK" in os.environ or world_size() > 1
    if launched and missing and not problems:
        there = ", ".join(name for name in needed if name not in missing)
        came = f"{there} without {', '.join(missing)}"
        fix = UNSET
        if missing == ["LOCAL_RANK"]:
            fix = "export LOCAL_RANK, the process's number on its machine, from 0"
        problems.append(Problem(missing[0], came, "a launcher sets all of them", fix))
    if problems:
        raise ProblemsError(problems)
    if launched:
        check_port(os.environ["MASTER_PORT"])


def check_port(port: str) -> None:
    """Check that rank 0 can listen at the port where all ranks meet, unless torchrun listens for it.

    Raises ProblemsError.
    """
    if rank() != 0 or agent_has_store():
        return
    try:
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(("", int(port)))
    except OSError as error:
        raise port_is_taken(port, error.strerror) from None


def port_is_taken(
    port: str, because: str | None = "address already in use"
) -> ProblemsError:
    """Make the refusal of a port at which rank 0 cannot listen."""
    fix = (
        f"give deepspeed or torchrun another --master_port, e.g. {int(port) + 1}; with srun and mpirun, set "
        "MASTER_PORT for all ranks"
    )
    return ProblemsError.of(
        "MASTER_PORT",
        f"port {port}",
        f"all processes of a launch meet there, and rank 0 cannot listen ({because}): does another run?",
        fix,
    )


def agent_has_store() -> bool:
    """Check whether torchrun serves the store where ranks meet; else rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def launched() -> bool:
    """Check whether a launcher started this process; a plain `python` has no launcher."""
    return "WORLD_SIZE" in os.environ


def from_rank_0(own: T, group: ProcessGroup, form: Any = Any) -> T:
    """Return rank 0's `own`. Collective.

    It travels as JSON and gets the types of `form` again: a pickle from another process could run anything.
    """
    import torch.distributed as dist

    share = partial(dist.broadcast, group=group, group_src=0)
    if dist.get_rank(group) == 0:
        return _sent(own, share, form)
    received: T = _received(share, form)
    return received


def merged(
    own: T, merge: Callable[[T, T], T], group: ProcessGroup, form: Any = Any
) -> T:
    """Merge all ranks' values in rank order, two neighbours at a time; rank 0 gets the whole. Collective.

    The others get what they passed on: nobody hears more than log2(world) values. `form`: as in `from_rank_0`.
    """
    import torch.distributed as dist

    place = dist.get_rank(group)
    distance = 1
    while distance < dist.get_world_size(group):
        if place % (2 * distance):
            _sent(
                own, partial(dist.send, group=group, group_dst=place - distance), form
            )
            break
        other = place + distance
        if other < dist.get_world_size(group):
            receive = partial(dist.recv, group=group, group_src=other)
            own = merge(own, _received(receive, form))
        distance *= 2
    return own


def agreed(own: T, merge: Callable[[T, T], T], group: ProcessGroup) -> T:
    """Merge all ranks' values as `merged` does, and return the whole on all of them. Collective."""
    return from_rank_0(merged(own, merge, group), group)


def gathered(own: T, group: ProcessGroup) -> list[T]:
    """Return every rank's `own`, in rank order: what each rank hears grows with their number. Collective."""
    return agreed([own], operator.add, group)


def texts_of_all(own: Iterable[str | None], group: ProcessGroup) -> list[str]:
    """Return the different texts of all ranks, in rank order. Collective."""
    texts = list(filter(None, own))
    return agreed(texts, lambda one, other: [*dict.fromkeys(one + other)], group)


@functools.cache
def _adapter(form: Any) -> TypeAdapter[Any]:
    return TypeAdapter(form)


def _sent(value: T, send: Callable[[Tensor], object], form: Any) -> T:
    """Send a value as JSON; return what the others have."""
    import torch

    # Not in pydantic's mode for JSON, which has no infinity; `str` is for paths.
    text = json.dumps(_adapter(form).dump_python(value), default=str)
    octets = torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8)
    send(torch.tensor([len(octets)]))
    send(octets)
    again: T = _adapter(form).validate_python(json.loads(text))
    return again


def _received(receive: Callable[[Tensor], object], form: Any) -> Any:
    import torch

    length = torch.zeros(1, dtype=torch.int64)
    receive(length)
    octets = torch.empty(int(length), dtype=torch.uint8)
    receive(octets)
    return _adapter(form).validate_python(json.loads(octets.numpy().tobytes()))


def start_processes(
    timeout: datetime.timedelta = TIMEOUT, store: Store | None = None
) -> None:
    """Join the process group of the launcher's environment; a plain `python` makes a group of one.

    `store`: of the ranks' meeting; None: torch's own at the launcher's address, or none for one process.
    """
    import torch.distributed as dist

    if "RANK" not in os.environ:
        place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        port = str(interfaces.DEFAULT_PORT)  # at which nobody listens
        os.environ.update(place, MASTER_ADDR=LOOPBACK, MASTER_PORT=port)
    if world_size() == 1:
        # it is reached by nobody, whatever interfaces a shell names for launches
        for name in (interfaces.GLOO, interfaces.NCCL):
            os.environ.pop(name, None)
        interfaces.stay_on_loopback()

    import deepspeed

    share_cores()
    keep_freed_memory()
    # Else every rank connects to every other, in each group: half a million connections of 1,024 ranks.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    switch_shared_memory_op_off()
    backend = "gloo"
    index = 0
    if device().own_memory:
        index = take_device()
        backend = _accelerator().communication_backend_name()
    # as DeepSpeed
    bound = (
        _accelerator().device(index) if backend == "nccl" and world_size() > 1 else None
    )
    if world_size() == 1:
        store = dist.HashStore()  # at no port
    dist.init_process_group(
        backend,
        store=store,
        rank=rank(),
        world_size=world_size(),
        timeout=timeout,
        device_id=bound,
    )
    deepspeed.init_distributed(
        backend, auto_mpi_discovery=False, verbose=False, timeout=timeout
    )


def switch_shared_memory_op_off() -> None:
    """Make DeepSpeed's collectives on a CPU use only gloo.

    DeepSpeed 0.19.8, `comm/torch.py`: `init_distributed` compiles an op for collectives through shared
    memory, for 20 s, which only inference uses, and which leaves 66 MiB per rank in /dev/shm in the end.
    Upstream: no issue found on either; https://github.com/deepspeedai/DeepSpeed/issues/7625 asks for one.
    No longer needed when `test_processes.py::test_deepspeed_alone_leaves_shared_memory_behind` fails.
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _accelerator() -> Any:
    from deepspeed.accelerator import get_accelerator

    return get_accelerator()


def device() -> Device:
    """Return the facts of the device that DeepSpeed trains on in this process.

    Where no other device can be, that takes no torch.
    """
    chosen = os.environ.get("DS_ACCELERATOR")
    no_other = not any(glob.glob(f"/dev/{name}") for name in DEVICE_FILES)
    if "deepspeed" not in sys.modules and (
        chosen == "cpu" or (no_other and not chosen)
    ):
        return HOST
    name = _accelerator().device_name()
    return Device(
        name, not _accelerator().is_synchronized_device(), own_memory=name != "cpu"
    )


def device_module() -> Any:
    """Return torch's module for the device, such as torch.cuda; of a CPU, torch.cpu."""
    import torch

    return torch.get_device_module(device().name)


def device_limit() -> int | None:
    """Return the number of ranks for this machine's devices; None on a CPU, where ranks share cores."""
    if device().own_memory:
        return int(_accelerator().device_count())
    return None


def check_device() -> int:
    """Return the index of this rank's device. Raises ProblemsError if it has none; CPUs are shared.

    A rank to which Slurm or a wrapper shows only one device has that one, whatever its local rank.
    """
    limit = device_limit()
    local = local_rank()
    if limit is None or local < limit:
        return local
    from launch.ranks import launch_environment

    visible = _accelerator().visible_devices_envs()
    if limit == 1 and launch_environment.sees_own_device(os.environ, visible):
        return 0
    raise ProblemsError.of(
        "LOCAL_RANK",
        f"local rank {local} has no {device().name} device of its own",
        f"this machine has {limit}",
        "start as many processes as devices, or set DS_ACCELERATOR=cpu and CUDA_VISIBLE_DEVICES= for CPUs",
    )


def take_device() -> int:
    """Take the device of this rank, also for DeepSpeed and accelerate, and return its index.

    They take LOCAL_RANK for the index: where it is another, `local_rank` remembers what the launcher said.
    Raises ProblemsError as `check_device`.
    """
    index = check_device()
    local = local_rank()
    if index != local:
        os.environ[OWN_LOCAL_RANK] = str(local)
        os.environ["LOCAL_RANK"] = str(index)
        # DeepSpeed's engine insists that it is the same
        if "OMPI_COMM_WORLD_LOCAL_RANK" in os.environ:
            os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] = str(index)
    _accelerator().set_device(index)
    return index


def device_identity() -> tuple[str, str] | None:
    """Return this machine's name and its GPU's serial number (UUID), if any, to find ranks that share one."""
    facts = (
        device_module().get_device_properties(check_device())
        if device().own_memory
        else None
    )
    uuid = getattr(facts, "uuid", None)
    if uuid is None:
        return None
    return (socket.gethostname(), str(uuid))


def check_shared_devices(identities: Sequence[Sequence[str] | None]) -> None:
    """Check that no two ranks have one GPU, by their `device_identity`. Raises ProblemsError."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for number, identity in enumerate(identities):
        if identity is not None:
            host, gpu = identity
            ranks.setdefault((host, gpu), []).append(number)
    rule = "each rank needs one of its own"
    fix = "give every task its own (srun --gpus-per-task=1), or all of them to all (--gres, no binding)"
    shared = []
    for (host, gpu), some in ranks.items():
        if len(some) > 1:
            shared.append(
                Problem(
                    "LOCAL_RANK",
                    f"ranks {', '.join(map(str, some))} on {host} have one GPU, {gpu}",
                    rule,
                    fix,
                )
            )
    if shared:
        raise ProblemsError(shared)


def share_cores() -> None:
    """Split the cores over the ranks of this node; without it every rank starts a thread on every core.

    With GPUs, too: an offloaded optimizer steps on the cores. The user's OMP_NUM_THREADS stands, but not the
    1 that torchrun sets by itself.
    """
    import torch

    asked = os.environ.get("OMP_NUM_THREADS")
    if asked is None or (asked == "1" and "TORCHELASTIC_RUN_ID" in os.environ):
        torch.set_num_threads(
            max(1, len(os.sched_getaffinity(0)) // local_world_size())
        )


def keep_freed_memory() -> None:
    """Keep what this process frees, for what it allocates next, where tensors lie in host memory.

    Without it the C library gives large blocks back to the system at once, and the system clears each page
    when it is touched again: 29,000 pages and a tenth of a step's time (docs/benchmarks.md). The user's
    MALLOC_ variables stand. See mallopt(3); C libraries other than GNU's have nothing of it.
    """
    if device().own_memory or any(name.startswith("MALLOC_") for name in os.environ):
        return
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX: no block is mapped apart
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: the end of the heap is not given back
