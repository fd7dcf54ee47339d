"""What tests share: the helpers of launching.py and the checks of workers/ import by their bare names."""

import sys

from launching import WORKERS

sys.path.append(str(WORKERS))
