"""The allowed keys and values of a DeepSpeed JSON, from keys.yaml.

DeepSpeed accepts unknown top-level keys in silence, so that a misspelt section does nothing, and checks many
values only in the middle of a start; here both are refused.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from ds_configs.findings import FOLDER, Config, Findings, lookup, shown
from recipes.problems import did_you_mean, nearest

_MOST = 2**63 - 1  # DeepSpeed puts numbers of elements into 64-bit integers
_NUMBER = re.compile(r"(a|a whole|an even) number (from|above) (\S+?)(?: to (\S+))?")
_WHOLE = ("a whole number", "an even number")  # which JSON may also write as 5e8
_SECTION = "a section, {...}"  # an object, which cannot be "auto"
_OR = ", or "
_ANY_CASE = " in any case"
# Sections of which DeepSpeed ignores unknown keys; in the others it fails at them.
_LENIENT = (
    "",
    "optimizer",
    "scheduler",
    "activation_checkpointing",
    "aio",
    "data_types",
    "pipeline",
    "flops_profiler",
)
# the beginning of a key that comments
_COMMENT = re.compile(r"[_#$]|//|comments?$", re.IGNORECASE)


@dataclass(frozen=True)
class Kind:
    """The allowed values of a key.

    Attributes:
        words: as in keys.yaml; what ends with "or null" means something of its own to DeepSpeed at null,
            which elsewhere stands for an absent key.
        one, why: the only value, and the reason; without words.
    """

    words: str
    one: Any = None
    why: str = ""

    @property
    def rule(self) -> str:
        """Text for a refusal."""
        return self.why or f"must be {self.words}"

    @property
    def fix(self) -> str:
        """Advice about another value."""
        if self.why:
            return f"write {shown(self.one)}"
        number = _NUMBER.fullmatch(self.words.partition(_OR)[0])
        if number and self.words.startswith(_WHOLE) and not number[4]:
            return f"write {number[3]} or more"
        return "write one"

    def fits(self, value: Any) -> bool:
        """Check a value."""
        if self.why:
            return type(value) is type(self.one) and value == self.one
        what, _, also = self.words.partition(_OR)
        if also == "false" and value is False:
            return True
        if what in _FITS:
            return _FITS[what](value)
        number = _NUMBER.fullmatch(what)
        if number:
            return _is_within(number, value)
        options = re.split(", | or ", what.removesuffix(_ANY_CASE))
        plain = str.lower if what.endswith(_ANY_CASE) else str
        return isinstance(value, str) and plain(value) in options


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and "\0" not in value


def _are_betas(value: Any) -> bool:
    numbers = isinstance(value, list) and all(
        type(each) in (int, float) for each in value
    )
    return numbers and len(value) == 2 and all(0 <= each < 1 for each in value)


_FITS: dict[str, Callable[[Any], bool]] = {
    "anything": lambda value: True,
    _SECTION: lambda value: isinstance(value, dict),
    "two numbers from 0 to below 1, [beta1, beta2]": _are_betas,
    "true or false": lambda value: isinstance(value, bool),
    "text": _is_text,
    "a list of texts": lambda value: (
        isinstance(value, list) and all(map(_is_text, value))
    ),
}


def _is_within(words: re.Match[str], value: Any) -> bool:
    """Check if a value is a number of the kind and the range of the words."""
    step = {"a": 0, "a whole": 1, "an even": 2}[words[1]]
    least = float(words[3])
    if words[2] == "above":
        least += math.ulp(0.0)
    most = _MOST if step else math.inf
    if words[4]:
        most = float(words[4].replace(",", ""))
    number = type(value) is int
    if type(value) is float:
        number = math.isfinite(value)
    return number and least <= value <= most and not (step and value % step)


def _kinds(table: Config) -> dict[str, dict[str, Kind]]:
    """Make the kinds by section and key."""
    keys: dict[str, dict[str, Kind]] = {}
    for section, kinds in table["keys"].items():
        keys[section] = {}
        for words, names in kinds.items():
            keys[section] |= dict.fromkeys(names.split(), Kind(words))
    for dotted, (one, why) in table["only"].items():
        section, _, key = dotted.rpartition(".")
        keys[section][key] = Kind("", one, why)
    return keys


_TABLE = yaml.safe_load((FOLDER / "keys.yaml").read_text(encoding="utf-8"))
KEYS = _kinds(_TABLE)
# rule and fix of refused keys
REFUSED: dict[str, list[str]] = _TABLE["refused"]
for _key, _fix in _TABLE["removed"].items():
    REFUSED[_key] = ["was removed from DeepSpeed or is deprecated", _fix]
# other names of keys: today's, and the value where true stands for one
RENAMED: dict[str, list[Any]] = _TABLE["renamed"]
IDLE: dict[str, str] = _TABLE["idle"]


def check(findings: Findings) -> None:
    """Refuse unknown, removed and forbidden keys, and unfit values; replace the JSON by a cleaned copy.

    The copy lacks refused keys, null ones (DeepSpeed fails on some), comments and the contents of what is
    off; it has today's names, and integers for 5e8 and such.
    """
    config = dict(findings.config)
    zero = config.get("zero_optimization")
    if isinstance(zero, bool):  # DeepSpeed's first form
        config["zero_optimization"] = {"stage": int(zero)}
        findings.notice("zero_optimization", f"{shown(zero)} is stage {int(zero)}")
    findings.config = _usable("", config, findings)


def unread(config: Config) -> list[str]:
    """List the sections of a JSON that pass on to DeepSpeed unchecked."""
    sections = [
        _join(name, key)
        for name, keys in KEYS.items()
        for key in keys
        if keys[key].words == _SECTION
    ]
    return [name for name in sections if name not in KEYS and lookup(config, name)]


def _join(section: str, key: str) -> str:
    return f"{section}.{key}" if section else key


def _usable(name: str, section: Config, findings: Findings) -> dict[str, Any]:
    known = KEYS[name]
    usable: dict[str, Any] = {}
    for key, value in _renamed(name, section, findings):
        dotted = _join(name, key)
        if key not in known:
            if not (_COMMENT.match(key) or (dotted in REFUSED and _is_off(value))):
                _unknown(name, key, value, findings)
            continue
        kind = known[key]
        if value is None and not kind.words.endswith(f"{_OR}null"):
            continue
        is_section = kind.words == _SECTION
        left_open = value is None or (value == "auto" and not is_section)
        if is_section and isinstance(value, dict) and value.get("enabled") is False:
            usable[key] = {"enabled": False}
        elif not left_open and not kind.fits(value):
            fix = _unquoted(value, kind) or kind.fix
            findings.refuse(dotted, kind.rule, fix, came=f"{dotted}={shown(value)}")
        elif isinstance(value, dict) and dotted in KEYS:
            usable[key] = _usable(dotted, value, findings)
        elif isinstance(value, float) and kind.words.startswith(_WHOLE):
            usable[key] = int(value)
        else:
            usable[key] = value
    return usable


def _unknown(name: str, key: str, value: Any, findings: Findings) -> None:
    """Refuse a key at which DeepSpeed fails, or which looks misspelt; notice one without effect."""
    dotted = _join(name, key)
    known = KEYS[name]
    homes = [each for each in KEYS if key in KEYS[each] or _join(each, key) in RENAMED]
    if dotted in IDLE:
        if value != "auto" and not _is_off(value):
            findings.notice(dotted, f"without effect: {IDLE[dotted]}")
    elif dotted in REFUSED:
        rule, fix = REFUSED[dotted]
        findings.refuse(dotted, rule, fix, came=dotted)
    elif name not in _LENIENT:
        findings.refuse(dotted, "unknown key", did_you_mean(key, known), came=dotted)
    elif homes:
        findings.notice(dotted, f"without effect: it belongs into {homes[0]}")
    elif nearest(key, known, cutoff=0.8):
        findings.refuse(
            dotted,
            "unknown key, which DeepSpeed would ignore",
            did_you_mean(key, known),
            came=dotted,
        )
    else:
        findings.notice(dotted, "without effect: DeepSpeed reads no such key")


def _renamed(
    name: str, section: Config, findings: Findings
) -> Iterator[tuple[str, Any]]:
    """Yield the keys of a section by the names that they have here, and their values."""
    for key, value in section.items():
        dotted = _join(name, key)
        today, *meant = RENAMED.get(dotted, [key])
        if today == key:
            yield key, value
        elif _is_off(value):
            continue
        elif today in section:
            findings.refuse(
                dotted,
                f"is another name of {today}, which stands there, too",
                "remove one of them",
            )
        elif meant and value is not True:
            findings.refuse(
                dotted,
                "must be true or false",
                f"write {today}",
                f"{dotted}={shown(value)}",
            )
        else:
            findings.notice(dotted, f"another name of {today}, and read as that")
            yield today, meant[0] if meant else value


def _is_off(value: Any) -> bool:
    """Check if a value switches its key off: false, null, or a section with nothing on."""
    if isinstance(value, dict):
        return value.get("enabled") is False or (
            value != {} and all(map(_is_off, value.values()))
        )
    return value is None or value is False


def _unquoted(value: Any, kind: Kind) -> str:
    """Return the fix of a text that fits without its quotation marks, or ""."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            if kind.fits(json.loads(value.lower())):
                return f"write {value.lower()} without quotation marks"
    return ""
