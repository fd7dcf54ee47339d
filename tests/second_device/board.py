"""Register the second device with torch: `torch.board` answers as `torch.cuda` does, "bccl" as NCCL.

BOARD_DEVICES: number of devices (8). BOARD_MEMORY_MB: memory of a process there. BOARD_COUNTS=FILE.json:
rank N writes into FILE.N.json how many kernels it launched, by operator, and what it copied and waited for.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import types
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from second_device import build

C = build.load()


def index(device: torch.device | str | int | None = None) -> int:
    """Return the number of a device; of the current one, where none is named."""
    if isinstance(device, int):
        return device
    named = None if device is None else torch.device(device).index
    return C.current_device() if named is None else named


def place(device: torch.device | str | int | None = None) -> torch.device:
    return torch.device("board", index(device))


@contextlib.contextmanager
def using_device(device: torch.device | str | int) -> Iterator[None]:
    before = C.current_device()
    C.set_device(index(device))
    try:
        yield
    finally:
        C.set_device(before)


@contextlib.contextmanager
def using_stream(stream: torch.Stream | None) -> Iterator[None]:
    with stream or contextlib.nullcontext():
        yield


def current_stream(device: torch.device | str | int | None = None) -> torch.Stream:
    return torch.accelerator.current_stream(place(device))


def default_stream(device: torch.device | str | int | None = None) -> torch.Stream:
    kind = current_stream(device).device_type
    return torch.Stream(stream_id=0, device_index=index(device), device_type=kind)


def properties(device: torch.device | str | int | None = None) -> types.SimpleNamespace:
    memory = C.memory()["limit"]
    uuid = f"board-{os.environ.get('HOME')}-{index(device)}"  # machines of tests have homes of their own
    return types.SimpleNamespace(name="Board", total_memory=memory, multi_processor_count=1, uuid=uuid)


def in_use(what: str) -> object:
    return lambda device=None: C.memory()[what]


def _register() -> None:
    def generator() -> torch.Generator:
        return C.default_generator(C.current_device())

    module = types.ModuleType("torch.board")
    vars(module).update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        _lazy_init=lambda: None,
        device=using_device,
        device_count=C.device_count,
        current_device=C.current_device,
        set_device=lambda device: C.set_device(index(device)),
        get_device_name=lambda device=None: "Board",
        get_device_capability=lambda device=None: (8, 0),
        get_device_properties=properties,
        is_bf16_supported=lambda including_emulation=True: True,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16, torch.float32],
        synchronize=lambda device=None: C.synchronize(index(device)),
        stream=using_stream,
        current_stream=current_stream,
        default_stream=default_stream,
        Stream=lambda device=None, priority=0: torch.Stream(device=place(device)),
        Event=lambda enable_timing=False, **_: torch.Event(device="board", enable_timing=enable_timing),
        manual_seed=lambda seed: generator().manual_seed(seed),
        manual_seed_all=lambda seed: [
            C.default_generator(n).manual_seed(seed) for n in range(C.device_count())
        ],
        seed=lambda: generator().seed(),
        initial_seed=lambda: generator().initial_seed(),
        get_rng_state=lambda device=None: C.default_generator(index(device)).get_state(),
        set_rng_state=lambda state, device=None: C.default_generator(index(device)).set_state(state),
        default_generators=tuple(C.default_generator(n) for n in range(C.device_count())),
        memory_allocated=in_use("live"),
        memory_reserved=in_use("live"),
        max_memory_allocated=in_use("peak"),
        max_memory_reserved=in_use("peak"),
        reset_peak_memory_stats=lambda device=None: C.reset_peak(),
        memory_stats=lambda device=None: {},
        empty_cache=lambda: None,
        mem_get_info=lambda device=None: (C.memory()["limit"] - C.memory()["live"], C.memory()["limit"]),
    )
    torch.utils.rename_privateuse1_backend("board")
    torch._register_device_module("board", module)
    torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
    dist.Backend.register_backend("bccl", _group, devices=["board"])


def _group(store: dist.Store, rank: int, size: int, timeout: object) -> object:
    return C.group(dist.ProcessGroupGloo(store, rank, size, timeout))


def _count_at_the_end(path: Path) -> None:
    """Write the counts when the process ends, also by os._exit."""

    def write() -> None:
        own = path.with_suffix(f".{os.environ.get('RANK', 0)}.json")
        own.write_text(json.dumps(C.counts(), indent=1))

    leave = os._exit
    os._exit = lambda code: (write(), leave(code))
    atexit.register(write)


_register()
if os.environ.get("BOARD_COUNTS"):
    _count_at_the_end(Path(os.environ["BOARD_COUNTS"]))
