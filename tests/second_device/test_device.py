"""What the second device notices: a missing wait, memory used too early, a tensor of the host, a limit."""

from __future__ import annotations

import json

import pytest
from launching import WORKERS, run_ranks
from second_device.running import needed, on_board

pytestmark = needed


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict[str, str | None]]:
    out = tmp_path_factory.mktemp("checks")
    done = run_ranks(2, WORKERS / "second_device_checks.py", out, env=on_board())
    assert done.returncode == 0, done.stdout[-4000:]
    return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(2)]


def test_every_mistake_shows(found):
    failures = [
        f"rank {rank}: {name}\n{text}"
        for rank, each in enumerate(found)
        for name, text in each.items()
        if text
    ]
    assert not failures and len(found[0]) == 17, "\n".join(failures)
