"""Files of torch.save, read without running what they name: a `StandIn` takes the place of each class.

They name classes of Megatron-LM, DeepSpeed, transformers, numpy, converters and others. None is imported or
called. A file that names functions of Python's library is refused.
"""

from __future__ import annotations

import sys
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

from recipes.files import read_part, refuse
from recipes.problems import some

# Modules of Python's library with classes in the arguments of trainings.
STAND_IN_MODULES = (
    "argparse",
    "collections",
    "datetime",
    "enum",
    "pathlib",
    "signal",
    "types",
)
AGAIN = "copy it again"
CUT = "it was cut off or changed"
# by which Python 3.11.0 to 3.11.3 pickles a member of an enumeration
ENUM_MEMBER = "builtins.getattr"


class StandIn:
    """Stand-in for a class in a pickle: keeps the arguments of its call, and the attributes of its state."""

    arguments: tuple[Any, ...]

    def __new__(cls, *arguments: Any, **more: Any) -> StandIn:
        made = super().__new__(cls)
        made.arguments = arguments
        return made

    def __setstate__(self, state: Any) -> None:
        # attributes, and those in slots
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                vars(self).update(part)


def is_sound(file: Path) -> bool:
    """Check the records of a file of torch.save; return False for a file of another form.

    Raises FileError: a record is compressed, or is not what its CRC-32 says.
    """
    if read_part(file, 0, 4) != b"PK\x03\x04":
        return False
    facts = file.stat()
    _check_records(file, facts.st_size, facts.st_mtime_ns)
    return True


@cache  # parts of a save are loaded several times
def _check_records(file: Path, size: int, changed: int) -> None:
    damaged = None
    try:
        with zipfile.ZipFile(file) as records:
            listed = records.infolist()
            packed = any(each.compress_type for each in listed)
            packed = packed or sum(each.file_size for each in listed) > size
            # 0 in all after torch.serialization.set_crc32_options(False)
            if not packed and any(each.CRC for each in listed):
                damaged = records.testzip()
    except Exception as error:  # of many types, for a list of records that is broken
        refuse(file, f"cannot be read ({error})", CUT, AGAIN)
    if packed:
        refuse(
            file,
            "holds compressed records",
            "torch.save stores them as they are",
            "save it again with torch",
        )
    if damaged is not None:
        refuse(
            file,
            f"is damaged in its record {damaged!r}",
            "its CRC-32 is of other bytes",
            AGAIN,
        )


def load(file: Path) -> Any:
    """Read a file of torch.save; its tensors are mapped into memory. Raises FileError."""
    again = f"torch.save(torch.load(f, map_location='cpu', weights_only=False), f) with f={str(file)!r}"
    fix = f"{AGAIN}; or, which runs what the file says, save it again with its own program: {again}"
    if not is_sound(file):
        refuse(
            file,
            "cannot be read",
            "it is no file of torch.save, or one of before torch 1.6, which cannot be mapped into memory",
            fix,
        )
    try:
        named = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        other = sorted(name for name in named if not _may_stand_in(name))
        if not other:
            # A class of its own for each name, as torch demands.
            stand_ins: list[Any] = []
            for name in named:
                kind = type(name.rpartition(".")[2], (StandIn,), {})
                stand_ins.append((kind, name))
            with torch.serialization.safe_globals(stand_ins):
                return torch.load(
                    file, map_location="cpu", weights_only=True, mmap=True
                )
    except Exception as error:  # of many types, for a pickle that is broken
        refuse(
            file,
            f"cannot be read by torch.load ({type(error).__name__})",
            f"{CUT}, or is pickled in another way than torch.save does by itself",
            fix,
        )
    advice = "do not load it; get it from its source again"
    refuse(
        file,
        f"names {some(other, 4)[:200]}",
        "a checkpoint names none of it, and loading it might run a program",
        advice,
    )


def load_dict(file: Path) -> dict[str, Any]:
    """Read a file that holds values by name. Raises FileError."""
    values = load(file)
    if not isinstance(values, dict):
        refuse(
            file,
            f"holds a {type(values).__name__}",
            "a checkpoint is a dictionary",
            "give another save",
        )
    return values


def _may_stand_in(name: str) -> bool:
    """Check that a name is of no module of Python's library that can run a program."""
    module = name.partition(".")[0]
    return (
        name == ENUM_MEMBER
        or module in STAND_IN_MODULES
        or module not in sys.stdlib_module_names
    )
