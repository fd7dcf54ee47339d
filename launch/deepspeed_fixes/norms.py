"""Norms of gradients, exact to rounding for any number of elements, and the division by them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.utils import is_model_parallel_parameter

BLOCK = 512  # elements; float32 adds up so many squares without loss


def norm_dtype() -> torch.dtype:
    """Return float64, in which norms are added up; float32 where the device has no other (Apple's)."""
    apples = get_accelerator().device_name() == "mps"
    return torch.float32 if apples else torch.float64


def sum_of_squares(
    counted: Sequence[torch.Tensor], others: Sequence[torch.Tensor] = ()
) -> torch.Tensor:
    """Add up the squares of all elements of `counted`; a scalar in float64, where the device has it.

    `others` add nothing, but make the sum NaN where they hold an infinity: copies of what another rank
    counts, which step here. On a CPU, whose sums in float32 lose, tensor by tensor; else by one kernel for
    many tensors.
    """
    device = get_accelerator().current_device_name()
    total = torch.zeros((), dtype=norm_dtype(), device=device)
    for tensors, weight in ((counted, 1.0), (others, 0.0)):
        if not tensors:
            continue
        if tensors[0].device.type == "cpu":
            squares = torch.stack([squared_norm(tensor) for tensor in tensors]).sum()
        else:
            norms = torch.stack(
                torch._foreach_norm(list(tensors), 2, dtype=torch.float32)
            )
            squares = torch.linalg.vector_norm(norms, dtype=norm_dtype()).square()
        total = total + weight * squares.to(device)
    return total


def counts_here(parameter: torch.nn.Parameter, tensor_rank: int) -> bool:
    """Check whether a parameter counts in this rank's part of the norm: duplicated ones count once."""
    if getattr(parameter, "ds_pipe_replicated", False):  # a tied copy on a later stage
        return False
    return tensor_rank == 0 or is_model_parallel_parameter(parameter)


def by_count(
    tensors: Iterable[tuple[torch.nn.Parameter, torch.Tensor | None]], tensor_rank: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tensors that there are of parameters: of those that count here, and of the others."""
    kinds: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for parameter, tensor in tensors:
        if tensor is not None:
            kinds[not counts_here(parameter, tensor_rank)].append(tensor)
    return kinds


def squared_norm(gradient: torch.Tensor) -> torch.Tensor:
    """Add up squares: blocks of 512 in float32, several times as fast on a CPU, and the blocks in float64."""
    flat = gradient.flatten()
    blocks = flat.numel() // BLOCK
    parts = (
        flat[: blocks * BLOCK].view(blocks, BLOCK),
        flat[blocks * BLOCK :].view(1, -1),
    )
    norms = torch.cat(
        [torch.linalg.vector_norm(part, dim=1, dtype=torch.float32) for part in parts]
    )
    norm: torch.Tensor = torch.linalg.vector_norm(norms, dtype=norm_dtype())
    return norm.square()


def divisor_of(scaled_norm: float, scale: float, largest: float) -> float:
    """Return the divisor of gradients that are `scale` times too large, with norm `scaled_norm`.

    `largest`: norm to which they are clipped; 0: they are not.
    """
    if not largest:
        return scale
    return scale * max(1.0, (scaled_norm / scale + 1e-6) / largest)


def divide(
    optimizer: torch.optim.Optimizer, gradients: Sequence[torch.Tensor], divisor: float
) -> None:
    """Divide the gradients of the optimizer's next step; torch's fused AdamW does it as it reads them."""
    fused = bool(optimizer.defaults.get("fused"))
    if fused:
        scale = torch.full((), divisor, dtype=torch.float32, device=gradients[0].device)
        optimizer.grad_scale = None if divisor == 1.0 else scale  # type: ignore[attr-defined]
    elif divisor != 1.0:
        torch._foreach_mul_(list(gradients), 1.0 / divisor)
