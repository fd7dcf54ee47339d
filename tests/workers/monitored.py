"""pretrain.py with stand-ins for wandb and comet_ml, which write each call of DeepSpeed's monitor as JSON.

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


wandb, comet = ModuleType("wandb"), ModuleType("comet_ml")
comet.__version__ = "3.58.8"
wandb.setup = lambda: SimpleNamespace(settings=SimpleNamespace(mode="offline"))
wandb.init = lambda **how: write(to="wandb", how=how, run=os.environ["WANDB_RUN_ID"])
wandb.log = lambda data, step, commit: write(to="wandb", data=data, step=step)
wandb.finish = lambda: write(to="wandb", end=True)
experiment = SimpleNamespace(end=lambda: write(to="comet", end=True))
experiment.__internal_api__log_metric__ = lambda name, value, step: write(
    to="comet", data={name: value}, step=step
)
comet.start = lambda **how: write(to="comet", how=how) or experiment
for module in (wandb, comet):
    module.__spec__ = ModuleSpec(module.__name__, None)
    sys.modules[module.__name__] = module
sys.argv[0] = str(pretrain.__file__)
pretrain.main()
