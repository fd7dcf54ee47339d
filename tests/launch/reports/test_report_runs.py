"""Run directories as a report reads them, and runs next to each other and next to their rows."""

from __future__ import annotations

import csv
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from reported import Page, lines, make_run, plots, read_of, step, validations

from launch import report
from launch.records.metrics import MOST_NAMED
from launch.reports import comparison
from launch.reports import runs as reading
from launch.reports.comparison import incomparable
from launch.reports.entries import RowEntry, entry_of
from launch.reports.tables import Tables
from recipes.layout import Layout
from recipes.schema import Task


@pytest.mark.parametrize(
    "broken, text, named",
    [
        ("metrics.jsonl", '{"kind": "step"\n{}\n', "metrics.jsonl:1"),
        (
            "metrics.jsonl",
            '{"kind": "step", "step": 1, "loss": 1.0}\n',
            "metrics.jsonl:1: a step without skipped, seconds",
        ),
        ("result.json", "{", "result.json:1:2: not JSON"),
        ("result.json", "[1]", "result.json: holds a list"),
        (
            "result.json",
            '{"version": 2, "recipe": "widgets/fast", "status": "ok", "speed": {"tflops": "many"}}',
            "speed.tflops='many'",
        ),
        ("plan.json", '{"recipe": {"title": 3}}', "plan.json"),
        ("environment.json", "\0", "environment.json:1:1: not JSON"),
        ("environment.json", "{}", "environment.json: names no launch"),
        ("metrics.jsonl", "", "metrics.jsonl: has no step, and result.json counts 40"),
    ],
)
def test_a_broken_file_is_named_and_the_rest_reported(
    tables, tmp_path, capsys, monkeypatch, broken, text, named
):
    # Plots take most of the time and are checked elsewhere.
    monkeypatch.setattr("launch.reports.plots.losses", lambda *_: [])
    make_run(tmp_path / "runs" / "good", tables, "widgets/slow")
    bad = make_run(tmp_path / "runs" / "bad", tables, "widgets/fast")
    (bad / broken).write_text(text)
    assert report.main([str(tmp_path / "runs"), "--out", str(tmp_path / "out")], tables) == 1
    assert named in capsys.readouterr().err
    records = list(csv.DictReader((tmp_path / "out" / "report.csv").read_text().splitlines()))
    assert any(record["recipe"] == "widgets/slow" and record["status"] == "measured" for record in records)
    assert any(record["run"].endswith("/bad") for record in records)


@pytest.mark.parametrize("name", ("metrics.jsonl", "result.json", "environment.json", "plan.json"))
def test_a_directory_in_place_of_a_file_is_named(tables, tmp_path, capsys, monkeypatch, name):
    monkeypatch.setattr("launch.reports.plots.losses", lambda *_: [])
    run = make_run(tmp_path / "run", tables, "widgets/fast")
    (run / name).unlink()
    (run / name).mkdir()
    assert report.main([str(run), "--out", str(tmp_path / "out")], tables) == 1
    assert f"{name}: " in capsys.readouterr().err and (tmp_path / "out" / "report.html").exists()
    assert "Could not be read" in (tmp_path / "out" / "report.html").read_text()


def compared(tables, tmp_path, *second, **changes) -> comparison.Comparison:
    """A run and one that differs from it in `changes`."""
    a = make_run(tmp_path / "a", tables, "widgets/fast")
    b = make_run(tmp_path / "b", tables, "widgets/fast", **changes)
    read = Tables(tables).recipe
    return comparison.compare([reading.read_run(a, "a", read), reading.read_run(b, "b", read)])


def outcome(tables, folder, row="widgets/fast", **changes) -> str:
    """What the line of a run says next to the published numbers."""
    read = reading.read_run(make_run(folder, tables, row, **changes), "r", Tables(tables).recipe)
    return entry_of(Tables(tables).get("widgets").row(row.partition("/")[2]), read).outcome


def test_a_run_in_another_layout_is_not_compared(tables, tmp_path):
    layouts = {"tp": Layout(2, 1, 1, 2, 4, 8), "pp": Layout(1, 2, 1, 2, 4, 8), "dp": Layout(1, 1, 2, 2, 2, 8)}
    for key, layout in layouts.items():
        assert outcome(tables, tmp_path / key, layout=layout) == f"not compared: other parallel.{key}"
    said = outcome(tables, tmp_path / "zero3", zero_stage=3, ds_name="zero3")
    assert said == "not compared: other ds_config (ZeRO-3, offload none; the row's is ZeRO-1, offload none)"
    # With a file of one's own that is called zero1.json.
    own = outcome(tables, tmp_path / "changed", ds={"zero_optimization": {"stage": 2}})
    assert "ZeRO-2" in own
    assert "time 0.250x" in outcome(tables, tmp_path / "as_written")


def test_a_run_of_which_no_file_names_the_recipe_is_shown(tables, tmp_path):
    run = make_run(tmp_path / "nameless", tables, "widgets/fast", finished=False)
    for name in ("plan.json", "environment.json"):
        (run / name).unlink(missing_ok=True)
    assert report.main([str(run), "--out", str(tmp_path / "out")], tables) == 1
    page = (tmp_path / "out" / "report.html").read_text()
    assert ">nameless<" in page and "left out (--table)" not in page


def test_a_broken_line_costs_no_other(tables, tmp_path):
    """The rest of the curve, and the result, stand; which line was left out is said."""
    run = make_run(tmp_path / "r", tables, "widgets/fast", records=[step(n) for n in range(1, 41)])
    whole = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([*whole[:-1], whole[-1][:30]]) + "\n")
    broken = read_of(run, tables)
    assert len(broken.training) == 39 and broken.status == "measured" and broken.result.steps == 40
    (problem,) = broken.problems
    assert "metrics.jsonl:40" in problem and "left out" in problem
    (run / "metrics.jsonl").write_text("\n".join(["{", *whole]) + "\n" + lines([step(41)]))
    assert read_of(run, tables).status == "unfinished", "resumed, whatever is broken before"
    (run / "metrics.jsonl").write_text("broken\n" * 40)
    assert len(read_of(run, tables).problems) == MOST_NAMED + 1


def test_what_a_recipe_says_of_itself_is_no_difference_in_how_runs_were_made(tables, tmp_path):
    assert not compared(
        tables, tmp_path, overrides={"differs": {"data": "another"}, "note": "x"}
    ).configuration.rows


def test_memory_of_another_kind_has_no_ratio(tables, tmp_path):
    a, b = (read_of(make_run(tmp_path / name, tables, "widgets/fast"), tables, name) for name in "ab")
    another = "memory of another kind"
    for kind, said in ((None, "1.000x"), ("resident set", "1.000x"), ("GPU memory allocated", another)):
        memory = replace(b.result.memory, kind=kind)
        other = replace(b, result=replace(b.result, memory=memory))
        rows = {row[0]: row[-1] for row in comparison.result_rows([a, other], [None])}
        assert rows["peak memory (GB)"] == said


# --- out of memory

TRACEBACK = "Traceback (most recent call last):\n{}\n"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


def test_an_oom_of_any_rank_is_an_oom_without_a_result(tables, tmp_path):
    run = make_run(tmp_path / "r", tables, "widgets/oom", finished=False, records=[])
    (run / "error-rank-2.txt").write_text(TRACEBACK.format("RuntimeError: something else"))
    assert read_status(run, tables) == "unfinished"
    (run / "error-rank-13.txt").write_text(TRACEBACK.format(OOM))
    (run / "error-rank-3.txt").write_text(TRACEBACK.format(OOM))
    read = reading.read_run(run, "r", Tables(tables).recipe)
    assert read.status == "OOM" and not read.problems
    first, *others = read.result.deviations
    assert str(first) == f"OOM: rank 3: {OOM} (and 1 more)"
    assert "unfinished" not in {each.kind for each in others}
    assert entry_of(Tables(tables).get("widgets").row("oom"), read).outcome == "OOM, as published"
    assert entry_of(Tables(tables).get("widgets").row("fast"), read).outcome == "OOM, published as running"
    (run / "plan.json").write_text("")
    assert read_status(run, tables) == "OOM", "whatever else cannot be read"


def test_an_oom_counts_against_an_older_result_and_not_against_a_whole_run(tables, tmp_path):
    for status, becomes in (("interrupted", "OOM"), ("saving", "OOM"), ("ok", "measured")):
        run = make_run(tmp_path / status, tables, "widgets/fast", status=status)
        (run / "error-rank-1.txt").write_text(TRACEBACK.format(OOM))
        assert read_status(run, tables) == becomes
    with open(tmp_path / "ok" / "metrics.jsonl", "a") as file:
        file.write(lines([step(41)]))
    assert read_status(tmp_path / "ok", tables) == "OOM"


def read_status(run: Path, tables: Path) -> str:
    return reading.read_run(run, "r", Tables(tables).recipe).status


def test_a_run_that_was_killed_in_its_last_checkpoint_is_measured(tables, tmp_path):
    run = make_run(tmp_path / "r", tables, "widgets/fast", status="saving")
    read = reading.read_run(run, "r", Tables(tables).recipe)
    line = entry_of(Tables(tables).get("widgets").row("fast"), read)
    assert line.status == "saving" and "time 0.250x" in line.outcome
    records = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text(
        "\n".join(records[:20]) + "\n"
    )  # resumed from a checkpoint in the middle
    assert read_status(run, tables) == "unfinished"


def test_where_two_runs_part(tables, tmp_path):
    records = [
        step(n, 6.0 - math.log(n) / 2 + {16: 2e-5, 30: 0.75}.get(n, 0.25 if n > 16 else 1e-7), 1.0)
        for n in range(1, 41)
    ]
    found = compared(
        tables,
        tmp_path,
        records=records + validations(40),
        zero_stage=3,
        ds_name="zero3",
        environment={"versions": {"python": "3.11", "torch": "2.14.0"}},
    )
    assert (
        "40 common steps: first differ by more than rounding (2.0e-06 of the loss) at step 16, by 2.00e-05"
        in found.findings[0]
    )
    assert "largest difference 7.50e-01 at step 30" in found.findings[0]
    assert found.configuration.rows == [
        ("ds_config", "zero1", "zero3"),
        ("versions.torch", "2.13.0", "2.14.0"),
        ("deepspeed.zero_optimization.stage", "1", "3"),
    ]
    outcomes = {name: values for name, *values in found.results.rows}
    assert outcomes["time per iteration (s)"] == ["0.5", "1", "2.000x"]
    assert outcomes["training loss (nats per token, last 10 steps)"][2:] == ["+0.25"] and not found.remarks


def test_losses_on_other_text_are_not_compared(tables, tmp_path):
    found = compared(
        tables, tmp_path, overrides={"data": {"source": "text", "name": "x.txt"}, "seed": 7}, unigram=5
    )
    assert (
        "not comparable, other data, vocabulary or objective (data.source: packaged / text, data.name: "
        "none / x.txt)" in found.remarks[0]
    )
    assert ("recipe.seed", "1234", "7") in found.configuration.rows and not found.findings
    assert {row[0]: row[-1] for row in found.results.rows}[
        "validation loss (nats per token)"
    ] == "not comparable"


FILE_A, FILE_B = ({"data": {"tokenizer": {"kind": "file", "path": f"/vocabularies/{name}"}}} for name in "ab")


@pytest.mark.parametrize(
    "unigram, settings, why",
    [
        (5.2, {}, None),
        (5.2, FILE_B, None),
        (5.3, FILE_B, "data.tokenizer.path: /vocabularies/a / /vocabularies/b"),
        (5.3, {}, r"unigram entropy of their validation text differs \(5.2000 / 5.3000\)"),
        (None, FILE_B, "data.tokenizer.path: /vocabularies/a / /vocabularies/b"),
    ],
    ids=("same", "same, from elsewhere", "other", "changed in its place", "unknown"),
)
def test_texts_and_vocabularies_are_compared_by_their_entropy(tables, tmp_path, unigram, settings, why):
    a = make_run(tmp_path / "a", tables, "widgets/fast", overrides=FILE_A)
    b = make_run(tmp_path / "b", tables, "widgets/fast", overrides=settings or FILE_A, unigram=unigram)
    found = incomparable(*(read_of(run, tables) for run in (a, b)))
    assert found is None if why is None else re.search(why, found)


def test_losses_on_other_tasks_are_not_compared(tables, tmp_path):
    run = read_of(make_run(tmp_path / "a", tables, "widgets/fast"), tables)
    tuned = [with_recipe(run, "classification", name) for name in ("sst2", "rte")]
    assert "task.name: sst2 / rte" in incomparable(*tuned)
    assert "model.task_head: none / classification" in incomparable(run, tuned[0])


def with_recipe(run, head, task):
    model = run.recipe.model.model_copy(update={"task_head": head})
    recipe = run.recipe.model_copy(update={"model": model, "task": Task(name=task)})
    return replace(run, plan=replace(run.plan, recipe=recipe))


BERT = {
    "model": {"layers": 2, "hidden": 32, "heads": 2, "vocab_size": 300, "family": "bert"},
    "data": {"tokenizer": {"kind": "trained_wordpiece"}},
}


# Losses in a comparison, without what stands behind their unit.
NAMES = (
    *("masked-token loss (nats per masked token", "sentence-order loss (nats per sample"),
    *("next-sentence loss (nats per sample", "total loss (nats", "loss (nats per token"),
)
SVG_TEXT = "{http://www.w3.org/2000/svg}text"


def of_bert(head: str) -> dict:
    """What makes a run of widgets that of a BERT: worse than uniform in total alone."""
    parts = {"mlm_loss": 5.6}
    if head != "none":
        parts |= {"sentence_loss": 0.7, "sentence_accuracy": 0.5}
    loss = parts["mlm_loss"] + parts.get("sentence_loss", 0.0)
    records = [replace(step(n, loss), parts=parts) for n in range(1, 41)]
    records += [replace(each, parts=parts) for each in validations(40, loss)]
    return {"overrides": {**BERT, "model": {**BERT["model"], "sentence_head": head}}, "records": records}


def test_every_objective_has_its_name_in_a_report(tables, tmp_path):
    """Of a GPT-2 and of three BERTs, one of them from before results named their losses."""
    for head in ("sop", "nsp", "none"):
        make_run(tmp_path / "runs" / head, tables, "widgets/fast", **of_bert(head))
    make_run(tmp_path / "runs" / "gpt2", tables, "widgets/slow")
    old = tmp_path / "runs" / "nsp" / "result.json"
    values = json.loads(old.read_text())
    del values["figures"]
    old.write_text(json.dumps({**values, "loss_per": "masked token"}))
    assert report.main([str(tmp_path / "runs"), "--out", str(tmp_path / "out")], tables) == 0
    html = (tmp_path / "out" / "report.html").read_text()
    page = Page()
    page.feed(html)
    by_name = {row[0]: row[1:5] for table in page.tables for row in table}
    for split, over in (("training", ", last 10 steps"), ("validation", "")):
        of = {name: by_name[f"{split} {name}{over})"] for name in NAMES}
        masked, order, following, total, token = of.values()
        assert masked[1:] == ["5.6000"] * 3, "runs stand in the order of their names: gpt2, none, nsp, sop"
        assert order[2:] == ["–", "0.7000"] and following[2:] == ["0.7000", "–"]
        assert total == ["–", "–", "6.3000", "6.3000"] and token[0] != "–" and token[1:] == ["–"] * 3
    assert "mlm" not in "".join(page.text)
    drawn = [" ".join(text.itertext()) for plot in plots(html) for text in plot.iter(SVG_TEXT)]
    assert drawn.count("masked-token loss (nats per masked token)") == 3 and "loss (nats per token)" in drawn
    lines = list(csv.DictReader((tmp_path / "out" / "report.csv").read_text().splitlines()))
    cells = {Path(line["run"]).name: line for line in lines if line["run"]}
    for name, of_run in (
        ("sop", ("6.3", "5.6", "0.7")),
        ("none", ("5.6", "5.6", "")),
        ("gpt2", ("5.0", "", "")),
    ):
        keys = ("validation_loss", "validation_mlm_loss", "validation_sentence_loss")
        assert tuple(cells[name][key][:3] for key in keys) == of_run
        assert float(cells[name]["train_loss"] or 0) > 0


def test_a_published_loss_stands_next_to_that_of_masked_tokens(tables, tmp_path):
    run = read_of(make_run(tmp_path / "r", tables, "widgets/fast", **of_bert("sop")), tables)
    row = Tables(tables).get("widgets").row("fast")
    published = row.published.model_copy(update={"validation_loss": 1.58})
    entry = RowEntry(replace(row, recipe=row.recipe.model_copy(update={"published": published})), run)
    assert entry.outcome.startswith("validation masked-token loss 5.6000 here, 1.58 published (each")


def test_a_resumed_run_is_not_its_former_result(tables, tmp_path):
    run = make_run(tmp_path / "r", tables, "widgets/fast", status="interrupted", records=[step(1), step(2)])
    assert reading.read_run(run, "r", Tables(tables).recipe).status == "interrupted"
    with open(run / "metrics.jsonl", "a") as file:
        file.write(lines([step(3)]) + '{"kind": "st')  # and the line that it is writing
    going = reading.read_run(run, "r", Tables(tables).recipe)
    assert (going.status, going.result.steps, going.problems) == ("unfinished", 3, ())
