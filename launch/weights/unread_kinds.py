"""Weights of kinds that are not read here, by their files: what they are, and the way to a kind that is."""

from __future__ import annotations

import fnmatch
import os
from pathlib import Path

from modeling.formats.huggingface.weight_files import NAMES

_CONVERT = (
    "python -c \"from transformers import AutoModelForPreTraining as M; M.from_pretrained('DIR', HOW)"
    ".save_pretrained('NEW')\", and give NEW"
)
_GGUF = "with the package gguf: " + _CONVERT.replace("HOW", "gguf_file='FILE'")
_TENSORFLOW = (
    f"with transformers 4 and tensorflow: {_CONVERT.replace('HOW', 'from_tf=True')}"
)
_KINDS = {
    "adapter_config.json": (
        "is an adapter (LoRA), which is no model by itself",
        "merge the two: python -c \"from peft import AutoPeftModelForCausalLM as M; M.from_pretrained('DIR')"
        ".merge_and_unload().save_pretrained('NEW')\", and give NEW",
    ),
    "*.gguf": ("is in GGUF", _GGUF),
    "tf_model.h5": ("is of TensorFlow", _TENSORFLOW),
    "*.ckpt.index": ("is of TensorFlow", _TENSORFLOW),
    "meta_[0-9]*.json": (
        "is of nanochat, whose model is no GPT-2 (rotary positions, squared ReLU, no biases)",
        "train it with nanochat, or give weights of a GPT-2 or BERT",
    ),
    "model_[0-9]*.bin": (
        "is of llm.c",
        "in llm.c: python dev/eval/export_hf.py -i DIR/FILE -o NEW -d float32 -s '', and give NEW",
    ),
}
_KINDS["gpt2_*.bin"] = _KINDS["model_[0-9]*.bin"]


def named(path: Path) -> tuple[str, str]:
    """Say what a directory or a file holds that is not read, and the way; "" for all else."""
    folder = path.parent
    names = [path.name]
    if os.path.isdir(path):
        folder = path
        names = sorted(os.listdir(path))
    if any(name.startswith(NAMES) for name in names):
        return "", ""
    for pattern, (came, fix) in _KINDS.items():
        matches = fnmatch.filter(names, pattern)
        if matches:
            return came, fix.replace("DIR", str(folder)).replace("FILE", matches[0])
    return "", ""
