"""Silence for the libraries' messages on the screen."""

from __future__ import annotations

import logging
import os
import warnings

# Beginnings of torch's warnings about a GPU without kernels, which explain all later errors.
NO_KERNELS = r"Found GPU\d|\n.* with CUDA capability "


def quiet_libraries() -> None:
    """Silence DeepSpeed's and torch's start-up messages, unless MEGARECIPES_VERBOSE=1.

    Call it before `import deepspeed`, which prints that it found no GPU.
    """
    if os.environ.get("MEGARECIPES_VERBOSE") == "1":
        return
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("default", message=NO_KERNELS)
    # Not by its level, which DeepSpeed sets to WARNING at its import.
    logging.getLogger("DeepSpeed").addFilter(_is_an_error)


def _is_an_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
