"""launch/pretrain.py whose rank 1 finds no memory in its third step, while the others wait for it."""

import sys

import torch

from launch import pretrain
from launch.ranks import processes
from launch.training import loop

steps = []
train_step = loop.train_step


def failing(*arguments):
    steps.append(1)
    if processes.rank() == 1 and len(steps) == 3:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return train_step(*arguments)


loop.train_step = failing
sys.argv[0] = pretrain.__file__
pretrain.main()
