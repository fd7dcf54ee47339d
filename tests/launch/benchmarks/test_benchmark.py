"""launch/benchmark.py: what is measured is the same work for all, and the arithmetic of the ratios.

Never speed.
"""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

import pytest
from launching import ROOT, run

from data.vocabularies.trained import train_bpe
from launch import benchmark
from launch.benchmarks import loader_speed, preparation_speed, tokenizing_teams
from launch.benchmarks.benchmark_text import varied_copies
from launch.benchmarks.preparation_speed import Steps, StepSpeed, Whole
from launch.benchmarks.tokenizing_teams import Turn, Way, compare, joined, ways

SENTENCE = "The senate met in the afternoon and voted on bill number {} that the house had sent to it. "


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """60 English documents, all different."""
    path = tmp_path_factory.mktemp("corpus") / "in.jsonl"
    texts = ["".join(SENTENCE.format(100 * k + n) for n in range(40)) for k in range(60)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def command(*flags: object):
    return run([sys.executable, str(ROOT / "launch/benchmark.py"), *map(str, flags)], timeout=180)


def test_the_whole_command(corpus, tmp_path):
    """Structure and consistency of what it writes, for a GPT."""
    out = tmp_path / "speeds.json"
    done = command("data", "--source", "jsonl", "--name", corpus, "--samples", "gpt", "--mb", 0.1, "--workers", 1, "--rounds", 1,
                   "--gpt_tokenizer", "trained_bpe", "--vocab_size", 400, "--parts", "preparation", "--out", out)  # fmt: skip
    assert done.returncode == 0, done.stdout
    found = json.loads(out.read_text())
    assert found["loader"] == benchmark.NOT_MEASURED and "loader: not measured" in done.stdout
    assert (
        found["hardware"]["cores"]
        and found["hardware"]["data_versions"]["tokenizers"]
        and found["workers"] == 1
    )
    measured = found["preparation"]["gpt"]
    steps = measured["steps"]
    assert list(steps) == [
        "frame",
        "read",
        "repair",
        "language",
        "tokenize",
        "signatures",
        "commit",
        "raw tokenizers",
    ]
    documents = steps["tokenize"]["documents"]
    assert (
        documents
        == steps["raw tokenizers"]["documents"]
        == steps["read"]["documents"]
        >= 0.1e6 / (40 * len(SENTENCE))
    )
    assert (
        steps["raw tokenizers"]["megabytes"]
        == pytest.approx(steps["tokenize"]["megabytes"])
        == pytest.approx(0.1, rel=0.1)
    )
    assert sum(step["share"] for step in steps.values()) == pytest.approx(1)
    teams = measured["teams"]
    assert set(teams) == {"raw, processes", "preparation's step"}
    assert all(0 < team["least"] <= team["median"] <= team["most"] for team in teams.values())
    ratio = teams["raw, processes"]["median"] / teams["preparation's step"]["median"]
    assert measured["ratios"]["tokenization_of_raw"] == pytest.approx(ratio)
    assert measured["whole"]["steps_in_it"]["tokenize"]["documents_in"] == documents
    for title in benchmark.TITLES.values():
        assert title in done.stdout


@pytest.mark.parametrize("samples", ["gpt", "bert"])
def test_all_teams_make_the_same_tokens(samples, tmp_path):
    """Each way, in this process."""
    from transformers import PreTrainedTokenizerFast

    texts = [[SENTENCE.format(k), SENTENCE.format(k + 1)] for k in range(12)]
    documents = texts if samples == "bert" else [["".join(both)] for both in texts]
    backend = train_bpe([t for d in documents for t in d] * 9, 300)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>").save_pretrained(
        tmp_path / "tokenizer"
    )
    (tmp_path / "batches.pickle").write_bytes(pickle.dumps([documents[k : k + 5] for k in range(0, 12, 5)]))
    task = tokenizing_teams.Task(tmp_path / "batches.pickle", tmp_path / "tokenizer", samples)
    raw, step = tokenizing_teams._raw(task), tokenizing_teams._step(task)
    batches = pickle.loads(task.batches.read_bytes())
    alone = [encoding.ids for batch in batches for encoding in raw(tokenizing_teams._raw_batch(batch))]
    ours = [
        ids.tolist()
        for batch in batches
        for sequences in step(tokenizing_teams._documents(batch))
        for ids in sequences
    ]
    assert ours == (alone if samples == "bert" else [ids + [0] for ids in alone]), "0 is <|endoftext|>"
    assert len(alone) == (24 if samples == "bert" else 12)


def test_rounds(tmp_path):
    """Processes that share batches: as many turns as asked for, and the given call after each round."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = train_bpe([SENTENCE.format(k) for k in range(50)], 300)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(
        tmp_path / "tokenizer"
    )
    (tmp_path / "batches.pickle").write_bytes(pickle.dumps([[[SENTENCE.format(k)]] for k in range(7)]))
    task, between = tokenizing_teams.Task(tmp_path / "batches.pickle", tmp_path / "tokenizer", "gpt"), []
    found = tokenizing_teams.measure(
        task, [Way("two", True, 2, 1), Way("threads", True, 1, 2)], 3, lambda: between.append(1)
    )
    assert {name: len(taken) for name, taken in found.items()} == {"two": 3, "threads": 3} and len(
        between
    ) == 3
    assert all(turn.wall > 0 and turn.processor > 0 for taken in found.values() for turn in taken)


def test_joined_batches_keep_every_text_in_order():
    batches = [["a" * 5], ["b" * 4, "c"], ["d" * 20], ["e"], ["f"]]
    assert joined(batches, 10) == [["aaaaa", "bbbb", "c"], ["d" * 20], ["e", "f"]]
    assert joined([], 10) == []


def turns(*walls: float, processor: float = 2) -> list[Turn]:
    """Turns that take `processor` times as long of processor time."""
    return [Turn(wall, processor * wall) for wall in walls]


def test_the_ceiling_is_the_faster_raw_way():
    rounds = {"raw, one thread": turns(4, 4, 4, processor=1), "raw, threads": turns(2, 9, 2), "raw, processes": turns(3, 3, 3, processor=1),
              "preparation's step": turns(2.5, 2.5, 8)}  # fmt: skip
    found = compare(rounds)
    assert found.ceiling == (2, 3) and found.ceiling_way == "raw, threads", (
        "the least wall time, and the least processor time"
    )
    assert found.step == (2.5, 5) and found.ratio == (0.8, 0.6)
    assert compare({**rounds, "raw, threads": turns(9, 9, 2)}).ceiling_way == "raw, processes"
    assert [way.name for way in ways(1)] == ["raw, processes", "preparation's step"], (
        "on one core there is nothing to compare"
    )
    assert {(way.raw, way.processes, way.threads) for way in ways(3)} == {
        (True, 1, 1),
        (True, 1, 3),
        (True, 3, 1),
        (False, 3, 1),
    }


def test_ratios_are_of_the_time_that_the_ceiling_needs():
    done = Whole(
        imports=[3, 3, 9],
        start=[1, 1, 1],
        full=[6, 5, 30],
        processor=[10, 10, 11],
        report={"run": {"peak_mb": 7}, "steps": {}},
    )
    speeds = {
        name: StepSpeed(10, 8.0, seconds).json(10)
        for name, seconds in (("tokenize", 5.0), ("raw tokenizers", 4.0), ("read", 1.0))
    }
    rounds = {"raw, threads": turns(4.0), "raw, processes": turns(4.5), "preparation's step": turns(4.4)}
    found = preparation_speed.summary("text", speeds, rounds, done)
    assert (
        done.steady == 5
        and found["whole"]["mb_per_s"] == 8 / 5
        and found["whole"]["least"] == 4
        and found["whole"]["most"] == 29
    )
    assert found["ratios"] == pytest.approx({
        "tokenization_of_raw": 4 / 4.4, "tokenization_of_raw_processor": 4 / 4.4, "tokenization_of_raw_one_core": 0.8,
        "whole_of_ceiling": 4 / 5, "whole_of_ceiling_processor": 8 / 10, "whole_of_ceiling_with_start": 4 / 9,
    })  # fmt: skip
    assert (
        found["teams"]["raw, threads"]["mb_per_s"] == 2.0
        and found["teams"]["raw, threads"]["processor_seconds"] == 8
    )
    lines = benchmark.preparation_table("gpt", found)
    assert (
        sum("80.0% (goal 80%)" in line for line in lines) == 2
        and sum("90.9% (goal 90%)" in line for line in lines) == 2
    )


def test_steps_add_up():
    steps = Steps()
    for _ in range(2):
        steps.add("read", 3, 2e6, 0.5)
    steps.add("tokenize", 6, 4e6, 3.0)
    found = steps.json()
    assert found["read"] == {
        "documents": 6,
        "megabytes": 4.0,
        "seconds": 1.0,
        "documents_per_s": 6.0,
        "mb_per_s": 4.0,
        "share": 0.25,
    }
    assert found["tokenize"]["share"] == 0.75


def test_copies_are_no_near_duplicates():
    from data.prepare.minhash import signatures
    from data.prepare.words import words_of

    texts = ["".join(f"{word} {n} " for n in range(300)) for word in ("alpha", "beta")]
    copies = varied_copies(texts, 5 * len(texts[0]))
    assert copies[:2] == texts and len(copies) == 6 or len(copies) == 5
    assert sorted(copies[2].replace(". ", " ").split()) == sorted(texts[0].split()), "the same words"
    marks = signatures(words_of([texts[0], copies[2], copies[4]]), 5, 128, 1)
    assert (
        max((marks[0] == marks[1]).mean(), (marks[0] == marks[2]).mean(), (marks[1] == marks[2]).mean()) < 0.3
    )
    assert (
        varied_copies(texts, 10) == texts
        and varied_copies([], 10) == []
        and varied_copies(texts, 9999) == varied_copies(texts, 9999)
    )


def test_the_loader_is_read_as_training_reads_it(monkeypatch):
    """Against a clock that the test moves: each batch takes 2 ms, a pause is as long as a step."""
    clock, asked = [0.0], []

    class Batches:
        def __init__(self, samples, seed, layout, rank, workers):
            asked.append((samples, seed, tuple(layout), rank, workers))

        def __next__(self):
            clock[0] += 0.002

        def close(self):
            asked.append("closed")

    from data import loader
    from recipes import catalog

    recipe = catalog.load("default/sotu")
    monkeypatch.setattr(loader, "StepBatches", Batches)
    monkeypatch.setattr(loader_speed.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(loader_speed.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    found = loader_speed.measure(recipe, "samples", 1, 20, 0.098)
    size = recipe.batch.global_
    assert asked == [("samples", recipe.seed, (size, 1, 1, size), 0, 1), "closed"]
    assert found["microseconds_per_step"] == pytest.approx(2000) and found[
        "wait_microseconds"
    ] == pytest.approx(2000)
    assert found["tokens_per_s"] == pytest.approx(size * recipe.sequence_length / 0.002)
    assert found["wait_share_of_step"] == pytest.approx(0.02)
    unknown = loader_speed.measure(recipe, "samples", 0, 20, None)
    assert unknown["wait_microseconds"] is None and unknown["wait_share_of_step"] is None
    lines = benchmark.loader_table("r", {"tokens_per_step": 5, "step_seconds": benchmark.NOT_MEASURED, "training": benchmark.NOT_MEASURED,
                                         "workers": [unknown]})  # fmt: skip
    assert (
        "not measured (--train_steps 20, or --step_seconds)" in lines[1]
        and lines[-1].count(benchmark.NOT_MEASURED) == 2
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--mb", 0, "--rounds", 0), ("--mb 0.0: give a number above 0", "--rounds 0")),
        (("--step_seconds", 1, "--train_steps", 3), ("leave one of the two out",)),
        (("--limit", 3), ("the amount of text is given by --mb",)),
        (("--source", "jsonl"), ("--source jsonl needs --name",)),
        (("--out", "/nowhere/at/all.json"), ("the directory is not there",)),
    ],
)
def test_refusals_say_all_that_is_wrong(flags, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "data", *map(str, flags)])
    with pytest.raises(SystemExit) as end:
        benchmark.main()
    assert end.value.code == 2
    assert all(text in capsys.readouterr().err for text in said[:1])
