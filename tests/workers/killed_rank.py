"""launch/pretrain.py whose rank 1 is killed by the system, once, in the fourth step of the first launch."""

import os
import signal

from launch import pretrain
from launch.ranks import processes
from launch.training import loop

steps = []
train_step = loop.train_step


def killed_once(*arguments):
    steps.append(1)
    if processes.rank() == 1 and len(steps) == 4 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return train_step(*arguments)


loop.train_step = killed_once
pretrain.main()
