"""What a release says of itself agrees, and what GitHub reads is sound."""

from __future__ import annotations

import re

import pytest
import yaml
from launching import ROOT

CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
TITLE, *SECTIONS = re.split(r"^## ", CHANGELOG, flags=re.M)
RELEASES = {section.split(" ", 1)[0]: section.splitlines() for section in SECTIONS[1:]}
GITHUB = sorted((ROOT / ".github").rglob("*.yml"))


def test_a_release_has_one_number_and_one_day():
    newest = SECTIONS[1].splitlines()[0]
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert SECTIONS[0].startswith("Unreleased\n")
    assert newest == f"{version[1]} ({cited['date-released']})"
    assert version[1] == cited["version"]


@pytest.mark.parametrize("release", RELEASES)
def test_a_release_is_told_on_a_page(release):
    lines = RELEASES[release]
    assert len(lines) <= 50
    assert [line for line in lines if len(line) > 110] == []


@pytest.mark.parametrize("file", GITHUB, ids=lambda file: file.name)
def test_what_github_reads_is_yaml(file):
    assert yaml.safe_load(file.read_text(encoding="utf-8"))


def test_ci_runs_the_pythons_at_both_ends_and_ruff_has_one_version():
    jobs = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["jobs"]
    bounds = re.search(r'requires-python = ">=3.(\d+),<3.(\d+)"', (ROOT / "pyproject.toml").read_text())
    lowest, above = map(int, bounds.groups())
    assert jobs["tests"]["strategy"]["matrix"]["python-version"] == [f"3.{lowest}", f"3.{above - 1}"]
    (ruff,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert f"\nruff=={ruff['rev'][1:]} " in (ROOT / "requirements.txt").read_text()
