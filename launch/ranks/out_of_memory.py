"""Recognition of a rank that ran out of memory, by its exception or by its traceback file.

Only rank 0 writes results, and where another rank fails the launcher ends rank 0, often in a collective. So
`error-rank-N.txt` tells an OOM; the next launch into the directory removes it.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

# torch on a GPU, cuBLAS, NCCL and pinned memory, torch and numpy on a CPU.
SAID = re.compile(
    r"OutOfMemoryError|MemoryError|CU(BLAS|DNN)_STATUS_ALLOC_FAILED|(CUDA|Cuda|HIP)\b.*out of memory|"
    r"DefaultCPUAllocator: (can't allocate|not enough) memory"
)
FILES = "error-rank-*.txt"


def line(text: str) -> str | None:
    """Find the line of a traceback or message on an OOM, or None; indented source code does not count."""
    for each in text.splitlines():
        indented = not each[:1].strip()
        if not indented and SAID.search(each):
            return each.strip()
    return None


def said_by(error: BaseException) -> str | None:
    """Return the line of an exception that shows an OOM, or None."""
    if not isinstance(error, RuntimeError | MemoryError):
        return None
    return line(f"{type(error).__name__}: {error}")


def reason(directory: Path) -> str | None:
    """Name the lowest rank with an OOM traceback, its line and the number of others, or None."""
    found = []
    for path in directory.glob(FILES):
        number = path.stem.rpartition("-")[2]
        with contextlib.suppress(OSError):
            said = line(path.read_text(encoding="utf-8", errors="replace"))
            if said and number.isdecimal():
                found.append((int(number), said))
    if not found:
        return None
    rank, said = min(found)
    others = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return f"rank {rank}: {said}{others}"
