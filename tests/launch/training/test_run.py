"""When a run validates and saves, and when it is stopped; without an engine."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from launch.checkpoints.manifest import Progress
from launch.checkpoints.run_checkpoints import Checkpoint
from launch.ranks.watchdog import LONG, Phase, Watchdog
from launch.records.facts import SilentRecorder, StepRecord
from launch.training import callbacks, loop, micro_batches, saves, validations
from launch.training import run as runs
from launch.training.agreement import RankReports, StepReport
from launch.training.early_ends import BrokenData, Corrupted, Diverged, EarlyStop, NotSavedError
from launch.training.run import Start, TrainingRun
from launch.training.skipped_steps import STUCK_STEPS, SkipCounter
from recipes import catalog


def outcome(step=1, **changes):
    known = dict(loss=1.0, lr=1e-3, grad_norm=1.0, loss_scale=1.0, skipped=False)
    return StepRecord(step, **{**known, **changes})


class Events(SilentRecorder):
    """A recorder that keeps what happened, and in which order."""

    def __init__(self):
        self.seen, self.other = [], None  # the report of another rank; None: there is none

    def heard(self, own):
        self.own = own
        reports = [own, *([self.other] if self.other else [])]
        return lambda: RankReports(torch.tensor(reports, dtype=torch.float64))

    def step(self, record):
        self.seen.append(("step", record.step))

    def validation(self, step, outcome, kind="validation"):
        self.seen.append((kind, step))

    def of(self, *kinds):
        return [event for event in self.seen if event[0] in kinds]


class FakeSaver:
    """Saves nothing; tells that it was asked to, and when it was waited for."""

    def __init__(self, events):
        self.events, self.problem, self.written = events, None, False

    def save(self, progress, data, corpus, known_loss, next_step):
        self.events.seen.append(("save", progress.step))

    def complete(self):
        self.events.seen.append(("complete", None))

    def finish(self):
        self.events.seen.append(("finish", None))


@pytest.fixture
def start(monkeypatch):
    """Makes a run of 6 steps whose engine, data and checkpoints are not there; `events` has what it does."""
    monkeypatch.setattr(runs, "ForwardClock", lambda *how: SimpleNamespace(take=lambda: 0.25))
    monkeypatch.setattr(validations.Validations, "_batches_of", lambda self, samples: samples)
    monkeypatch.setattr(validations, "validate", lambda engine, samples, grid, forward: samples)
    monkeypatch.setattr(validations, "short_sample", lambda held_out, recipe: {})
    monkeypatch.setattr("launch.checkpoints.reading.load", lambda engine, checkpoint: None)
    monkeypatch.setattr(validations.Validations, "prove", lambda *of, weights: None)
    monkeypatch.setattr(TrainingRun, "next_step", lambda run: None)

    def made(*overrides, test=None, checkpoint=None, more=()):
        events = Events()
        monkeypatch.setattr(saves, "Saver", lambda *of: FakeSaver(events))
        monkeypatch.setattr(runs, "send_report", lambda own, group: events.heard(own))
        state = SimpleNamespace(progress=lambda: Progress(0, 0, 0))
        monkeypatch.setattr("launch.checkpoints.engine_state.EngineState", lambda *of: state)
        off = ("run.validate_every=0", "run.save_every=0", "run.check_every=0")
        recipe = catalog.load(overrides=[*off, *overrides], steps=6)
        plan = SimpleNamespace(recipe=recipe, precision="fp32")
        job = SimpleNamespace(plan=plan, callbacks=more, checkpoints=None, initial_weights=None)
        summary = {"train_tokens_crc32": "0"}
        corpus = SimpleNamespace(validation="held out", test=test, summary=summary, skipped=())
        batches = SimpleNamespace(state=dict, fetch=lambda: None)
        monitor = SimpleNamespace(enabled=False, write_events=None)
        engine = SimpleNamespace(monitor=monitor)
        start = Start(job, events, corpus, SimpleNamespace(control_group=None), checkpoint)
        stop = SimpleNamespace(look=lambda: "")
        run = TrainingRun(start, engine, stop, Watchdog(None, 60), callbacks.begin, batches)
        run.__enter__()
        run._begin = lambda run: run.callbacks  # which are there
        return run, events

    return made


def step(run, number, **figures):
    return run.end_step(number, lambda: outcome(number, **figures))


def saver_of(run):
    return next(each.saver for each in run.callbacks if isinstance(each, saves.Saves))


def saved_steps(start, *overrides, stopped_at=None):
    run, events = start(*overrides)
    for number in range(1, 7):
        run._stop.look = lambda at=number: "SIGTERM" if at == stopped_at else ""
        if step(run, number):
            break
    return [step for _, step in events.of("save")]


def test_the_last_checkpoint_can_be_left_out_and_a_stop_still_saves(start):
    assert saved_steps(start, "run.save_last=true") == [6]
    assert saved_steps(start, "run.save_last=true", "run.save_every=4") == [4, 6]
    assert saved_steps(start, "run.save_last=false") == []
    assert saved_steps(start, "run.save_last=false", "run.save_every=4") == [4]
    assert saved_steps(start, "run.save_last=false", "run.save_every=3") == [3, 6]
    assert saved_steps(start, "run.save_last=false", stopped_at=2) == [2]


def test_a_run_validates_its_initial_weights_every_so_often_and_at_its_end(start):
    run, events = start("run.validate_every=4")
    for number in range(1, 7):
        step(run, number)
    assert events.of("validation", "test") == [("validation", 0), ("validation", 4), ("validation", 6)]


def test_the_test_split_is_measured_once_after_the_last_step(start):
    run, events = start("run.validate_every=2", test="test text")
    for number in range(1, 7):
        step(run, number)
    assert events.of("test") == [("test", 6)]


def test_a_resumed_run_starts_at_its_checkpoint_and_does_not_validate_again(start, tmp_path):
    run, events = start(checkpoint=Checkpoint(tmp_path, SimpleNamespace(step=4)))
    assert run.done == 4 and events.seen == []


def test_every_step_is_recorded_and_stuck_ones_end_the_run(start):
    run, events = start("steps=100")
    step(run, 1)
    assert events.of("step") == [("step", 1)]
    with pytest.raises(Diverged, match=f"gradients of {STUCK_STEPS} steps in a row were not finite in fp32"):
        for number in range(2, 100):
            step(run, number, grad_norm=None, skipped=True)
    assert len(events.of("step")) == 1 + STUCK_STEPS, "also the step that ends it is recorded"


def test_a_moving_loss_scale_is_not_stuck_and_a_fixed_one_is():
    plan = SimpleNamespace(precision="fp16")
    watch = SkipCounter(SimpleNamespace(job=SimpleNamespace(plan=plan)))
    for power in range(3 * STUCK_STEPS):
        watch.after_step(outcome(loss_scale=2.0**-power, skipped=True))
    with pytest.raises(Diverged, match="20 steps in a row overflowed .*fp16.loss_scale fixes it"):
        for _ in range(STUCK_STEPS):
            watch.after_step(outcome(loss_scale=2.0**31, skipped=True))


def test_training_goes_on_while_a_checkpoint_is_written_and_its_end_waits(start):
    run, events = start("run.save_every=3", "run.save_last=false")
    for number in range(1, 6):
        step(run, number)
    assert events.of("save", "finish") == [("save", 3)]
    step(run, 6)
    assert events.of("save", "finish") == [("save", 3), ("save", 6), ("finish", None)]


def test_a_run_that_cannot_keep_what_it_trained_does_not_end_well(start):
    run, events = start("run.save_last=true")
    saver_of(run).problem = "no space left on device"
    with pytest.raises(NotSavedError, match="no space left"), run:
        for number in range(1, 7):
            step(run, number)
    assert events.of("validation") == [("validation", 0), ("validation", 6)], "it is validated all the same"


def test_a_run_saves_by_the_clock_too(start, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(saves.time, "monotonic", lambda: clock[0])
    run, events = start("run.save_every_minutes=2", "run.save_last=false", "run.save_every=2")
    events.other = StepReport()
    for number, seconds in enumerate((60, 110, 200, 300, 301), 1):
        clock[0] = seconds
        step(run, number)
    assert [step for _, step in events.of("save")] == [2, 4], "minutes count from the last save"
    events.other = StepReport(overdue=True)
    step(run, 5)
    assert [step for _, step in events.of("save")] == [2, 4], "by rank 0's clock"
    clock[0] += 240
    events.other = StepReport()
    step(run, 5)
    assert [step for _, step in events.of("save")] == [2, 4, 5]


def test_a_save_is_completed_once_all_ranks_have_written_their_files(start):
    run, events = start()
    saver_of(run).written = True
    events.other = StepReport()
    step(run, 1)
    assert events.own[:1] + events.own[2:4] == (0, False, True) and events.own.own_seconds >= 0.25
    assert not events.of("complete")
    events.other = StepReport(written=True)
    step(run, 2)
    assert events.of("complete") == [("complete", None)]


def test_all_ranks_end_after_the_step_in_which_one_cannot_read_the_next(start, monkeypatch):
    run, events = start()
    run.batches.fetch = lambda: "line 7 is broken"
    monkeypatch.setattr(micro_batches.processes, "texts_of_all", lambda own, group: own)
    with pytest.raises(BrokenData, match="^line 7 is broken\nthe run is saved after step 3; once"), run:
        step(run, 3)
    assert events.of("step", "save", "finish") == [("step", 3), ("save", 3), ("finish", None)]
    run.batches.fetch = lambda: pytest.fail("the last step needs no other")
    assert step(run, 6) is None


def test_a_rank_at_the_files_of_a_run_has_long(start):
    """A file system may pause for longer than a step may take."""
    run, events = start()
    seen = []
    run._stop.look = lambda: seen.append(run.watchdog.status()) or ""
    run.recorder.step = lambda *of: seen.append(run.watchdog.status())
    run.watchdog._usual.append(1.0)
    run.begin_step(1)
    run.begin_computing()
    run.end_step(1, lambda: seen.append(run.watchdog.status()) or outcome())
    asked, computed, recorded = (status.phase for status in seen)
    assert asked is recorded is Phase.RECORDING and computed is Phase.COMPUTING
    assert run.watchdog.limit() == LONG * 60


class Noted:
    """A callback that notes its calls, and ends badly if it is to."""

    def __init__(self, name, seen, fails=None):
        self.name, self.seen, self.fails = name, seen, fails

    def after_step(self, record):
        self.seen.append(f"{self.name} after {record.step}")

    def end(self, error):
        self.seen.append(f"{self.name} ends {type(error).__name__}")
        if error is None and self.fails:
            raise self.fails


def test_callbacks_are_called_in_one_order_and_ended_in_the_other(start):
    seen = []
    run, _ = start()
    for fails, told in (
        (None, ["c ends NoneType", "b ends NoneType", "a ends NoneType"]),
        # a good end that one of them turns into a bad one is told to all
        (Diverged("up"), ["c ends NoneType", "b ends NoneType"] + [f"{n} ends Diverged" for n in "cba"]),
    ):
        seen.clear()
        run._begin = lambda run, fails=fails: [Noted("a", seen), Noted("b", seen, fails), Noted("c", seen)]
        with pytest.raises(Diverged) if fails else contextlib.nullcontext(), run:
            step(run, 1)
        assert seen == ["a after 1", "b after 1", "c after 1", *told]


def test_a_run_has_the_callbacks_that_it_asks_for_in_their_order(start, monkeypatch):
    for module, name in (
        ("monitor", "Monitor"),
        ("profiling", "StepProfiler"),
        ("number_watch", "NumberWatch"),
    ):
        fake = type(name, (), {"__init__": lambda self, run: None})
        monkeypatch.setattr(f"launch.training.{module}.{name}", fake)
    monkeypatch.setattr(callbacks, "_bring", lambda *of: None)
    Own = type("Own", (), {"__init__": lambda self, run: None})
    run, _ = start(more=(Own,))
    fewest = ["SkipCounter", "FigureBounds", "Own", "Saves", "Validations"]
    assert [type(each).__name__ for each in run.callbacks] == fewest
    run, _ = start("run.profile=2:3", "run.check_every=5", more=(Own,))
    run.engine.monitor.enabled = True
    names = [type(each).__name__ for each in callbacks.begin(run)]
    assert names == ["Monitor", "StepProfiler", *fewest[:3], "NumberWatch", *fewest[3:]]


def test_a_copy_that_the_watch_finds_wrong_is_discarded(start):
    """The watch looks after the copy of a save, and at the end without one."""
    run, events = start("run.save_last=false")
    kept, looked = saves.Saves(run, run.callbacks[-1], None), []
    kept._watch = SimpleNamespace(check=lambda step, again: looked.append((step, again)))
    run.callbacks = [kept]
    step(run, 6)
    assert looked == [(6, True)] and not events.of("save")

    def broken(step, again):
        raise Corrupted((), 0, step)

    kept._watch.check = broken
    kept.saver.discard = lambda: events.seen.append(("discard", None))
    run._stop.look = lambda: "SIGTERM"
    with pytest.raises(Corrupted):
        step(run, 5)
    assert events.of("save", "discard") == [("save", 5), ("discard", None)]


def test_ranks_report_a_step_while_it_is_computed_and_hear_once_its_figures_are_read(start, monkeypatch):
    """Reading the figures waits for the GPU: the exchange, which the CPUs make, is on its way by then."""
    run, events = start()
    hear = events.heard(StepReport(stop=1))
    seen = []

    def noted(what, value=None):
        return lambda *of: seen.append(what) or value

    monkeypatch.setattr(runs, "send_report", noted("send", lambda: seen.append("hear") or hear()))
    run.batches.fetch = noted("fetch")
    run.recorder.step = noted("record")
    run.callbacks = [Noted("callback", seen)]
    run.before_step = [noted("before")]
    run.begin_step(1)
    assert run.end_step(1, noted("outcome", outcome())) == EarlyStop("SIGTERM", 1, 6)
    assert seen == ["before", "fetch", "send", "outcome", "hear", "record", "callback after 1"]


def test_the_loop_waits_for_data_computes_and_ends_each_step(monkeypatch):
    seen, nothing = [], contextlib.nullcontext

    def noted(what, value=None):
        return lambda *of: seen.append(what) or value

    run = SimpleNamespace(
        done=0, begin_step=noted("begin"), begin_computing=noted("compute"),
        end_step=lambda step, read: seen.append(f"end {step} {read}"),
    )  # fmt: skip
    made = {
        "run_watchdog": lambda *of: nothing(None),
        "build_engine": lambda *of, **how: SimpleNamespace(device="cpu"),
        "training_batches": lambda *of: SimpleNamespace(close=lambda: None),
        "release_at_end": lambda engine: nothing(),
        "StopRequest": lambda file: nothing(),
        "TrainingRun": lambda *of: nothing(run),
        "seed_step": noted("seed"),
        "next_batch": noted("batch", []),
        "dropout_seeds_of_step": lambda *of: [],
        "train_step": noted("train", "outcome"),
    }
    for name, value in made.items():
        monkeypatch.setattr(loop, name, value)
    monkeypatch.setattr(loop.ending, "keep_error_of_block", lambda *of, **how: nothing())
    plan = SimpleNamespace(recipe=catalog.load(tiny=True, steps=2))
    job = SimpleNamespace(plan=plan, stop_file=None, directory=None)
    loop.train(Start(job, Events(), None, SimpleNamespace(at=SimpleNamespace(dp=0))))
    steps = [["begin", "seed", "batch", "compute", "train", f"end {step} outcome"] for step in (1, 2)]
    assert seen == sum(steps, [])


def test_the_ranks_of_a_model_copy_make_their_group_without_the_others(monkeypatch):
    made = []
    new_group = lambda *of, **more: made.append((*of, more)) or "group"  # noqa: E731
    monkeypatch.setattr(micro_batches.dist, "new_group", new_group)
    grid = SimpleNamespace(tp=2, pp=1, dp=512, rank=7, timeout="patience")
    assert micro_batches._copy_group(grid) == ("group", 6)
    assert made == [([6, 7], "patience", "gloo", {"use_local_synchronization": True})]
