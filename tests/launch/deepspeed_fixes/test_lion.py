"""Lion: its step against the paper's algorithm, and DeepSpeed's own where there is no gradient."""

import shutil

import pytest
import torch
from compared import outcome, train_and_compare
from deepspeed.ops.lion import DeepSpeedCPULion

from launch.deepspeed_fixes.lion import Lion
from launch.experiments.parity.comparison import compare
from launch.experiments.parity.layout_cases import REFERENCE
from recipes import catalog

NUMBERS = {"lr": 0.01, "betas": (0.9, 0.99)}


def by_the_paper(weight, gradients, lr, betas, decay):
    """Algorithm 2 of Chen et al. 2023, in float64."""
    weight, momentum = weight.double(), 0.0
    for gradient in gradients:
        direction = betas[0] * momentum + (1 - betas[0]) * gradient.double()
        weight = weight - lr * (torch.sign(direction) + decay * weight)
        momentum = betas[1] * momentum + (1 - betas[1]) * gradient.double()
    return weight


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_step_is_the_papers(decay):
    torch.manual_seed(1)
    weight = torch.nn.Parameter(torch.randn(30, 40))
    gradients = [torch.randn(30, 40) * torch.cat([torch.ones(20, 40), torch.zeros(10, 40)]) for _ in range(5)]
    wanted = by_the_paper(weight.detach(), gradients, *NUMBERS.values(), decay)
    optimizer = Lion([{"params": [weight], "weight_decay": decay}], **NUMBERS, eps=1e-8)
    for gradient in gradients:
        weight.grad = gradient
        optimizer.step()
    assert (weight.detach() - wanted).abs().max() < 1e-6
    assert set(optimizer.state[weight]) == {"step", "exp_avg"}


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="DeepSpeed compiles it")
def test_deepspeeds_moves_what_has_no_gradient(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    weight = torch.nn.Parameter(torch.zeros(8))
    weight.grad = torch.zeros(8)
    optimizer = DeepSpeedCPULion([weight], **NUMBERS)
    optimizer.step()
    assert weight.abs().max().item() == pytest.approx(0.01), "look at launch/deepspeed_fixes/lion.py again"
    assert "exp_avg_sq" in optimizer.state[weight]


SETTINGS = ["optimizer.name=lion", "optimizer.lr=1e-4", "optimizer.betas=[0.9, 0.99]"]
LAYOUTS = (
    *("accumulation 4", "tp2 zero3", "pp2 accumulation 4", "dp2 zero0", "dp2 zero1", "dp2 zero2"),
    *("dp2 zero3", "dp2 zero2 offload", "dp2 zero3 offload", "sequence tp2"),
)


@pytest.mark.long
def test_every_layout_trains_the_same(tmp_path):
    """But for biases of keys, which attention does not feel: their gradients are rounding, with a sign."""
    train_and_compare(tmp_path, LAYOUTS, catalog.DEFAULT_RECIPE, SETTINGS, steps=6)
    reference = outcome(tmp_path, REFERENCE.name)
    assert reference.losses[-1] < reference.losses[0] - 0.02
    for name in LAYOUTS:
        found = outcome(tmp_path, name)
        difference = compare(reference, found)
        assert difference.loss < 2e-6 and difference.norm < 1e-4 and difference.gradient < 1e-5, name
        for weight, wanted in reference.weights.items():
            if not weight.endswith("attention.qkv.bias"):
                apart = (found.weights[weight] - wanted).norm() / wanted.norm().clamp(min=1e-30)
                assert apart < 1e-3, f"{name}: {weight}"
