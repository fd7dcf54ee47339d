"""launch/benchmark.py gpu: its walk, what it keeps and takes up again, its goals. No GPU is needed."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from ds_configs.plan import ANY_GPU
from ds_configs.resolver import resolve
from launch import benchmark
from launch.experiments.benchmarks import gpu_command, gpu_steps, measured_system, step_speed
from launch.experiments.benchmarks.gpu_steps import Context, Goal, GpuCase, Step, StepOutcome
from launch.experiments.benchmarks.step_speed import Measurement
from launch.experiments.benchmarks.turns import Specification
from recipes import catalog


def gpu(monkeypatch, *flags: object) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "gpu", *map(str, flags)])
    benchmark.main()


@pytest.fixture
def taken(monkeypatch) -> list[str]:
    """Two steps in the place of the real ones; the names of those that are taken."""
    names: list[str] = []

    def step(name: str, end=None) -> Step:
        def run(context: Context) -> StepOutcome:
            names.append(name)
            if end is not None:
                raise end
            return StepOutcome(
                {"number": 1}, f"said by {name}", (Goal("speed", 2, 3.0), Goal("share", 0.5, None))
            )

        return Step(name, f"title of {name}", run)

    steps = (step("one"), step("two", KeyError("broken")))
    monkeypatch.setattr(gpu_steps, "STEPS", steps)
    return names


def test_results_are_kept_step_by_step_and_taken_up_again(tmp_path, monkeypatch, capsys, taken):
    folder = ("--on", "cpu", "--folder", tmp_path / "walk")
    gpu(monkeypatch, *folder, "--only", "one")
    gpu(monkeypatch, *folder)
    assert taken == ["one", "two"], "the first is done"
    kept = json.loads((tmp_path / "walk/results.json").read_text())
    assert [step["status"] for step in kept["steps"].values()] == ["done", "failed"]
    assert kept["steps"]["one"]["found"] == {"number": 1} and kept["steps"]["one"]["hardware"]["versions"]
    text = (tmp_path / "walk/results.txt").read_text()
    for said in ("said by one", "KeyError: 'broken'", "title of two"):
        assert said in text
    assert "goal: speed at least 2: not measured" in text, "in a walk"
    assert str(Goal("speed", 2, 3.0)) == "goal: speed at least 2: measured 3, reached"
    assert str(Goal("speed", 2, 1.0)).endswith("missed")
    gpu(monkeypatch, *folder, "--only", "two", "--again", "one")
    assert taken[2:] == ["one", "two"], "what failed is tried again"
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


def measuring(monkeypatch, seconds: dict[str, float] = {}) -> list[Specification]:  # noqa: B006
    """The specifications that steps measure, none of which is started: a second each, or as given."""
    found: list[Specification] = []

    def measure(specs, pace, say, profile=None):
        found.extend(specs)
        return [
            Measurement(spec, rates=[{"square": 1e12, "products": 1e12}])
            if spec.system == "rate"
            else Measurement(spec, [seconds.get(spec.name, 1.0)] * 3, [1] * 3, [10**12] * 3, peak_bytes=10**9)
            for spec in specs
        ]

    monkeypatch.setattr(step_speed, "measure", measure)
    return found


@pytest.mark.parametrize("walks", [False, True])
def test_every_step_asks_for_what_can_be_trained(walks, tmp_path, monkeypatch):
    specs = measuring(monkeypatch)
    monkeypatch.setattr(gpu_steps, "facts_of", lambda *_: {})
    for step in gpu_steps.STEPS:
        if step.name not in ("first", "resumed", "rates", "runs", "repeat", "layouts"):  # they start commands
            step.run(Context(walks, tmp_path, lambda text: None))
    assert len(specs) > (55 if not walks else 20)
    assert walks == any(spec.emulate_fp16 for spec in specs)
    for spec in specs:
        assert spec.tiny == walks
        recipe = spec.load()
        assert recipe.data.source == "packaged" and not recipe.data.blend
        layout = resolve(recipe, spec.ds_config, spec.processes, ANY_GPU).layout
        assert layout.world == spec.processes


def test_a_published_row_keeps_its_micro_batch_when_it_is_alone():
    for name in (*gpu_steps.MEDIUM, gpu_steps.LARGE):
        row, own = catalog.load(name), GpuCase("x", name).specification(tiny=False).load()
        assert own.batch.micro == own.batch.global_ == row.batch.micro
        assert own.parallel.dp == 1 and own.model == row.model and own.sequence_length == row.sequence_length


def test_goals_are_judged_by_the_right_rows(tmp_path, monkeypatch):
    seconds = {"bf16, compiled": 2.0, "bf16, transformers": 3.0}
    measuring(monkeypatch, seconds | {"the row, compiled": 4.0, "the row, transformers": 4.0})
    (row,) = (step for step in gpu_steps.STEPS if step.name == "1.2b")
    outcome = row.run(Context(False, tmp_path, lambda text: None))
    share, with_recomputed, times, times_row = (goal.measured for goal in outcome.goals)
    assert (share, times, times_row) == (0.5, 1.5, 1.0)
    assert 1.3 * 0.25 < with_recomputed < 1.34 * 0.25, "a third more, but for the logits"
    assert outcome.found["facts"]["bf16, eager"]["predicted_gb"] > 10


def test_commands_are_run_again_and_say_what_came(tmp_path):
    context = Context(True, tmp_path, lambda text: None)
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "old").touch()
    out = ["launch/recipe.py", "list", "--out", str(tmp_path / "x" / "run")]
    found = gpu_steps.commands(context, "x", [("fine", ["launch/recipe.py", "--help"]), ("refused", out)])
    codes = {name: each["code"] for name, each in found.found["commands"].items()}
    assert codes == {"fine": 0, "refused": 2} and not (tmp_path / "x").exists()
    assert "examples:" in found.said and "--out" in found.found["commands"]["refused"]["said"]


def test_kernels_of_attention_are_found_by_name():
    found = measured_system.ATTENTION.search
    assert all(found(name) for name in ("flash_fwd", "aten::_softmax", "fmha_cutlass"))
    assert not found("aten::log_softmax")
