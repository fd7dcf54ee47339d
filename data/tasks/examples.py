"""From records to examples: what is broken is counted and reported with its place, never a crash."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from data.tasks.records import Located
from recipes.plural import counted
from recipes.problems import Problem, ProblemsError

SHOWN = 3  # broken examples of a split that are named
E_co = TypeVar("E_co", covariant=True)


@dataclass(frozen=True)
class BrokenExample:
    place: str
    why: str

    def __str__(self) -> str:
        return f"{self.place}: {self.why}"


@dataclass(frozen=True)
class Examples(Generic[E_co]):
    """Those of a split that can be used, and those that cannot."""

    split: str
    sound: tuple[E_co, ...]
    broken: tuple[BrokenExample, ...]

    def __str__(self) -> str:
        """What a user should know of the broken ones; "" where there are none."""
        if not self.broken:
            return ""
        named = "; ".join(map(str, self.broken[:SHOWN]))
        more = f"; and {len(self.broken) - SHOWN} more" if len(self.broken) > SHOWN else ""
        return f"{self.split}: {counted(len(self.broken), 'broken example')} left out: {named}{more}"


class Wrong(ValueError):
    """What is wrong with one record."""


class Parse(Protocol[E_co]):
    def __call__(self, record: dict[str, Any], number: int, labelled: bool) -> E_co: ...


def parsed(
    split: str, records: Sequence[Located], parse: Callable[[dict[str, Any], int, bool], E_co]
) -> Examples[E_co]:
    """The examples of a split, whose labels are needed unless it is a test.

    Raises:
        ProblemsError: all of them are broken.
    """
    sound, broken, labelled = list[E_co](), list[BrokenExample](), not split.startswith("test")
    for number, record in enumerate(records):
        try:
            if record.why:
                raise Wrong(record.why)
            sound.append(parse(record.value, number, labelled))
        except Wrong as error:
            broken.append(BrokenExample(record.place, str(error)))
    if not sound:
        named = "; ".join(map(str, broken[:SHOWN]))
        rule = f"all of its {counted(len(broken), 'example')} are broken: {named}"
        raise ProblemsError([Problem(f"--{split}", split, rule, "give a sound file", where=f"--{split}")])
    return Examples(split, tuple(sound), tuple(broken))


def text_of(record: dict[str, Any], name: str) -> str:
    """A text field. Raises Wrong."""
    value = record.get(name)
    if not isinstance(value, str):
        raise Wrong(
            f"{name} is {type(value).__name__ if name in record else 'missing'}, and a text is needed"
        )
    if not value.strip():
        raise Wrong(f"{name} is empty")
    return value


def label_of(record: dict[str, Any], name: str, labels: Sequence[str], labelled: bool) -> int | None:
    """The number of a label that is written as its number or its name; None: it is hidden. Raises Wrong."""
    value = record.get(name)
    if value in labels:
        return labels.index(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(labels):
        return value
    if not labelled and value in (None, -1, ""):
        return None
    raise Wrong(f"{name} {value!r} is out of range: it is one of 0..{len(labels) - 1} ({', '.join(labels)})")
