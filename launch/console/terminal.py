"""Text on the terminal: at its width, in whole lines for a file or a pipe, and without the libraries' own."""

from __future__ import annotations

import io
import logging
import os
import re
import sys
import textwrap
import warnings
from typing import Any, TextIO

from recipes.problems import visible

GLUE = "\N{NO-BREAK SPACE}"  # keeps a flag and its value together
# for `painted`, as terminals number them (ECMA-48, 8.3.117)
BOLD = 1
YELLOW = 33
LEAST = 40  # columns; with fewer, each word would have its own line
# Beginnings of torch's warnings about a GPU without kernels, which explain all later errors.
NO_KERNELS = r"Found GPU\d|\n.* with CUDA capability "


class _LastingFile(io.FileIO):
    """A file whose writes never fail: what its reader, which may be gone, does not take is dropped."""

    def write(self, data: Any) -> int:
        size: int = memoryview(data).nbytes
        try:
            return super().write(data) or size
        except OSError:
            return size


def outlast_readers() -> None:
    """Let this process go on without a screen where nobody reads what it prints any more."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        # only the process's own
        if stream is None or stream is not getattr(sys, f"__{name}__"):
            continue
        stream.flush()
        file = io.BufferedWriter(_LastingFile(descriptor, "w", closefd=False))
        lasting = io.TextIOWrapper(
            file, stream.encoding, "backslashreplace", line_buffering=True
        )
        setattr(sys, name, lasting)


def columns(stream: TextIO | None = None) -> int | None:
    """Return the columns of the terminal `stream` (standard output); None if it is no terminal."""
    stream = stream or sys.stdout
    try:
        width = (
            os.get_terminal_size(stream.fileno()).columns if stream.isatty() else None
        )
    except (OSError, ValueError):  # a stream without a descriptor
        width = None
    # A pseudo-terminal of unknown width has 0 columns.
    return max(width, LEAST) if width else None


def wrapped(text: str, width: int | None, hang: int = 2) -> str:
    """Break long lines between words; `width` None: break none.

    A continued line is indented as its first line, and by `hang` more.
    """
    if width is None:
        return text
    lines = []
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip()) + hang
        lines += _wrap(line, width, indent) if len(line) > width else [line]
    return "\n".join(lines)


def command(line: str, width: int | None, hang: int = 2) -> str:
    """Break a command of a shell before its flags, so that it can still be pasted."""
    if width is None or len(line) <= width:
        return line
    whole = re.sub(r" (?!-)", GLUE, line.lstrip())
    margin = line[: len(line) - len(line.lstrip())]
    lines = _wrap(margin + whole, width - 2, len(margin) + hang)
    return " \\\n".join(lines).replace(GLUE, " ")


def say(text: str, stream: TextIO | None = None, colour: int | None = None) -> None:
    """Print the text at once, at the width of `stream` (standard output), and on a terminal in a colour."""
    lines = wrapped(visible(text), columns(stream))
    print(painted(lines, colour, stream), file=stream, flush=True)


def warn(text: str, stream: TextIO | None = None) -> None:
    say(f"WARNING: {text}", stream, YELLOW)


def painted(text: str, colour: int | None, stream: TextIO | None = None) -> str:
    """Return the text in a colour where `stream` is a terminal, unless NO_COLOR is set (no-color.org)."""
    plain = colour is None or os.environ.get("NO_COLOR")
    if plain or os.environ.get("TERM") == "dumb" or columns(stream) is None:
        return text
    return f"\033[{colour}m{text}\033[0m"


def _wrap(line: str, width: int, indent: int) -> list[str]:
    margin = " " * indent
    return textwrap.wrap(
        line,
        width,
        subsequent_indent=margin,
        break_long_words=False,
        break_on_hyphens=False,
    )


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
    logging.getLogger("DeepSpeed").addFilter(
        lambda record: record.levelno >= logging.ERROR
    )
