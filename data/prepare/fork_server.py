"""The fork server of the worker processes, with their imports done once for all."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver
from pathlib import Path

_BLAS_THREADS = "OPENBLAS_NUM_THREADS"


def start(*modules: str) -> None:
    """Start the server, unless it runs; it imports `data.prepare.work` in the background.

    Args:
        modules: further modules to import. `multiprocessing` imports the command's own module again in every
            worker; this does it once.
    """
    multiprocessing.set_forkserver_preload(["data.prepare.work", *modules])
    before = os.environ.get(_BLAS_THREADS)
    # With numpy's threads in the server no worker would count as single-threaded (`work.begin`).
    os.environ[_BLAS_THREADS] = "1"
    here = os.getcwd()
    # The server imports from the directory that it is started in; workers go back to `here`.
    os.chdir(Path(__file__).resolve().parents[2])
    try:
        forkserver.ensure_running()
    finally:
        os.chdir(here)
        if before is None:
            del os.environ[_BLAS_THREADS]
        else:
            os.environ[_BLAS_THREADS] = before
