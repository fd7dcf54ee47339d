"""launch/pretrain.py without the step that moves buffers to the device of the parameters."""

import sys

from launch import pretrain
from launch.training import engine

engine.move_buffers = lambda module, device: None
sys.argv[0] = pretrain.__file__
pretrain.main()
