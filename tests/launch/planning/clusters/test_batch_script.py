"""The batch script for Slurm is one that bash reads, and requeues what is stopped and nothing else."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cluster_jobs import CASES, job
from launching import ROOT

from launch.planning.clusters import slurm
from recipes.problems import ProblemsError

# What stands in for srun: $MODE says how the training behaves. USR1 reaches it as srun passes it on.
SRUN = """\
#!/bin/bash
printf '%s\\n' "$@" > srun-words
mkdir -p "$RUN_DIRECTORY"
ends() { echo "{\\"status\\": \\"$1\\"}" > "$RUN_DIRECTORY/result.json"; exit "$2"; }
breaks() { touch "$RUN_DIRECTORY/error-rank-1.txt"; exit "$1"; }
case $MODE in
    saves) trap 'sleep 0.4; ends interrupted 0' USR1 ;;
    finishes) trap 'ends ok 0' USR1 ;;
    breaks) trap 'breaks 137' USR1 ;;
    cannot-save) trap 'ends "not saved" 1' USR1 ;;
    too-slow) trap 'exit 137' USR1 ;;
    not-ready) trap - USR1 ;;
    done) ends ok 0 ;;
    stopped-by-hand) ends interrupted 0 ;;
    fails) breaks 1 ;;
    refused) exit 2 ;;
esac
touch ready
while true; do sleep 0.02; done
"""
SCONTROL = """\
#!/bin/bash
[ ! -f "$RUN_DIRECTORY/result.json" ] || cp "$RUN_DIRECTORY/result.json" then
echo "$@" >> scontrol-words
"""


def programs(stand_ins: Path) -> str:
    """PATH with the stand-ins first, then this Python: not every system has one that is called python."""
    return f"{stand_ins}:{Path(sys.executable).parent}:{os.environ['PATH']}"


@pytest.fixture
def cluster(tmp_path):
    """A folder that looks like a checkout, with srun and scontrol of its own."""
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "pretrain.py").touch()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(text)
        program.chmod(0o755)
    return tmp_path


def start(cluster: Path, mode: str) -> subprocess.Popen[str]:
    there = job(f"{CASES['open']} --run 'runs/a b'")
    (cluster / "job.sbatch").write_text(slurm.script(there))
    environ = {
        **os.environ, "PATH": programs(cluster / "bin"), "MODE": mode, "SLURM_JOB_ID": "42",
        "SLURM_SUBMIT_DIR": str(cluster), "RUN_DIRECTORY": str(cluster / "runs" / "a b"),
        "SLURM_CPUS_PER_TASK": "16",
    }  # fmt: skip
    return subprocess.Popen(
        ["bash", "job.sbatch"], cwd=cluster, env=environ, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=20)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output


def asked(cluster: Path, mode: str, *signals: int) -> tuple[int, str, bool]:
    """(exit code, output, whether it was requeued) of a job to which Slurm sends the signals."""
    process = start(cluster, mode)
    while not (cluster / "ready").exists() and process.poll() is None:
        time.sleep(0.01)
    for number in signals:
        os.kill(process.pid, number)
        time.sleep(0.1)
    code, output = ended(process)
    requeued = cluster / "scontrol-words"
    assert not requeued.exists() or requeued.read_text() == "requeue 42\n", requeued.read_text()
    return code, output, requeued.exists()


@pytest.mark.parametrize("case", CASES)
def test_bash_reads_it(case):
    text = slurm.script(job(case))
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr == ""
    assert len(re.findall("^srun ", text, re.M)) == 1 and "ssh" not in text


@pytest.mark.parametrize("name", [signal.SIGUSR1, signal.SIGTERM])
def test_a_job_whose_time_is_over_saves_and_is_requeued(cluster, name):
    code, output, requeued = asked(cluster, "saves", name)
    assert (code, requeued) == (0, True) and f"requeued after {name.name[3:]}" in output
    assert json.loads((cluster / "then").read_text()) == {"status": "interrupted"}  # it had saved


def test_a_second_signal_while_it_saves_does_not_hurry_it(cluster):
    assert asked(cluster, "saves", signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1)[::2] == (0, True)
    assert json.loads((cluster / "then").read_text()) == {"status": "interrupted"}


REQUEUED = {
    "finishes": (0, False),  # its last step is done when it is asked
    "breaks": (137, False),
    "cannot-save": (1, False),
    "too-slow": (0, True),  # and killed: an older checkpoint is there
    "not-ready": (0, True),  # killed before it listens to signals
}


@pytest.mark.parametrize("mode", REQUEUED)
def test_what_is_asked_to_stop_is_requeued_unless_it_is_done_or_fails(cluster, mode):
    code, output, requeued = asked(cluster, mode, signal.SIGUSR1)
    assert (code, requeued) == REQUEUED[mode], output


@pytest.mark.parametrize(
    ("mode", "code"), [("done", 0), ("stopped-by-hand", 0), ("fails", 1), ("refused", 2)]
)
def test_what_ends_by_itself_is_not_requeued(cluster, mode, code):
    assert asked(cluster, mode)[::2] == (code, False)


def test_the_training_is_started_as_it_is_written(cluster):
    asked(cluster, "done")
    words = (cluster / "srun-words").read_text().splitlines()
    assert words[words.index("python") + 1 :] == [
        "launch/pretrain.py", "--ds_config", "ds_configs/zero2.json", "--recipe", "openwebtext/gpt2-124m",
        "--out", "runs/a b", "--resume",
    ]  # fmt: skip
    assert {"--distribution=block", "--cpus-per-task=16"} <= {*words}


def test_outside_of_a_checkout_it_says_so(cluster):
    (cluster / "launch" / "pretrain.py").unlink()
    code, output, requeued = asked(cluster, "done")
    assert (code, requeued) == (2, False) and "submit this script in the checkout" in output


def directives(line: str) -> set[str]:
    return {*re.findall("^#SBATCH --(.*)$", slurm.script(job(line)), re.M)}


def test_the_scheduler_is_asked_for_what_the_recipe_ran_on():
    row = directives("3d")
    assert {
        "nodes=16", "ntasks-per-node=4", "gres=gpu:4", "cpus-per-task=10", "constraint=v100-32g", "exclusive",
        "time=20:00:00", "signal=B:USR1@900", "requeue", "open-mode=append",
    } <= row  # fmt: skip
    assert not any(each.startswith(("partition", "account")) for each in row)


def test_part_of_a_node_is_not_asked_for_alone():
    assert "gres=gpu:8" in directives("part") and "exclusive" not in directives("part")


def test_cores_that_nobody_knows_are_left_to_the_user():
    assert not any(each.startswith("cpus-per-task") for each in directives("unknown"))
    assert "cpus-per-task=5" in directives(f"{CASES['unknown']} --cpus-per-task 5")


def test_the_users_wishes_come_first():
    wishes = "--constraint a100 --partition gpu_p5 --account abc@a100 --time 1-02:03:04"
    assert {"constraint=a100", "partition=gpu_p5", "account=abc@a100", "time=26:03:04"} <= directives(
        f"{CASES['3d']} {wishes}"
    )
    assert "signal=B:USR1@300" in directives(f"{CASES['3d']} --time 00:10:00")


@pytest.mark.parametrize("time", ["20", "1:2:3:4", "00:00:00", "20:61:00", "20:00:00\n#SBATCH --nodes=9"])
def test_a_time_of_another_form_is_refused(time):
    with pytest.raises(ProblemsError, match="DAYS"):
        slurm.seconds(time)


@pytest.mark.parametrize("flag", ["partition", "account", "constraint", "image", "hosts"])
def test_a_word_that_would_add_a_line_is_refused(flag):
    with pytest.raises(ProblemsError, match="one word"):
        job(f"{CASES['part']} --{flag} 'a\n#SBATCH --nodes=99'")


def test_a_file_of_any_name_stays_inside_its_comment(tmp_path):
    row = (ROOT / "recipes" / "parallel_kinds.yaml").read_text()
    (tmp_path / "a\ntouch evil\n.yaml").write_text(row)
    there = job(f"--recipe '{tmp_path}/a\ntouch evil\n.yaml/3d' --gpus-per-node 8")
    assert not re.search("^touch evil", slurm.script(there).split("srun ")[0], re.M)
