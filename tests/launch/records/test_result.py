"""What a run concludes: its result, the file that holds it, and the lines that show it."""

import io
import json
import math
import re
from dataclasses import replace

import pytest
from recorded import facts, outcome, plan, recipe, recorder, run_steps

from ds_configs.findings import Notice
from launch.records.directory import RunDirectory
from launch.records.facts import Ending, Entropies, Peaks, StepRecord
from launch.records.metrics import read_metrics
from launch.records.result import (
    UNNAMED,
    HeldOutLoss,
    Result,
    Speed,
    make_result,
    read_result,
    steady_seconds,
    write_result,
)
from launch.records.result_text import result_text
from modeling import cost
from recipes.files import FileError
from recipes.layout import Layout

PARTS = {"mlm_loss": 5.0, "sentence_loss": 0.69, "sentence_accuracy": 0.5}


def result_of(run: RunDirectory, plan_, ending: Ending = Ending(), **changes) -> Result:  # noqa: B008
    return make_result(facts(plan_, **changes), read_metrics(run.metrics_jsonl), ending)


def test_steady_time_leaves_out_the_start_of_every_launch():
    def launch(*seconds: float) -> list[StepRecord]:
        return [StepRecord(n, 1.0, False, each, n, 1, "kind") for n, each in enumerate(seconds, start=1)]

    slow = (9.0,) * 5
    steady = steady_seconds([*launch(*slow, 1.0, 2.0, 3.0), *launch(*slow, 2.0)])
    assert steady == (2.0, 4, 5, None)
    assert Speed(*steady).measured_over == "median of 4 steps, the first 5 of each launch left out"
    assert steady_seconds(launch(9.0, 1.0)) == (1.0, 1, 1, None)
    assert Speed(*steady_seconds(launch(9.0))).measured_over == "median of 1 step"
    assert steady_seconds([]) is None
    many = steady_seconds(launch(*slow, *(float(n) for n in range(1, 10))))
    assert many == (5.0, 9, 5, (3.0, 7.0))
    said = "median of 9 steps, half of them 3 to 7 s, the first 5 of each launch left out"
    assert Speed(*many).measured_over == said


def test_a_rate_has_the_spread_of_its_steps():
    speed = Speed(2.0, 9, 5, (1.0, 4.0))
    assert speed.spread_of(8.0) == (4.0, 16.0)
    assert speed.spread_of(None) is None
    assert Speed(2.0, 3).spread_of(8.0) is None


def test_the_result_of_a_faithful_run(tmp_path):
    run = run_steps(tmp_path, plan(), 20)
    result = result_of(run, plan(), original=recipe())
    assert result.deviations == () and result.comparison == () and result.status == "ok" and not result.tiny
    assert result.losses.training.loss == pytest.approx(6.0 - 0.1 * 15.5), "mean of steps 11 to 20"
    assert result.speed.samples_per_s == 16 and result.speed.seconds_per_step == 0.5
    assert result.parameters == cost.parameters(recipe().model, 16)
    text = result_text(result)
    assert "uniform 5.7000, unigram 5.0000" not in text, "no validation was made"
    assert "not measured" in text and "CPU: Some CPU, 2 cores" in text


def test_a_result_is_read_as_it_was_written(tmp_path):
    published = {"source": "S", "samples_per_s": 4.0}
    named = recipe(hardware="16x V100", published=published, optimizer={"lr": 1, "betas": [0.5, 0.6]})
    used = plan(recipe(published=published), notices=(Notice("precision", "precision: loudly"),))
    run = run_steps(tmp_path, used, 3)
    with recorder(tmp_path, used, start=3) as records:
        records.validation(3, outcome(5.0, PARTS))
    result = result_of(run, used, Ending("OOM", "rank 1: no memory", sample="We"), original=named)
    assert {each.kind for each in result.deviations} >= {"status", "notice", "recipe", "hardware", "steps"}
    write_result(run.result_json, result)
    assert read_result(run.result_json) == result
    written = json.loads(run.result_json.read_text())
    assert written["version"] == 2 and {"kind", "key", "was", "is"} == set(written["deviations"][0])


def test_a_result_that_is_none_names_the_field(tmp_path):
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"version": 2, "recipe": "a/b", "status": "ok", "speed": {"tflops": "many"}}))
    with pytest.raises(FileError, match="result.json: speed.tflops='many'"):
        read_result(path)


def test_validation_and_entropies_stand_together(tmp_path):
    run = run_steps(tmp_path, plan(), 2)
    with recorder(tmp_path, plan(), start=2) as records:
        records.validation(2, outcome(4.5))
        records.say("saved")
    kinds = [json.loads(line)["kind"] for line in run.metrics_jsonl.read_text().splitlines()]
    assert kinds == ["launch", "step", "step", "launch", "validation", "note"]
    assert "4.5000 (after step 2, uniform 5.7000, unigram 5.0000)" in result_text(result_of(run, plan()))


def test_every_deviation_is_stated(tmp_path):
    named = recipe(hardware="16x V100", precision="bf16", parallel={"tp": 2, "pp": 1}, steps=100)
    changed = named.model_copy(update={"sequence_length": 8, "seed": 5})
    layout = Layout(tp=1, pp=2, dp=1, micro=2, accumulation=4, global_batch=8)
    notices = (Notice("optimizer", "optimizer: loudly"),)
    used = plan(changed, ds_name="fp16_dynamic", layout=layout, precision="fp16", notices=notices)
    result = result_of(run_steps(tmp_path, used, 3), used, original=named, tiny=True, emulated_fp16=True)
    assert result.tiny and result.emulated_fp16
    text = result_text(result)
    for expected in (
        "optimizer: loudly",
        "tiny: the recipe was shrunk (--tiny)",
        "sequence_length: 8, the recipe's is 16",
        "seed: 5, the recipe's is 1234",
        "ds_config: run with fp16_dynamic, the recipe's is zero1",
        "parallel.tp: 1, the recipe's is 2",
        "parallel.pp: 2, the recipe's is 1",
        "hardware: run on CPU: Some CPU, 2 cores, the recipe's is 16x V100",
        "precision: fp16, the recipe's is bf16",
        "fp16 is emulated on a CPU",
        "steps: 3 of the recipe's 100",
    ):
        assert f"  - {expected}" in text or f": {expected}" in text, expected


def test_a_notice_on_the_precision_says_all_about_it(tmp_path):
    used = plan(precision="bf16", notices=(Notice("precision", "precision: bf16 INSTEAD OF fp32"),))
    result = result_of(run_steps(tmp_path, used, 20), used)
    assert [str(each) for each in result.deviations] == ["precision: bf16 INSTEAD OF fp32"]


def test_published_and_measured_side_by_side(tmp_path):
    numbers = {"time_per_iteration_s": 0.25, "samples_per_s": 32.0, "parameters": 30000}
    used = plan(recipe(published={"source": "Some table", **numbers}))
    run = run_steps(tmp_path, used, 20)
    result = result_of(run, used)
    compared = {entry.quantity: entry for entry in result.comparison}
    time = compared["time_per_iteration_s"]
    assert (time.published, time.measured, time.ratio) == (0.25, 0.5, 2.0)
    assert compared["tflops"].published is None and compared["tflops"].measured > 0
    assert compared["cached_gb"].measured is None
    text = result_text(result)
    assert "not published" in text and "not measured" in text and "source: Some table" in text
    cached = result_of(run, used, Ending(peaks=Peaks(None, 31_400_000_000))).comparison[3]
    assert cached.measured == pytest.approx(31.4)


def test_no_ratio_to_a_published_number_of_other_work(tmp_path):
    original = recipe(published={"source": "Some table", "time_per_iteration_s": 0.25})
    changed = original.model_copy(update={"sequence_length": 8})
    cases = (plan(original), True, "tiny, another model"), (plan(changed), False, "other sequence_length")
    for used, tiny, why in cases:
        result = result_of(run_steps(tmp_path, used, 3), used, original=original, tiny=tiny)
        assert str(result.not_comparable) == why and f"no ratios: {why}" in result_text(result)
        assert {entry.ratio for entry in result.comparison} == {None}
    run = run_steps(tmp_path, plan(original), 3)
    assert result_of(run, plan(original), original=original).not_comparable is None


def test_a_run_that_ended_at_once_is_a_result_too(tmp_path):
    run = run_steps(tmp_path, plan(), 0)
    result = result_of(run, plan(), Ending("OOM"), entropies=Entropies())
    assert result.status == "OOM" and result.speed.seconds_per_step is None
    assert [str(each) for each in result.deviations] == ["steps: 0 of the recipe's 20"]
    assert "OOM" in result_text(result)
    write_result(run.result_json, result)
    assert read_result(run.result_json) == result


def test_the_speed_of_a_run_of_two_layouts_is_that_of_the_last(tmp_path):
    one = plan(layout=Layout(tp=1, pp=1, dp=1, micro=8, accumulation=1, global_batch=8), ds_name="zero0")
    run_steps(tmp_path, one, 20, seconds=4.0)
    run_steps(tmp_path, plan(), 0, start=20)  # killed at once: it counts for nothing
    run_steps(tmp_path, plan(), 7, start=20, seconds=0.5)
    run = run_steps(tmp_path, plan(), 7, start=27, seconds=0.5)
    result = result_of(run, plan())
    assert result.speed.seconds_per_step == 0.5 and result.speed.steps == 4
    assert result.speed.samples_per_s == 16
    (other,) = [str(each) for each in result.deviations if each.kind == "otherwise"]
    assert other.startswith("steps 1 to 20: run with zero0: tp 1 x pp 1 x dp 1, micro-batch 8")
    assert other.endswith("speed and memory are not of these steps")
    # Resumed in the first layout, with nothing more to do.
    made, at_end = result_of(run, one), result_of(run, plan())
    assert made.speed == at_end.speed
    assert [each.kind for each in made.deviations if each.kind in ("otherwise", "measured")] == [
        "otherwise", "measured",
    ]  # fmt: skip


def test_a_loss_that_is_not_finite_is_not_averaged_away(tmp_path):
    run = run_steps(tmp_path, plan(), 3)
    with recorder(tmp_path, plan(), start=3) as records:
        records.step(outcome(math.nan, step=4, seconds=0.1, data_seconds=0.0))
    assert result_of(run, plan()).losses.training.loss is None


def test_skipped_steps_are_counted(tmp_path):
    result = result_of(run_steps(tmp_path, plan(), 3, skipped=True), plan())
    assert result.skipped_steps == 3 and "3 (3 skipped)" in result_text(result)


# --- BERT: parts of the loss, the test split, waiting for data


def bert_plan(head="sop"):
    return plan(recipe(model={**recipe().model.model_dump(), "family": "bert", "sentence_head": head}))


@pytest.fixture
def bert(tmp_path) -> Result:
    with recorder(tmp_path, bert_plan()) as records:
        for step in range(1, 21):
            parts = {**PARTS, "mlm_loss": 6.0 - 0.1 * step}
            waited = 0.4 if step <= 5 else 0.01
            records.step(outcome(6.69 - 0.1 * step, parts, step=step, data_seconds=waited))
        records.validation(20, outcome(5.69, PARTS))
        records.validation(20, outcome(5.89, {**PARTS, "mlm_loss": 5.2}), kind="test")
    return result_of(RunDirectory(tmp_path), bert_plan(), entropies=Entropies(6.8, 6.5))


def test_parts_of_the_loss_stand_next_to_it(bert):
    losses = bert.losses
    assert losses.validation == HeldOutLoss(5.69, PARTS, 20)
    assert losses.test.loss == 5.89 and losses.test.parts["mlm_loss"] == 5.2
    assert losses.training.parts["mlm_loss"] == pytest.approx(6.0 - 0.1 * 15.5), "mean of the last ten steps"
    lines = [" ".join(line.split()) for line in result_text(bert).splitlines()]
    assert lines[:9] == [
        "validation masked-token loss 5.0000 (after step 20, uniform 6.8000, unigram 6.5000)",
        "sentence-order loss 0.6900 (nats per sample)",
        "sentence-order accuracy 0.5000 (share of samples)",
        "total loss 5.6900 (nats)",
        "training masked-token loss 4.4500 (mean of the last 10 steps, nats per masked token)",
        "sentence-order loss 0.6900 (nats per sample)",
        "sentence-order accuracy 0.5000 (share of samples)",
        "total loss 5.1400 (nats)",
        "test masked-token loss 5.2000 (held-out test documents, after the last step)",
    ]


@pytest.mark.parametrize(
    "head, sentences", (("none", ""), ("nsp", "next-sentence"), ("sop", "sentence-order"))
)
def test_each_objective_of_a_bert_has_its_name(tmp_path, head, sentences):
    """In the live line, at a validation, in what is to beat and in the result."""
    used = bert_plan(head)
    parts = PARTS if sentences else {"mlm_loss": 5.0}
    with recorder(tmp_path, used, stream=(stream := io.StringIO())) as records:
        records.step(outcome(sum([*parts.values()][:2]), parts, step=1, data_seconds=0.0))
        records.validation(1, outcome(sum([*parts.values()][:2]), parts))
    each = "masked-token loss 5.0000"
    if sentences:
        each += f", {sentences} loss 0.6900, {sentences} accuracy 0.5000, total loss 5.6900"
    text = stream.getvalue()
    assert f"| {each.replace(', ', ' | ')} | lr" in text and f"step 1: validation {each}\n" in text
    assert "by the masked-token loss (nats per masked token): uniform 5.7000, unigram 5.0000" in text
    shown = result_text(result_of(RunDirectory(tmp_path), used))
    names = [line.strip() for line in re.findall(r"^[a-z -]+ loss", shown, re.M)]
    others = [f"{sentences} loss", "total loss"] if sentences else []
    assert names == ["validation masked-token loss", *others, "training masked-token loss", *others]


def test_a_result_of_before_the_figures_had_names_is_read(bert, tmp_path):
    write_result(tmp_path / "result.json", bert)
    values = json.loads((tmp_path / "result.json").read_text())
    assert [each["key"] for each in values.pop("figures")] == ["mlm_loss", *[*PARTS][1:], "loss"]
    (tmp_path / "result.json").write_text(json.dumps({**values, "loss_per": "masked token"}))
    assert read_result(tmp_path / "result.json") == replace(bert, figures=(UNNAMED,))


def test_waiting_for_data_is_a_share_of_the_steady_time(bert):
    assert bert.speed.data_wait_share == pytest.approx(0.01 / 0.5)
    assert "2.00 % of the time" in result_text(bert)
    assert "not measured" in result_text(replace(bert, speed=replace(bert.speed, data_wait_share=None)))
