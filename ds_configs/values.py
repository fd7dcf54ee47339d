"""What the value of a key may be: a switch, a whole number within bounds, one of some words."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from recipes.problems import either

# DeepSpeed puts numbers of elements into 64-bit integers.
_MOST = 2**63 - 1


class Kind(NamedTuple):
    """What a value may be.

    Attributes:
        rule: "must be …", as a refusal says it.
        fits: whether a value is one.
        whole: a whole number, which JSON may also write as 5e8.
        null: null means something of its own to DeepSpeed; elsewhere it stands for an absent key.
        fix: what to do about another value.
    """

    rule: str
    fits: Callable[[Any], bool]
    whole: bool = False
    null: bool = False
    fix: str = "write one, or remove the key"


def count(least: int = 0, most: int = _MOST, *, multiple: int = 1, null: bool = False) -> Kind:
    """A whole number."""

    def fits(value: Any) -> bool:
        return _is_number(value) and value == int(value) and least <= value <= most and value % multiple == 0

    kind = "even number" if multiple == 2 else "whole number"
    upto = "" if most == _MOST else f" to {most:,}"
    return Kind(f"must be a{'n' if multiple == 2 else ''} {kind} from {least}{upto}", fits, True, null)


def number(least: float, most: float = math.inf, *, above: bool = False) -> Kind:
    """A finite number from (or above) `least`."""

    def fits(value: Any) -> bool:
        return _is_number(value) and least <= value <= most and not (above and value == least)

    upto = "" if most == math.inf else f" to {most:,g}"
    return Kind(f"must be a number {'above' if above else 'from'} {least:g}{upto}", fits)


def word(*words: str, any_case: bool = False) -> Kind:
    """One of the words; `any_case`: DeepSpeed does not mind capitals."""

    def fits(value: Any) -> bool:
        return isinstance(value, str) and (value.lower() if any_case else value) in words

    return Kind(f"must be {either(words)}", fits)


def only(value: bool | int | str, why: str) -> Kind:
    """A key that can have one value here; `why` is the rule that another one breaks."""
    return Kind(why, lambda given: type(given) is type(value) and given == value, fix="remove the key")


def never(why: str) -> Kind:
    """A section that has no part here."""
    return Kind(why, lambda given: False, fix="remove the section")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(_as_float(value))


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer of more than 308 digits
        return math.inf


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and "\0" not in value


SWITCH = Kind("must be true or false", lambda value: isinstance(value, bool), fix="write one of them")
TEXT = Kind("must be text", _is_text)
TEXTS = Kind("must be a list of texts", lambda value: isinstance(value, list) and all(map(_is_text, value)))
SECTION = Kind("is a section", lambda value: isinstance(value, dict), fix="write an object, {...}")
JUDGED_LATER = Kind("", lambda value: True)  # by sections/, next to what the recipe says


def shown(value: Any) -> str:
    """A value as the JSON has it, cut where it is long."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
