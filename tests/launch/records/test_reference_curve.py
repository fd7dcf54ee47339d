"""Reference curves: their files, which runs are judged by them, and what a run says of it."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from recorded import facts, outcome, plan, recipe, recorder
from reported import make_run, read_of, step, validations, write_tables

from launch import pretrain, report
from launch import recipe as recipe_command
from launch.records import curves
from launch.records.curves import Curve, facts_of
from launch.records.directory import RunDirectory
from launch.records.facts import Ending, Entropies, Judgement, Validation
from launch.records.loss_plot import draw_losses
from launch.records.metrics import read_metrics
from launch.records.reference import Reference, Series
from launch.records.result import read_result
from launch.training import start
from launch.training.job import Job
from recipes import catalog
from recipes.problems import ProblemsError
from recipes.schema import Branch

STEPS = 20


def series(shift: float = 0.0) -> Series:
    losses = 6 - 0.1 * np.arange(1, STEPS + 1) + shift
    norms = np.where(np.arange(STEPS) == 3, np.nan, 1.5)  # a skipped step
    return Series(losses, norms, {0: 6.0 + shift, 10: 5.0 + shift, STEPS: 4.0 + shift})


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "mine.json"
    runs = {seed: series(shift) for seed, shift in ((1, -0.01), (2, 0.0), (3, 0.02))}
    known = (facts_of(recipe()), Entropies(5.7, 5.0), [{"cpu": "Abacus"}])
    curves.write(path, Curve("table/small", *known, runs, misuses={"no warm-up": series(1.0)}))
    return path


def why_not(file: Path, recipe_=None, unigram: float | None = 5.0, given=None) -> str:
    return curves.read(file).why_not(recipe_ or recipe(), Entropies(5.7, unigram), given)


def test_a_file_gives_back_what_was_written_a_series_a_line(file):
    curve = curves.read(file)
    for seed, shift in ((1, -0.01), (2, 0.0), (3, 0.02)):
        there = curve.runs[seed]
        own = series(shift)
        assert np.allclose(there.loss, own.loss, rtol=1e-5)
        assert np.array_equal(there.grad_norm, own.grad_norm, equal_nan=True)
        assert there.validation == own.validation
    assert curve.misuses["no warm-up"].loss[0] == pytest.approx(6.9) and curve.made_by == [{"cpu": "Abacus"}]
    text = file.read_text()
    assert len([line for line in text.splitlines() if line.count(",") > STEPS - 2]) == 2 * 4
    curves.write(file, curve)
    assert file.read_text() == text


@pytest.mark.parametrize("broken", ('"loss": 5', '"loss": [1, "x"]', '"loss": [1]', '"lost": []'))
def test_a_broken_file_is_refused_with_its_name(file, broken):
    text = file.read_text()
    file.write_text(text.replace('"loss": [ 5', f'{broken}, "was": [ 5', 1))
    with pytest.raises(ProblemsError, match="mine.json"):
        curves.read(file)


def test_a_run_is_of_a_curve_by_the_facts_that_decide_it(file):
    assert why_not(file) == ""
    other = recipe(seed=7, precision="bf16", steps=10, schedule={"decay_steps": 20}, batch={"global": 8})
    assert why_not(file, other) == "", "of another seed, precision, end and micro-batch"
    rate = recipe(optimizer={"lr": 3e-3})
    assert why_not(file, rate) == "optimizer.lr=0.003 is not the 0.001 of table/small's curve"
    many = recipe(optimizer={"lr": 3e-3}, init_std=0.1, dropout={"hidden": 0.1, "attention": 0.2}, steps=9)
    assert why_not(file, many).endswith("is not the 0.0 and 2 more of table/small's curve")


def test_a_text_is_that_of_the_curve_by_its_entropy(file):
    elsewhere = recipe(data={"source": "text", "name": "moved.txt"})
    assert why_not(file, elsewhere) == "", "the same text in another place"
    said = "unigram entropy=5.5 is not the 5.0 of table/small's curve"
    assert why_not(file, unigram=5.5) == said
    unread = why_not(file, elsewhere, None)
    assert unread.startswith("data.source=text is not the packaged, data.name=moved.txt is not the None")


def test_runs_that_begin_elsewhere_have_no_curve(file):
    begun = "it goes on from a run or from weights, table/small's curve from none"
    branch = Branch(run="/runs/a", step=5, stretches=[(0, 0, 8)])
    assert why_not(file, recipe(branch=branch)) == why_not(file, given={"directory": "x"}) == begun


class Judge:
    """Judges as told, in place of a reference, and keeps what it was asked."""

    def __init__(self, monkeypatch, *judgements: Judgement):
        self.asked: list[Series] = []
        self.judgements = list(judgements)
        monkeypatch.setattr(Reference, "judge", lambda _, run, seed: self(run))

    def __call__(self, run: Series) -> Judgement:
        self.asked.append(replace(run, validation={**run.validation}))
        return self.judgements.pop(0)


AS_EXPECTED = Judgement(10, 0.003, 0.02)
OUTSIDE = Judgement(20, 0.21, 0.02, 14, "training loss", 0.3, ("no warm-up", "double batch"))


def train(path: Path, recipe_, stream=None, first=0, last=STEPS) -> RunDirectory:
    """Steps `first` to `last`, with a validation every ten."""
    path.mkdir(exist_ok=True)
    with recorder(path, plan(recipe_), start=first, stream=stream) as records:
        for number in range(first + 1, last + 1):
            skipped = number == 5
            records.step(outcome(6.0 - 0.1 * number, step=number, data_seconds=0.0, skipped=skipped))
            if number % 10 == 0:
                records.validation(number, Validation(6.0 - 0.1 * number))
        records.validation(last, Validation(9.0), "test")
        records.finish(Ending())
    return RunDirectory(path)


def test_a_run_says_at_each_validation_how_it_stands(file, tmp_path, monkeypatch):
    judge = Judge(monkeypatch, AS_EXPECTED, OUTSIDE, OUTSIDE)
    shown = io.StringIO()
    at = train(tmp_path / "run", recipe(curve=str(file)), shown)
    said = " ".join(shown.getvalue().split())
    assert "reference curve of table/small, 3 seeds" in said
    assert "step 10: validation loss 5.0000, as expected (+0.003; seeds ±0.02)" in said
    outside = "training loss 0.3 above what this recipe gives since step 14 (+0.210; seeds ±0.02)"
    outside += "; likely: no warm-up, double batch"
    assert f"step 20: validation loss 4.0000, {outside}" in said
    assert f"validation loss 4.0000 (after step 20, {outside})" in said and "uniform" not in said
    assert [len(run.loss) for run in judge.asked] == [10, 20]
    assert judge.asked[1].validation == {10: 5.0, 20: 4.0} and judge.asked[1].loss[19] == 4.0
    assert np.isnan([judge.asked[0].loss[4], judge.asked[0].grad_norm[4]]).all(), "of a skipped step"
    assert [each.judgement for each in read_metrics(at.metrics_jsonl).validations] == [AS_EXPECTED, OUTSIDE]
    assert read_result(at.result_json).judgement == OUTSIDE


def test_a_resumed_run_is_judged_with_its_earlier_steps(file, tmp_path, monkeypatch):
    judge = Judge(monkeypatch, AS_EXPECTED, OUTSIDE, replace(OUTSIDE, step=20))
    own = recipe(curve=str(file))
    train(tmp_path / "run", own, last=20)
    at = train(tmp_path / "run", own, first=12)
    first, whole, again = judge.asked
    assert np.array_equal(again.loss, whole.loss, equal_nan=True) and again.validation == {10: 5.0, 20: 4.0}
    assert [each.judgement for each in read_metrics(at.metrics_jsonl).validations] == [AS_EXPECTED, OUTSIDE]


def test_a_run_beyond_its_curve_or_of_another_recipe_is_not_judged(file, tmp_path, monkeypatch):
    judge = Judge(monkeypatch, AS_EXPECTED, AS_EXPECTED)
    longer = recipe(curve=str(file), steps=40, schedule={"decay_steps": 20})
    at = train(tmp_path / "longer", longer, last=40)
    assert [len(run.loss) for run in judge.asked] == [10, 20]
    assert read_result(at.result_json).judgement is None, "its last validation lies beyond"
    shown = io.StringIO()
    train(tmp_path / "other", recipe(curve=str(file), init_std=0.1), shown)
    said = " ".join(shown.getvalue().split())
    assert "reference none: init_std=0.1 is not the 0.02 of table/small's curve" in said
    assert "(after step 20, uniform 5.7000, unigram 5.0000)" in said and len(judge.asked) == 2
    train(tmp_path / "none", recipe(), shown := io.StringIO())
    assert "none: no curve of this recipe was measured" in " ".join(shown.getvalue().split())


def test_a_plan_names_the_curve_and_a_start_refuses_a_broken_one(tmp_path, capsys):
    def planned(*words: object) -> Job:
        words = ("--plan", "--ds_config", "zero1", "--out", tmp_path / "run", *words)
        return pretrain.checked_job(pretrain.build_parser().parse_args([*map(str, words)]))

    start.show_plan(planned(), [])
    assert "reference curve of default/sotu, 10 seeds" in " ".join(capsys.readouterr().out.split())
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(ProblemsError, match="broken.json: has no curve_of"):
        start.open_run_directory(planned("--set", f"curve={tmp_path}/broken.json"))
    assert not (tmp_path / "run").exists()


def test_weights_given_to_an_earlier_launch_count(file, tmp_path):
    run = facts(plan(recipe(curve=str(file))), initial_weights={"directory": "x"})
    at = RunDirectory(tmp_path)
    assert at.watch(run).why_not
    (tmp_path / "environment.json").write_text(
        '{"launches": [{"started": "", "command": [], "working_directory": "", "recipe": "r", "tiny": false, '
        '"emulated_fp16": false, "plan": {}, "initial_weights": {"directory": "x"}}]}'
    )
    assert at.watch(replace(run, initial_weights=None)).why_not


def test_the_band_of_the_seeds_is_drawn_in_place_of_entropies(file, tmp_path):
    at = train(tmp_path / "run", recipe(curve=str(file)))
    records = read_metrics(at.metrics_jsonl)
    result = read_result(at.result_json)
    curve = curves.read(file)
    axes = Figure().add_subplot()
    draw_losses(axes, records, result, result.figures[0], curve.reference)
    (band,) = axes.collections
    heights = {tuple(point) for point in band.get_paths()[0].vertices.round(4)}
    assert {(1.0, 5.89), (1.0, 5.92), (20.0, 3.99), (20.0, 4.02)} <= heights
    assert np.allclose(axes.lines[-1].get_ydata(), series().loss)
    names = [text.get_text() for text in axes.texts]
    assert "3 seeds 4.0000" in names and not any("gram" in name or "uniform" in name for name in names)


def test_a_report_names_what_is_outside(tmp_path):
    tables = write_tables(tmp_path)
    last = replace(validations(40)[1], judgement=OUTSIDE)
    run = make_run(tmp_path / "r", tables, "widgets/fast", records=[*map(step, range(1, 41)), last])
    assert read_of(run, tables).result.judgement == OUTSIDE
    assert report.main([str(run), "--out", str(tmp_path / "report")], tables) == 0
    for name in ("report.html", "report.csv"):
        assert str(OUTSIDE) in (tmp_path / "report" / name).read_text()


def curve_command(*words: object) -> int:
    return recipe_command.build_parser().parse_args(["curve", *map(str, words)])


def test_a_curve_is_made_of_runs_that_differ_in_their_seed(tmp_path, capsys):
    tables = write_tables(tmp_path)
    for seed in (5, 3, 4):
        make_run(tmp_path / "runs" / str(seed), tables, "widgets/fast", overrides={"seed": seed})
    out = tmp_path / "curve.json"
    args = curve_command(tmp_path / "runs", "--out", out)
    assert args.run(args) == 0 and "curve of widgets/fast, 3 seeds" in capsys.readouterr().out
    curve = curves.read(out)
    own = RunDirectory(tmp_path / "runs" / "3").recipe()
    assert curve.why_not(own, Entropies(5.7, 5.2), None) == "" and sorted(curve.runs) == [3, 4, 5]
    assert curve.runs[3].loss[0] == 6.0 and curve.runs[3].validation == {0: 5.0, 40: 5.0}
    assert curve.made_by[0]["versions"]["torch"] == "2.13.0" and curve.made_by[0]["precision"] == "fp32"
    with pytest.raises(ProblemsError, match="exists already"):
        args.run(args)


def test_runs_that_are_no_curve_are_refused_all_at_once(tmp_path):
    tables = write_tables(tmp_path)
    changes = {
        "a": {},
        "b": {"overrides": {"seed": 1234}},
        "c": {"overrides": {"seed": 2, "optimizer": {"lr": 3e-3}}},
        "d": {"overrides": {"seed": 3}, "status": "interrupted"},
        "e": {"overrides": {"seed": 4, "steps": 30, "schedule": {"decay_steps": 40}}},
        "f": {"overrides": {"seed": 5}, "unigram": 5.3},
        "g": {"overrides": {"seed": 6}, "records": [step(n) for n in range(2, 41)] + validations(40)},
        "h": {"overrides": {"seed": 1234}},
    }
    for name, change in changes.items():
        make_run(tmp_path / "runs" / name, tables, "widgets/fast", **change)
    args = curve_command(tmp_path / "runs", "--out", tmp_path / "curve.json")
    with pytest.raises(ProblemsError) as error:
        args.run(args)
    lines = str(error.value).splitlines()
    for name, said in {
        "h": "seed=1234 is that of two other runs",
        "c": "optimizer.lr=0.003 is not the 0.001 of widgets/fast's curve",
        "d": "40 of 40 steps, interrupted",
        "e": "steps=30 is not the number of the other runs",
        "f": "unigram entropy=5.3 is not the 5.2 of widgets/fast's curve",
        "g": "39 of 40 steps, ok",
    }.items():
        assert any(line.startswith(str(tmp_path / "runs" / name)) and said in line for line in lines), name
    assert "a curve of 1 seed: a band is of 3 or more" in lines[-1] and not (tmp_path / "curve.json").exists()


SHIPPED = sorted(catalog.CURVES.glob("*.json"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_curve_is_that_of_its_recipe_as_it_is_now(path):
    """Also where the schema has a key more, which has to be added to the file."""
    curve = curves.read(path)
    assert path.stem == curve.curve_of.replace("/", "-")
    assert curve.facts == facts_of(catalog.load(curve.curve_of))
    assert {len(run.loss) for run in curve.runs.values()} == {catalog.load(curve.curve_of).steps}


def test_shipped_curves_are_small():
    assert SHIPPED and sum(path.stat().st_size for path in SHIPPED) < 1e6
