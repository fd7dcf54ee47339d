"""What is stepped is read, where bf16 parameters have fp32 copies: one each, or one for a whole group."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from launch.experiments.proving.reading import Reading

GRADIENT = torch.tensor([1.0, -2.0, 3.0, -4.0, 5.0, -6.0])


@pytest.mark.parametrize("flat", [True, False])
def test_copies_are_read(flat):
    memory = torch.arange(6).bfloat16()
    matrix, bias = nn.Parameter(memory[:4].view(2, 2)), nn.Parameter(memory[4:])
    whole = torch.arange(6) / 7
    copies = [whole] if flat else [whole[:4].view(2, 2), whole[4:]]
    optimizer = torch.optim.AdamW(copies)
    wrapper = SimpleNamespace(optimizer=optimizer, fp16_groups=[[matrix, bias]])
    vars(wrapper)["fp32_groups_flat" if flat else "fp32_groups"] = copies if flat else [copies]
    reading = Reading({"matrix": matrix, "bias": bias}, wrapper)
    reading.moments()
    gradients = [GRADIENT] if flat else [GRADIENT[:4].view(2, 2), GRADIENT[4:]]
    for copy, gradient in zip(copies, gradients, strict=True):
        copy.grad = gradient
    optimizer.step()
    read = reading.after_step()
    assert not reading.unread
    for kind, expected in (("weight", whole), ("gradient", GRADIENT)):
        torch.testing.assert_close(read[kind]["matrix"], expected[:4].view(2, 2))
        torch.testing.assert_close(read[kind]["bias"], expected[4:])
