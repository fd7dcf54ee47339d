"""The words of other trainers (`foreign/words.yaml`), and what to write here for them."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Container
from itertools import chain
from pathlib import Path

from recipes import yaml_lines

VALUE = "VALUE"
NO = ("false", "no", "0")


def in_command(word: str, value: str, flags: Container[str]) -> str:
    """Say what to write for a flag of others in a command with `flags`; empty: nothing is known.

    `value`: as it was given with the word; empty: none was.
    """
    for way in ways(word):
        if way[0].islower():
            return way
        if way.partition(" ")[0] in flags:
            if VALUE not in way and value.lower() in NO:
                return f"leave it out: {way} turns it on"
            given = shlex.quote(value) if value else VALUE
            return f"write {way.replace(VALUE, given)}"
    return ""


def in_recipe(word: str) -> str:
    """Say which keys of a recipe a key of others is, or else which flag; empty: nothing is known."""
    found = ways(word)
    for way in found:
        if way.startswith("--set "):
            keys = way.replace("--set ", "").replace(f"={VALUE}", "")
            return f"did you mean {keys}?"
    if found and found[0].startswith("-"):
        return f"no key says it: write {found[0]}"
    return found[0] if found else ""


def ways(word: str) -> list[str]:
    """Return the pieces of commands for a word of others, as in the file; empty: nobody has it."""
    plain = word.lstrip("-").lower()
    return _table().get(plain.rpartition(".")[2], [])


@functools.cache
def _table() -> dict[str, list[str]]:
    path = Path(__file__).with_name("foreign") / "words.yaml"
    known = dict[str, list[str]]()
    for each in yaml_lines.read(path, "recipes/foreign/words.yaml").value:
        known |= dict.fromkeys(chain(*each["said"].values()), each["write"])
    return known
