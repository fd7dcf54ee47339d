"""launch/pretrain.py whose rank 1 takes 0.3 s longer forward; its fourth batch cannot be read."""

import sys
import time

from data import loader
from launch import pretrain
from launch.ranks import processes
from modeling import transformer

forward = transformer.TransformerLayer.forward


def slow(self, *arguments, **named):
    if processes.rank() == 1:
        time.sleep(0.3 / 4)  # of four layers
    return forward(self, *arguments, **named)


def failing(*arguments):
    if processes.rank() == 1 and arguments[-1] == 3:
        raise OSError("planted")
    return make_step(*arguments)


make_step, loader._make_step = loader._make_step, failing
transformer.TransformerLayer.forward = slow
sys.argv[0] = pretrain.__file__
pretrain.main()
