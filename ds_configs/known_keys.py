"""The allowed keys and values of a DeepSpeed JSON, from keys.yaml.

DeepSpeed accepts unknown top-level keys in silence, so that a misspelt section does nothing, and checks many
values only in the middle of a start; here both are refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import yaml

from ds_configs.findings import Findings
from ds_configs.jsonfile import FOLDER
from recipes.problems import did_you_mean

_MOST = 2**63 - 1  # DeepSpeed puts numbers of elements into 64-bit integers
_NUMBER = re.compile(r"(a|a whole|an even) number (from|above) (\S+?)(?: to (\S+))?")


class Kind(NamedTuple):
    """The allowed values of a key.

    Attributes:
        rule: text for a refusal.
        fits: check of a value.
        fix: advice about another value.
        whole: a whole number, which JSON may also write as 5e8.
        null: null means something of its own to DeepSpeed; elsewhere it stands for an absent key.
    """

    rule: str
    fits: Callable[[Any], bool]
    fix: str = "write one, or remove the key"
    whole: bool = False
    null: bool = False


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and "\0" not in value


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


_SECTION = Kind("is a section", lambda value: isinstance(value, dict), "write an object, {...}")
_KINDS = {
    "a section": _SECTION,
    "anything": Kind("", lambda value: True),
    "true or false": Kind("", lambda value: isinstance(value, bool), "write one of them"),
    "text": Kind("", _is_text),
    "a list of texts": Kind("", _are_texts),
    'a list of texts, or "auto"': Kind("", lambda value: value == "auto" or _are_texts(value)),
}


def _kind(words: str) -> Kind:
    """Make the kind from its words in keys.yaml."""
    rule = f"must be {words}"
    if kind := _KINDS.get(words):
        return kind if kind.rule else kind._replace(rule=rule)
    what = words.removesuffix(", or null")
    if number := _NUMBER.fullmatch(what):
        whole = number[1] != "a"
        least, most = (float(text.replace(",", "")) if text else None for text in number.group(3, 4))
        assert least is not None
        least += math.ulp(0.0) if number[2] == "above" else 0
        most = most or (_MOST if whole else math.inf)
        step = {"a": 0, "a whole": 1, "an even": 2}[number[1]]

        def fits(value: Any) -> bool:
            return _is_number(value) and least <= value <= most and not (step and value % step)

        return Kind(rule, fits, whole=whole, null=what != words)
    options = re.split(", | or ", what.removesuffix(" in any case"))
    if what.endswith(" in any case"):
        return Kind(rule, lambda value: isinstance(value, str) and value.lower() in options)
    return Kind(rule, lambda value: isinstance(value, str) and value in options)


def _only(one: Any, why: str) -> Kind:
    return Kind(why, lambda value: type(value) is type(one) and value == one, "remove the key")


def _is_number(value: Any) -> bool:
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:  # an integer of more than 308 digits
        return False


def _read() -> tuple[dict[str, dict[str, Kind]], dict[str, tuple[str, str]]]:
    """Read the kinds by section and key, and the rule and the fix of refused keys."""
    table = yaml.safe_load((FOLDER / "keys.yaml").read_text(encoding="utf-8"))
    keys = {
        section: {key: _kind(words) for words, names in kinds.items() for key in names.split()}
        for section, kinds in table["keys"].items()
    }
    for dotted, (one, why) in table["only"].items():
        section, _, key = dotted.rpartition(".")
        keys[section][key] = _only(one, why)
    refused = {
        key: ("was removed from DeepSpeed or is deprecated", fix) for key, fix in table["removed"].items()
    }
    return keys, refused | {key: (rule, fix) for key, (rule, fix) in table["refused"].items()}


KEYS, REFUSED = _read()


def check(config: Mapping[str, Any], findings: Findings) -> dict[str, Any]:
    """Refuse unknown, removed and forbidden keys, and unfit values; return a cleaned copy.

    The copy lacks refused keys and null ones (DeepSpeed fails on some), and has integers for 5e8 and such.
    """
    return _usable("", config, findings)


def unread(config: Mapping[str, Any]) -> list[str]:
    """List the sections of a JSON that pass on to DeepSpeed unchecked."""
    sections = [_join(name, key) for name, keys in KEYS.items() for key in keys if keys[key] is _SECTION]
    return [name for name in sections if name not in KEYS and lookup(config, name)]


def _join(section: str, key: str) -> str:
    return f"{section}.{key}" if section else key


def _usable(name: str, section: Mapping[str, Any], findings: Findings) -> dict[str, Any]:
    known = KEYS[name]
    usable: dict[str, Any] = {}
    for key, value in section.items():
        dotted = _join(name, key)
        if key not in known:
            unknown = "unknown key" if name else "unknown key, which DeepSpeed would ignore"
            rule, fix = REFUSED.get(dotted) or (unknown, did_you_mean(key, known))
            findings.refuse(dotted, dotted, rule, fix)
            continue
        kind = known[key]
        if value is None and not kind.null:
            continue
        left_open = value is None or (value == "auto" and kind is not _SECTION)
        if not left_open and not kind.fits(value):
            findings.refuse(dotted, f"{dotted}={shown(value)}", kind.rule, kind.fix)
        elif isinstance(value, dict) and dotted in KEYS:
            usable[key] = _usable(dotted, value, findings)
        else:
            usable[key] = int(value) if kind.whole and isinstance(value, float) else value
    return usable


def lookup(config: Mapping[str, Any], dotted: str) -> Any:
    """Return the value at a.b.c; None if any part is absent or null."""
    value: Any = config
    for part in dotted.split("."):
        if not isinstance(value, dict):
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
