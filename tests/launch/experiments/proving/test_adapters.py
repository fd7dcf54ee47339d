"""The adapters that ship agree with one process under their layouts."""

from pathlib import Path
from unittest import mock

import pytest
from launching import ROOT, run_ranks
from second_device.running import needed, on_board

from launch import prove
from launch.experiments.proving import proving, runs
from launch.experiments.proving.layout import layout_of

ADAPTERS = ROOT / "launch/experiments/adapters"
LAYOUTS = {
    "fsdp2_tensor_parallel.py": ["dp2", "tp2", "tp2-dp2", "tp2-sequence"],
    "trainer.py": ["dp2", "dp2-zero1", "dp2-zero3", "dp2-accumulation2"],
    "accelerate_loop.py": ["dp2", "dp2-zero2", "dp2-fsdp-accumulation2"],
    "deepspeed_autotp.py": ["tp2", "tp2-zero3", "tp2-dp2-zero1"],
    "deepspeed_pipeline.py": ["pp2", "pp2-dp2-accumulation2", "pp2-accumulation4-zero1"],
}


def proven(
    adapter: Path, layouts: list[str], out: Path, *options: str, env: dict[str, str] | None = None
) -> bool:
    """Whether all layouts agree; ranks are forks that have the libraries already."""

    def start(command, log):
        *_, ranks, script, tasks = command
        ended = run_ranks(int(ranks.split("=")[1]), script, tasks, env=env, timeout=500)
        log.write_text(ended.stdout)
        return ended.returncode

    args = prove.build_parser().parse_args([str(adapter), "--layouts", *layouts, *options])
    asked = [layout_of(name, args.accumulation) for name in layouts]
    with mock.patch.object(runs, "run_and_wait", start):
        return proving.prove(adapter, asked, args, out) == 0


@pytest.mark.parametrize(
    ("name", "layout"), [("ddp_loop.py", "dp2-accumulation2"), ("deepspeed_loop.py", "dp2-zero1")]
)
def test_a_plain_loop(name, layout, tmp_path):
    assert proven(ADAPTERS / name, [layout], tmp_path, "--steps", "2")


@pytest.mark.ci
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name, tmp_path):
    assert proven(ADAPTERS / name, LAYOUTS[name], tmp_path)


@pytest.mark.ci
@needed
def test_on_the_second_device(tmp_path):
    assert proven(ADAPTERS / "deepspeed_loop.py", ["dp2-zero1"], tmp_path, env=on_board())
