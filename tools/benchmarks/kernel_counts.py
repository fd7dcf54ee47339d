"""What a GPU does for one micro-batch, forward and backward, counted on the meta device: no GPU takes part.

Every operator that computes is a kernel (some are several: LayerNorm's and attention's backward pass, the
embedding's gradient); it moves its operands and results once, of a gather the rows that it takes. A function
that `modeling.fusing` has compiled is one kernel, attention counts as FlashAttention, and dropout as torch's
fused kernel. The optimizer is not counted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from launch.training.micro_batches import for_plain
from modeling import fusing
from modeling.families import family_of, model_shape
from modeling.hidden_dropout import dropout_seeds_of
from modeling.initialization import DTYPES, Init
from recipes.layout import padded_vocab
from recipes.schema import Recipe
from tools.benchmarks.nano_gpt import NanoGpt
from tools.benchmarks.systems import loss_of, transformers_inputs, transformers_model

aten = torch.ops.aten
META = torch.device("meta")
# without a kernel, besides views
FREE = re.compile("(new_)?empty|_unsafe_view|lift_fresh|detach")
# read as much of their source as they write
GATHERS = {"embedding", "gather", "index", "index_select"}
OVERWRITES = {"copy_", "fill_", "zero_"}  # do not read their first operand


class Kernel(NamedTuple):
    """A kernel: bytes read and written, operations of matrix products."""

    name: str
    moved: int
    operations: int


class Counts(TorchDispatchMode):
    """Kernels of one pass in their order, and the times that the host waits for a number."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []
        self.waits = 0

    def numbers(self) -> dict[str, int]:
        """Return the numbers of kernels and waits, bytes and operations."""
        return {
            "kernels": len(self.kernels),
            "bytes": sum(kernel.moved for kernel in self.kernels),
            "operations": sum(kernel.operations for kernel in self.kernels),
            "waits": self.waits,
        }

    def seconds(self, bytes_per_s: float, operations_per_s: float) -> float:
        """Return the least time: of each kernel that of its bytes or of its operations."""
        seconds = 0.0
        for _, moved, operations in self.kernels:
            seconds += max(moved / bytes_per_s, operations / operations_per_s)
        return seconds

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        packet = func._overloadpacket
        if packet is aten._local_scalar_dense:
            self.waits += 1
            return 1
        out = func(*args, **kwargs)
        name = packet.__name__
        if not (func.is_view or FREE.match(name)):
            formula = flop_registry.get(packet)
            operations = formula(*args, **kwargs, out_val=out) if formula else 0
            self.kernels.append(
                Kernel(name, _moved(name, (args, kwargs), out), operations)
            )
        return out

    def fused(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Have each call of a function counted as one kernel."""

        def call(*arguments: Any) -> Any:
            with _disable_current_modes():
                out = function(*arguments)
            name = function.__name__
            self.kernels.append(Kernel(name, _moved(name, arguments, out), 0))
            return out

        return call


def _moved(name: str, given: Any, out: Any) -> int:
    """Return the bytes that an operator reads and writes."""
    given = tree_leaves(given)
    if name in GATHERS:
        return 2 * _size(out) + sum(map(_size, given[1:]))
    return sum(map(_size, (*given[name in OVERWRITES :], *tree_leaves(out))))


def _size(x: Any) -> int:
    """Return the bytes of a tensor, each address once: an expanded one is as large as what it repeats."""
    if not isinstance(x, Tensor):
        return 0
    pairs = zip(x.shape, x.stride(), strict=True)
    return x.element_size() * math.prod(n for n, stride in pairs if stride or not n)


def passes(recipe: Recipe) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield each system's name and its forward pass over one micro-batch without padding, on meta."""
    model = recipe.model
    family = family_of(model)
    dtype = DTYPES[recipe.precision]
    samples = recipe.batch.micro or 1
    length = recipe.sequence_length
    sizes = {"B": samples, "N": samples, "S": length, "P": recipe.predictions}
    batch: dict[str, Any] = {}
    for name, dimensions in family.fields.sizes.items():
        size = [sizes[dimension] for dimension in dimensions]
        batch[name] = torch.ones(
            size, dtype=torch.float if "weights" in name else torch.long
        )
    if "lengths" in batch:
        batch["lengths"] *= length
    shape = model_shape(recipe, padded_vocab(model.vocab_size, 1))
    init = Init(recipe.seed, recipe.init_std, model.layers, dtype=dtype, meta=True)
    ours = family.plain(shape, group=None, init=init).train()
    numbers = torch.arange(samples, device=META)
    dropout_seeds = (
        dropout_seeds_of(recipe.seed, 0, numbers, length)
        if recipe.dropout.hidden
        else None
    )
    given, named = for_plain(batch, META, dropout_seeds)
    yield "ours", lambda: loss_of(ours(*given, **named))
    if model.family == "gpt2":
        plain = NanoGpt(recipe).to(META, dtype)
        tokens = batch["tokens"].to(META)
        yield "a plain GPT-2", lambda: plain(tokens, tokens)
    with META:
        theirs = transformers_model(recipe).to(dtype).train()
    taken = transformers_inputs(batch, torch.device("cpu"))
    taken = {name: value.to(META) for name, value in taken.items()}
    yield "transformers", lambda: theirs(**taken).loss


def count(one_pass: Callable[[], Tensor]) -> Counts:
    """Count the kernels of `one_pass` and of its backward pass; it returns a loss on the meta device."""
    counts = Counts()
    with (
        patch.object(F, "scaled_dot_product_attention", _attention),
        patch.object(F, "dropout", _dropout),
        patch.object(fusing, "fuses", lambda x: True),
        patch.object(fusing, "_compiled", counts.fused),
        counts,
    ):
        one_pass().backward()
    return counts


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    **_: Any,
) -> Tensor:
    """Attend by the fused kernel that a GPU has in the place of what torch composes for the meta device."""
    if attn_mask is None:
        attended: Tensor = aten._scaled_dot_product_flash_attention(
            q, k, v, dropout_p, is_causal, scale=scale
        )[0]
        return attended
    bias = torch.zeros_like(attn_mask, dtype=q.dtype)
    bias = bias.expand(*q.shape[:-1], k.shape[-2])
    attended = aten._scaled_dot_product_efficient_attention(
        q, k, v, bias, True, dropout_p, is_causal, scale=scale
    )[0]
    return attended


def _dropout(
    x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    return aten.native_dropout(x, p, True)[0] if training and p else x
