"""tools/benchmark.py gpu: its commands, what it keeps and takes up again. No GPU is needed."""

from __future__ import annotations

import importlib
import json
import os
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
from tools.benchmarks import gpu_command, gpu_steps, measured_system, step_command
from tools.benchmarks.gpu_steps import Command, GpuStep

CPU = Machine(HOST, fp16=False, bf16=True, compiler=True, libaio=False)


def gpu(monkeypatch, *flags: object) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "gpu", *map(str, flags)])
    benchmark.main()


@pytest.fixture
def taken(monkeypatch) -> list[str]:
    """Two steps in the place of the real ones; the commands that are run, none of them in truth."""
    run: list[str] = []

    def run_command(command: Command, folder: Path) -> dict:
        run.append(command[0])
        assert folder.is_dir()
        code = int(command[0] == "b" and run.count("b") == 1)  # it works the second time
        return {"command": command, "code": code, "seconds": 1.5, "said": f"said by {command[0]}"}

    steps = (
        GpuStep("one", "title of one", [("a",), ("b",)], "goal: fast"),
        GpuStep("two", "title of two", [("c",)]),
    )
    monkeypatch.setattr(gpu_steps, "STEPS", steps)
    monkeypatch.setattr(gpu_command, "run_command", run_command)
    return run


def test_results_are_kept_step_by_step_and_taken_up_again(tmp_path, monkeypatch, capsys, taken):
    folder = ("--on", "cpu", "--folder", tmp_path / "walk")
    gpu(monkeypatch, *folder, "--only", "one", "two")
    assert taken == ["a", "b", "c"], "the next one is still run"
    said = capsys.readouterr().out
    assert "one 2 of 2 (title of one): b\n2 s, exit code 1\nsaid by b" in said
    assert "commands failed in one: run again by a start that finds no new ones" in said
    kept = json.loads((tmp_path / "walk/results.json").read_text())
    assert [each["code"] for each in kept["steps"]["one"]["commands"]] == [0, 1]
    assert kept["steps"]["two"]["hardware"]["versions"] and kept["on"] == "cpu"
    text = (tmp_path / "walk/results.txt").read_text()
    for said in ("one: title of one\ngoal: fast", "b: 2 s, exit code 1\nsaid by b", "two: title of two"):
        assert said in text
    gpu(monkeypatch, *folder)
    assert taken[3:] == ["b"], "what failed"
    gpu(monkeypatch, *folder)
    assert taken[4:] == []
    gpu(monkeypatch, *folder, "--only", "two")
    assert taken[4:] == ["c"], "by name, once more"


def test_a_folder_with_something_else_is_left_as_it_is(tmp_path, monkeypatch, capsys, taken):
    """A step has a folder of its name, such as runs, which is emptied first."""
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "of the user's").touch()
    with pytest.raises(SystemExit) as end:
        gpu(monkeypatch, "--on", "cpu", "--folder", tmp_path)
    assert end.value.code == 2 and "is not empty" in capsys.readouterr().err
    assert (tmp_path / "one" / "of the user's").exists() and not taken


@pytest.mark.parametrize("ended", ["a", "b", "c"])
def test_a_start_that_was_ended_is_taken_up_at_its_command(tmp_path, monkeypatch, taken, ended):
    whole = gpu_command.run_command

    def interrupted(command, folder):
        if command[0] == ended:
            raise KeyboardInterrupt
        return whole(command, folder)

    monkeypatch.setattr(gpu_command, "run_command", interrupted)
    with pytest.raises(KeyboardInterrupt):
        gpu(monkeypatch, "--on", "cpu", "--folder", tmp_path)
    monkeypatch.setattr(gpu_command, "run_command", whole)
    gpu(monkeypatch, "--on", "cpu", "--folder", tmp_path)
    assert taken == ["a", "b", "c"], "what failed has to wait for what was not tried"


def test_a_command_that_takes_too_long_is_ended_with_what_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_command, "LIMIT_S", 2)
    child = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(600)"
    start = "import subprocess, sys; print('begun', flush=True); "
    start += f"subprocess.run([sys.executable, '-c', {child!r}])"
    code, said, error = gpu_command.run_limited([sys.executable, "-c", start], tmp_path)
    assert (code, said) == (124, "begun\n") and "ended after 2 s" in error
    number = int((tmp_path / "pid").read_text())
    until = time.monotonic() + 20
    while psutil.pid_exists(number) and psutil.Process(number).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.05)


def test_no_command_is_started_late(tmp_path, monkeypatch, capsys, taken):
    clock = iter(range(0, 10_000, 50))
    monkeypatch.setattr(gpu_command.time, "monotonic", lambda: next(clock))
    gpu(monkeypatch, "--on", "cpu", "--folder", tmp_path, "--minutes", 1)
    assert taken == ["a"] and "one 2 and what follows: left for the next start" in capsys.readouterr().out


def test_a_signal_to_end_reaches_the_running_command(tmp_path, monkeypatch, taken):
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    monkeypatch.setattr(gpu_command, "run_command", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    try:
        with pytest.raises(KeyboardInterrupt):
            gpu(monkeypatch, "--on", "cpu", "--folder", tmp_path, "--only", "one")
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_results_file_is_of_one_machine(tmp_path, monkeypatch, capsys, taken):
    here = json.dumps({"on": "cpu", "accelerator": "cpu", "steps": {"one": {"status": "done"}}})
    for kept in ('{"on": "cuda", "accelerator": "NVIDIA H200", "steps": {}}', here):
        (tmp_path / "results.json").write_text(kept)
        with pytest.raises(SystemExit) as end:
            gpu(monkeypatch, "--on", "cpu", "--folder", tmp_path)
        assert end.value.code == 2 and "name another --folder" in capsys.readouterr().err
        assert (tmp_path / "results.json").read_text() == kept and not taken


@pytest.mark.parametrize(("flags", "said"), [((), "without a GPU"), (("--only", "none"), "--only none")])
def test_what_cannot_be_measured_is_refused(flags, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as end:
        gpu(monkeypatch, *flags, "--folder", tmp_path / "x")
    assert end.value.code == 2 and said in capsys.readouterr().err and not (tmp_path / "x").exists()


@pytest.mark.parametrize("tiny", [False, True])
@pytest.mark.parametrize("step", gpu_steps.STEPS, ids=lambda step: step.name)
def test_every_command_is_one_that_its_parser_and_the_resolver_take(step, tiny):
    for command in step.commands:
        script, *flags = gpu_steps.tiny(command) if tiny else command
        module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
        args = module.build_parser().parse_args(flags)
        given = []
        if script == gpu_steps.TRAIN:
            given = [(catalog.load(args.recipe, args.set, tiny=args.tiny, steps=args.steps), args.ds_config)]
        elif script == gpu_steps.MEASURE:
            given = [(spec.load(), spec.ds_config) for spec in step_command.specifications(args)]
            assert all(recipe.data.source == "packaged" and not recipe.data.blend for recipe, _ in given)
        for recipe, config in given:
            machine = replace(CPU, fp16="--emulate_fp16" in flags) if tiny else ANY_GPU
            assert args.tiny == tiny and (script == gpu_steps.TRAIN or args.blocks == (1 if tiny else 3))
            assert resolve(recipe, config, 1, machine).layout.world == 1


def test_nothing_is_fetched_from_the_hub_and_each_system_of_124m_is_measured_in_both_forms():
    speeds = {
        step.name: [each for each in step.commands if each[0] == gpu_steps.MEASURE]
        for step in gpu_steps.STEPS
    }
    parser = benchmark.build_parser()
    specs = {name: [*map(parser.parse_args, (each[1:] for each in of))] for name, of in speeds.items()}
    every = {
        name: [spec for args in of for spec in step_command.specifications(args)]
        for name, of in specs.items()
    }
    kinds = {spec.load().data.tokenizer.kind for of in every.values() for spec in of}
    assert kinds <= {"gpt2", "trained_bpe", "trained_wordpiece"}
    found = {(spec.system, spec.compiled) for spec in every["124m"] if spec.system != "rate"}
    assert found == {*product(("ours", "nano", "transformers"), (False, True))}


def test_the_first_step_has_every_stage_with_dropout_in_both_precisions():
    first = next(step for step in gpu_steps.STEPS if step.name == "first")
    for precision in ("fp16", "bf16"):
        wanted = {
            f"--set={each}"
            for each in (f"precision={precision}", "dropout.hidden=0.1", "dropout.attention=0.1")
        }
        stages = {
            command[command.index("--ds_config") + 1] for command in first.commands if wanted <= {*command}
        }
        assert stages >= {"zero0", "zero1", "zero2", "zero3", "zero3_offload"}


def test_a_published_row_keeps_its_model_and_its_micro_batch():
    parser, rows = benchmark.build_parser(), 0
    for step in (step for step in gpu_steps.STEPS if step.name in ("1.2b", "345m")):
        for command in step.commands:
            args = parser.parse_args(command[1:])
            row, own = catalog.load(args.recipe), catalog.load(args.recipe, args.set)
            assert own.batch.micro == own.batch.global_ == row.batch.micro
            assert own.model == row.model and own.sequence_length == row.sequence_length
            rows += 1
    assert rows == 9


def test_commands_start_in_an_empty_folder_and_say_what_came(tmp_path):
    (tmp_path / "x" / "1").mkdir(parents=True)
    (tmp_path / "x" / "1" / "old").touch()
    refused = ("launch/report.py", "nowhere", "--out", "report")
    place = gpu_command.empty_place(tmp_path / "x" / "1", ("launch/recipe.py", "--help"))
    fine, failed = (
        gpu_command.run_command(each, place) for each in (("launch/recipe.py", "--help"), refused)
    )
    assert fine["code"] == 0 and "examples:" in fine["said"] and "error" not in fine
    assert failed["code"] == 2 and "nowhere" in gpu_command.command_text(failed)
    assert [*(tmp_path / "x" / "1").iterdir()] == []


def test_numbers_of_a_training_and_of_a_measurement_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_command, "ROOT", tmp_path)
    (tmp_path / "launch").mkdir()
    for script, out in (("train.py", "run/result.json"), ("measure.py", "numbers.json")):
        write = f"path = pathlib.Path({out!r}); path.parent.mkdir(exist_ok=True); path.write_text('[7]')"
        (tmp_path / "launch" / script).write_text(f"import pathlib\n{write}\n")
    for number, words in enumerate(
        (("launch/train.py", "--out", "run"), ("launch/measure.py", "--out", "numbers.json"))
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert gpu_command.run_command(words, folder)["numbers"] == [7]


def test_what_a_command_said_last_begins_with_a_whole_line():
    assert gpu_command.last_lines("one\ntwo\nthree\n", 9) == "three"
    assert gpu_command.last_lines("one\ntwo\n", 9) == "one\ntwo"


def test_kernels_of_attention_are_found_by_name():
    found = measured_system.ATTENTION.search
    assert all(found(name) for name in ("flash_fwd", "aten::_softmax", "fmha_cutlass"))
    assert not found("aten::log_softmax")
