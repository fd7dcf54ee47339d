"""What is predicted of a run when it is reported: without measuring, where its machine is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from measured_machine import TWO_CORES
from reported import MACHINE

from ds_configs.plan import Machine
from ds_configs.resolver import resolve
from launch.machine import measuring, rates
from launch.planning.prediction import hardware, workload
from launch.planning.prediction.forecast import forecast, speed
from launch.records.deviations import Deviation
from launch.records.result import Result
from launch.reports.prediction import Predicted, of_run, predicted
from recipes import catalog

HERE = {**MACHINE, **{key: rates.machine()[key] for key in ("host", "cpu", "cores")}}
H200 = {"accelerator": "NVIDIA H200", "accelerators": 1, "accelerator_memory_gb": 150.0}


@pytest.fixture
def plan():
    machine = Machine("cpu", fp16=False, bf16=True, compiler=True, libaio=False)
    return resolve(catalog.load("default/sotu", ["activation_checkpointing=full"]), "zero1", 2, machine)


@pytest.fixture
def known(monkeypatch):
    monkeypatch.setattr(rates, "cached", lambda: TWO_CORES)


def test_a_machine_that_was_measured_is_predicted(plan, known):
    said = predicted(plan, HERE)
    found = forecast(workload.of_plan(plan), hardware.of_rates(TWO_CORES).shared_by(2))
    assert said == Predicted("this", found.time.total, found.fullest.total, found.speed.mfu, 4e9)


def test_nothing_is_measured_for_a_report_and_another_machine_is_not_taken_for_this_one(
    plan, known, monkeypatch
):
    monkeypatch.setattr(measuring, "measured", lambda: pytest.fail("a report waits for a measurement"))
    assert predicted(plan, {**HERE, "cpu": "another"}) == Predicted(available_bytes=4e9)
    monkeypatch.setattr(rates, "cached", lambda: None)
    assert predicted(plan, HERE) == Predicted(available_bytes=4e9)
    assert predicted(plan, {}) == Predicted(), "environment.json does not describe it"
    said = predicted(plan, {**MACHINE, **H200})
    assert said.node == "h200x8" and said.seconds_per_step > 0 and said.available_bytes == 150e9


def test_a_precision_without_a_rate_is_not_predicted(plan, known, monkeypatch):
    monkeypatch.setattr(rates, "cached", lambda: replace(TWO_CORES, tflops={"fp32": 0.2}))
    said = predicted(plan, HERE)
    assert said.mfu is None and said.bytes_per_process > 0


def test_the_share_of_the_peak_is_that_of_the_measured_time_without_recomputation(plan, known):
    said, node = predicted(plan, HERE), hardware.of_rates(TWO_CORES).shared_by(2)
    assert said.reached_mfu(0.5) == pytest.approx(speed(workload.of_plan(plan), node, 0.5).mfu)
    assert said.reached_mfu(1.0) == pytest.approx(said.reached_mfu(0.5) / 2)
    assert said.left_by(1e9) == pytest.approx(1 - 1e9 / 4e9) and said.left_by(None) is None


def test_what_was_measured_of_another_plan_is_not_compared(plan, known):
    elsewhere = Result("r", "ok", deviations=(Deviation("measured", "steps 1 to 9"),))
    assert of_run(plan, HERE, elsewhere) == of_run(None, HERE, Result("r", "ok")) == Predicted()
