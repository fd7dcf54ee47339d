"""What tests share: the helpers of launching.py and the checks of workers/ import by their bare names."""

import sys

import pytest
from hypothesis import HealthCheck, settings
from launching import WORKERS

sys.path.append(str(WORKERS))
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")  # timing decides no test, also on a machine that others keep busy


@pytest.fixture(scope="module")
def one_thread():
    """Run torch on one thread: small tensors gain nothing from more, and waiting threads slow other tests."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
