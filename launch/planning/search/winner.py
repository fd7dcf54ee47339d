"""The first layout of a search for pretrain.py: overrides, DeepSpeed JSON, command line."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from ds_configs.plan import Plan
from ds_configs.resolver import resolve
from launch.console import launch_lines
from launch.planning.prediction.workload import Workload
from launch.planning.search import ways
from launch.planning.search.candidates import Question
from launch.planning.search.layout_search import Candidate
from recipes import catalog
from recipes.schema import Recipe

JSON_NAME = "ds_config.json"
RECOMPUTATION = "activation_checkpointing"
DERIVED_KEYS = {"parallel.dp", "batch.accumulation"}  # from the rest, where the recipe leaves them open


@dataclass(frozen=True)
class RecipeFlags:
    """The recipe as stated by the flags.

    Attributes:
        overrides: `--model`, `--set` and `--global-batch`.
    """

    name: str
    overrides: list[str]
    tiny: bool
    steps: int | None

    def load(self, overrides: Sequence[str]) -> Recipe:
        """Load the recipe with these overrides instead of its own."""
        return catalog.load(self.name, overrides, tiny=self.tiny, steps=self.steps)

    @property
    def keys(self) -> dict[str, str]:
        """The last override of each key."""
        return {text.partition("=")[0].strip(): text for text in self.overrides}


@dataclass(frozen=True)
class Winner:
    """The first layout of a search, with its flags and question."""

    flags: RecipeFlags
    question: Question
    layout: Candidate

    @property
    def settings(self) -> list[str]:
        """The overrides for the predicted step."""
        own, work = self.flags.load([]), self.layout.work
        decided = {
            "parallel.tp": work.layout.tp,
            "parallel.pp": work.layout.pp,
            "parallel.dp": work.layout.dp,
            "batch.micro": work.layout.micro,
            "batch.accumulation": work.layout.accumulation,
            "parallel.sequence": work.sequence_parallel,
            RECOMPUTATION: _recomputation(work),
        }
        sets = {key: text for key, text in self.flags.keys.items() if key not in decided}
        for key, value in decided.items():
            stated = attrgetter(key)(own)
            if stated != value and not (stated is None and key in DERIVED_KEYS):
                sets[key] = f"{key}={str(value).lower()}"
        return list(sets.values())

    @property
    def document(self) -> dict[str, Any]:
        """The DeepSpeed JSON, with the layout's numbers in it."""
        return ways.config(self.layout.way, self.question.base, self.layout.work.layout)

    def plan(self) -> Plan:
        """Resolve the plan to launch. Raises ConfigError."""
        recipe = self.flags.load(self.settings)
        with tempfile.TemporaryDirectory() as folder:
            path = ways.write(self.document, Path(folder) / JSON_NAME)
            return resolve(recipe, path, self.question.ranks, self.question.node.machine)

    def launch_line(self, out: Path | None) -> str | None:
        """Return the command line, with its JSON in `out`; None: its JSON is not written yet."""
        question, flags = self.question, self.flags
        if out is None and (question.base or self.layout.way.offload):
            return None
        file = str(out / JSON_NAME) if out else self.layout.way.file
        words = launch_lines.arguments(flags.name, file, self.settings, tiny=flags.tiny, steps=flags.steps)
        launcher = launch_lines.deepspeed(question.nodes, question.node.gpus)
        return f"{launcher} {launch_lines.SCRIPT} {launch_lines.quoted(words)}"


def _recomputation(work: Workload) -> str | int:
    """Return the recipe's value for recomputation."""
    if work.selective:
        return "selective"
    return {0: "none", 1: "full"}.get(work.recomputed, work.recomputed)
