"""launch/pretrain.py whose rank is killed in a step; the others wait for it as for a GPU: nothing tells them.

lost_rank.py RANK STEP ARGUMENTS
"""

import os
import signal
import sys
import time

from launch import pretrain
from launch.ranks import processes
from launch.training import loop

lost, at = int(sys.argv.pop(1)), int(sys.argv.pop(1))
steps = []
train_step = loop.train_step


def waiting(*arguments):
    steps.append(1)
    if len(steps) == at:
        if processes.rank() == lost:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    return train_step(*arguments)


loop.train_step = waiting
sys.argv[0] = pretrain.__file__
pretrain.main()
