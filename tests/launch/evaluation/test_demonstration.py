"""The demonstration: what it runs and in which order, what it makes of the results, and its comparison."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from tasked import save_bert, sentences, write_lines

from data.tasks.shipped import Fold
from launch.evaluation import demonstration
from launch.evaluation.demonstration import Command, Demonstration, Measured, Results, RunFailed


@pytest.fixture
def demo(tmp_path):
    said: list[str] = []
    return Demonstration(tmp_path, tmp_path / "minilm", 2, said.append), said


def folds():
    labels = (1, 1, 0), (0, 1), (1,)
    return [Fold(Path(f"train{i}"), Path(f"dev{i}"), each) for i, each in enumerate(labels)]


def test_the_majority_is_that_of_the_other_folds():
    """Of the first fold the others have 0, 1, 1; of the second 1, 1, 0, 1; of the third 1, 1, 0, 0, 1."""
    found = demonstration.majority("sst2", folds())
    assert (found.value, found.examples) == (pytest.approx(4 / 6), 6)
    assert found.error == pytest.approx(math.sqrt(4 / 6 * 2 / 6 / 6))


def test_every_fold_starts_from_every_start_with_the_same_settings(demo):
    commands = list(demo[0].finetuning(dict.fromkeys(demonstration.TASK_SETTINGS, folds())))
    by_name = {command.name: " ".join(command.words) for command in commands}
    assert len(by_name) == len(commands) == 3 * (3 * 2 + 2 + 2)
    ours, scratch = by_name["sst2-1-pretrained"], by_name["sst2-1-random"]
    assert scratch.replace(" --from_scratch", "").replace("-random", "-pretrained") == ours
    assert "--train train1 --dev dev1" in ours and "--init " + str(demo[0].out / "bert") in ours
    ours, theirs = by_name["sst2-2-minilm"], by_name["sst2-2-transformers"]
    for value in ("train2", "dev2", str(demo[0].minilm), "0.0001", "1234", " 64 ", " 32 ", " 3 "):
        assert value in ours and value in theirs


def test_shares_are_those_of_all_examples_and_all_starts_have_a_line(demo, monkeypatch):
    monkeypatch.setattr(demonstration, "TASK_SETTINGS", {"sst2": demonstration.TASK_SETTINGS["sst2"]})
    out = demo[0].out
    for start, perplexity in (("random", 1e4), ("pretrained", 99.0)):
        figures = {"perplexity_per_token": perplexity, "accuracy": 0.25}
        (out / f"lambada-{start}.json").write_text(json.dumps({"figures": figures, "examples": 4}))
    chance, right = (0.5, 0.5, 0.0), (1.0, 0.5, 1.0)
    for start, shares in zip(demonstration.starts_of("sst2"), (chance, right, chance, right), strict=True):
        for number, share in enumerate(shares):
            score = {"metrics": {"accuracy": share}, "examples": len(folds()[number].labels)}
            path = out / f"sst2-{number}-{start}" / "result.json"
            path.parent.mkdir()
            path.write_text(json.dumps({"task_scores": [score]}))
    (out / "sst2-0-transformers.json").write_text(json.dumps({"accuracy": 0.75, "examples": 4}))
    measured = (*demo[0].lambada(), *demo[0].tasks({"sst2": folds()}))
    values = {(each.task, each.start, each.metric): each.value for each in measured}
    assert values["sst2", "random", "accuracy"] == pytest.approx((1.5 + 1.0) / 6)
    assert values["sst2", "pretrained", "accuracy"] == pytest.approx((3 + 1 + 1) / 6)
    assert values["sst2", "transformers", "accuracy"] == 0.75
    assert values["lambada", "pretrained", "perplexity per token"] == 99.0
    shown = demonstration.text(Results(measured, "two cores", 90.0), 110)
    for expected in ("10,000", "83.3 ± 15.2 %", "SST-2", "transformers' Trainer", "2 minutes on two cores"):
        assert expected in shown, shown


def test_what_is_done_is_not_made_again_and_what_failed_is_named(demo, tmp_path):
    """By the comparison itself: transformers' Trainer on a tiny BERT, whose step count is that of ours."""
    model = save_bert(tmp_path / "bert")
    train, dev = (write_lines(tmp_path / f"{n}.jsonl", sentences(n)) for n in (20, 9))
    out = tmp_path / "theirs.json"
    words = ("-m", "launch.evaluation.transformers_finetuning", *map(str, (model, train, dev, out)))
    command = Command("theirs", (*words, "1", "8", "1e-3", "32", "1"), out)
    assert demo[0].make(command, 2).startswith("theirs: ")
    found = json.loads(out.read_text())
    assert found["examples"] == 9 and 9 * found["accuracy"] == pytest.approx(round(9 * found["accuracy"]))
    assert demo[0].make(command, 2) == "theirs: made before"
    broken = Command("broken", ("-c", "print('no room'); raise SystemExit(3)"), tmp_path / "nothing.json")
    with pytest.raises(RunFailed, match=r"broken ended with code 3: .*broken\.log"):
        demo[0].make(broken, 1)
    assert "no room" in (tmp_path / "broken.log").read_text()
    (tmp_path / "half.json").write_text('{"status": "interrupted"}')
    assert Command("half", (), tmp_path / "half.json").found() is None


def test_a_figure_without_an_error_is_no_share():
    results = Results((Measured("lambada", "random", "perplexity per token", 12345.6, 3),), "here", 0.0)
    assert "12,346" in demonstration.text(results, None) and "%" not in demonstration.text(results, None)
