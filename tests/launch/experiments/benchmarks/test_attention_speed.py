"""launch/benchmark.py attention: what it measures, what it leaves out and says so, its flags."""

from __future__ import annotations

import json
import sys

import pytest

from launch import benchmark
from launch.experiments.benchmarks import attention_speed
from launch.experiments.benchmarks.attention_speed import Row, Shape


def attention(monkeypatch, *flags: object) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "attention", *map(str, flags)])
    benchmark.main()


def test_every_case_is_measured_or_said_not_to_be(tmp_path, capsys, monkeypatch):
    out = tmp_path / "speeds.json"
    shape = ("--dtypes", "fp32", "--heads", 1, "--head_size", 4, "--rounds", 1)
    attention(monkeypatch, "--positions", 256, 64, "--windows", 16, 100, *shape, "--out", out)
    found, printed = json.loads(out.read_text()), capsys.readouterr().out
    kernels = {(row["positions"], row["window"]): row["kernel"] for row in found["rows"]}
    assert kernels == {(64, 16): "dense mask", (256, 16): "blocks", (256, 100): "dense mask"}
    for row in found["rows"]:
        assert min(row["dense_s"], row["banded_s"], row["masked_s"]) > 0 and row["status"] == "measured"
    assert found["device"] == "cpu" and found["not_measured"] == [
        "flex_attention and GPUs: this machine has no CUDA device",
        "fp32, 64 positions with windows of 100: such a band is the whole triangle",
    ]
    assert all(f"not measured: {line}" in printed for line in found["not_measured"])
    assert printed.count("blocks") == 1


def test_a_slow_length_ends_the_table(monkeypatch):
    def measured(shape, dtype, positions, window, device) -> Row:
        return Row(dtype, positions, window, "blocks", "", 0.5, positions / 100, 1, 1)

    monkeypatch.setattr(attention_speed, "measure", measured)
    shape = Shape(1, 1, 4, 0.0, 1)
    rows = list(attention_speed.measure_dtype(shape, "fp32", [300, 100, 200], [16], "cpu", longest_s=1.5))
    assert [row.positions for row in rows] == [100, 200]
    left_out = attention_speed.not_measured(["fp32"], [300, 100, 200], [16], "cpu", rows)
    (line,) = [line for line in left_out if line.startswith("fp32")]
    assert (
        line == "fp32, 300 positions with windows of 16: a pass at fewer positions took longer than --seconds"
    )


def test_bad_flags_are_refused_together(tmp_path, monkeypatch, capsys):
    wrong = ("--heads", 0, "--windows", 0, 900, "--positions", 0, "--dropout", 1, "--out", f"{tmp_path}/a/b")
    with pytest.raises(SystemExit) as end:
        attention(monkeypatch, *wrong)
    error = capsys.readouterr().err
    for said in ("--heads 0", "--windows 0", "--positions 0", "--dropout 1.0", "which is not there"):
        assert said in error
    assert end.value.code == 2
    with pytest.raises(SystemExit):
        attention(monkeypatch, "--positions", 256, 512, "--windows", 512)
    said = "such a band is the whole triangle; give a window below 512"
    assert said in capsys.readouterr().err
