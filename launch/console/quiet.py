"""Keeping the libraries' chatter off the screen."""

from __future__ import annotations

import logging
import os
import warnings


def quiet_libraries() -> None:
    """Keep DeepSpeed's and torch's start-up chatter off the screen; MEGARECIPES_VERBOSE=1 brings it back."""
    if os.environ.get("MEGARECIPES_VERBOSE") == "1":
        return
    os.environ.setdefault("DS_LOG_LEVEL", "warning")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    warnings.filterwarnings("ignore")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
