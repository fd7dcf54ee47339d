"""launch/pretrain.py on a device of its own, with Muon in small rounds.

muon_rounds.py FILE FLAGS      writes the peak of memory, and what Muon's last step takes beside the states
"""

import json
import sys
from pathlib import Path

from launch import pretrain
from launch.deepspeed_fixes.muon import Muon
from launch.ranks import processes
from modeling import cost

cost.MUON_AT_ONCE = 2**20
file = Path(sys.argv.pop(1))
sys.argv[0] = pretrain.__file__
step = Muon.step
peaks: list[int] = []


def measured(self, *how) -> None:
    device = processes.device_module()
    peaks.append(device.max_memory_allocated())
    before = device.memory_allocated()
    device.reset_peak_memory_stats()
    step(self, *how)
    peaks.append(device.max_memory_allocated())
    if processes.rank() == 0:
        file.write_text(json.dumps({"peak": max(peaks), "taken": peaks[-1] - before}))


Muon.step = measured
pretrain.main()
