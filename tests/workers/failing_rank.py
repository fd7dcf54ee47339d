"""launch/pretrain.py whose rank 1 fails in its third step, while the others wait for it in a collective."""

import sys

from launch import pretrain
from launch.ranks import processes
from launch.training import loop

steps = []
train_step = loop.train_step


def failing(*arguments):
    steps.append(1)
    if processes.rank() == 1 and len(steps) == 3:
        raise ValueError("planted failure of rank 1")
    return train_step(*arguments)


loop.train_step = failing
sys.argv[0] = pretrain.__file__
pretrain.main()
