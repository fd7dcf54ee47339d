"""A resumed CPU Adam is the uninterrupted one, bit for bit."""

import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

from launch.deepspeed_fixes.cpu_adam_bias_correction import replay_bias_correction
from launch.machine import compiled_ops
from launch.machine.description import detect_machine


class Products:
    """Stands for the compiled half: keeps beta^t in float32 as the product of its steps."""

    def __init__(self):
        self.steps, self.product = [], torch.ones(1)

    def adam_update(self, optimizer, step, lr, beta1, beta2, *rest):
        self.steps.append(step)
        self.product *= beta2

    def destroy_adam(self, optimizer):
        pass


def test_the_replay_repeats_every_step_that_was_loaded():
    whole, resumed = Products(), Products()
    for step in range(1, 45):
        whole.adam_update(0, step, 1e-3, 0.9, 0.999)
    optimizer = DeepSpeedCPUAdam.__new__(DeepSpeedCPUAdam)  # whose constructor compiles
    group = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, bias_correction=True)
    optimizer.ds_opt_adam, optimizer.opt_id = resumed, 0
    optimizer.param_groups, optimizer.state = [group], {"a parameter": {"step": 44}}
    replay_bias_correction(optimizer)
    assert resumed.steps == whole.steps and torch.equal(resumed.product, whole.product)
    assert not torch.equal(whole.product, torch.tensor([0.999]) ** 44), "else nothing has to be repeated"


# Compiled


@pytest.fixture(scope="module")
def compiled():
    if not detect_machine().compiler:
        pytest.skip("DeepSpeed's CPU Adam needs a compiler")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(compiled_ops.use_own_directory()))
        compiled_ops.build("CPUAdamBuilder")
        yield


def adam_after(steps, resumed_at=None, replay=True):
    """A parameter after `steps` updates; at `resumed_at` the optimizer is made anew and loaded."""
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
def whole(compiled):
    return adam_after(60)


@pytest.mark.ci
def test_with_the_replay_a_resumed_optimizer_is_the_uninterrupted_one(whole):
    assert torch.equal(adam_after(60, resumed_at=44), whole)


@pytest.mark.ci
def test_deepspeed_alone_does_not_resume_bit_for_bit(whole):
    assert not torch.equal(adam_after(60, resumed_at=44, replay=False), whole), "the replay can go"
