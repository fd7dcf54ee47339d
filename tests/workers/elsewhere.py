"""launch/pretrain.py, rank 1 of which works in another directory, as on another machine.

A directory `cache` there is the cache of that machine.

elsewhere.py DIRECTORY [flags of pretrain.py]
"""

import os
import sys

from launch import pretrain
from launch.ranks import processes
from launch.records import shared_directory

shared_directory.LOOK_FOR_S = 1
if processes.rank() == 1:
    os.chdir(sys.argv[1])
    if os.path.isdir("cache"):
        os.environ["MEGARECIPES_CACHE"] = os.path.abspath("cache")
sys.argv = [pretrain.__file__, *sys.argv[2:]]
pretrain.main()
