"""What a run says it ran on."""

import json
import subprocess

from launch.machine import description


def test_the_hardware_is_described(tmp_path):
    described = description.describe()
    assert described["cpu"] and described["memory_gb"] > 0 and described["versions"]["deepspeed"]
    assert description.git_state(tmp_path) is None, "no checkout, no commit"
    json.dumps(described, allow_nan=False)
    assert description.summary({"accelerators": 8, "accelerator": "V100"}) == "8 x V100"


def test_the_commit_of_another_checkout_is_not_ours(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    git("init")
    assert description.git_state(tmp_path) is None, "no commit yet"
    git("commit", "--allow-empty", "-m", "empty")
    assert description.git_state(tmp_path) == {
        "commit": description.git_state(tmp_path)["commit"],
        "dirty": False,
    }
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "file").write_text("")
    assert description.git_state(tmp_path)["dirty"] is True
    assert description.git_state(tmp_path / "inner") is None
