"""Saves of Trainer and accelerate without DeepSpeed: a model of transformers, and torch's Adam in one file.

    checkpoint-6/optimizer.pt, scaler.pt, trainer_state.json, training_args.bin, rng_state.pth    by Trainer
    DIR/optimizer.bin, scaler.pt, random_states_0.pkl       by accelerate's save_state, next to a config.json

Each has a model.safetensors or pytorch_model.bin. Adam numbers its parameters in the order of the model's own.
"""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Any

import torch
import transformers

from modeling.formats.deepspeed import states
from modeling.formats.deepspeed.files import CONFIG, expect
from modeling.formats.huggingface.weight_files import read_state_dict
from modeling.formats.pickles import load_dict
from recipes.files import is_file, read_json_object, refuse

# model_type -> classes; the first whose parameters are all there is the model's
CLASSES = {
    "gpt2": ("GPT2LMHeadModel",),
    "bert": ("BertForPreTraining", "BertForMaskedLM"),
    "megatron-bert": ("MegatronBertForPreTraining", "MegatronBertForMaskedLM"),
}


def read(directory: Path, optimizer: Path) -> states.DeepSpeedState:
    """Read the save whose Adam is in a file. Raises FileError."""
    weights = read_state_dict(directory)
    rule = "Adam steps weights in float32 here"
    fix = "start from the weights: --init_from"
    module = {}
    for name in _parameters(directory, {*weights}):
        weight = weights[name]
        expect(
            weight.dtype == torch.float32,
            directory,
            f"holds {name} in {weight.dtype}",
            rule,
            fix,
        )
        module[name] = weight
    stated = {"optimizer": load_dict(optimizer), "module": module}
    optimizer_state = states.unpartitioned(directory, stated, "torch's Adam")
    updates = int(optimizer_state.bases[0]["state"][0]["step"])
    trainer = directory / "trainer_state.json"
    steps = updates
    if is_file(trainer):
        steps = read_json_object(trainer).get("global_step", updates)
    scaler = _scaler(directory / "scaler.pt")
    counts = {
        "global_steps": steps,
        "skipped_steps": steps - updates if scaler else 0,
        "global_samples": 0,
    }
    return states.state_of(directory, counts, optimizer_state._replace(scaler=scaler))


def _parameters(directory: Path, held: Set[str]) -> list[str]:
    """Return the names of the model's parameters in its own order. Raises FileError: they are not held."""
    config = read_json_object(directory / CONFIG)
    for kind in CLASSES.get(config.get("model_type", ""), ()):
        of_kind = transformers.AutoConfig.from_pretrained(directory)
        with torch.device("meta"):
            model = getattr(transformers, kind)(of_kind)
        names = [name for name, _ in model.named_parameters()]
        if held >= {*names}:
            return names
    refuse(
        directory,
        "holds no whole GPT-2, BERT or MegatronBert of transformers",
        "Adam numbers its parameters in the order of the model's own",
        f"give a save of a model that {CONFIG} describes",
    )


def _scaler(file: Path) -> dict[str, Any]:
    """Return torch's loss scaler in DeepSpeed's terms, which counts from the last overflow; {} without one."""
    if not is_file(file):
        return {}
    held = load_dict(file)
    return {
        "cur_scale": held["scale"],
        "cur_iter": held["_growth_tracker"] + 1,
        "last_overflow_iter": -1,
        "scale_window": held["growth_interval"],
        "delayed_shift": 1,
    }
