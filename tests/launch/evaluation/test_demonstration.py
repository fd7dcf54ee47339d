"""The demonstration: what it runs and in which order, what it makes of the results, and its comparison."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from tasked import save_bert, sentences, write_lines

from data.tasks.shipped import Fold
from launch.evaluation import demonstration
from launch.evaluation.demonstration import Command, Demonstration, Measured, Results, RunFailed


@pytest.fixture
def demo(tmp_path):
    said: list[str] = []
    return Demonstration(tmp_path, tmp_path / "minilm", ("a", "b"), 2, said.append), said


def folds():
    labels = (1, 1, 0), (0, 1), (1,)
    return [Fold(Path(f"train{i}"), Path(f"dev{i}"), each) for i, each in enumerate(labels)]


def test_the_majority_is_that_of_the_other_folds():
    """Of the first fold the others have 0, 1, 1; of the second 1, 1, 0, 1; of the third 1, 1, 0, 0, 1."""
    assert demonstration.majority(folds()).tolist() == [[1, 1, 0, 0, 1, 1]]


def test_an_accuracy_is_that_of_all_seeds_and_its_error_that_of_the_examples():
    """Of four examples two seeds have right 2, 1, 1 and 0: shares of 1, 1/2, 1/2 and 0."""
    found = demonstration.mean("sst2", "random", np.array([[1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 1.0, 0.0]]))
    assert (found.value, found.examples, found.seeds) == (0.5, 4, 2)
    assert found.error == pytest.approx(math.sqrt((0.25 + 0.25) / 4 / 4))


def test_every_fold_and_seed_starts_from_every_start_with_the_same_settings(demo):
    given = dict.fromkeys(demonstration.TASK_SETTINGS, folds())
    commands = [*demo[0].of_bert(given), *demo[0].of_minilm(given)]
    by_name = {command.name: " ".join(command.words) for command in commands}
    seeds = sum(how.seeds for how in demonstration.TASK_SETTINGS.values())
    assert len(by_name) == len(commands) == 3 * (2 * seeds + 2 + 1)
    ours, scratch = by_name["sst2-1-pretrained-1236"], by_name["sst2-1-random-1236"]
    assert scratch.replace(" --from_scratch", "").replace("-random", "-pretrained") == ours
    assert "--train train1 --dev dev1" in ours and "--init " + str(demo[0].out / "bert") in ours
    ours, theirs = by_name["sst2-2-minilm-1234"], by_name["sst2-2-transformers"]
    for value in ("train2", "dev2", str(demo[0].minilm), "0.0001", "1234", " 64 ", " 32 ", " 3 "):
        assert value in ours and value in theirs
    assert "--from_scratch" in by_name["sst2-2-minilm-random-1234"]


def test_accuracies_are_those_of_all_examples_and_all_starts_have_a_line(demo, monkeypatch):
    """Of each start, seed s has every example right from the one at its first + s on."""
    settings = demonstration.TASK_SETTINGS["sst2"]
    monkeypatch.setattr(demonstration, "TASK_SETTINGS", {"sst2": settings})
    out = demo[0].out
    for start, perplexity in (("random", 1e4), ("pretrained", 99.0)):
        figures = {"perplexity_per_token": perplexity, "accuracy": 0.25}
        (out / f"lambada-{start}.json").write_text(json.dumps({"figures": figures, "examples": 4}))
    firsts = {"random": 3, "pretrained": 0, "minilm-random": 6, "minilm": 1}
    for start, first in firsts.items():
        for seed in range(3):
            number = 0
            for place, fold in enumerate(folds()):
                shown = [label ^ (number + at < first + seed) for at, label in enumerate(fold.labels)]
                number += len(shown)
                dev = out / f"sst2-{place}-{start}-{1234 + seed}" / "predictions" / "dev"
                dev.mkdir(parents=True)
                np.save(dev / "logits.npy", np.eye(2, dtype=np.float32)[shown])
    for place, fold in enumerate(folds()):
        right = [False] + [True] * (len(fold.labels) - 1)
        (out / f"sst2-{place}-transformers.json").write_text(json.dumps({"right": right}))
    measured = (*demo[0].lambada(), *demo[0].tasks({"sst2": folds()}))
    values = {(each.task, each.start, each.metric): each.value for each in measured}
    assert values["sst2", "random", "accuracy"] == pytest.approx((3 + 2 + 1) / 18)
    assert values["sst2", "pretrained", "accuracy"] == pytest.approx((6 + 5 + 4) / 18)
    assert values["sst2", "gain", "accuracy"] == pytest.approx(9 / 18)
    assert values["sst2", "minilm", "accuracy"] == pytest.approx(5 / 6)
    assert values["sst2", "minilm-random", "accuracy"] == 0
    assert values["sst2", "transformers", "accuracy"] == 3 / 6
    assert values["lambada", "pretrained", "perplexity per token"] == 99.0
    shown = demonstration.text(Results(measured, "two cores", 90.0), 110)
    gain = next(each for each in measured if each.start == "gain")
    assert gain.error == pytest.approx(np.std([1 / 3, 2 / 3, 1, 2 / 3, 1 / 3, 0]) / math.sqrt(6))
    for expected in (
        "10,000",
        "83.3 ± 15.2 %",
        "+50.0 ± ",
        "SST-2",
        "transformers' Trainer",
        "2 minutes on two cores",
    ):
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
    assert len(found["right"]) == 9 and {*found["right"]} <= {True, False}
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
