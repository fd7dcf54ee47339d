"""tools/benchmark.py step: what is counted and computed from given times, what is refused. Never speed."""

from __future__ import annotations

import json
import math
import sys

import pytest
import torch
from launching import WORKERS, run_ranks

from modeling import cost
from recipes import catalog
from tools import benchmark
from tools.benchmarks import measured_system, step_speed, step_text, systems
from tools.benchmarks.specification import Specification
from tools.benchmarks.step_speed import Measurement, Pace
from tools.benchmarks.turns import TurnWorker, WorkerFailed


def measured(name: str, seconds: list[float], **more) -> Measurement:
    found = Measurement(Specification(name, "ours", "default/sotu"), seconds, **more)
    found.tokens, found.operations = [100] * len(seconds), [3 * 10**12] * len(seconds)
    return found


GIVEN = [
    measured("ours", [2.0, 1.0, 30.0], peak_bytes=10**9, phases=[{"step": 2.0, "forward": 0.5}]),
    measured(
        "theirs",
        [6.0, 4.0, 5.0],
        others=[0.25],
        graphs={"graphs": 2, "breaks": {"a call": 1}},
        profile={"top": [("aten::mm", 0.5, 3.0)], "attention": ["flash_fwd"]},
    ),
    Measurement(Specification("broken", "nano", "default/sotu"), failed="no memory"),
    Measurement(
        Specification("rate", "rate", "default/sotu"),
        rates=[{"square": s, "products": s / 2} for s in (1e12, 3e12, 99e12)],
    ),
]


def test_shares_and_ratios_follow_from_the_medians():
    ours, theirs = step_speed.speed_rows(GIVEN)
    assert (ours.seconds, ours.fastest, ours.tokens_per_s, ours.tflops) == (2.0, 1.0, 50.0, 1.5)
    assert (ours.share, ours.product_share, ours.times, ours.peak_bytes) == (0.5, 1.0, 1.0, 10**9)
    assert (theirs.seconds, theirs.share, theirs.times) == (5.0, 0.2, 2.5)
    without = step_speed.speed_rows(GIVEN[:2])
    assert [row.share for row in without] == [None, None] and step_speed.speed_rows([]) == []


def test_the_tables_and_the_picture_show_them(tmp_path):
    rows = step_speed.speed_rows(GIVEN)
    table = step_text.speeds(rows)
    assert all(said in table for said in ("50.0%", "100.0%", "2.50x", "1.00")) and "broken" not in table
    assert "3.000 TFLOP/s in large square products (1.000 to 99.000 in 3 blocks)" in step_text.rates(GIVEN)
    assert "500.0" in step_text.parts(GIVEN) and "1500.0" in step_text.parts(GIVEN), "the rest of two seconds"
    assert "25% of the cores" in step_text.disturbance(GIVEN)
    profile = step_text.profile_tables(GIVEN)
    assert "theirs" in profile and "500.0" in profile and "attention: flash_fwd" in profile
    assert step_text.graphs(GIVEN[1]) == ["2 graphs", "a call"] and step_text.graphs(GIVEN[0]) == []
    step_text.draw(rows, tmp_path / "x.png", "title")
    assert (tmp_path / "x.png").stat().st_size > 5000


def test_padding_is_no_work():
    recipe = catalog.load("bert/sotu")
    batch = {
        "tokens": torch.zeros(2, 64),
        "lengths": torch.tensor([10, 64]),
        "weights": torch.tensor([[1.0, 0.0], [0.5, 0.5]]),
    }
    count = cost.exact_flops_per_step
    expected = count(recipe.model, 10, 1, predictions=1) + count(recipe.model, 64, 1, predictions=2)
    assert measured_system.work_of(recipe, batch) == (74, expected)
    gpt = catalog.load("default/sotu")
    work = measured_system.work_of(gpt, {"tokens": torch.zeros(3, 256)})
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
    assert found["rate"]["square"] > 0 and found["rate"]["products"] > 0
    for recipe in ("", " bert"):
        same = found[f"ours{recipe}"]["work"]
        assert found[f"transformers{recipe}"]["work"] == found[f"bare{recipe}"]["work"] == same
        # The same model, weights, batches, schedule and optimizer.
        assert found[f"ours{recipe}"]["losses"] == pytest.approx(found[f"bare{recipe}"]["losses"], abs=1e-4)
    for name in ("ours", "nano", "transformers", "transformers zero3"):
        assert found[name]["losses"][0] == pytest.approx(math.log(509), abs=0.5)
        assert found[name]["losses"][-1] < found[name]["losses"][0]


@pytest.mark.long
def test_the_parts_of_a_step_are_timed(found):
    for name in ("ours", "bare", "nano", "transformers"):
        (phases,) = found[name]["phases"]
        inside = [phases[part] for part in ("data", "forward", "backward", "optimizer")]
        assert min(inside) > 0 and sum(inside) <= phases["step"] + 1e-9
        assert found[name]["profile"]["top"][0][1] > 0
    for name in ("ours", "bare"):
        (phases,) = found[name]["phases"]
        assert min(phases[part] for part in ("copies", "norm", "update", "rounding")) > 0


@pytest.mark.long
def test_systems_take_turns_in_processes_of_their_own(monkeypatch):
    ours = Specification("ours", "ours", "default/sotu", (), True, "zero1")
    broken = Specification("broken", "nano", "bert/sotu", (), True, "zero1")
    said = []
    first, second = step_speed.measure([ours, broken], Pace(2, 1, 1), said.append)
    assert len(first.seconds) == 2 and first.peak_bytes > 10**8 and len(first.others) == 2
    assert first.tokens == [512, 512] and first.failed is None and first.phases[0]["forward"] > 0
    assert "no plain loop for BERT" in second.failed and not second.seconds
    assert 0 < step_speed.launch_seconds(ours).first_step < 100
    assert said[:2] == ["ours: ready", f"broken: not measured: {second.failed}"]


@pytest.mark.long
def test_a_rank_that_fails_or_dies_says_its_last_words_and_ends_the_others(tmp_path):
    odd = Specification("odd", "no such system", "default/sotu", (), True, "zero1")
    with pytest.raises(WorkerFailed, match="KeyError: 'no such system'"):
        TurnWorker(odd, tmp_path / "odd.txt")
    two = Specification("two", "ours", "default/sotu", ("parallel.dp=2",), True, "zero1", processes=2)
    worker = TurnWorker(two, tmp_path / "two.txt")
    ((_, tokens, _),) = worker.ask("run", 1)
    assert tokens == 512, "of both ranks"
    (tmp_path / "two.txt").write_text("the last words")
    one, other = worker._processes
    one.kill()
    with pytest.raises(WorkerFailed, match="the last words"):
        worker.ask("run", 1)
    assert not other.is_alive()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--ds_config", "zero9"), "zero9"),
        (("--set", "model.heads=7"), "model.heads"),
        (("--plot", "step.txt"), ".png"),
        (("--recipe", "jean_zay/none"), "jean_zay"),
        (("--blocks", "0"), "--blocks"),
        (("--out", "README.md"), "--out README.md exists already"),
        (("--no_launch", "--systems", "nano"), "--no_launch without --systems ours"),
    ],
)
def test_what_cannot_be_measured_is_refused_first(flags, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "step", *flags])
    monkeypatch.setattr(step_speed, "measure", lambda *_: pytest.fail("started"))
    with pytest.raises(SystemExit) as end:
        benchmark.main()
    assert end.value.code == 2 and said in capsys.readouterr().err
