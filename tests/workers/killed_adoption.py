"""killed_adoption.py NAME ...: launch/checkpoint.py adopt, killed before it makes a file of this name."""

import os
import signal
import sys
from pathlib import Path

from launch import checkpoint
from launch.console import ends

name = sys.argv.pop(1)


def kill(event, arguments):
    if event == "open" and arguments[1] != "r" and Path(str(arguments[0])).name.startswith(name):
        os.kill(os.getpid(), signal.SIGKILL)


sys.addaudithook(kill)
ends.run(checkpoint.main)
