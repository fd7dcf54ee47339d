"""A result says what was predicted of its run, and a run neither waits for the planner nor fails with it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from measured_machine import TWO_CORES
from reported import MACHINE, step

from ds_configs.plan import Machine
from ds_configs.resolver import resolve
from launch.machine import measuring, rates
from launch.planning.prediction import hardware, workload
from launch.planning.prediction.forecast import forecast, speed
from launch.records import prediction
from launch.records.metrics import Records
from launch.records.result import make_result, read_result, write_result
from launch.records.result_text import result_text
from recipes import catalog

H200 = {"accelerator": "NVIDIA H200", "accelerators": 1, "accelerator_memory_gb": 150.0}


@pytest.fixture
def plan():
    machine = Machine("cpu", fp16=False, bf16=True, compiler=True, libaio=False)
    return resolve(catalog.load("default/sotu", ["activation_checkpointing=full"]), "zero1", 2, machine)


@pytest.fixture
def known(monkeypatch):
    monkeypatch.setattr(rates, "cached", lambda: TWO_CORES)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(prediction, "host_memory", lambda: 16e9)


def made(plan, said, seconds=0.5):
    records = Records(steps=[step(number, seconds=seconds) for number in range(1, 13)])
    return make_result(plan, records, name="default/sotu", described=MACHINE, predicted=said)


def test_a_machine_that_was_measured_is_predicted(plan, known):
    said = prediction.predicted(plan, MACHINE)
    found = forecast(workload.of_plan(plan), hardware.of_rates(TWO_CORES).shared_by(2))
    assert said.node == "this" and said.why_not is None and said.available_bytes == 8e9
    assert said.seconds_per_step == found.time.total and said.bytes_per_process == found.fullest.total


def test_nothing_is_measured_for_a_run(plan, monkeypatch):
    monkeypatch.setattr(rates, "cached", lambda: None)
    monkeypatch.setattr(measuring, "measured", lambda: pytest.fail("a run waits for a measurement"))
    said = prediction.predicted(plan, MACHINE)
    assert said.seconds_per_step is None and "not measured" in said.why_not
    text = result_text(made(plan, said))
    assert "not predicted: this machine: it is not measured; python launch/plan.py" in " ".join(text.split())


def test_a_gpu_of_the_catalogue_needs_no_measurement(plan, monkeypatch):
    monkeypatch.setattr(rates, "cached", lambda: None)
    said = prediction.predicted(plan, {**MACHINE, **H200})
    assert said.node == "h200x8" and said.seconds_per_step > 0 and said.available_bytes == 150e9


def test_a_run_does_not_fail_with_the_planner(plan, known, monkeypatch):
    monkeypatch.setattr(prediction, "forecast", lambda *of: 1 / 0)
    said = prediction.predicted(plan, MACHINE)
    assert said.why_not == "the planner broke: ZeroDivisionError: division by zero"
    assert prediction.predicted(plan, {}).seconds_per_step is None


def test_a_precision_without_a_rate_is_not_predicted(plan, known, monkeypatch):
    monkeypatch.setattr(rates, "cached", lambda: replace(TWO_CORES, tflops={"fp32": 0.2}))
    said = prediction.predicted(plan, MACHINE)
    assert said.mfu is None and "bf16" in said.why_not and said.bytes_per_process > 0


def test_the_share_of_the_peak_is_that_of_the_measured_time_without_recomputation(plan, known):
    said = prediction.predicted(plan, MACHINE)
    result = made(plan, said, seconds=0.5)
    node = hardware.of_rates(TWO_CORES).shared_by(2)
    assert result.mfu == pytest.approx(speed(workload.of_plan(plan), node, 0.5).mfu)
    assert made(plan, said, seconds=1.0).mfu == pytest.approx(result.mfu / 2)
    assert result.head_room == pytest.approx(1 - 1e9 / 8e9)
    assert f"{100 * result.mfu:.3g} % (MFU)" in result_text(result)


def test_files_keep_the_prediction_and_older_ones_have_none(plan, known, tmp_path):
    result = made(plan, prediction.predicted(plan, MACHINE))
    write_result(tmp_path / "result.json", result)
    assert read_result(tmp_path / "result.json") == result
    values = json.loads((tmp_path / "result.json").read_text())
    assert values["version"] == 2 and values["predicted"]["node"] == "this"
    del values["predicted"]
    (tmp_path / "result.json").write_text(json.dumps(values))
    older = read_result(tmp_path / "result.json")
    assert older.predicted is None and older.mfu is None and older.head_room is None
    assert "not predicted" in result_text(older)
