"""The values that a recipe takes from a DeepSpeed JSON of one's own (`pretrain.py --follow`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ds_configs import following
from ds_configs.findings import Notice, find, read
from ds_configs.following import Stated
from ds_configs.plan import Plan
from ds_configs.resolver import followed
from recipes.consistency import schedule_problems
from recipes.schema import Recipe


@dataclass(frozen=True)
class FollowedJson:
    """What a recipe takes from a JSON. `unfollowed`: the recipe before."""

    file: str
    stated: Sequence[Stated]
    unfollowed: Recipe

    @classmethod
    def read(cls, file: str, unfollowed: Recipe, world: int | None) -> FollowedJson:
        """Read the JSON for `world` processes; None: for as many as it needs. Raises ConfigError."""
        return cls(file, followed(unfollowed, file, world), unfollowed)

    @property
    def settings(self) -> dict[str, Any]:
        """Return the values by the recipe's dotted keys."""
        return {each.key: each.value for each in self.stated}

    def with_remarks(self, plan: Plan, on_paper: bool = False) -> Plan:
        """Return the plan with a notice for each value that was taken, and for those that were not.

        `on_paper`: also of what a start refuses, since a JSON does not say how long it trains.
        """
        where = Path(self.file).name
        written = read(find(self.file, "--follow"))
        said = [*following.notices(self.stated, self.unfollowed, plan, where, written)]
        refused = schedule_problems(plan.recipe, "", own=False) if on_paper else ()
        for problem in refused:
            said.append(Notice("steps", f"a start is refused: {problem}"))
        return replace(plan, notices=(*said, *plan.notices))
