"""What is installed: bounds, pins and constraints agree."""

import re

import pytest
from launching import ROOT
from packaging.requirements import Requirement


def requirements(file: str) -> list[Requirement]:
    lines = [line.partition("#")[0].strip() for line in (ROOT / file).read_text().splitlines()]
    return [Requirement(line) for line in lines if line and not line.startswith("-")]


def version(pin: Requirement) -> str:
    (exact,) = pin.specifier
    assert exact.operator == "==", f"{pin} is no pin"
    return exact.version


def test_every_pin_is_within_its_bounds():
    """All that commands import has both; the instruments of the tests have pins only."""
    bounds = {bound.name: bound.specifier for bound in requirements("bounds.txt")}
    pins = [pin for pin in requirements("requirements.txt") if pin.name in bounds]
    assert {pin.name for pin in pins} == bounds.keys()
    assert not [str(pin) for pin in pins if version(pin) not in bounds[pin.name]]


def test_a_version_to_install_is_the_pinned_one():
    """In documents and messages."""
    pins = {pin.name: version(pin) for pin in requirements("requirements.txt") if pin.marker is None}
    texts = [file.read_text() for folder in (ROOT / "docs", ROOT / "data", ROOT / "launch")
             for file in folder.rglob("*") if file.suffix in (".md", ".py")]  # fmt: skip
    told = [name.partition("==") for text in texts for line in re.findall(r"pip install (.*)", text)
            for name in re.findall(r"[\w.-]+==\d[\d.]*\d", line)]  # fmt: skip
    assert len(told) > 5
    assert {(name, found) for name, _, found in told if pins.get(name, found) != found} == set()


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_the_constraints_hold_every_pin(python):
    """`make constraints` was run after the last change of requirements.txt."""
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.2",
        "sys_platform": "linux",
        "platform_machine": "x86_64",
        "platform_python_implementation": "CPython",
    }

    def held(file: str) -> dict[str, str]:
        each = [r for r in requirements(file) if r.marker is None or r.marker.evaluate(environment)]
        versions = {r.name.lower().replace("_", "-").replace(".", "-"): version(r) for r in each}
        assert len(versions) == len(each), "a package twice"
        return versions

    assert held("requirements.txt").items() <= held("constraints.txt").items()
