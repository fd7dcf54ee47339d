"""What a GPU does for one micro-batch, forward and backward, counted on the meta device: no GPU takes part.

eager: every operator that computes is a kernel (some are several: LayerNorm's and attention's backward pass,
the embedding's gradient); it moves its operands and results once, of a gather the rows that it takes.
compiled: torch.compile's graphs of the whole model, cut into kernels by inductor's own scheduler with the
rules that it has for GPUs, up to the generation of code.

Attention counts as FlashAttention, and dropout as torch's fused kernel. The optimizer is not counted.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo import device_interface, trace_rules
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import partitioners
from torch._functorch.aot_autograd import make_boxed_func
from torch._guards import detect_fake_mode
from torch._inductor import compile_fx, debug, decomposition, ir, lowering, scheduler
from torch._inductor.codegen import common, triton, wrapper
from torch._inductor.fx_passes.replace_random import replace_random_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from launch.training.micro_batches import for_plain
from modeling import fusing
from modeling.families import family_of, model_shape
from modeling.hidden_dropout import salts_of
from modeling.initialization import DTYPES, Init
from recipes.layout import padded_vocab
from recipes.schema import Recipe
from tools.benchmarks.nano_gpt import NanoGpt
from tools.benchmarks.random_batch import random_batch
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


@dataclass(frozen=True)
class Counts:
    """Kernels of one pass in their order, and the times that the host waits for a number."""

    kernels: list[Kernel] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)

    @property
    def moved(self) -> int:
        return sum(kernel.moved for kernel in self.kernels)

    @property
    def operations(self) -> int:
        return sum(kernel.operations for kernel in self.kernels)

    def seconds(self, bytes_per_s: float, operations_per_s: float) -> float:
        """Return the least time: of each kernel that of its bytes or of its operations."""
        return sum(
            max(k.moved / bytes_per_s, k.operations / operations_per_s)
            for k in self.kernels
        )


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        packet = func._overloadpacket
        if packet is aten._local_scalar_dense:
            self.counts.waits.append(str(func))
            return 1
        out = func(*args, **kwargs)
        name = packet.__name__
        if not (func.is_view or FREE.match(name)):
            formula = flop_registry.get(packet)
            operations = formula(*args, **kwargs, out_val=out) if formula else 0
            self.counts.kernels.append(
                Kernel(name, _moved(name, args, kwargs, out), operations)
            )
        return out


def _moved(name: str, args: Any, kwargs: Any, out: Any) -> int:
    """Return the bytes that an operator reads and writes."""
    given = tree_leaves((args, kwargs))
    if name in GATHERS:
        return 2 * _size(out) + sum(map(_size, given[1:]))
    return sum(map(_size, given[name in OVERWRITES :])) + sum(
        map(_size, tree_leaves(out))
    )


def _size(x: Any) -> int:
    """Return the bytes of a tensor, each address once: an expanded one is as large as what it repeats."""
    if not isinstance(x, Tensor):
        return 0
    lengths = (
        n for n, stride in zip(x.shape, x.stride(), strict=True) if stride or not n
    )
    return x.element_size() * math.prod(lengths)


def passes(recipe: Recipe) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield each system's name and its forward pass over one micro-batch without padding, on meta."""
    model = recipe.model
    family = family_of(recipe.model)
    dtype = DTYPES[recipe.precision]
    samples = recipe.batch.micro or 1
    length = recipe.sequence_length
    batch = random_batch(
        family.fields, samples, length, recipe.predictions or 0, model.vocab_size
    )
    if "lengths" in batch:
        batch["lengths"] = torch.full((samples,), length)
    shape = model_shape(recipe, padded_vocab(model.vocab_size, 1))
    init = Init(recipe.seed, recipe.init_std, model.layers, dtype=dtype, meta=True)
    ours = family.plain(shape, group=None, init=init).train()
    numbers = torch.arange(samples, device=META)
    salts = salts_of(recipe.seed, 0, numbers, length) if recipe.dropout.hidden else None
    given, named = for_plain(batch, META, salts)
    yield "ours", lambda: loss_of(ours(*given, **named))
    on_meta = {name: value.to(META) for name, value in batch.items()}
    with META:
        theirs = transformers_model(recipe).to(dtype).train()
        plain = NanoGpt(recipe).to(dtype) if model.family == "gpt2" else None
    if plain is not None:
        yield "a plain GPT-2", lambda: plain(on_meta["tokens"], on_meta["labels"])
    taken = {
        name: value.to(META)
        for name, value in transformers_inputs(batch, torch.device("cpu")).items()
    }
    yield "transformers", lambda: theirs(**taken).loss


def count_eager(one_pass: Callable[[], Tensor]) -> Counts:
    """Count the kernels of `one_pass` and of its backward pass; it returns a loss on the meta device."""
    counter = _Counter()
    known = dict[Any, list[Kernel]]()

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            key = (
                function,
                *(
                    (x.shape, x.dtype) if isinstance(x, Tensor) else x
                    for x in arguments
                ),
            )
            with _disable_current_modes():
                if key not in known:
                    known[key] = []
                    _compile(function, known[key])(*arguments)
                counter.counts.kernels.extend(known[key])
                return function(*arguments)

        return call

    with _as_on_a_gpu(), patch.object(fusing, "_compiled", compiled), counter:
        one_pass().backward()
    return counter.counts


def count_compiled(one_pass: Callable[[], Tensor]) -> Counts:
    """Count the kernels that torch.compile makes of `one_pass` and of its backward pass."""
    counts = Counts()
    with _as_on_a_gpu():
        _compile(one_pass, counts.kernels)().backward()
    return counts


def _compile(function: Callable[..., Any], kernels: list[Kernel]) -> Callable[..., Any]:
    """Compile a function of meta tensors; its kernels are added to `kernels` when it is called."""

    def compile_graph(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        kernels.extend(_scheduled(graph, inputs))
        return make_boxed_func(graph.forward)

    def partition(graph: torch.fx.GraphModule, inputs: Any, **how: Any) -> Any:
        with V.set_fake_mode(detect_fake_mode(inputs)):
            replace_random_passes(graph)
        return partitioners.min_cut_rematerialization_partition(
            graph, inputs, compiler="inductor", **how
        )

    torch._dynamo.reset()
    how: dict[str, Any] = dict(
        fw_compiler=compile_graph, bw_compiler=compile_graph, partition_fn=partition
    )
    how |= dict(
        decompositions=decomposition.select_decomp_table(),
        keep_inference_input_mutations=True,
    )
    return torch.compile(function, backend=aot_autograd(**how), dynamic=False)


def _scheduled(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Iterator[Kernel]:
    """Yield the kernels into which inductor's scheduler fuses a graph of meta tensors."""
    compile_fx.view_to_reshape(graph)
    lowered = GraphLowering(graph, example_inputs=inputs)

    with (
        V.set_graph_handler(lowered),
        V.set_fake_mode(detect_fake_mode(inputs)),
        V.set_debug_handler(debug.DebugContext()),
    ):
        lowered.run(*inputs)
        lowered._update_scheduler()
        for node in lowered.scheduler.nodes:
            if isinstance(node, scheduler.NopKernelSchedulerNode) or isinstance(
                node.node, ir.MultiOutput
            ):
                continue
            yield Kernel(
                node.get_name(),
                node.get_read_write_buffers_sizes(),
                _operations_of(node),
            )


def _operations_of(node: Any) -> int:
    """Return the operations of a product or of attention that inductor leaves to a library."""
    for made_of in node.node.origins if node.node else ():
        formula = flop_registry.get(getattr(made_of.target, "overloadpacket", None))
        if formula:
            given = torch.fx.map_arg(
                (made_of.args, made_of.kwargs), lambda one: one.meta["val"]
            )
            return formula(*given[0], **given[1], out_val=made_of.meta["val"])
    return 0


@contextlib.contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """Put the fused kernels of a GPU in the place of what torch composes for the meta device."""

    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        **_: Any,
    ) -> Tensor:
        if attn_mask is None:
            return aten._scaled_dot_product_flash_attention(
                q, k, v, dropout_p, is_causal, scale=scale
            )[0]
        bias = torch.zeros_like(attn_mask, dtype=q.dtype).expand(
            *q.shape[:-1], k.shape[-2]
        )
        fused = aten._scaled_dot_product_efficient_attention
        return fused(q, k, v, bias, True, dropout_p, is_causal, scale=scale)[0]

    def dropout(
        x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        return aten.native_dropout(x, p, True)[0] if training and p else x

    where = torch.where

    # Of these two torch.compile traces no gradient on the meta device.
    def where_tensors(condition: Tensor, x: Tensor, other: Any) -> Tensor:
        if not isinstance(other, Tensor):
            other = x.new_full((), other)
        return where(condition, x, other)

    def cross_entropy(
        logits: Tensor, targets: Tensor, reduction: str = "mean", **_: Any
    ) -> Tensor:
        scores = aten._log_softmax(logits, -1, False)
        return aten.nll_loss_forward(
            scores, targets, None, int(reduction == "mean"), -100
        )[0]

    def fuses(x: Tensor) -> bool:
        return not torch.compiler.is_compiling()

    def unsupported(*_: Any) -> bool:  # inductor would leave meta tensors to torch
        return False

    common.register_backend_for_device(
        "meta", triton.TritonScheduling, wrapper.PythonWrapperCodegen
    )
    device_interface.register_interface_for_device(
        "meta", device_interface.CpuInterface
    )
    with (
        patch.object(lowering, "unsupported_input_tensor", unsupported),
        patch.object(lowering, "unsupported_output_tensor", unsupported),
        patch.object(F, "scaled_dot_product_attention", attention),
        patch.object(F, "dropout", dropout),
        patch.object(F, "cross_entropy", cross_entropy),
        patch.object(torch, "where", where_tensors),
        patch.object(fusing, "fuses", fuses),
    ):
        # torch.compile keeps what it once found under the patched names.
        trace_rules.clear_lru_cache()
        try:
            yield
        finally:
            trace_rules.clear_lru_cache()
