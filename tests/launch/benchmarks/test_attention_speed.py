"""`benchmark.py attention`: what it measures, what it leaves out and says so, its flags."""

from __future__ import annotations

import argparse
import json

import pytest

from launch.benchmarks import attention_speed
from launch.benchmarks.attention_speed import Case, Row, Taken


def flags(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    attention_speed.add_parser(parser.add_subparsers())
    return parser.parse_args(["attention", *given])


def test_benchmark(tmp_path, capsys):
    out = tmp_path / "speeds.json"
    attention_speed.run(flags("--positions", "256", "64", "--windows", "16", "100", "--dtypes", "fp32", "--heads", "1", "--head_size", "4",
                              "--rounds", "1", "--out", str(out)))  # fmt: skip
    found, printed = json.loads(out.read_text()), capsys.readouterr().out
    kernels = {(row["positions"], row["window"]): row["kernel"] for row in found["rows"]}
    assert kernels == {(64, 16): "dense mask", (256, 16): "blocks", (256, 100): "dense mask"}
    assert all(
        row["dense_s"] > 0 and row["banded_s"] > 0 and row["masked_s"] > 0 and row["status"] == "measured"
        for row in found["rows"]
    )
    assert found["device"] == "cpu" and found["not_measured"] == [
        "flex_attention and GPUs: this machine has no CUDA device",
        "fp32, 64 positions with windows of 100: such a band is the whole triangle",
    ]
    assert (
        all(f"not measured: {line}" in printed for line in found["not_measured"])
        and printed.count("blocks") == 1
    )


def test_a_slow_length_ends_the_table(monkeypatch):
    def measured(case: Case, args, device: str) -> Row:
        return Row(
            **vars(case),
            kernel="blocks",
            why="",
            scores=0.5,
            dense_s=case.positions / 100,
            banded_s=1,
            masked_s=1,
        )

    monkeypatch.setattr(attention_speed, "measure", measured)
    args, rows = (
        flags("--positions", "300", "100", "200", "--windows", "16", "--dtypes", "fp32", "--seconds", "1.5"),
        [],
    )
    attention_speed.measure_dtype(args, "fp32", "cpu", rows)
    assert [row.positions for row in rows] == [100, 200]
    (line,) = [line for line in attention_speed.not_measured(args, "cpu", rows) if line.startswith("fp32")]
    assert (
        line
        == "fp32, 300 positions with windows of 16: a pass at fewer positions took longer than --seconds 1.5"
    )


def test_ratios_are_taken_turn_by_turn():
    """A machine that slows down in one turn slows all three."""
    turns = [
        [Taken(4, 2), Taken(2, 2), Taken(8, 4)],
        [Taken(40, 2), Taken(10, 1), Taken(80, 4)],
        [Taken(3, 9), Taken(1, 3), Taken(6, 4)],
    ]
    known = dict(vars(Case("fp32", 8, 2)), kernel="blocks", why="", scores=0.5)
    row = attention_speed.row_of(known, turns, "cpu")
    assert (row.dense_s, row.banded_s, row.masked_s, row.faster, row.faster_by_processor_time) == (
        4,
        2,
        8,
        3,
        2,
    )
    assert attention_speed.row_of(known, turns, "cuda").faster_by_processor_time is None


def test_bad_flags_are_refused_together(tmp_path):
    with pytest.raises(ValueError) as found:
        given = (
            "--heads",
            "0",
            "--windows",
            "0",
            "900",
            "--positions",
            "0",
            "--dropout",
            "1",
            "--out",
            f"{tmp_path}/a/b",
        )
        attention_speed.check(flags(*given))
    for said in (
        "--heads 0",
        "--windows 0: give 1",
        "--positions 0",
        "--dropout 1.0",
        "the directory is not there",
    ):
        assert said in str(found.value)
    with pytest.raises(ValueError, match="such a band is the whole triangle; give a window below 512"):
        attention_speed.check(flags("--positions", "256", "512", "--windows", "512"))
