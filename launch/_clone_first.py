"""Puts the clone of a command first on the path: the packages of this repository are not installed.

Python puts the directory of a file that it is given there (`launch` for `python launch/pretrain.py`), where
`import data` would be any package of that name in the environment. A command that is started as a file
imports this module before others; `python -m launch.pretrain` needs it not, as the working directory is first.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
