"""When a run validates and saves, and when it is stopped; without an engine."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from launch.checkpoints.manifest import Progress
from launch.checkpoints.run_checkpoints import Checkpoint
from launch.ranks.watchdog import LONG, Phase, Watchdog
from launch.records.facts import SilentRecorder, StepRecord
from launch.training import loop, micro_batches
from launch.training import run as runs
from launch.training.agreement import StepNews, StepReport
from launch.training.early_ends import REASONS, STUCK_STEPS, BrokenData, Diverged, SkipCounter
from launch.training.run import Start, TrainingRun
from recipes import catalog


def outcome(step=1, **changes):
    known = dict(loss=1.0, lr=1e-3, grad_norm=1.0, loss_scale=1.0, skipped=False)
    return StepRecord(step, **{**known, **changes})


class Events(SilentRecorder):
    """A recorder that keeps what happened, and in which order."""

    def __init__(self):
        self.seen = []

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
    monkeypatch.setattr(runs, "StepExchange", lambda own, group: own)
    monkeypatch.setattr(runs, "held_out_batches", lambda samples, plan, grid: samples)
    monkeypatch.setattr(runs, "validate", lambda engine, samples, grid, forward: samples)
    monkeypatch.setattr(runs, "short_sample", lambda held_out, recipe: {})
    monkeypatch.setattr("launch.checkpoints.reading.load", lambda engine, checkpoint: None)
    monkeypatch.setattr(TrainingRun, "_prove", lambda run, checkpoint, weights: None)
    monkeypatch.setattr(TrainingRun, "_next_step", lambda run: None)

    def made(*overrides, test=None, checkpoint=None):
        events = Events()
        monkeypatch.setattr(runs, "Saver", lambda *of: FakeSaver(events))
        state = SimpleNamespace(progress=lambda: Progress(0, 0, 0))
        monkeypatch.setattr(runs, "EngineState", lambda *of: state)
        off = ("run.validate_every=0", "run.save_every=0", "run.check_every=0")
        recipe = catalog.load(overrides=[*off, *overrides], steps=6)
        plan = SimpleNamespace(recipe=recipe, precision="fp32")
        job = SimpleNamespace(
            plan=plan, after_step=lambda run, record: None, checkpoints=None, initial_weights=None
        )
        summary = {"train_tokens_crc32": "0"}
        corpus = SimpleNamespace(validation="held out", test=test, summary=summary, skipped=())
        batches, grid = SimpleNamespace(state=dict), SimpleNamespace(control_group=None)
        schedule = SimpleNamespace(state_dict=lambda: {"completed": 0})
        monitor = SimpleNamespace(enabled=False)
        engine = SimpleNamespace(lr_scheduler=schedule, skipped_steps=0, monitor=monitor)
        start, stop = Start(job, events, corpus, grid, checkpoint), SimpleNamespace(look=lambda: "")
        return TrainingRun(start, engine, batches, stop, Watchdog(None, 60)), events

    return made


def heard(*reports):
    """What the ranks hear of a step."""
    return StepNews(torch.tensor(reports, dtype=torch.float64))


def news(stopped=None):
    """The same, of one rank."""
    return heard(StepReport(REASONS.index(stopped or "")))


def saved_steps(start, *overrides, stopped_at=None):
    run, events = start(*overrides)
    for step in range(1, 7):
        run.save_if_due(step, news(stopped="SIGTERM" if step == stopped_at else None))
        if step == stopped_at:
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
    for step in range(1, 7):
        run.validate_if_due(step)
    assert events.of("validation", "test") == [("validation", 0), ("validation", 4), ("validation", 6)]


def test_the_test_split_is_measured_once_after_the_last_step(start):
    run, events = start("run.validate_every=2", test="test text")
    for step in range(1, 7):
        run.validate_if_due(step)
    assert events.of("test") == [("test", 6)]


def test_a_resumed_run_starts_at_its_checkpoint_and_does_not_validate_again(start, tmp_path):
    run, events = start(checkpoint=Checkpoint(tmp_path, SimpleNamespace(step=4)))
    assert run.start_step == 4 and events.seen == []


def test_every_step_is_recorded_and_stuck_ones_end_the_run(start):
    run, events = start()
    run.record(outcome(), 1.0, 0.5, {})
    assert events.of("step") == [("step", 1)]
    with pytest.raises(Diverged, match=f"gradients of {STUCK_STEPS} steps in a row were not finite in fp32"):
        for step in range(2, 100):
            run.record(outcome(step, grad_norm=None, skipped=True), 1.0, 0.5, {})
    assert len(events.of("step")) == 1 + STUCK_STEPS, "also the step that ends it is recorded"


def test_a_moving_loss_scale_is_not_stuck_and_a_fixed_one_is():
    watch = SkipCounter("fp16")
    for power in range(3 * STUCK_STEPS):
        watch.see(outcome(loss_scale=2.0**-power, skipped=True))
    with pytest.raises(Diverged, match="20 steps in a row overflowed .*fp16.loss_scale fixes it"):
        for _ in range(STUCK_STEPS):
            watch.see(outcome(loss_scale=2.0**31, skipped=True))


def test_training_goes_on_while_a_checkpoint_is_written_and_its_end_waits(start):
    run, events = start("run.save_every=3", "run.save_last=false")
    for step in range(1, 6):
        run.save_if_due(step, news())
    assert events.of("save", "finish") == [("save", 3)]
    run.save_if_due(6, news())
    assert events.of("save", "finish") == [("save", 3), ("save", 6), ("finish", None)]


def test_a_run_that_cannot_keep_what_it_trained_does_not_end_well(start):
    run, _ = start("run.save_last=true")
    run.saver.problem = "no space left on device"
    run.save_if_due(3, news())
    run.end_if_due(3, news())
    run.save_if_due(6, news())
    with pytest.raises(runs.NotSavedError, match="no space left"):
        run.end_if_due(6, news())


def test_a_run_saves_by_the_clock_too(start, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(runs.time, "monotonic", lambda: clock[0])
    run, events = start("run.save_every_minutes=2", "run.save_last=false", "run.save_every=2")
    for step, seconds in enumerate((60, 110, 200, 300, 301), 1):
        clock[0] = seconds
        run.save_if_due(step, heard(run.exchange(0.5), StepReport()))
    assert [step for _, step in events.of("save")] == [2, 4], "minutes count from the last save"
    clock[0] += 240
    run.save_if_due(5, heard(StepReport(), run.exchange(0.5)))
    assert [step for _, step in events.of("save")] == [2, 4], "by rank 0's clock"
    run.save_if_due(5, heard(run.exchange(0.5), StepReport()))
    assert [step for _, step in events.of("save")] == [2, 4, 5]


def test_a_save_is_completed_once_all_ranks_have_written_their_files(start):
    run, events = start()
    run.saver.written = True
    own = run.exchange(0.5)
    assert own == StepReport(0, 0.75, written=True)
    run.save_if_due(1, heard(own, StepReport()))
    assert not events.of("complete")
    run.save_if_due(2, heard(own, own))
    assert events.of("complete") == [("complete", None)]


def test_all_ranks_end_after_the_step_in_which_one_cannot_read_the_next(start, monkeypatch):
    run, events = start()
    run.batches.fetch = lambda: "line 7 is broken"
    monkeypatch.setattr(micro_batches.processes, "texts_of_all", lambda own, group: own)
    run.fetch_next(3)
    said = heard(StepReport(), run.exchange(0))
    with pytest.raises(BrokenData, match="^line 7 is broken"), run:
        run.record(outcome(3), 1.0, 0.5, {})
        run.save_if_due(3, said)
        run.end_if_due(3, said)
    assert events.of("step", "save", "finish") == [("step", 3), ("save", 3), ("finish", None)]
    run.batches.fetch = lambda: pytest.fail("the last step needs no other")
    run.fetch_next(6)
    assert run.end_if_due(6, said) is None


def test_a_rank_at_the_files_of_a_run_has_long(start):
    """A file system may pause for longer than a step may take."""
    run, events = start()
    seen = []
    run.stop.look = lambda: seen.append(run.watchdog.status()) or ""
    run.recorder.step = lambda *of: seen.append(run.watchdog.status())
    run.watchdog._usual.append(1.0)
    run.watchdog.enter(Phase.COMPUTING, 1)
    run.exchange(0)
    assert run.watchdog.status().phase is Phase.COMPUTING
    run.record(outcome(), 1.0, 0.5, {})
    assert [status.phase for status in seen] == 2 * [Phase.RECORDING]
    assert run.watchdog.limit() == LONG * 60


def test_ranks_tell_of_a_step_while_it_is_computed_and_hear_once_its_figures_are_read(monkeypatch):
    """Reading the figures waits for the GPU: the exchange, which the CPUs make, is on its way by then."""
    seen, nothing = [], contextlib.nullcontext
    news = SimpleNamespace(rank_seconds={}, stopped=None)

    def noted(what, found=None):
        return lambda *of: seen.append(what) or found

    run = SimpleNamespace(
        start_step=0, fetch_next=noted("fetch", 0.0), exchange=noted("exchange"), news=noted("news", news),
        record=noted("record"), validate_if_due=noted("validate"), save_if_due=noted("save"),
        end_if_due=lambda *of: None,
    )  # fmt: skip
    made = {
        "run_watchdog": lambda *of: nothing(SimpleNamespace(enter=lambda *phase: None)),
        "build_engine": lambda *of, **how: SimpleNamespace(device="cpu"),
        "training_batches": lambda *of: SimpleNamespace(close=lambda: None),
        "release_at_end": lambda engine: nothing(),
        "StopRequest": lambda file: nothing(),
        "TrainingRun": lambda *of: nothing(run),
        "seed_step": lambda *of: None,
        "next_batch": lambda batches: [],
        "dropout_seeds_of_step": lambda *of: [],
        "train_step": noted("train", noted("outcome")),
    }
    for name, value in made.items():
        monkeypatch.setattr(loop, name, value)
    monkeypatch.setattr(loop.ending, "keep_error_of_block", lambda *of, **how: nothing())
    plan = SimpleNamespace(recipe=catalog.load(tiny=True, steps=2))
    job = SimpleNamespace(plan=plan, stop_file=None, directory=None)
    loop.train(Start(job, Events(), None, SimpleNamespace(at=SimpleNamespace(dp=0))))
    assert seen == 2 * ["train", "fetch", "exchange", "outcome", "news", "record", "save", "validate"]


def test_the_ranks_of_a_model_copy_make_their_group_without_the_others(monkeypatch):
    made = []
    new_group = lambda *of, **more: made.append((*of, more)) or "group"  # noqa: E731
    monkeypatch.setattr(micro_batches.dist, "new_group", new_group)
    grid = SimpleNamespace(tp=2, pp=1, dp=512, rank=7, timeout="patience")
    assert micro_batches._copy_group(grid) == ("group", 6)
    assert made == [([6, 7], "patience", "gloo", {"use_local_synchronization": True})]
