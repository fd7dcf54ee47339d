"""The reproductions of docs/upstream_errors.md print what stands there: a release that mends one is noticed."""

import os
import re
import subprocess
import sys

import pytest
from launching import ROOT

PAGE = (ROOT / "docs" / "upstream_errors.md").read_text(encoding="utf-8")
SECTION = re.compile(r"^## ([^\n]+)\n(?:(?!^## ).)*?```python\n(.*?)```.*?```text\n(.*?)```", re.M | re.S)
ERRORS = SECTION.findall(PAGE)
# without DeepSpeed's collectives in shared memory, which g++ would compile
START = (
    "import deepspeed.ops as ops; ops.__compatible_ops__['deepspeed_shm_comm'] = False; import reproduction"
)


def test_the_page_has_short_reproductions():
    assert len(ERRORS) >= 3
    assert all(len(code.splitlines()) < 50 for _, code, _ in ERRORS)


@pytest.mark.ci
@pytest.mark.parametrize(("code", "said"), [each[1:] for each in ERRORS], ids=[each[0] for each in ERRORS])
def test_a_reproduction_prints_what_the_page_says(code, said, tmp_path):
    (tmp_path / "reproduction.py").write_text(code)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    ran = subprocess.run(
        [*launcher, "--no-python", sys.executable, "-c", START],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    missing = [line for line in said.splitlines() if line not in ran.stdout]
    assert not missing, ran.stdout + ran.stderr
