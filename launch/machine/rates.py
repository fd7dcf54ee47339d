"""How fast this machine is: products, memory, copies, collectives; measured once and kept in the cache.

Nothing here imports torch before something has to be measured: the planner reads what is kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any

from data.cache import default_directory
from data.durable_files import write_atomically
from launch.machine.description import cpu_model
from launch.machine.memory import host_memory

LARGE = {"cpu": 2048, "cuda": 8192}  # rows and columns of large products
# Tokens and hidden size of a layer that stands for those that such a machine trains.
LAYER = {"cpu": (1024, 512), "cuda": (8192, 2048)}
STREAM_BYTES = {"cpu": 2**27, "cuda": 2**31}  # larger than caches
LINK_ELEMENTS = 2**21  # of an all-reduce: about a layer's activations or gradients on such a machine
STARTS = 300
# Of each, at least so many, and for so many seconds. The fastest counts: what is kept is to be the machine's,
# not that of what else ran meanwhile.
REPEATS, REPEAT_S = 5, 0.4
# What a training process has imported, and done, before its first tensor.
BEFORE = """import resource, torch, deepspeed, matplotlib.pyplot, torch.utils.tensorboard
from transformers import PreTrainedTokenizerFast
torch.ones(1024, 512, dtype=torch.bfloat16) @ torch.ones(512, 512, dtype=torch.bfloat16)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"""
GIB = 2**30


@dataclass(frozen=True)
class Rates:
    """What was measured. Operations and bytes per second are of all cores, or of one GPU.

    Those of cores are one core's times their number, but for memory, which they share: ranks that compute
    have a core each, and threads that wait for each other measure what else runs.

    Attributes:
        accelerator: its name as torch has it, or "cpu".
        tflops: 10^12 operations/s of the fastest products, by precision.
        layer_tflops: the same of a layer's products, forward and backward; empty: not measured.
        attention_tflops: the same of causal attention, whose masked half is not counted.
        memory_gb_s: of a stream copy, reading and writing, 10^9 bytes/s.
        layer_gb_s: of what a layer does between products, each operand read and written once.
        host_gb_s: of the host's memory.
        copy_gb_s: between host and accelerator, pinned, the slower way.
        link_gb_s: on the bus of an all-reduce of two processes, or of a copy between two GPUs; None: one GPU.
        start_us: microseconds to start an operation.
        memory_bytes: of the accelerator, or what processes may use.
        context_bytes: of a process before its first tensor.
        watts: the board's power limit; None: nothing says it.
    """

    accelerator: str
    accelerators: int
    cores: int
    tflops: dict[str, float]
    layer_tflops: dict[str, float]
    attention_tflops: dict[str, float]
    memory_gb_s: float
    layer_gb_s: float
    host_gb_s: float
    copy_gb_s: float
    link_gb_s: float | None
    start_us: float
    memory_bytes: float
    host_bytes: float
    context_bytes: float
    multiprocessors: int = 1
    watts: float | None = None


def cached() -> Rates | None:
    """What was measured on this machine with this torch; None: nothing, or nothing that can be read."""
    try:
        values = json.loads(place().read_text(encoding="utf-8"))
        return Rates(**values["rates"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def measured() -> Rates:
    """Measure this machine, which takes seconds, and keep that, where the cache can be written."""
    import torch

    rates = _of_gpu(torch) if _has_gpu(torch) else _of_cpu(torch)
    with contextlib.suppress(OSError):
        place().parent.mkdir(parents=True, exist_ok=True)
        write_atomically(place(), json.dumps({"machine": machine(), "rates": asdict(rates)}, indent=2) + "\n")
    return rates


def place() -> Path:
    """The file of this machine in the cache."""
    digest = sha256(json.dumps(machine(), sort_keys=True).encode()).hexdigest()[:16]
    return default_directory() / "rates" / f"{digest}.json"


def machine() -> dict[str, Any]:
    """What the rates belong to, found without torch: the same in a command and in what a launcher starts."""
    gpus = sorted(path.read_text() for path in Path("/proc/driver/nvidia/gpus").glob("*/information"))
    if os.environ.get("DS_ACCELERATOR") == "cpu" or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        gpus = []
    names = [line for text in gpus for line in text.splitlines() if line.startswith("Model")]
    version = None
    with contextlib.suppress(metadata.PackageNotFoundError):
        version = metadata.version("torch")
    facts = {"host": socket.gethostname(), "cpu": cpu_model(), "cores": _cores(), "torch": version}
    return {**facts, "gpus": names}


def _has_gpu(torch: Any) -> bool:
    return os.environ.get("DS_ACCELERATOR") != "cpu" and bool(torch.cuda.is_available())


def _of_cpu(torch: Any) -> Rates:
    # First: processes are forked while torch has no threads yet.
    link = _gloo_gb_s(torch)
    context = _context_bytes()
    precisions = {"fp32": torch.float32, "bf16": torch.bfloat16}
    if torch.ops.mkldnn._is_mkldnn_fp16_supported():  # else emulated
        precisions["fp16"] = torch.float16
    together = _stream_gb_s(torch, "cpu")
    threads, cores = torch.get_num_threads(), _cores()
    torch.set_num_threads(1)
    try:
        large, layers, attention = (
            {name: cores * of(torch, "cpu", kind) for name, kind in precisions.items()}
            for of in (_large_tflops, _layer_tflops, _attention_tflops)
        )
        between, start = cores * _layer_gb_s(torch, "cpu", torch.bfloat16), _start_us(torch, "cpu")
        stream = max(together, _stream_gb_s(torch, "cpu"))  # one core alone can fill a narrow memory
    finally:
        torch.set_num_threads(threads)
    return Rates(
        accelerator="cpu", accelerators=0, cores=cores, layer_tflops=layers, attention_tflops=attention,
        # Large products need not be the fastest where caches hold small ones.
        tflops={name: max(large[name], layers[name]) for name in precisions}, memory_gb_s=stream,
        layer_gb_s=between, host_gb_s=stream, copy_gb_s=stream / 2, link_gb_s=link, start_us=start,
        memory_bytes=host_memory(), host_bytes=host_memory(), context_bytes=context,
    )  # fmt: skip


def _of_gpu(torch: Any) -> Rates:
    facts, count = torch.cuda.get_device_properties(0), torch.cuda.device_count()
    torch.zeros(1, device="cuda")
    free, total = torch.cuda.mem_get_info()
    context = total - free - torch.cuda.memory_reserved()  # with what other processes hold, if there are any
    precisions = {"fp32": torch.float32, "fp16": torch.float16}
    if torch.cuda.is_bf16_supported(including_emulation=False):
        precisions["bf16"] = torch.bfloat16
    large, layers, attention = (
        {name: of(torch, "cuda", kind) for name, kind in precisions.items()}
        for of in (_large_tflops, _layer_tflops, _attention_tflops)
    )
    return Rates(
        accelerator=torch.cuda.get_device_name(0), accelerators=count, cores=_cores(), tflops=large,
        layer_tflops=layers, attention_tflops=attention,
        memory_gb_s=_stream_gb_s(torch, "cuda"), layer_gb_s=_layer_gb_s(torch, "cuda", torch.float16),
        host_gb_s=_stream_gb_s(torch, "cpu"), copy_gb_s=_pinned_gb_s(torch),
        link_gb_s=_peer_gb_s(torch) if count > 1 else None, start_us=_start_us(torch, "cuda"),
        memory_bytes=facts.total_memory, host_bytes=host_memory(), context_bytes=context,
        multiprocessors=facts.multi_processor_count, watts=_board_watts(),
    )  # fmt: skip


def _seconds(torch: Any, work: Callable[[], object], device: str = "cpu") -> float:
    """The fastest of several, after one that allocates and compiles."""
    found: list[float] = []
    while len(found) <= REPEATS or sum(found) < REPEAT_S:
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return min(found[1:])


def _large_tflops(torch: Any, device: str, kind: Any) -> float:
    size = LARGE[device]
    one, other = (torch.randn(size, size, device=device).to(kind) for _ in range(2))
    return 2 * size**3 / _seconds(torch, lambda: one @ other, device) / 1e12


def _layer_tflops(torch: Any, device: str, kind: Any) -> float:
    """The four products of a transformer layer's weights, with those for both gradients: 72 T h^2."""
    tokens, hidden = LAYER[device]
    linear = torch.nn.functional.linear
    sizes = ((hidden, 3 * hidden), (hidden, hidden), (hidden, 4 * hidden), (4 * hidden, hidden))
    weights = [torch.randn(n, k, device=device).to(kind).requires_grad_() for k, n in sizes]
    streams = [torch.randn(tokens, k, device=device).to(kind).requires_grad_() for k, _ in sizes]
    given = [torch.randn(tokens, n, device=device).to(kind) for _, n in sizes]

    def work() -> None:
        outputs = [linear(stream, weight) for stream, weight in zip(streams, weights, strict=True)]
        torch.autograd.grad(outputs, [*streams, *weights], given)

    return 72 * tokens * hidden**2 / _seconds(torch, work, device) / 1e12


def _attention_tflops(torch: Any, device: str, kind: Any) -> float:
    """Two products forward and five backward, of heads of 64 numbers and sequences of 256 tokens."""
    tokens, hidden = LAYER[device]
    sequence, head = 256, 64
    shape = (tokens // sequence, hidden // head, sequence, head)
    given = torch.randn(shape, device=device).to(kind)
    parts = [torch.randn(shape, device=device).to(kind).requires_grad_() for _ in range(3)]
    attention = torch.nn.functional.scaled_dot_product_attention

    def work() -> None:
        torch.autograd.grad(attention(*parts, is_causal=True), parts, given)

    return 7 * tokens * sequence * hidden / _seconds(torch, work, device) / 1e12


def _layer_gb_s(torch: Any, device: str, kind: Any) -> float:
    """Norm, residual sum, and GELU over 4 h, forward and backward; as many bytes thrice: 13 w T h each."""
    tokens, hidden = LAYER[device]
    functional = torch.nn.functional
    narrow, wide = (torch.randn(tokens, n, device=device).to(kind) for n in (hidden, 4 * hidden))
    given = (narrow.clone(), wide.clone())
    narrow.requires_grad_(), wide.requires_grad_()

    def work() -> None:
        summed = narrow + functional.layer_norm(narrow, (hidden,))
        torch.autograd.grad((summed, functional.gelu(wide, approximate="tanh")), (narrow, wide), given)

    moved = 3 * 13 * tokens * hidden * narrow.element_size()
    return float(moved / _seconds(torch, work, device) / 1e9)


def _stream_gb_s(torch: Any, device: str) -> float:
    source = torch.ones(STREAM_BYTES[device] // 4, device=device)
    target = torch.empty_like(source)
    return 2 * STREAM_BYTES[device] / _seconds(torch, lambda: target.copy_(source), device) / 1e9


def _pinned_gb_s(torch: Any) -> float:
    host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    board = torch.empty_like(host, device="cuda")
    ways = (lambda: board.copy_(host, non_blocking=True), lambda: host.copy_(board, non_blocking=True))
    return min(2**28 / _seconds(torch, way, "cuda") / 1e9 for way in ways)


def _peer_gb_s(torch: Any) -> float:
    source = torch.empty(2**28, dtype=torch.uint8, device="cuda:0")
    target = torch.empty_like(source, device="cuda:1")
    return 2**28 / _seconds(torch, lambda: target.copy_(source), "cuda") / 1e9


def _start_us(torch: Any, device: str) -> float:
    """Of operations on a few numbers, forward and backward, which is as much as three of them."""
    few = torch.ones(8, device=device, requires_grad=True)

    def work() -> None:
        value = few
        for _ in range(STARTS):
            value = value * few
        value.sum().backward()

    return _seconds(torch, work, device) / (3 * STARTS) * 1e6


def _gloo_gb_s(torch: Any) -> float | None:
    """Bytes per second on the bus of an all-reduce between two processes; None: they cannot be forked."""
    if not hasattr(os, "fork") or _cores() < 2:
        return None
    folder = tempfile.mkdtemp()
    children: list[int] = []
    for rank in range(2):
        if not (child := os.fork()):
            _reduce(torch, rank, folder)
        children.append(child)
    try:
        ends = [os.waitpid(child, 0)[1] for child in children]
        if any(ends):
            return None
        return 2 * LINK_ELEMENTS / float(Path(folder, "seconds").read_text()) / 1e9
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _reduce(torch: Any, rank: int, folder: str) -> None:
    """The forked process of a rank; it ends here. All-reduces of two bytes per number, as in training."""
    code = 1
    try:
        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=2)
        values = torch.ones(LINK_ELEMENTS, dtype=torch.bfloat16)
        seconds = _rounds(lambda: torch.distributed.all_reduce(values))
        if rank == 0:
            Path(folder, "seconds").write_text(str(seconds))
        torch.distributed.barrier()
        code = 0
    finally:
        os._exit(code)


def _rounds(work: Callable[[], object]) -> float:
    """The fastest of as many as every rank makes."""
    found = []
    for _ in range(2 * REPEATS):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found)


def _context_bytes() -> float:
    """The largest resident set of a process that has imported the libraries and does nothing."""
    done = subprocess.run([sys.executable, "-c", BEFORE], capture_output=True, text=True, timeout=300)
    lines = done.stdout.split()
    if done.returncode or not lines:
        return 0.5 * GIB
    return float(lines[-1]) * (1 if sys.platform == "darwin" else 1024)


def _board_watts() -> float | None:
    command = ["nvidia-smi", "--query-gpu=power.limit", "--format=csv,noheader,nounits", "--id=0"]
    with contextlib.suppress(OSError, ValueError, IndexError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        return float(done.stdout.split()[0])
    return None


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
