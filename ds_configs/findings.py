"""A DeepSpeed JSON with what is found about it: problems that refuse it, notices that results keep."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
    """A JSON, called `where` in messages, and the problems and notices about it."""

    where: str
    config: Mapping[str, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)

    def lookup(self, key: str) -> Any:
        return lookup(self.config, key)

    def stated(self, key: str) -> Any:
        return stated(self.config, key)

    def refuse(self, key: str, rule: Text, fix: Text = "", came: Text = "", beside: str = "") -> None:
        """Add a problem of the JSON.

        `came`: by default the key with its value, followed by the text `beside`.
        """
        came = came or f"{key}={shown(self.lookup(key))}{beside}"
        self.problems.append(Problem(key, came, rule, fix, where=self.where))

    def notice(self, key: str, text: str) -> None:
        self.notices.append(Notice(key, f"{key}: {text}"))

    def disagreement(self, key: str, stated: Setting) -> None:
        """Add a problem for different values in the JSON and the recipe; it names both places."""
        written = Setting(stated.key, str(self.lookup(key)).replace(" ", ""))
        came = f"{key}={self.lookup(key)} disagrees with the recipe's ", stated
        self.refuse(
            key, "one of them decides", (f'set {key} to "auto" in the JSON, or --set ', written), came
        )


def lookup(config: Mapping[str, Any], dotted: str) -> Any:
    """Return the value at a.b.c; None if any part is absent or null."""
    value: Any = config
    for part in dotted.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def stated(config: Mapping[str, Any], dotted: str) -> Any:
    """Return the value at a.b.c; None if it is absent, null or "auto"."""
    value = lookup(config, dotted)
    return None if value == "auto" else value


def shown(value: Any) -> str:
    """Write a value as JSON, shortened if it is long."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
