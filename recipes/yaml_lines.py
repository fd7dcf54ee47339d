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
    """Parse `text`; `where` names it in errors.

    Raises:
        YamlError: malformed YAML, or a key twice in one mapping.
    """
    try:
        return _parse(text, where, _FastLoader)
    except yaml.YAMLError:
        pass  # for its message
    try:
        return _parse(text, where, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{where}:{mark.line + 1}:{mark.column + 1}" if mark else where
        raise YamlError(place, "not YAML", f"{error.problem or error.context}{_shown(text, mark)}") from None
    except yaml.YAMLError as error:
        raise YamlError(where, "not YAML", str(error)) from None


def _parse(text: str, where: str, kind: Any) -> Document:
    loader = kind(text)
    try:
        node = loader.get_single_node()
        lines: dict[KeyPath, int] = {}
        if node is not None:
            _walk(node, (), lines, where)
        value = loader.construct_document(node) if node is not None else None
    finally:
        loader.dispose()
    return Document(where, value, lines)


def read(path: Path, where: str) -> Document:
    """Parse the file; raises YamlError as `parse` does, and for a file that is not UTF-8."""
    try:
        return parse(path.read_text(encoding="utf-8"), where)
    except UnicodeDecodeError as error:
        raise YamlError(where, f"not UTF-8 at byte {error.start}", fix="save the file as UTF-8") from None


def _shown(text: str, mark: yaml.Mark | None) -> str:
    """The offending line, to be put behind the message."""
    lines = text.splitlines()
    if mark is None or mark.line >= len(lines):
        return ""
    return f": {lines[mark.line].strip()!r}"


def _walk(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], where: str) -> None:
    if isinstance(node, yaml.SequenceNode):
        for child in node.value:
            _walk(child, path, {}, where)  # keys inside lists have no path of their own, but may be double
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key, child in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        line = key.start_mark.line + 1
        if key.value in seen:
            place, came = (
                f"{where}:{line}:{key.start_mark.column + 1}",
                f"key {key.value!r} is already in line {seen[key.value]}",
            )
            raise YamlError(place, came, "a key stands once in its mapping", "remove one of the two")
        seen[key.value] = line
        here = (*path, key.value)
        lines[here] = line
        _walk(child, here, lines, where)
