"""A process that dies ends the others, which wait for it; one that ends in order does not."""

import socket
import subprocess
import sys

import pytest
from launching import environment

PROGRAM = """
import os, sys, time
from pathlib import Path
from launch.ranks import lifeline
lifeline.SETTLE_S = 1.0

class Store:
    def set(self, key, value):
        Path(key + ".new").write_text(value)
        os.rename(key + ".new", key)

    def get(self, key):
        while not Path(key).exists():
            time.sleep(0.01)
        return Path(key).read_bytes()

rank, dying, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
line = lifeline.Lifeline(Store(), rank, 3)
Store().set(f"here-{rank}", "")
for other in range(3):
    Store().get(f"here-{other}")
time.sleep(0.3)  # accepted
if rank == dying:
    if how == "in order":
        line.end()
    os._exit(9)
time.sleep(60 if how == "dies" else 2)
line.end()
"""


@pytest.mark.parametrize("dying", [1, 0])
@pytest.mark.parametrize("how", ["dies", "in order"])
def test_a_death_ends_all_and_is_told_once(tmp_path, dying, how):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(dying), how],
            env=environment({"MASTER_ADDR": "127.0.0.1"}), cwd=tmp_path, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(3)
    ]  # fmt: skip
    said = [rank.communicate(timeout=50)[1] for rank in ranks]
    left = 0 if how == "in order" else 1
    assert [rank.returncode for rank in ranks] == [9 if rank == dying else left for rank in range(3)], said
    who = [f"rank 1 on {socket.gethostname()} (pid {ranks[1].pid})", "rank 0 at 127.0.0.1"][dying == 0]
    told = [f"{who} has ended: " in text for text in said]
    assert told == [left == 1 and rank == 1 - dying for rank in range(3)], said
