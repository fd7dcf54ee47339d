"""YAML with the line of every key: no key twice, 1e-4 is a number, errors name file:line:column.

Aliases (`*name`) are followed within bounds: a few bytes of them can stand for gigabytes, or for themselves.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from recipes import files
from recipes.problems import Problem, RecipeError

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
KeyPath = tuple[str, ...]


class YamlError(RecipeError):
    """A text that is no YAML; its problem names file:line:column."""

    def __init__(self, where: str, came: str, rule: str, fix: str = "") -> None:
        super().__init__([Problem(where, came, rule, fix, where=where)])


class _Loader(yaml.SafeLoader):
    """PyYAML's loader of YAML 1.1, but as in YAML 1.2 1e-4 is a number, and 10:13 is none."""


class _FastLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """The same loader by libyaml, if PyYAML has it: ten times as fast, with poorer messages."""


for _loader in (_Loader, _FastLoader):
    _loader.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"),
        list("-+.0123456789"),
    )
    for _digit in "0123456789":  # before the whole numbers, among which 10:13 is 613
        _text = "tag:yaml.org,2002:str", re.compile(r"^[0-9]+:[0-9]+$")
        _loader.yaml_implicit_resolvers[_digit].insert(0, _text)


@dataclass(frozen=True)
class YamlDocument:
    """A parsed file: its value, and the line (from 1) of each key by its path."""

    where: str
    value: Any
    lines: dict[KeyPath, int] = field(default_factory=dict)

    def at(self, *path: str) -> str:
        """Return file:line of a key or of its nearest parent in the file, else the file."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.lines:
                return f"{self.where}:{self.lines[path[:length]]}"
        return self.where


def parse(text: str, where: str) -> YamlDocument:
    """Parse `text`, called `where` in a YamlError.

    Refuses malformed YAML, a key twice in one mapping, and a document that is too deep or too large.
    """
    try:
        return _parse(text, where, _FastLoader)
    except yaml.YAMLError:
        pass  # the other loader has the better message
    try:
        return _parse(text, where, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{where}:{mark.line + 1}:{mark.column + 1}" if mark else where
        offending = text.splitlines()[mark.line : mark.line + 1] if mark else ()
        rule = ": ".join(
            [
                f"{error.problem or error.context}",
                *(repr(line.strip()) for line in offending),
            ]
        )
        raise YamlError(place, "not YAML", rule) from None
    except yaml.YAMLError as error:
        raise YamlError(where, "not YAML", " ".join(str(error).split())) from None


# for readers, who leave the shared value as it is
_parse_once = functools.lru_cache(maxsize=128)(parse)


def read(path: Path, where: str) -> YamlDocument:
    """Parse the file; raises YamlError as `parse` does, and for a file that cannot be read."""
    try:
        return _parse_once(files.read_text(path), where)
    except files.FileError as error:
        raise RecipeError(error.problems) from None


def _parse(text: str, where: str, kind: Any) -> YamlDocument:
    _check_text(text, where, kind)
    loader = kind(text)
    node = loader.get_single_node()
    if node is None:
        return YamlDocument(where, None)
    lines = _lines_of(node, where)
    try:
        value = loader.construct_document(node)
        files.check_value(value, where)
    except files.FileError as error:
        raise RecipeError(error.problems) from None
    # a date or a number that is none, by its form
    except (ValueError, OverflowError) as error:
        raise YamlError(where, "not YAML", str(error)) from None
    return YamlDocument(where, value, lines)


def _check_text(text: str, where: str, kind: Any) -> None:
    """Refuse a text too large or too deep to be made into nodes, which the loader does by recursion."""
    values = depth = 0
    event: Any
    for event in yaml.parse(text, Loader=kind):
        values += isinstance(event, yaml.NodeEvent)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
            event, yaml.CollectionEndEvent
        )
        _check_size(values, depth, f"{where}:{event.start_mark.line + 1}")


def _check_size(values: int, depth: int, place: str) -> None:
    if values > files.MOST_VALUES or depth > files.MOST_DEPTH:
        came = f"holds more than {files.MOST_VALUES} values, or is nested too deeply"
        rule = f"at most {files.MOST_VALUES} values within {files.MOST_DEPTH} others, aliases followed"
        raise YamlError(place, came, rule, "is it the right file?")


def _lines_of(root: yaml.Node, where: str) -> dict[KeyPath, int]:
    """Return the line of each key, the document read as with every alias written out.

    Refuses what is beyond the bounds, a key twice in one mapping, and control characters.
    """
    found = dict[KeyPath, int]()
    values = 0
    waiting: list[tuple[Any, KeyPath, dict[KeyPath, int], int, int]] = [
        (root, (), found, 0, 1)
    ]
    while waiting:
        node, path, lines, depth, line = waiting.pop()
        # what an alias repeats is marked further up
        line = max(line, node.start_mark.line + 1)
        values += 1
        _check_size(values, depth, f"{where}:{line}")
        if isinstance(node, yaml.ScalarNode):
            control = CONTROL.search(node.value)
            if control:
                rule = "no name or text has a character that a screen obeys"
                came = f"holds {ascii(control[0])}"
                raise YamlError(f"{where}:{line}", came, rule, "remove it")
        # keys in lists have no path of their own
        elif isinstance(node, yaml.SequenceNode):
            waiting += [(child, path, {}, depth + 1, line) for child in node.value]
        else:
            for key, child in node.value:
                here = (*path, str(key.value))
                own = key.start_mark.line + 1
                if here in lines:
                    place = f"{where}:{own}:{key.start_mark.column + 1}"
                    came = f"key {key.value!r} is already in line {lines[here]}"
                    raise YamlError(
                        place,
                        came,
                        "a key stands once in its mapping",
                        "remove one of the two",
                    )
                lines[here] = own
                waiting += [
                    (key, path, {}, depth + 1, line),
                    (child, here, lines, depth + 1, max(line, own)),
                ]
    return found
