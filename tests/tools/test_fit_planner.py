"""The planner's error: what it is on published rows, and that nothing predicts itself."""

import csv
import math
import re
from dataclasses import replace

import pytest
from launching import ROOT

from launch.planning.prediction import constants, hardware, rank_memory
from launch.planning.prediction import step_time as step_time_module
from launch.planning.prediction.constants import fitted, fitted_constants
from launch.planning.prediction.forecast_text import ROWS_OF
from launch.planning.prediction.software import SYSTEMS, as_it_runs
from launch.planning.prediction.step_time import step_time
from recipes.problems import ProblemsError
from tools.planner import csv_cases, fitting, validation
from tools.planner.cases import Case, by_document, of_published_tables

ADVENTURES, OWN = "Adventures with BERT and GPT2", "GPT2 Experiments"


@pytest.fixture(scope="module")
def published() -> list[Case]:
    """The rows of recipes/."""
    return of_published_tables()


@pytest.fixture(scope="module")
def others() -> list[Case]:
    """The rows of other documents."""
    return csv_cases.read()


@pytest.fixture(scope="module")
def found(published) -> validation.PlannerValidation:
    return validation.validate(published)


def part(whole: validation.PlannerValidation, document: str) -> validation.PlannerValidation:
    return validation.validate(by_document(whole.cases)[document])


LINE = {
    "document": "mine", "row": "a", "layers": 24, "hidden": 1024, "heads": 8, "vocab_size": 50257,
    "sequence_length": 1024, "dp": 8, "gpus": 8, "micro_batch": 4, "global_batch": 32,
    "activation_checkpointing": "full", "hardware": "a100-80x8", "software": "megatron", "source": "a page",
}  # fmt: skip


def lines(tmp_path, *changes: dict) -> list[Case]:
    """Cases of a file with a line for each change of `LINE`."""
    rows = [{**LINE, **change} for change in changes]
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, {key: None for row in rows for key in row})
        writer.writeheader()
        writer.writerows(rows)
    return csv_cases.read(path)


def test_every_row_with_a_measurement_is_predicted_or_named(published, found):
    assert len(published) > 80
    compared = {(r.case.table, r.case.name) for name in ("time", "memory") for r in found.ratios[name]}
    compared |= {(each.case.table, each.case.name) for each in found.verdicts}
    excluded = {(case.table, case.name) for case, _ in found.excluded}
    assert {(case.table, case.name) for case in published} == compared | excluded
    assert ("jeanzay_megatron_performance", "48b-pp32-ga256-mb4") in excluded, "twice the printed GPUs"
    assert ("dgx2_gpt2_data_parallel", "40x1536-b2-oom") in excluded, "a larger batch ran"
    assert len(excluded) < 15


def test_verdicts_of_dgx2_and_hpe_are_right(found):
    ours = part(found, ADVENTURES).verdicts
    assert len(ours) == 33 and sum(bool(each.case.oom) for each in ours) == 2
    assert all(each.right for each in ours)


def test_cached_memory_is_within_a_tenth(found):
    errors = fitting.error_of(part(found, ADVENTURES).ratios["memory"])
    assert errors.rows == 25 and errors.worst <= 0.13 and errors.median <= 0.05


def test_logs_that_print_both_are_predicted_in_both(others):
    """Reserved was up to 19 % above the prediction, which stood where allocated memory is (Jean Zay)."""
    logs = [case for case in others if case.allocated]
    validated = validation.validate(logs)
    for ratios in (validated.ratios["allocated"], validated.ratios["memory"]):
        assert fitting.error_of(ratios).rows == 5 and fitting.error_of(ratios).worst < 0.06
    shares = sorted(case.cached / case.allocated - 1 for case in logs)
    assert shares[2] == pytest.approx(fitted_constants().fragmentation, abs=0.005), "the constant's source"
    text = validation.describe(validated, verbose=True)
    assert "print it too: 2.9%" in text and text.count("18B-log-n4") == 2, "the errors, and the rows"


def test_times_of_documents_that_were_left_out_are_within_the_goal(found):
    blog = "State-of-the-Art Language Modeling Using Megatron on the NVIDIA A100 GPU"
    median = {
        name: fitting.error_of(part(found, name).ratios["time"]).median for name in (ADVENTURES, OWN, blog)
    }
    assert median[ADVENTURES] <= 0.15 and median[OWN] <= 0.15
    assert 0.15 < median[blog] < 0.25, "misses the goal: neither its batch nor its sequence length is printed"


def test_a_document_is_predicted_without_having_been_fitted_on(published, found, monkeypatch):
    """Its own constants are used, and a document that nothing was fitted on gets those of all."""
    slow = fitted_constants().model_copy(update={"matrix": fitted_constants().matrix / 2})
    before = fitting.error_of(part(found, OWN).ratios["time"]).bias
    own = fitted()
    slower = own.model_copy(update={"left_out": {**own.left_out, OWN: slow}})
    monkeypatch.setattr(validation, "fitted", lambda: slower)
    changed = validation.validate(published)
    assert fitting.error_of(part(changed, OWN).ratios["time"]).bias > 1.5 * before and changed.unfitted == []
    monkeypatch.setattr(validation, "fitted", lambda: own.model_copy(update={"left_out": {}}))
    assert OWN in changed.unfitted


def test_the_constants_file_knows_what_it_was_fitted_on(published, others):
    documents = by_document([*published, *others])
    rows = {
        name: [sum(bool(case.printed(quantity)) for case in own) for quantity in ("time", "memory")]
        for name, own in documents.items()
    }
    assert fitted().fitted_on == {name: counts for name, counts in rows.items() if any(counts)}, (
        "rows were added or excluded since: python tools/fit_planner.py --refit"
    )
    assert set(fitted().left_out) == set(fitted().fitted_on)


def test_every_prediction_bears_the_error_that_validate_finds(published, others):
    validated = validation.validate([*published, *others])
    text = validation.describe(validated)
    now = {}
    for quantity in ("time", "memory"):
        now |= fitting.by_kind(quantity, validated.ratios[quantity], fitted())
    assert now.keys() == fitted().errors.keys() == ROWS_OF.keys()
    for kind, error in now.items():
        assert fitted().errors[kind].model_dump() == pytest.approx(error.model_dump(), abs=1e-4), (
            "rows, terms or constants changed since: python tools/fit_planner.py --refit"
        )
        for page in ("README.md", "docs/planning.md"):
            quoted = f"{error.median:.1%}".replace("%", " %")
            assert quoted in (ROOT / page).read_text(), f"{page} quotes {kind}"
        assert error.median < error.percentile_90 <= error.worst
        assert re.search(rf"{kind} +{ROWS_OF[kind]} +{error.median:.1%}", text)


def test_a_prediction_bears_the_error_of_rows_of_its_kind(published, others):
    """fp32 was said to be 10 % off where no row was fp32, and came out 1.7 to 2.1 times too slow."""
    cases = [*published, *others]
    names = {}
    for case in cases:
        if case.printed("time"):
            names.setdefault(case.work.software.name, set()).add(case.document)
    several = sorted(name for name, documents in names.items() if len(documents) > 1)
    assert fitted().software == several and {"fsdp", "llm.c"}.isdisjoint(several)
    kind = fitted().kind
    assert kind("time", "fp32", "megatron") == "fp32 time" and kind("memory", "fp32") == "fp32 memory"
    assert kind("time", "bf16", "megatron") == "time" and kind("time", "bf16", "megarecipes") == "unseen"
    rows = [case for case in cases if case.printed("time") and case.work.precision == "fp32"]
    assert len(rows) == fitted().errors["fp32 time"].rows >= 30
    assert {case.document for case in rows} == {"nvidia-bert", "transformers-one-gpu", "transformers-nvlink"}


def test_fp32_is_predicted_by_the_units_that_compute_it(others, monkeypatch):
    """At the share, tile and depth of tensor cores one V100 came out twice too slow, and out of memory."""
    page = [case for case in others if case.document == "transformers-one-gpu"]
    validated = validation.validate(page)
    assert len(validated.verdicts) == 5 and all(each.right for each in validated.verdicts)
    fp32 = [ratio for ratio in validated.ratios["time"] if ratio.case.work.precision == "fp32"]
    assert all(0.9 < ratio.predicted / ratio.published < 1.35 for ratio in fp32) and len(fp32) == 3
    assert all(abs(ratio.error) < 0.2 for ratio in validated.ratios["memory"])
    monkeypatch.setattr(step_time_module, "TILE_FP32", step_time_module.TILE)
    small = next(ratio for ratio in fp32 if ratio.case.name == "fp32-1x4")
    (coarse,) = fitting.ratios("time", [small.case], fitted_constants())
    assert coarse.predicted > 1.25 * small.predicted, "few tiles leave multiprocessors idle"


def test_a_bert_of_transformers_has_one_kernel_of_gelu():
    """GPT-2's tanh GELU, eight kernels that keep six tensors, was counted for it, too."""
    for name in ("transformers", "transformers-2021", "trainer"):
        gpt, bert = (as_it_runs(name, masked=masked) for masked in (False, True))
        assert gpt is SYSTEMS[name] and (gpt.gelu_copies, bert.gelu_copies) == (6, 0)
        assert bert.passes.cut == 30 and bert.passes.kernels < gpt.passes.kernels
    assert as_it_runs("megatron-2019", masked=True) is SYSTEMS["megatron-2019"]


def test_fitting_finds_the_constants_that_made_the_times(published):
    """Rows whose printed times are predictions of other constants are met by fitting."""
    true = fitting.initial_constants().model_copy(update={"matrix": 0.62, "traffic": 1.6, "link": 0.5})
    made = [
        replace(case, seconds=fitting.predicted("time", case, true), excluded={})
        for case in published
        if case.printed("time")
    ]
    refitted = fitting.fit(by_document(made))
    assert refitted.matrix == pytest.approx(0.62, rel=0.02) and refitted.traffic == pytest.approx(
        1.6, rel=0.05
    )
    errors = [abs(math.log(r.predicted / r.published)) for r in fitting.ratios("time", made, refitted)]
    assert sum(errors) / len(errors) < 0.01


def test_refitting_writes_the_file_that_the_planner_reads(published, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "FILE", tmp_path / "constants.yaml")
    waiting = fitted().waiting
    few = [case for case in published if case.table in ("dgx2_gpt2_model_parallel", "a100_blog_table4")]
    try:
        fitting.refit(few)
        assert set(fitted().left_out) == {case.document for case in few}
        assert fitted().fitted_on[ADVENTURES] == [7, 7] and fitted().waiting == waiting
        errors = [abs(ratio.error) for ratio in fitting.ratios("time", few, fitted_constants())]
        assert sum(errors) / len(errors) < 0.1
    finally:
        monkeypatch.undo()
        fitted.cache_clear()
        fitted_constants.cache_clear()


def test_every_row_of_the_other_documents_is_read(others):
    assert len(others) > 450 and all(case.work for case in others), "every row can be predicted"
    doubtful = [case for case in others if case.excluded]
    of_bert = {"nvidia-bert", "deepspeed-fastest-bert", "scalable-transformer"}
    assert {case.document for case in doubtful} == {"megascale", "nanogpt", "llm.c", *of_bert}


def test_steps_that_wait_for_the_host_are_predicted_by_what_it_starts(others):
    """One sequence on an H100 takes as long as two; without the host it would be a third of the printed."""
    small = [case for case in others if case.printed("time") and validation.waits(case)]
    assert {"batch-1", "batch-2", "megatron-g8"} <= {case.name for case in small}
    errors = fitting.error_of(validation.validate(small).ratios["time"])
    assert errors.rows >= 7 and errors.median < 0.15 and errors.worst < 0.3
    host = fitted_constants().model_copy(update={"kernel_us": 0.0})
    assert fitting.error_of(fitting.ratios("time", small, host)).bias < 0.6
    text = validation.describe(validation.validate(small))
    assert f"waits for the host (10% or more): {errors.median:.1%}" in text
    assert f"such predictions bear {fitted().waiting.median:.0%}" in text, "7 rows say too little"


def test_a_line_that_contradicts_itself_or_cannot_be_read_is_named(tmp_path):
    for line, said in (
        ({"gpus": 12}, "a: .* 12 GPUs: tp x pp x dp are the GPUs"),
        ({"micro_batch": 3}, "batch.global=32.*, 8 GPUs"),
        ({"layers": "x"}, "rows.csv:2: layers='x': input should be a valid integer"),
        ({"activation_checkpointing": "some"}, "rows.csv:2: activation_checkpointing='some': .*none|full"),
        ({"head": 2}, "rows.csv:2: head='2': extra inputs are not permitted"),
        ({"hardware": "GH200"}, "GH200"),
    ):
        with pytest.raises(ProblemsError, match=said):
            lines(tmp_path, line)


def test_published_rates_become_seconds(tmp_path):
    rate = {"tflops": 100}
    exact, model, oom = lines(
        tmp_path, rate, {**rate, "tflops_by": "model"}, {"status": "oom", "time_per_iteration_s": 3}
    )
    assert model.seconds / exact.seconds == pytest.approx(3 / 4, rel=0.04)
    assert oom.seconds is None and oom.oom and exact.oom is False


def test_what_a_row_leaves_open_is_chosen(tmp_path):
    """The fastest micro-batch that fits, and recomputation where memory asks for it."""
    open_ = {"micro_batch": "", "activation_checkpointing": "", "global_batch": 64}
    large = {"layers": 48, "hidden": 4096, "heads": 32, "tp": 8, "dp": 1, "hardware": "v100-32x8"}
    a, b = lines(tmp_path, {**open_, "hardware": "a100-40x8"}, {**open_, **large, "micro_batch": 16})
    assert (a.work.recomputed, a.work.layout.micro) == (0, 8)
    assert (b.work.recomputed, b.work.layout.micro, b.work.layout.accumulation) == (1, 16, 4)


def test_a_fine_tuning_has_its_tasks_head_alone(tmp_path):
    """Its logits are those of the task, in memory, operations and time."""
    kinds = ("", "mnli", "squad1", "race")
    own = {"family": "bert", "layers": 12, "hidden": 768, "heads": 12, "sequence_length": 128, "gpus": 1}
    own |= {"dp": 1, "vocab_size": 30522, "micro_batch": 32, "hardware": "v100-32x8"}
    own |= {"software": "transformers", "activation_checkpointing": "none"}
    works = [case.work for case in lines(tmp_path, *({**own, "task": kind} for kind in kinds))]
    assert [work.model.task_head for work in works] == ["none", "classification", "span", "choice"]
    assert [work.logits for work in works] == [32 * 128 * 30592, 32 * 3, 32 * 128 * 2, 4 * 32]
    node, known = hardware.find("v100-32x8"), fitted_constants()
    ranks = [rank_memory.fullest_rank(work, node.gpu, known) for work in works]
    times = [step_time(work, node, known).total for work in works]
    operations = [work.exact_tflops(1.0, 1) for work in works]
    for task in (1, 2):
        assert ranks[task].allocated < 0.8 * ranks[0].allocated, kinds[task]
        assert times[task] < 0.87 * times[0] and operations[task] < 0.8 * operations[0], kinds[task]
    assert works[3].tokens == 4 * works[1].tokens, "each choice is a sequence"
    with pytest.raises(ProblemsError, match="task='cola': input should be 'sst2'"):
        lines(tmp_path, {**own, "task": "cola"})


def test_the_report_says_what_is_wrong(found):
    text = validation.describe(found, width=110)
    for words in ("printed OOM", "no verdict is wrong", "shown, and not compared", "33 of 33"):
        assert words in text, words
