"""YAML with the line of every key: no key stands twice, 1e-4 is a number, errors say file:line:column."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from recipes.problems import Problem, RecipeError

KeyPath = tuple[str, ...]


class YamlError(RecipeError):
    """Not readable as YAML; the problem is at file:line:column."""

    def __init__(self, where: str, came: str, rule: str = "", fix: str = "") -> None:
        super().__init__([Problem(where, came, rule, fix, where=where)])


class _Loader(yaml.SafeLoader):
    """PyYAML reads YAML 1.1, where 1e-4 is a string; here it is a number, as in YAML 1.2."""


class _FastLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """The same by libyaml, where PyYAML was built with it: ten times as fast, with poorer messages."""


for _loader in (_Loader, _FastLoader):
    _loader.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"),
        list("-+.0123456789"),
    )


@dataclass(frozen=True)
class Document:
    """A parsed file: its value, and the line (from 1) of each key by its path."""

    where: str
    value: Any
    lines: dict[KeyPath, int] = field(default_factory=dict)

    def at(self, *path: str) -> str:
        """file:line of a key, of its nearest parent in the file, or the file."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.lines:
                return f"{self.where}:{self.lines[path[:length]]}"
        return self.where


def parse(text: str, where: str) -> Document:
    """Parse `text`, called `where` in a YamlError: malformed YAML, or a key twice in one mapping."""
    try:
        return _parse(text, where, _FastLoader)
    except yaml.YAMLError:
        pass  # for its message
    try:
        return _parse(text, where, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{where}:{mark.line + 1}:{mark.column + 1}" if mark else where
        offending = text.splitlines()[mark.line : mark.line + 1] if mark else ()
        rule = ": ".join([f"{error.problem or error.context}", *(repr(line.strip()) for line in offending)])
        raise YamlError(place, "not YAML", rule) from None
    except yaml.YAMLError as error:
        raise YamlError(where, "not YAML", str(error)) from None


def _parse(text: str, where: str, kind: Any) -> Document:
    loader, lines = kind(text), dict[KeyPath, int]()
    node = loader.get_single_node()
    if node is None:
        return Document(where, None)
    _walk(node, (), lines, where)
    return Document(where, loader.construct_document(node), lines)


def read(path: Path, where: str) -> Document:
    """Parse the file; raises YamlError as `parse` does, and for a file that is not UTF-8."""
    try:
        return parse(path.read_text(encoding="utf-8"), where)
    except UnicodeDecodeError as error:
        raise YamlError(where, f"not UTF-8 at byte {error.start}", fix="save the file as UTF-8") from None


def _walk(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], where: str) -> None:
    if isinstance(node, yaml.SequenceNode):
        for child in node.value:
            _walk(child, path, {}, where)  # keys inside lists have no path of their own, but may be double
    if not isinstance(node, yaml.MappingNode):
        return
    for key, child in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        here, line = (*path, key.value), key.start_mark.line + 1
        if here in lines:
            place = f"{where}:{line}:{key.start_mark.column + 1}"
            came = f"key {key.value!r} is already in line {lines[here]}"
            raise YamlError(place, came, "a key stands once in its mapping", "remove one of the two")
        lines[here] = line
        _walk(child, here, lines, where)
