"""A resumed CPU Adam is the uninterrupted one, bit for bit."""

import pytest
import torch

from launch.deepspeed_fixes.cpu_adam_bias_correction import replay_bias_correction
from launch.machine import compiled_ops
from launch.machine.abilities import detect_machine

pytestmark = pytest.mark.skipif(not detect_machine().compiler, reason="DeepSpeed's CPU Adam needs a compiler")


@pytest.fixture(scope="module", autouse=True)
def compiled():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(compiled_ops.use_own_directory()))
        compiled_ops.build(compiled_ops.Op("CPUAdamBuilder", ""))
        yield


def adam_after(steps, resumed_at=None, replay=True):
    """A parameter after `steps` updates; at `resumed_at` the optimizer is made anew and loaded."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    generator = torch.Generator().manual_seed(1)
    parameter = torch.nn.Parameter(torch.randn(1000, generator=generator))
    optimizer = DeepSpeedCPUAdam([parameter], lr=1e-3, betas=(0.9, 0.999))
    for step in range(steps):
        if step == resumed_at:
            state = optimizer.state_dict()
            optimizer = DeepSpeedCPUAdam([parameter], lr=1e-3, betas=(0.9, 0.999))
            optimizer.load_state_dict(state)
            if replay:
                replay_bias_correction(optimizer)
        parameter.grad = torch.randn(1000, generator=generator)
        optimizer.step()
    return parameter.detach().clone()


@pytest.fixture(scope="module")
def whole():
    return adam_after(60)


def test_with_the_replay_a_resumed_optimizer_is_the_uninterrupted_one(whole):
    assert torch.equal(adam_after(60, resumed_at=44), whole)


def test_deepspeed_alone_does_not_resume_bit_for_bit(whole):
    assert not torch.equal(adam_after(60, resumed_at=44, replay=False), whole), "the replay can go"


def test_other_optimizers_are_left_alone():
    replay_bias_correction(torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))]))
