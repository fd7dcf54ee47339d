"""The parts of tools/check_tables.py: printed numbers, a table's evidence, settings, memory."""

from dataclasses import replace

import pytest

from launch.planning.prediction import workload
from launch.planning.resolved_plans import published_plan
from launch.tables import evidence
from launch.tables.evidence import Evidence, Quotations
from recipes import catalog, tables
from recipes.problems import ProblemsError
from tools.tables import quantities, transcription
from tools.tables.lines import CheckedTable, checked_tables
from tools.tables.printed import Printed, agreement, recompute


@pytest.mark.parametrize(
    ("printed", "computed", "how"),
    [
        ("27.3", 27.32, "rounded"), ("26.1", 26.07, "rounded"), ("28.6", 28.68, "truncated"),
        ("26.5", 26.66, None),
        ("43", 43.06, "rounded"), ("51,200", 51200, "exact"), ("90.5s", 90.5, "exact"),
        ("8.50", 8.503, "rounded"), ("8.50", 8.507, "truncated"), ("8.50", 8.52, None),
    ],
)  # fmt: skip
def test_agreement(printed, computed, how):
    assert agreement(Printed.read(printed), computed) == how


def test_agreement_within_the_rounding_of_an_input():
    time = Printed.read("1.618s")
    assert (time.value, time.half) == (1.618, 0.0005)
    for printed, how in (
        ("17.721", "rounded"),
        ("17.725", "within the rounding of the time"),
        ("17.730", None),
    ):
        result = recompute(Printed.read(printed), "the time", lambda s: 28 * 8 * 1024 * 4 / (s * 32e3), time)
        assert result == (pytest.approx(17.7206, abs=1e-4), how)


@pytest.fixture
def evidence_of(tmp_path):
    """Read the evidence of a table with two rows."""

    def read(text: str) -> Evidence:
        path = tmp_path / "own.yaml"
        path.write_text(f"title: own\nrows:\n  a-1: {{}}\n  b-2: {{}}\nevidence:\n  {text}\n")
        return evidence.read(tables.read_table(path))

    return read


@pytest.mark.parametrize("layout", [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("name", ["default/sotu", "bert/sotu", "transformers"])
def test_positions_are_counted_whatever_the_length_of_samples(name, layout):
    """On modules and by arithmetic, and in what the planner puts on a rank."""
    row, settings = name, [f"parallel.{key}={n}" for key, n in zip(("tp", "pp"), layout, strict=True)]
    if name == "transformers":
        row, settings = "default/sotu", ["model.implementation=transformers"]
    settings += ["sequence_length=64", "ds_config=zero1"]
    plain, longer = catalog.load(row, settings), catalog.load(row, [*settings, "model.positions=500"])
    counted, rows = quantities.counts(longer), (500 - 64) * plain.model.hidden
    assert counted == quantities.arithmetic(longer) and counted.once == quantities.counts(plain).once + rows
    works = [workload.of_plan(published_plan(recipe)) for recipe in (plain, longer)]
    assert works[1].parameters_of(0) == works[0].parameters_of(0) + rows
    assert works[1].tokens == works[0].tokens


WRONG = "disagreements: [{quantity: q, printed: '1', computed: '2', rows: [a-1]}]"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "settings: [{source: s, says: {q: {optimiser.lr: 1}}}]",
            "optimiser.lr: no recipe has it; did you mean optimizer.lr",
        ),
        ("settings: [{source: s, rows: {c-*: {q: {steps: 1}}}}]", r"c-\*: names no row of the table"),
        ("settings: [{source: s, says: {q: {steps: 1}, r: {steps: 1}}}]", "a-1: steps: is said twice"),
        ("settings: [{says: {q: {steps: 1}}}]", r"evidence.settings\[0\].source is missing"),
        ("setings: []", "evidence.setings: unknown key; did you mean settings?"),
        ("sizes: [{source: s, rows: {a-1: {second stage: 1}}}]", "rows.a-1.second stage.*'each once'"),
        (
            "sizes: [{source: s, rows: {a-2: {first stage: 1}}}]",
            "a-2: no row of the table; did you mean b-2 or a-1",
        ),
        (
            "errata: [{explanation: e, disagreements: []}]",
            r"disagreements=\[\]: list should have at least 1 item",
        ),
        (f"errata: [{{{WRONG}}}]", r"errata\[0\].explanation is missing"),
        (f"errata: [{{explanation: e, {WRONG}}}, {{explanation: f, {WRONG}}}]", "a-1: q: .* is said twice"),
    ],
)
def test_wrong_evidence_is_named_with_its_line(evidence_of, text, said):
    with pytest.raises(ProblemsError, match=f"own.yaml:[56]: .*{said}"):
        evidence_of(text)


def test_evidence_is_of_all_rows_or_of_a_pattern(evidence_of):
    text = "settings: [{source: s, says: {q: {steps: 1}}, rows: {'[ab]-2': {r: {precision: fp16}}}}]"
    evidence = evidence_of(text)
    assert [statement.key for statement in evidence.statements("a-1")] == ["steps"]
    assert [statement.key for statement in evidence.statements("b-2")] == ["steps", "precision"]


@pytest.fixture(scope="module")
def row():
    (table,) = (table for table in catalog.tables() if table.name == "sber_path_to_13b")
    (published,) = checked_tables([table])
    return next(row for row in published.rows if row.name == "09-gpt3-13b-model-parallel")


def checks(quantity, row, known=None):
    return list(quantity(replace(row, source=CheckedTable(row.table, [row], [], known or Evidence()))))


@pytest.mark.parametrize(
    ("key", "value", "agrees"),
    [
        ("optimizer.betas", [0.9, 0.95], True), ("optimizer.betas", [0.9], False),
        ("schedule.kind", "linear", False), ("steps", 143000, True), ("data.tokenizer.kind", "gpt2", True),
        ("data.masking.whole_words", True, True),
        ("data.masking.whole_words", 1, False),
        ("published.tflops", 1.0, False), ("published.size_label", "13B", True),
    ],
)  # fmt: skip
def test_a_setting_is_compared_with_the_key(row, key, value, agrees):
    known = Evidence(settings=[Quotations(source="s", rows={"09-*": {"q": {key: value}}})])
    (check,) = (check for check in checks(transcription.settings, row, known) if check.stated)
    assert check.status == ("agrees" if agrees else "disagrees")
    other = replace(row, name="10-deeper")
    assert not any(check.stated for check in checks(transcription.settings, other, known))


# Memory. Parameters of a rank, in 10^9: 40 layers of 5120 split over 8 ranks, 51200 tokens, 2048 positions.

RANK = (40 * ((12 * 5120**2 + 7 * 5120) // 8 + 6 * 5120) + 51200 // 8 * 5120 + 2048 * 5120 + 2 * 5120) / 1e9


@pytest.mark.parametrize(
    ("ds_config", "gigabytes"),
    [("zero0", 18 * RANK), ("zero1", (2 + 2 + 12 / 16) * RANK), ("zero3_offload", 0)],
)
def test_states_are_those_of_the_ds_config(row, ds_config, gigabytes):
    moved = replace(row, recipe=row.recipe.model_copy(update={"ds_config": ds_config}))
    assert quantities.states_gb(moved) == pytest.approx(gigabytes, rel=1e-9)


def test_what_ran_and_does_not_fit_disagrees(row):
    hardware = row.recipe.hardware.model_copy(update={"gpu_memory_gb": 4.0})
    small = replace(row, recipe=row.recipe.model_copy(update={"hardware": hardware}))
    assert [check.status for check in checks(quantities.memory, row)] == ["agrees"]
    assert [check.status for check in checks(quantities.memory, small)] == ["disagrees"]
