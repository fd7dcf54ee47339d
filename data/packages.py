"""Data files in installed packages."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from recipes.problems import Problem, ProblemsError, Words


def find_package(package: str) -> Path | None:
    """Return the directory of a package without importing it; None where it is not installed."""
    spec = importlib.util.find_spec(package)
    places = spec.submodule_search_locations if spec else None
    return Path(next(iter(places))) if places else None


def package_directory(package: str, needed_for: Words) -> Path:
    """Return the directory of a required package. Raises ProblemsError: it is not installed."""
    found = find_package(package)
    if found:
        return found
    came = (needed_for, f" needs the package {package}")
    raise ProblemsError(
        [Problem("", came, fix=f"pip install -r requirements.txt, or {package} alone")]
    )
