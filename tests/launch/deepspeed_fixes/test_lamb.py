"""LAMB: its step against the paper's algorithm, tensor ranks against one, resumed against uninterrupted."""

import json
import os
import subprocess
import sys

import pytest
import torch
from launching import ROOT, run_ranks

from launch.deepspeed_fixes.lamb import Adam, Lamb


class OneRank:
    """A process grid of one process, as far as LAMB asks."""

    get_model_parallel_rank = staticmethod(lambda: 0)
    get_model_parallel_world_size = staticmethod(lambda: 1)


def by_the_paper(weight, gradients, lr, betas, eps, decay, bounds=(0.01, 10), corrects=True):  # noqa: PLR0913 - as in the paper
    """Algorithm 2 of You et al. 2019, in float64, the ratio bounded as by DeepSpeed's FusedLamb."""
    weight, first, second = weight.double(), 0.0, 0.0
    for step, gradient in enumerate(gradients, 1):
        first = betas[0] * first + (1 - betas[0]) * gradient.double()
        second = betas[1] * second + (1 - betas[1]) * gradient.double() ** 2
        left = [beta**step if corrects else 0 for beta in betas]
        ratio = (first / (1 - left[0])) / ((second / (1 - left[1])).sqrt() + eps)
        direction = ratio + decay * weight
        norms = weight.norm(), direction.norm()
        trust = (norms[0] / norms[1]).clamp(*bounds) if min(norms) > 0 else torch.tensor(1.0)
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


@pytest.mark.parametrize("bounds", [(1.0, 1.0), (0.02, 0.3)])
def test_bounds_and_bias_correction_are_as_asked(bounds):
    """A ratio bounded by 1 and 1 leaves Adam's own step."""
    torch.manual_seed(1)
    weight = torch.nn.Parameter(torch.randn(30, 40))
    start = weight.detach().clone()
    numbers = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1, "bias_correction": False}
    if bounds == (1.0, 1.0):
        optimizer = Adam([{"params": [weight]}], **numbers)
    else:
        optimizer = Lamb([{"params": [weight]}], OneRank(), min_coeff=0.02, max_coeff=0.3, **numbers)
    gradients = [torch.randn(30, 40) for _ in range(4)]
    for gradient in gradients:
        weight.grad = gradient
        optimizer.step()
    wanted = by_the_paper(start, gradients, 0.01, (0.9, 0.99), 1e-6, 0.1, bounds, corrects=False)
    assert (weight.detach() - wanted).abs().max() < 1e-6 * wanted.abs().max()
    assert {"step", "exp_avg", "exp_avg_sq"} == set(optimizer.state[weight]), "the states of torch's AdamW"


@pytest.mark.ci
def test_deepspeed_has_lamb_for_cuda_alone():
    """In a process of its own: the accelerator is chosen once."""
    script = "import torch; from deepspeed.ops.lamb import FusedLamb; FusedLamb([torch.ones(2)])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
    )  # fmt: skip
    assert "not been implemented on CPU" in done.stderr, "look at launch/deepspeed_fixes/lamb.py again"


SETTINGS = (
    "--recipe", "bert/sotu", "--tiny", "--set", "optimizer.name=lamb",
    "--set", "optimizer.lr=0.02", "--set", "run.save_every=0",
)  # fmt: skip
IN_FP32 = "--set", "precision=fp32", "--steps", "6"


def steps(out, *arguments: str, ranks: int = 1) -> dict[int, dict]:
    """What the run recorded of every step."""
    config = () if "--ds_config" in arguments else ("--ds_config", "zero0")
    command = "launch/pretrain.py", *SETTINGS, *config, *arguments, "--out", out
    done = run_ranks(ranks, *command, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "compiling DeepSpeed's" not in done.stdout, "nothing is compiled for LAMB"
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line for line in lines if line["kind"] == "step"}


def losses(out, *arguments: str, ranks: int = 1) -> dict[int, float]:
    return {step: line["loss"] for step, line in steps(out, *arguments, ranks=ranks).items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[int, float]:
    """Losses in fp32 in one process."""
    found = losses(tmp_path_factory.mktemp("lamb") / "whole", *IN_FP32)
    assert found[6] < found[1] - 0.05
    return found


@pytest.mark.ci
def test_tensor_ranks_train_as_one(whole, tmp_path):
    assert losses(tmp_path / "parts", *IN_FP32, "--set", "parallel.tp=2", ranks=2) == pytest.approx(
        whole, rel=3e-6
    )


@pytest.mark.ci
def test_data_parallel_ranks_train_as_one(whole, tmp_path):
    """Each takes the norms of whole parameters and of gradients that are averaged over all."""
    assert losses(tmp_path / "parts", *IN_FP32, ranks=2) == pytest.approx(whole, rel=3e-6)


@pytest.mark.ci
def test_fp16_trains_as_fp32_whatever_the_loss_scale(whole, tmp_path):
    """A scale too high is halved until a step is made; those that overflow are skipped, not counted."""

    def in_fp16(power: int) -> dict[int, dict]:
        """The loss scale begins at 2^power, and is halved at every overflow."""
        config = json.loads((ROOT / "ds_configs" / "zero0.json").read_text())
        scaler = {"loss_scale": 0, "initial_scale_power": power, "hysteresis": 1, "loss_scale_window": 100}
        config |= {"fp16": {"enabled": True, **scaler}, "bf16": {"enabled": False}}
        (tmp_path / f"{power}.json").write_text(json.dumps(config))
        flags = "--ds_config", str(tmp_path / f"{power}.json"), "--emulate_fp16", "--steps", "6"
        return steps(tmp_path / str(power), *flags)

    fixed, too_high = in_fp16(12), in_fp16(20)
    assert not any(line["skipped"] for line in fixed.values())
    assert {step: line["loss"] for step, line in fixed.items()} == pytest.approx(whole, abs=0.01)
    skipped = [line["skipped"] for line in too_high.values()]
    assert skipped == sorted(skipped, reverse=True) and skipped[0] and not skipped[-1]
    assert too_high[1 + sum(skipped)]["lr"] == fixed[1]["lr"], "its first step"
    assert too_high[6]["loss"] < too_high[1]["loss"]


@pytest.mark.ci
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(tmp_path):
    whole = losses(tmp_path / "whole", "--steps", "6")
    losses(tmp_path / "parts", "--steps", "3")
    assert losses(tmp_path / "parts", "--steps", "6", "--resume") == whole
