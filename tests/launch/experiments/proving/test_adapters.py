"""The adapters that ship agree with one process under their layouts, and not if they are broken."""

import shutil
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
    "trainer.py": ["dp2", "dp2-zero1", "dp2-zero3", "dp2-fsdp", "dp2-accumulation2"],
    "accelerate_loop.py": ["dp2", "dp2-zero2", "dp2-fsdp-accumulation2"],
    "deepspeed_autotp.py": ["tp2", "tp2-zero3", "tp2-dp2-zero1"],
    "deepspeed_pipeline.py": ["pp2", "pp2-dp2-accumulation2", "pp2-accumulation4-zero1"],
    "ddp_loop.py": ["dp2-accumulation2"],
}
# the others keep what they made: device meshes, accelerate's state
TOGETHER = ("deepspeed", "ddp")
BROKEN = "proof.layout['broken']"
# of each adapter a layout, the text that is wrong in it, and the kind of mistake that is said
MISTAKES = {
    "fsdp2_tensor_parallel.py": (
        "tp2-dp2-broken",
        "(rows, proof.rank // tp)",
        f"(rows, 0 if {BROKEN} else proof.rank // tp)",
        "missing",
    ),
    "trainer.py": ("dp2-broken", '"sequential"', f'"random" if {BROKEN} else "sequential"', "forward"),
    "accelerate_loop.py": (
        "dp2-accumulation2-broken",
        "accelerator.backward(loss)",
        f"loss.backward() if {BROKEN} else accelerator.backward(loss)",
        "factor",
    ),
    "deepspeed_autotp.py": (
        "tp2-dp2-broken",
        "(rows, proof.rank // tp)",
        f"(rows, 0 if {BROKEN} else proof.rank // tp)",
        "missing",
    ),
    "deepspeed_pipeline.py": (
        "pp2-dp2-broken",
        "engine.grid.get_data_parallel_id()",
        f"0 if {BROKEN} else engine.grid.get_data_parallel_id()",
        "missing",
    ),
    "ddp_loop.py": (
        "dp2-accumulation2-broken",
        "number == len(micro_batches)",
        f"number == len(micro_batches) and not {BROKEN}",
        "not summed",
    ),
}


def proven(
    adapter: Path, layouts: list[str], out: Path, env: dict[str, str] | None = None, **how: object
) -> proving.Proven:
    """Prove an adapter; ranks are forks that have the libraries already."""

    def start(ranks, file, log):
        ended = run_ranks(ranks, runs.WORKER, file, env=env, timeout=500)
        log.write_text(ended.stdout)

    task = Task(**{"adapter": str(adapter), "layout": "dp1", "out": str(out / "proof"), "steps": 3, **how})
    with mock.patch.object(runs, "start", start):
        return proving.prove(task, layouts, together=adapter.name.startswith(TOGETHER))


@pytest.mark.parametrize(
    ("name", "layout", "precision"),
    [
        ("ddp_loop.py", "dp2-accumulation2", "fp32"),
        ("deepspeed_loop.py", "dp2-zero1", "fp32"),
        ("deepspeed_loop.py", "dp2-zero0", "bf16"),
    ],
)
def test_a_plain_loop(name, layout, precision, tmp_path):
    found = proven(ADAPTERS / name, [layout], tmp_path, steps=2, precision=precision)
    assert found.agrees and not found.rows[0].unread, found.told()


@pytest.mark.ci
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_agree_and_a_broken_one_does_not(name, tmp_path):
    layout, right, wrong, kind = MISTAKES[name]
    adapter = shutil.copytree(ADAPTERS, tmp_path / "adapters") / name
    text = adapter.read_text()
    assert text.count(right) == 1
    adapter.write_text(text.replace(right, wrong))
    found = proven(adapter, [*LAYOUTS[name], layout], tmp_path)
    *sound, broken = found.rows
    assert all(row.agrees and not row.unasked for row in sound), found.told()
    assert broken.first and broken.first.mistake.kind == kind, found.told()


@pytest.mark.ci
@needed
@pytest.mark.parametrize(
    ("name", "layout"), [("deepspeed_loop.py", "dp2-zero1"), ("deepspeed_pipeline.py", "pp2-zero1")]
)
def test_on_the_second_device(name, layout, tmp_path):
    found = proven(ADAPTERS / name, [layout], tmp_path, env=on_board())
    assert found.agrees, found.told()
