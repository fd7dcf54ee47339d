"""Predicted stands beside published and measured, and what is not known is said to be so."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from types import SimpleNamespace

import pytest
from reported import MACHINE, Page, make_run, read_of

from ds_configs.plan import HOST, Machine
from ds_configs.resolver import resolve
from launch import report
from launch.planning.prediction import hardware, workload
from launch.planning.prediction.forecast import forecast, speed
from launch.planning.resolved_plans import published_plan
from launch.records.deviations import Deviation
from launch.records.result import Speed
from launch.reports import predictions
from launch.reports.entries import entries_of
from launch.reports.tables import Tables
from recipes import catalog

GPU = {**MACHINE, "accelerator": "Abacus GPU", "accelerators": 8, "accelerator_memory_gb": 4.0}
HEADING = "Predicted beside published and measured"


def lines(table, runs=()):
    tables = Tables()
    return {
        line.name.rpartition("/")[2]: line
        for line in predictions.lines_of(entries_of(tables.get(table), runs))
    }


def test_a_row_is_predicted_on_its_hardware_as_its_system_ran_it():
    row = "dgx2_gpt2_model_parallel/72x3072-h32-tp8"
    line = lines("dgx2_gpt2_model_parallel")["72x3072-h32-tp8"]
    recipe, node = catalog.load(row), hardware.find("dgx2")
    work = workload.of_plan(published_plan(recipe))
    theirs = forecast(workload.on_system(work, recipe.published.software), node)
    assert (
        line.predicted_s == theirs.time.total
        and line.speed.seconds_per_step == recipe.published.time_per_iteration_s
    )
    assert line.mfu == pytest.approx(theirs.speed.mfu * line.predicted_s / line.speed.seconds_per_step)
    cached = recipe.published.cached_gb * 2**30
    assert line.left == pytest.approx(1 - cached / node.gpu.memory_bytes)


def test_normalised_throughput_is_that_of_the_document():
    """Its table "normalized" takes 54x1920 and 72x3072 relative to 24x1024: 1.248780533 and 1.057068097."""
    found = lines("dgx2_gpt2_model_parallel")
    relative = found["72x3072-h32-tp8"].normalised / found["54x1920-h20-tp2"].normalised
    assert relative == pytest.approx(1.057068097 / 1.248780533, rel=0.01)  # it counts parameters otherwise
    assert found["54x1920-h20-tp2"].normalised == 1


def test_weak_scaling_is_the_rate_per_gpu_relative_to_the_fewest_gpus():
    found = lines("a100_blog_table4")
    assert [f"{line.scaling:.3f}" for line in found.values()] == [
        f"{rate / 111:.3f}" for rate in (111, 103, 97, 85)
    ]
    assert all(line.normalised is None for line in found.values())  # no two have as many GPUs


def test_a_row_that_ran_out_of_memory_is_said_to_have():
    found = predictions.lines_of(entries_of(Tables().get("dgx2_gpt2_data_parallel"), []))
    oom = [line for line in found if line.oom]
    assert oom and all(line.cells[2] == "OOM" and line.cells[7] == "OOM" for line in oom)


def test_what_is_not_known_is_said(tables):
    (line,) = predictions.lines_of(entries_of(Tables(tables).get("quiet"), []))
    assert line.cells[2:] == (
        "0.04808",
        "not predicted",
        "",
        "not published",
        "not predicted",
        "not published",
        "not predicted",
        "",
        "",
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory, tables):
    """Three runs: on 1 and 2 GPUs of one machine, and a tiny one; the first with a prediction."""
    root = tmp_path_factory.mktemp("predicted")
    runs, out = root / "runs", root / "out"
    total = lambda number: SimpleNamespace(total=number)  # noqa: E731
    said = SimpleNamespace(fullest_rank=total(1e9), time=total(0.25), speed=SimpleNamespace(mfu=0.4))
    with pytest.MonkeyPatch.context() as patch:
        known = lambda plan, machine: said if machine["host"] == "one" else None  # noqa: E731
        patch.setattr(predictions, "run_forecast", known)
        make_run(runs / "one", tables, "widgets/fast", environment={**GPU, "host": "one"})
        make_run(runs / "bare", tables, "widgets/fast", environment=GPU)
        make_run(runs / "small", tables, "widgets/fast", environment=GPU, tiny=True)
        code = report.main([str(runs), "--out", str(out)], tables)
    texts = {name: (out / f"report.{name}").read_text(encoding="utf-8") for name in ("md", "csv", "html")}
    return SimpleNamespace(code=code, records=list(csv.DictReader(io.StringIO(texts["csv"]))), **texts)


def test_a_run_stands_next_to_its_prediction_in_every_form(made):
    page = Page()
    page.feed(made.html)
    cells = ["one", "0.5", "0.25", "0.50", "20.0%", "40.0%", "75.0%", "75.0%"]
    rows = [row for table in page.tables for row in table]
    assert made.code == 0
    assert cells in [row[1:9] for row in rows]
    assert f"| {' | '.join(cells)} |" in made.md and f"**{HEADING}**" in made.md
    record = next(record for record in made.records if record["run"].endswith("/one"))
    numbers = {key: float(record[key]) for key in ("predicted_s", "mfu", "left", "predicted_left")}
    assert numbers == {"predicted_s": 0.25, "mfu": 0.2, "left": 0.75, "predicted_left": 0.75}


def test_a_run_without_a_prediction_says_so(made):
    line = next(line for line in made.md.splitlines() if "| bare | 0.5 |" in line)
    assert line.count("not predicted") == 3 and line.count("not measured") == 1
    record = next(record for record in made.records if record["run"].endswith("/bare"))
    assert record["predicted_s"] == record["mfu"] == ""


def test_a_tiny_run_is_compared_with_none(made):
    assert not any(record["normalised"] for record in made.records)  # its model is the only other one


def test_runs_are_compared_on_one_machine_and_tiny_ones_with_none():
    def rated(samples_per_s, tflops):
        return Speed(samples_per_s=samples_per_s, exact_tflops=tflops)

    base = predictions.PredictionLine(
        "t/a", "a", where="run on x", gpus=1, parameters=10, speed=rated(8.0, 4.0)
    )
    others = [
        replace(base, name="t/b", gpus=4, speed=rated(28.0, 3.5)),
        replace(base, name="t/c", parameters=40, speed=rated(3.0, 4.0)),
        replace(base, name="t/d", where="", speed=rated(8.0, 1.0)),
        replace(base, name="t/e", where="run on y", gpus=8),
    ]
    found = list(predictions._compared([base, *others]))
    assert [line.scaling for line in found] == [1.0, 0.875, 1.0, None, None]
    assert [line.normalised for line in found] == [1.0, None, 1.5, None, None]


# On the machine of a run

H200 = {**MACHINE, "accelerator": "NVIDIA H200", "accelerators": 1, "accelerator_memory_gb": 150.0}


@pytest.fixture
def plan():
    machine = Machine(HOST, fp16=False, bf16=True, compiler=True, libaio=False)
    return resolve(catalog.load("default/sotu", ["activation_checkpointing=full"]), "zero1", 2, machine)


def test_a_machine_is_predicted_whose_gpus_the_catalogue_has(plan):
    node = hardware.find("h200x8")
    assert predictions.run_forecast(plan, H200) == forecast(workload.of_plan(plan), node)
    assert predictions.run_forecast(plan, MACHINE) is None, "cores are none of its GPUs"
    assert predictions.run_forecast(plan, GPU) is None
    assert predictions.run_forecast(plan, {}) is None, "environment.json does not describe it"


def test_shares_are_those_of_the_measured_time_and_of_the_steps_of_this_plan(tables, tmp_path):
    read = read_of(make_run(tmp_path / "r", tables, "widgets/fast", environment=H200), tables)
    line = predictions._of_run("t/r", read)
    found = predictions.run_forecast(read.plan, H200)
    assert line.mfu == pytest.approx(speed(found.work, found.node, line.speed.seconds_per_step).mfu)
    assert line.left == pytest.approx(1 - read.result.memory.peak_bytes / 150e9)
    assert line.predicted_left == pytest.approx(1 - found.fullest_rank.total / 150e9)
    elsewhere = replace(read.result, deviations=(Deviation("measured", "steps 1 to 9"),))
    without = predictions._of_run("t/r", replace(read, result=elsewhere))
    assert without == predictions._of_run("t/r", replace(read, plan=None))
    assert (without.mfu, without.left, without.predicted_s) == (None, None, None)


def test_a_precision_without_a_rate_has_a_memory_alone(tables, tmp_path, monkeypatch):
    node = hardware.find("h200x8")
    without = node.model_copy(update={"gpu": node.gpu.model_copy(update={"tflops": {"fp64": 67.0}})})
    monkeypatch.setattr(hardware, "catalogue_node", lambda name, count: without)
    read = read_of(make_run(tmp_path / "r", tables, "widgets/fast", environment=H200), tables)
    line = predictions._of_run("t/r", read)
    assert line.mfu is line.predicted_s is None and line.predicted_left > 0


def test_a_measured_run_that_no_gpu_reaches_is_doubted():
    """A document remarks on its own table: over 100 TFLOPS of a V100 is a bug."""
    good = predictions.PredictionLine("t/r", "good", where="gpu", gpus=1, mfu=0.5)
    bad, cores = replace(good, label="bad", mfu=0.8), replace(good, label="cores", gpus=None, mfu=0.9)
    note = predictions.frame([good, bad, cores]).note
    assert note.endswith("No sound row has 75 % of a GPU's peak; doubt t/r (bad, 80%).")
    assert "doubt" not in predictions.frame([good, cores]).note
