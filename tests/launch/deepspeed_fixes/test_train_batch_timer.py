"""The pipeline engine's timer holds no more after a thousand steps than after one."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER, PipelineEngine
from deepspeed.utils.timer import SynchronizedWallClockTimer

from launch.training import engine as engines


class TimedEngine(PipelineEngine):
    """Times its batches as DeepSpeed's does, and computes nothing."""

    device = "cpu"
    set_train_batch_size = train_micro_batch_size_per_gpu = lambda *of: 1

    def __init__(self, printed=None):
        torch.nn.Module.__init__(self)
        self.timers, self.printed = SynchronizedWallClockTimer(), printed

    def steps_per_print(self):
        return self.printed

    def train_batch(self, batches):
        self.timers(TRAIN_BATCH_TIMER).start()
        self.timers(TRAIN_BATCH_TIMER).stop()
        return torch.zeros(())

    def kept(self):
        return len(self.timers(TRAIN_BATCH_TIMER).event_timers)


def test_deepspeed_keeps_the_time_of_every_batch():
    engine = TimedEngine()
    for _ in range(5):
        engine.train_batch(())
    assert engine.kept() == 5, "train_batch_timer can go"


@pytest.mark.parametrize(("printed", "kept"), [(None, 0), (10**9, 0), (10, 5)])
def test_a_step_forgets_its_batch_unless_the_time_is_printed(printed, kept, monkeypatch):
    monkeypatch.setattr(engines, "state_before_step", lambda engine: (0.0, 1.0, 0))
    monkeypatch.setattr(engines.micro_batches, "normalise", lambda batches, *of: batches)
    monkeypatch.setattr(engines, "explain_floor", lambda engine: contextlib.nullcontext())
    monkeypatch.setattr(engines, "pipeline_batches", lambda *of: [])
    monkeypatch.setattr(engines, "_pipeline_figures", lambda engine, loss, grid: loss.view(1))
    engine = TimedEngine(printed)
    for _ in range(5):
        engines.train_step(engine, [], SimpleNamespace(dp=1), [])
    assert engine.kept() == kept
