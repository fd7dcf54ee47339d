"""What a run records and shows, and what it leaves when it ends."""

import contextlib
import errno
import io
import json
import math
import resource
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure
from recorded import outcome, plan, recipe, recorder, run_steps

from launch.console.progress import LINES_PER_RUN
from launch.machine import memory
from launch.ranks.joining import StartClock
from launch.records.facts import RECORDS_LOST, Ending, Peaks, SaveOutcome, Validation
from launch.records.metrics import START_PARTS, rates, read_metrics
from launch.records.result import read_result
from launch.training.engine import read_outcome
from modeling import cost

PARTS = {"mlm_loss": 5.0, "sentence_loss": 0.69, "sentence_accuracy": 0.5}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_step_is_one_line_with_rates(tmp_path):
    run = run_steps(tmp_path, plan(), 1)
    _, line = run.metrics_jsonl.read_text().splitlines()
    (record,) = read_metrics(run.metrics_jsonl).steps
    assert json.loads(line)["kind"] == "step" and record.step == 1 and record.loss == pytest.approx(5.9)
    assert record.samples_per_s == 16 and record.tokens_per_s == 256
    flops = cost.exact_flops_per_step(recipe().model, 16, 8, padded_vocab=384)
    assert record.exact_tflops == pytest.approx(flops / 0.5 / 2 / 1e12)
    assert record.memory_kind == memory.peak_memory().kind


def test_a_step_without_its_times_is_no_record(tmp_path):
    """The engine's figures have no times before the run adds them; a line has them all."""
    file = run_steps(tmp_path, plan(), 2).metrics_jsonl
    file.write_text(file.read_text().replace('"seconds": 0.5, "launch_step": 2, ', ""))
    with pytest.raises(ValueError, match="jsonl:3: a step without seconds, launch_step: delete that line"):
        read_metrics(file)


def test_a_killed_process_loses_no_line(tmp_path):
    records = recorder(tmp_path, plan())
    records.step(outcome(1.0, step=1, seconds=0.1, data_seconds=0.0))
    assert len(read_metrics(tmp_path / "metrics.jsonl").steps) == 1, (
        "it is with the system before step returns"
    )
    for _ in range(2):
        records.__exit__(None, None, None)


def test_the_first_step_of_a_launch_ends_its_start(tmp_path):
    shown = io.StringIO()
    with recorder(tmp_path, plan(), stream=shown, clock=StartClock()) as records:
        for part in ("imports", "data", "engine", "weights"):
            records.mark(part)
        for step in (1, 2):
            records.step(outcome(5.0, step=step, seconds=0.1, data_seconds=0.0))
        records.finish(Ending())
    (start,) = read_metrics(tmp_path / "metrics.jsonl").starts
    parts = [getattr(start, part) for part in START_PARTS]
    assert start.step == 1 and all(part >= 0 for part in parts)
    assert start.seconds == pytest.approx(sum(parts)) and start.compiling == 0
    assert read_result(tmp_path / "result.json").start == start
    assert shown.getvalue().count(f"{start.seconds:.1f} s from launch to first step: launcher") == 2


def test_checkpointing_counts_as_work_done():
    plain = rates(plan(), 1.0)
    recomputing = rates(plan(recipe(activation_checkpointing=2)), 1.0)
    assert recomputing["tflops"] / plain["tflops"] == pytest.approx(4 / 3)
    assert recomputing["exact_tflops"] > plain["exact_tflops"]


def test_a_smaller_step_has_its_own_rates():
    whole = plan().layout.global_batch
    every, half = rates(plan(), 1.0), rates(plan(), 1.0, whole // 2)
    assert half["samples_per_s"] == whole // 2
    assert {name: 2 * value for name, value in half.items()} == pytest.approx(every)


def test_what_is_not_finite_is_null_and_the_line_stays_json(tmp_path):
    engine = SimpleNamespace(
        fp16_enabled=lambda: True, settle_loss_scale=lambda: None, get_global_grad_norm=lambda: math.inf,
        skipped_steps=1, global_steps=1, module=SimpleNamespace(loss_parts=("mlm_loss",)),
    )  # fmt: skip
    figures = SimpleNamespace(read=lambda: [math.nan, math.inf])
    found = read_outcome(engine, (1e-3, 2.0**15, 0), figures)
    with recorder(tmp_path, plan(precision="fp16")) as records:
        records.step(replace(found, seconds=0.5))
    _, line = (tmp_path / "metrics.jsonl").read_text().splitlines()
    record = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert record["loss"] is record["grad_norm"] is record["mlm_loss"] is None
    assert record["skipped"] is True and record["loss_scale"] == 2.0**15


def test_steps_count_completed_steps(tmp_path):
    shown = io.StringIO()
    with recorder(tmp_path, plan(), stream=shown) as records:
        records.step(outcome(1.0, step=0, seconds=0.1, data_seconds=0.0))
    assert "first completed step is 1" in shown.getvalue()


def test_a_resumed_run_continues_its_records(tmp_path):
    run_steps(tmp_path, plan(), 7)
    run = run_steps(tmp_path, plan(), 3, start=5)
    steps = read_metrics(run.metrics_jsonl).steps
    assert [record.step for record in steps] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [record.launch_step for record in steps] == [1, 2, 3, 4, 5, 1, 2, 3]


def test_tensorboard_events_and_what_a_resume_purges(tmp_path, monkeypatch):
    """Launches follow each other in the seconds of their files' names, by which they are read in order."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def events() -> EventAccumulator:
        found = EventAccumulator(str(tmp_path / "tensorboard"))
        found.Reload()
        return found

    def launched_after(seconds: float, steps: int, start: int = 0) -> None:
        monkeypatch.setattr(time, "time", lambda: now() + seconds)
        run_steps(tmp_path, plan(), steps, start=start)

    now = time.time
    launched_after(0, 7)
    launched_after(2, 3, start=5)
    tags = set(events().Tags()["scalars"])
    assert {"train/loss", "train/grad_norm", "speed/tokens_per_s", "memory/peak_memory_bytes"} <= tags
    assert "train/loss_scale" not in tags, "only fp16 has a loss scale"
    assert [event.step for event in events().Scalars("train/loss")] == [1, 2, 3, 4, 5, 6, 7, 8]
    launched_after(4, 2)  # killed before its first checkpoint: from the beginning
    assert [event.step for event in events().Scalars("train/loss")] == [1, 2]


def shown_steps(stream: io.StringIO) -> list[str]:
    return [line for line in stream.getvalue().splitlines() if line.startswith("step ")]


def test_a_log_gets_whole_lines(tmp_path):
    stream = io.StringIO()
    run_steps(tmp_path, plan(recipe(steps=200)), 200, stream=stream)
    lines = shown_steps(stream)
    assert "\r" not in stream.getvalue()
    assert LINES_PER_RUN <= len(lines) <= LINES_PER_RUN + 1
    first = "step 1/200 | loss 5.9000 | lr 1.0e-03 | grad norm 1.5 | 16 samples/s | 256 tokens/s"
    assert lines[0].startswith(first)
    # One step tells nothing about the rate: it compiles and allocates.
    assert "left" not in lines[0] and "left" in lines[1]
    assert lines[-1].startswith("step 200/200")
    assert "scale" not in lines[0]


def test_a_slow_run_is_heard_of_between_its_lines(tmp_path, monkeypatch):
    clock = iter(range(0, 10**6, 20))
    monkeypatch.setattr("launch.console.progress.time.monotonic", lambda: next(clock))
    stream = io.StringIO()
    run_steps(tmp_path, plan(recipe(steps=10**6)), 10, stream=stream)  # a line every 50,000 steps; 20 s each
    assert len(shown_steps(stream)) == 1 + 4


def test_a_terminal_gets_a_bar(tmp_path):
    stream = Terminal()
    run_steps(tmp_path, plan(precision="fp16"), 20, stream=stream, loss_scale=65536.0, skipped=True)
    assert "\r" in stream.getvalue()
    for expected in ("step 20/20", "scale 65.5k", "SKIPPED", "loss 4.0000", "left"):
        assert expected in stream.getvalue()


def test_the_plan_and_what_to_beat_are_shown_first(tmp_path):
    stream = io.StringIO()
    bands = {**recipe().model.model_dump(), "attention": ["banded"], "attention_window": 4}
    records = recorder(tmp_path, plan(recipe(model=bands)), stream=stream, band_kernel="blocks (why)")
    records.__exit__(None, None, None)
    shown = stream.getvalue()
    assert "recipe         table/small: GPT-2 of " in shown and "  sparse by    blocks (why)" in shown
    assert "by the loss (nats per token): uniform 5.7000, unigram 5.0000" in shown


class TestTheEnd:
    """What rank 0 keeps at the end of a run."""

    @pytest.fixture
    def records(self, tmp_path):
        used = plan(recipe(published={"source": "S", "cached_gb": 10.0}))
        run_steps(tmp_path, used, 20)
        return recorder(tmp_path, used, start=20)

    @staticmethod
    def kept(records):
        return read_result(records.directory.result_json)

    def test_memory_is_the_largest_of_any_rank_in_the_result_and_next_to_the_published(
        self, records, monkeypatch
    ):
        monkeypatch.setattr("launch.records.recorder.peak_cached_bytes", lambda: 20 * 10**9)  # rank 0's own
        records.finish(Ending(peaks=Peaks(7 * 10**12, 30 * 10**9)))
        result = self.kept(records)
        assert (result.memory.cached_bytes, result.memory.peak_bytes) == (30 * 10**9, 7 * 10**12)
        cached = next(entry for entry in result.comparison if entry.quantity == "cached_gb")
        assert (cached.measured, cached.ratio) == (30.0, 3.0)

    def test_rank_0_speaks_for_itself_where_the_others_cannot_be_asked(self, records, monkeypatch):
        monkeypatch.setattr("launch.records.recorder.peak_cached_bytes", lambda: 20 * 10**9)
        records.finish(Ending("OOM", "rank 3: torch.OutOfMemoryError: CUDA out of memory."))
        result = self.kept(records)
        assert (result.status, result.memory.cached_bytes) == ("OOM", 20 * 10**9) and result.memory.peak_bytes
        assert str(result.deviations[0]) == "OOM: rank 3: torch.OutOfMemoryError: CUDA out of memory."

    def test_a_good_end_has_no_deviation(self, records):
        assert records.finish(Ending(peaks=Peaks(1), sample="We the people"))
        result = self.kept(records)
        assert result.status == "ok" and result.deviations == () and result.sample == "We the people"


def test_the_empty_lines_of_a_young_model_do_not_fill_the_screen(tmp_path):
    stream = io.StringIO()
    records = recorder(tmp_path, plan(recipe()), stream=stream)
    records.finish(Ending(peaks=Peaks(1), sample="We\n\nthe" + 30 * "\n" + "people"))
    assert "sample\n  We\n\n  the\n\n  people\n" in stream.getvalue()


@pytest.mark.parametrize(
    "save_last, saved, said",
    [
        (True, False, ""),  # a run that failed before its first one
        (False, False, "; no checkpoint (--set run.save_last=true keeps one)"),
        (False, True, ", checkpoints/"),
    ],
)
def test_the_end_says_what_is_kept_and_how_to_resume(tmp_path, save_last, saved, said):
    if saved:
        (tmp_path / "checkpoints" / "step-000007").mkdir(parents=True)
        (tmp_path / "checkpoints" / "step-000007" / "manifest.json").write_text("{}")
    stream = io.StringIO()
    records = recorder(tmp_path, plan(recipe(run={"save_last": save_last})), stream=stream)
    records.finish(Ending("interrupted"), "SIGTERM: stopped")
    end = stream.getvalue().splitlines()[-2:]
    assert end == [
        f"{tmp_path}: result.json, loss.png, card.png, metrics.jsonl{said}",
        "SIGTERM: stopped; resume with the same command and --resume",
    ]


def test_a_line_broken_in_the_middle_is_not_ignored(tmp_path):
    run = run_steps(tmp_path, plan(), 3)
    launch, first, _, last = run.metrics_jsonl.read_text().splitlines()
    run.metrics_jsonl.write_text(f'{launch}\n{first}\n{{"st\n{last}\n')
    with pytest.raises(ValueError, match="metrics.jsonl:3"):
        read_metrics(run.metrics_jsonl)
    problems: list[str] = []
    records = read_metrics(run.metrics_jsonl, problems)
    assert [record.step for record in records.steps] == [1, 3] and records.broken
    assert len(problems) == 1 and "metrics.jsonl:3" in problems[0] and "left out" in problems[0]


def test_of_a_step_that_was_recorded_twice_the_last_record_counts(tmp_path):
    """As where a file was joined by hand of two copies, in any order."""
    run = run_steps(tmp_path, plan(), 4)
    launch, *steps = run.metrics_jsonl.read_text().splitlines()
    again = [json.dumps({**json.loads(line), "loss": 9.0}) for line in steps[1:3]]
    held_out = ({"kind": kind, "step": 2, "loss": n} for kind in ("validation", "test") for n in (7, 8))
    tests = map(json.dumps, held_out)
    run.metrics_jsonl.write_text("\n".join([launch, *steps, *again, *tests]) + "\n")
    records = read_metrics(run.metrics_jsonl)
    assert [record.step for record in records.steps] == [1, 2, 3, 4]
    assert [record.loss == 9.0 for record in records.steps] == [False, True, True, False]
    assert [[each.loss for each in kind] for kind in (records.validations, records.tests)] == [[8.0], [8.0]]
    run.metrics_jsonl.write_text(steps[0].replace('"step": 1', '"step": -1') + "\n")
    with pytest.raises(ValueError, match="a step from 0"):
        read_metrics(run.metrics_jsonl)


def kinds(run) -> list[str]:
    return [json.loads(line)["kind"] for line in run.metrics_jsonl.read_text().splitlines()]


def test_metrics_are_cut_at_the_resumed_step(tmp_path):
    run = run_steps(tmp_path, plan(), 5)
    with open(run.metrics_jsonl, "a") as file:
        file.write('{"kind": "step", "step": 6, "lo')  # what a killed process leaves
    assert [record.step for record in read_metrics(run.metrics_jsonl).steps] == [1, 2, 3, 4, 5]
    shown = io.StringIO()
    recorder(tmp_path, plan(), start=4, stream=shown).__exit__(None, None, None)
    assert "has no record" not in shown.getvalue()
    assert kinds(run) == ["launch", *["step"] * 4, "launch"] and run.metrics_jsonl.read_text().endswith("}\n")
    recorder(tmp_path, plan()).__exit__(None, None, None)
    assert kinds(run) == ["launch"]


def without_step_2(content: bytes) -> bytes:
    return b"".join(line for line in content.splitlines(True) if b'"step": 2' not in line)


@pytest.mark.parametrize(
    ("left", "said"),
    [
        (lambda content: b"", "4 steps, the first 1"),
        (lambda content: None, "4 steps, the first 1"),
        (lambda content: content[: len(content) // 2], "2 steps, the first 3"),
        (without_step_2, "1 step, the first 2"),
    ],
)
def test_missing_records_of_a_resumed_run_are_told(tmp_path, left, said):
    run = run_steps(tmp_path, plan(), 5)
    content = left(run.metrics_jsonl.read_bytes())
    run.metrics_jsonl.unlink()
    if content is not None:
        run.metrics_jsonl.write_bytes(content)
    shown = io.StringIO()
    recorder(tmp_path, plan(), start=4, stream=shown).__exit__(None, None, None)
    (note,) = read_metrics(run.metrics_jsonl).notes
    assert f"WARNING: {run.metrics_jsonl} has no record of {said}, and no checkpoint holds one" in note.text
    assert note.text.split(":")[0] in " ".join(shown.getvalue().split())


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        ((), ""),  # an adopted run, whose steps another program recorded in its own way
        ((5,), ""),
        ((6,), "1 step, the first 5"),
        ((1, 2, 4), "1 step, the first 3"),
    ],
)
def test_the_steps_of_the_run_before_a_branch_are_told_if_that_was_ours(tmp_path, kept, said):
    branch = {"run": "other", "step": 4, "stretches": [(0, 0, 16)]}
    run = run_steps(tmp_path, plan(), 6)
    lines = {json.loads(line).get("step"): line for line in run.metrics_jsonl.read_text().splitlines(True)}
    run.metrics_jsonl.write_text("".join(lines[step] for step in kept))
    last = max(kept, default=4)
    shown = io.StringIO()
    recorder(tmp_path, plan(recipe(branch=branch)), start=last, stream=shown).__exit__(None, None, None)
    notes = [note.text for note in read_metrics(run.metrics_jsonl).notes]
    assert len(notes) == bool(said)
    assert not said or f"has no record of {said}" in notes[0]


def test_a_run_that_starts_over_forgets_its_first_validation(tmp_path):
    with recorder(tmp_path, plan()) as records:
        records.validation(0, outcome(6.0))
    for start, left in ((1, 2), (0, 0)):  # a note says that the first step is missing
        recorder(tmp_path, plan(), start=start).__exit__(None, None, None)
        found = read_metrics(tmp_path / "metrics.jsonl")
        assert len(found.validations) + len(found.notes) == left


@pytest.mark.parametrize("steps", (0, 1, 5))
def test_curve_and_card_are_pictures(tmp_path, steps):
    run = run_steps(tmp_path, plan(), steps)
    with recorder(tmp_path, plan(), start=steps) as records:
        assert records.finish(Ending())
    for picture in (run.loss_png, run.card_png):
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_curve_of_a_bert_is_its_masked_token_loss(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda picture, *_, **__: drawn.append(picture.axes[0]))
    bert = {**recipe().model.model_dump(), "family": "bert", "sentence_head": "sop"}
    with recorder(tmp_path, plan(recipe(model=bert))) as run:
        run.step(outcome(6.59, {**PARTS, "mlm_loss": 5.9}, step=1, seconds=0.5, data_seconds=0.0))
        run.validation(1, outcome(5.69, PARTS))
        run.validation(1, outcome(5.89, PARTS), kind="test")
        run.finish(Ending())
    axes, card = drawn
    assert card.get_title(loc="left") == axes.get_ylabel()
    assert axes.get_ylabel() == "masked-token loss (nats per masked token)"
    heights = [list(line.get_ydata()) for line in axes.get_lines()]
    trained, validated, uniform, unigram = [5.9], [5.0], [5.7] * 2, [5.0] * 2
    assert heights == [trained, trained, validated, uniform, unigram], "the test split is no validation"


@contextlib.contextmanager
def files_of_at_most(size: int):
    """What a full disk does to a write, which takes a part of it, by a limit that needs no disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_records_that_the_disk_does_not_take_are_written_once_it_does(tmp_path):
    stream = io.StringIO()
    with recorder(tmp_path, plan(), stream=stream) as records:
        records.step(outcome(5.0, step=1, seconds=0.5, data_seconds=0.0))
        with files_of_at_most((tmp_path / "metrics.jsonl").stat().st_size + 100):
            for step in range(2, 6):
                records.step(outcome(5.0, step=step, seconds=0.5, data_seconds=0.0))
        records.step(outcome(5.0, step=6, seconds=0.5, data_seconds=0.0))
        records.finish(Ending())
    assert [record.step for record in read_metrics(tmp_path / "metrics.jsonl").steps] == [1, 2, 3, 4, 5, 6]
    said = [line for line in stream.getvalue().splitlines() if "training continues" in line]
    assert len(said) == 2 and all("ulimit -f" in line for line in said), "metrics.jsonl, TensorBoard"
    assert "metrics.jsonl" not in stream.getvalue().rpartition("not all was recorded")[2]


def fails(error):
    def failing(*_, **__):
        raise error

    return failing


def replaced_by_a_directory(name):
    return lambda records, patch: (records.directory.path / name).mkdir()


def flipped(records, _):
    content = bytearray(records.directory.metrics_jsonl.read_bytes())
    content[content.index(b'"step": 2') + 1] ^= 128
    records.directory.metrics_jsonl.write_bytes(content)


def cut(records, _):
    records.directory.metrics_jsonl.write_bytes(without_step_2(records.directory.metrics_jsonl.read_bytes()))


def patched(place, error):
    return lambda records, patch: patch.setattr(f"launch.records.{place}", fails(error))


STALE = OSError(errno.ESTALE, "Stale file handle")
TROUBLES = {
    "a plot that cannot be drawn": (patched("loss_plot.plot_loss", ValueError("Key backend")), "Key backend"),
    "no result to make": (patched("result.make_result", KeyError("odd")), "KeyError: 'odd'"),
    "a directory in the place of result.json": (replaced_by_a_directory("result.json"), "Is a directory"),
    "a card that cannot be drawn": (patched("card.draw_card", ValueError("Glyph")), "card.png: ValueError"),
    "a directory in the place of loss.png": (replaced_by_a_directory("loss.png"), "Is a directory"),
    "a flipped bit": (flipped, "metrics.jsonl:3: not UTF-8"),
    "a cut": (cut, "no record of 1 step, the first 2"),
    "a server that is gone": (patched("recorder.SummaryWriter.add_scalar", STALE), "Stale file handle"),
    "no memory": (patched("recorder.peak_memory", MemoryError("none")), "MemoryError: none"),
    "a bug": (patched("recorder.rates", ZeroDivisionError("division")), "ZeroDivisionError: division"),
    "a screen that breaks": (patched("recorder.shown_fields", ValueError("closed")), "ValueError: closed"),
    "metrics.jsonl removed": (lambda records, _: records.directory.metrics_jsonl.unlink(), "was removed or"),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_no_trouble_with_the_records_ends_a_training(tmp_path, monkeypatch, trouble):
    """The end says what is not whole, and is not "ok"."""
    stream, (happens, said) = io.StringIO(), TROUBLES[trouble]
    with recorder(tmp_path, plan(), stream=stream) as records:
        for step in range(1, 4):
            records.step(outcome(5.0, step=step, seconds=0.5, data_seconds=0.0))
        happens(records, monkeypatch)
        for step in range(4, 7):
            records.step(outcome(5.0, step=step, seconds=0.5, data_seconds=0.0))
        records.validation(6, Validation(5.0))
        records.save(SaveOutcome(6, 1, 0.1, 0.1, True))
        assert not records.finish(Ending())
    end = stream.getvalue().rpartition("not all was recorded")[2]
    assert said in end and "\n" in end, stream.getvalue()
    if (tmp_path / "result.json").is_file():
        result = read_result(tmp_path / "result.json")
        assert result.status == RECORDS_LOST and result.reason


def test_a_run_that_ended_badly_keeps_its_status(tmp_path):
    with recorder(tmp_path, plan()) as records:
        records.directory.metrics_jsonl.unlink()
        records.finish(Ending("interrupted"), "SIGTERM: stopped")
    assert read_result(tmp_path / "result.json").status == "interrupted"


def test_a_run_directory_that_is_renamed_keeps_its_records_and_says_where_checkpoints_are(tmp_path):
    old, new, stream = tmp_path / "run", tmp_path / "renamed", io.StringIO()
    old.mkdir()
    with recorder(old, plan(), stream=stream) as records:
        records.step(outcome(5.0, step=1, seconds=0.5, data_seconds=0.0))
        old.rename(new)
        records.step(outcome(5.0, step=2, seconds=0.5, data_seconds=0.0))
        (old / "checkpoints" / "step-000002").mkdir(parents=True)
        records.save(SaveOutcome(2, 1, 0.1, 0.1, True))
        said = f"{old} was renamed while the run trains: its records are in {new}, later checkpoints in {old}"
        assert said in stream.getvalue()
        assert not records.finish(Ending())
    assert f"move {old}/checkpoints/* to {new}/checkpoints, and --resume" in stream.getvalue()
    result = read_result(new / "result.json")
    assert (result.status, result.steps) == (RECORDS_LOST, 2) and not (old / "result.json").exists()


def test_a_resumed_run_goes_on_without_broken_lines_and_keeps_them(tmp_path):
    run = run_steps(tmp_path, plan(), 4)
    content = run.metrics_jsonl.read_bytes().replace(b'"step": 2', b'"st\xe5p": 2')
    run.metrics_jsonl.write_bytes(content)
    stream = io.StringIO()
    with recorder(tmp_path, plan(), start=3, stream=stream) as records:
        records.step(outcome(5.0, step=4, seconds=0.5, data_seconds=0.0))
        assert records.finish(Ending()), "it was said, and is whole from here on"
    assert [record.step for record in read_metrics(run.metrics_jsonl).steps] == [1, 3, 4]
    assert "metrics.jsonl:3: not UTF-8" in stream.getvalue()
    assert (tmp_path / "metrics-before-1.jsonl").read_bytes() == content
