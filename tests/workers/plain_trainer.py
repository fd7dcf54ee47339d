"""Trains a GPT-2 by `transformers`' Trainer as anybody's script does, under one DeepSpeed JSON after another.

plain_trainer.py OUT CASES.json    cases: name, file (the JSON), precision (of the arguments)

Leaves OUT/reports.json, by name: losses of the steps, the engine's stage and optimizer, and what it was given.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

from deepspeed.accelerator import get_accelerator

warnings.simplefilter("ignore")
get_accelerator().is_fp16_supported = lambda: True  # a CPU says no

import deepspeed  # noqa: E402  (as all that asks the accelerator)
import torch  # noqa: E402
from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments  # noqa: E402
from transformers.integrations.deepspeed import unset_hf_deepspeed_config  # noqa: E402

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it leaves its memory behind
SHAPE = {"n_layer": 1, "n_embd": 32, "n_head": 2, "n_positions": 16, "vocab_size": 64}


def train(file: str, precision: str, out: str) -> dict:
    arguments = TrainingArguments(
        output_dir=out, deepspeed=file, use_cpu=True, max_steps=2, per_device_train_batch_size=2,
        gradient_accumulation_steps=2, learning_rate=1e-2, logging_steps=1, report_to=[], save_strategy="no",
        disable_tqdm=True, fp16=precision == "fp16", bf16=precision == "bf16",
    )  # fmt: skip
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**SHAPE, bos_token_id=0, eos_token_id=0))
    row = {"input_ids": [*range(16)], "labels": [*range(16)]}
    trainer = Trainer(model, arguments, train_dataset=[row] * 8)
    trainer.train()
    engine = trainer.model_wrapped
    report = {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "stage": engine.zero_optimization_stage(),
        "optimizer": type(engine.basic_optimizer).__name__,
        "given": engine._config._param_dict,
    }
    engine.destroy()
    # A script trains once.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    unset_hf_deepspeed_config()
    return report


if __name__ == "__main__":
    reports = {}
    for case in json.loads(Path(sys.argv[2]).read_text()):
        print(f"--- {case['name']}", flush=True)
        reports[case["name"]] = train(case["file"], case["precision"], sys.argv[1])
    if os.environ["RANK"] == "0":
        Path(sys.argv[1], "reports.json").write_text(json.dumps(reports))
    torch.distributed.destroy_process_group()
