"""launch/benchmark.py gpu: its walk, what it keeps and takes up again, its goals. No GPU is needed."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from ds_configs.plan import ANY_GPU
from ds_configs.resolver import resolve
from launch import benchmark
from launch.experiments.benchmarks import gpu_command, gpu_context, gpu_kernels, gpu_steps, step_speed
from launch.experiments.benchmarks.gpu_context import CannotRunHere, Context, Goal, Outcome
from launch.experiments.benchmarks.gpu_steps import Step
from launch.experiments.benchmarks.step_speed import Measured
from recipes import catalog


def gpu(monkeypatch, *flags: object) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "gpu", *map(str, flags)])
    benchmark.main()


@pytest.fixture
def taken(monkeypatch) -> list[str]:
    """Three steps in the place of the real ones; the names of those that are taken."""
    names: list[str] = []

    def step(name: str, end=None) -> Step:
        def run(context: Context) -> Outcome:
            names.append(name)
            if end is not None:
                raise end
            return Outcome(
                {"number": 1}, f"said by {name}", (Goal("speed", 2, 3.0), Goal("share", 0.5, None))
            )

        return Step(name, f"title of {name}", run)

    steps = (step("one"), step("two", CannotRunHere("no such kernel")), step("three", KeyError("broken")))
    monkeypatch.setattr(gpu_steps, "STEPS", steps)
    return names


def test_results_are_kept_step_by_step_and_taken_up_again(tmp_path, monkeypatch, capsys, taken):
    folder = ("--on", "cpu", "--folder", tmp_path / "walk")
    gpu(monkeypatch, *folder, "--only", "one")
    gpu(monkeypatch, *folder)
    assert taken == ["one", "two", "three"], "the first is done; those that failed are tried again"
    kept = json.loads((tmp_path / "walk/results.json").read_text())
    assert [step["status"] for step in kept["steps"].values()] == ["done", "cannot run here", "failed"]
    assert kept["steps"]["one"]["found"] == {"number": 1} and kept["steps"]["one"]["hardware"]["versions"]
    text = (tmp_path / "walk/results.txt").read_text()
    for said in ("said by one", "no such kernel", "KeyError: 'broken'", "title of two"):
        assert said in text
    assert "goal: speed at least 2: not measured" in text, "in a walk"
    assert str(Goal("speed", 2, 3.0)) == "goal: speed at least 2: measured 3, reached"
    assert str(Goal("speed", 2, 1.0)).endswith("missed")
    gpu(monkeypatch, *folder, "--only", "two", "--again", "one")
    assert taken[3:] == ["one", "two"]
    assert "one: done before" in capsys.readouterr().out


def test_no_step_is_started_late(tmp_path, monkeypatch, capsys, taken):
    clock = iter(range(0, 10_000, 50))
    monkeypatch.setattr(gpu_command.time, "monotonic", lambda: next(clock))
    gpu(monkeypatch, "--on", "cpu", "--folder", tmp_path, "--minutes", 2)
    assert taken == ["one"] and "left for the next start" in capsys.readouterr().out


def test_a_results_file_is_of_one_machine(tmp_path, monkeypatch, capsys, taken):
    (tmp_path / "results.json").write_text('{"on": "cuda", "accelerator": "NVIDIA H200", "steps": {}}')
    with pytest.raises(SystemExit) as end:
        gpu(monkeypatch, "--on", "cpu", "--folder", tmp_path)
    assert end.value.code == 2 and "name another --folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [((), "without a GPU"), (("--only", "none"), "--only none"), (("--again", "none"), "--again none")],
)
def test_what_cannot_be_measured_is_refused(flags, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as end:
        gpu(monkeypatch, *flags, "--folder", tmp_path / "x")
    assert end.value.code == 2 and said in capsys.readouterr().err and not (tmp_path / "x").exists()


def planned(context: Context, monkeypatch) -> list:
    """Every specification of every step that measures some, without measuring them."""
    found = []

    def measure(specs, pace, say, profile=None):
        found.extend(specs)
        return [
            Measured(spec, [1.0], [1], [10**12], peak_bytes=10**9) for spec in specs if spec.system != "rate"
        ]

    class NoWorker:
        def __init__(self, spec, folder):
            found.append(spec)

        def ask(self, *command):
            return {"zeros": 0.5, "run": [(1.0, 1, 1)]}.get(command[0], {"peak_bytes": 1})

        def end(self): ...

    monkeypatch.setattr(step_speed, "measure", measure)
    monkeypatch.setattr(gpu_steps, "Worker", NoWorker)
    for step in gpu_steps.STEPS:
        if step.name not in ("rates", "runs", "operations", "repeat", "layouts"):  # they start commands
            step.run(context)
    return found


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_step_asks_for_what_can_be_trained(device, tmp_path, monkeypatch):
    context = Context(device, tmp_path, lambda text: None)
    specs = planned(context, monkeypatch)
    assert len(specs) > (60 if device == "cuda" else 20)
    for spec in specs:
        assert spec.tiny == (device == "cpu")
        recipe = spec.load()
        assert recipe.data.source == "packaged" and not recipe.data.blend
        layout = resolve(recipe, spec.ds_config, spec.processes, ANY_GPU).layout
        assert layout.world == spec.processes


def test_a_published_row_keeps_its_micro_batch_when_it_is_alone(tmp_path):
    alone = Context("cuda", tmp_path, print).alone
    for name in (*gpu_steps.MEDIUM, gpu_steps.LARGE):
        row, own = catalog.load(name), catalog.load(name, alone(name))
        assert own.batch.micro == own.batch.global_ == row.batch.micro
        assert own.parallel.dp == 1 and own.model == row.model and own.sequence_length == row.sequence_length


def test_goals_are_judged_by_the_right_rows(tmp_path, monkeypatch):
    seconds = {
        "bf16, compiled": 2.0,
        "bf16, transformers": 3.0,
        "the row, compiled": 4.0,
        "the row, transformers": 4.0,
    }

    def measure(specs, pace, say, profile=None):
        rate = [{"square": 1e12, "products": 1e12}]
        return [
            Measured(s, [seconds.get(s.name, 1.0)] * 3, [1] * 3, [10**12] * 3) if s.system != "rate"
            else Measured(s, rates=rate)
            for s in specs
        ]  # fmt: skip

    monkeypatch.setattr(step_speed, "measure", measure)
    goals = gpu_steps.row_1_2b(Context("cuda", tmp_path, lambda text: None)).goals
    share, with_recomputed, times, times_row = (goal.measured for goal in goals)
    assert (share, times, times_row) == (0.5, 1.5, 1.0)
    assert 1.3 * 0.25 < with_recomputed < 1.34 * 0.25, "a third more, but for the logits"


def test_single_operations_are_measured(monkeypatch):
    monkeypatch.setattr(gpu_kernels, "REPEATS", 1)
    layers = gpu_kernels.output_layer("cpu")
    assert all(found["ms"] > 0 for found in layers.values()) and "512 columns" in layers
    found = gpu_kernels.optimizers("cpu")
    assert found["flat, fused"]["ms"] > 0 and "ms" in found["per parameter, foreach"]
    assert any("attention" in name or "softmax" in name for name in gpu_kernels.kernels(
        lambda: torch.nn.functional.scaled_dot_product_attention(*[torch.ones(1, 1, 4, 8)] * 3)
    ))  # fmt: skip


def test_a_walk_is_small(tmp_path):
    walk, real = (Context(device, tmp_path, print) for device in ("cpu", "cuda"))
    assert walk.few((1, 2, 3)) == (1, 2) and real.few((1, 2, 3)) == (1, 2, 3)
    assert walk.spec("x", "default/sotu", "precision=fp16").emulate_fp16
    assert not real.spec("x", "default/sotu", "precision=fp16").emulate_fp16
    assert gpu_context.WALK.steps == 1
