"""What clipping leaves of gradients."""

from types import SimpleNamespace

import pytest
import torch

from launch.deepspeed_fixes.norms import divide, divisor_of, sum_of_squares
from launch.deepspeed_fixes.zero0 import DataParallelEngine


@pytest.mark.parametrize(("largest", "left"), [(0.5, 0.5), (7.0, 5.0), (0.0, 5.0)])
def test_clipping_leaves_the_norm_that_is_asked_for(largest, left):
    scale = 8.0
    gradients = [torch.tensor([3.0]) * scale, torch.tensor([4.0]) * scale]
    norm = float(sum_of_squares(gradients).sqrt())
    optimizer = torch.optim.SGD([torch.zeros(1)])
    divide(optimizer, gradients, divisor_of(norm, scale, largest))
    assert float(torch.cat(gradients).norm()) == pytest.approx(left, rel=1e-5)


@pytest.mark.parametrize(("largest", "left"), [(0.5, 0.5), (7.0, 5.0)])
def test_clipping_in_fp32_under_zero_0_does_too(largest, left):
    module, norm = torch.nn.Linear(1, 2, bias=False), torch.tensor(5.0)
    module.weight.grad = torch.tensor([[3.0], [4.0]])
    engine = SimpleNamespace(module=module, gradient_clipping=lambda: largest, _global_grad_norm=norm)
    DataParallelEngine.clip_fp32_gradients(engine)
    assert float(module.weight.grad.norm()) == pytest.approx(left, rel=1e-5)
