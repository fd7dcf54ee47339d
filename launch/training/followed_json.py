"""The values that a recipe takes from a DeepSpeed JSON of one's own (`pretrain.py --follow`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ds_configs import following
from ds_configs.findings import find, read
from ds_configs.following import Stated
from ds_configs.plan import Plan
from ds_configs.resolver import followed
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

    def noted(self, plan: Plan) -> Plan:
        """Return the plan with a notice for each value that was taken, and for those that were not."""
        where = Path(self.file).name
        written = read(find(self.file, "--follow"))
        said = following.notices(self.stated, self.unfollowed, plan, where, written)
        return replace(plan, notices=(*said, *plan.notices))
