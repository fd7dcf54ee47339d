"""The processes of a run: this one's place among them, joining them, and the device it takes."""

from __future__ import annotations

import datetime
import os
import socket
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def gathered(own: T, group: ProcessGroup) -> list[T]:
    """Every rank's `own`, in rank order. Collective."""
    import torch.distributed as dist

    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group=group)
    return everyone


def start_processes(timeout_minutes: float = 30) -> None:
    """Join the process group that the launcher's environment describes; a plain `python` makes one of one."""
    if "RANK" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)

    import deepspeed
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        _share_cores()
        switch_shared_memory_op_off()
        backend = "gloo"
    else:
        _take_device(accelerator)
        backend = accelerator.communication_backend_name()
    timeout = datetime.timedelta(minutes=timeout_minutes)
    deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False, timeout=timeout)


def switch_shared_memory_op_off() -> None:
    """Have DeepSpeed's collectives on a CPU go through gloo alone.

    DeepSpeed 0.19.8, `comm/torch.py`: `init_distributed` compiles an op for collectives through shared
    memory, for 20 s, which only inference uses, and which leaves 66 MiB per rank in /dev/shm in the end.
    Upstream: no issue found on either; https://github.com/deepspeedai/DeepSpeed/issues/7625 asks for one.
    No longer needed when `test_processes.py::test_deepspeed_alone_leaves_shared_memory_behind` fails.
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def device_limit() -> int | None:
    """How many ranks this machine's devices carry; None on a CPU, where ranks share cores."""
    from deepspeed.accelerator import get_accelerator

    return None if get_accelerator().device_name() == "cpu" else get_accelerator().device_count()


def _take_device(accelerator: Any) -> None:
    local = int(os.environ["LOCAL_RANK"])
    if local >= accelerator.device_count():
        raise SystemExit(
            f"local rank {local} has no {accelerator.device_name()} device of its own: this machine has "
            f"{accelerator.device_count()}; start as many processes as devices, or set DS_ACCELERATOR=cpu "
            "and CUDA_VISIBLE_DEVICES= to run on the CPU"
        )
    accelerator.set_device(local)


def _share_cores() -> None:
    """Split the cores over the ranks of this node; without it every rank starts a thread on every core."""
    import torch

    if "OMP_NUM_THREADS" in os.environ:
        return
    local = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local))
