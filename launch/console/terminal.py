"""Text at the width of a terminal. What goes into a file or through a pipe is left whole."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from typing import TextIO

GLUE = "\N{NO-BREAK SPACE}"  # holds a flag and its value together
LEAST = 40  # columns: in fewer, words would stand one below the other


def columns(stream: TextIO | None = None) -> int | None:
    """The columns of the terminal that `stream` (standard output) is; None where it is none."""
    stream = stream or sys.stdout
    try:
        found = os.get_terminal_size(stream.fileno()).columns if stream.isatty() else None
    except (OSError, ValueError):  # a stream without a descriptor
        found = None
    # A pseudo-terminal may have 0 columns: nobody knows how wide what stands behind it is.
    return max(found, LEAST) if found else None


def wrapped(text: str, width: int | None, hang: int = 2) -> str:
    """The text with its long lines broken between words, or as it is where `width` is None.

    What follows a break is indented as its line, and by `hang` more.
    """
    if width is None:
        return text
    lines = []
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip()) + hang
        lines += _wrap(line, width, indent) if len(line) > width else [line]
    return "\n".join(lines)


def command(line: str, width: int | None, hang: int = 2) -> str:
    """A command of a shell at that width, broken before its flags, so that it can still be pasted."""
    if width is None or len(line) <= width:
        return line
    whole = re.sub(r" (?!-)", GLUE, line.lstrip())
    margin = line[: len(line) - len(line.lstrip())]
    lines = _wrap(margin + whole, width - 2, len(margin) + hang)
    return " \\\n".join(lines).replace(GLUE, " ")


def say(text: str, stream: TextIO | None = None) -> None:
    """Print the text at the width of `stream` (standard output), at once."""
    print(wrapped(text, columns(stream)), file=stream, flush=True)


def _wrap(line: str, width: int, indent: int) -> list[str]:
    margin = " " * indent
    return textwrap.wrap(
        line, width, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False
    )
