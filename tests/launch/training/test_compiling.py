"""What torch.compile makes of attention computes what eager code does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._inductor import cpp_builder
from torch.nn import functional as F

from launch.machine import description
from launch.training import compiling
from modeling.attention import attention

SAMPLES, POSITIONS, HEADS, HEAD_SIZE = 8, 256, 6, 64  # of the default recipe


@pytest.mark.long
@pytest.mark.skipif(bool(description.missing_for_compiling()), reason="there is no compiler")
def test_attention_in_bf16_is_that_of_eager_code(monkeypatch):
    monkeypatch.setattr(cpp_builder, "_get_optimization_cflags", cpp_builder._get_optimization_cflags)
    compiling.keep_gcc_from_joining_statements()
    hidden = HEADS * HEAD_SIZE
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, POSITIONS, hidden, generator=generator).bfloat16()
    weight = (torch.randn(3 * hidden, hidden, generator=generator) * hidden**-0.5).bfloat16()

    def core(x: Tensor) -> Tensor:
        q, k, v = F.linear(x, weight).view(SAMPLES, POSITIONS, HEADS, 3, -1).permute(3, 0, 2, 1, 4).unbind(0)
        return attention(q, k, v, causal=True)

    passes = []
    for function in (core, torch.compile(core)):
        given = x.clone().requires_grad_()
        out = function(given)
        out.float().square().mean().backward()
        passes.append((out.detach(), given.grad))
    for eager, compiled in zip(*passes, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=0.05, atol=0.01)
