"""YAML with the line of every key: no key twice, 1e-4 is a number, errors name file:line:column.

Aliases (`*name`) are followed within bounds: a few bytes of them can stand for gigabytes, or for themselves.
"""

from __future__ import annotations

import functools
import itertools
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


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """PyYAML's loader of YAML 1.1, but as in YAML 1.2 1e-4 is a number, and 10:13 is none.

    By libyaml, which is ten times as fast, if PyYAML has it.
    """


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)
for _digit in "0123456789":  # before the whole numbers, among which 10:13 is 613
    _text = "tag:yaml.org,2002:str", re.compile(r"^[0-9]+:[0-9]+$")
    _Loader.yaml_implicit_resolvers[_digit].insert(0, _text)


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
        _check_size(text, where)
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return YamlDocument(where, None)
        places = _lines_of(node, where)
        value = loader.construct_document(node)
        files.check_value(value, where)
        return YamlDocument(where, value, places)
    except RecipeError:
        raise
    except files.FileError as error:
        raise RecipeError(error.problems) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        assert mark is not None, error
        lines = text.splitlines() or [""]
        line = min(mark.line, len(lines) - 1)  # the end is a line of its own
        column = mark.column
        if line < mark.line:
            column = len(lines[line])
        raise YamlError(
            f"{where}:{line + 1}:{column + 1}",
            "not YAML",
            f"{error.problem}: {lines[line].strip()!r}",
        ) from None
    # of the reader, or a date or a number that is none, by its form
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        rule = " ".join(str(error).split())
        raise YamlError(where, "not YAML", rule) from None


# for readers, who leave the shared value as it is
_parse_once = functools.lru_cache(maxsize=128)(parse)


def read(path: Path, where: str) -> YamlDocument:
    """Parse the file; raises YamlError as `parse` does, and for a file that cannot be read."""
    try:
        return _parse_once(files.read_text(path), where)
    except files.FileError as error:
        raise RecipeError(error.problems) from None


def _check_size(text: str, where: str) -> None:
    """Refuse a text too large or too deep to be made into nodes, which the loader does by recursion."""
    values = 0
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        values += isinstance(event, yaml.NodeEvent)
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        _check_bounds(values, depth, where, event)


def _check_bounds(values: int, depth: int, where: str, at: Any) -> None:
    """Refuse more values, or deeper ones, than a document has; `at`: the last event or node."""
    if values > files.MOST_VALUES or depth > files.MOST_DEPTH:
        raise YamlError(
            f"{where}:{at.start_mark.line + 1}",
            f"holds more than {files.MOST_VALUES} values, or is nested too deeply",
            f"at most {files.MOST_VALUES} values within {files.MOST_DEPTH} others, aliases followed",
            "is it the right file?",
        )


def _lines_of(root: yaml.Node, where: str) -> dict[KeyPath, int]:
    """Return the line of each key, the document read as with every alias written out.

    Refuses what is beyond the bounds then, a key twice in one mapping, and control characters.
    """
    places = dict[KeyPath, int]()
    values = itertools.count(1)

    def visit(node: Any, path: KeyPath, lines: dict[KeyPath, int], depth: int) -> None:
        _check_bounds(next(values), depth, where, node)
        if isinstance(node, yaml.ScalarNode):
            control = CONTROL.search(node.value)
            if control:
                raise YamlError(
                    f"{where}:{node.start_mark.line + 1}",
                    f"holds {ascii(control[0])}",
                    "no name or text has a character that a screen obeys",
                    "remove it",
                )
        # keys in lists have no path of their own
        elif isinstance(node, yaml.SequenceNode):
            for child in node.value:
                visit(child, path, {}, depth + 1)
        else:
            for key, child in node.value:
                here = (*path, str(key.value))
                mark = key.start_mark
                if here in lines:
                    raise YamlError(
                        f"{where}:{mark.line + 1}:{mark.column + 1}",
                        f"key {key.value!r} is already in line {lines[here]}",
                        "a key stands once in its mapping",
                        "remove one of the two",
                    )
                lines[here] = mark.line + 1
                visit(key, here, {}, depth + 1)
                visit(child, here, lines, depth + 1)

    visit(root, (), places, 0)
    return places
