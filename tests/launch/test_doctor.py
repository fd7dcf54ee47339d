"""The doctor as it is typed: a good set-up, bad ones, several ranks; and its part in pretrain.py."""

import json
import sys

import pytest
from launching import run, run_ranks

from ds_configs.plan import GPU, Machine
from launch import doctor
from launch.machine import checks, description, doctor_checks
from launch.machine.checks import Check
from launch.machine.description import VisibleGpu
from launch.machine.memory import Memory
from launch.planning import memory_fit
from recipes import catalog
from recipes.problems import ProblemsError

HOSTS = "node1 slots=4\nnode2 slots=4\n"


@pytest.fixture
def diagnose(monkeypatch, capsys, tmp_path):
    """Run the command in this process; returns its exit code and its checks."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor.terminal, "quiet_libraries", lambda: None)  # for good, in this process
    monkeypatch.setattr(doctor.processes, "check_port", lambda number: None)

    def call(*flags: str) -> tuple[int, list[Check]]:
        monkeypatch.setattr(sys, "argv", ["doctor", *flags, "--json"])
        code = doctor.main()
        return code, [Check(**each) for each in json.loads(capsys.readouterr().out)["checks"]]

    return call


@pytest.fixture
def gpu_machine(monkeypatch):
    """Have the doctor see a machine of so many GPUs, whose torch is built for sm_70 and up."""

    def put(gpu: VisibleGpu, count: int = 8, bf16: bool = True) -> None:
        found = [gpu] * count
        machine = Machine(GPU, fp16=True, bf16=bf16, compiler=True, libaio=True)
        monkeypatch.setattr(description, "detect_machine", lambda: machine)
        monkeypatch.setattr(doctor, "this_machine", lambda: Memory(count, gpu.total, 1e12))
        monkeypatch.setattr(checks, "gpus", lambda with_free=False: found)
        monkeypatch.setattr(doctor_checks, "gpus", lambda with_free=False: found)
        monkeypatch.setattr(checks, "built_for", lambda: ["sm_70", "sm_80", "sm_90"])
        monkeypatch.setattr(doctor_checks, "torch_cuda", lambda: "12.6")
        monkeypatch.setattr(doctor_checks, "nvcc_version", lambda: "12.4")
        monkeypatch.setattr(checks, "free_bytes", lambda place: 1e9)

    return put


V100 = VisibleGpu("Tesla V100-SXM2-32GB", (7, 0), 32e9, 32e9)


def failed(found: list[Check]) -> dict[str, str]:
    return {check.key: check.found for check in found if check.verdict == "failed"}


def test_a_good_set_up(diagnose):
    code, found = diagnose("--tiny", "--ds_config", "zero1")
    assert code == 0 and not failed(found), found
    keys = {check.key for check in found}
    assert {"packages", "compiler", "port", "layout", "memory", "disk", "DeepSpeed"} <= keys
    assert all(check.found for check in found)
    here = found[: [check.key for check in found].index("configuration")]
    assert {check.verdict for check in here} == {"ok", "not checked"}, "the machine, as the tests demand it"


def test_a_good_set_up_of_several_gpus(diagnose, gpu_machine):
    gpu_machine(V100)
    code, found = diagnose("--ds_config", "fp16_dynamic", "--set", "precision=fp16")
    assert code == 0, failed(found)
    shape = next(check for check in found if check.key == "layout")
    assert "8 dp" in shape.found, "as many as deepspeed would start here"


BAD = {
    "a machine that is not there": (["--hostfile", "strange"], "hostfile"),
    "too few slots": (["--recipe", "megatron_paper_table1/8.3b-mp-dp", "--hostfile", "hosts"], "layout"),
    "a batch that does not divide": (["--set", "batch.global=7", "--set", "batch.micro=2"], "configuration"),
    "pipeline under ZeRO-3": (["--ds_config", "zero3", "--set", "parallel.pp=2"], "configuration"),
    "no text": (["--set", "data.source=jsonl", "--set", "data.name=gone.jsonl"], "data"),
    "no room": (["--recipe", "jeanzay_megatron_performance/48b-pp16-ga256-mb4-0527"], "memory"),
    "a run directory that is a file": (["--out", "hosts"], "run directory"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_set_up_is_told_with_its_fix(what, diagnose, tmp_path):
    (tmp_path / "hosts").write_text(HOSTS)
    (tmp_path / "strange").write_text("gone.invalid slots=1\n")
    flags, key = BAD[what]
    code, found = diagnose(*flags)
    assert code == 1 and key in failed(found), found
    assert all(check.fix for check in found if check.verdict == "failed" and check.key == key != "data")


def test_all_that_the_resolver_refuses_is_listed(diagnose):
    settings = ["parallel.pp=2", "batch.micro=3", "batch.accumulation=2"]
    _, found = diagnose("--ds_config", "zero3", *(word for s in settings for word in ("--set", s)))
    assert len([check for check in found if check.key == "configuration"]) == 2


def test_bf16_on_a_v100(diagnose, gpu_machine, monkeypatch):
    gpu_machine(V100, bf16=False)
    monkeypatch.setattr(checks, "free_bytes", lambda place: 64e6 if place == checks.SHARED else 1e12)
    code, found = diagnose("--ds_config", "bf16")
    assert code == 1 and "bf16" in failed(found)["configuration"]
    assert failed(found).keys() == {"configuration", "shared memory"}, (
        "eight processes are expected all the same"
    )
    code, found = diagnose("--ds_config", "zero1", "--set", "precision=bf16")
    assert failed(found).keys() == {"shared memory"}, "auto falls to fp16"
    assert [check.verdict for check in found if check.key == "configuration"] == ["ok", "warning"]


def test_more_processes_than_gpus(diagnose, gpu_machine):
    gpu_machine(V100, count=2)
    code, found = diagnose("--ds_config", "3d", "--recipe", "parallel_kinds/3d", "--set", "parallel.dp=2")
    assert code == 1 and "this machine has 2" in failed(found)["layout"]


def test_too_few_open_files(monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda which: (1024, 1024))
    monkeypatch.setattr("resource.setrlimit", lambda which, limits: None)
    assert doctor.open_files(100).verdict == "ok"
    (found,) = checks.run({"open files": lambda: doctor.open_files(1000)})
    assert found.verdict == "failed" and "1024" in found.found and found.fix.endswith("ulimit -Hn 2512")


LAPTOP = Memory(0, 0.0, 16e9)
EIGHT_V100 = Memory(8, 32e9, 1e12)


def published(name, *settings):
    return memory_fit.published_plan(catalog.load(name, settings))


def hostfile(count, slots):
    return {f"n{i}": slots for i in range(count)}


def test_a_layout_that_the_machines_do_not_carry():
    wide = published("megatron_paper_table1/8.3b-mp-dp")  # tp 8 x dp 64
    found = doctor.layout(wide, EIGHT_V100, {})
    assert found.verdict == "failed" and "this machine has 8" in found.found
    fours = doctor.layout(wide, EIGHT_V100, hostfile(128, slots=4))
    assert fours.verdict == "warning" and "crosses machines of 4 slots" in fours.found
    eights = doctor.layout(wide, EIGHT_V100, hostfile(64, slots=8))
    assert eights.verdict == "ok"


def test_the_memory_is_that_of_this_machines_processes():
    # 16 processes, 18 bytes of each of 8.3B/8 parameters
    large = published("dgx2_gpt2_torch_ddp/72x3072-h8-tp8")

    def fits(plan, memory, hosts=()):
        return doctor.fits(plan, memory, doctor.ranks_here(plan, memory, dict(hosts)))

    assert fits(large, EIGHT_V100).verdict == "ok"
    rank = memory_fit.memory_of_plan(large)
    for room, verdict in ((rank.total + 1, "ok"), (rank.least + 1, "warning"), (rank.least - 1, "failed")):
        assert fits(large, Memory(8, room, 1e12)).verdict == verdict
    assert fits(large, Memory(0, 0, 600e9)).verdict == "ok"
    assert fits(large, LAPTOP).verdict == "failed"
    one = hostfile(16, slots=1)
    assert fits(large, Memory(0, 0, 30e9), one).verdict == "ok", "one process a machine"
    offloaded = published("default/sotu", "ds_config=zero2_offload", "parallel.dp=8")
    host = 8 * memory_fit.memory_of_plan(offloaded).host
    for room, verdict in ((1.2 * host, "ok"), (1.01 * host, "warning"), (0.99 * host, "failed")):
        assert fits(offloaded, Memory(8, 32e9, room)).verdict == verdict
        assert fits(offloaded, Memory(0, 0, room)).verdict == "failed", "all of it"


def test_what_of_the_json_nothing_checks_is_named(diagnose, tmp_path):
    config = {"zero_optimization": {"stage": 1}, "autotuning": {"fast": True}}
    config["zero_optimization"]["leaf_module"] = {"names": ["x"]}
    (tmp_path / "own.json").write_text(json.dumps(config))
    code, found = diagnose("--ds_config", "own.json")
    rest = [check.found for check in found if check.key == "configuration" and check.verdict == "not checked"]
    assert len(rest) == 2 and "leaf_module" in rest[0] and code == 0
    assert rest[1] == "autotuning: handed to DeepSpeed as written"


def test_launcher_variables_that_contradict_each_other(diagnose, monkeypatch):
    for name, value in {"RANK": "5", "WORLD_SIZE": "2", "LOCAL_RANK": "x"}.items():
        monkeypatch.setenv(name, value)
    code, found = diagnose("--tiny")
    assert code == 1 and failed(found).keys() == {"launcher"}, "and goes on as one process"
    assert "LOCAL_RANK='x'" in failed(found)["launcher"]


REFUSED = (("--recipe", "nobody/knows"), ("--ds_config", "zero9"), ("--hostfile", "gone"), ("--set", "x=1"))


@pytest.mark.parametrize("flags", REFUSED)
def test_what_cannot_be_read_is_refused(flags, diagnose):
    with pytest.raises(ProblemsError):
        diagnose(*flags)


def test_lines_fit_the_terminal():
    found = [
        Check("packages", "ok", "32 as pinned"),
        Check("port", "failed", "29500 is taken, " + "by a process " * 9, "give deepspeed another " * 6),
        Check("clock", "not checked", "alone"),
    ]
    lines = doctor.text(found, 80).splitlines()
    assert max(map(len, lines)) <= 80 and lines[0] == "ok           packages  32 as pinned"
    assert any(line.strip().startswith("fix: give deepspeed") for line in lines)
    assert lines[-1] == "3 checks: 1 ok, 1 failed, 1 not checked"


def test_ranks_meet_and_compare_what_they_see(tmp_path):
    done = run_ranks(2, "launch/doctor.py", "--tiny", "--ds_config", "zero1", "--out", tmp_path / "run")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("packages") == 1, "rank 0 says it for all"
    assert "ok           shared files" in done.stdout and "dp 2 = 2 processes" in done.stdout
    assert not (tmp_path / "run").exists() and not list(tmp_path.iterdir())


def test_machines_that_differ_are_told_apart():
    same, other = Check("port", "ok", "free"), Check("port", "failed", "taken")
    assert doctor.merge_checks([("a", [same]), ("b", [same])]) == [same]
    assert [c.found for c in doctor.merge_checks([("a", [same]), ("b", [other])])] == ["a: free", "b: taken"]
    blind = Check("port", "not checked", "not mine")
    assert doctor.merge_checks([("a", [same]), ("b", [blind])]) == [same], "the one that could tell"
    assert doctor.merge_checks([("a", [same]), ("a", [])]) == [same], "another rank of a machine"
    old, new = Check("versions", "ok", "python 3.10.1"), Check("versions", "ok", "python 3.11.7")
    found = doctor.merge_checks([("a", [new]), ("b", [old])])
    assert [(each.verdict, each.found) for each in found] == [
        ("failed", "a: python 3.11.7"), ("failed", "b: python 3.10.1"),
    ]  # fmt: skip


TINY = ["launch/pretrain.py", "--tiny", "--steps", "2", "--set", "precision=fp32", "--ds_config", "zero1"]


def test_a_start_warns_in_one_line(tmp_path):
    done = run([sys.executable, *TINY, "--out", str(tmp_path / "run")], env={"MEGARECIPES_CAHCE": "x"})
    warning = "warning: MEGARECIPES_CAHCE is read nowhere; did you mean MEGARECIPES_CACHE?\n"
    assert done.returncode == 0 and done.stdout.count(warning) == 1, done.stdout


def test_a_start_without_kernels_or_room_is_refused(monkeypatch, tmp_path):
    from recorded import plan

    from launch.training.job import Job
    from launch.training.start import make_quick_checks

    job = Job(plan(), "default/sotu", tmp_path / "run")
    make_quick_checks(job)
    monkeypatch.setattr(checks, "gpus", lambda: [V100])
    monkeypatch.setattr(doctor_checks, "gpus", lambda: [V100])
    monkeypatch.setattr(checks, "built_for", lambda: ["sm_75"])
    monkeypatch.setattr(checks, "free_bytes", lambda place: 1e3)
    monkeypatch.setattr(checks, "installed", lambda name: "1.0")
    with pytest.raises(ProblemsError, match=r"Tesla V100.*\n.*a checkpoint takes") as refused:
        make_quick_checks(job)
    assert len(refused.value.problems) == 2, "other versions are a warning"
