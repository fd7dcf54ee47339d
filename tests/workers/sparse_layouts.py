"""Two ranks that train a model with banded layers under several layouts, one with a broken band. Started by tests/test_sparse_models.py.

    sparse_layouts.py DIRECTORY    which holds recipe.yaml and gets a run directory for every case
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from unittest import mock

from launch import compare_layouts, startup
from launch.compare_layouts import LayoutCase
from modeling import banded_attention
from recipes import catalog

PROCESSES = 2
CASES = (
    LayoutCase("tp2", 2, 1, 1, "zero0"),
    LayoutCase("pp2 recomputed", 1, 2, 1, "pipeline", accumulation=4, checkpointing="full"),
    LayoutCase("dp2 zero3", 1, 1, 2, "zero3"),
)
BROKEN = LayoutCase("tp2, band one too wide", 2, 1, 1, "zero0")


def one_too_wide() -> AbstractContextManager:
    right = banded_attention.in_band
    return mock.patch.object(banded_attention, "in_band", lambda query, key, window: right(query, key, window + 1))


def main(directory: Path) -> None:
    startup.quiet_libraries()
    recipe = catalog.load_resolved(directory / "recipe.yaml")
    machine = startup.detect_machine()
    with startup.clean_exit():
        startup.start_processes(timeout_minutes=2)
        for case in (*CASES, BROKEN):
            with one_too_wide() if case is BROKEN else nullcontext():
                compare_layouts.run_case(recipe, case, directory / compare_layouts.slug(case.name), machine)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
