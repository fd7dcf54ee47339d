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
from torch.utils import cpp_extension

from ds_configs.plan import GPU, HOST, Machine
from ds_configs.resolver import resolve
from launch.machine import compiled_ops
from recipes import catalog

TINY = ["--tiny", "--steps", "1", "--set", "run.prompt=null"]


def launch(processes: int, ds_config: str, directory: Path, env: dict[str, str], timeout: float = 180):
    flags = [*TINY, "--ds_config", ds_config, "--out", directory]
    return run_ranks(processes, ROOT / "launch/pretrain.py", *flags, env=env, timeout=timeout)


# Which ops


@pytest.mark.parametrize(
    "ds_config, accelerator, compiler, builders",
    [
        ("zero0", GPU, True, []),
        ("zero3_offload", GPU, True, []),
        ("zero_infinity", HOST, True, ["CPUAdamBuilder", "PinMemoryBuilder", "AsyncIOBuilder"]),
        ("zero3_offload", HOST, False, []),
    ],
)
def test_ops_that_a_configuration_needs(ds_config, accelerator, compiler, builders, tmp_path):
    machine = Machine(accelerator, fp16=False, bf16=True, compiler=compiler, libaio=True)
    plan = resolve(catalog.load(tiny=True), ds_config, 1, machine, {"MEGARECIPES_NVME": str(tmp_path)})
    assert [*compiled_ops.needed(plan.ds)] == builders


def compiling_adam(base: str, directory: Path) -> str:
    """A configuration of ours with DeepSpeed's own Adam, as a file in `directory`."""
    config = json.loads((ROOT / "ds_configs" / f"{base}.json").read_text())
    config["optimizer"] = {"params": {"torch_adam": False}}
    path = directory / f"{base}.json"
    path.write_text(json.dumps(config))
    return str(path)


def test_deepspeeds_own_adam_is_compiled(tmp_path):
    machine = Machine(GPU, fp16=False, bf16=True, compiler=True, libaio=True)
    for base, builder in (("zero1", "FusedAdamBuilder"), ("zero2_offload", "CPUAdamBuilder")):
        plan = resolve(catalog.load(tiny=True), compiling_adam(base, tmp_path), 1, machine)
        assert compiled_ops.needed(plan.ds) == (builder,)


# Where they are kept


@pytest.fixture
def extensions(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "chosen"))
    return tmp_path / "chosen"


def test_every_environment_has_a_directory_of_its_own(extensions, monkeypatch):
    first = compiled_ops.use_own_directory()
    assert first.parent == extensions and first.is_dir() and os.environ["TORCH_EXTENSIONS_DIR"] == str(first)
    assert compiled_ops.use_own_directory() == first, "a second run in this process"
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(extensions))
    monkeypatch.setenv("CXX", "another-c++")
    assert compiled_ops.use_own_directory() not in (first, first.parent)


def test_by_default_they_are_kept_in_the_cache(tmp_path, extensions, monkeypatch):
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setenv("MEGARECIPES_CACHE", str(tmp_path / "cache"))
    assert compiled_ops.use_own_directory().parent == tmp_path / "cache" / "compiled_ops"


def test_without_locks_every_machine_has_a_directory_of_its_own(extensions, monkeypatch):
    def missing(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(compiled_ops.fcntl, "flock", missing)
    monkeypatch.setattr(compiled_ops.socket, "gethostname", lambda: "node-7")
    first = compiled_ops.use_own_directory()
    assert first.name.endswith("-node-7") and compiled_ops.use_own_directory() == first


# The lock file that torch leaves


def killed_holder(baton: Path) -> None:
    """A process that takes torch's lock and is killed while it holds it."""
    code = f"""import time; from torch.utils.file_baton import FileBaton
b = FileBaton({str(baton)!r}); assert b.try_acquire(); print("held", flush=True); time.sleep(60)"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        process.kill()


def test_torch_waits_for_a_lock_file_that_a_killed_process_left(tmp_path):
    killed_holder(tmp_path / "lock")
    assert (tmp_path / "lock").exists()
    torchs = cpp_extension.FileBaton(str(tmp_path / "lock"))
    assert not torchs.try_acquire(), "torch no longer needs our own lock"


# Building


class FakeBuilder:
    """Stands for DeepSpeed's builder of an op."""

    name = "fake"

    def __init__(self, directory: Path, failure: Exception | None = None):
        self.directory, self.failure, self.loads = directory, failure, 0
        self._loaded_ops: dict[str, object] = {}

    def load(self, verbose):
        """As torch does it: behind its lock file."""
        self.loads += 1
        assert not (self.directory / "lock").exists(), "torch would wait for ever"
        if self.failure:
            raise self.failure
        (self.directory / "fake.py").write_text("")
        self._loaded_ops[self.name] = "compiled"


@pytest.fixture
def fake(tmp_path, monkeypatch):
    def install(**arguments) -> FakeBuilder:
        builder = FakeBuilder(tmp_path, **arguments)
        monkeypatch.setattr(compiled_ops, "_get_build_directory", lambda name, verbose: str(tmp_path))
        accelerator = type(compiled_ops.get_accelerator())
        monkeypatch.setattr(accelerator, "create_op_builder", lambda self, name: builder)
        return builder

    return install


def importing(module: object):
    def found(name, directory, is_python_module):
        if isinstance(module, Exception):
            raise module
        return module

    return found


OP = "FakeBuilder"


def test_an_op_is_built_once_and_then_taken_as_it_is(fake, monkeypatch):
    builder, said = fake(), []
    compiled_ops.build(OP, said.append)
    assert builder.loads == 1 and said == ["compiling DeepSpeed's fake, once per environment (about 40 s) …"]
    monkeypatch.setattr(compiled_ops, "_import_module_from_library", importing("taken"))
    other = fake()
    compiled_ops.build(OP, said.append)
    assert other.loads == 0 and len(said) == 1 and other._loaded_ops == {"fake": "taken"}


def test_a_damaged_op_is_built_again(fake, monkeypatch):
    compiled_ops.build(OP, lambda text: None) if fake() else None
    monkeypatch.setattr(compiled_ops, "_import_module_from_library", importing(ImportError("truncated")))
    builder, said = fake(), []
    compiled_ops.build(OP, said.append)
    assert builder.loads == 1 and said[0].startswith("compiling")


def test_a_lock_file_of_a_killed_process_is_removed(fake, tmp_path):
    killed_holder(tmp_path / "lock")
    builder = fake()
    compiled_ops.build(OP, lambda text: None)
    assert builder.loads == 1 and not (tmp_path / "lock").exists()


def test_a_living_builder_is_waited_for(fake, tmp_path):
    """Its lock dies with it, so that nobody waits for a dead one."""
    code = f"""import time; from pathlib import Path; from data.durable_files import locked
with locked(Path({str(tmp_path)!r}) / "built", "x", print):
    print("held", flush=True); time.sleep(1.5)"""
    builder, said = fake(), []
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        compiled_ops.build(OP, said.append)
        assert process.poll() is not None or process.wait(5) == 0
    assert builder.loads == 1 and said[0] == "DeepSpeed's fake: another process is making it; waiting"


def test_a_failure_shows_the_compilers_last_lines_and_the_fix(fake):
    wide = "c++ -DTORCH_EXTENSION_NAME=fake " + "-I/somewhere " * 50
    notes = [f"note {i}" for i in range(40)]
    output = "\n".join([wide, *notes, "fatal error: Python.h: No such file", "ninja: build stopped"])
    fake(failure=RuntimeError(f"Error building extension 'fake': {output}"))
    with pytest.raises(compiled_ops.CompileError) as failed:
        compiled_ops.build(OP, lambda text: None)
    text = str(failed.value)
    assert "fatal error: Python.h" in text and '"torch_adam": true' in text and "note 39" in text
    assert "note 3\n" not in text and "-I/somewhere" not in text
    fake(failure=PermissionError(13, "Permission denied", "/cache/lock"))
    said = "TORCH_EXTENSIONS_DIR .* or offload to memory instead of NVMe"
    with pytest.raises(compiled_ops.CompileError, match=said):
        compiled_ops.build("AsyncIOBuilder", lambda text: None)


# Whole launches


def test_a_run_needs_no_compiler(tmp_path):
    env = {"CXX": "/nonexistent/c++", "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    done = launch(1, "zero3_offload", tmp_path / "run", env)
    assert done.returncode == 0, done.stdout[-4000:]
    assert not any(line.strip().startswith("!") for line in done.stdout.splitlines())
    assert not (tmp_path / "extensions").exists() and "compiling" not in done.stdout
    row = json.loads((tmp_path / "run" / "result.json").read_text())
    assert row["steps"] == 1 and row["status"] == "ok"


def test_a_failing_compiler_ends_every_rank_with_one_explanation(tmp_path):
    compiler = tmp_path / "c++"
    refuse_sources = 'case " $* " in *" -c "*) echo "fatal error: Python.h: No such file" >&2; exit 1;; esac'
    compiler.write_text(f'#!/bin/sh\n{refuse_sources}\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    env = {"CXX": str(compiler), "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    done = launch(2, compiling_adam("zero3_offload", tmp_path), tmp_path / "run", env)
    assert done.returncode != 0
    assert done.stdout.count("DeepSpeed's cpu_adam could not be compiled") == 1
    assert "| fatal error: Python.h" in done.stdout and '"torch_adam": true' in done.stdout
    assert done.stdout.count("compiling DeepSpeed's cpu_adam") == 1
    assert "Traceback" not in done.stdout.split("could not be compiled")[0]
    assert not list((tmp_path / "extensions").rglob("lock"))


@pytest.mark.long
def test_a_run_killed_while_compiling_does_not_block_the_next(tmp_path):
    extensions = tmp_path / "extensions"
    env = {"TORCH_EXTENSIONS_DIR": str(extensions)}
    adam = compiling_adam("zero3_offload", tmp_path)
    command = [sys.executable, "launch/pretrain.py", *TINY, "--ds_config", adam, "--out"]
    killed = subprocess.Popen(
        [*command, str(tmp_path / "run")], cwd=ROOT, env=environment(env), stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not list(extensions.glob("*/cpu_adam/lock")) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(5)  # into the compiler
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert list(extensions.glob("*/cpu_adam/lock"))
    done = run([*command, str(tmp_path / "second")], env=env, timeout=500)
    assert done.returncode == 0 and "compiling" in done.stdout, done.stdout[-4000:]
    again = run([*command, str(tmp_path / "third")], env=env)
    assert again.returncode == 0 and "compiling" not in again.stdout
