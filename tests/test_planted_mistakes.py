"""The list of planted mistakes: each can still be planted, and is noticed."""

import subprocess
import sys

import pytest
from launching import ROOT
from misuses import MISUSES
from planted_mistakes import MISTAKES


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_can_be_planted_and_its_test_is_there(mistake):
    code = (ROOT / mistake.file).read_text(encoding="utf-8")
    assert code.count(mistake.right) == 1 and mistake.wrong != mistake.right
    file, _, name = mistake.test.partition("::")
    assert f"def {name or 'test_'}" in (ROOT / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("misuse", MISUSES, ids=lambda misuse: misuse.name)
def test_a_misuse_can_be_planted(misuse):
    for file, right, wrong in misuse.edits:
        code = (ROOT / file).read_text(encoding="utf-8")
        assert code.count(right) == 1 and wrong != right


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_mistake_is_noticed():
    done = subprocess.run(
        [sys.executable, "tests/planted_mistakes.py"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
