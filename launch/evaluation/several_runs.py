"""Several commands into one directory: what was asked for is kept there, and they are run side by side."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from data.durable_files import write_atomically
from recipes import files
from recipes.problems import Problem, ProblemsError

Item = TypeVar("Item")
Found = TypeVar("Found")
ASKED = "runs.json"


def keep_asked(out: Path, asked: dict[str, Any]) -> None:
    """Keep what runs are asked for; refuse to go on with what was asked otherwise. Raises ProblemsError."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / ASKED
    if path.exists() and files.read_json_object(path) != asked:
        came, rule = f"{out} holds runs of other arguments", "runs that are compared are asked for alike"
        raise ProblemsError([Problem("--out", came, rule, "name another directory with --out")])
    write_atomically(path, json.dumps(asked, indent=1) + "\n")


def side_by_side(
    make: Callable[[Item], Found],
    items: Sequence[Item],
    at_once: int,
    told: Callable[[Found], str],
    say: Callable[[str], None],
) -> list[Found]:
    """What `make` returns for every item, in their order; `told` of each is said when it is there.

    Where one raises, or on Ctrl-C, what has not begun is left out.
    """
    started, done = time.monotonic(), itertools.count(1)

    def one(item: Item) -> Found:
        found = make(item)
        number, seconds = next(done), time.monotonic() - started
        left = tqdm.format_interval(seconds / number * (len(items) - number))
        say(f"{told(found)}; {number} of {len(items)}, about {left} left")
        return found

    with ThreadPoolExecutor(at_once) as pool:
        futures = [pool.submit(one, item) for item in items]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return [future.result() for future in futures]  # what is left out was asked for after what has raised
