"""Single operations of a model on a GPU: output layers, losses, optimizers, and kernels of attention.

python -m launch.experiments.benchmarks.gpu_kernels NAME DEVICE

(started by `benchmark.py gpu`, each in a process of its own; prints JSON)
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from launch.experiments.benchmarks.clock import now

# Kernels of attention: FlashAttention's, cuDNN's, the memory-efficient ones, and plain softmax.
ATTENTION = re.compile(
    "flash|fmha|efficient|sdpa|cudnn.*attention|attention.*cudnn|flex|(?<!log)(?<!log_)softmax", re.IGNORECASE
)
REPEATS = 10
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.bfloat16}


def seconds(work: Callable[[], object]) -> float:
    """The median, once it was done twice."""
    found = []
    for _ in range(REPEATS + 2):
        started = now()
        work()
        found.append(now() - started)
    return sorted(found[2:])[REPEATS // 2]


def kernels(work: Callable[[], object]) -> list[str]:
    """Names of the kernels of attention that run in it; of operations, on a CPU."""
    work()
    gpu = torch.cuda.is_available()
    activity = torch.profiler.ProfilerActivity.CUDA if gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        work()
        now()
    return sorted({e.key[:100] for e in profiler.key_averages() if ATTENTION.search(e.key)})


def attention(device: str) -> dict[str, Any]:
    """Kernels and milliseconds of attention, both passes: causal, padded, with dropout; by head size."""
    sequence = 1024 if device == "cuda" else 64
    found: dict[str, Any] = {}
    for head in (64, 96, 128, 512):
        for case in ("causal", "padded", "dropout"):
            shape = (4, 2048 // head if device == "cuda" else 1, sequence, head)
            q, k, v = (
                torch.randn(shape, device=device, dtype=DTYPES[device], requires_grad=True) for _ in "qkv"
            )
            given, mask = torch.randn_like(q), None
            if case == "padded":
                kept = torch.arange(sequence, device=device) < sequence // 2
                mask = kept[None, None, None, :].expand(shape[0], 1, sequence, sequence)

            def work(q: Tensor = q, k: Tensor = k, v: Tensor = v, mask: Any = mask, case: str = case) -> None:
                probability = 0.1 if case == "dropout" else 0.0
                out = F.scaled_dot_product_attention(q, k, v, mask, probability, is_causal=mask is None)
                torch.autograd.grad(out, (q, k, v), given)  # noqa: B023

            found[f"head size {head}, {case}"] = {"ms": 1e3 * seconds(work), "kernels": kernels(work)}
    return found


def output_layer(device: str) -> dict[str, Any]:
    """Milliseconds of the output layer, forward and both gradients, by its number of columns."""
    rows, hidden = (8192, 1920) if device == "cuda" else (64, 64)
    found: dict[str, Any] = {}
    for columns in (50257, 50264, 50304, 51200) if device == "cuda" else (509, 512):
        x = torch.randn(rows, hidden, device=device, dtype=DTYPES[device], requires_grad=True)
        weight = torch.randn(columns, hidden, device=device, dtype=DTYPES[device], requires_grad=True)
        given = torch.randn(rows, columns, device=device, dtype=DTYPES[device])
        spent = seconds(lambda: torch.autograd.grad(F.linear(x, weight), (x, weight), given))  # noqa: B023
        found[f"{columns} columns"] = {
            "ms": 1e3 * spent,
            "tflops": 6 * rows * hidden * columns / spent / 1e12,
        }
    return found


def cross_entropy(device: str) -> dict[str, Any]:
    """Milliseconds and GB of logits and their loss: our own, and PyTorch's on logits in fp32."""
    from modeling.parallel.cross_entropy import weighted_loss

    rows, columns = (8192, 50304) if device == "cuda" else (64, 512)
    labels = torch.randint(columns, (1, rows), device=device)
    weights = torch.full((1, rows), 1 / rows, device=device)
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "ours": lambda logits: weighted_loss(logits, labels, weights, None),
        "in fp32": lambda logits: F.cross_entropy(logits.float().flatten(0, 1), labels.flatten()),
    }
    found: dict[str, Any] = {}
    for name, way in ways.items():
        logits = torch.randn(1, rows, columns, device=device, dtype=DTYPES[device], requires_grad=True)
        compiled = torch.compile(way)
        for form, loss in ((name, way), (f"{name}, compiled", compiled)):
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated() if device == "cuda" else 0
            spent = seconds(lambda: torch.autograd.grad(loss(logits), logits))  # noqa: B023
            peak = (torch.cuda.max_memory_allocated() - before) / 1e9 if device == "cuda" else None
            found[form] = {"ms": 1e3 * spent, "peak_gb": peak}
    return found


def optimizers(device: str) -> dict[str, Any]:
    """Milliseconds of AdamW over one flat tensor, and over many: torch's foreach and fused, DeepSpeed's."""
    count, numbers = (200, 2**19) if device == "cuda" else (4, 2**10)
    found: dict[str, Any] = {}
    for layout, sizes in (("flat", [count * numbers]), ("per parameter", [numbers] * count)):
        for kind in ("foreach", "fused", *(["deepspeed"] if device == "cuda" else [])):  # needs nvcc
            parameters = [torch.randn(size, device=device).requires_grad_() for size in sizes]
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            name = f"{layout}, {kind}"
            try:
                if kind == "deepspeed":
                    from deepspeed.ops.adam import FusedAdam

                    optimizer: Any = FusedAdam(parameters)
                else:
                    optimizer = torch.optim.AdamW(
                        parameters, fused=kind == "fused", foreach=kind == "foreach"
                    )
                found[name] = {"ms": 1e3 * seconds(optimizer.step)}
            except Exception as error:  # of compilers, drivers: each has its own
                found[name] = {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
    return found


MEASURES: dict[str, Callable[[str], dict[str, Any]]] = {
    "attention": attention, "output_layer": output_layer, "cross_entropy": cross_entropy,
    "optimizers": optimizers,
}  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(MEASURES[sys.argv[1]](sys.argv[2])))
