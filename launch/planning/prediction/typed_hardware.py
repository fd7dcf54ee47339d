"""Hardware by the names that people type: 4xv100-32, 2x3090, v100-32x8, h100.

A name is a GPU of the catalogue, with a number of them before or after it. It means the first node of the
catalogue with so many of that GPU, or some of the GPUs of a larger node there. Where the catalogue has
neither, it means a machine that is made up, with its GPUs on PCIe.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from recipes.problems import ProblemsError, did_you_mean, either

_COUNT_BEFORE = re.compile(r"(\d{1,4})x(?=.)")
_COUNT_BEHIND = re.compile(r"x(\d{1,4})$")
# What makers and shops add to a GPU's name.
_IDLE = re.compile(r"nvidia|amd|geforce|tesla|instinct|rtx|sxm\d?|hbm\d?e?|gpus?|")


class Typed(NamedTuple):
    """A number of GPUs, by their key in the catalogue."""

    gpus: int
    gpu: str


def read(
    name: str,
    gpus: Iterable[str],
    nodes: Mapping[str, Mapping[str, Any]],
    flag: str = "--hardware",
) -> Typed:
    """Read a name as GPUs of the catalogue.

    Raises ProblemsError: the name is no GPU, or may be several.
    """
    count, rest = _counted(name.lower())
    words = _words(rest)
    meant = [gpu for gpu in gpus if words and words <= _words(gpu)]
    exact = [gpu for gpu in meant if words == _words(gpu)]
    meant = exact or meant
    came = f"{flag} {name[:100]}"
    if not meant:
        fix = did_you_mean(rest, {*gpus, *nodes})
        raise ProblemsError.of(flag, came, "no such node or GPU", fix)
    if len(meant) > 1:
        of_these = [node for node, form in nodes.items() if form["gpu"] in meant]
        rule = f"it may be {either(meant)}"
        fix = f"{flag} {count or 4}x{meant[0]}, or a node: {', '.join(of_these)}"
        raise ProblemsError.of(flag, came, rule, fix)
    return Typed(1 if count is None else count, meant[0])


def _counted(name: str) -> tuple[int | None, str]:
    """Take the number of GPUs off a name; None: it has none."""
    for found in (_COUNT_BEFORE.match(name), _COUNT_BEHIND.search(name)):
        if found:
            return int(found[1]), name[: found.start()] + name[found.end() :]
    return None, name


def _words(name: str) -> frozenset[str]:
    """Return the words that tell a GPU from others: of NVIDIA-RTX-4090 4090, of a100_80gb a100 and 80."""
    words = re.split(r"[-_ ]+", name.lower())
    bare = (re.sub(r"^rtx(?=.)|(?<=\d)gb$", "", word) for word in words)
    return frozenset(word for word in bare if not _IDLE.fullmatch(word))
