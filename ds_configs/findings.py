"""Findings about a ds_config: problems that refuse it, notices that results keep."""

from __future__ import annotations

from dataclasses import dataclass, field

from recipes.problems import Problem, Setting, Text


@dataclass(frozen=True)
class Notice:
    """A difference from recipe or JSON, and its reason; `key` is e.g. "precision"."""

    key: str
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass
class Findings:
    """Collector of problems and notices; `where` names the JSON."""

    where: str
    problems: list[Problem] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)

    def refuse(self, key: str, came: Text, rule: Text, fix: Text = "") -> None:
        """Add a problem of the JSON."""
        self.problems.append(Problem(key, came, rule, fix, where=self.where))

    def notice(self, key: str, text: str) -> None:
        self.notices.append(Notice(key, f"{key}: {text}"))

    def disagreement(self, key: str, value: object, stated: Setting) -> None:
        """Add a problem for different values in the JSON and the recipe; it names both places."""
        written = Setting(stated.key, str(value).replace(" ", ""))
        fix = f'set {key} to "auto" in the JSON, or --set ', written
        self.refuse(key, (f"{key}={value} disagrees with the recipe's ", stated), "one of them decides", fix)
