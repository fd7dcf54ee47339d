"""Ranks that take steps of a collective each under a watchdog, one of which does what the test asks for.

    watched.py DIRECTORY HANG_AFTER WHAT RANK

WHAT happens to RANK in its fifth step: "stopped" (SIGSTOP), "asleep" (for ever), "waits" for its data for
four times HANG_AFTER, "nothing".
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from launch.ranks import processes
from launch.ranks.ranks_meeting import RanksMeeting
from launch.ranks.watchdog import Phase, Watchdog


def main(directory: str, hang_after: str, what: str, rank: str) -> None:
    meeting = RanksMeeting()
    meeting.all_or_none(lambda: None)
    dist.init_process_group(
        "gloo", store=meeting.store, rank=processes.rank(), world_size=processes.world_size()
    )
    mine = dist.get_rank() == int(rank)
    seconds = float(hang_after)
    with Watchdog(Path(directory), seconds, meeting).running() as watch:
        for step in range(1, 8):
            watch.enter(Phase.DATA, step)
            if mine and step == 5 and what == "waits":
                time.sleep(4 * seconds)
            watch.enter(Phase.COMPUTING)
            if mine and step == 5 and what == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            if mine and step == 5 and what == "asleep":
                signal.pause()
            watch.advance()
            dist.all_reduce(torch.zeros(1))
            watch.enter(Phase.COMPUTED)
            watch.enter(Phase.VALIDATING)
    if dist.get_rank() == 0:
        print("all steps done", flush=True)
    dist.barrier()
    os._exit(0)


main(*sys.argv[1:])
