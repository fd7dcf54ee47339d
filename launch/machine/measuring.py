"""Measurement of this machine's rates: products, memory, copies, a collective, start of an operation."""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch

from launch.machine import abilities
from launch.machine.description import cores
from launch.machine.memory import host_memory
from launch.machine.rates import Rates, keep
from launch.ranks import processes
from recipes.problems import Problem, ProblemsError

# On a CPU, and on a GPU.
LARGE = 2048, 8192  # rows and columns of large products
LAYER = (1024, 512), (8192, 2048)  # tokens and hidden size of a typical layer
STREAM_BYTES = 2**27, 2**31  # larger than caches
LINK_ELEMENTS = 2**21  # of an all-reduce: about a layer's activations or gradients
STARTS = 300
# Least number of repetitions, and least seconds; the median counts.
REPEATS, REPEAT_S = 5, 0.4
# Imports and first operations of a training process before its first tensor.
BEFORE = """import resource, torch, torch._dynamo, torch.utils.tensorboard, deepspeed, matplotlib.pyplot
from transformers import PreTrainedTokenizerFast
torch.ones(1024, 512, dtype=torch.bfloat16) @ torch.ones(512, 512, dtype=torch.bfloat16)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"""


def measured() -> Rates:
    """Measure this machine's rates, which takes seconds, and keep them in the cache."""
    device = processes.device()
    rates = _of_gpu(device.name) if device.own_memory else _of_cpu()
    keep(rates)
    return rates


def _of_cpu() -> Rates:
    # First, since processes are forked before torch has threads.
    link = _gloo_gb_s()
    context = _context_bytes()
    precisions = {"fp32": torch.float32, "bf16": torch.bfloat16}
    if torch.ops.mkldnn._is_mkldnn_fp16_supported():  # else emulated
        precisions["fp16"] = torch.float16
    together = _stream_gb_s("cpu")
    threads, count = torch.get_num_threads(), cores()
    torch.set_num_threads(1)
    try:
        large, layers, attention = (
            {name: count * of("cpu", kind) for name, kind in precisions.items()}
            for of in (_large_tflops, _layer_tflops, _attention_tflops)
        )
        between, start = count * _layer_gb_s("cpu", torch.bfloat16), _start_us("cpu")
        stream = max(together, _stream_gb_s("cpu"))  # one core can fill a narrow memory
    finally:
        torch.set_num_threads(threads)
    return Rates(
        accelerator="cpu", accelerators=0, cores=count, layer_tflops=layers, attention_tflops=attention,
        # Large products need not be the fastest where caches hold small ones.
        tflops={name: max(large[name], layers[name]) for name in precisions}, memory_gb_s=stream,
        layer_gb_s=between, host_gb_s=stream, copy_gb_s=stream / 2, link_gb_s=link, start_us=start,
        memory_bytes=host_memory(), host_bytes=host_memory(), context_bytes=context,
    )  # fmt: skip


def _of_gpu(device: str) -> Rates:
    module = torch.get_device_module(device)
    facts, count = module.get_device_properties(0), module.device_count()
    torch.zeros(1, device=device)
    free, total = module.mem_get_info()
    context = total - free - module.memory_reserved()  # with what other processes hold, if there are any
    precisions = {"fp32": torch.float32, "fp16": torch.float16}
    if abilities.detect_machine().bf16:
        precisions["bf16"] = torch.bfloat16
    large, layers, attention = (
        {name: of(device, kind) for name, kind in precisions.items()}
        for of in (_large_tflops, _layer_tflops, _attention_tflops)
    )
    return Rates(
        accelerator=facts.name, accelerators=count, cores=cores(), tflops=large,
        layer_tflops=layers, attention_tflops=attention,
        memory_gb_s=_stream_gb_s(device), layer_gb_s=_layer_gb_s(device, torch.float16),
        host_gb_s=_stream_gb_s("cpu"), copy_gb_s=_pinned_gb_s(device),
        link_gb_s=_peer_gb_s(device) if count > 1 else None, start_us=_start_us(device),
        memory_bytes=facts.total_memory, host_bytes=host_memory(), context_bytes=context,
        multiprocessors=getattr(facts, "multi_processor_count", 1), watts=_board_watts(),
    )  # fmt: skip


def _seconds(work: Callable[[], object], device: str = "cpu") -> float:
    """Return the median seconds of `work`, after a first call that allocates and compiles.

    On a CPU only the thread's own computing time counts, not its waits for a core.
    """
    clock = time.thread_time if device == "cpu" else time.perf_counter
    found: list[float] = []
    while len(found) <= REPEATS or sum(found) < REPEAT_S:
        start = clock()
        work()
        torch.get_device_module(device).synchronize()
        found.append(clock() - start)
    return statistics.median(found[1:])


def _large_tflops(device: str, kind: torch.dtype) -> float:
    size = LARGE[device != "cpu"]
    one, other = (torch.randn(size, size, device=device).to(kind) for _ in range(2))
    return 2 * size**3 / _seconds(lambda: one @ other, device) / 1e12


def _layer_tflops(device: str, kind: torch.dtype) -> float:
    """Measure the four weight products of a transformer layer, with both gradients: 72 T h^2."""
    tokens, hidden = LAYER[device != "cpu"]
    linear = torch.nn.functional.linear
    sizes = ((hidden, 3 * hidden), (hidden, hidden), (hidden, 4 * hidden), (4 * hidden, hidden))
    weights = [torch.randn(n, k, device=device).to(kind).requires_grad_() for k, n in sizes]
    streams = [torch.randn(tokens, k, device=device).to(kind).requires_grad_() for k, _ in sizes]
    given = [torch.randn(tokens, n, device=device).to(kind) for _, n in sizes]

    def work() -> None:
        outputs = [linear(stream, weight) for stream, weight in zip(streams, weights, strict=True)]
        torch.autograd.grad(outputs, [*streams, *weights], given)

    return 72 * tokens * hidden**2 / _seconds(work, device) / 1e12


def _attention_tflops(device: str, kind: torch.dtype) -> float:
    """Measure attention, two products forward and five backward: heads of 64, sequences of 256 tokens."""
    tokens, hidden = LAYER[device != "cpu"]
    sequence, head = 256, 64
    shape = (tokens // sequence, hidden // head, sequence, head)
    given = torch.randn(shape, device=device).to(kind)
    query, key, value = (torch.randn(shape, device=device).to(kind).requires_grad_() for _ in range(3))
    attention = torch.nn.functional.scaled_dot_product_attention

    def work() -> None:
        torch.autograd.grad(attention(query, key, value, is_causal=True), (query, key, value), given)

    return 7 * tokens * sequence * hidden / _seconds(work, device) / 1e12


def _layer_gb_s(device: str, kind: torch.dtype) -> float:
    """Measure norm, residual sum and GELU over 4 h, forward and backward: 3 times 13 w T h bytes."""
    tokens, hidden = LAYER[device != "cpu"]
    functional = torch.nn.functional
    narrow, wide = (torch.randn(tokens, n, device=device).to(kind) for n in (hidden, 4 * hidden))
    given = (narrow.clone(), wide.clone())
    narrow.requires_grad_(), wide.requires_grad_()

    def work() -> None:
        summed = narrow + functional.layer_norm(narrow, (hidden,))
        torch.autograd.grad((summed, functional.gelu(wide, approximate="tanh")), (narrow, wide), given)

    moved = 3 * 13 * tokens * hidden * narrow.element_size()
    return float(moved / _seconds(work, device) / 1e9)


def _stream_gb_s(device: str) -> float:
    source = torch.ones(STREAM_BYTES[device != "cpu"] // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source), device) / 1e9


def _pinned_gb_s(device: str) -> float:
    host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    board = torch.empty_like(host, device=device)
    ways = (lambda: board.copy_(host, non_blocking=True), lambda: host.copy_(board, non_blocking=True))
    return min(2**28 / _seconds(way, device) / 1e9 for way in ways)


def _peer_gb_s(device: str) -> float:
    source = torch.empty(2**28, dtype=torch.uint8, device=f"{device}:0")
    target = torch.empty_like(source, device=f"{device}:1")
    return 2**28 / _seconds(lambda: target.copy_(source), device) / 1e9


def _start_us(device: str) -> float:
    """Measure the start of an operation; forward and backward of one count as three."""
    few = torch.ones(8, device=device, requires_grad=True)

    def work() -> None:
        value = few
        for _ in range(STARTS):
            value = value * few
        value.sum().backward()

    return _seconds(work, device) / (3 * STARTS) * 1e6


def _gloo_gb_s() -> float | None:
    """Measure the bus rate of an all-reduce between two processes; None if they cannot be forked."""
    if not hasattr(os, "fork") or cores() < 2:
        return None
    folder = tempfile.mkdtemp()
    children: list[int] = []
    for rank in range(2):
        if not (child := os.fork()):
            _reduce(rank, folder)
        children.append(child)
    try:
        ends = [os.waitpid(child, 0)[1] for child in children]
        if any(ends):
            return None
        return 2 * LINK_ELEMENTS / float(Path(folder, "seconds").read_text()) / 1e9
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _reduce(rank: int, folder: str) -> NoReturn:
    """Run all-reduces in the forked process of a rank, of two bytes per number as in training, and exit."""
    code = 1
    try:
        torch.set_num_threads(1)
        meet, most = f"file://{folder}/meet", timedelta(seconds=30)
        torch.distributed.init_process_group("gloo", meet, rank=rank, world_size=2, timeout=most)
        values = torch.ones(LINK_ELEMENTS, dtype=torch.bfloat16)
        seconds = _rounds(lambda: torch.distributed.all_reduce(values))
        if rank == 0:
            Path(folder, "seconds").write_text(str(seconds))
        torch.distributed.barrier()
        code = 0
    finally:
        os._exit(code)


def _rounds(work: Callable[[], object]) -> float:
    """Return the median seconds of a fixed number of calls, with the wait for the other rank."""
    found = []
    for _ in range(2 * REPEATS):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def _context_bytes() -> float:
    """Return the largest resident set of a process that only imports the libraries."""
    done = subprocess.run([sys.executable, "-c", BEFORE], capture_output=True, text=True, timeout=300)
    lines = done.stdout.split()
    if done.returncode or not lines:
        came = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
        rule = "a process that imports torch, DeepSpeed and transformers is measured"
        raise ProblemsError([Problem("--hardware", f"this: {came}", rule, "pip install -r requirements.txt")])
    return float(lines[-1]) * (1 if sys.platform == "darwin" else 1024)


def _board_watts() -> float | None:
    command = ["nvidia-smi", "--query-gpu=power.limit", "--format=csv,noheader,nounits", "--id=0"]
    with contextlib.suppress(OSError, ValueError, IndexError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        return float(done.stdout.split()[0])
    return None
