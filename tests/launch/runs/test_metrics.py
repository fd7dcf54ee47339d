"""What a run records, shows and concludes."""

import io
import json
import math
from types import SimpleNamespace

import pytest

from ds_configs.findings import Notice
from launch.console.progress import LINES_PER_RUN
from launch.machine import description, memory
from launch.runs import result as results
from launch.runs.directory import RunDirectory, read_metrics
from launch.runs.loss_plot import moving_average, plot_loss
from launch.runs.metrics import Metrics
from launch.runs.recorder import Report
from launch.runs.throughput import Throughput, steady_seconds
from modeling import cost
from recipes.schema import Recipe

DESCRIBED = {"cpu": "Some CPU", "cores": 2, "accelerators": 0, "accelerator": "cpu"}


def recipe(**changes) -> Recipe:
    values = {
        "title": "small",
        "model": {"layers": 2, "hidden": 32, "heads": 4, "vocab_size": 300},
        "sequence_length": 16,
        "batch": {"micro": 2, "global": 8},
        "steps": 20,
        "optimizer": {"lr": 1e-3},
        "ds_config": "zero1",
    }
    return Recipe(**{**values, **changes})


def plan(recipe_: Recipe | None = None, **changes):
    facts = {
        "recipe": recipe_ or recipe(),
        "layout": SimpleNamespace(tp=1, pp=1, dp=2, micro=2, accumulation=2, global_batch=8),
        "zero_stage": 1,
        "offload": "none",
        "precision": "fp32",
        "padded_vocab": 384,
        "notices": (),
        "ds_name": "zero1",
        "ds": {},
    }
    return SimpleNamespace(**{**facts, **changes})


def run_steps(
    directory, plan_, steps, *, start=0, total=20, stream=None, seconds=0.5, **overrides
) -> RunDirectory:
    run = RunDirectory(directory)
    metrics = Metrics(
        run,
        plan_,
        progress=stream is not None,
        start_step=start,
        total_steps=total,
        stream=stream or io.StringIO(),
    )
    values = {"lr": 1e-3, "grad_norm": 1.5, "loss_scale": 1.0, "skipped": False, "peak_memory_bytes": 10**9}
    for step in range(start + 1, start + steps + 1):
        metrics.step(step, loss=6.0 - 0.1 * step, seconds=seconds, **{**values, **overrides})
    metrics.close()
    return run


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_step_is_one_line_with_rates(tmp_path):
    (record,) = read_metrics(run_steps(tmp_path, plan(), 1).metrics_jsonl)
    assert record["kind"] == "step" and record["step"] == 1 and record["loss"] == pytest.approx(5.9)
    assert record["samples_per_s"] == 16 and record["tokens_per_s"] == 256
    flops = cost.exact_flops_per_step(recipe().model, 16, 8, padded_vocab=384)
    assert record["exact_tflops"] == pytest.approx(flops / 0.5 / 2 / 1e12)
    assert record["memory_kind"] == memory.peak_memory().kind


def test_a_killed_process_loses_no_line(tmp_path):
    metrics = Metrics(RunDirectory(tmp_path), plan(), progress=False, start_step=0, total_steps=2)
    metrics.step(1, 1.0, 1e-3, 1.0, 1.0, False, 0.1, 1)
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1, (
        "the line must be with the system before step returns"
    )
    metrics.close()
    metrics.close()


def test_checkpointing_counts_as_work_done():
    plain = Throughput(plan()).rates(1.0)
    recomputing = Throughput(plan(recipe(activation_checkpointing=2))).rates(1.0)
    assert recomputing["tflops"] / plain["tflops"] == pytest.approx(4 / 3)
    assert recomputing["exact_tflops"] > plain["exact_tflops"]


def test_what_is_not_finite_is_null_and_the_line_stays_json(tmp_path):
    run = run_steps(tmp_path, plan(precision="fp16"), 1, grad_norm=math.inf, skipped=True)
    record = json.loads(
        run.metrics_jsonl.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON")
    )
    assert record["grad_norm"] is None and record["skipped"] is True


def test_steps_count_completed_steps(tmp_path):
    metrics = Metrics(RunDirectory(tmp_path), plan(), progress=False, start_step=0, total_steps=2)
    with pytest.raises(AssertionError, match="the first is 1"):
        metrics.step(0, 1.0, 1e-3, 1.0, 1.0, False, 0.1, 1)
    metrics.close()


def test_a_resumed_run_replaces_the_steps_it_repeats(tmp_path):
    run_steps(tmp_path, plan(), 7)
    run = run_steps(tmp_path, plan(), 3, start=5)
    assert [record["step"] for record in read_metrics(run.metrics_jsonl)] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [record["launch_step"] for record in read_metrics(run.metrics_jsonl)] == [1, 2, 3, 4, 5, 1, 2, 3]


def test_tensorboard_events_and_what_a_resume_purges(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_steps(tmp_path, plan(), 7)
    run = run_steps(tmp_path, plan(), 3, start=5)
    events = EventAccumulator(str(run.tensorboard))
    events.Reload()
    assert {"train/loss", "train/grad_norm", "speed/tokens_per_s", "memory/peak_memory_bytes"} <= set(
        events.Tags()["scalars"]
    )
    assert "train/loss_scale" not in events.Tags()["scalars"], "only fp16 has a loss scale"
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6, 7, 8]
    run_steps(tmp_path, plan(), 2)  # killed before its first checkpoint: from the beginning
    events = EventAccumulator(str(run.tensorboard))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2]


def test_a_log_gets_whole_lines(tmp_path):
    stream = io.StringIO()
    run_steps(tmp_path, plan(), 200, total=200, stream=stream)
    lines = stream.getvalue().splitlines()
    assert "\r" not in stream.getvalue()
    assert LINES_PER_RUN <= len(lines) <= LINES_PER_RUN + 1
    assert lines[0].startswith(
        "step 1/200 | loss 5.9000 | lr 1.0e-03 | grad norm 1.5 | 16 samples/s | 256 tokens/s"
    )
    assert (
        "left" not in lines[0] and "left" in lines[1]
    )  # one step tells nothing about the rate: it compiles and allocates
    assert lines[-1].startswith("step 200/200")
    assert "scale" not in lines[0]


def test_a_slow_run_is_heard_of_between_its_lines(tmp_path, monkeypatch):
    clock = iter(range(0, 10**6, 20))
    monkeypatch.setattr("launch.console.progress.time.monotonic", lambda: next(clock))
    stream = io.StringIO()
    run_steps(
        tmp_path, plan(), 10, total=10**6, stream=stream
    )  # a line every 50,000 steps, but 20 s per step
    assert len(stream.getvalue().splitlines()) == 1 + 4


def test_a_terminal_gets_a_bar(tmp_path):
    stream = Terminal()
    run_steps(tmp_path, plan(precision="fp16"), 20, stream=stream, loss_scale=65536.0, skipped=True)
    assert "\r" in stream.getvalue()
    for expected in ("step 20/20", "scale 65.5k", "SKIPPED", "loss 4.0000", "left"):
        assert expected in stream.getvalue()


def test_steady_time_leaves_out_the_start_of_every_launch():
    def launch(seconds):
        return [{"kind": "step", "seconds": s, "launch_step": i} for i, s in enumerate(seconds, start=1)]

    slow_start = [9.0] * 5
    seconds, which = steady_seconds([*launch(slow_start + [1.0, 2.0, 3.0]), *launch(slow_start + [2.0])])
    assert seconds == 2.0 and "4 steps" in which and "first 5" in which
    assert steady_seconds(launch([9.0, 1.0])) == (
        1.0,
        "median of 1 steps, the first 1 of each launch left out",
    )
    assert steady_seconds(launch([9.0])) == (9.0, "median of 1 steps")
    assert steady_seconds([{"kind": "validation", "step": 0}]) is None


def row(run: RunDirectory, plan_, **changes):
    facts = {"name": "table/small", "described": DESCRIBED, "entropies": {"uniform": 5.7, "unigram": 5.0}}
    return results.result_row(plan_, read_metrics(run.metrics_jsonl), **{**facts, **changes})


def test_the_row_of_a_faithful_run(tmp_path):
    run = run_steps(tmp_path, plan(), 20)
    result = row(run, plan(), original=recipe())
    assert result["deviations"] == [] and result["comparison"] == [] and result["status"] == "ok"
    assert result["train_loss"] == pytest.approx(6.0 - 0.1 * 15.5), "mean of steps 11 to 20"
    assert result["samples_per_s"] == 16 and result["seconds_per_step"] == 0.5
    assert result["parameters"] == cost.parameters(recipe().model, 16)
    results.write_result(run.result_json, result)
    assert json.loads(run.result_json.read_text()) == result
    text = results.format_row(result)
    assert "uniform 5.7000, unigram 5.0000" not in text, "no validation was made"
    assert "not measured" in text and "CPU: Some CPU, 2 cores" in text


def test_validation_and_entropies_stand_together(tmp_path):
    run = run_steps(tmp_path, plan(), 2)
    metrics = Metrics(run, plan(), progress=False, start_step=2, total_steps=20)
    metrics.validation(2, 4.5)
    metrics.note("saved")
    metrics.close()
    assert [record["kind"] for record in read_metrics(run.metrics_jsonl)] == [
        "step",
        "step",
        "validation",
        "note",
    ]
    assert "4.5000 (after step 2, uniform 5.7000, unigram 5.0000)" in results.format_row(row(run, plan()))


def test_every_deviation_is_stated(tmp_path):
    named = recipe(hardware="16x V100", precision="bf16", parallel={"tp": 2, "pp": 1}, steps=100)
    changed = named.model_copy(update={"sequence_length": 8, "seed": 5})
    layout = SimpleNamespace(tp=1, pp=2, dp=1, micro=2, accumulation=4, global_batch=8)
    notices = (Notice("optimizer", "optimizer: loudly another"),)
    used = plan(changed, ds_name="fp16_dynamic", layout=layout, precision="fp16", notices=notices)
    result = row(run_steps(tmp_path, used, 3), used, original=named, tiny=True, emulated_fp16=True)
    text = "\n".join(result["deviations"])
    for expected in (
        "optimizer: loudly another",
        "tiny:",
        "sequence_length: 8, the recipe's is 16",
        "seed: 5, the recipe's is 1234",
        "ds_config: run with fp16_dynamic, the recipe's is zero1",
        "parallel.tp: 1, the recipe's is 2",
        "parallel.pp: 2, the recipe's is 1",
        "hardware: run on CPU: Some CPU, 2 cores, the recipe's is 16x V100",
        "precision: fp16, the recipe's is bf16",
        "emulated on a CPU",
        "steps: 3 of the recipe's 100",
    ):
        assert expected in text
    assert all(line in results.format_row(result) for line in result["deviations"])


def test_published_and_measured_side_by_side(tmp_path):
    published = {
        "source": "Some table",
        "time_per_iteration_s": 0.25,
        "samples_per_s": 32.0,
        "parameters": 30000,
    }
    used = plan(recipe(published=published))
    run = run_steps(tmp_path, used, 20)
    result = row(run, used)
    by_quantity = {entry["quantity"]: entry for entry in result["comparison"]}
    assert by_quantity["time_per_iteration_s"] | {"unit": ""} == {
        "quantity": "time_per_iteration_s",
        "unit": "",
        "published": 0.25,
        "measured": 0.5,
        "ratio": 2.0,
    }
    assert by_quantity["tflops"]["published"] is None and by_quantity["tflops"]["measured"] > 0
    assert by_quantity["cached_gb"]["measured"] == "not measured"
    text = results.format_row(result)
    assert "not published" in text and "not measured" in text and "source: Some table" in text
    assert row(run, used, cached_bytes=31_400_000_000)["comparison"][3]["measured"] == pytest.approx(31.4)


def test_no_ratio_to_a_published_number_of_other_work(tmp_path):
    published = {"source": "Some table", "time_per_iteration_s": 0.25}
    original = recipe(published=published)
    changed = original.model_copy(update={"sequence_length": 8})
    for used, tiny, why in (
        (plan(original), True, "tiny, another model"),
        (plan(changed), False, "other sequence_length"),
    ):
        result = row(run_steps(tmp_path, used, 3), used, original=original, tiny=tiny)
        assert result["not_comparable"] == why and f"no ratios: {why}" in results.format_row(result)
        assert [entry["ratio"] for entry in result["comparison"]] == [None] * len(result["comparison"])
    assert (
        row(run_steps(tmp_path, plan(original), 3), plan(original), original=original)["not_comparable"]
        is None
    )


class TestReport:
    """What rank 0 keeps at the end of a run, without a run."""

    @pytest.fixture
    def report(self, tmp_path):
        used = plan(recipe(published={"source": "S", "cached_gb": 10.0}))
        job = SimpleNamespace(plan=used, name="table/small", resume=False, initial_weights=None)
        directory = run_steps(tmp_path, used, 20)
        report = Report(job, directory, original=used.recipe, tiny=False, emulated=False, progress=False)
        report.corpus = SimpleNamespace(uniform_entropy=5.7, unigram_entropy=5.0)
        report.metrics = Metrics(directory, used, progress=False, start_step=20, total_steps=20)
        return report

    @staticmethod
    def kept(report) -> dict:
        return json.loads(report.directory.result_json.read_text())

    def test_memory_is_the_largest_of_any_rank_in_the_row_and_beside_the_published(self, report, monkeypatch):
        monkeypatch.setattr("launch.runs.recorder.peak_cached_bytes", lambda: 20 * 10**9)  # rank 0's own
        report.finish("ok", memory={"peak_memory_bytes": 7 * 10**9, "cached_bytes": 30 * 10**9})
        row = self.kept(report)
        assert (row["cached_bytes"], row["peak_memory_bytes"]) == (30 * 10**9, 7 * 10**9)
        cached = next(entry for entry in row["comparison"] if entry["quantity"] == "cached_gb")
        assert (cached["measured"], cached["ratio"]) == (30.0, 3.0)

    def test_rank_0_speaks_for_itself_where_the_others_cannot_be_asked(self, report, monkeypatch):
        monkeypatch.setattr("launch.runs.recorder.peak_cached_bytes", lambda: 20 * 10**9)
        report.finish("OOM", because="rank 3: torch.OutOfMemoryError: CUDA out of memory.")
        row = self.kept(report)
        assert (
            row["status"] == "OOM" and row["cached_bytes"] == 20 * 10**9 and row["peak_memory_bytes"] == 10**9
        )
        assert row["deviations"][0] == "OOM: rank 3: torch.OutOfMemoryError: CUDA out of memory."
        assert "OOM: rank 3" in results.format_row(row).splitlines()[1]

    def test_a_run_at_its_last_checkpoint_has_a_result_and_a_curve(self, report, monkeypatch):
        drawn = []
        monkeypatch.setattr("launch.runs.recorder.plot_loss", lambda *_, **__: drawn.append(1))
        report.saving({"peak_memory_bytes": 1, "cached_bytes": None})
        row = self.kept(report)
        assert (
            row["status"] == "saving"
            and row["steps"] == 20
            and row["seconds_per_step"] == 0.5
            and drawn == [1]
        )
        assert "last checkpoint was not complete" in row["deviations"][0]
        report.finish("ok", memory={"peak_memory_bytes": 1, "cached_bytes": None})
        row = self.kept(report)
        assert row["status"] == "ok" and row["deviations"] == [] and drawn == [1], "nothing new to draw"


def test_a_run_that_ended_at_once_is_a_row_too(tmp_path):
    result = row(run_steps(tmp_path, plan(), 0), plan(), status="OOM", entropies=None)
    assert result["status"] == "OOM" and result["seconds_per_step"] is None
    assert "steps: 0 of the recipe's 20" in result["deviations"]
    assert "OOM" in results.format_row(result)
    json.dumps(result, allow_nan=False)


def test_a_loss_that_is_not_finite_is_not_averaged_away(tmp_path):
    run = run_steps(tmp_path, plan(), 3)
    metrics = Metrics(run, plan(), progress=False, start_step=3, total_steps=20)
    metrics.step(4, math.nan, 1e-3, 1.0, 1.0, False, 0.1, 1)
    metrics.close()
    assert row(run, plan())["train_loss"] is None


def test_the_loss_curve_is_a_picture(tmp_path):
    run = run_steps(tmp_path, plan(), 5)
    plot_loss(run.metrics_jsonl, run.loss_png, {"uniform": 5.7, "unigram": 5.0})
    assert run.loss_png.read_bytes().startswith(b"\x89PNG")
    plot_loss(tmp_path / "absent.jsonl", tmp_path / "empty.png", {})


def test_the_moving_average_starts_at_the_first_value():
    assert moving_average([4.0])[0] == pytest.approx(4.0)
    assert moving_average([4.0] * 50)[-1] == pytest.approx(4.0)
    assert 2.0 < moving_average([4.0, 2.0])[1] < 3.0


def test_the_hardware_is_described(tmp_path):
    described = description.describe()
    assert described["cpu"] and described["memory_gb"] > 0 and described["versions"]["deepspeed"]
    assert description.git_state(tmp_path) is None, "no checkout, no commit"
    json.dumps(described, allow_nan=False)
    assert description.summary({"accelerators": 8, "accelerator": "V100"}) == "8 x V100"


def test_the_commit_of_another_checkout_is_not_ours(tmp_path):
    import subprocess

    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    git("init")
    assert description.git_state(tmp_path) is None, "no commit yet"
    git("commit", "--allow-empty", "-m", "empty")
    assert description.git_state(tmp_path) == {
        "commit": description.git_state(tmp_path)["commit"],
        "dirty": False,
    }
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "file").write_text("")
    assert description.git_state(tmp_path)["dirty"] is True
    assert description.git_state(tmp_path / "inner") is None


# --- BERT: parts of the loss, the test split, waiting for data

PARTS = {"mlm_loss": 5.0, "sentence_loss": 0.69, "sentence_accuracy": 0.5}


@pytest.fixture
def bert_run(tmp_path) -> RunDirectory:
    run = RunDirectory(tmp_path)
    metrics = Metrics(run, plan(), progress=False, start_step=0, total_steps=20)
    for step in range(1, 21):
        parts = {**PARTS, "mlm_loss": 6.0 - 0.1 * step}
        metrics.step(
            step,
            6.69 - 0.1 * step,
            1e-3,
            1.0,
            1.0,
            False,
            0.5,
            1,
            parts,
            data_seconds=0.4 if step <= 5 else 0.01,
        )
    metrics.validation(20, 5.69, PARTS)
    metrics.validation(20, 5.89, {**PARTS, "mlm_loss": 5.2}, kind="test")
    metrics.close()
    return run


def test_parts_of_the_loss_stand_beside_it(bert_run):
    row = results.result_row(
        plan(),
        read_metrics(bert_run.metrics_jsonl),
        name="bert",
        described=DESCRIBED,
        entropies={"unigram": 6.5},
    )
    assert row["validation_loss"] == 5.69 and row["validation_parts"] == PARTS
    assert row["test_loss"] == 5.89 and row["test_parts"]["mlm_loss"] == 5.2
    assert row["train_parts"]["mlm_loss"] == pytest.approx(6.0 - 0.1 * 15.5), "mean of the last ten steps"
    text = results.format_row(row)
    assert "masked tokens 5.0000, sentence objective 0.6900, sentence accuracy 0.5000" in text
    assert "of masked tokens: unigram 6.5" in text and "test loss" in text


def test_waiting_for_data_is_a_share_of_the_steady_time(bert_run):
    row = results.result_row(plan(), read_metrics(bert_run.metrics_jsonl), name="bert", described=DESCRIBED)
    assert row["data_wait_share"] == pytest.approx(0.01 / 0.5)
    assert "2.00 % of the time" in results.format_row(row)


def test_the_curve_of_a_bert_is_its_masked_token_loss(bert_run):
    from launch.runs.loss_plot import curve

    records = read_metrics(bert_run.metrics_jsonl)
    assert curve(records, "step", "mlm_loss")[0] == (1, pytest.approx(5.9))
    assert curve(records, "validation", "mlm_loss") == [(20, 5.0)], "the test split is no validation"
    plot_loss(bert_run.metrics_jsonl, bert_run.loss_png, {"unigram": 6.5})
    assert bert_run.loss_png.stat().st_size > 10_000
