"""pretrain.py whose rank 1 is stopped, as by SIGSTOP from outside, in its fifth step.

hanging_rank.py ARGUMENTS
"""

import os
import signal
import sys

from launch import pretrain
from launch.ranks import processes, watchdog

enter = watchdog.Watchdog.enter


def stopped(self, phase, step=None):
    enter(self, phase, step)
    if processes.rank() == 1 and self._step == 5 and phase is watchdog.Phase.COMPUTING:
        os.kill(os.getpid(), signal.SIGSTOP)


watchdog.Watchdog.enter = stopped
sys.argv[0] = str(pretrain.__file__)
pretrain.main()
