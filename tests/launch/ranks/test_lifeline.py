"""A process that dies before training ends the others, which wait for it; one that ends in order does not."""

import subprocess
import sys

import pytest
from launching import environment

PROGRAM = """
import os, sys, time
from pathlib import Path
from launch.ranks.lifeline import Lifeline, SETTLE_S

class Store:
    def set(self, key, value):
        Path(key + ".new").write_text(value)
        os.rename(key + ".new", key)

    def get(self, key):
        while not Path(key).exists():
            time.sleep(0.01)
        return Path(key).read_bytes()

rank, dying, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
line = Lifeline(Store(), rank, 3)
Store().set(f"here-{rank}", "")
for other in range(3):
    Store().get(f"here-{other}")
time.sleep(0.3)  # accepted
if rank == dying:
    if how == "in order":
        line.end()
    os._exit(9)
time.sleep(SETTLE_S + 1 if how == "in order" else 60)
line.end()
"""


@pytest.mark.parametrize(("dying", "how"), [(1, "dies"), (0, "dies"), (1, "in order"), (0, "in order")])
def test_a_death_before_training_ends_all(tmp_path, dying, how):
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
    # Rank 0 says of another one what it knows; what it said itself last, others do not repeat.
    told = f"(pid {ranks[1].pid}) has ended before training" in said[0]
    assert told == (dying == 1 and how == "dies") and not said[2], said
