"""Keeping the libraries' chatter off the screen."""

from __future__ import annotations

import logging
import os
import warnings

# How torch's warnings begin that it has no kernels for a GPU: all that comes later is an error in the first.
NO_KERNELS = r"Found GPU\d|\n.* with CUDA capability "


def quiet_libraries() -> None:
    """Keep DeepSpeed's and torch's start-up chatter off the screen; MEGARECIPES_VERBOSE=1 brings it back.

    Has to precede `import deepspeed`, which says that it found no GPU while it is imported.
    """
    if os.environ.get("MEGARECIPES_VERBOSE") == "1":
        return
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("default", message=NO_KERNELS)
    # Not its level, which DeepSpeed sets to WARNING when it is imported.
    logging.getLogger("DeepSpeed").addFilter(_is_an_error)


def _is_an_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
