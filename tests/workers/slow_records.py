"""launch/pretrain.py whose records of the fifth step take SECONDS.

slow_records.py SECONDS ARGUMENTS
"""

import sys
import time

from launch import pretrain
from launch.records.recorder import Recorder

record, seconds = Recorder.step, float(sys.argv.pop(1))


def slow(self, step):
    if step.step == 5:
        time.sleep(seconds)
    record(self, step)


Recorder.step = slow
sys.argv[0] = pretrain.__file__
pretrain.main()
