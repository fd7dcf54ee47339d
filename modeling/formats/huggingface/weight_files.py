"""Reader of the weights in a directory of `save_pretrained`, from the same files as `transformers`.

They are mapped into memory: names, shapes and types come from the headers, numbers are read on use.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from modeling.formats.pickles import load_dict
from recipes.files import (
    FileError,
    named_kind,
    read_json_object,
    read_safetensors_header,
    refuse,
)
from recipes.problems import Problem, some

# In the order of `from_pretrained`, each whole or in shards listed by an index.
NAMES = ("model.safetensors", "pytorch_model.bin")
AGAIN = "copy or download the directory again"
SAVED = "give a directory that save_pretrained wrote"


def read_state_dict(directory: str | Path) -> dict[str, Tensor]:
    """Read every tensor of the directory by its stored name. Raises FileError with all broken files."""
    directory = Path(directory)
    state_dict = dict[str, Tensor]()
    problems: list[Problem] = []
    for file, names in _files(directory).items():
        try:
            tensors = _read(directory / file)
            absent = sorted(names - tensors.keys())
            if absent:
                refuse(
                    directory / file,
                    f"lacks {some(absent)}",
                    "the index says otherwise",
                    AGAIN,
                )
            twice = sorted(tensors.keys() & state_dict.keys())
            if twice:
                refuse(
                    directory / file,
                    f"holds {some(twice)}, as another shard does",
                    fix=AGAIN,
                )
            state_dict |= tensors
        except FileError as error:
            problems += error.problems
    if problems:
        raise FileError(problems)
    return state_dict


def _files(directory: Path) -> dict[str, set[str]]:
    """Return the names of the files, each with its tensors by the index."""
    for name in NAMES:
        if os.path.lexists(directory / name):
            return {name: set()}
        index = directory / f"{name}.index.json"
        if os.path.lexists(index):
            return _shards(index)
    others = list[str]()
    for pattern in ("*.safetensors", "*.bin", "*.h5"):
        others += (path.name for path in directory.glob(pattern))
    beside = f", but {some(sorted(others))}" if others else ""
    refuse(
        directory,
        f"holds no weights{beside}",
        f"transformers takes {' or '.join(NAMES)}, or shards with their index ({NAMES[0]}.index.json)",
        SAVED,
    )


def _shards(index: Path) -> dict[str, set[str]]:
    listed = read_json_object(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        refuse(
            index,
            f"its weight_map is {named_kind(listed) if listed != {} else 'empty'}",
            "it maps every tensor to the name of its file",
            AGAIN,
        )
    shards = dict[str, set[str]]()
    for tensor, file in listed.items():
        if not isinstance(file, str) or Path(file).name != file:
            refuse(
                index,
                f"says that {tensor[:100]} is in {json.dumps(file)[:100]}",
                "that is the name of a file next to it",
                AGAIN,
            )
        shards.setdefault(file, set()).add(tensor)
    absent = sorted(file for file in shards if not os.path.lexists(index.parent / file))
    if absent:
        refuse(
            index,
            f"names {some(absent)}, which the directory lacks",
            "every shard is needed",
            AGAIN,
        )
    return shards


def _read(file: Path) -> dict[str, Tensor]:
    """Read the tensors of one file, mapped into memory."""
    if file.suffix == ".safetensors":
        try:
            return load_file(file) if read_safetensors_header(file) else {}
        except SafetensorError as error:  # what the header says besides its tensors
            refuse(file, "cannot be read", str(error)[:200], AGAIN)
    tensors = load_dict(file)
    for name, tensor in tensors.items():
        if not (isinstance(name, str) and isinstance(tensor, Tensor)):
            refuse(
                file,
                "holds something else than tensors by their names",
                "it is a model's state dict",
                SAVED,
            )
    return tensors
