"""What scripts share that make a list of cases on the ranks of one launch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from launch.ranks import ending, processes


def write_found(of_case: Callable[[dict, Path], object]) -> None:
    """Write what `of_case` finds of each case, as `SCRIPT OUT.json CASES.json` says."""
    out, cases = Path(sys.argv[1]), Path(sys.argv[2])
    with ending.clean_exit():
        processes.start_processes()
        found = [of_case(case, out) for case in json.loads(cases.read_text())]
        if processes.rank() == 0:
            out.write_text(json.dumps(found))
