"""A DeepSpeed JSON, found and read, with problems that refuse it and notices that results keep."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipes import files
from recipes.problems import Problem, ProblemsError, Setting, Text, Words, nearest

FOLDER = Path(__file__).resolve().parent
# Key of ours, a list of others: "auto" here, and left out for Hugging Face's Trainer, which cannot fill them.
FILLS = "megarecipes_fills"
Config = Mapping[str, Any]  # a DeepSpeed JSON, or a part of one


class ConfigError(ProblemsError):
    """A ds_config that cannot run this recipe here: every problem, one line each."""


def available() -> list[str]:
    """List the names of the JSONs in ds_configs/."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def find(ds_path: str | Path, flag: str = "--ds_config") -> Path:
    """Find a JSON by its path, or by its bare name in ds_configs/; ConfigError with near names.

    `flag`: where it was given.
    """
    path = files.path_of(ds_path, flag)
    tried = [path, FOLDER.parent / path]
    if path.name == str(path):
        tried += [FOLDER / path.name, FOLDER / f"{path.name}.json"]
    for candidate in tried:
        if files.is_file(candidate):
            return candidate
    near = nearest(path.stem, available())
    hint = (
        f"did you mean {' or '.join(near)}?"
        if near
        else f"ds_configs/ has {', '.join(available())}"
    )
    kind = "is a directory, not a JSON file" if path.is_dir() else "no such file"
    where = f"{flag} {ds_path}"
    raise ConfigError.of(where, kind, fix=hint, where=where)


def read(path: Path) -> dict[str, Any]:
    """Read the JSON object in `path`, with "auto" at the keys of FILLS that it leaves out.

    Raises ConfigError, with line and column, for a malformed one.
    """
    try:
        config = files.read_settings(path)
    except files.FileError as error:
        raise ConfigError(error.problems) from None
    keys = config.get(FILLS)
    # What is no list of texts stays, to be refused among the other values.
    if isinstance(keys, list) and all(isinstance(key, str) for key in keys):
        del config[FILLS]
        for key in keys:
            if lookup(config, key) is None:
                put(config, key, "auto")
    return config


def put(config: dict[str, Any], dotted: str, value: Any) -> None:
    """Set the value at a.b.c, unless another value stands for a section: that is left to be refused."""
    *sections, last = dotted.split(".")
    for name in sections:
        if config.get(name) is None:
            config[name] = {}
        config = config[name]
        if not isinstance(config, dict):
            return
    config[last] = value


@dataclass(frozen=True)
class Notice:
    """A remark on a plan; `key` is e.g. "precision". `differs`: from recipe or JSON, else all is as asked."""

    key: str
    text: str
    differs: bool = True

    def __str__(self) -> str:
        return self.text


@dataclass
class Findings:
    """A JSON, called `where` in messages, and the problems and notices about it."""

    where: str
    config: Config = field(default_factory=dict)
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


def lookup(config: Config, dotted: str) -> Any:
    """Return the value at a.b.c; None if any part is absent or null."""
    value: Any = config
    for part in dotted.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def stated(config: Config, dotted: str) -> Any:
    """Return the value at a.b.c; None if it is absent, null or "auto"."""
    value = lookup(config, dotted)
    return None if value == "auto" else value


def shown(value: Any) -> str:
    """Write a value as JSON, shortened if it is long."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
