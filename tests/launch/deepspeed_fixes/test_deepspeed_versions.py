"""An older release of DeepSpeed, installed apart, trains as the pinned one does."""

import json
import subprocess
import sys

import pytest
from launching import WORKERS, run

RELEASE = "0.18.9"  # the oldest


@pytest.mark.long
def test_an_older_release_trains_as_the_pinned_one(tmp_path):
    wanted = f"deepspeed=={RELEASE}"
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-build-isolation"]
    found = subprocess.run([*pip, "--dest", str(tmp_path), wanted], capture_output=True, text=True)
    if found.returncode:
        pytest.skip(f"no package index gives {wanted}: {found.stderr.strip().splitlines()[-1]}")
    out = tmp_path / "versions"
    command = [sys.executable, str(WORKERS / "deepspeed_versions.py"), "--out", str(out)]
    layouts = ["--only", "dp2 zero1", "dp2 zero2", "--steps", "4", "--set", "precision=bf16"]
    done = run([*command, "--releases", RELEASE, *layouts], timeout=900)
    assert done.returncode == 0, done.stdout
    row = done.stdout.splitlines()[-1].split()
    assert [row[0], row[1], row[-1]] == [RELEASE, "agree", "yes"], done.stdout
    records = [json.loads(path.read_text()) for path in out.glob(f"*/{RELEASE}/*/run/environment.json")]
    assert {each["launches"][0]["versions"]["deepspeed"] for each in records} == {RELEASE}
