"""The parts of `recipes.py verify`: printed numbers, formulas, claims.yaml, errata, settings, memory."""

from dataclasses import replace

import pytest

from launch.tables.verifying import claims, errata, memory, settings, transcription, unchecked
from launch.tables.verifying.check import compared
from launch.tables.verifying.expressions import evaluate
from launch.tables.verifying.printed_values import Printed, agreement, spread
from launch.tables.verifying.rows import published_rows
from recipes import catalog


@pytest.mark.parametrize(
    ("printed", "computed", "how"),
    [
        ("27.3", 27.32, "rounded"), ("26.1", 26.07, "rounded"), ("28.6", 28.68, "truncated"), ("26.5", 26.66, None),
        ("43", 43.06, "rounded"), ("51,200", 51200, "exact"), ("90.5s", 90.5, "exact"),
        ("8.50", 8.503, "rounded"), ("8.50", 8.507, "truncated"), ("8.50", 8.52, None),
    ],
)  # fmt: skip
def test_agreement(printed, computed, how):
    assert agreement(Printed.read(printed), computed) == how


def test_agreement_within_the_rounding_of_an_input():
    time = Printed.read("1.618s")
    assert (time.value, time.half) == (1.618, 0.0005)
    limits = spread(lambda s: 28 * 8 * 1024 * 4 / (s * 32 * 1e3), time)
    assert agreement(Printed.read("17.720"), 17.7196, limits, "the time") == "rounded"
    assert agreement(Printed.read("17.725"), 17.7196, limits, "the time") == "within the rounding of the time"
    assert agreement(Printed.read("17.730"), 17.7196, limits, "the time") is None


@pytest.mark.parametrize(
    "formula",
    ["__import__('os')", "row.real", "value('a')[0]", "(lambda: 1)()", "1+", "other(1)", "2 if 1 else 3"],
)
def test_formulas_are_arithmetic_alone(formula):
    with pytest.raises(ValueError, match="formula"):
        evaluate(formula, {"value": lambda *_: 1.0}, {"row": "a/b"})
    assert evaluate("-value(row) * (2 + 3) ** 2 / 4", {"value": lambda _: 2.0}, {"row": "a/b"}) == -12.5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("g: {source: s, claims: {c: {says: x, printed: 1, fromula: 2}}}", "fromula"),
        ("g: {source: s, claims: {c: {says: x, printed: 1}}}", "why there is none"),
        ("g: {source: s, claims: {c: {says: x, printed: 1, formula: '1', compare: near}}}", "within 10 %"),
        ("g: {source: s, columns: [a], formulas: ['1'], rows: {r: 1 | 2}}", "2 cells for 1 columns"),
        ("g: {source: s, formulas: ['1'], rows: {r: 1}}", "columns: missing; a table"),
        ("g: {source: s, columns: [a], rows: {r: 1}}", "formulas: missing; a table"),
        ("g: {columns: [a], formulas: ['1'], rows: {r: 1}}", "source: missing; a table"),
        ("g: {source: s, columns: [a], formulas: ['1']}", "rows: missing; a table"),
        ("g: {source: s, colums: [a], formulas: ['1'], rows: {r: 1}}", "columns: missing; colums: unknown"),
        ("g: {source: s, columns: a, formulas: ['1'], rows: {r: 1}}", "columns: 'a': a list of texts"),
        ("g: {source: s, columns: [a], formulas: ['1'], rows: [1]}", r"rows: \[1\]: a mapping"),
        ("g: {source: s, claims: {c: {printed: 1, why: w}}}", "/c: says: missing; a claim has"),
        ("g: {source: s, claims: {c: {says: x, why: w}}}", "/c: printed: missing; a claim has"),
        ("g: {claims: {c: {says: x, printed: 1, why: w}}}", "/c: source: missing; a claim has"),
        ("g: {source: s, claims: {c: 3}}", "/c: 3: a mapping"),
        ("g: {source: s, claims: {}, rows: {}}", "rows: unknown; a group of claims"),
        ("g: 3", ": 3: a mapping"),
    ],
)
def test_a_wrong_claim_is_named(tmp_path, text, said):
    (tmp_path / "own.yml").write_text(text)
    with pytest.raises(ValueError, match=f"^own.yml: g.*{said}"):
        claims.load(tmp_path / "own.yml")


def test_claims_that_are_no_mapping_are_refused(tmp_path):
    (tmp_path / "own.yml").write_text("[1]")
    with pytest.raises(ValueError, match="^own.yml: .*groups of claims"):
        claims.load(tmp_path / "own.yml")


# Errata.


def test_a_stale_explanation_of_no_known_row_is_found_by_a_full_run():
    known = errata.Erratum(("nobody/knows TFLOPS: printed 1, computed 2",), "once")
    assert errata.sort([], [known]).stale == known.lines
    assert errata.sort([], [known], {"a100_blog_table4/2b"}).stale == ()


def test_two_disagreements_of_one_line_are_refused():
    check = compared("t", "t/r", "TFLOPS", "1", "2", None)
    with pytest.raises(
        ValueError, match="t/r TFLOPS: printed 1, computed 2: an erratum could not tell them apart"
    ):
        errata.sort([check, replace(check, transcribed=True)], [])


# Settings.


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- {source: s, rows: [sber_path_to_13b/*]}", "entry 1 is .*it has a source, rows"),
        ("- {source: s, rows: [sber_path_to_13c/*], says: {q: {steps: 1}}}", "no such table"),
        (
            "- {source: s, rows: [sber_path_to_13b], says: {q: {steps: 1}}}",
            "no such table: patterns are table/row",
        ),
        (
            "- {source: s, rows: [sber_path_to_13b/*], says: {q: {optimiser.lr: 1}}}",
            "no recipe has a key optimiser.lr",
        ),
    ],
)
def test_a_wrong_setting_is_named(tmp_path, text, said):
    (tmp_path / "own.yml").write_text(text)
    with pytest.raises(ValueError, match=f"^own.yml: .*{said}"):
        settings.load(tmp_path / "own.yml")


@pytest.fixture(scope="module")
def sber():
    """The rows of one table by their names."""
    return {
        row.name: row
        for row in published_rows([table for table in catalog.tables() if table.name == "sber_path_to_13b"])
    }


@pytest.mark.parametrize(
    ("key", "value", "agrees"),
    [
        ("optimizer.betas", [0.9, 0.95], True), ("optimizer.betas", [0.9], False), ("schedule.kind", "linear", False),
        ("steps", 143000, True), ("data.tokenizer.kind", "gpt2", True), ("data.masking.whole_words", True, True),
        ("data.masking.whole_words", 1, False),
        ("published.tflops", 1.0, False),
    ],
)  # fmt: skip
def test_a_setting_is_compared_with_the_key(sber, key, value, agrees):
    setting = settings.Setting(("*/09-*",), "s", "q", key, value)
    (found,) = settings.checks(sber["09-gpt3-13b-model-parallel"], [setting])
    assert (found.status, found.stated) == ("agrees" if agrees else "disagrees", True)
    assert list(settings.checks(sber["10-deeper"], [setting])) == []
    with pytest.raises(ValueError, match="said twice"):
        list(settings.checks(sber["09-gpt3-13b-model-parallel"], [setting, setting]))


def test_a_pattern_that_names_no_row_of_its_table_is_refused(sber):
    settings.check_patterns(
        [settings.Setting(("sber_path_to_13b/09-*", "a100_blog_table1/no"), "s", "q", "steps", 1)],
        list(sber.values()),
    )
    with pytest.raises(ValueError, match=r"sber_path_to_13b/11-\* names no row"):
        settings.check_patterns(
            [settings.Setting(("sber_path_to_13b/11-*",), "s", "q", "steps", 1)], list(sber.values())
        )


def test_a_table_without_a_digest_disagrees(sber):
    rows = list(sber.values())
    found = transcription.check(rows[0].table, rows, {})
    assert (found.status, found.printed) == (
        "disagrees",
        "no digest",
    ) and found.computed == transcription.load()["sber_path_to_13b"]


# Memory. Parameters of a rank, in 10^9: 40 layers of 5120 split over 8 ranks, 51200 tokens of vocabulary, 2048 positions.

RANK = (40 * ((12 * 5120**2 + 7 * 5120) // 8 + 6 * 5120) + 51200 // 8 * 5120 + 2048 * 5120 + 2 * 5120) / 1e9


@pytest.mark.parametrize(
    ("ds_config", "gigabytes"),
    [("zero0", 18 * RANK), ("zero1", (2 + 2 + 12 / 16) * RANK), ("zero3_offload", 0)],
)
def test_states_are_those_of_the_ds_config(sber, ds_config, gigabytes):
    row = sber["09-gpt3-13b-model-parallel"]
    moved = replace(row, recipe=row.recipe.model_copy(update={"ds_config": ds_config}))
    assert memory.states_gb(moved) == pytest.approx(gigabytes, rel=1e-9)


def test_what_ran_and_does_not_fit_disagrees(sber):
    row = sber["09-gpt3-13b-model-parallel"]
    hardware = row.recipe.hardware.model_copy(update={"gpu_memory_gb": 4.0})
    small = replace(row, recipe=row.recipe.model_copy(update={"hardware": hardware}))
    assert [check.status for check in memory.checks([row])] == ["agrees"]
    assert [check.status for check in memory.checks([small])] == ["disagrees"]


def test_what_nothing_recomputes_is_listed(sber):
    claim = claims.Claim(
        "g", "n", "q", "s", "1", 'value(row, "published.tflops") / value("a/b", "steps")', "c/d"
    )
    assert unchecked.claimed([claim]) == {("c/d", "published.tflops"), ("a/b", "steps")}
