"""Scores on tasks as published: verified against each other, shown, listed and reported."""

import csv
import sys

import pytest

from launch import recipe as command
from launch.reports import tables as reported
from launch.reports.entries import entries_of
from launch.tables.scores import scores
from launch.tables.verifying import verification
from recipes import catalog
from recipes.problems import ProblemsError
from recipes.schema import Downstream
from recipes.tables import FOLDER, read_table

TABLES = ("a100_blog_table1", "a100_blog_table2", "a100_blog_table3")


@pytest.fixture
def copied(tmp_path):
    """Verify one of the three tables with a text of its file replaced, in every place."""

    def verify(table: str, *changes: tuple[str, str]):
        for name in TABLES:
            text = (FOLDER / f"{name}.yaml").read_text()
            for old, new in changes if name == table else ():
                assert old in text
                text = text.replace(old, new)
            (tmp_path / f"{name}.yaml").write_text(text)
        return verification.verify([table], folder=tmp_path)

    return verify


def found(report, subject: str, quantity: str):
    (check,) = (each for each in report.checks if (each.subject, each.quantity) == (subject, quantity))
    return check


@pytest.fixture(scope="module")
def report():
    return verification.verify(["a100_blog_table2", "a100_blog_table3"])


# (row, quantity) -> worked out by hand: tokens of the pretraining over 2M x 1024 x 512; RACE's 1436 and 3498.
BY_HAND = {
    ("a100_blog_table2/3.9b", "trained tokens"): ("1", f"{1.5e6 / 2e6:.3g}", "rounded"),
    ("a100_blog_table2/albert", "trained tokens"): ("3", f"{1.5e6 * 4096 / (2e6 * 1024):.3g}", "exact"),
    ("a100_blog_table2/roberta", "trained tokens"): ("2", f"{5e5 * 8192 / (2e6 * 1024):.3g}", "exact"),
    ("a100_blog_table2/3.9b", "RACE, of middle and high"):
        ("89.5", f"{(1436 * 91.8 + 3498 * 88.6) / 4934:.2f}", "rounded"),
    ("a100_blog_table3/3.9b", "RACE, of middle and high"):
        ("90.9", f"{(1436 * 93.1 + 3498 * 90.0) / 4934:.2f}", "rounded"),
    ("a100_blog_table3/3.9b", "ensemble, squad2.f1"): ("91.7", "91.2, of one model", "no less"),
    ("a100_blog_table3/albert", "ensemble, race.accuracy"): ("89.4", "86.5, of one model", "no less"),
    ("a100_blog_table2/1.3b", "size, squad2.em"): ("87.1", "84.8, of 336m", "better with size"),
}  # fmt: skip


@pytest.mark.parametrize(("subject", "quantity"), BY_HAND)
def test_scores_owe_each_other_what_is_worked_out_by_hand(report, subject, quantity):
    printed, computed, how = BY_HAND[subject, quantity]
    check = found(report, subject, quantity)
    assert check.status == "agrees" and check.printed in (printed, f"{float(printed)}")
    assert computed in check.computed and how in check.how


def test_every_score_of_every_line_is_checked(report):
    """All 10 scores are larger than the next smaller model's, twice; 7 of each ensemble are no less."""
    of = [check.quantity for check in report.checks if check.status == "agrees"]
    assert sum(quantity.startswith("size, ") for quantity in of) == 20
    assert sum(quantity.startswith("ensemble, ") for quantity in of) == 14
    assert of.count("RACE, of middle and high") == 8 and of.count("trained tokens") == 6
    assert report.passed


CHANGED = [
    ("a100_blog_table2", ("89.5 (91.8", "89.9 (91.8"), 'cell "RACE m/h accuracy (test set)"'),
    ("a100_blog_table2", ("accuracy: 92.7", "accuracy: 92.5"), 'cell "QQP accuracy (dev set)"'),
    ("a100_blog_table2", ("90.8 | 92.2", "90.9 | 92.2"), 'cell "MNLI m/mm accuracy (dev set)"'),
    ("a100_blog_table2", ("ALBERT | 3 |", "ALBERT | 2 |"), 'cell "Trained tokens (ratio)"'),
    ("a100_blog_table2", ("steps: 1500000", "steps: 1000000"), "trained tokens"),
    (
        "a100_blog_table3",
        ("race: {accuracy: 89.4}", "race: {accuracy: 89.3}"),
        "setting published.previous.race.accuracy",
    ),
]


@pytest.mark.parametrize(("table", "change", "quantity"), CHANGED)
def test_a_changed_digit_is_unexplained(copied, table, change, quantity):
    assert copied(table).passed
    changed = copied(table, change)
    assert quantity in {check.quantity for check in changed.unexplained}


TOGETHER = [  # a digit of the cell and of the key
    ("a100_blog_table2", [("86.9 / 81.5", "86.9 / 83.5"), ("high: 81.5", "high: 83.5")],
     "RACE, of middle and high"),
    ("a100_blog_table2", [("94.9 / 89.1", "94.9 / 99.1"), ("em: 89.1", "em: 99.1")],
     "SQuAD 1.1, exact matches"),
    ("a100_blog_table2", [("| 92.7 |", "| 92.4 |"), ("accuracy: 92.7", "accuracy: 92.4")],
     "size, qqp.accuracy"),
    ("a100_blog_table3", [("95.8 / 90.5", "95.1 / 90.5"), ("f1: 95.8", "f1: 95.1")], "ensemble, squad1.f1"),
    ("a100_blog_table2", [("Megatron-3.9B | 1 |", "Megatron-3.9B | 2 |"),
                          ("88.6)\"\n      trained_tokens: 1", "88.6)\"\n      trained_tokens: 2")],
     "trained tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("table", "changes", "quantity"), TOGETHER)
def test_a_change_of_cell_and_key_together_contradicts_other_scores(copied, table, changes, quantity):
    changed = copied(table, *changes)
    assert quantity in {check.quantity for check in changed.unexplained}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("single_models: a100_blog_table2", "single_models: a100_blog_tabel2",
         "a100_blog_tabel2: no such published table; did you mean a100_blog_table2"),
        ("    albert:\n", "    3.9b:\n", "3.9b: is a recipe of the table; leave it out"),
    ],
)  # fmt: skip
def test_wrong_evidence_of_scores_is_named(copied, old, new, said):
    with pytest.raises(ProblemsError, match=said):
        copied("a100_blog_table3", (old, new))


# --- a table that is like another one


def test_a_row_starts_from_the_row_of_that_name_in_the_other_table():
    ours, theirs = (catalog.load(f"a100_blog_table{number}/3.9b") for number in (3, 1))
    same = ("model", "steps", "batch", "parallel", "data", "optimizer", "note")
    assert [key for key in same if getattr(ours, key) != getattr(theirs, key)] == []
    assert ours.published.validation_loss is None, "what was published there stays there"
    gpt2 = catalog.load("megatron_paper_results/355m")
    assert gpt2.data == catalog.load("megatron_paper_table1/1.2b-mp-dp").data, "from the defaults there"
    assert (gpt2.model.layers, gpt2.steps) == (24, 300_000)


@pytest.mark.parametrize(
    ("like", "said"),
    [
        ("bse", "own.yaml:2: like=bse: no other table of this folder; did you mean base?"),
        ("own", "like=own: no other table of this folder"),
        ("copy", "like=copy: a table is like one that states its rows itself; name base"),
    ],
)
def test_a_table_like_none_is_refused(tmp_path, like, said):
    (tmp_path / "base.yaml").write_text("title: base\nrows:\n  a: {}\n")
    (tmp_path / "copy.yaml").write_text("title: copy\nlike: base\nrows:\n  a: {}\n")
    (tmp_path / "own.yaml").write_text(f"title: own\nlike: {like}\nrows:\n  a: {{}}\n")
    with pytest.raises(ProblemsError) as refused:
        read_table(tmp_path / "own.yaml")
    assert said in str(refused.value)


# --- shown, listed, reported


def output(capsys, monkeypatch, *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["recipe.py", *arguments])
    assert command.main() == 0
    return capsys.readouterr().out


def test_scores_are_written_as_people_write_them():
    printed = Downstream.model_validate(
        {"mnli": {"matched": 90.8}, "race": {"accuracy": 90.9}, "squad2": {"f1": 91.2, "em": 88.5}}
    )
    assert dict(scores(printed)) == {"MNLI m/mm": "90.8", "SQuAD 2.0 F1/EM": "91.2/88.5", "RACE": "90.9"}


def test_list_has_the_scores_and_the_models_that_are_none(capsys, monkeypatch):
    text = output(capsys, monkeypatch, "list", "--table", "a100_blog_table2")
    assert "MNLI m/mm 91.4/91.4, QQP 92.7, SQuAD 1.1 F1/EM 95.5/90" in text
    assert text.count("no recipe: ") == 3 and "ALBERT | 3 |" in text and "share their parameters" in text


def test_show_has_the_best_before(capsys, monkeypatch):
    text = output(capsys, monkeypatch, "show", "megatron_paper_results/8.3b")
    assert "WikiText-103 perplexity  10.8, 15.8 before" in text
    assert "66.5, 63.2 before" in text
    text = output(capsys, monkeypatch, "show", "a100_blog_table3/3.9b")
    assert "5 fine-tuned models together" in text and "90.9 (93.1/90), 89.4 before" in text


def test_the_report_has_every_line_of_the_source(tmp_path, monkeypatch, capsys):
    table = reported.load(read_table(FOLDER / "a100_blog_table2.yaml"))
    assert table.problems == []
    statuses = {entry.row.name: entry.status for entry in entries_of(table, [])}
    others = dict.fromkeys(("roberta", "albert", "xlnet"), "no recipe")
    assert statuses == {**dict.fromkeys(("336m", "1.3b", "3.9b"), "not run"), **others}
    from launch import report as report_command

    out = tmp_path / "report"
    monkeypatch.setattr(sys, "argv", ["report.py", "--table", "a100_blog_table2", "--out", str(out)])
    assert report_command.main() == 0
    capsys.readouterr()
    markdown = (out / "report.md").read_text()
    assert "**Of all rows**" in markdown and "*no recipe*: its layers share their parameters" in markdown
    lines: dict[str, dict] = {}
    for line in csv.DictReader((out / "report.csv").open(newline="")):
        lines.setdefault(line["recipe"], line)  # the row's own; those of its fine-tunings follow
    assert "RACE 89.5 (91.8/88.6)" in lines["a100_blog_table2/3.9b"]["published_scores"]
    assert lines["a100_blog_table2/albert"]["status"] == "no recipe"
