"""The three files of launch/cluster/: what schedulers ask of them, and what their scripts do under bash."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from launching import ROOT, WORKERS, run_ranks

from data.durable_files import cache_directory

FOLDER = ROOT / "launch" / "cluster"
SBATCH = (FOLDER / "pretrain.sbatch").read_text()
MANIFEST = (FOLDER / "pytorchjob.yaml").read_text()
DOCKERFILE = (FOLDER / "Dockerfile").read_text()
# What stands in for srun: $MODE says how the training behaves. USR1 reaches it as srun passes it on.
SRUN = """\
#!/bin/bash
printf '%s\\n' "$@" > words
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
while [ ! -s code ]; do sleep 0.02; done
exit "$(cat code)"
"""
SCONTROL = """\
#!/bin/bash
[ ! -f "$RUN_DIRECTORY/result.json" ] || cp "$RUN_DIRECTORY/result.json" then
echo "$@" >> scontrol-words
"""
# What stands in for torchrun: it ends as $MODE says, at once or when it is asked by the STOP file.
TORCHRUN = """\
#!/bin/bash
printf '%s\\n' "$@" > words
echo "${RANK-unset}" > torchrun-rank
mkdir -p "$RUN"
ends() { echo "{\\"status\\": \\"$1\\"}" > "$RUN/result.json"; exit "$2"; }
[ "$MODE" != done ] || ends ok 0
[ "$MODE" != fails ] || exit 3
touch ready
while [ ! -f "$RUN/STOP" ]; do sleep 0.02; done
sleep 0.2
ends interrupted 0
"""


def program(path: Path, script: str) -> None:
    """Write a stand-in for a program."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(script)
    path.chmod(0o755)


def started(command: list[str], folder: Path, environ: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start a script in the folder, with the stand-ins of its bin/ first and a Python called python."""
    path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "PATH": path, **environ},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    while not path.exists() and process.poll() is None:
        time.sleep(0.01)


def ended(process: subprocess.Popen[str]) -> str:
    """Wait for the end of a script; its output."""
    try:
        return process.communicate(timeout=20)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def test_each_file_is_short_and_says_at_its_top_what_to_edit():
    for text in (SBATCH, MANIFEST, DOCKERFILE):
        lines = text.splitlines()
        assert len(lines) < 80 and max(map(len, lines)) <= 110
        assert any("EDIT" in line for line in lines[:10])


@pytest.fixture
def clone(tmp_path):
    """A folder that looks like a clone, with srun and scontrol of its own."""
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "pretrain.py").touch()
    program(tmp_path / "bin" / "srun", SRUN)
    program(tmp_path / "bin" / "scontrol", SCONTROL)
    return tmp_path


def submitted(clone: Path, mode: str, training: str = "--tiny") -> subprocess.Popen[str]:
    """Start the script under bash as Slurm does, with a run and a training of the user's in it."""
    script = re.sub("^RUN=.*", "RUN='runs/a b'", SBATCH, flags=re.M)
    script = re.sub("^TRAINING=.*", f"TRAINING=({training})", script, flags=re.M)
    assert script.count(training) == script.count("runs/a b") == 1
    (clone / "pretrain.sbatch").write_text(script)
    slurm = {"SLURM_JOB_ID": "42", "SLURM_SUBMIT_DIR": str(clone), "SLURM_CPUS_PER_TASK": "16"}
    environ = {**slurm, "MODE": mode, "RUN_DIRECTORY": str(clone / "runs" / "a b")}
    return started(["bash", "pretrain.sbatch"], clone, environ)


def outcome(clone: Path, mode: str, *signals: int) -> tuple[int, str, bool]:
    """(exit code, output, whether it was requeued) of a job to which Slurm sends the signals."""
    process = submitted(clone, mode)
    wait_for(clone / "ready", process)
    for number in signals:
        os.kill(process.pid, number)
        time.sleep(0.1)
    output = ended(process)
    requeued = clone / "scontrol-words"
    assert not requeued.exists() or requeued.read_text() == "requeue 42\n", requeued.read_text()
    return process.returncode, output, requeued.exists()


def test_slurm_is_asked_for_a_process_on_each_gpu():
    head, _, _ = SBATCH.partition("\nRUN=")
    asked = dict(line.partition("=")[::2] for line in re.findall("^#SBATCH --(.*)$", head, re.M))
    assert SBATCH.count("#SBATCH --") == head.count("#SBATCH --"), "Slurm reads none after the first command"
    assert asked["gres"] == f"gpu:{asked['ntasks-per-node']}"
    assert {"nodes", "cpus-per-task", "time", "requeue", "exclusive"} <= asked.keys()
    assert (asked["signal"], asked["open-mode"]) == ("B:USR1@900", "append")
    off = {*re.findall("^##SBATCH --(.*)=$", head, re.M)}
    assert off == {"partition", "account", "constraint"}


def test_the_batch_script_trains_on_every_task(clone):
    process = submitted(clone, "trains", "--tiny --steps 1 --ds_config zero1")
    wait_for(clone / "ready", process)
    words = (clone / "words").read_text().splitlines()
    assert {"--distribution=block", "--kill-on-bad-exit=1", "--cpus-per-task=16"} <= {*words}
    script, *flags = words[words.index("python") + 1 :]
    assert flags == ["--tiny", "--steps", "1", "--ds_config", "zero1", "--out", "runs/a b", "--resume"]
    cache = {"MEGARECIPES_CACHE": str(cache_directory())}
    tasks = (2, clone / "homes", ROOT / script)
    done = run_ranks(2, WORKERS / "srun_task.py", *tasks, *flags, cwd=clone, env=cache)
    (clone / "code").write_text(f"{done.returncode}\n")
    ended(process)
    assert done.returncode == process.returncode == 0, done.stdout
    result = json.loads((clone / "runs" / "a b" / "result.json").read_text())
    assert (result["status"], result["layout"]["dp"]) == ("ok", 2)


@pytest.mark.parametrize("name", [signal.SIGUSR1, signal.SIGTERM])
def test_a_job_whose_time_is_over_saves_and_is_requeued(clone, name):
    code, output, requeued = outcome(clone, "saves", name)
    assert (code, requeued) == (0, True) and f"requeued after {name.name[3:]}" in output
    assert json.loads((clone / "then").read_text()) == {"status": "interrupted"}  # it had saved


def test_a_second_signal_while_it_saves_does_not_hurry_it(clone):
    assert outcome(clone, "saves", signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1)[::2] == (0, True)
    assert json.loads((clone / "then").read_text()) == {"status": "interrupted"}


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
def test_only_what_is_stopped_and_neither_done_nor_failed_is_requeued(clone, mode, asked):
    code, output, requeued = outcome(clone, mode, *[signal.SIGUSR1] * asked)
    assert (code, requeued) == ENDED[mode, asked], output


def test_outside_of_a_clone_it_says_so(clone):
    (clone / "launch" / "pretrain.py").unlink()
    code, output, requeued = outcome(clone, "done")
    assert (code, requeued) == (2, False) and "submit this script in the clone" in output


def pods() -> tuple[dict, dict, dict[str, dict]]:
    """The claim, the job, and the only container of each role."""
    claim, job = yaml.safe_load_all(MANIFEST)
    found = {}
    for role, replicas in job["spec"]["pytorchReplicaSpecs"].items():
        (found[role],) = replicas["template"]["spec"]["containers"]
    return claim, job, found


def test_the_manifest_has_what_the_operator_requires():
    """By the CRD of kubeflow.org/v1 and the webhook's rules: Master has one replica, `pytorch` an image."""
    claim, job, containers = pods()
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    name = job["metadata"]["name"]
    assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", name) and len(f"{name}-worker-1023") <= 63
    roles = job["spec"]["pytorchReplicaSpecs"]
    assert list(roles) == ["Master", "Worker"] and roles["Master"]["replicas"] == 1
    assert {role["restartPolicy"] for role in roles.values()} == {"OnFailure"}
    gpus = job["spec"]["nprocPerNode"]
    for container in containers.values():
        environ = {each["name"]: each["value"] for each in container["env"] if "value" in each}
        assert container["name"] == "pytorch" and container["image"]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": int(gpus)} and environ["GPUS"] == gpus
        assert environ["PODS"] == str(sum(role["replicas"] for role in roles.values()))
        assert environ["RUN"].startswith("/runs/")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def test_runs_lie_on_the_claim_and_shared_memory_in_memory():
    claim, job, containers = pods()
    for role, container in containers.items():
        pod = job["spec"]["pytorchReplicaSpecs"][role]["template"]["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {each["mountPath"]: volumes[each["name"]] for each in container["volumeMounts"]}
        assert mounts["/runs"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
        user = pod["securityContext"]["runAsUser"]
        assert pod["securityContext"]["runAsNonRoot"] and f"useradd --uid {user} " in DOCKERFILE


def pod(folder: Path, mode: str, rank: int = 1) -> subprocess.Popen[str]:
    """Start what a pod runs."""
    _, _, containers = pods()
    container = containers["Worker"]
    program(folder / "bin" / "torchrun", TORCHRUN)
    environ = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    environ |= {"MODE": mode, "RUN": str(folder / "run"), "RANK": str(rank), "WORLD_SIZE": "16"}
    environ |= {"MASTER_ADDR": "first", "MASTER_PORT": "23456"}
    return started([*container["command"], *container["args"]], folder, environ)


def test_a_pod_starts_its_ranks_by_its_place(tmp_path):
    process = pod(tmp_path, "done")
    output = ended(process)
    assert process.returncode == 0, output
    assert (tmp_path / "words").read_text().split() == [
        *("--nnodes", "2", "--nproc_per_node", "8", "--node_rank", "1"),
        *("--master_addr", "first", "--master_port", "23456", "launch/pretrain.py"),
        *("--recipe=openwebtext/gpt2-124m", "--ds_config=ds_configs/zero1.json"),
        *("--out", str(tmp_path / "run"), "--resume"),
    ]
    assert (tmp_path / "torchrun-rank").read_text() == "unset\n"  # the pod's is no process's


def test_an_evicted_pod_saves_and_is_started_again(tmp_path):
    process = pod(tmp_path, "trains")
    wait_for(tmp_path / "ready", process)
    process.send_signal(signal.SIGTERM)
    ended(process)
    assert process.returncode == 75
    assert json.loads((tmp_path / "run" / "result.json").read_text()) == {"status": "interrupted"}


def test_a_failure_is_the_pods(tmp_path):
    """Also where an earlier result says that all was well."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "result.json").write_text('{"status": "ok"}')
    process = pod(tmp_path, "fails")
    ended(process)
    assert process.returncode == 3


def test_a_request_to_stop_that_nobody_saw_is_forgotten(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "STOP").touch()
    process = pod(tmp_path, "done", rank=0)
    ended(process)
    assert process.returncode == 0 and not (tmp_path / "run" / "STOP").exists()


def test_the_flags_of_both_files_are_a_training_that_resolves():
    """Of the processes that the files ask for."""
    _, _, containers = pods()
    flags = [word for word in containers["Master"]["args"] if word.startswith("--")]
    (stated,) = re.findall(r"^TRAINING=\((.*)\)$", SBATCH, re.M)
    assert " ".join(flags).replace("=", " ") == stated
    done = run_ranks(1, ROOT / "launch" / "pretrain.py", *flags, "--plan", "--processes", 16)
    assert done.returncode == 0 and "x dp 16" in done.stdout, done.stdout


def test_the_image_holds_what_commands_import_and_the_pinned_torch():
    lines = re.sub(r"\\\n", " ", DOCKERFILE).splitlines()
    instructions = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    kinds = {"ARG", "FROM", "RUN", "ENV", "WORKDIR", "COPY", "USER", "ENTRYPOINT", "CMD"}
    assert {kind for kind, _ in instructions} == kinds and instructions[1][0] == "FROM"
    *_, (_, command) = instructions
    assert json.loads(command)[:2] == ["python", "launch/pretrain.py"]
    copied = [rest.split() for kind, rest in instructions if kind == "COPY"]
    assert all((ROOT / name).exists() for *names, _ in copied for name in names)
    assert [name for name, _ in copied[1:]] == ["recipes", "ds_configs", "modeling", "data", "launch"]
    (pin,) = re.findall(r"\$\((grep .*? requirements\.txt)\)", DOCKERFILE)
    printed = subprocess.run(["bash", "-c", pin], cwd=ROOT, capture_output=True, text=True).stdout
    assert re.fullmatch(r"torch==\d+\.\d+\.\d+\n", printed)
    assert DOCKERFILE.index('TORCH_INDEX" "$(') < DOCKERFILE.index("pip install -r")
