"""The manifest is a PyTorchJob as the training operator wants it, and its pods save before they go."""

import json
import os
import re
import shlex
import signal
import subprocess
import time

import pytest
import yaml
from cluster_jobs import CASES, job, program, search_path, text

from launch.planning.clusters import files


def documents(line: str) -> tuple[dict, dict]:
    claim, pytorchjob = yaml.safe_load_all(text(line, "pytorchjob.yaml"))
    return claim, pytorchjob


def containers(pytorchjob: dict) -> dict[str, dict]:
    """The container of each role."""
    specs = pytorchjob["spec"]["pytorchReplicaSpecs"]
    found = {role: spec["template"]["spec"]["containers"] for role, spec in specs.items()}
    assert all(len(each) == 1 for each in found.values())
    return {role: each[0] for role, each in found.items()}


@pytest.mark.parametrize("case", CASES)
def test_it_has_what_the_operator_requires(case):
    """By the CRD of kubeflow.org/v1 and the webhook's rules, as the template states them."""
    claim, pytorchjob = documents(case)
    there = job(case)
    assert (pytorchjob["apiVersion"], pytorchjob["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    name = pytorchjob["metadata"]["name"]
    assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", name) and len(f"{name}-worker-1023") <= 63
    specs = pytorchjob["spec"]["pytorchReplicaSpecs"]
    assert set(specs) == ({"Master", "Worker"} if there.nodes > 1 else {"Master"})
    assert specs["Master"]["replicas"] == 1
    assert sum(spec["replicas"] for spec in specs.values()) == there.nodes
    assert {spec["restartPolicy"] for spec in specs.values()} == {"OnFailure"}
    assert pytorchjob["spec"]["nprocPerNode"] == str(there.gpus)
    for container in containers(pytorchjob).values():
        assert container["name"] == "pytorch" and container["image"]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": there.gpus}
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def test_runs_lie_on_the_claim_and_shared_memory_in_memory():
    claim, pytorchjob = documents("3d")
    for spec in pytorchjob["spec"]["pytorchReplicaSpecs"].values():
        pod = spec["template"]["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {each["mountPath"]: volumes[each["name"]] for each in pod["containers"][0]["volumeMounts"]}
        assert mounts["/runs"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
        (run,) = [each["value"] for each in pod["containers"][0]["env"] if each["name"] == "RUN"]
        assert run.startswith("/runs/jeanzay")
        assert pod["securityContext"]["runAsNonRoot"]


def test_the_claim_holds_every_checkpoint_that_is_kept():
    kept = job(f"{CASES['open']} --set run.keep_checkpoints=3 --set run.save_every=100")
    parameters = 124e6
    assert files.claimed_bytes(kept) == pytest.approx(4 * 12 * parameters + 50e9, rel=0.01)
    every = job(
        f"{CASES['open']} --set run.keep_checkpoints=null --set run.save_every=1000 --set steps=20000"
    )
    assert files.claimed_bytes(every) == pytest.approx(22 * 12 * parameters + 50e9, rel=0.02)


def test_names_of_rows_that_begin_alike_differ():
    names = {
        job(f"--recipe jeanzay_megatron_performance/{row}").slug
        for row in ("48b-pp16-ga256-mb4-0527", "48b-pp16-ga256-mb4-0526")
    }
    assert len(names) == 2


def test_what_a_setting_says_reaches_the_training_as_it_is():
    """Kubernetes makes $ of $$ and puts in variables, $(HOME), in arguments and in the environment."""
    prompt, directory = "it's $(HOME) $$(HOME) `x` {a}", "runs/$(HOME) b"
    flags = shlex.join(["--set", f"run.prompt={prompt}", "--run", directory])
    _, pytorchjob = documents(f"--recipe parallel_kinds/3d --gpus-per-node 8 {flags}")
    container = containers(pytorchjob)["Master"]
    assert container["env"][0] == {"name": "RUN", "value": "/runs/$$(HOME) b"}
    words = container["args"][2:]
    started = "launch/pretrain.py --ds_config ds_configs/3d.json --recipe parallel_kinds/3d"
    assert words[:5] == started.split()
    assert words[-1] == f"run.prompt={prompt.replace('$', '$$')}"


# What stands in for torchrun: it ends as $MODE says, at once or when it is asked by the STOP file.
TORCHRUN = """\
#!/bin/bash
printf '%s\\n' "$@" > torchrun-words
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


def pod(tmp_path, mode: str, rank: int = 1) -> subprocess.Popen:
    _, pytorchjob = documents("open")
    container = containers(pytorchjob)["Worker"]
    program(tmp_path / "torchrun", TORCHRUN)
    environ = {**os.environ, "PATH": search_path(tmp_path), "MODE": mode, "RUN": str(tmp_path / "run")}
    environ |= {"RANK": str(rank), "MASTER_ADDR": "first", "MASTER_PORT": "23456", "WORLD_SIZE": "16"}
    command = [*container["command"], *container["args"]]
    return subprocess.Popen(command, cwd=tmp_path, env=environ, start_new_session=True)


def test_a_pod_starts_its_ranks_by_its_place(tmp_path):
    process = pod(tmp_path, "done")
    assert process.wait(timeout=20) == 0
    words = (tmp_path / "torchrun-words").read_text().split()
    assert words[:6] == ["--nnodes", "2", "--nproc_per_node", "8", "--node_rank", "1"]
    assert words[6:10] == ["--master_addr", "first", "--master_port", "23456"]
    assert words[-3:] == ["--out", str(tmp_path / "run"), "--resume"] and "launch/pretrain.py" in words
    assert (tmp_path / "torchrun-rank").read_text() == "unset\n"  # the pod's is no process's


def test_an_evicted_pod_saves_and_is_started_again(tmp_path):
    process = pod(tmp_path, "trains")
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 75
    assert json.loads((tmp_path / "run" / "result.json").read_text()) == {"status": "interrupted"}


def test_a_failure_is_the_pods(tmp_path):
    """Also where an earlier result says that all was well."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "result.json").write_text('{"status": "ok"}')
    process = pod(tmp_path, "fails")
    assert process.wait(timeout=20) == 3


def test_a_request_to_stop_that_nobody_saw_is_forgotten(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "STOP").touch()
    process = pod(tmp_path, "done", rank=0)
    assert process.wait(timeout=20) == 0 and not (tmp_path / "run" / "STOP").exists()
