"""Several commands into one directory: what was asked for is kept there, and they are run side by side."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from time import monotonic as clock
from typing import Any, TypeVar

from tqdm import tqdm

from data.durable_files import write_atomically
from recipes import files
from recipes.problems import Problem, ProblemsError

Item = TypeVar("Item")
Found = TypeVar("Found")
ASKED = "runs.json"
WORK_S = 1.0  # what takes less was made before, and tells nothing of what is left


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

    Where one raises, or on Ctrl-C, what has not begun is left out; what is under way is waited for.
    """
    done, took = itertools.count(1), list[float]()

    def one(item: Item) -> Found:
        began = clock()
        found = make(item)
        number, seconds = next(done), clock() - began
        took.extend([seconds] if seconds > WORK_S else [])
        left = statistics.mean(took or [0]) * (len(items) - number) / at_once
        about = f", about {tqdm.format_interval(left)} left" if took else ""
        say(f"{told(found)}; {number} of {len(items)}{about}")
        return found

    with ThreadPoolExecutor(at_once) as pool:
        futures = [pool.submit(one, item) for item in items]
        try:
            ended = wait(futures, return_when=FIRST_EXCEPTION).done
            for error in filter(None, (future.exception() for future in ended)):
                say(f"{error}; no other begins, and what is under way is waited for")
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return [future.result() for future in futures]  # what is left out was asked for after what has raised
