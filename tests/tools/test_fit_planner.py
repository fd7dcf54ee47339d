"""The planner's error: what it is on published rows, and that nothing predicts itself."""

import math
import re
import sys
from dataclasses import replace

import pytest
from launching import ROOT, run

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
COMMAND = [sys.executable, str(ROOT / "tools" / "fit_planner.py")]
HEADER = "row,layers,hidden,heads,tp,pp,gpus,micro_batch,global_batch,activation_checkpointing,hardware"


@pytest.fixture(scope="module")
def published() -> list[Case]:
    """The rows of recipes/."""
    return of_published_tables()


@pytest.fixture(scope="module")
def others() -> list[Case]:
    """The rows of other documents."""
    return csv_cases.read(csv_cases.OTHER_DOCUMENTS)


@pytest.fixture(scope="module")
def found(published) -> validation.PlannerValidation:
    return validation.validate(published)


def table(tmp_path, *lines: str, header: str = HEADER):
    path = tmp_path / "mine.csv"
    path.write_text("\n".join((header, *lines)) + "\n")
    return path


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
    ours = found.part(ADVENTURES).verdicts
    assert len(ours) == 33 and sum(bool(each.case.oom) for each in ours) == 2
    assert all(each.right for each in ours)


def test_cached_memory_is_within_a_tenth(found):
    errors = fitting.error_of(found.part(ADVENTURES).ratios["memory"])
    assert errors.rows == 25 and errors.worst <= 0.13 and errors.median <= 0.05


def test_logs_that_print_both_are_predicted_in_both(others):
    """Reserved was up to 19 % above the prediction, which stood where allocated memory is (Jean Zay)."""
    logs = [case for case in others if case.allocated]
    found = validation.validate(logs)
    for ratios in (found.ratios["allocated"], found.ratios["memory"]):
        assert fitting.error_of(ratios).rows == 5 and fitting.error_of(ratios).worst < 0.06
    shares = sorted(case.cached / case.allocated - 1 for case in logs)
    assert shares[2] == pytest.approx(fitted_constants().fragmentation, abs=0.005), "the constant's source"
    text = validation.describe(found, verbose=True)
    assert "print it too: 2.9%" in text and text.count("18B-log-n4") == 2, "the errors, and the rows"


def test_times_of_documents_that_were_left_out_are_within_the_goal(found):
    blog = "State-of-the-Art Language Modeling Using Megatron on the NVIDIA A100 GPU"
    median = {
        name: fitting.error_of(found.part(name).ratios["time"]).median for name in (ADVENTURES, OWN, blog)
    }
    assert median[ADVENTURES] <= 0.15 and median[OWN] <= 0.15
    assert 0.15 < median[blog] < 0.25, "misses the goal: neither its batch nor its sequence length is printed"


def test_a_document_is_predicted_without_having_been_fitted_on(published, found, monkeypatch):
    """Its own constants are used, and a document that nothing was fitted on gets those of all."""
    slow = fitted_constants().model_copy(update={"matrix": fitted_constants().matrix / 2})
    before = fitting.error_of(found.part(OWN).ratios["time"]).bias
    own = fitted()
    slower = own.model_copy(update={"left_out": {**own.left_out, OWN: slow}})
    monkeypatch.setattr(validation, "fitted", lambda: slower)
    changed = validation.validate(published)
    assert fitting.error_of(changed.part(OWN).ratios["time"]).bias > 1.5 * before and changed.unfitted == []
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
    found = validation.validate([*published, *others])
    text = validation.describe(found)
    now = {}
    for quantity in ("time", "memory"):
        now |= fitting.by_kind(quantity, found.ratios[quantity], fitted())
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
    found = validation.validate(page)
    assert len(found.verdicts) == 5 and all(each.right for each in found.verdicts)
    fp32 = [ratio for ratio in found.ratios["time"] if ratio.case.work.precision == "fp32"]
    assert all(0.9 < ratio.predicted / ratio.published < 1.35 for ratio in fp32) and len(fp32) == 3
    assert all(abs(ratio.error) < 0.2 for ratio in found.ratios["memory"])
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
    found = fitting.fit(by_document(made))
    assert found.matrix == pytest.approx(0.62, rel=0.02) and found.traffic == pytest.approx(1.6, rel=0.05)
    errors = [abs(math.log(r.predicted / r.published)) for r in fitting.ratios("time", made, found)]
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


def test_the_software_is_printed_and_never_guessed_from_the_gpu(tmp_path):
    """BERT-large on V100, pipeline or not, came out 1.8 times too slow: as by the software of 2019."""
    header = "row,family,layers,hidden,heads,pp,gpus,micro_batch,zero_stage,hardware,software,samples_per_s"
    nodes = ("V100 32GB", "A100 40GB", "H100")
    lines = [f"{node} {pp},bert,24,1024,16,{pp},8,8,0,{node},,300" for node in nodes for pp in (1, 2)]
    lines += ["z,bert,24,1024,16,1,8,8,1,V100,,300", "n,bert,24,1024,16,1,8,8,0,V100,megatron-2019,300"]
    cases = csv_cases.read(table(tmp_path, *lines, header=header))
    names = [case.work.software.name for case in cases]
    assert names == [*["megatron"] * 6, "megatron-deepspeed", "megatron-2019"]
    assert [case.assumed for case in cases] == [*[True] * 7, False]
    text = validation.describe(validation.validate(cases), verbose=True)
    assert "megatron (6, not stated: name it in the column software)" in text
    assert "megatron-2019 (1)" in text and "as run by" in text
    for case in cases:
        line = next(line for line in text.splitlines() if f"  {case.name} " in line)
        assert f" {case.work.software.name} " in line


def test_a_users_rows_are_predicted(tmp_path):
    header = f"{HEADER},time_per_iteration_s,cached_gb,status"
    path = table(
        tmp_path,
        "a,24,2304,24,1,1,32,16,512,full,a100-80x8,3.5,,ok",
        "b,96,12288,96,8,8,64,1,64,selective,NVIDIA A100 80GB,13.75,,",
        "c,24,1024,16,1,1,8,256,2048,none,V100 16GB,,,OOM",
        "d,24,,16,1,1,8,4,32,none,V100 32GB,1.0,,ok",
        header=header,
    )
    a, b, c, d = csv_cases.read(path)
    assert (a.work.layout.dp, a.work.layout.accumulation, a.work.recomputed) == (32, 1, 1)
    assert b.work.selective and b.node.name == "a100-80x8" and b.work.layout.accumulation == 64
    assert c.oom and c.node.name == "v100-16x4" and d.work is None
    done = run([*COMMAND, "--table", str(path), "--verbose"], cwd=tmp_path)
    printed = done.stdout
    assert done.returncode == 0
    assert "hidden is not stated" in printed and "no constant was fitted on: mine" in printed
    assert printed.count("\nmine  ") == 3, "the errors, and two rows with a time"


def test_rows_that_contradict_themselves_are_not_compared(tmp_path):
    lines = (
        "a,24,2304,24,1,1,32,3,512,full,a100-80x8",
        "b,24,2304,24,8,1,12,1,64,full,a100-80x8",
        "c,24,2304,24,5,1,5,1,5,full,a100-80x8",
        "d,24,2304,24,1,48,48,1,48,full,a100-80x8",
        "e,24,2304,24,1,1,8,1,8,full,GH200",
    )
    cases = csv_cases.read(table(tmp_path, *lines))
    assert [case.work for case in cases] == [None] * 5
    whys = [next(iter(case.excluded.values())) for case in cases]
    assert "batch.global=512" in whys[0] and "12 GPUs are not tp x pp x dp" in whys[1]
    assert "24 heads" in whys[2] and "24 layers" in whys[3] and "no known GPU" in whys[4]


def test_published_rates_become_seconds(tmp_path):
    header = f"{HEADER},samples_per_s,tflops,tflops_by,status"
    line = "a,24,2304,24,1,1,32,16,512,full,a100-80x8"
    rate, exact, model, oom = csv_cases.read(
        table(tmp_path, f"{line},128,,,", f"{line},,100,exact,", f"{line},,100,model,", f"{line},128,,,OOM",
              header=header)
    )  # fmt: skip
    assert rate.seconds == 512 / 128 and oom.seconds is None and oom.oom
    assert model.seconds / exact.seconds == pytest.approx(3 / 4, rel=0.03)


def test_what_a_row_leaves_open_is_chosen(tmp_path):
    """The fastest micro-batch that fits, and recomputation where memory asks for it."""
    header = "row,layers,hidden,tp,gpus,micro_batch,global_batch,hardware,tflops"
    small, large = csv_cases.read(
        table(tmp_path, "s,24,1024,1,8,,64,a100-40x8,100", "l,48,4096,8,8,16,64,v100-32x8,50", header=header)
    )
    assert (small.work.recomputed, small.work.layout.micro) == (0, 8) and small.work.model.heads == 8
    assert (large.work.recomputed, large.work.layout.micro, large.work.layout.accumulation) == (1, 16, 4)
    assert small.seconds and large.seconds


def test_a_table_of_a_spreadsheet_is_read(tmp_path):
    path = table(tmp_path, "24,1024,a100-40x8,8", header="layers,hidden,hardware,global_batch")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    (case,) = csv_cases.read(path)
    assert case.work.model.layers == 24, "it begins with a byte order mark"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "a,x,2304,24,1,1,32,16,512,full,a100-80x8",
            "mine.csv, line 2, layers: x: Input should be a valid integer",
        ),
        (
            "a,24,2304,24,1,1,32,16,512,some,a100-80x8",
            "activation_checkpointing: some: .*none, full .or yes., selective",
        ),
        ("a,24,-1,24,1,1,32,16,512,full,a100-80x8", "hidden: -1: Input should be greater than or equal to 1"),
    ],
)
def test_a_cell_that_cannot_be_read_is_named(tmp_path, line, says):
    with pytest.raises(ProblemsError, match=says):
        csv_cases.read(table(tmp_path, line))


def test_a_fine_tuning_has_its_tasks_head_alone(tmp_path):
    """Its logits are those of the task, in memory, operations and time."""
    header = "row,family,task,layers,hidden,sequence_length,micro_batch,hardware,software"
    kinds = ("", "mnli", "squad1", "race")
    lines = [f"{kind},bert,{kind},12,768,128,32,V100 32GB,transformers" for kind in kinds]
    works = [case.work for case in csv_cases.read(table(tmp_path, *lines, header=header))]
    assert [work.model.task_head for work in works] == ["none", "classification", "span", "choice"]
    assert [work.logits for work in works] == [32 * 128 * 30592, 32 * 3, 32 * 128 * 2, 4 * 32]
    node, known = hardware.find("v100-32x8"), fitted_constants()
    ranks = [rank_memory.fullest_rank(work, node.gpu, known) for work in works]
    times = [step_time(work, node, known).total for work in works]
    operations = [work.exact_tflops(1.0, 1) for work in works]
    for task in (1, 2):
        assert ranks[task].allocated < 0.8 * ranks[0].allocated, kinds[task]
        assert times[task] < 0.87 * times[0] and operations[task] < 0.8 * operations[0], kinds[task]
    (usual,) = csv_cases.read(table(tmp_path, lines[1].removesuffix("transformers"), header=header))
    assert usual.work == works[1], "a task's usual software is not Megatron-LM"
    assert works[3].tokens == 4 * works[1].tokens, "each choice is a sequence"
    (none,) = csv_cases.read(table(tmp_path, "a,gpt2,mnli,12,768,128,32,V100 32GB,", header=header))
    assert none.excluded["time"] == "a gpt2 has no task mnli"
    with pytest.raises(ProblemsError, match="task: cola: Input should be 'sst2'"):
        csv_cases.read(table(tmp_path, "a,bert,cola,12,768,128,32,V100 32GB,", header=header))


def test_an_unknown_column_is_refused(tmp_path):
    path = table(tmp_path, "24,1024,V100,8,1", header="layers,hidden,hardware,micro_batch,Head")
    with pytest.raises(ProblemsError) as refused:
        csv_cases.read(path)
    said = str(refused.value)
    assert "unknown column 'head'" in said
    assert all(name in said for name in csv_cases.COLUMNS)


def test_a_table_without_shapes_is_refused(tmp_path):
    with pytest.raises(ProblemsError, match="no column hardware, hidden"):
        csv_cases.read(table(tmp_path, "1", header="layers"))


def test_a_table_that_is_not_there_is_refused_with_its_flag():
    refused = run([*COMMAND, "--table", "nosuch.csv"])
    assert refused.returncode == 2 and "--table nosuch.csv: no such file; give a CSV" in refused.stdout


def test_the_columns_are_listed_and_nothing_else():
    done = run([*COMMAND, "--columns"])
    listed = [line.split()[0] for line in done.stdout.splitlines() if line and not line.startswith(" ")]
    assert done.returncode == 0 and listed == list(csv_cases.COLUMNS)
    refused = run([*COMMAND, "--columns", "--verbose"])
    assert refused.returncode == 2 and "--columns with --verbose" in refused.stdout


def test_the_report_says_what_is_wrong(found):
    text = validation.describe(found, width=110)
    for words in ("printed OOM", "no verdict is wrong", "shown, and not compared", "33 of 33"):
        assert words in text, words
