"""LAMB: its step against the paper's algorithm, tensor ranks against one, resumed against uninterrupted."""

import json
import os
import subprocess
import sys

import pytest
import torch
from launching import run_ranks

from launch.deepspeed_fixes.lamb import Lamb


class OneRank:
    """A process grid of one process, as far as LAMB asks."""

    get_model_parallel_rank = staticmethod(lambda: 0)
    get_model_parallel_world_size = staticmethod(lambda: 1)


def by_the_paper(weight, gradients, lr, betas, eps, decay):
    """Algorithm 2 of You et al. 2019, in float64, the ratio bounded as by DeepSpeed's FusedLamb."""
    weight, first, second = weight.double(), 0.0, 0.0
    for step, gradient in enumerate(gradients, 1):
        first = betas[0] * first + (1 - betas[0]) * gradient.double()
        second = betas[1] * second + (1 - betas[1]) * gradient.double() ** 2
        ratio = (first / (1 - betas[0] ** step)) / ((second / (1 - betas[1] ** step)).sqrt() + eps)
        direction = ratio + decay * weight
        norms = weight.norm(), direction.norm()
        trust = (norms[0] / norms[1]).clamp(0.01, 10) if min(norms) > 0 else torch.tensor(1.0)
        weight = weight - lr * trust * direction
    return weight


@pytest.mark.parametrize("scale", [0.0, 1e-5, 0.02, 1.0, 1e3], ids=lambda scale: f"weights of {scale:g}")
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_a_step_is_the_papers(scale, decay):
    torch.manual_seed(1)
    weight = torch.nn.Parameter(scale * torch.randn(30, 40))
    numbers = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-6}
    optimizer = Lamb([{"params": [weight], "weight_decay": decay}], OneRank(), **numbers)
    gradients = [torch.randn(30, 40) for _ in range(4)]
    wanted = by_the_paper(weight.detach(), gradients, 0.01, (0.9, 0.99), 1e-6, decay)
    for gradient in gradients:
        weight.grad = gradient
        optimizer.step()
    assert (weight.detach() - wanted).abs().max() < 1e-6 * wanted.abs().max()


def test_deepspeed_has_lamb_for_cuda_alone():
    """In a process of its own: the accelerator is chosen once."""
    script = "import torch; from deepspeed.ops.lamb import FusedLamb; FusedLamb([torch.ones(2)])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
    )  # fmt: skip
    assert "not been implemented on CPU" in done.stderr, "look at launch/deepspeed_fixes/lamb.py again"


SETTINGS = (
    "--recipe", "bert/sotu", "--tiny", "--ds_config", "zero0", "--set", "optimizer.name=lamb",
    "--set", "optimizer.lr=0.02", "--set", "run.save_every=0",
)  # fmt: skip


def losses(out, *arguments: str, ranks: int = 1) -> dict[int, float]:
    done = run_ranks(ranks, "launch/pretrain.py", *SETTINGS, *arguments, "--out", out, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "compiling DeepSpeed's" not in done.stdout, "nothing is compiled for LAMB"
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "step"}


def test_tensor_ranks_train_as_one(tmp_path):
    whole = losses(tmp_path / "whole", "--set", "precision=fp32", "--steps", "6")
    assert whole[6] < whole[1] - 0.05
    parts = losses(
        tmp_path / "parts", "--set", "precision=fp32", "--steps", "6", "--set", "parallel.tp=2", ranks=2
    )
    assert parts == pytest.approx(whole, rel=3e-6)


def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(tmp_path):
    whole = losses(tmp_path / "whole", "--steps", "6")
    losses(tmp_path / "parts", "--steps", "3")
    assert losses(tmp_path / "parts", "--steps", "6", "--resume") == whole
