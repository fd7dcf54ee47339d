"""Before and after training: what the machine can do, joining the other processes, leaving them cleanly."""

from __future__ import annotations

import contextlib
import ctypes.util
import datetime
import logging
import os
import shutil
import signal
import socket
import sys
import sysconfig
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from ds_configs.resolver import Machine
from launch import out_of_memory

GLOO_ERRORS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", "NCCL", "gloo")


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def refuse(problem: object, code: int = 2) -> NoReturn:
    """Say what is wrong, once per machine since machines may differ, and end every rank with `code`, without a traceback."""
    explain(problem)
    raise SystemExit(code)


def explain(problem: object) -> None:
    """Print on the first rank of every machine; those other than rank 0 say which machine they are."""
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        print(f"\n{problem}\n" if rank() == 0 else f"\non {socket.gethostname()}:\n{problem}\n", file=sys.stderr, flush=True)


def keep_error(directory: Path, text: str) -> None:
    """Leave a failing rank's traceback in the run directory, where a closed terminal cannot lose it."""
    with contextlib.suppress(OSError):
        (directory / f"error-rank-{rank()}.txt").write_text(text)


def quiet_libraries() -> None:
    """Keep DeepSpeed's and torch's start-up chatter off the screen; MEGARECIPES_VERBOSE=1 brings it back."""
    if os.environ.get("MEGARECIPES_VERBOSE") == "1":
        return
    os.environ.setdefault("DS_LOG_LEVEL", "warning")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    warnings.filterwarnings("ignore")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


def emulate_fp16() -> None:
    """Let a CPU accelerator claim fp16, so that the loss scaler can be exercised without a GPU. Before `import deepspeed`.

    Slow (a 1024^3 matrix product takes about 150 times as long as in fp32) and named in the results as a deviation.
    """
    from deepspeed.accelerator import get_accelerator, set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    if get_accelerator().device_name() != "cpu":
        return

    class EmulatedFp16(CPU_Accelerator):
        def is_fp16_supported(self):
            return True

    set_accelerator(EmulatedFp16())


def detect_machine(emulated_fp16: bool = False) -> Machine:
    """What this process's accelerator and operating system offer. Imports deepspeed's accelerator, starts nothing."""
    if emulated_fp16:
        emulate_fp16()
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    emulated = emulated_fp16 and accelerator.device_name() == "cpu"
    return Machine(
        accelerator=accelerator.device_name(),
        fp16=bool(accelerator.is_fp16_supported()),
        bf16=_has_bf16(accelerator),
        compiler=_can_compile(),
        cuda_compiler=accelerator.device_name() != "cuda" or _has_nvcc(),
        libaio=ctypes.util.find_library("aio") is not None,
        emulated_fp16=emulated,
    )


def _has_bf16(accelerator) -> bool:
    """On CUDA in hardware: DeepSpeed and torch also count the emulation of cards before Ampere, which is slow."""
    if accelerator.device_name() != "cuda":
        return bool(accelerator.is_bf16_supported())
    import torch

    return torch.cuda.is_bf16_supported(including_emulation=False)


def _has_nvcc() -> bool:
    from torch.utils.cpp_extension import CUDA_HOME

    return CUDA_HOME is not None and Path(CUDA_HOME, "bin", "nvcc").exists()


def _can_compile() -> bool:
    """Whether DeepSpeed's ops can be built: what torch calls as the C++ compiler, ninja, and Python's headers."""
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    return bool(shutil.which(os.environ.get("CXX", "c++")) and (shutil.which("ninja") or _ninja_module()) and headers.exists())


def _ninja_module() -> bool:
    """The ninja wheel puts its program beside the interpreter, which need not be on PATH: add it."""
    beside = os.path.join(os.path.dirname(sys.executable), "ninja")
    if not os.path.exists(beside):
        return False
    os.environ["PATH"] = os.path.dirname(beside) + os.pathsep + os.environ.get("PATH", "")
    return True


def start_processes(timeout_minutes: float = 30) -> None:
    """Join the process group that the launcher's environment describes; a plain `python` makes a group of one."""
    import torch

    if "RANK" not in os.environ:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))

    import deepspeed
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() == "cpu":
        _share_cores(torch)
        # DeepSpeed's shared-memory collectives compile for 20 s and leave 66 MiB per rank in /dev/shm; gloo does without.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    else:
        _take_device(get_accelerator())
    deepspeed.init_distributed(
        dist_backend=get_accelerator().communication_backend_name() if get_accelerator().device_name() != "cpu" else "gloo",
        auto_mpi_discovery=False,
        verbose=False,
        timeout=datetime.timedelta(minutes=timeout_minutes),
    )


def _take_device(accelerator) -> None:
    local = int(os.environ["LOCAL_RANK"])
    if local >= accelerator.device_count():
        raise SystemExit(
            f"local rank {local} has no {accelerator.device_name()} device of its own: this machine has {accelerator.device_count()}; "
            "start as many processes as devices, or set DS_ACCELERATOR=cpu and CUDA_VISIBLE_DEVICES= to run on the CPU"
        )
    accelerator.set_device(local)


def device_limit() -> int | None:
    """How many ranks this machine's devices carry; None on a CPU, where ranks share cores."""
    from deepspeed.accelerator import get_accelerator

    return None if get_accelerator().device_name() == "cpu" else get_accelerator().device_count()


def _share_cores(torch) -> None:
    """Split the cores over the ranks of this node; without it every rank starts a thread on every core."""
    if "OMP_NUM_THREADS" in os.environ:
        return
    local = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local))


class StopRequest:
    """SIGTERM, SIGINT or the appearance of `stop_file` ask for an orderly stop after the current step."""

    def __init__(self, stop_file: Path) -> None:
        self.reason: str | None = None
        self._stop_file = stop_file
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, kind, error, trace) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        if error is not None and self.reason:
            error.after_stop_request = True  # the launcher is ending this rank because another one failed

    def _receive(self, number, frame) -> None:
        self.reason = signal.Signals(number).name

    def agreed(self, group) -> str | None:
        """The reason if any rank of `group` was asked to stop: all ranks leave the loop at the same step."""
        import torch
        import torch.distributed as dist

        codes = ["", "SIGTERM", "SIGINT", "STOP file"]
        if rank() == 0 and self._stop_file.exists():
            self._stop_file.unlink()  # so that a resumed run does not stop at once
            self.reason = "STOP file"
        flag = torch.tensor(codes.index(self.reason or ""))
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
        return codes[int(flag)] or None


@contextlib.contextmanager
def clean_exit(note_failure: Callable[[str], None] = lambda text: None) -> Iterator[None]:
    """Run the body, then end the process: 0 after a barrier, 1 with this rank's traceback last on the screen.

    Ends with os._exit: a gloo worker that frees a tensor while Python finalises aborts about one run in forty.
    """
    import torch.distributed as dist

    try:
        yield
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        code = 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException as e:
        code = 1
        _report(e, note_failure)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _report(error: BaseException, note_failure: Callable[[str], None]) -> None:
    text = "".join(traceback.format_exception(error))
    if getattr(error, "after_stop_request", False) and world_size() > 1 and _lost_peers(error):
        return
    if world_size() > 1 and _lost_peers(error):
        # A consequence of another rank's end. Say nothing, so that the cause stays last on the screen, and let the launcher
        # end this process; speak up only if nothing does.
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
        time.sleep(20)
    note_failure(text)
    if "TORCHELASTIC_ERROR_FILE" in os.environ:  # torchrun prints what is in there as the root cause
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
    print(f"\nrank {rank()} of {world_size()} failed:\n{text}", file=sys.stderr, flush=True)


def _lost_peers(error: BaseException) -> bool:
    lost = isinstance(error, RuntimeError) and any(word in str(error) for word in GLOO_ERRORS)
    return lost and out_of_memory.said_by(error) is None  # NCCL may be what found no memory
