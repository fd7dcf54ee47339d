"""The adapters that ship agree with one process under their layouts."""

from pathlib import Path
from unittest import mock

import pytest
from launching import ROOT, run_ranks
from second_device.running import needed, on_board

from launch.experiments.proving import proving, runs
from launch.experiments.proving.task import Task

ADAPTERS = ROOT / "launch/experiments/adapters"
LAYOUTS = {
    "fsdp2_tensor_parallel.py": ["dp2", "tp2", "tp2-dp2", "tp2-sequence"],
    "trainer.py": ["dp2", "dp2-zero1", "dp2-zero3", "dp2-accumulation2"],
    "accelerate_loop.py": ["dp2", "dp2-zero2", "dp2-fsdp-accumulation2"],
    "deepspeed_autotp.py": ["tp2", "tp2-zero3", "tp2-dp2-zero1"],
    "deepspeed_pipeline.py": ["pp2", "pp2-dp2-accumulation2", "pp2-accumulation4-zero1"],
}


def proven(
    adapter: str, layouts: list[str], out: Path, steps: int = 3, env: dict[str, str] | None = None
) -> str:
    """The table if a layout does not agree; ranks are forks that have the libraries already."""

    def start(ranks, file, log):
        ended = run_ranks(ranks, runs.WORKER, file, env=env, timeout=500)
        log.write_text(ended.stdout)

    task = Task(str(ADAPTERS / adapter), "dp1", str(out), steps)
    with mock.patch.object(runs, "start", start):
        found = proving.prove(task, layouts)
    return "" if found.agrees else found.told()


@pytest.mark.parametrize(
    ("name", "layout"), [("ddp_loop.py", "dp2-accumulation2"), ("deepspeed_loop.py", "dp2-zero1")]
)
def test_a_plain_loop(name, layout, tmp_path):
    assert not proven(name, [layout], tmp_path, steps=2)


@pytest.mark.ci
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name, tmp_path):
    assert not proven(name, LAYOUTS[name], tmp_path)


@pytest.mark.ci
@needed
def test_on_the_second_device(tmp_path):
    assert not proven("deepspeed_loop.py", ["dp2-zero1"], tmp_path, env=on_board())
