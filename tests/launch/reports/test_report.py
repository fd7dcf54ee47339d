"""The report shows what the source printed, what was measured, and never takes the one for the other."""

from __future__ import annotations

import csv
import io
import re
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from PIL import Image
from reported import EVIL, TABLE, Page, make_run, plots, read_of, step

from launch import report
from launch.records.result import read_result
from launch.records.result_text import EXACT, result_text
from launch.reports import entries
from launch.reports.tables import Tables, source_cells
from recipes.schema import Branch


@pytest.fixture(scope="module")
def made(tmp_path_factory, tables):
    """One report of everything that can become of a run: its two files, and the exit code."""
    root = tmp_path_factory.mktemp("made")
    runs, out = root / "runs", root / "out"
    make_run(runs / "full", tables, "widgets/fast", cached=3 * 10**9)
    make_run(runs / "older_full", tables, "widgets/fast", started="2026-06-01T10:00:00+0000")
    make_run(runs / "small", tables, "widgets/fast", tiny=True)
    every_3_s = [step(n, seconds=3.0) for n in range(1, 13)]
    make_run(runs / "going", tables, "widgets/slow", finished=False, records=every_3_s)
    make_run(runs / "oom", tables, "widgets/oom", status="OOM", records=[])
    diverged = {"status": "diverged", "records": [step(1), step(2)]}
    make_run(runs / "diverged", tables, "widgets/slow", started="2026-05-01T10:00:00+0000", **diverged)
    wider = {"batch": {"micro": 2, "global": 16}}
    make_run(runs / "wider", tables, "widgets/slow", overrides=wider, started="2026-04-01T10:00:00+0000")
    code = report.main([str(runs), "--all", "--out", str(out)], tables)
    texts = {name: (out / f"report.{name}").read_text(encoding="utf-8") for name in ("csv", "html")}
    page = Page()
    page.feed(texts["html"])
    page.close()
    return SimpleNamespace(
        code=code,
        page=page,
        records=list(csv.DictReader(io.StringIO(texts["csv"]))),
        out=out,
        runs=runs,
        **texts,
    )


def lines_of(made, recipe: str) -> list[dict]:
    return [record for record in made.records if record["recipe"] == recipe]


def test_cells_stand_as_the_source_prints_them(made):
    rows = [row for table in made.page.tables for row in table]
    assert next(row for row in rows if "TFlops" in row)[:5] == ["GPUs", "Size", "time <s>", "TFlops", "Notes"]
    for printed in (
        ["64", "48B", "2.0s", "4000", "05-26"],
        ["8", "7B", "90.5s", "0.25", ""],
        ["8", "99B", "OOM", "", ""],
    ):
        assert printed in [row[:5] for row in rows]
    assert lines_of(made, "widgets/slow")[0]["published_row"] == "8 | 7B | 90.5s | 0.25 | "


# Recipe, run ("": none was made), column of the CSV, and what stands there or within it.
CELLS = (
    ("quiet/only", "", "status", "not run"),
    ("widgets/oom", "oom", "status", "OOM"),
    ("widgets/oom", "oom", "no_ratio", "OOM, as published"),
    ("widgets/slow", "going", "status", "unfinished"),
    ("widgets/slow", "going", "steps", "12"),
    ("widgets/slow", "going", "time_per_iteration_s", 3.0),
    ("widgets/slow", "going", "samples_per_s", 8 / 3),
    ("widgets/slow", "going", "deviations", "no result.json"),
    ("widgets/slow", "going", "deviations", "steps: 12 of the recipe's 40"),
    ("widgets/slow", "diverged", "status", "diverged"),
    ("widgets/slow", "wider", "status", "measured"),
    ("widgets/slow", "wider", "no_ratio", "not compared: other batch.global"),
    ("widgets/slow", "wider", "ratio_tflops", None),
    ("widgets/fast", "full", "time_per_iteration_s", 0.5),
    ("widgets/fast", "full", "ratio_time_per_iteration_s", 0.25),
    ("widgets/fast", "full", "samples_per_s", 16),
    ("widgets/fast", "full", "cached_gb", 3),
    ("widgets/fast", "full", "published_tflops", 4000),
    ("widgets/fast", "full", "published_samples_per_s", None),
    ("widgets/fast", "full", "deviations",
     "hardware: run on CPU: Abacus 9, 2 cores, the recipe's is 1 GPU (Abacus)"),
    ("widgets/fast", "small", "tiny", "True"),
    ("widgets/fast", "small", "no_ratio", "tiny"),
)  # fmt: skip


@pytest.mark.parametrize(("recipe", "run", "column", "value"), CELLS)
def test_a_cell_of_the_csv(made, recipe, run, column, value):
    (line,) = [record for record in lines_of(made, recipe) if Path(record["run"]).name == run]
    if value is None:
        assert line[column] == ""
    elif isinstance(value, str):
        assert value in line[column]
    else:
        assert float(line[column]) == pytest.approx(value)


def test_rows_stand_in_order_and_their_runs_newest_first(made):
    order = [Path(record["run"]).name for record in lines_of(made, "widgets/slow")]
    assert order == ["going", "diverged", "wider"]
    names = [Path(record["run"]).name for record in lines_of(made, "widgets/fast")]
    assert names.index("full") < names.index("older_full")
    full = lines_of(made, "widgets/fast")[names.index("full")]
    assert float(full["ratio_tflops"]) == pytest.approx(float(full["tflops"]) / 4000)
    assert "not run" in "".join(made.page.text)


def test_a_tiny_run_never_looks_like_the_row(made):
    small = next(r for r in lines_of(made, "widgets/fast") if r["run"].endswith("/small"))
    assert not any(value for key, value in small.items() if key.startswith("ratio_"))
    rows = (row for table in made.page.tables for row in table)
    line = next(row for row in rows if any(cell.startswith("small") for cell in row))
    assert "measured TINY" in line and "x" not in line[-2].replace("tiny, another model", "")
    assert any(text.startswith("tiny: the recipe was shrunk") for text in made.page.text)


def test_what_the_table_does_not_print_is_said(made):
    text = "".join(made.page.text)
    for said in (
        "inferred: optimizer",
        "a public script <i>",
        "unknown: steps",
        "no source says",
        "Impossible as printed.",
        "are <b>",
    ):
        assert said in text, said


def test_the_page_needs_nothing_and_runs_nothing(made):
    assert made.code == 0
    assert not {"script", "link", "iframe", "object", "image"} & made.page.tags and not made.page.open
    assert made.page.references
    assert all(
        reference.startswith(("#", "data:image/svg+xml;base64,")) for reference in made.page.references
    )
    assert not re.search(r"url\(|@import|\w+://", made.html)
    for plot in plots(made.html):
        text = ElementTree.tostring(plot, "unicode")
        assert not re.search(r"url\((?!#)|@import|<script", text)
        assert not [
            value
            for each in plot.iter()
            for key, value in each.items()
            if key.endswith("href") and value[0] != "#"
        ]
    assert EVIL.split("&")[0] in "".join(made.page.text)


def test_links_of_the_page_lead_somewhere(made):
    ids = re.findall(r'\bid="([^"]+)"', made.html)
    assert len(ids) == len(set(ids)) and "img" in made.page.tags
    assert {r[1:] for r in made.page.references if r.startswith("#")} <= set(ids)


def test_the_csv_reads_back_with_the_same_columns_for_every_table(made):
    assert {tuple(record) for record in made.records} == {
        tuple(made.records[0])
    } and None not in made.records[0]
    assert len(made.records) == 3 + 3 + 1 + 1
    assert {record["table"] for record in made.records} == {"widgets", "quiet"}


def test_a_published_table_with_nothing_run_is_a_page(tables, tmp_path, capsys):
    assert report.main(["--table", "quiet", "--out", str(tmp_path)], tables) == 0
    page = (tmp_path / "report.html").read_text()
    assert "not run" in page and "83.2" in page and "<img" not in page
    assert "report.html" in capsys.readouterr().out


def test_tflops_stand_next_to_the_count_that_the_source_made(tables, tmp_path):
    folder = tmp_path / "recipes"
    folder.mkdir()
    exact = re.sub(r"tflops: ([0-9.]+)", r"tflops: \1, tflops_by: exact", TABLE)
    (folder / "widgets.yaml").write_text(exact)
    run = make_run(tmp_path / "r", folder, "widgets/fast")
    result = read_result(run / "result.json")
    entry = next(entry for entry in result.comparison if entry.quantity == "tflops")
    assert entry.measured == result.speed.exact_tflops != result.speed.tflops
    assert entry.unit == "TFLOPS per GPU, exact count"
    line = entries.entries_of(Tables(folder).get("widgets"), [read_of(run, folder)])[0]
    assert line.ratios["tflops"] == result.speed.exact_tflops / 4000
    assert f"TFLOPS: {EXACT}" in result_text(result)
    assert report.main([str(run), "--out", str(tmp_path / "out")], folder) == 0
    page = (tmp_path / "out" / "report.html").read_text()
    assert ">TFLOPS per GPU, exact count (as published)<" in page and EXACT in unescape(page)
    with (tmp_path / "out" / "report.csv").open(newline="") as file:
        (row,) = (row for row in csv.DictReader(file) if row["exact_tflops"])
    assert float(row["tflops"]) == result.speed.tflops
    assert float(row["exact_tflops"]) == result.speed.exact_tflops


def test_what_an_erratum_says_is_marked(tmp_path):
    assert report.main(["--table", "jeanzay_hf_deepspeed_max_size", "--out", str(tmp_path)]) == 0
    html = (tmp_path / "report.html").read_text()
    page = Page()
    page.feed(html)
    assert ["16", "23B", "4", "64", "58.72s", "25.66", "23b-g16 †", "not run"] in [
        row for table in page.tables for row in table
    ]
    marks = [reference[1:] for reference in page.references if reference.startswith("#errata-")]
    assert len(marks) == 3 and all(html.count(f'<dl id="{mark}"><dt>erratum</dt>') == 1 for mark in marks)
    assert "The source contradicts itself" in html


def test_a_row_without_errata_is_not_marked(made):
    assert "†" not in made.html and {record["errata"] for record in made.records} == {""}


def test_rows_that_are_no_recipe_and_runs_that_are_in_no_table(tables, tmp_path, capsys):
    folder = tmp_path / "recipes"
    folder.mkdir()
    broken = TABLE.replace("title: the slow one", "title: the slow one\n    optimiser: {}").replace(
        "  fast:", "  faster:"
    )
    (folder / "widgets.yaml").write_text(broken.replace("oom: true", "validation_loss: 4.5"))
    make_run(tmp_path / "gone", tables, "widgets/fast")
    make_run(tmp_path / "own", tables, "quiet/only", records=[])
    make_run(tmp_path / "another", tables, "widgets/oom")
    asked = [str(tmp_path / name) for name in ("gone", "own", "another")]
    assert report.main([*asked, "--out", str(tmp_path / "out")], folder) == 1
    assert "optimiser: unknown key" in capsys.readouterr().err
    with open(tmp_path / "out" / "report.csv", newline="") as file:
        records = {record["recipe"]: record for record in csv.DictReader(file)}
    assert (
        records["widgets/slow"]["published_row"] == "8 | 7B | 90.5s | 0.25 | "
        and records["widgets/slow"]["status"] == "not run"
    )
    assert {records[name]["table"] for name in ("widgets/fast", "quiet/only")} == {"other-recipes"}
    assert "published numbers: the table has changed since this run" in records["widgets/oom"]["deviations"]
    assert "validation loss 5.0000 here, 4.5 published" in (tmp_path / "out" / "report.html").read_text()


def test_a_table_of_the_users_own(tables, tmp_path):
    own = tmp_path / "my widgets.yaml"
    own.write_text(TABLE)
    make_run(tmp_path / "run", tables, "widgets/fast")
    (tmp_path / "run" / "result.json").write_text(
        (tmp_path / "run" / "result.json").read_text().replace("widgets/fast", "my widgets/fast")
    )
    assert (
        report.main([str(tmp_path / "run"), "--table", str(own), "--out", str(tmp_path / "out")], tables) == 0
    )
    html = (tmp_path / "out" / "report.html").read_text()
    assert 'id="my-widgets"' in html and not re.search(r'\bid="[^"]* ', html) and "measured" in html


def test_cells_that_do_not_fit_are_named(tmp_path):
    (tmp_path / "widgets.yaml").write_text(re.sub(r"(row: [^|]*)[|]", r"\1", TABLE, count=1))
    problems = [str(each) for each in Tables(tmp_path).get("widgets").problems]
    assert any(each.startswith("widgets/") and "separate the cells by |" in each for each in problems)
    assert source_cells({"row": "a | b | |"}, ["A", "B", "C", "D"])[0] == ("a", "b", "", "")
    cells, problem = source_cells({"row": "a | b | c"}, ["A", "B"])
    assert cells == ("a", "b | c") and problem and "3 cells" in problem and "2 columns" in problem
    assert source_cells({}, ["A", "B"])[0] == ("", "")


def test_every_published_table_of_the_project_can_be_shown():
    for name in Tables().published():
        table = Tables().get(name)
        assert table and not table.problems, table and table.problems
        assert all(len(row.cells) == len(table.columns) for row in table.rows)


PLAIN = """\
title: Nothing of it was published
defaults:
  model: {layers: 2, hidden: 32, heads: 2, vocab_size: 300}
  sequence_length: 64
  batch: {global: 8}
  steps: 40
  optimizer: {lr: 1e-3}
rows: {another: {title: the other one}, one: {title: the one}}
"""


def test_runs_on_own_text_come_first_and_stand_under_what_was_trained(tables, tmp_path, monkeypatch):
    """Rows that were not run come last; the page has no path of this machine."""
    monkeypatch.setattr("launch.reports.plots.losses", lambda *_: [])
    text = tmp_path / "mine.txt"
    own = {"data": {"source": "text", "name": str(text), "tokenizer": {"kind": "trained_bpe"}}}
    wider = {"model": {"layers": 3, "hidden": 32, "heads": 2, "vocab_size": 300}}
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "plain.yaml").write_text(PLAIN)
    branch = Branch(run=str(tmp_path / "row"), step=7, stretches=[(0, 0, 8)])
    for name, changed in {"own": own, "wider": wider, "row": {}, "tiny": {"branch": branch}}.items():
        make_run(tmp_path / name, folder, "plain/one", overrides=changed, tiny=name == "tiny")
    asked = [str(tmp_path / name) for name in ("row", "own", "wider", "tiny")]
    assert report.main([*asked, "--out", str(tmp_path / "out")], folder) == 0
    html = (tmp_path / "out" / "report.html").read_text()
    first, second = (part.partition("<h3>Deviations")[0] for part in html.split("<section id=")[2:])
    assert "Runs that are no row" in first and ">not run<" not in first
    titles = re.findall(r"<small>GPT-2 of \S+k parameters on (.*?)</small>", first)
    assert titles == ["mine.txt", "the State of the Union addresses"]
    assert [name in first for name in (">own<", ">wider<", ">row<")] == [True, True, False]
    assert ">row<" in second and second.index(">row<") < second.index(">not run<")
    assert str(tmp_path) not in html and "branch: of row from step 7 on" in html


def test_the_card_of_a_run_by_command(tables, tmp_path, capsys):
    for name in "ab":
        make_run(tmp_path / name, tables, "widgets/fast", tiny=True, finished=name == "a")
    card = tmp_path / "card.png"
    assert report.main([str(tmp_path / name) for name in "ab"] + ["--card", str(card)], tables) == 2
    assert "--card of 2 runs: a card is of one run; name one" in capsys.readouterr().err
    assert report.main([str(tmp_path / "b"), "--card", str(card)], tables) == 0, "unfinished"
    said = "GPT-2 of 237k parameters on the State of the Union addresses, unfinished"
    assert capsys.readouterr().out == f"{card}: {said}\n"
    assert Image.open(card).size == (1200, 630)
