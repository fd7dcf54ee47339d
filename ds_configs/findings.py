"""A DeepSpeed JSON with what is found about it: problems that refuse it, notices that results keep."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from recipes.problems import Problem, Setting, Text, Words


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

    def refuse(
        self, key: str, rule: Text, fix: Text = "", came: Text = "", beside: str = ""
    ) -> None:
        """Add a problem of the JSON.

        `came`: by default the key with its value, followed by the text `beside`.
        """
        came = came or f"{key}={shown(self.lookup(key))}{beside}"
        self.problems.append(Problem(key, came, rule, fix, where=self.where))

    def notice(self, key: str, text: str) -> None:
        self.notices.append(Notice(key, f"{key}: {text}"))

    def disagreement(
        self,
        key: str,
        stated: Setting,
        settings: Sequence[Setting] | None = None,
        open_keys: str = "",
    ) -> None:
        """Add a problem for different values in the JSON and the recipe; it names both places.

        `settings`: those by which the recipe takes the JSON's value, by default the value alone; `open_keys`:
        the keys whose "auto" leaves the value to the recipe, by default `key`.
        """
        if settings is None:
            settings = [Setting(stated.key, self.lookup(key))]
        came = f"{key}={shown(self.lookup(key))} disagrees with the recipe's ", stated
        fix: list[Words] = [
            f'set {open_keys or key} to "auto" in the JSON',
            *to_set(settings),
        ]
        problem = Disagreement(
            key, came, "one of them decides", tuple(fix), where=self.where
        )
        self.problems.append(problem)


class Disagreement(Problem):
    """Different values in the JSON and the recipe."""


def to_set(settings: Iterable[Setting]) -> Iterator[Words]:
    """Yield the words ", or --set a=1 --set b=2", nothing without settings."""
    before = ", or --set "
    for setting in settings:
        yield before
        yield Setting(setting.key, plain(setting.value))
        before = " --set "


def plain(value: Any) -> str:
    """Write a value as --set takes it, without blanks."""
    return json.dumps(value).replace(" ", "").strip('"')


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
