"""launch/benchmark.py layouts: what is compared, and computed from times."""

from __future__ import annotations

import json
import sys

import pytest

from ds_configs.plan import HOST, Machine
from ds_configs.resolver import resolve
from launch import benchmark
from launch.experiments.benchmarks import layout_speed, step_speed
from launch.experiments.benchmarks.specification import Specification
from launch.experiments.benchmarks.step_speed import Measurement
from recipes.layout import Layout

ONE = Specification("ours", "ours", "default/sotu", ("precision=fp32",), True, "zero1")
LAYOUT = Layout(1, 1, 1, 4, 2, 8)  # micro-batches of 4, two of them
CPU = Machine(HOST, fp16=False, bf16=True, compiler=True, libaio=False)


def measured(spec: Specification, seconds: float, tokens: int, waited: float = 0.0) -> Measurement:
    phases = [{"step": 10.0, "communication": share * 10 * waited} for share in (0.5, 1.5)]
    return Measurement(spec, [seconds] * 3, [tokens] * 3, [1] * 3, phases=phases[: spec.processes])


def test_each_layout_is_one_that_can_be_trained_and_does_the_work_of_its_reference():
    cases = layout_speed.cases(ONE, LAYOUT)
    plans = {c.spec.name: resolve(c.spec.load(), c.spec.ds_config, c.spec.processes, CPU) for c in cases}
    layouts = {name: plan.layout for name, plan in plans.items()}
    degrees = {name: (each.tp, each.pp, each.dp) for name, each in layouts.items()}
    piped, many = "pp2, 8 micro-batches", "one process, 8 micro-batches"
    assert [degrees[name] for name in ("tp2", "dp2", piped)] == [(2, 1, 1), (1, 1, 2), (1, 2, 1)]
    assert {each.micro for each in layouts.values()} == {4}
    accumulated = {name: each.accumulation for name, each in layouts.items()}
    assert accumulated == {"one process": 2, "tp2": 2, "dp2": 2, many: 8, piped: 8}
    assert {c.spec.name: c.reference for c in cases}[piped] == many


def test_overhead_is_split_into_kinds_that_add_up():
    cases = layout_speed.cases(ONE, LAYOUT)
    times = {"one process": (1.0, 100), "dp2": (3.0, 200)}
    many, piped = cases[3].spec.name, cases[4].spec.name
    times |= {many: (4.0, 400), piped: (9.0, 400)}
    waits = {"dp2": 0.2, piped: 0.3}
    found = [
        measured(c.spec, *times[c.spec.name], waits.get(c.spec.name, 0.0))
        for c in cases
        if c.spec.name in times
    ]
    rows = {row.name: row for row in layout_speed.overheads(found, cases)}
    assert "tp2" not in rows
    dp2 = rows["dp2"]
    assert (dp2.ideal, dp2.bubble) == (2.0, 0.0) and dp2.rate == pytest.approx(2 / 3)
    assert dp2.waiting == pytest.approx(0.6) and dp2.computing == pytest.approx(0.4)
    pp2 = rows[piped]
    assert (pp2.ideal, pp2.bubble) == (4.0, pytest.approx(1.0))  # a ninth of its time
    assert pp2.waiting == pytest.approx(9 * 0.3 - 1) and pp2.rate == pytest.approx(4 / 9)
    for row in rows.values():
        assert row.ideal + row.bubble + row.waiting + row.computing == pytest.approx(row.seconds)
    assert rows["one process"].rate == 1 and "67%" in layout_speed.overhead_table(list(rows.values()))


def command(monkeypatch, *flags: object) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *map(str, flags)])
    benchmark.main()


def test_layouts_are_measured_in_turns_and_written(tmp_path, monkeypatch):
    def measure(specs, pace, say, profile=None):
        return [measured(spec, spec.processes, 8) for spec in specs if spec.system == "ours"]

    monkeypatch.setattr(step_speed, "measure", measure)
    command(monkeypatch, "layouts", "--tiny", "--out", tmp_path / "layouts.json")
    rows = json.loads((tmp_path / "layouts.json").read_text())["rows"]
    assert {row["name"]: row["rate"] for row in rows}["tp2"] == 0.5


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("layouts", "--set", "model.heads=5", "--set", "model.hidden=65"), "5"),
        (("layouts", "--out", "there.json"), "--out"),
        (("layouts", "--out", "no/such/x.json"), "which is not there"),
        (("layouts", "--out", "gone.json"), "--out"),
    ],
)
def test_what_cannot_be_measured_is_refused_first(flags, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.json").write_text("mine")
    (tmp_path / "gone.json").symlink_to("nowhere")
    monkeypatch.setattr(step_speed, "measure", lambda *_: pytest.fail("started"))
    with pytest.raises(SystemExit) as end:
        command(monkeypatch, *flags)
    assert end.value.code == 2 and said in capsys.readouterr().err
