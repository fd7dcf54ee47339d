"""The report shows what the source printed, what was measured, and never takes the one for the other."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from launch import out_of_memory, report, results, startup
from launch.reports import comparing, curves, figures, finding, lines, writing
from launch.reports import runs as reading
from launch.reports.lines import compared as compared_with_row
from launch.reports.svg import PALETTE
from launch.reports.tables import Tables, source_cells
from recipes import catalog
from recipes.schema import Recipe
from recipes.tiny import tiny as shrink

EVIL = '<script>alert("x")</script> & $5 | *b*'
TABLE = """\
title: 'Widgets <script>alert("x")</script> & $5 | *b*'
source: "A document & its table <1>"
columns: [GPUs, Size, "time <s>", TFlops, Notes]
note: Times are <b>rounded</b>.
defaults:
  model: {layers: 4, hidden: 64, heads: 4, vocab_size: 300}
  sequence_length: 64
  batch: {micro: 2, accumulation: 4, global: 8}
  parallel: {tp: 1, pp: 1, dp: 1}
  steps: 40
  optimizer: {lr: 1e-3}
  hardware: {name: Abacus, gpus: 1}
  inferred: {optimizer: "a public script <i>"}
  unknown: {steps: no source says}
rows:
  fast:
    title: the fast one
    published: {source: S, row: "64 | 48B | 2.0s | 4000 | 05-26", time_per_iteration_s: 2.0, tflops: 4000.0, size_label: "48B"}
    note: Impossible as printed.
  slow:
    title: the slow one
    published: {source: S, row: "8 | 7B | 90.5s | 0.25 |", time_per_iteration_s: 90.5, tflops: 0.25}
  oom:
    title: too large
    published: {source: S, row: "8 | 99B | OOM | |", oom: true}
"""
QUIET = """\
title: never run
source: another document
columns: [num_gpu, samples/sec]
rows:
  only:
    title: only row
    model: {layers: 2, hidden: 32, heads: 2, vocab_size: 300}
    sequence_length: 16
    batch: {global: 4}
    steps: 10
    optimizer: {lr: 1e-3}
    published: {source: S, row: "8 | 83.2", samples_per_s: 83.2}
    inferred: {optimizer: the paper}
"""
MACHINE = {
    "host": "h", "cpu": "Abacus 9", "cores": 2, "memory_gb": 8.0, "accelerator": "cpu", "accelerators": 0, "accelerator_memory_gb": None,
    "cuda": None, "versions": {"python": "3.11", "torch": "2.13.0"}, "git": {"commit": "abc", "dirty": False},
}  # fmt: skip


def step(number: int, loss: float | None = None, seconds: float = 0.5) -> dict:
    loss = 6.0 - math.log(number) / 2 if loss is None else loss
    return {
        "kind": "step", "step": number, "loss": loss, "lr": 1e-3, "grad_norm": 1.0, "loss_scale": 1.0, "skipped": False, "seconds": seconds,
        "data_seconds": 0.0, "samples_per_s": 8 / seconds, "tokens_per_s": 512 / seconds, "tflops": 0.1, "exact_tflops": 0.1,
        "peak_memory_bytes": 10**9, "memory_kind": "resident set", "launch_step": number, "time": 0.0,
    }  # fmt: skip


def validations(last: int, loss: float = 5.0) -> list[dict]:
    return [{"kind": "validation", "step": number, "loss": loss, "time": 0.0} for number in (0, last)]


def make_run(folder: Path, tables: Path, row: str, *, tiny=False, status="ok", started="2026-07-01T10:00:00+0000", records=None,
             cached=None, finished=True, overrides=None, environment=None, facts=None) -> Path:  # fmt: skip
    """A run directory as `launch/pretrain.py` leaves it, its result made by the function that makes them."""
    original = Tables(tables).recipe(row)
    recipe = shrink(original) if tiny else original
    if overrides:
        values = recipe.model_dump(by_alias=True, exclude_unset=True)
        recipe = Recipe.model_validate({**values, **overrides})
    name = row + ("-tiny" if tiny else "")
    plan = {
        "ds_name": "zero1", "zero_stage": 1, "offload": "none", "precision": "fp32", "padded_vocab": 384, "notices": [],
        "layout": {"tp": 1, "pp": 1, "dp": 1, "micro": 2, "accumulation": 4, "global_batch": recipe.batch.global_}, **(facts or {}),
    }  # fmt: skip
    records = [step(n) for n in range(1, 41)] + validations(40) if records is None else records
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(catalog.dump(recipe))
    (folder / "ds_config.json").write_text(json.dumps({"zero_optimization": {"stage": plan["zero_stage"]}}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    command = ["launch/pretrain.py", *(["--tiny"] if tiny else [])]
    launch = {"started": started, "command": command, "recipe": name, "plan": plan, **MACHINE, **(environment or {})}
    (folder / "environment.json").write_text(json.dumps({"launches": [launch]}))
    if finished:
        ds = json.loads((folder / "ds_config.json").read_text())
        made = SimpleNamespace(recipe=recipe, ds=ds, **{**plan, "layout": SimpleNamespace(**plan["layout"])})
        results.write_result(folder / "result.json", results.result_row(
            made, records, name=name, described=MACHINE, original=recipe if tiny else original, tiny=tiny, status=status,
            cached_bytes=cached, entropies={"uniform": 5.7, "unigram": 5.2},
        ))  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def tables(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "widgets.yaml").write_text(TABLE)
    (folder / "quiet.yaml").write_text(QUIET)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory, tables):
    """One report of everything that can become of a run: its three files, and the exit code."""
    root = tmp_path_factory.mktemp("made")
    runs, out = root / "runs", root / "out"
    make_run(runs / "full", tables, "widgets/fast", cached=3 * 10**9)
    make_run(runs / "older_full", tables, "widgets/fast", started="2026-06-01T10:00:00+0000")
    make_run(runs / "small", tables, "widgets/fast", tiny=True)
    make_run(runs / "going", tables, "widgets/slow", finished=False, records=[step(n, seconds=3.0) for n in range(1, 13)])
    make_run(runs / "oom", tables, "widgets/oom", status="OOM", records=[])
    make_run(runs / "diverged", tables, "widgets/slow", status="diverged", started="2026-05-01T10:00:00+0000", records=[step(1), step(2)])
    make_run(runs / "wider", tables, "widgets/slow", overrides={"batch": {"micro": 2, "global": 16}}, started="2026-04-01T10:00:00+0000")
    code = report.main([str(runs), "--all", "--out", str(out)], tables)
    texts = {name: (out / f"report.{name}").read_text(encoding="utf-8") for name in ("md", "csv", "html")}
    page = Page()
    page.feed(texts["html"])
    page.close()
    return SimpleNamespace(code=code, page=page, records=list(csv.DictReader(io.StringIO(texts["csv"]))), out=out, runs=runs, **texts)


class Page(HTMLParser):
    """Tags, links, visible text and tables of a page; a tag that is closed wrongly is an error."""

    VOID = {"meta", "br", "hr", "img", "input", "link"}

    def __init__(self) -> None:
        super().__init__()
        self.tags, self.references, self.text, self.tables, self.open = set(), [], [], [], []

    def handle_starttag(self, tag, attributes) -> None:
        self.tags.add(tag)
        self.references += [value for key, value in attributes if key in ("href", "src", "xlink:href", "data", "action", "srcset")]
        assert not [key for key, _ in attributes if key.startswith("on")], "an event handler"
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag, attributes) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        self.text.append(data)
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data


def plots(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(plot) for plot in re.findall(r"<svg.*?</svg>", page, re.S)]


def lines_of(made, recipe: str) -> list[dict]:
    return [record for record in made.records if record["recipe"] == recipe]


def test_cells_stand_as_the_source_prints_them(made):
    rows = [row for table in made.page.tables for row in table]
    assert next(row for row in rows if "TFlops" in row)[:5] == ["GPUs", "Size", "time <s>", "TFlops", "Notes"]
    for printed in (["64", "48B", "2.0s", "4000", "05-26"], ["8", "7B", "90.5s", "0.25", ""], ["8", "99B", "OOM", "", ""]):
        assert printed in [row[:5] for row in rows]
    assert lines_of(made, "widgets/slow")[0]["published_row"] == "8 | 7B | 90.5s | 0.25 | "
    assert "| 64 | 48B | 2.0s | 4000 | 05-26 | fast" in made.md


def test_every_row_is_there_run_or_not(made):
    assert [r["status"] for r in lines_of(made, "quiet/only")] == ["not run"]
    assert [r["status"] for r in lines_of(made, "widgets/oom")] == ["OOM"]
    assert [r["status"] for r in lines_of(made, "widgets/slow")] == ["unfinished", "diverged", "measured"]
    assert "not run" in made.md and "not run" in "".join(made.page.text)


def test_runs_of_a_row_come_newest_first(made):
    names = [Path(record["run"]).name for record in lines_of(made, "widgets/fast")]
    assert names.index("full") < names.index("older_full")


def test_measured_numbers_and_ratios(made):
    full = next(r for r in lines_of(made, "widgets/fast") if r["run"].endswith("/full"))
    assert float(full["time_per_iteration_s"]) == 0.5 and float(full["ratio_time_per_iteration_s"]) == 0.25
    assert float(full["samples_per_s"]) == 16 and float(full["cached_gb"]) == 3
    assert float(full["ratio_tflops"]) == pytest.approx(float(full["tflops"]) / 4000)
    assert full["published_tflops"] == "4000.0" and full["published_samples_per_s"] == ""
    assert "hardware: run on CPU: Abacus 9, 2 cores, the recipe's is 1 GPUs (Abacus)" in full["deviations"]


def test_a_tiny_run_never_looks_like_the_row(made):
    small = next(r for r in lines_of(made, "widgets/fast") if r["run"].endswith("/small"))
    assert small["tiny"] == "True" and small["recipe"] == "widgets/fast"
    assert not any(value for key, value in small.items() if key.startswith("ratio_")) and "tiny" in small["no_ratio"]
    line = next(row for table in made.page.tables for row in table if row[-1].startswith("small"))
    assert "measured TINY" in line and "x" not in line[-3].replace("tiny, another model", "")
    assert "**TINY** measured" in made.md
    assert any(text.startswith("tiny: the recipe was shrunk") for text in made.page.text)


def test_a_run_of_another_batch_is_not_compared(made):
    wider = next(r for r in lines_of(made, "widgets/slow") if r["run"].endswith("/wider"))
    assert wider["no_ratio"] == "not compared: other batch.global" and not wider["ratio_tflops"]


def test_out_of_memory_is_compared_as_such(made):
    assert lines_of(made, "widgets/oom")[0]["no_ratio"] == "OOM, as published"


def test_an_unfinished_run_is_taken_from_its_metrics(made):
    going = lines_of(made, "widgets/slow")[0]
    assert going["steps"] == "12" and float(going["time_per_iteration_s"]) == 3.0 and float(going["samples_per_s"]) == pytest.approx(8 / 3)
    assert "no result.json" in going["deviations"] and "steps: 12 of the recipe's 40" in going["deviations"]


def test_what_the_table_does_not_print_is_said(made):
    text = "".join(made.page.text)
    for said in ("inferred: optimizer", "a public script <i>", "unknown: steps", "no source says", "Impossible as printed.", "are <b>"):
        assert said in text, said
    assert "**Of all rows**\n\n- *unknown: steps*: no source says" in made.md
    assert re.search(r"fast \[\^widgets-1\]", made.md) and re.search(r"^\[\^widgets-1\]: fast\..*Impossible as printed", made.md, re.M)


def test_the_page_needs_nothing_and_runs_nothing(made):
    assert made.code == 0
    assert not {"script", "link", "iframe", "object", "img", "image"} & made.page.tags and not made.page.open
    assert made.page.references and all(reference.startswith("#") for reference in made.page.references)
    assert not re.search(r"url\((?!#)|@import", made.html)
    addresses = set(re.findall(r"\w+://[^\"]+", made.html))
    assert addresses == {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}, "more than the names of XML's vocabularies"
    assert EVIL.split("&")[0] in "".join(made.page.text)
    assert "<script" not in made.md and "\\|" in made.md


def test_ids_of_the_plots_do_not_meet(made):
    ids = re.findall(r'\bid="([^"]+)"', made.html)
    assert len(ids) == len(set(ids)) and "svg" in made.page.tags
    assert {r[1:] for r in made.page.references if r} <= set(ids)


def test_plots_say_their_units_and_leave_incomparable_runs_out(made):
    text = "".join(made.page.text)
    assert "loss (nats per token)" in text and "TFLOPS per GPU, published formula, logarithmic axis" in text
    assert "2 runs left out" in text and "published as out of memory" in text and "samples per second, all GPUs" in text


def test_only_comparable_runs_are_points_of_the_throughput(made):
    plot = next(plot for plot in plots(made.html) if "t-widgets-tflops-" in ElementTree.tostring(plot, "unicode"))
    points = [mark for mark in plot.iter("{http://www.w3.org/2000/svg}use") if PALETTE[1] in mark.get("style", "")]
    # Two of "fast", the unfinished and the diverged one of "slow", and the one in the legend: neither the tiny nor the wider one.
    assert len(points) == 5


def test_the_csv_reads_back_with_the_same_columns_for_every_table(made):
    assert {tuple(record) for record in made.records} == {tuple(made.records[0])} and None not in made.records[0]
    assert len(made.records) == 3 + 3 + 1 + 1
    assert {record["table"] for record in made.records} == {"widgets", "quiet"}


def test_markdown_tables_have_whole_lines(made):
    for block in re.findall(r"(?:^\|.*\n)+", made.md, re.M):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1, block


def test_a_published_table_with_nothing_run_is_a_page(tables, tmp_path, capsys):
    assert report.main(["--table", "quiet", "--out", str(tmp_path)], tables) == 0
    page = (tmp_path / "report.html").read_text()
    assert "not run" in page and "83.2" in page and "<svg" in page and "Nothing of this table has been measured" in page
    assert "report.html" in capsys.readouterr().out


def test_a_real_result_of_a_tiny_run(tables, tmp_path):
    """result.json of an earlier version, without the keys that came later."""
    run = make_run(tmp_path / "r", tables, "widgets/fast", tiny=True)
    result = {
        "recipe": "widgets/fast-tiny", "title": "the fast one (tiny)", "status": "ok", "ds_config": "zero1",
        "layout": {"tp": 1, "pp": 1, "dp": 1, "micro": 8, "accumulation": 1, "global_batch": 8}, "processes": 1, "precision": "bf16",
        "parameters": 236736, "parameters_summed_over_tp_ranks": 236928, "steps": 40, "train_loss": 5.816829013824463,
        "validation_loss": 5.7662529945373535, "uniform_entropy": 6.2324480165505225, "unigram_entropy": 5.265203263376618,
        "seconds_per_step": 0.01856876400006513, "samples_per_s": 430.831045080434, "tflops": 0.03916539582265407,
        "peak_memory_bytes": 670081024, "memory_kind": "resident set", "hardware": "CPU: AMD EPYC, 2 cores",
        "deviations": ["tiny: the recipe was shrunk (--tiny), so its numbers are not those of the model it names"], "comparison": [],
    }  # fmt: skip
    (run / "result.json").write_text(json.dumps(result))
    assert report.main([str(run), "--out", str(tmp_path / "out")], tables) == 0
    page = (tmp_path / "out" / "report.html").read_text()
    assert "0.01857" in page and "236,928 summed over TP ranks" in page and "not compared: tiny" in page


@pytest.mark.parametrize(
    "broken, text, named",
    [
        ("metrics.jsonl", '{"kind": "step"\n{}\n', "metrics.jsonl:1"),
        ("metrics.jsonl", '{"kind": "step", "step": 1, "loss": 1.0}\n', "step 1 has no seconds"),
        ("result.json", "{", "result.json: not JSON"),
        ("result.json", "[1]", "result.json: holds list"),
        ("result.json", '{"recipe": "widgets/fast", "status": "ok", "tflops": "many", "steps": 40}', "tflops='many' is no number"),
        ("recipe.yaml", "title: 3", "recipe.yaml: not the recipe"),
        ("environment.json", "\0", "environment.json: not JSON"),
    ],
)
def test_a_broken_file_is_named_and_the_rest_reported(tables, tmp_path, capsys, monkeypatch, broken, text, named):
    monkeypatch.setattr("launch.reports.figures.losses", lambda *_: [])  # plots take most of the time and are checked elsewhere
    monkeypatch.setattr("launch.reports.document._comparison_figures", lambda *_: ())
    make_run(tmp_path / "runs" / "good", tables, "widgets/slow")
    bad = make_run(tmp_path / "runs" / "bad", tables, "widgets/fast")
    (bad / broken).write_text(text)
    assert report.main([str(tmp_path / "runs"), "--out", str(tmp_path / "out")], tables) == 1
    assert named in capsys.readouterr().err
    records = list(csv.DictReader((tmp_path / "out" / "report.csv").read_text().splitlines()))
    assert any(record["recipe"] == "widgets/slow" and record["status"] == "measured" for record in records)
    assert any(record["run"].endswith("/bad") for record in records)
    assert "Could not be read" in (tmp_path / "out" / "report.html").read_text()


def test_what_cannot_be_reported_is_refused_at_once(tables, tmp_path, capsys):
    (tmp_path / "holiday").mkdir()
    (tmp_path / "holiday" / "photo.jpg").write_text("")
    (tmp_path / "file").write_text("")
    out = tmp_path / "out"
    asked = [str(tmp_path / name) for name in ("holiday", "file", "holidey", "none*")]
    assert report.main([*asked, "--table", "widgts", "--out", str(out)], tables) == 2
    error = capsys.readouterr().err
    for said in ("did you mean widgets?", "it holds photo.jpg", "is a file", "did you mean holiday?", "no run directory matches"):
        assert said in error, said
    assert not out.exists()
    assert report.main([], tables) == 2 and "--all" in capsys.readouterr().err


def test_only_former_reports_are_replaced(tables, tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert report.main(["--table", "quiet", "--out", str(tmp_path)], tables) == 0
    assert "replaced" not in capsys.readouterr().out
    assert report.main(["--table", "quiet", "--out", str(tmp_path)], tables) == 0
    assert "replaced" in capsys.readouterr().out
    (tmp_path / "report.md").write_text("my own notes")
    before = (tmp_path / "report.html").read_bytes()
    assert report.main(["--table", "quiet", "--out", str(tmp_path)], tables) == 2
    assert "report.md" in capsys.readouterr().err
    assert (tmp_path / "report.md").read_text() == "my own notes" and (tmp_path / "report.html").read_bytes() == before
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_directory_is_made_only_for_a_report(tables, tmp_path, capsys, monkeypatch):
    def refuse(*_, **__):
        raise ValueError("refused late")

    out = tmp_path / "deep" / "out"
    monkeypatch.setattr("launch.reports.document.assemble", refuse)
    assert report.main(["--table", "quiet", "--out", str(out)], tables) == 2
    assert "refused late" in capsys.readouterr().err and not (tmp_path / "deep").exists()
    (tmp_path / "file").write_text("")
    assert report.main(["--table", "quiet", "--out", str(tmp_path / "file" / "out")], tables) == 2
    assert "is a file" in capsys.readouterr().err
    (tmp_path / "theirs").mkdir()
    monkeypatch.setattr("launch.reports.writing.os.access", lambda path, mode: path != tmp_path / "theirs")
    assert report.main(["--table", "quiet", "--out", str(tmp_path / "theirs" / "out")], tables) == 2
    assert "not yours to write" in capsys.readouterr().err and not any((tmp_path / "theirs").iterdir())


def test_default_places():
    assert str(writing.default_directory(["widgets"], [], False)) == "reports/widgets"
    assert str(writing.default_directory([], ["a/zero1", "b/zero1"], False)) == "reports/a-zero1-and-b-zero1"
    assert str(writing.default_directory([], ["a", "b"], True)) == "reports/all-tables"
    assert str(writing.default_directory([], [str(n) for n in range(9)], False)) == "reports/runs"
    assert str(writing.default_directory([], [".."], False)) == "reports/runs"


def test_finding_runs(tmp_path, monkeypatch):
    for name in ("a/x", "b/x", "c"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").write_text("")
    (tmp_path / "c" / "checkpoints").mkdir()
    (tmp_path / "c" / "checkpoints" / "recipe.yaml").write_text("")
    (tmp_path / "b" / "up").symlink_to(tmp_path)
    found = finding.find([str(tmp_path), str(tmp_path / "a" / "x"), str(tmp_path / "*")])
    assert [str(path.relative_to(tmp_path)) for path in found] == ["a/x", "b/x", "c"]
    assert finding.labels(found) == ["a/x", "b/x", "c"]
    monkeypatch.chdir(tmp_path)
    assert finding.find(["[ab]/x"]) == [Path("a/x"), Path("b/x")]


def compared(tables, tmp_path, *second, **changes) -> comparing.Comparison:
    """A run and one that differs from it in `changes`."""
    a = make_run(tmp_path / "a", tables, "widgets/fast")
    b = make_run(tmp_path / "b", tables, "widgets/fast", **changes)
    read = Tables(tables).recipe
    return comparing.compare([reading.read_run(a, "a", read), reading.read_run(b, "b", read)])


def outcome(tables, folder, row="widgets/fast", **changes) -> str:
    """What the line of a run says beside the published numbers."""
    read = reading.read_run(make_run(folder, tables, row, **changes), "r", Tables(tables).recipe)
    return compared_with_row(Tables(tables).get("widgets").row(row.partition("/")[2]), read).outcome


def test_a_run_in_another_layout_is_not_compared(tables, tmp_path):
    shares = {"micro": 2, "accumulation": 4, "global_batch": 8}
    for key in ("tp", "pp", "dp"):
        said = outcome(tables, tmp_path / key, facts={"layout": {**shares, "tp": 1, "pp": 1, "dp": 1, key: 2}})
        assert said == f"not compared: other parallel.{key}"
    said = outcome(tables, tmp_path / "zero3", facts={"zero_stage": 3, "ds_name": "zero3"})
    assert said == "not compared: other ds_config (ZeRO-3, offload none; the row's is ZeRO-1, offload none)"
    run = make_run(tmp_path / "changed", tables, "widgets/fast")  # with a file of one's own that is called zero1.json
    (run / "ds_config.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    read = reading.read_run(run, "r", Tables(tables).recipe)
    assert "ZeRO-2" in compared_with_row(Tables(tables).get("widgets").row("fast"), read).outcome
    assert "time 0.250x" in outcome(tables, tmp_path / "as_written")


def test_tflops_stand_beside_the_count_that_the_source_made(tables, tmp_path):
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "widgets.yaml").write_text(TABLE.replace("tflops: 4000.0,", "tflops: 4000.0, tflops_by: exact,"))
    run = make_run(tmp_path / "r", folder, "widgets/fast")
    result = json.loads((run / "result.json").read_text())
    entry = next(entry for entry in result["comparison"] if entry["quantity"] == "tflops")
    assert entry["measured"] == result["exact_tflops"] != result["tflops"] and entry["unit"] == "TFLOPS per GPU, exact count"
    line = lines.lines_of(Tables(folder).get("widgets"), [reading.read_run(run, "r", Tables(folder).recipe)])[0]
    assert line.ratios["tflops"] == result["exact_tflops"] / 4000 and figures._measured(line, "tflops") == result["exact_tflops"]


# --- out of memory

TRACEBACK = """\
Traceback (most recent call last):
  File "launch/engine.py", line 1, in train_step
    raise ValueError("no OutOfMemoryError, CUDA out of memory")
{}
"""
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


@pytest.mark.parametrize("said", [
    OOM,
    "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "RuntimeError: [enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8.",
    "torch.AcceleratorError: CUDA error: out of memory",
    "torch.distributed.DistBackendError: NCCL error\nncclUnhandledCudaError: failed.\nLast error:\nCuda failure 2 'out of memory'",
    "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 8 GiB",
])  # fmt: skip
def test_tracebacks_that_say_oom(said):
    assert out_of_memory.line(TRACEBACK.format(said))
    assert out_of_memory.line(TRACEBACK.format("ValueError: no")) is None, "a line of source code counts"


def test_exceptions_that_are_an_oom():
    import torch

    for error in (torch.OutOfMemoryError("CUDA out of memory."), MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")):
        assert out_of_memory.said_by(error)
    for error in (RuntimeError("Connection closed by peer"), ValueError("CUDA out of memory"), RuntimeError("out of tune")):
        assert out_of_memory.said_by(error) is None
    assert not startup._lost_peers(RuntimeError("NCCL error: Cuda failure 2 'out of memory'")), "it would wait to be ended, and say nothing"
    assert startup._lost_peers(RuntimeError("NCCL communicator was aborted"))


def test_an_oom_of_any_rank_is_an_oom_without_a_result(tables, tmp_path):
    run = make_run(tmp_path / "r", tables, "widgets/oom", finished=False, records=[])
    (run / "error-rank-2.txt").write_text(TRACEBACK.format("RuntimeError: something else"))
    assert read_status(run, tables) == "unfinished"
    (run / "error-rank-13.txt").write_text(TRACEBACK.format(OOM))
    (run / "error-rank-3.txt").write_text(TRACEBACK.format(OOM))
    read = reading.read_run(run, "r", Tables(tables).recipe)
    assert read.status == "OOM" and not read.problems
    assert read.deviations[0] == f"OOM: rank 3: {OOM} (and 1 more)" and not any(line.startswith("unfinished") for line in read.deviations)
    assert compared_with_row(Tables(tables).get("widgets").row("oom"), read).outcome == "OOM, as published"
    assert compared_with_row(Tables(tables).get("widgets").row("fast"), read).outcome == "OOM, published as running"
    (run / "recipe.yaml").unlink()
    assert read_status(run, tables) == "OOM", "whatever else cannot be read"


def test_an_oom_counts_against_an_older_result_and_not_against_a_whole_run(tables, tmp_path):
    for status, becomes in (("interrupted", "OOM"), ("saving", "OOM"), ("ok", "measured")):
        run = make_run(tmp_path / status, tables, "widgets/fast", status=status)
        (run / "error-rank-1.txt").write_text(TRACEBACK.format(OOM))
        assert read_status(run, tables) == becomes
    with open(tmp_path / "ok" / "metrics.jsonl", "a") as file:
        file.write(json.dumps(step(41)) + "\n")
    assert read_status(tmp_path / "ok", tables) == "OOM"


def read_status(run: Path, tables: Path) -> str:
    return reading.read_run(run, "r", Tables(tables).recipe).status


def test_a_run_that_was_killed_in_its_last_checkpoint_is_measured(tables, tmp_path):
    run = make_run(tmp_path / "r", tables, "widgets/fast", status="saving")
    read = reading.read_run(run, "r", Tables(tables).recipe)
    line = compared_with_row(Tables(tables).get("widgets").row("fast"), read)
    assert line.status == "saving" and "time 0.250x" in line.outcome
    records = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(records[:20]) + "\n")  # resumed from a checkpoint in the middle
    assert read_status(run, tables) == "unfinished"


def test_where_two_runs_part(tables, tmp_path):
    records = [step(n, 6.0 - math.log(n) / 2 + (0.25 if n >= 17 else 1e-7) + (0.5 if n == 30 else 0), 1.0) for n in range(1, 41)]
    found = compared(tables, tmp_path, records=records + validations(40), facts={"zero_stage": 3, "ds_name": "zero3"},
                     environment={"versions": {"python": "3.11", "torch": "2.14.0"}})  # fmt: skip
    assert "40 common steps: first differ by more than rounding (2.0e-06 of the loss) at step 17, by 2.50e-01" in found.findings[0]
    assert "largest difference 7.50e-01 at step 30" in found.findings[0] and "equal to rounding" in found.findings[1]
    configuration = {row.name: row.values for row in found.configuration}
    assert configuration == {
        "ds_config": ("zero1", "zero3"), "versions.torch": ("2.13.0", "2.14.0"), "deepspeed.zero_optimization.stage": ("1", "3"),
    }  # fmt: skip
    outcomes = {row.name: row for row in found.results}
    assert outcomes["time per step (s)"].values == ("0.5", "1") and outcomes["time per step (s)"].changes == ("2.000x",)
    assert outcomes["training loss (nats per token, last 10 steps)"].changes == ("+0.25",) and not found.remarks


def test_losses_on_other_text_are_not_compared(tables, tmp_path):
    found = compared(tables, tmp_path, overrides={"data": {"source": "text", "name": "x.txt"}, "seed": 7})
    assert "not comparable, other data, vocabulary or objective (data.source: packaged / text, data.name: none / x.txt)" in found.remarks[0]
    assert "other seeds (1234 / 7)" in found.remarks[1] and not found.findings
    assert {row.name: row.changes for row in found.results}["validation loss (nats per token)"] == ("not comparable",)


def test_losses_beside_other_entropies_are_not_compared(tables, tmp_path):
    """The same recipe over a file that has changed in between."""
    a, b = (make_run(tmp_path / name, tables, "widgets/fast") for name in "ab")
    (b / "result.json").write_text((b / "result.json").read_text().replace('"unigram_entropy": 5.2', '"unigram_entropy": 5.3'))
    read = [reading.read_run(path, path.name, Tables(tables).recipe) for path in (a, b)]
    assert "unigram entropy of their validation text differs (5.2000 / 5.3000)" in comparing.compare(read).remarks[0]


def test_a_resumed_run_is_not_its_former_result(tables, tmp_path):
    run = make_run(tmp_path / "r", tables, "widgets/fast", status="interrupted", records=[step(1), step(2)])
    assert reading.read_run(run, "r", Tables(tables).recipe).status == "interrupted"
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps(step(3)) + "\n" + '{"kind": "st')  # and the line that it is writing
    going = reading.read_run(run, "r", Tables(tables).recipe)
    assert (going.status, going.row["steps"], going.problems) == ("unfinished", 3, ())


def test_rows_that_are_no_recipe_and_runs_that_are_in_no_table(tables, tmp_path, capsys):
    folder = tmp_path / "recipes"
    folder.mkdir()
    broken = TABLE.replace("title: the slow one", "title: the slow one\n    optimiser: {}").replace("  fast:", "  faster:")
    (folder / "widgets.yaml").write_text(broken.replace("oom: true", "validation_loss: 4.5"))
    make_run(tmp_path / "gone", tables, "widgets/fast")
    make_run(tmp_path / "own", tables, "quiet/only", records=[])
    make_run(tmp_path / "beside", tables, "widgets/oom")
    asked = [str(tmp_path / name) for name in ("gone", "own", "beside")]
    assert report.main([*asked, "--out", str(tmp_path / "out")], folder) == 1
    assert "optimiser: unknown key" in capsys.readouterr().err
    with open(tmp_path / "out" / "report.csv", newline="") as file:
        records = {record["recipe"]: record for record in csv.DictReader(file)}
    assert records["widgets/slow"]["published_row"] == "8 | 7B | 90.5s | 0.25 | " and records["widgets/slow"]["status"] == "not run"
    assert {records[name]["table"] for name in ("widgets/fast", "quiet/only")} == {"other-recipes"}
    assert "published numbers: the table has changed since this run" in records["widgets/oom"]["deviations"]
    assert "validation loss 5.0000 here, 4.5 published" in (tmp_path / "out" / "report.md").read_text()


def test_a_table_of_the_users_own(tables, tmp_path):
    own = tmp_path / "my widgets.yaml"
    own.write_text(TABLE)
    make_run(tmp_path / "run", tables, "widgets/fast")
    (tmp_path / "run" / "result.json").write_text((tmp_path / "run" / "result.json").read_text().replace("widgets/fast", "my widgets/fast"))
    assert report.main([str(tmp_path / "run"), "--table", str(own), "--out", str(tmp_path / "out")], tables) == 0
    html = (tmp_path / "out" / "report.html").read_text()
    assert 'id="my-widgets"' in html and not re.search(r'\bid="[^"]* ', html) and "measured" in html


def test_a_comparison_on_the_page(tables, tmp_path, capsys):
    make_run(tmp_path / "_a", tables, "widgets/fast")  # matplotlib leaves names out that begin with an underscore
    make_run(tmp_path / "b$x$", tables, "widgets/fast", facts={"precision": "bf16"}, records=[step(n, 5.9) for n in range(1, 30)])
    assert report.main([str(tmp_path / "_a"), str(tmp_path / "b$x$"), "--out", str(tmp_path / "out")], tables) == 0
    html = (tmp_path / "out" / "report.html").read_text()
    page = Page()
    page.feed(html)
    text = "".join(page.text)
    assert "What differs in how they were made" in text and "absolute difference (nats)" in text and "Time per step" in text
    drawn = [[label.text for label in plot.iter("{http://www.w3.org/2000/svg}text")] for plot in plots(html)]
    assert any({" _a", "b$x$"} <= set(labels) for labels in drawn)
    assert "first differ by more than rounding (3.9e-03 of the loss)" in capsys.readouterr().out


def test_thousands_of_steps_stay_a_small_page(tables, tmp_path):
    make_run(tmp_path / "long", tables, "widgets/fast", records=[step(n, 6 + math.sin(n)) for n in range(1, 6001)])
    assert report.main([str(tmp_path / "long"), "--out", str(tmp_path / "out")], tables) == 0
    page = (tmp_path / "out" / "report.html").read_text()
    assert len(page) < 200_000 and "drawn as means of neighbouring steps" in page
    points = curves.thin([(float(n), float(n % 2)) for n in range(10_001)])
    assert len(points) <= curves.MOST_POINTS and points[0][1] == pytest.approx(0.5, abs=0.06) and points[-1][0] <= 10_000
    assert curves.thin([(1.0, 2.0)]) == [(1.0, 2.0)]


def test_cells_that_do_not_fit_are_named():
    assert source_cells({"row": "a | b | |"}, ["A", "B", "C", "D"])[0] == ("a", "b", "", "")
    cells, problem = source_cells({"row": "a | b | c"}, ["A", "B"])
    assert cells == ("a", "b | c") and problem and "3 cells" in problem and "2 columns" in problem
    assert source_cells({}, ["A", "B"])[0] == ("", "")


def test_every_published_table_of_the_project_can_be_shown():
    found, problems = Tables().published()
    assert not problems
    for name in found:
        table = Tables().get(name)
        assert table and not table.problems, table and table.problems
        assert all(len(row.cells) == len(table.columns) for row in table.rows)
