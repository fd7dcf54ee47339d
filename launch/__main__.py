"""Run a command by its name, also where only the package is installed: megarecipes pretrain --tiny."""

from __future__ import annotations

import ast
import os
import sys
import textwrap
from pathlib import Path
from typing import NoReturn

from launch.console import ends, terminal


def main() -> NoReturn:
    """Replace this process by the command that is named first; exit code 2 if there is none of the name."""
    ends.run(start)


def start() -> int:
    files = {file.stem: file for file in sorted(Path(__file__).parent.glob("[!_]*.py"))}
    name, *rest = sys.argv[1:] or ["--help"]
    if name in files:
        os.execv(sys.executable, [sys.executable, "-m", f"launch.{name}", *rest])
    wanted = name in ("-h", "--help")
    print("usage: megarecipes COMMAND ...     COMMAND --help explains it\n")
    for stem, file in files.items():
        about = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        line = f"  {stem:<16} {about.splitlines()[0]}"
        print(
            textwrap.fill(line, terminal.columns() or 100, subsequent_indent=" " * 19)
        )
    print("\nseveral ranks: deepspeed --num_gpus 8 --module launch.pretrain ...")
    if not wanted:
        print(f"\n{name}: no such command", file=sys.stderr)
    return 0 if wanted else 2


if __name__ == "__main__":
    main()
