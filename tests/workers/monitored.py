"""pretrain.py with a stand-in for wandb, which writes each call of DeepSpeed's monitor as JSON.

monitored.py FILE ARGUMENTS
"""

import json
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

from launch import pretrain

file = Path(sys.argv.pop(1))


def write(**call):
    with file.open("a") as lines:
        lines.write(json.dumps(call) + "\n")


wandb = ModuleType("wandb")
wandb.setup = lambda: SimpleNamespace(settings=SimpleNamespace(mode="offline"))
wandb.init = lambda **how: write(how=how, run=os.environ["WANDB_RUN_ID"])
wandb.log = lambda data, step, commit: write(data=data, step=step)
wandb.finish = lambda: write(end=True)
wandb.__spec__ = ModuleSpec("wandb", None)
sys.modules["wandb"] = wandb
sys.argv[0] = str(pretrain.__file__)
pretrain.main()
