"""The package: bounds, pins and constraints agree; what is installed from it runs without the checkout."""

import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from launching import ROOT, run
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

PACKAGES = ("recipes", "ds_configs", "modeling", "data", "launch")


def requirements(file: str) -> list[Requirement]:
    lines = [line.partition("#")[0].strip() for line in (ROOT / file).read_text().splitlines()]
    return [Requirement(line) for line in lines if line and not line.startswith("-")]


def version(pin: Requirement) -> str:
    (exact,) = pin.specifier
    assert exact.operator == "==", f"{pin} is no pin"
    return exact.version


def test_every_pin_is_within_the_bounds_of_the_package():
    bounds: dict[str, SpecifierSet] = {}
    for bound in map(Requirement, metadata.requires("megarecipes") or ()):
        bounds[bound.name.lower()] = bound.specifier
    pins = requirements("requirements.txt")
    assert {pin.name.lower() for pin in pins} == bounds.keys()
    assert not [str(pin) for pin in pins if version(pin) not in bounds[pin.name.lower()]]


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


@pytest.mark.long
def test_an_installed_package_runs_without_the_checkout(tmp_path):
    source, target, elsewhere = tmp_path / "source", tmp_path / "target", tmp_path / "elsewhere"
    tracked = subprocess.run(["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True)
    names = [Path(name) for name in tracked.stdout.split()]
    for name in (*names, *map(Path, ("pyproject.toml", "README.md", "LICENSE"))):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    done = run([*pip, "--target", str(target), str(source)], timeout=300)
    assert done.returncode == 0, done.stdout
    shown_alone = (".md", ".png")  # for readers of the checkout
    assert [str(n) for n in names if n.suffix not in shown_alone and not (target / n).exists()] == []
    elsewhere.mkdir()
    command = [sys.executable, "-m", "launch", "pretrain", "--tiny", "--steps", "2", "--ds_config", "zero1"]
    done = run(command, cwd=elsewhere, env={"PYTHONPATH": str(target), "DS_ACCELERATOR": "cpu"}, timeout=300)
    assert done.returncode == 0, done.stdout
    assert (elsewhere / "runs/default-sotu-tiny-zero1/result.json").exists()


def test_a_command_that_is_not_there_is_told_from_those_that_are():
    done = run([sys.executable, "-m", "launch", "pretrian"], timeout=60)
    assert done.returncode == 2 and "pretrian: no such command" in done.stdout
    assert {"pretrain", "plan", "show_data"} <= {*done.stdout.split()}
    assert "Pretrain one recipe" in run([sys.executable, "-m", "launch", "--help"], timeout=60).stdout
