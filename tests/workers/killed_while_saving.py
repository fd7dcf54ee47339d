"""launch/pretrain.py, killed in its second checkpoint: the files are on the disk, the manifest is not."""

import os
import signal

from launch import pretrain
from launch.checkpoints import run_checkpoints

completed = []
complete = run_checkpoints.complete


def complete_or_die(*arguments):
    completed.append(1)
    if len(completed) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return complete(*arguments)


run_checkpoints.complete = complete_or_die
pretrain.main()
