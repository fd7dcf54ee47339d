"""launch/benchmark.py data: what is measured and refused. Never speed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from launching import ROOT, run

from launch import benchmark

SENTENCE = "The senate met in the afternoon and voted on bill number {} that the house had sent to it. "


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """60 English documents, all different."""
    path = tmp_path_factory.mktemp("corpus") / "in.jsonl"
    texts = ["".join(SENTENCE.format(100 * k + n) for n in range(40)) for k in range(60)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_the_preparation_is_measured_step_by_step_and_next_to_tokenizers(corpus, tmp_path):
    out = tmp_path / "speeds.json"
    command = [sys.executable, ROOT / "launch/benchmark.py", "data", "--source", "jsonl", "--name", corpus]
    command += ["--samples", "gpt", "--limit", 50, "--workers", 1, "--recipes", "--out", out]
    done = run([str(part) for part in command], timeout=180)
    assert done.returncode == 0, done.stdout
    found = json.loads(out.read_text())
    assert found["hardware"]["cores"] and found["workers"] == 1 and found["loader"] == {}
    measured = found["preparation"]["gpt"]
    assert measured["documents"] <= 50 and measured["text_mb"] > 0
    steps = ["read", "repair", "language", "tokenize", "signatures", "deduplicate", "write"]
    assert set(measured["steps"]) <= set(steps) and "tokenize" in measured["steps"]
    assert measured["share"] is None and measured["processor_share"] is None  # of 0.2 MB
    for said in ("tokenize, one core", "whole, all workers", "raw tokenizers", "too small to compare"):
        assert said in done.stdout


@pytest.mark.parametrize("out", ["there.json", ".", "", "no/such/x.json", "x" * 300, "gone.json"])
def test_out_is_a_file_to_be_made(out, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.json").write_text("mine")
    (tmp_path / "gone.json").symlink_to("nowhere")
    with pytest.raises(ValueError, match="--out"):
        benchmark.check(benchmark.build_parser().parse_args(["data", "--out", out]))


def test_the_loader_is_measured_with_and_without_a_thread(tmp_path, monkeypatch, capsys):
    from data import corpus

    class Samples:
        """Positions in place of samples, none of which is read when they are made."""

        random_access = True
        sequence_length = 8

        def take(self, positions, seed):
            import numpy as np

            from data.samples.gpt import GptFields

            taken.append(len(positions))
            return GptFields(window=np.zeros((len(positions), 9), dtype=np.int64))

        def state(self, position):
            return {"position": position}

        def fresh(self):
            return self

    taken = []
    monkeypatch.setattr(corpus, "build", lambda recipe, say: type("Corpus", (), {"train": Samples()}))
    flags = ["data", "--samples", "--recipes", "default/sotu", "--out", f"{tmp_path}/speeds.json"]
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *flags])
    benchmark.main()
    found = json.loads((tmp_path / "speeds.json").read_text())["loader"]["default/sotu"]
    assert set(found["microseconds"]) == {"0", "1"} and min(found["microseconds"].values()) > 0
    assert len(set(taken)) == 1 and len(taken) > 200, "whole steps of one rank"
    assert "not measured (--train_steps 20)" in capsys.readouterr().out and found["step_seconds"] is None


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--workers", 0, "--vocab_size", -1), ("--workers 0: give a number above 0", "--vocab_size -1")),
        (("--train_steps", -1), ("--train_steps -1: give 0 or more",)),
        (("--source", "jsonl"), ("--source jsonl needs --name",)),
        (("--out", "/nowhere/at/all.json"), ("which is not there",)),
    ],
)
def test_refusals_say_all_that_is_wrong(flags, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "data", *map(str, flags)])
    with pytest.raises(SystemExit) as end:
        benchmark.main()
    error = capsys.readouterr().err
    assert end.value.code == 2 and all(text in error for text in said)
