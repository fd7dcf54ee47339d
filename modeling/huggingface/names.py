"""What the conversions have in common: reading a saved `transformers` model's tensors, and comparing names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

Tensors = Mapping[str, torch.Tensor]


def read_state_dict(directory: str | Path) -> dict[str, torch.Tensor]:
    """All tensors that `save_pretrained` wrote to `directory` (safetensors, one file or several; or .bin).

    Raises ValueError where there are none.
    """
    files = sorted(Path(directory).glob("*.safetensors"))
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors.update(load_file(file))
    if not files:
        for file in sorted(Path(directory).glob("pytorch_model*.bin")):
            tensors.update(torch.load(file, map_location="cpu", weights_only=True))
    if not tensors:
        raise ValueError(
            f"{directory} holds neither *.safetensors nor pytorch_model*.bin: give a directory that save_pretrained wrote"
        )
    return tensors


def check_names(
    found: set[str], expected: set[str], what: str, keys: str = "model.layers and model.family"
) -> None:
    """Raises ValueError naming missing and unexpected tensors, and the `keys` of a recipe that decide what is expected."""
    if found != expected:
        raise ValueError(
            f"{what} are not those of this model: missing {sorted(expected - found)[:5] or 'nothing'}, "
            f"unexpected {sorted(found - expected)[:5] or 'nothing'}; check {keys}"
        )
