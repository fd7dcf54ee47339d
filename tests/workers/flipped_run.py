"""launch/pretrain.py on whose rank 1 one bit flips before the checkpoint of step 10 is copied."""

import sys

import torch

from launch import pretrain
from launch.checkpoints.manifest import WEIGHT
from launch.ranks import processes
from launch.training.saves import Saves

after_step = Saves.after_step


def flip_before(self, record):
    if record.step == 10 and processes.rank() == 1:
        buffer = next(each for each in self._run.state.buffers() if each.kind == WEIGHT)
        buffer.tensors[0].detach().view(-1).view(torch.uint8)[12345] ^= 4
    after_step(self, record)


Saves.after_step = flip_before
sys.argv[0] = pretrain.__file__
pretrain.main()
