"""tools/benchmark.py gpu: its commands, what it keeps and takes up again. No GPU is needed."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import psutil
import pytest
import torch

from ds_configs.plan import ANY_GPU, HOST, Machine
from ds_configs.resolver import resolve
from recipes import catalog
from tools import benchmark
from tools.benchmarks import gpu
from tools.benchmarks.gpu import Command, GpuStep
from tools.benchmarks.specification import Specification
from tools.benchmarks.step import specifications

CPU = Machine(HOST, fp16=False, bf16=True, compiler=True, libaio=False)


def on_cpu(monkeypatch, *flags: object) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "gpu", "--on", "cpu", *map(str, flags)])
    benchmark.main()


@pytest.fixture
def taken(monkeypatch) -> list[str]:
    """Steps in the place of the real ones; the programs that are run, none of them in truth."""
    run: list[str] = []

    def run_limited(words, folder: Path, limit_s: float) -> tuple[int, str, str]:
        assert folder.is_dir() and not [*folder.iterdir()]
        run.append(f"{words[0]} {limit_s:.0f}")
        return int(words[0] == "b"), f"said by {words[0]}", "wrong"

    steps = (
        GpuStep("one", "title of one", [Command(("a",), 300), Command(("b",), 40)], "goal: fast"),
        GpuStep("two", "title of two", [Command(("c",), 300)]),
        GpuStep("brief", "of one call", [Command(("d",), 40), Command(("e",), 40)], minutes=1),
    )
    monkeypatch.setattr(gpu, "STEPS", {step.name: step for step in steps})
    monkeypatch.setattr(gpu, "run_limited", run_limited)
    return run


def test_results_are_written_after_each_command(tmp_path, monkeypatch, capsys, taken):
    out = tmp_path / "walk" / "results.json"
    whole = gpu.run_limited

    def looked_at(words, folder, limit_s):
        if words[0] == "c":
            assert [row["code"] for row in json.loads(out.read_text())["rows"]] == [0, 1]
        return whole(words, folder, limit_s)

    monkeypatch.setattr(gpu, "run_limited", looked_at)
    on_cpu(monkeypatch, "--folder", tmp_path / "walk")
    assert taken == ["a 300", "b 40", "c 300"], "the next one is still run, and what has its own time is not"
    said = capsys.readouterr().out
    assert "one\ntitle of one\ngoal: fast\n\na\n0 s, exit code 0\nsaid by a" in said
    assert "exit code 1\nsaid by b\nwrong" in said
    kept = json.loads(out.read_text())
    assert kept["hardware"]["versions"] and [row["step"] for row in kept["rows"]] == ["one", "one", "two"]
    assert re.search(r"two +0 +\S+ +300 +0 +c$", said, re.M), "the table at the end"


def test_a_call_that_is_nearly_over_names_what_was_not_run(tmp_path, monkeypatch, capsys, taken):
    started = psutil.Process().create_time()
    clock = iter((started + 10, started + 45))
    monkeypatch.setattr(gpu.time, "time", lambda: next(clock))
    on_cpu(monkeypatch, "--folder", tmp_path, "--only", "brief")
    clock = iter((started + 57,) * 9)
    assert taken == ["d 40", "e 15"], "the second had its minute's rest"
    on_cpu(monkeypatch, "--folder", tmp_path / "late", "--only", "brief")
    assert taken == ["d 40", "e 15"] and "\ne\nnot run: the time is over" in capsys.readouterr().out
    rows = json.loads((tmp_path / "late" / "results.json").read_text())["rows"]
    assert [row["code"] for row in rows] == ["not run", "not run"]
    clock = iter((started + 57,) * 9)
    on_cpu(monkeypatch, "--folder", tmp_path / "longer", "--only", "brief", "--minutes", 2)
    assert taken[2:] == ["d 40", "e 40"]


@pytest.mark.ci
def test_a_step_is_walked_to_its_end(tmp_path, monkeypatch, capsys):
    on_cpu(monkeypatch, "--only", "machine", "--folder", tmp_path / "walk")
    cpu, plan = json.loads((tmp_path / "walk" / "results.json").read_text())["rows"]
    assert (cpu["code"], plan["code"]) == (0, 0), plan
    assert "Architecture" in cpu["said"] and "run directory" in plan["said"] and plan["seconds"] > 0
    assert re.search(r"machine +\d+ +\d+% +300 +0 +launch/pretrain.py", capsys.readouterr().out)


def test_a_folder_with_something_else_is_left_as_it_is(tmp_path, monkeypatch, capsys, taken):
    (tmp_path / "of the user's").touch()
    with pytest.raises(SystemExit) as end:
        on_cpu(monkeypatch, "--folder", tmp_path)
    assert end.value.code == 2 and "is not empty" in capsys.readouterr().err and not taken


def test_a_command_that_takes_too_long_is_ended_with_what_it_started(tmp_path):
    child = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(600)"
    start = "import subprocess, sys; print('begun', flush=True); "
    start += f"subprocess.run([sys.executable, '-c', {child!r}])"
    code, said, error = gpu.run_limited([sys.executable, "-c", start], tmp_path, 2)
    assert (code, said) == (124, "begun\n") and "ended after 2 s" in error
    number = int((tmp_path / "pid").read_text())
    until = time.monotonic() + 20
    while psutil.pid_exists(number) and psutil.Process(number).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_signal_to_end_reaches_the_running_command(tmp_path, monkeypatch, taken):
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    monkeypatch.setattr(gpu, "run_limited", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    try:
        with pytest.raises(KeyboardInterrupt):
            on_cpu(monkeypatch, "--folder", tmp_path, "--only", "one")
    finally:
        signal.signal(signal.SIGTERM, before)


def test_without_a_gpu_it_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "gpu", "--folder", str(tmp_path / "x")])
    with pytest.raises(SystemExit) as end:
        benchmark.main()
    assert end.value.code == 2 and "without a GPU" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("tiny", [False, True])
@pytest.mark.parametrize("step", gpu.STEPS.values(), ids=gpu.STEPS)
def test_every_command_is_one_that_its_parser_and_the_resolver_take(step, tiny):
    for command in step.commands:
        script, *flags = (gpu.tiny(command) if tiny else command).words
        if not script.endswith(".py"):
            continue
        module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
        args = module.build_parser().parse_args(flags)
        given = []
        if script == gpu.TRAIN:
            given = [(catalog.load(args.recipe, args.set, tiny=args.tiny, steps=args.steps), args.ds_config)]
        elif script == gpu.MEASURE:
            given = [(spec.load(), spec.ds_config) for spec in specifications(args)]
            assert all(recipe.data.source == "packaged" and not recipe.data.blend for recipe, _ in given)
        for recipe, config in given:
            machine = replace(CPU, fp16="--emulate_fp16" in flags) if tiny else ANY_GPU
            assert args.tiny == tiny and (script == gpu.TRAIN or args.blocks in ({1} if tiny else {1, 2, 3}))
            assert resolve(recipe, config, 1, machine).layout.world == 1


def test_the_limits_of_a_lent_quarter_of_an_hour_leave_time_to_start():
    calls = [step for step in gpu.STEPS.values() if step.minutes]
    assert [(step.name, step.minutes) for step in calls] == [("fifteen-1", 7), ("fifteen-2", 6)]
    for step in calls:
        assert 10 <= 60 * step.minutes - sum(command.limit_s for command in step.commands) <= 20
    words = [" ".join(command.words) for step in calls for command in step.commands]
    order = (
        *("nvidia-smi", "zero1.*dropout.*--steps 20", "zero3 ", "zero2 ", "zero3_offload.*fp16"),
        *("attend=document", "sotu-muon.*zero1", "ours nano.*compiled", "1.2b.*compiled eager"),
        *("zero1.*--deterministic", "zero1.*--deterministic", "zero3_offload.*--resume", "bert.*dropout"),
        *("1.2b.*zero1 .*=null$", "1.2b.*zero1 .*muon", "--profile"),
    )
    assert len(order) == len(words) and all(map(re.search, order, words))


def measured(*names: str) -> list[Specification]:
    """What the measurements of these steps measure."""
    parse = benchmark.build_parser().parse_args
    commands = (command.words for name in names for command in gpu.STEPS[name].commands)
    parsed = (parse(words[1:]) for words in commands if words[0] == gpu.MEASURE)
    return [spec for args in parsed for spec in specifications(args) if spec.system != "rate"]


def test_nothing_is_fetched_from_the_hub_and_each_system_of_124m_is_measured_in_both_forms():
    kinds = {spec.load().data.tokenizer.kind for spec in measured(*gpu.STEPS)}
    assert kinds <= {"gpt2", "trained_bpe", "trained_wordpiece"}
    forms = {(spec.system, spec.compiled) for spec in measured("124m")}
    assert forms == {*product(("ours", "nano", "transformers"), (False, True))}


def test_the_first_step_has_every_stage_with_dropout_in_both_precisions():
    for precision in ("fp16", "bf16"):
        own = (f"precision={precision}", "dropout.hidden=0.1", "dropout.attention=0.1")
        wanted = {f"--set={each}" for each in own}
        lines = [command.words for command in gpu.STEPS["first"].commands]
        stages = {words[words.index("--ds_config") + 1] for words in lines if wanted <= {*words}}
        assert stages >= {"zero0", "zero1", "zero2", "zero3", "zero3_offload"}


def test_a_published_row_keeps_its_model_and_its_micro_batch():
    specs = measured("1.2b", "345m", "fifteen-2")
    for spec in specs[:-1]:  # the last is no published row
        row, own = catalog.load(spec.recipe), spec.load()
        assert own.batch.micro == own.batch.global_ == row.batch.micro
        assert own.model == row.model and own.sequence_length == row.sequence_length
    assert len(specs) >= 9


def test_a_command_says_what_came_with_the_numbers_of_a_training_or_a_measurement(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    for out in ("run/result.json", "numbers.json"):
        write = f"path = pathlib.Path({out!r}); path.parent.mkdir(exist_ok=True); path.write_text('[7]')"
        (tmp_path / "script.py").write_text(f"import pathlib\n{write}\nprint('done')\n")
        command = Command(("script.py", "--out", out.partition("/")[0]), 60)
        row = gpu.outcome(command, tmp_path / "at" / out.partition("/")[0], time.time() + 60)
        assert (row["numbers"], row["code"], row["said"]) == ([7], 0, "done") and "error" not in row
    row = gpu.outcome(Command(("none.py",), 60), tmp_path / "x", time.time() + 60)
    assert row["code"] == 2 and "none.py" in row["error"]
    row = gpu.outcome(Command(("nowhere-smi",), 60), tmp_path / "y", time.time() + 60)
    assert row["code"] == 127 and row["error"] == "there is no nowhere-smi"


def test_what_a_command_said_last_begins_with_a_whole_line():
    assert gpu.last_lines("one\ntwo\nthree\n", 9) == "three"
    assert gpu.last_lines("one\ntwo\n", 9) == "one\ntwo"
