"""Train a recipe in one process and under layouts, with one launch per number of processes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from launch.console import terminal
from launch.experiments.parity.layout_cases import REFERENCES, LayoutCase
from launch.experiments.proving.proving import Proven, Reference
from launch.experiments.proving.task import Task
from launch.experiments.proving.verdict import Row
from recipes import catalog
from recipes.problems import counted
from recipes.schema import Recipe

ADAPTER = Path(__file__).with_name("adapter.py")
TIMEOUT = 1800.0  # seconds of a step, the first of which compiles


class Layouts:
    """A recipe's layouts, next to one process of the same precision; `out`: of all they leave."""

    def __init__(self, recipe: Recipe, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._recipe = recipe
        self.out = out
        self._references = dict[str, Reference]()
        self._file = out / "recipe.yaml"
        self._file.write_text(catalog.dump(recipe))

    def reference(self, states: str = "fp32") -> Reference:
        """Return the runs in one process, made when they are first asked for. Raises ProblemsError."""
        if states not in self._references:
            case = REFERENCES[states]
            terminal.say(f"1 process: {case.name}, again, and rounded otherwise")
            self._references[states] = Reference(self.task(case), set())
        return self._references[states]

    def proven(self, cases: Sequence[LayoutCase], keep: bool = True) -> Proven:
        """Train fewest processes first, and compare; remove what each leaves unless `keep`.

        Layouts of as many processes share a launch, which takes longer than a layout. The reference is that of
        fp32 if some are in it. Raises ProblemsError.
        """
        rows = list[Row]()
        groups = dict[tuple[int, str], list[LayoutCase]]()
        for case in cases:
            groups.setdefault((case.processes, case.states), []).append(case)
        for processes, states in sorted(groups):
            group = groups[processes, states]
            reference = self.reference(states)
            names = "; ".join(case.name for case in group)
            terminal.say(f"{counted(processes, 'process')}: {names}")
            tasks = [reference.compared(self.task(case)) for case in group]
            rows += reference.rows([case.layout for case in group], tasks)
            for task in tasks:
                if not keep:
                    shutil.rmtree(task.out)
        return Proven(self.reference(max(states for _, states in groups)), rows)

    def task(self, case: LayoutCase) -> Task:
        """Return the training of a layout that is compared with none."""
        precision = self._recipe.precision
        if case.states != "fp32":
            precision = case.states
        given = {"recipe": str(self._file.absolute()), "case": vars(case)}
        return Task(
            str(ADAPTER),
            case.words,
            str(self.out / case.folder),
            self._recipe.steps,
            precision=precision,
            timeout=TIMEOUT,
            given=json.dumps(given),
            ends=True,
        )
