"""What is found while a ds_config is resolved: problems that refuse it, notices that are shown and kept with the results."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Report:
    """Collects lines; `where` names the JSON in them."""

    where: str
    problems: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    def problem(self, *lines: str) -> None:
        """What came, the rule, the fix."""
        self.problems += [line for line in lines if line not in self.problems]

    def notice(self, *lines: str) -> None:
        """Something that differs from what recipe or JSON ask for, and why."""
        self.notices += [line for line in lines if line not in self.notices]

    def disagreement(
        self, key: str, value: object, recipe_key: str, recipe_value: object, why: str = ""
    ) -> None:
        """The JSON and the recipe state different values; names both places."""
        set_value = str(value).replace(" ", "").replace("(", "[").replace(")", "]")
        self.problem(
            f"{self.where}: {key}={value} disagrees with the recipe's {recipe_key}={recipe_value}{why}: one of them decides; "
            f'set {key} to "auto" in the JSON, or --set {recipe_key}={set_value}'
        )


def join(words: Iterable[object]) -> str:
    """Words as "a, b or c"."""
    *first, last = [str(word) for word in words]
    return f"{', '.join(first)} or {last}" if first else last
