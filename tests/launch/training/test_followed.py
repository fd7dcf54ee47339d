"""A recipe that follows a DeepSpeed JSON has the losses of a plain `deepspeed.initialize` loop with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from launching import WORKERS, run_ranks

from recipes import catalog

ADAMW = {"lr": 2e-3, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True}


def config(stage: int, kind: str | None = None, params: dict[str, Any] | None = None, **more: Any) -> dict:
    optimizer = {"type": "AdamW", "params": ADAMW}
    config = {"train_batch_size": 8, "zero_optimization": {"stage": stage}, "optimizer": optimizer, **more}
    return config | ({"scheduler": {"type": kind, "params": params}} if kind else {})


FEW = {"warmup_num_steps": 2, "total_num_steps": 6}
SHARES = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
LINEAR = {"warmup_type": "linear", "warmup_max_lr": 3e-3, "warmup_num_steps": 4}
PLAIN = {
    "WarmupLR, clipped, accumulated": config(1, "WarmupLR", LINEAR, gradient_clipping=0.3, **SHARES),
    "WarmupDecayLR": config(2, "WarmupDecayLR", {**FEW, "warmup_min_lr": 1e-4, "warmup_max_lr": 3e-3}),
    "WarmupCosineLR": config(3, "WarmupCosineLR", {**FEW, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.05}),
    "DeepSpeed's defaults": config(1, optimizer={"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}}),
}
# as transformers fills them, from the recipe's numbers
RECIPE = catalog.load(tiny=True)
RATES = {"warmup_min_lr": 0, "warmup_max_lr": ADAMW["lr"], "warmup_num_steps": RECIPE.schedule.warmup_steps}
FILLED = {"WarmupLR": RATES, "WarmupDecayLR": {**RATES, "total_num_steps": RECIPE.decay_steps}}
for kind, params in FILLED.items():
    filled = config(1, kind, params)
    PLAIN[f"{kind}, all auto"] = config(1, kind, dict.fromkeys(params, "auto"), filled=filled)
# norms of gradients are above 1
PLAIN["clipped by default"] = PLAIN["DeepSpeed's defaults"] | {"train_batch_size": 4}
UNCORRECTED = {"type": "Adam", "params": {"lr": 5e-4, "weight_decay": 0.01, "bias_correction": False}}
COMPILED = {f"uncorrected, stage {stage}": config(stage, optimizer=UNCORRECTED) for stage in (0, 1, 2, 3)}


def check(cases: dict[str, dict], out: Path) -> None:
    (out / "cases.json").write_text(json.dumps(cases))
    done = run_ranks(1, WORKERS / "followed.py", out / "losses.json", out / "cases.json", timeout=280)
    assert done.returncode == 0, done.stdout[-3000:]
    losses = json.loads((out / "losses.json").read_text())
    assert losses.keys() == cases.keys()
    for name, both in losses.items():
        assert both["ours"] == pytest.approx(both["plain"], rel=0, abs=5e-7), name
        assert both["plain"][0] - both["plain"][-1] > 0.01, f"{name}: it has to learn"


def test_six_losses_are_those_of_a_plain_loop(tmp_path):
    check(PLAIN, tmp_path)


@pytest.mark.long
def test_adam_without_bias_correction_is_deepspeeds_compiled_one(tmp_path):
    check(COMPILED, tmp_path)
