"""pretrain.py whose records all fail: wandb, TensorBoard, result.json, loss.png, the sample, metrics.jsonl.

failing_records.py RUN ARGUMENTS
"""

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

from torch.utils.tensorboard import SummaryWriter

from launch import pretrain
from launch.ranks import processes
from launch.records.recorder import Recorder

run, record = Path(sys.argv[1]), Recorder.step


def fail(*_, **__):
    raise ConnectionError("planted")


def step(self, step):
    if step.step == 3:
        (run / "result.json").mkdir()
        (run / "loss.png").mkdir()
        content = (run / "metrics.jsonl").read_bytes()
        (run / "metrics.jsonl").write_bytes(content.replace(b'"step": 2', b'"step: 2'))
    record(self, step)


if processes.rank() == 0:
    Recorder.step, SummaryWriter.add_scalar, pretrain.sample = step, fail, fail
wandb = ModuleType("wandb")
wandb.__spec__ = ModuleSpec("wandb", None)
wandb.init, wandb.log, wandb.finish = lambda **how: None, fail, fail
wandb.setup = lambda: SimpleNamespace(settings=SimpleNamespace(mode="offline"))
sys.modules["wandb"] = wandb
sys.argv = [str(pretrain.__file__), "--out", *sys.argv[1:]]
pretrain.main()
