"""Hardware by the names that people type: 4xv100-32, 2x3090, v100-32x8, h100, 8 H100.

A name is a GPU of the catalogue, with a number of them before or after it. It means the first node of the
catalogue with so many of that GPU, or some of the GPUs of a larger node there. Where the catalogue has
neither, it means a machine that is made up, with its GPUs on PCIe.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from recipes.problems import ProblemsError, did_you_mean, either

_COUNT_BEFORE = re.compile(r"^(\d{1,4}) *[x*] *(?=.)")
_COUNT_APART = re.compile(r"^(\d{1,3}) +(?=.)")
_COUNT_BEHIND = re.compile(r"(?<!rt) *[x*] *(\d{1,4})$")
# What makers and shops add to a GPU's name.
_IDLE = re.compile(r"nvidia|amd|geforce|tesla|instinct|rtx|sxm\d?|hbm\d?e?|gpus?|")
_OWN = "(or FILE.yaml:NODE of your own: docs/planning.md)"
_LAPTOP = "laptop"
# Names of what no plan is made for -> why.
_ELSEWHERE = {
    r"\bm[1-9]\b|apple|\bmac|\bmps\b": "a Mac trains nothing here, which needs Linux",
    r"\btpu": "DeepSpeed does not train on TPUs",
    r"gaudi|\bhpu\b|\barc\b|\bxpu\b": "nothing was tried on Intel's accelerators",
    r"\bcpus?\b": "a plan is for GPUs; pretrain.py --plan is for this machine, too",
    rf"{_LAPTOP}|mobile": "a laptop's GPU is slower than the card of its name",
}


def read(
    name: str, gpus: Iterable[str], nodes: Mapping[str, Mapping[str, Any]], flag: str
) -> tuple[int, str]:
    """Read a name as a number of GPUs, and their key in the catalogue.

    Raises ProblemsError: the name is no GPU, or may be several.
    """
    count, rest = _counted(name.lower())
    words = _words(rest)
    meant = [gpu for gpu in gpus if words and words <= _words(gpu)]
    if _LAPTOP not in words:
        meant = [gpu for gpu in meant if _LAPTOP not in gpu]
    meant = [gpu for gpu in meant if words == _words(gpu)] or meant
    came = f"{flag} {name[:100]}"
    if not meant:
        whys = (why for form, why in _ELSEWHERE.items() if re.search(form, rest))
        raise ProblemsError.of(
            flag,
            came,
            next(whys, "no such node or GPU"),
            f"{did_you_mean(rest, {*gpus, *nodes})} {_OWN}",
        )
    if len(meant) > 1:
        of_these = [node for node, form in nodes.items() if form["gpu"] in meant]
        raise ProblemsError.of(
            flag,
            came,
            f"it may be {either(meant)}",
            f"{flag} {count or 4}x{meant[0]}, or a node: {', '.join(of_these)}",
        )
    return 1 if count is None else count, meant[0]


def _counted(name: str) -> tuple[int | None, str]:
    """Take the number of GPUs off a name; None: it has none."""
    for form in (_COUNT_BEFORE, _COUNT_APART, _COUNT_BEHIND):
        found = form.search(name)
        if found:
            return int(found[1]), name[: found.start()] + name[found.end() :]
    return None, name


def _words(name: str) -> frozenset[str]:
    """Return the words that tell a GPU from others: of NVIDIA-RTX-4090 4090, of a100_80gb a100 and 80."""
    words = re.split(r"[-_ ]+", name.lower())
    bare = (re.sub(r"^rtx(?=.)|(?<=\d)gb$", "", word) for word in words)
    return frozenset(word for word in bare if not _IDLE.fullmatch(word))
