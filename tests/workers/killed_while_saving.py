"""launch/pretrain.py, killed in its second checkpoint: DeepSpeed's files are there, no marker."""

import os
import signal

from launch import pretrain
from launch.checkpoints import saving, weights

saved = []


def save_weights_or_die(*arguments):
    saved.append(1)
    if len(saved) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    weights.save_weights(*arguments)


saving.save_weights = save_weights_or_die
pretrain.main()
