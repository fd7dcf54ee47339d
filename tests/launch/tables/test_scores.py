"""Scores on tasks as published: verified against each other, shown, listed and reported."""

import csv
import sys

import pytest

from launch import recipe as command
from launch.reports import tables as reported
from launch.reports.entries import entries_of
from launch.tables.scores import scores
from recipes import catalog
from recipes.problems import ProblemsError
from recipes.schema import Downstream
from recipes.tables import FOLDER, read_table

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
    text = output(capsys, monkeypatch, "list", "a100_blog_table2")
    assert "MNLI m/mm 91.4/91.4, QQP 92.7, SQuAD 1.1 F1/EM 95.5/90" in text
    assert text.count("no recipe: ") == 3 and "ALBERT | 3 |" in text and "narrower than its layers" in text


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
    assert "<dt>no recipe</dt><dd>its embedding is narrower" in (out / "report.html").read_text()
    lines: dict[str, dict] = {}
    for line in csv.DictReader((out / "report.csv").open(newline="")):
        lines.setdefault(line["recipe"], line)  # the row's own; those of its fine-tunings follow
    assert "RACE 89.5 (91.8/88.6)" in lines["a100_blog_table2/3.9b"]["published_scores"]
    assert lines["a100_blog_table2/albert"]["status"] == "no recipe"
