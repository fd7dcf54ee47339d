"""Scores of fine-tuned models next to those that the row of their pretraining published."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace

import pytest
from reported import Page, make_run, write_tables

from launch.evaluation import finetuning_seeds, pretrained
from launch.evaluation.finetuning_seeds import SeedOutcome
from launch.evaluation.pretrained import Pretrained
from launch.records.facts import TaskScore
from launch.reports import csvfile, scores, writing
from launch.reports.document import assemble
from launch.reports.runs import read_run
from launch.reports.tables import Tables

BERTS = """\
title: Berts
source: another document
columns: [Model, MNLI, RACE]
defaults:
  model: {family: bert, layers: 2, hidden: 32, heads: 2, vocab_size: 300}
  sequence_length: 16
  batch: {global: 4}
  steps: 10
  optimizer: {lr: 1e-3}
  data: {tokenizer: {kind: trained_wordpiece}}
  published: {source: S}
rows:
  small:
    title: small
    published:
      row: "small | 80 / 81 | 70"
      downstream: {mnli: {matched: 80.0, mismatched: 81.0}, race: {accuracy: 70.0}}
  five:
    title: five small ones together
    published: {row: "five | 90 |", ensemble: 5, downstream: {mnli: {matched: 90.0}}}
  large:
    title: large
    model: {layers: 4}
    published: {row: "large | | 75", downstream: {race: {accuracy: 75.0}}}
  unscored:
    title: unscored
    model: {layers: 3}
    published: {row: "unscored | |", time_per_iteration_s: 1.0}
"""
OF_SMALL = Pretrained("/runs/small/checkpoints/step-000010", "berts/small", False, 10, 10, ())
MNLI = (TaskScore("dev", {"accuracy": 0.72}, 100), TaskScore("dev_mismatched", {"accuracy": 0.729}, 100))


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    folder = write_tables(tmp_path_factory.mktemp("recipes"))
    (folder / "berts.yaml").write_text(BERTS)
    return folder


def tuned(folder, tables, of=OF_SMALL, scores=MNLI, task=None, **deviating):
    """A fine-tuning run."""
    task = task or {"name": "mnli", "epochs": 3.0}
    head = {"task_head": "classification", "head_classes": 3, "family": "bert", "vocab_size": 300}
    model = {**head, "layers": 2, "hidden": 32, "heads": 2}
    run = make_run(folder, tables, "berts/small", overrides={"task": task, "model": model, "published": None})
    path = run / "result.json"
    written = {**json.loads(path.read_text()), "recipe": "finetune/mnli", "deviations": []}
    written |= {"task_scores": [vars(score) for score in scores], **deviating}
    path.write_text(json.dumps(written))
    if of is not None:
        pretrained.keep(run, of)
    return run


def document(tables, *runs, names=("berts",), only_named=False):
    found = Tables(tables)
    read = [read_run(run, run.name, found.recipe) for run in runs]
    made = assemble(found, list(names), read, only_named=only_named)
    assert not made.problems
    return made


def lines(made):
    (section,) = [each for each in made.sections if each.table.name == "berts"]
    return [line.cells for line in section.finetuned]


def test_published_scores_stand_there_before_anything_is_run(tables):
    shown = lines(document(tables))
    assert [(cells[0], cells[1], *cells[3:]) for cells in shown] == [
        ("small", "MNLI", "80.0 %", "not run", "", ""),
        ("small", "MNLI", "81.0 %", "not run", "", ""),
        ("small", "RACE", "70.0 %", "not run", "", ""),
        ("five", "MNLI", "90.0 %", "not run", "", ""),
        ("large", "RACE", "75.0 %", "not run", "", ""),
    ]


def test_a_run_of_the_rows_weights_stands_next_to_its_scores(tables, tmp_path):
    made = document(tables, tuned(tmp_path / "mnli", tables))
    shown = lines(made)
    assert [cells[3:] for cells in shown[:2]] == [
        ("80.0 %", "72.0 %", "0.900x", "mnli"),
        ("81.0 %", "72.9 %", "0.900x", "mnli"),
    ]
    assert shown[2][3:5] == ("70.0 %", "not run") and not made.scores
    page = Page()
    page.feed(writing.page(made))
    assert [
        cells for table in page.tables if table[0] == list(scores.FINETUNED_HEADINGS) for cells in table[1:]
    ] == [list(cells) for cells in shown]
    rows = [row for row in csv.DictReader(io.StringIO(csvfile.write(made))) if row["task"]]
    assert [(row["recipe"], row["figure"], row["status"]) for row in rows[:3]] == [
        ("berts/small", "matched", "measured"),
        ("berts/small", "mismatched", "measured"),
        ("berts/small", "accuracy", "not run"),
    ]
    assert float(rows[0]["score"]) == 0.72 and float(rows[0]["published_score"]) == 0.8
    assert float(rows[0]["ratio_score"]) == pytest.approx(0.9) and rows[0]["run"] == str(tmp_path / "mnli")


def test_rows_of_one_pretraining_share_its_fine_tunings(tables, tmp_path):
    """The row of models that answer together has no ratio to a single one."""
    shown = lines(document(tables, tuned(tmp_path / "mnli", tables)))
    assert shown[3][0] == "five" and shown[3][4] == "72.0 %"
    assert shown[3][5] == "not compared: published of models that answer together"


@pytest.mark.parametrize(
    ("changes", "settings", "said"),
    [
        ({"tiny": True}, {}, "tiny, another model"),
        ({"changed": ("model.layers", "steps")}, {}, "pretrained with other model.layers, steps"),
        ({"changed": None}, {}, "the recipe of its pretraining cannot be read"),
        ({"step": 5}, {}, "pretrained for 5 of 10 steps"),
        (
            {},
            {"task": {"name": "mnli", "epochs": 3.0, "train": "a", "dev": "b"}},
            "on other files than the hub's",
        ),
        (
            {},
            {"deviations": [{"kind": "recipe", "key": "steps", "was": 9, "is": 2}]},
            "fine-tuning was cut short (--steps)",
        ),
    ],
)
def test_scores_of_something_else_have_no_ratio(tables, tmp_path, changes, settings, said):
    run = tuned(tmp_path / "mnli", tables, replace(OF_SMALL, **changes), **settings)
    shown = lines(document(tables, run))[0]
    assert shown[4] == "72.0 %" and shown[5] == f"not compared: {said}"
    assert ("(TINY)" in shown[6]) == (changes == {"tiny": True})


def test_other_weights_stand_next_to_no_row(tables, tmp_path):
    runs = [
        tuned(tmp_path / "hub", tables, None),
        tuned(tmp_path / "other", tables, replace(OF_SMALL, recipe="x/y")),
    ]
    made = document(tables, *runs)
    assert {cells[4] for cells in lines(made)} == {"not run"}
    assert [(model, value, how) for _, _, model, value, _, how in made.scores.rows] == [
        (name, value, "fine-tuned") for name in ("hub", "other") for value in ("72.0 %", "72.9 %")
    ]


def test_a_split_without_labels_is_not_scored(tables, tmp_path):
    shown = lines(document(tables, tuned(tmp_path / "mnli", tables, scores=MNLI[:1])))
    assert shown[1][3:6] == ("81.0 %", "not scored", "")


def test_a_row_that_publishes_nothing_shows_what_was_measured(tables, tmp_path):
    shown = lines(
        document(tables, tuned(tmp_path / "mnli", tables, replace(OF_SMALL, recipe="berts/unscored")))
    )
    assert [cells[3:] for cells in shown if cells[0] == "unscored"] == [
        ("not published", "72.0 %", "", "mnli"),
        ("not published", "72.9 %", "", "mnli"),
    ]


def test_of_several_runs_median_and_ensemble_are_shown(tables, tmp_path, monkeypatch):
    several = tmp_path / "several"
    seeds = [SeedOutcome(seed, MNLI) for seed in range(3)] + [SeedOutcome(3, problem="killed")]
    runs = [tuned(several / seed.name, tables) for seed in seeds[:3]]
    joined = (TaskScore("dev", {"accuracy": 0.88}, 100),)
    monkeypatch.setattr(finetuning_seeds, "ensemble", lambda out, members: joined)
    finetuning_seeds.summarize(several, seeds, average=True)
    shown = lines(document(tables, *runs, names=(), only_named=False))
    assert [cells[3:] for cells in shown if cells[:3] == ("small", "MNLI", "accuracy, matched dev set")] == [
        ("80.0 %", "72.0 %", "0.900x", "several, median of 3 seeds"),
        ("80.0 %", "88.0 %", "not compared: published of one model", "several, 3 together"),
    ]
    five = [cells[4:] for cells in shown if cells[0] == "five"]
    assert five[1] == ("88.0 %", "0.978x", "several, 3 together")


def test_a_report_of_one_table_takes_fine_tunings_of_its_rows(tmp_path, tables):
    own, other = tuned(tmp_path / "own", tables), tuned(tmp_path / "other", tables, None)
    made = document(tables, own, other, only_named=True)
    assert made.notes == ["1 run of other tables left out (--table)"] and lines(made)[0][6] == "own"
