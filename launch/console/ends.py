"""The end of a command: its exit code, and its message for Ctrl-C, a closed or full output or disk."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TextIO

from launch.console import terminal
from recipes.problems import OUTPUTS, ProblemsError, system_error, system_problem

INTERRUPTED = 130  # as shells report Ctrl-C


def run(main: Callable[[], int | None]) -> NoReturn:
    """Run a command and end with its exit code.

    The code is 2 for a refusal (ProblemsError), 1 for a failing disk or device, and 0 if the reader of the
    output, such as head, ends early.
    """
    streams = _prepared_outputs()
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
        code = (
            0
            if isinstance(error, BrokenPipeError)
            else _say(f"\n{_refused(error)}\n", 1)
        )
        if error.filename in OUTPUTS:
            _drop(streams[error.filename])
    raise SystemExit(code)


def _prepared_outputs() -> dict[str, TextIO]:
    """Return the streams by name, ready for any text and naming their errors; end if one is closed."""
    streams = dict(zip(OUTPUTS, (sys.stdout, sys.stderr), strict=True))
    for name, stream in streams.items():
        if stream is None:
            rule = "files that the command opens would take its place"
            raise SystemExit(
                _say(
                    f"\n{name} is closed: {rule}; redirect it to a file, or to /dev/null\n",
                    2,
                )
            )
    for name, stream in streams.items():
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr] # for bytes that are no text
        for method in ("write", "flush"):
            setattr(stream, method, _naming_errors(name, getattr(stream, method)))
    return streams


def _refused(error: OSError) -> object:
    """Return what to say about a failing disk or device."""
    told = system_error(error)
    if told:
        return system_problem(told, Path.cwd(), "name another place")
    return f"{error.filename or type(error).__name__}: {error.strerror or error}"


def _naming_errors(name: str, write: Callable[..., Any]) -> Callable[..., Any]:
    """Let errors of writing to a stream have its name, which the system does not give."""

    def named(*args: Any) -> Any:
        try:
            return write(*args)
        except OSError as error:
            error.filename = name
            raise

    return named


def _say(text: str, code: int) -> int:
    """Print the text on standard error, or on standard output if that takes nothing; return `code`."""
    for stream in filter(None, (sys.stderr, sys.stdout)):
        try:
            terminal.say(text, stream)
            break
        except OSError:
            _drop(stream)
    return code


def _drop(stream: TextIO) -> None:
    """Drop what a stream did not take: Python would try to write it again when it ends, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
