"""The end of a command: its exit code, and a sentence for Ctrl-C, a closed pipe or a full disk."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from launch.console import terminal
from recipes.problems import ProblemsError
from recipes.refused_by_system import problem, told_by

INTERRUPTED = 130  # as shells report Ctrl-C


def run(main: Callable[[], int | None]) -> NoReturn:
    """Run a command and end with its exit code.

    2 where it refuses (ProblemsError), 1 where a disk or a device fails it, 0 where the reader of its output,
    such as head, has seen enough.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr] # of bytes that are no text
    code: object
    try:
        try:
            code = main()
        except SystemExit as ended:
            code = ended.code
        sys.stdout.flush()  # or a full disk is found out when nothing can say so any more
    except ProblemsError as error:
        code = _say(f"\n{error}\n", 2)
    except KeyboardInterrupt:
        code = _say("\ninterrupted\n", INTERRUPTED)
    except OSError as error:
        # Drop what is still buffered: Python would try to write it again when it ends, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            code = 0
        else:
            named = f"{error.filename}: " if error.filename else "cannot write the output: "
            said: object = f"{named}{error.strerror or error}"
            if error.filename and (told := told_by(error)):
                said = problem(told, Path.cwd(), "name another place")
            code = _say(f"\n{said}\n", 1)
    raise SystemExit(code)


def _say(text: str, code: int) -> int:
    terminal.say(text, sys.stderr)
    return code
