"""The server that worker processes are forked from: it imports what they need, once for all of them."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver

_BLAS_THREADS = "OPENBLAS_NUM_THREADS"


def start(*modules: str) -> None:
    """Start the server, unless it runs. It imports `data.prepare.work` while this process does what it likes.

    Args:
        modules: what else it imports. A worker imports the command's own module again, as `multiprocessing`
            does it; what that one imports is then there.
    """
    multiprocessing.set_forkserver_preload(["data.prepare.work", *modules])
    before = os.environ.get(_BLAS_THREADS)
    # With numpy's threads in the server no worker would count as single-threaded (`work.begin`).
    os.environ[_BLAS_THREADS] = "1"
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ[_BLAS_THREADS]
        else:
            os.environ[_BLAS_THREADS] = before
