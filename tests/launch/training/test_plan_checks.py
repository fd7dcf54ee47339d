"""What a start and a plan check of their machines: as typed, on several ranks, and of machines set here."""

import sys

import pytest
from launching import run, run_ranks
from recorded import plan

from ds_configs.plan import GPU
from launch.machine import checks, drivers
from launch.machine.checks import Check
from launch.machine.description import VisibleGpu
from launch.ranks import processes
from launch.records.facts import RunFacts
from launch.training import plan_checks, start
from launch.training.job import Job
from recipes.layout import Layout
from recipes.problems import ProblemsError

V100 = VisibleGpu("Tesla V100-SXM2-32GB", (7, 0), 32e9, 32e9)
TINY = ["launch/pretrain.py", "--tiny", "--steps", "2", "--set", "precision=fp32", "--ds_config", "zero1"]


@pytest.fixture
def job(tmp_path):
    return Job(RunFacts(plan(), "default/sotu"), tmp_path / "run")


@pytest.fixture
def poor_machine(monkeypatch):
    """A V100 under a torch without kernels for it, with no room on its disk, and old packages."""
    for module in (checks, drivers):
        monkeypatch.setattr(module, "gpus", lambda with_free=False: [V100])
    monkeypatch.setattr(processes, "device", lambda: GPU)
    monkeypatch.setattr(checks, "built_for", lambda: ["sm_75"])
    monkeypatch.setattr(checks, "free_bytes", lambda place: 1e3)
    monkeypatch.setattr(checks, "installed", lambda name: "1.0")
    monkeypatch.setattr(drivers, "torch_cuda", lambda: "12.6")
    monkeypatch.setattr(drivers, "nvcc_version", lambda: "11.8")
    monkeypatch.setattr("modeling.fusing.failure_of_kernels", lambda device: "no Python.h")


def test_a_start_without_kernels_or_room_is_refused(job, request):
    start.make_quick_checks(job)
    request.getfixturevalue("poor_machine")
    with pytest.raises(ProblemsError, match=r"Tesla V100.*\n.*a checkpoint takes") as refused:
        start.make_quick_checks(job)
    assert len(refused.value.problems) == 2, "other versions are a warning"


def test_a_plan_names_what_its_machine_lacks(job, poor_machine):
    found = plan_checks.of_machine(job)
    verdicts = {check.key: check.verdict for check in found if check.verdict != "ok"}
    assert verdicts == {
        "fused kernels": "warning",
        "CUDA compiler": "failed",
        "GPU kernels": "failed",
        "packages": "warning",
        "disk": "failed",
    }
    lines = plan_checks.text(found, 80).splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith("  ! failed: ") for line in lines) == 3


def test_tensor_ranks_of_two_machines_are_warned_of(monkeypatch):
    wide = plan(layout=Layout(tp=4, pp=1, dp=2, micro=2, accumulation=2, global_batch=8))
    assert plan_checks.tensor_ranks(wide).verdict == "ok"
    monkeypatch.setattr(processes, "several_machines", lambda: True)
    for here, verdict in ((2, "warning"), (4, "ok"), (8, "ok")):
        monkeypatch.setattr(processes, "local_world_size", lambda here=here: here)
        assert plan_checks.tensor_ranks(wide).verdict == verdict


def test_sections_that_nothing_here_checks_are_named(tmp_path):
    file = tmp_path / "own.json"
    file.write_text('{"zero_optimization": {"stage": 1}, "autotuning": {"fast": true}}')
    found = plan_checks.unread_sections(file)
    assert found == Check("", "not checked", "autotuning handed to DeepSpeed as written")


def test_machines_that_differ_are_told_apart():
    same, other = Check("port", "ok", "free"), Check("port", "failed", "taken")
    merged = plan_checks.merged
    assert merged([("a", [same]), ("b", [same])]) == [same]
    assert [check.found for check in merged([("a", [same]), ("b", [other])])] == ["a: free", "b: taken"]
    blind = Check("port", "not checked", "not mine")
    assert merged([("a", [same]), ("b", [blind])]) == [same], "the one that could tell"
    assert merged([("a", [same]), ("a", [])]) == [same], "another rank of a machine"
    old, new = Check("versions", "ok", "python 3.10.1"), Check("versions", "ok", "python 3.11.7")
    found = merged([("a", [new]), ("b", [old])])
    assert [(each.verdict, each.found) for each in found] == [
        ("failed", "a: python 3.11.7"), ("failed", "b: python 3.10.1"),
    ]  # fmt: skip


def test_ranks_of_a_plan_meet_and_compare_what_they_see(tmp_path):
    done = run_ranks(2, *TINY, "--plan", "--out", tmp_path / "run")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("checks ok") == 1, "rank 0 says it for all"
    assert "dp 2 = 2 processes" in done.stdout and not list(tmp_path.iterdir())
    other = "import os, sys; sys.argv = sys.argv[1:]; rank = os.environ['RANK'];"
    other += "from launch.machine import description; known = description.versions();"
    other += "description.versions = lambda: {**known, 'torch': rank};"
    other += "from launch.ranks import processes; processes.local_rank = lambda: 0;"
    other += "import runpy; runpy.run_module('launch.pretrain', run_name='__main__')"
    script = tmp_path / "differ.py"
    script.write_text(other)
    done = run_ranks(2, script, *TINY, "--plan", "--out", tmp_path / "run")
    assert done.returncode != 0 and "make them equal on all machines" in done.stdout, done.stdout


def test_a_start_warns_in_one_line(tmp_path):
    done = run([sys.executable, *TINY, "--out", str(tmp_path / "run")], env={"MEGARECIPES_CAHCE": "x"})
    warning = "WARNING: MEGARECIPES_CAHCE is read nowhere; did you mean MEGARECIPES_CACHE?\n"
    assert done.returncode == 0 and done.stdout.count(warning) == 1, done.stdout
