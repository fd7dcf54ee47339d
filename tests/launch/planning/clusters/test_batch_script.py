"""The batch script for Slurm is one that bash reads, and requeues what is stopped and nothing else."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from cluster_jobs import CASES, job, program, search_path, text
from launching import ROOT

from launch.planning.clusters.job import parse_clock
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


@pytest.fixture
def cluster(tmp_path):
    """A folder that looks like a checkout, with srun and scontrol of its own."""
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "pretrain.py").touch()
    program(tmp_path / "bin" / "srun", SRUN)
    program(tmp_path / "bin" / "scontrol", SCONTROL)
    return tmp_path


def start(cluster: Path, mode: str) -> subprocess.Popen[str]:
    (cluster / "job.sbatch").write_text(text(f"{CASES['open']} --run 'runs/a b'", "job.sbatch"))
    environ = {**os.environ, "PATH": search_path(cluster / "bin"), "MODE": mode, "SLURM_JOB_ID": "42"}
    environ |= {"SLURM_SUBMIT_DIR": str(cluster), "RUN_DIRECTORY": str(cluster / "runs" / "a b")}
    how = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True}
    environ["SLURM_CPUS_PER_TASK"] = "16"
    return subprocess.Popen(["bash", "job.sbatch"], cwd=cluster, env=environ, **how)


def outcome(cluster: Path, mode: str, *signals: int) -> tuple[int, str, bool]:
    """(exit code, output, whether it was requeued) of a job to which Slurm sends the signals."""
    process = start(cluster, mode)
    while not (cluster / "ready").exists() and process.poll() is None:
        time.sleep(0.01)
    for number in signals:
        os.kill(process.pid, number)
        time.sleep(0.1)
    try:
        output, _ = process.communicate(timeout=20)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    requeued = cluster / "scontrol-words"
    assert not requeued.exists() or requeued.read_text() == "requeue 42\n", requeued.read_text()
    return process.returncode, output, requeued.exists()


@pytest.mark.parametrize("case", CASES)
def test_bash_reads_it(case):
    script = text(case, "job.sbatch")
    assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).stderr == ""
    assert len(re.findall("^srun ", script, re.M)) == 1 and "ssh" not in script


@pytest.mark.parametrize("name", [signal.SIGUSR1, signal.SIGTERM])
def test_a_job_whose_time_is_over_saves_and_is_requeued(cluster, name):
    code, output, requeued = outcome(cluster, "saves", name)
    assert (code, requeued) == (0, True) and f"requeued after {name.name[3:]}" in output
    assert json.loads((cluster / "then").read_text()) == {"status": "interrupted"}  # it had saved


def test_a_second_signal_while_it_saves_does_not_hurry_it(cluster):
    assert outcome(cluster, "saves", signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1)[::2] == (0, True)
    assert json.loads((cluster / "then").read_text()) == {"status": "interrupted"}


ENDED = {  # how the training behaves: exit code, and whether the job is requeued; asked to stop first, or not
    ("finishes", True): (0, False),  # its last step is done when it is asked
    ("breaks", True): (137, False),
    ("cannot-save", True): (1, False),
    ("too-slow", True): (0, True),  # and killed: an older checkpoint is there
    ("not-ready", True): (0, True),  # killed before it listens to signals
    ("done", False): (0, False),
    ("stopped-by-hand", False): (0, False),
    ("fails", False): (1, False),
    ("refused", False): (2, False),
}


@pytest.mark.parametrize(("mode", "asked"), ENDED)
def test_only_what_is_stopped_and_neither_done_nor_failed_is_requeued(cluster, mode, asked):
    code, output, requeued = outcome(cluster, mode, *[signal.SIGUSR1] * asked)
    assert (code, requeued) == ENDED[mode, asked], output


def test_the_training_is_started_as_it_is_written(cluster):
    outcome(cluster, "done")
    words = (cluster / "srun-words").read_text().splitlines()
    assert words[words.index("python") + 1 :] == [
        "launch/pretrain.py", "--ds_config", "ds_configs/zero1.json", "--recipe", "openwebtext/gpt2-124m",
        "--out", "runs/a b", "--resume",
    ]  # fmt: skip
    assert {"--distribution=block", "--cpus-per-task=16"} <= {*words}


def test_outside_of_a_checkout_it_says_so(cluster):
    (cluster / "launch" / "pretrain.py").unlink()
    code, output, requeued = outcome(cluster, "done")
    assert (code, requeued) == (2, False) and "submit this script in the checkout" in output


def directives(line: str) -> set[str]:
    return {*re.findall("^#SBATCH --(.*)$", text(line, "job.sbatch"), re.M)}


ASKED = {  # flags -> what the scheduler is asked for, and of what nothing is said
    CASES["3d"]: (
        "nodes=16 ntasks-per-node=4 gres=gpu:4 cpus-per-task=10 constraint=v100-32g exclusive time=20:00:00 "
        "signal=B:USR1@900 requeue open-mode=append",
        "partition account",
    ),
    CASES["part"]: ("gres=gpu:8", "exclusive"),  # others may have the rest of the node
    CASES["unknown"]: ("", "cpus-per-task"),
    f"{CASES['unknown']} --cpus-per-task 5": ("cpus-per-task=5", ""),
    f"{CASES['3d']} --constraint a100 --partition gpu_p5 --account abc@a100 --time 1-02:03:04": (
        "constraint=a100 partition=gpu_p5 account=abc@a100 time=26:03:04",
        "",
    ),
    f"{CASES['3d']} --time 00:10:00": ("signal=B:USR1@300", ""),
}


@pytest.mark.parametrize("line", ASKED)
def test_the_scheduler_is_asked_for_what_recipe_and_user_want(line):
    stated, unsaid = (set(words.split()) for words in ASKED[line])
    found = directives(line)
    assert stated <= found and not unsaid & {each.partition("=")[0] for each in found}


@pytest.mark.parametrize("time", ["20", "1:2:3:4", "00:00:00", "20:61:00", "20:00:00\n#SBATCH --nodes=9"])
def test_a_time_of_another_form_is_refused(time):
    with pytest.raises(ProblemsError, match="DAYS"):
        parse_clock(time)


@pytest.mark.parametrize("flag", ["partition", "account", "constraint", "image", "hosts"])
def test_a_word_that_would_add_a_line_is_refused(flag):
    with pytest.raises(ProblemsError, match="one word"):
        job(f"{CASES['part']} --{flag} 'a\n#SBATCH --nodes=99'")


def test_a_file_of_any_name_stays_inside_its_comment(tmp_path):
    row = (ROOT / "recipes" / "parallel_kinds.yaml").read_text()
    (tmp_path / "a\ntouch evil\n.yaml").write_text(row)
    script = text(f"--recipe '{tmp_path}/a\ntouch evil\n.yaml/3d' --gpus-per-node 8", "job.sbatch")
    assert not re.search("^touch evil", script.split("srun ")[0], re.M)
