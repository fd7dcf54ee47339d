"""The files that a name stands for: looked up once in a process, each real file once, and said.

What a plan has counted is what is trained on: a later file is not taken in, and a file that changes between
its lookup and its reading is named.
"""

from __future__ import annotations

import glob
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from data.durable_files import Say, now_and_then
from data.text.records import VERSION, FoundFile
from recipes import files
from recipes.problems import ProblemsError, some

# what a directory holds beside its text: hidden files, and those of Spark's committers
_NOT_READ = re.compile(
    r"\.|_(SUCCESS|temporary|(common_)?metadata|(committed|started)_\d+)$"
)
# of a backup or a compressed copy beside its original
_COPY = re.compile(r"(\.~\d+)?~$|\.(bak|orig|gz|bz2|xz|zst)$")
_SPLIT = re.compile(
    "(?<![a-z])(?:(train|training)|validation|valid|val|dev|eval|test|testing|heldout)(?![a-z])",
    re.IGNORECASE,
)
FOUND: dict[tuple[str, Path], list[FoundFile]] = {}
"""Files by working directory and name."""


def find(path: Path, say: Say) -> list[FoundFile]:
    """Return the files of a path, a directory or a glob, sorted by path; [] where there are none.

    `say` gets their number while it takes long, and what is passed over. Raises ProblemsError: a directory
    cannot be listed, or a file is no ordinary one.
    """
    key = (os.getcwd(), path)
    if path.is_file() or not FOUND.get(key):
        FOUND[key] = _each_once(path, _look_up(path, say), say)
    return FOUND[key]


def splits_of(listed: Sequence[FoundFile]) -> dict[str, Path]:
    """Return the splits that most files are named as, with a file of each; {}: not training's and another's.

    It is a word of a file's name, or else of its nearest directory with one.
    """
    folders = [str(file.path.parent) for file in listed]
    top = len(os.path.commonpath(folders))
    splits: dict[str, Path] = {}
    trained = set()
    named = 0
    for file in listed:
        below = str(file.path)[top:]
        words = [*_SPLIT.finditer(below)]
        if words:
            word = words[-1]
            named += 1
            splits.setdefault(word[0], file.path)
            trained.add(bool(word[1]))
    if len(trained) < 2 or named <= len(listed) / 2:
        return {}
    return splits


def _look_up(path: Path, say: Say) -> list[FoundFile]:
    """Return the files of a path under all their names."""
    listed = []
    strange = []
    tell = now_and_then(say)
    pattern = str(path)
    if path.is_dir():
        pattern = f"{glob.escape(pattern)}/**/*"
    names = [pattern] if path.is_file() else _matching(pattern)
    for name in names:
        mode = 0
        with suppress(OSError):
            facts = os.stat(name)
            mode = facts.st_mode
        if stat.S_ISREG(mode):
            listed.append(FoundFile(Path(name), VERSION(facts)))
        elif not stat.S_ISDIR(mode):
            strange.append(name)
        tell(f"{path}: {len(listed):,} files so far")
    files.check_names("data.name", [file.path for file in listed])
    if strange:
        came = f"{some(sorted(strange))}: no ordinary file (a pipe, a device, or a link to nothing)"
        rule = "sources are read several times"
        raise ProblemsError.of(
            "data.name", came, rule, "save it as a file, or leave it out"
        )
    return sorted(listed, key=lambda file: str(file.path))


def _each_once(path: Path, listed: list[FoundFile], say: Say) -> list[FoundFile]:
    """Leave out other names, backups and compressed copies of a file that is among the others."""
    there = {str(file.path) for file in listed}
    kept = dict[tuple[int, ...], FoundFile]()
    others = []
    for file in listed:
        name = str(file.path)
        original = _COPY.sub("", name)
        copied = original != name and original in there
        if copied or kept.setdefault(file.version, file).path != file.path:
            others.append(name)
    if others:
        say(
            f"{path}: {some(others, 3)}: "
            "passed over, as other names or copies of files in it"
        )
    return [*kept.values()]


def _matching(pattern: str) -> Iterator[str]:
    """Yield the paths that match a glob; below its "**" every directory counts once."""
    before, recursive, rest = f"/{pattern}/".partition("/**/")
    if not recursive:
        for name in glob.iglob(pattern):
            if not _NOT_READ.match(Path(name).name):
                yield name
        return
    rest = rest.strip("/") or "*"
    for top in glob.iglob(before[1:] or before or "."):
        for directory in _tree(top):
            yield from _matching(f"{glob.escape(directory)}/{rest}")


def _tree(top: str) -> Iterator[str]:
    """Yield the directories at and below `top`.

    Links are followed, but neither to a directory that was met nor to one that `top` lies in.
    """
    if not os.path.isdir(top):
        return
    met = set(map(str, Path(top).resolve().parents))
    for directory, below, _ in os.walk(top, onerror=_refuse, followlinks=True):
        place = os.path.realpath(directory)
        if place in met:
            below.clear()
            continue
        met.add(place)
        below[:] = sorted(name for name in below if not _NOT_READ.match(name))
        yield directory


def _refuse(error: OSError) -> None:
    """Refuse a directory that cannot be listed: its text would be missing unsaid."""
    came = f"{error.filename}: cannot be listed"
    raise ProblemsError.of(
        "data.name",
        came,
        str(error.strerror),
        "make it readable, or name what is to be read by a glob",
    )
