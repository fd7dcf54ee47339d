"""tools/benchmark.py step: what is counted and computed from given times, what is refused. Never speed."""

from __future__ import annotations

import itertools
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from launching import WORKERS, run_ranks

from launch.console import ends
from modeling import cost
from recipes import catalog
from tools import benchmark
from tools.benchmarks import results, step, systems
from tools.benchmarks.results import Column
from tools.benchmarks.specification import Specification
from tools.benchmarks.worker import Worker, WorkerFailed

TINY = ("step", "--tiny", "--blocks", "2", "--steps", "1", "--warm_up", "1")


class Counted:
    """A worker that has run: each step took the next of the given seconds."""

    def __init__(self, spec: Specification, log: Path) -> None:
        seconds = {"rate": 0.5, "ours": 2.0, "transformers": 5.0}.get(spec.system)
        if seconds is None:
            raise WorkerFailed("no memory")
        self.given = itertools.cycle((seconds, seconds / 2, 30.0))
        self.operations = 10**12 if spec.system == "rate" else 3 * 10**12

    def ask(self, method: str, *arguments: object) -> object:
        if method == "run":
            return [(next(self.given), 100, self.operations) for _ in range(arguments[0])]
        row = {"operation": "aten::mm", "seconds": 0.5, "calls": 3.0}
        return {"peak_bytes": 10**9, "graphs": {"graphs": 2, "breaks": {}}, "profile": [row]}[method]

    def end(self) -> None: ...


def measured(monkeypatch, *flags: str) -> list[dict]:
    """The rows of `benchmark.py step` by systems that only count."""
    monkeypatch.setattr(step, "Worker", Counted)
    args = benchmark.build_parser().parse_args(["step", "--tiny", "--blocks", "3", "--steps", "1", *flags])
    return [*step.rows(args, {})]


@pytest.mark.parametrize("apart", [(), ("--apart",)])
def test_shares_and_ratios_follow_from_the_medians(monkeypatch, capsys, tmp_path, apart):
    flags = ("--variants", "compiled", "--warm_up", "3", "--profile", str(tmp_path / "traces"), *apart)
    rate, ours, bare, nano, theirs = measured(monkeypatch, *flags)
    assert (rate["seconds"], rate["tflops"]) == (0.5, 2.0) and "share" not in rate
    assert (ours["seconds"], ours["fastest"], ours["tokens_per_s"], ours["tflops"]) == (2.0, 1.0, 50.0, 1.5)
    assert (ours["share"], ours["times"], ours["peak_bytes"], ours["graphs"]) == (0.75, 1.0, 10**9, 2)
    assert (theirs["seconds"], theirs["share"], theirs["times"]) == (5.0, 0.3, 2.5)
    assert bare["failed"] == nano["failed"] == "no memory" and "seconds" not in bare
    assert all(row["others"] >= 0 and row["start_s"] >= 0 for row in (rate, ours))
    said = capsys.readouterr().out
    assert "as nanoGPT, compiled: not measured: no memory" in said
    assert said.count("aten::mm") == 2 and "500.0" in said
    table = results.table([rate, ours, bare, theirs], step.TABLE)
    assert all(shown in table for shown in ("75.0%", "2.50x", "1.00x", "1.00")) and " - " in table


def test_a_cell_is_shown_in_its_unit():
    column = Column("GB", "bytes", "{:.2f}", 1e9)
    assert [column.cell(row) for row in ({"bytes": 1.5e9}, {"bytes": 0}, {})] == ["1.50", "0.00", "-"]


def test_padding_is_no_work():
    recipe = catalog.load("bert/sotu")
    batch = {
        "tokens": torch.zeros(2, 64),
        "lengths": torch.tensor([10, 64]),
        "weights": torch.tensor([[1.0, 0.0], [0.5, 0.5]]),
    }
    count = cost.exact_flops_per_step
    expected = count(recipe.model, 10, 1, predictions=1) + count(recipe.model, 64, 1, predictions=2)
    assert systems.work_of(recipe, batch) == (74, expected)
    gpt = catalog.load("default/sotu")
    work = systems.work_of(gpt, {"tokens": torch.zeros(3, 256)})
    assert work == (768, count(gpt.model, 256, 3))


def test_transformers_get_the_same_tokens_to_predict():
    batch = {
        "tokens": torch.arange(16).view(1, 16),
        "token_types": torch.ones(1, 16).long(),
        "lengths": torch.tensor([5]),
        "positions": torch.tensor([[3, 1, 0]]),
        "labels": torch.tensor([[7, 8, 9]]),
        "weights": torch.tensor([[0.5, 0.5, 0.0]]),
        "sentence_labels": torch.tensor([1]),
        "sentence_weights": torch.tensor([1.0]),
    }
    given = systems.transformers_inputs(batch, torch.device("cpu"))
    ignored = -100
    assert given["labels"].tolist() == [[ignored, 8, ignored, 7, *[ignored] * 4]], "cut after 8 of 16 columns"
    assert given["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 0, 0, 0]]
    assert given["next_sentence_label"].tolist() == [1] and given["token_type_ids"].shape == (1, 8)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    out = tmp_path_factory.mktemp("systems") / "found.json"
    done = run_ranks(1, WORKERS / "measured_systems.py", out, timeout=200)
    assert done.returncode == 0, done.stdout
    return json.loads(out.read_text())


@pytest.mark.long
def test_every_system_trains_on_the_same_work(found):
    ((seconds, tokens, operations),) = found["rate"]
    assert seconds > 0 and (tokens, operations) == (0, 2 * 256**3)
    for recipe in ("", " bert"):
        same = found[f"ours{recipe}"]["work"]
        assert found[f"transformers{recipe}"]["work"] == found[f"bare{recipe}"]["work"] == same
        # The same model, weights, batches, schedule and optimizer.
        assert found[f"ours{recipe}"]["losses"] == pytest.approx(found[f"bare{recipe}"]["losses"], abs=1e-4)
    for name in ("ours", "nano", "transformers", "transformers zero3"):
        assert found[name]["losses"][0] == pytest.approx(math.log(509), abs=0.5)
        assert found[name]["losses"][-1] < found[name]["losses"][0]


@pytest.mark.long
def test_systems_take_turns_in_processes_of_their_own(monkeypatch, capsys, tmp_path):
    """Rows are in the file, also of one that fails; ours trains and is profiled."""
    flags = ["--systems", "ours", "nano", "--variants", "eager", "--profile", str(tmp_path / "traces")]
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *TINY, *flags, "--out", str(tmp_path / "step.json")])
    benchmark.main()
    rate, ours, nano = json.loads((tmp_path / "step.json").read_text())["rows"]
    assert len(ours["steps"]) == 2 and ours["peak_bytes"] > 10**8 and rate["tflops"] > 0
    assert [tokens for _, tokens, _ in ours["steps"]] == [512, 512] and nano["seconds"] > 0
    assert ours["profile"][0]["seconds"] > 0 and len([*(tmp_path / "traces").iterdir()]) == 2
    assert "ours, zero1, eager: ready" in capsys.readouterr().out


@pytest.mark.long
def test_a_process_that_fails_or_dies_says_its_last_words(tmp_path):
    odd = Specification("odd", "no such system", "default/sotu", (), True, "zero1")
    with pytest.raises(WorkerFailed, match="KeyError: 'no such system'"):
        Worker(odd, tmp_path / "odd.txt")
    worker = Worker(replace(odd, system="ours"), tmp_path / "ours.txt")
    (tmp_path / "ours.txt").write_text("the last words")
    worker.process.kill()
    with pytest.raises(WorkerFailed, match="the last words"):
        worker.ask("run", 1)
    worker.end()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--ds_config", "zero9"), "zero9"),
        (("--set", "model.heads=7"), "model.heads"),
        (("--recipe", "jean_zay/none"), "jean_zay"),
        (("--blocks", "0"), "--blocks"),
        (("--out", "README.md"), "--out README.md exists already"),
    ],
)
def test_what_cannot_be_measured_is_refused_first(flags, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "step", *flags])
    monkeypatch.setattr(step, "Worker", lambda *_: pytest.fail("started"))
    with pytest.raises(SystemExit) as end:
        ends.run(benchmark.main)
    assert end.value.code == 2 and said in capsys.readouterr().err
