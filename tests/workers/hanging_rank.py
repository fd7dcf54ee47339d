"""launch/pretrain.py whose rank 1 is stopped, as by SIGSTOP from outside, in its fifth step."""

import os
import signal
import sys

from launch import pretrain
from launch.machine import processes, watchdog

enter = watchdog.Watchdog.enter


def stopped(self, phase, step=None):
    enter(self, phase, step)
    if processes.rank() == 1 and self._step == 5 and phase is watchdog.Phase.COMPUTING:
        os.kill(os.getpid(), signal.SIGSTOP)


watchdog.Watchdog.enter = stopped
sys.argv[0] = pretrain.__file__
pretrain.main()
