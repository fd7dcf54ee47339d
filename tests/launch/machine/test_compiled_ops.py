"""DeepSpeed's compiled ops: built when they have to be, announced, and never waited for in vain."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import ROOT, environment, run, run_ranks

from ds_configs.plan import Machine
from ds_configs.resolver import resolve
from launch.machine import compiled_ops
from recipes import catalog

TINY = ["--tiny", "--steps", "1", "--set", "run.prompt=null"]


def launch(processes: int, ds_config: str, directory: Path, env: dict[str, str], timeout: float = 180):
    return run_ranks(
        processes,
        ROOT / "launch/pretrain.py",
        *TINY,
        "--ds_config",
        ds_config,
        "--out",
        directory,
        env=env,
        timeout=timeout,
    )


# Which ops


@pytest.mark.parametrize(
    "ds_config, accelerator, compiler, builders",
    [
        ("zero0", "cuda", True, ["FusedAdamBuilder"]),
        ("zero3", "cuda", True, ["FusedAdamBuilder"]),
        ("zero2_offload", "cpu", True, ["CPUAdamBuilder"]),
        ("zero3_offload", "cuda", True, ["CPUAdamBuilder"]),
        ("zero_infinity", "cpu", True, ["CPUAdamBuilder", "PinMemoryBuilder", "AsyncIOBuilder"]),
        ("zero1", "cpu", False, []),
        ("zero3_offload", "cpu", False, []),
    ],
)
def test_ops_that_a_configuration_needs(ds_config, accelerator, compiler, builders, tmp_path):
    machine = Machine(accelerator, fp16=False, bf16=True, compiler=compiler, libaio=True)
    plan = resolve(catalog.load(tiny=True), ds_config, 1, machine, {"MEGARECIPES_NVME": str(tmp_path)})
    assert [op.builder for op in compiled_ops.needed(plan.ds)] == builders


# The lock file that torch leaves


def holder(baton: Path, seconds: float) -> subprocess.Popen:
    """A process that takes torch's lock and gives it back after `seconds`."""
    code = f"""import time; from torch.utils.file_baton import FileBaton
b = FileBaton({str(baton)!r}); assert b.try_acquire(); print("held", flush=True); time.sleep({seconds}); b.release()"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(compiled_ops, "SETTLE_SECONDS", 0.2)


def test_a_living_owner_is_waited_for(tmp_path):
    said: list[str] = []
    with holder(tmp_path / "lock", 1.5) as process:
        assert compiled_ops.working_in(tmp_path) == [process.pid]
        compiled_ops.remove_stale_baton(tmp_path, "cpu_adam", said.append)
        assert process.wait(5) == 0, "it could release its lock itself"
    assert said == [f"DeepSpeed's cpu_adam is being compiled by process {process.pid}: waiting for it"]


def test_a_dead_owners_lock_is_removed(tmp_path):
    said: list[str] = []
    with holder(tmp_path / "lock", 60) as process:
        process.kill()
    assert (tmp_path / "lock").exists()
    compiled_ops.remove_stale_baton(tmp_path, "cpu_adam", said.append)
    assert not (tmp_path / "lock").exists()
    assert len(said) == 1 and "left behind" in said[0]


def test_a_compiler_that_outlived_its_parent_is_waited_for(tmp_path):
    (tmp_path / "lock").touch()
    with subprocess.Popen(["sleep", "1.5"], cwd=tmp_path) as orphan:
        compiled_ops.remove_stale_baton(tmp_path, "cpu_adam", lambda text: None)
        assert orphan.poll() is not None, "it has ended"
    assert not (tmp_path / "lock").exists()


def test_without_proc_only_an_old_lock_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled_ops, "working_in", lambda directory: None)
    lock, said = tmp_path / "lock", []

    def age(text):
        said.append(text)
        if lock.exists():
            os.utime(lock, (time.time() - 700,) * 2)

    lock.touch()
    compiled_ops.remove_stale_baton(tmp_path, "cpu_adam", age)
    assert "delete the file" in said[0] and "left behind" in said[1] and not lock.exists()


# Building


class FakeBuilder:
    """Stands for DeepSpeed's builder of an op."""

    name = "fake"

    def __init__(self, directory: Path, failure: Exception | None = None, seconds: float = 0):
        self.library, self.failure, self.seconds, self.loads = directory / "fake.so", failure, seconds, 0

    def load(self, verbose):
        self.loads += 1
        time.sleep(self.seconds)
        if self.failure:
            raise self.failure
        if not self.library.exists():
            self.library.touch()


@pytest.fixture
def fake(tmp_path, monkeypatch):
    def install(**arguments) -> FakeBuilder:
        builder = FakeBuilder(tmp_path, **arguments)
        monkeypatch.setattr(compiled_ops, "_get_build_directory", lambda name, verbose: str(tmp_path))
        monkeypatch.setattr(
            type(compiled_ops.get_accelerator()), "create_op_builder", lambda self, name: builder
        )
        return builder

    return install


OP = compiled_ops.Op("FakeBuilder", compiled_ops.TORCH_ADAM)


def test_an_op_is_built_once_and_again_when_its_library_changes(fake):
    builder, said = fake(), []
    compiled_ops.build(OP, said.append)
    assert builder.loads == 1 and said == ["compiling DeepSpeed's fake, once per environment (about 40 s) …"]
    compiled_ops.build(OP, said.append)
    assert builder.loads == 1 and len(said) == 1
    os.utime(builder.library, (1, 1))  # another program, of another environment, has compiled it
    compiled_ops.build(OP, said.append)
    assert builder.loads == 2 and len(said) == 1, "looked at again; nothing to say, since it took no time"


def test_a_rebuild_that_takes_long_is_announced(fake, monkeypatch):
    monkeypatch.setattr(compiled_ops, "NOTICEABLE_SECONDS", 0.1)
    builder, said = fake(seconds=0.5), []
    builder.library.touch()
    compiled_ops.build(OP, said.append)
    assert len(said) == 1 and said[0].startswith("compiling")


def test_a_failure_shows_the_compilers_last_lines_and_the_fix(fake):
    wide = "c++ -DTORCH_EXTENSION_NAME=fake " + "-I/somewhere " * 50
    output = "\n".join(
        [
            wide,
            *(f"note {i}" for i in range(40)),
            "fatal error: Python.h: No such file",
            "ninja: build stopped",
        ]
    )
    fake(failure=RuntimeError(f"Error building extension 'fake': {output}"))
    with pytest.raises(compiled_ops.CompileError) as failed:
        compiled_ops.build(OP, lambda text: None)
    text = str(failed.value)
    assert "fatal error: Python.h" in text and '"torch_adam": true' in text and "note 39" in text
    assert "note 3\n" not in text and "-I/somewhere" not in text
    fake(failure=PermissionError(13, "Permission denied", "/cache/lock"))
    with pytest.raises(compiled_ops.CompileError, match="TORCH_EXTENSIONS_DIR"):
        compiled_ops.build(OP, lambda text: None)


# Whole launches


@pytest.mark.parametrize("ds_config", ["zero1", "zero3_offload"])
def test_without_a_compiler_a_run_says_so_once_and_trains(ds_config, tmp_path):
    env = {"CXX": "/nonexistent/c++", "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    done = launch(1, ds_config, tmp_path / "run", env)
    assert done.returncode == 0, done.stdout[-4000:]
    if ds_config == "zero3_offload":  # the one that would use a compiled op on a CPU
        notices = [line for line in done.stdout.splitlines() if line.strip().startswith("!")]
        assert len(notices) == 1 and "torch's AdamW" in notices[0]
    assert not (tmp_path / "extensions").exists() and "compiling" not in done.stdout
    row = json.loads((tmp_path / "run" / "result.json").read_text())
    assert row["steps"] == 1 and row["status"] == "ok"


def test_a_failing_compiler_ends_every_rank_with_one_explanation(tmp_path):
    compiler = tmp_path / "c++"
    refuse_sources = 'case " $* " in *" -c "*) echo "fatal error: Python.h: No such file" >&2; exit 1;; esac'
    compiler.write_text(f'#!/bin/sh\n{refuse_sources}\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    env = {"CXX": str(compiler), "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    done = launch(2, "zero3_offload", tmp_path / "run", env)
    assert done.returncode != 0
    assert done.stdout.count("DeepSpeed's cpu_adam could not be compiled") == 1
    assert "| fatal error: Python.h" in done.stdout and '"torch_adam": true' in done.stdout
    assert done.stdout.count("compiling DeepSpeed's cpu_adam") == 1
    assert "Traceback" not in done.stdout.split("could not be compiled")[0] and not list(
        (tmp_path / "extensions").rglob("lock")
    )


@pytest.mark.long
def test_a_run_killed_while_compiling_does_not_block_the_next(tmp_path):
    env = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    baton = tmp_path / "extensions" / "cpu_adam" / "lock"
    command = [
        sys.executable,
        "launch/pretrain.py",
        *TINY,
        "--ds_config",
        "zero3_offload",
        "--out",
        str(tmp_path / "run"),
    ]
    killed = subprocess.Popen(
        command, cwd=ROOT, env=environment(env), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while not baton.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(5)  # into the compiler
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert baton.exists()
    done = run([*command[:-1], str(tmp_path / "second")], env=env, timeout=500)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "left behind" in done.stdout
    again = run([*command[:-1], str(tmp_path / "third")], env=env)
    assert again.returncode == 0 and "compiling" not in again.stdout
