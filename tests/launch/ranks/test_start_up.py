"""What happens before the first step: whose seconds it takes, and what is not imported for it."""

import gc
import os
import sys
import time

import pytest
from launching import run

from launch.ranks import joining
from launch.ranks.joining import StartClock
from recipes.problems import ProblemsError

# Everything that training imports until its first step, in the order of `pretrain.run`.
BEFORE_THE_FIRST_STEP = """
import sys
import launch.pretrain
from data.corpus import build
from launch.checkpoints import reading
from launch.machine import description
from launch.records import vocabulary
from launch.records.recorder import Recorder
from launch.training import agreement, loop
from launch.training.engine import leave_out_compilation
leave_out_compilation()
late = {"matplotlib", "torch._inductor.compile_fx", "accelerate", "datasets", "pandas", "scipy"}
print("TOO EARLY", sorted(late & {*sys.modules}))
import importlib
from deepspeed.runtime.zero.muon import original_muon
importlib.reload(original_muon)
print("UPSTREAM", "torch._inductor.compile_fx" in sys.modules)
"""


@pytest.fixture(scope="module")
def said():
    done = run([sys.executable, "-c", BEFORE_THE_FIRST_STEP], timeout=60)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.ci
def test_the_first_step_waits_for_no_library_that_it_does_not_use(said):
    assert "TOO EARLY []" in said, said


@pytest.mark.ci
def test_importing_muon_loads_the_compiler(said):
    """DeepSpeed's own decorator does; else `deepspeed_fixes/muon_compilation.py` can go."""
    assert "UPSTREAM True" in said, said


@pytest.mark.parametrize(
    ("commands", "first"),
    [
        ({1: "bash"}, None),
        (
            {1: "python -u -m deepspeed.launcher.launch", 2: "python /venv/bin/deepspeed --quiet", 3: "bash"},
            2,
        ),
        ({1: "python /venv/bin/torchrun --nproc_per_node 2", 2: "bash -c torchrun", 3: "sshd"}, 1),
        ({1: "python -m torch.distributed.run", 2: "make"}, 1),
    ],
)
def test_the_launch_is_that_of_the_launcher(monkeypatch, commands, first):
    above = {os.getpid(): 1, 1: 2, 2: 3, 3: None}
    monkeypatch.setattr(joining, "parent_of", above.get)
    monkeypatch.setattr(joining, "command_of", lambda pid: commands.get(pid, ""))
    assert joining.first_launcher() == (first or os.getpid())


def test_the_parts_of_a_start_are_all_of_its_time(monkeypatch):
    monkeypatch.setenv("CROSS_RANK", "0")
    monkeypatch.setattr(joining, "first_launcher", lambda: os.getppid())
    started = {os.getpid(): 100.0, os.getppid(): 97.0}
    monkeypatch.setattr(joining, "started", started.get)
    now = iter([101.0, 104.0, 104.5, 106.0])
    monkeypatch.setattr(time, "clock_gettime", lambda clock: next(now))
    clock = StartClock()
    for part in ("imports", "data", "imports"):
        clock.mark(part)
    assert clock.parts == {"launcher": 3.0, "imports": 5.5, "data": 0.5, "compiling": 0.0}


def test_compiling_is_counted_apart(monkeypatch):
    clock = StartClock()
    now, spent = time.clock_gettime(time.CLOCK_BOOTTIME), iter([0.0, 2.0, 5.0])
    times = iter([now, now + 3, now + 8])
    monkeypatch.setattr(joining, "compiling_seconds", lambda: next(spent))
    monkeypatch.setattr(time, "clock_gettime", lambda clock: next(times))
    for part in ("imports", "engine", "weights"):
        clock.mark(part)
    found = {part: clock.parts[part] for part in ("engine", "compiling", "weights")}
    assert found == pytest.approx({"engine": 1, "compiling": 2 + 3, "weights": 2})


def test_a_process_knows_when_it_was_started():
    """Linux says it in ticks of a clock that counts from the machine's start."""
    done = run([sys.executable, "-c", "from launch.ranks.joining import StartClock; import time\n"
                "time.sleep(0.5); c = StartClock(); c.mark('x'); print(c.parts['x'] >= 0.4)"])  # fmt: skip
    assert done.stdout.strip().endswith("True"), done.stdout


def test_libraries_are_not_looked_through_for_garbage():
    try:
        joining.postpone_collections()
        assert not gc.isenabled()
        joining.resume_collections()
        assert gc.isenabled() and gc.get_freeze_count() > 1000
    finally:
        gc.unfreeze()
        gc.enable()


@pytest.mark.ci
def test_compiled_code_is_kept_with_what_is_prepared_once(tmp_path, monkeypatch):
    """torch's compiler settles on a temporary directory where none is named when it is imported."""
    code = (
        "from launch.ranks import joining; joining.keep_compiled_code()\n"
        "import deepspeed, launch.training.compiling, torch, torch._dynamo\n"
        "print('CODE IN', torch._inductor.runtime.cache_dir_utils.cache_dir())"
    )
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # another test may have imported torch's
    for given, place in (({}, tmp_path / "compiled_code"), ({"TORCHINDUCTOR_CACHE_DIR": "/else"}, "/else")):
        env = {"MEGARECIPES_CACHE": str(tmp_path), **given}
        done = run([sys.executable, "-c", code], env=env, timeout=120)
        assert f"CODE IN {place}" in done.stdout, done.stdout


def test_a_cache_that_every_account_may_write_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGARECIPES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/else")
    joining.keep_compiled_code()
    (tmp_path / "cache").mkdir()
    joining.keep_compiled_code()
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(ProblemsError, match="chmod o-w"):
        joining.keep_compiled_code()
