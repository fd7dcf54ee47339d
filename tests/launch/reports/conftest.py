"""What the tests of reports share: a folder of tables, which they only read."""

from __future__ import annotations

from pathlib import Path

import pytest
from reported import write_tables


@pytest.fixture(scope="session")
def tables(tmp_path_factory) -> Path:
    return write_tables(tmp_path_factory.mktemp("recipes"))
