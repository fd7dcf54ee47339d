"""launch/pretrain.py with DeepSpeed's own handling of gradients that are larger than the bucket."""

import sys

from launch import pretrain
from launch.deepspeed_fixes import freed_gradients

freed_gradients.keep_while_reduced = lambda optimizer: None
sys.argv[0] = pretrain.__file__
pretrain.main()
