"""What DeepSpeed does without our corrections, on one rank and a tiny model; writes the facts as JSON.

upstream.py OUT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from launch.console import terminal
from launch.machine import description
from launch.ranks import ending, processes

terminal.quiet_libraries()
description.detect_machine(emulated_fp16=True)

import deepspeed  # noqa: E402  (after the accelerator is chosen)
import torch  # noqa: E402
from deepspeed.runtime.utils import clip_grad_norm_  # noqa: E402

from launch.deepspeed_fixes.loss_scale import postpone_growth  # noqa: E402
from launch.deepspeed_fixes.muon_compilation import leave_out_compilation  # noqa: E402
from launch.deepspeed_fixes.zero0 import gradient_norm  # noqa: E402
from modeling.parallel.process_grid import ProcessGrid  # noqa: E402


def engine_of(
    stage: int, precision: str | None = None, lr: float = 0.1, muon_clip: float | None = None, **scaling
):
    """DeepSpeed's engine for a linear layer, whose weight and bias are two groups of parameters."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    groups = [{"params": [model.weight], "weight_decay": 0.5}, {"params": [model.bias], "weight_decay": 0.0}]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "torch_adam": True}},
    }
    if muon_clip is not None:
        config |= {"optimizer": {"type": "Muon", "params": {"lr": lr, "torch_adam": True}}}
        config["gradient_clipping"] = muon_clip
    if precision:
        config[precision] = {"enabled": True, **scaling}
    return deepspeed.initialize(model=model, model_parameters=groups, config=config)[0]


def step(engine) -> float:
    """One step on the same batch; the gradient norm that the engine reports."""
    dtype = next(engine.module.parameters()).dtype
    batch = torch.linspace(-1, 1, 8).view(2, 4).to(dtype)
    engine.backward(engine(batch).float().square().sum())
    engine.step()
    return float(engine.get_global_grad_norm())


def growing_norms(postponed: bool) -> list[float]:
    """Norms of six steps on unchanging weights under ZeRO-3; the loss scale grows; its last value."""
    scaling = {"loss_scale": 0, "initial_scale_power": 4, "loss_scale_window": 2}
    engine = engine_of(3, "fp16", lr=0.0, **scaling)
    if postponed:
        postpone_growth(engine)
    norms = []
    for _ in range(6):
        norms.append(step(engine))
        if postponed:
            engine.settle_loss_scale()
    return [*norms, engine.optimizer.cur_scale]


def steps_when_built() -> list[int]:
    """Steps that the optimizer of stage 0 in bf16 has taken before the first one."""
    engine = engine_of(0, "bf16")
    return [int(state["step"]) for state in engine.basic_optimizer.state.values() if "step" in state]


def plain_fp16_moments() -> list[float]:
    """Norms of Adam's first moments after the first step of stage 0 in fp16, at loss scales 1 and 256."""
    found = []
    for scale in (1.0, 256.0):
        engine = engine_of(0, "fp16", loss_scale=scale)
        step(engine)
        states = engine.basic_optimizer.state.values()
        found.append(sum(float(state["exp_avg"].norm()) for state in states if "exp_avg" in state))
    return found


def plain_fp32_norms() -> list[float]:
    """Norms of a gradient like a large embedding's, in parts of it: DeepSpeed's, ours; float64's is 1."""
    embedding = torch.nn.Parameter(torch.zeros(8192, 384))
    embedding.grad = torch.randn(embedding.shape, generator=torch.Generator().manual_seed(0))
    true = float(embedding.grad.double().norm())
    ours = float(gradient_norm([embedding], ProcessGrid(1, 1, 1)))
    return [float(clip_grad_norm_([embedding], 1e9)) / true, ours / true]


def plain_fp32_norm_where_nothing_is_clipped() -> float | None:
    engine = engine_of(0)
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    return engine.get_global_grad_norm()


def changes_by_muon() -> list[float]:
    """Norms of a matrix's first change by DeepSpeed's Muon under ZeRO-1, with clipping and without."""
    leave_out_compilation()
    found = []
    for clip in (0.01, 0.0):
        engine = engine_of(1, muon_clip=clip)
        before = engine.module.weight.detach().clone()
        step(engine)
        found.append(float((engine.module.weight.detach() - before).norm()))
    return found


if __name__ == "__main__":
    with ending.clean_exit():
        processes.start_processes()
        facts = {
            "growing": growing_norms(postponed=False),
            "postponed": growing_norms(postponed=True),
            "steps_when_built": steps_when_built(),
            "plain_fp16_moments": plain_fp16_moments(),
            "plain_fp32_norms": plain_fp32_norms(),
            "muon": changes_by_muon(),
            "plain_fp32_norm_unclipped": plain_fp32_norm_where_nothing_is_clipped(),
        }
        Path(sys.argv[1]).write_text(json.dumps(facts))
