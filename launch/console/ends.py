"""The end of a command: its exit code, and its message for Ctrl-C, a closed pipe or a full disk."""

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

    The code is 2 for a refusal (ProblemsError), 1 for a failing disk or device, and 0 if the reader of the
    output, such as head, ends early.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr] # for bytes that are no text
    code: object
    try:
        try:
            code = main()
        except SystemExit as ended:
            code = ended.code
        sys.stdout.flush()  # else a full disk would show too late for a message
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
