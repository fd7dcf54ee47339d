"""Data that installed packages ship."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def package_directory(package: str, needed_for: str) -> Path:
    """Directory of an installed package, without importing it.

    Raises:
        ValueError: it is not installed.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"{needed_for} needs the package {package}: pip install -r requirements.txt")
    return Path(next(iter(spec.submodule_search_locations)))
