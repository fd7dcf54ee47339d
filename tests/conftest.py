"""What tests share: the helpers of launching.py and the checks of workers/ import by their bare names."""

import os

import pytest
from hypothesis import HealthCheck, settings

# Before torch is loaded, and for every process that a test starts: small tensors gain nothing from more.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# `load_dataset` reports its use to the hub, for local files too, and waits for an answer.
os.environ["HF_UPDATE_DOWNLOAD_COUNTS"] = "0"
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")  # timing decides no test, also on a machine that others keep busy


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files that start processes first: small ones are left to fill both processes to the end."""
    items.sort(key=lambda item: not {"run", "run_ranks"} & vars(item.module).keys())
