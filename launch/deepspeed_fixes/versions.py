"""The releases of DeepSpeed that are taken, and those whose insides are as they are overridden here.

`tests/launch/deepspeed_fixes/test_versions.py` finds what is imported of its insides, and looks for it.

`tests/workers/deepspeed_versions.py` trains every layout under every release of `SEEN` and compares them with
the newest; docs/design.md has its figures. What is corrected or done otherwise in some releases asks
`at_least`.
"""

from __future__ import annotations

import functools
from importlib import metadata

from packaging.version import Version

from recipes.problems import ProblemsError

# Releases that train and agree, oldest first. The last is the one that requirements.txt pins.
SEEN = (
    "0.18.9",
    "0.19.0",
    "0.19.1",
    "0.19.2",
    "0.19.3",
    "0.19.4",
    "0.19.5",
    "0.19.6",
    "0.19.7",
    "0.19.8",
)


# Below `deepspeed`: modules whose methods are overridden as this release of `SEEN` and newer ones have them. In
# older ones the code that overrides them is left out.
OVERRIDDEN_SINCE = {
    "runtime.zero.stage3": "0.19.8",
    "runtime.zero.stage_1_and_2": "0.19.8",
}


@functools.cache
def installed() -> Version:
    """Return the release that is installed, without what its build adds. Raises PackageNotFoundError."""
    return Version(Version(metadata.version("deepspeed")).base_version)


def at_least(release: str) -> bool:
    """Check that the installed release is this one or a newer one."""
    return installed() >= Version(release)


def is_as_overridden(kind: type) -> bool:
    """Check that the installed release has the class as methods here override it; other classes are."""
    module = kind.__module__.removeprefix("deepspeed.")
    return at_least(OVERRIDDEN_SINCE.get(module, SEEN[0]))


def is_newer_than_seen() -> bool:
    """Check that the installed release is newer than all that were compared."""
    return installed() > Version(SEEN[-1])


def refuse_others() -> None:
    """Check that the installed release is seen or newer. Raises ProblemsError."""
    version = str(installed())
    if version in SEEN or is_newer_than_seen():
        return
    raise ProblemsError.of(
        "deepspeed",
        f"DeepSpeed {version} is installed",
        f"{SEEN[0]} to {SEEN[-1]} were seen to agree",
        f"pip install deepspeed=={SEEN[-1]}",
    )
