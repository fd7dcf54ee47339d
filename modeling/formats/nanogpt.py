"""A ckpt.pt of nanoGPT as the configuration and the state dict of transformers' GPT-2.

Modules have the same names. nanoGPT stores linear weights as (outputs, inputs), and transformers as (inputs,
outputs). A model of `bias=False` computes as one whose biases are zero.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modeling.formats.megatron.checkpoint import UNREAD
from modeling.formats.pickles import load_dict
from recipes.files import refuse

FILE = "ckpt.pt"
_LINEAR = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
_SIZES = ("n_layer", "n_head", "n_embd", "vocab_size", "block_size")


def read(directory: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the arguments, with transformers' keys among them, and the tensors. Raises FileError."""
    file = directory / FILE
    saved = load_dict(file)
    stated: Any = saved.get("model_args")
    stored: Any = saved.get("model")
    sound = isinstance(stated, dict) and isinstance(stored, dict)
    if sound:
        sound = all(isinstance(each, Tensor) for each in stored.values())
    if not sound:
        refuse(
            file,
            "is of another program",
            'a checkpoint of nanoGPT has tensors in "model", and "model_args"',
            "give another file",
        )
    config = {"bias": True, **dict.fromkeys(_SIZES, UNREAD), **stated}
    config["model_type"] = "gpt2"
    config["n_positions"] = config["block_size"]
    tensors = {}
    for name, tensor in stored.items():
        linear = name.endswith(_LINEAR)
        tensors[name] = tensor.t() if linear else tensor
        biased = linear or ".ln_" in name
        if biased and not config["bias"]:
            module = name.removesuffix("weight")
            tensors[f"{module}bias"] = torch.zeros(len(tensor))
    return config, tensors
