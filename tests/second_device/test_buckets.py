"""Buckets below, at and above a parameter: what DeepSpeed frees, reuses or copies on a stream of its own."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest
from launching import ROOT, WORKERS, run_ranks
from second_device.running import check_equal, needed, on_board, train_layouts

from launch.experiments.parity.layout_cases import LayoutCase
from recipes import catalog

pytestmark = needed
TINY = catalog.load(catalog.DEFAULT_RECIPE, tiny=True).model
MATRIX = 4 * TINY.hidden**2  # elements of the largest parameters of a tiny layer
BELOW = MATRIX - 2
SIZES = (BELOW, MATRIX, MATRIX + 2)
JSONS = sorted(path.stem for path in (ROOT / "ds_configs").glob("*.json"))
SETTINGS = ("dropout.hidden=0.1", "batch.global=12")
# With these the backward pass allocates what a gradient has left, before the reduction is through.
TIGHT = (
    "precision=bf16",
    "parallel.dp=2",
    "model.layers=3",
    "sequence_length=48",
    "batch.micro=1",
    "batch.global=2",
)


def with_bucket(folder: Path, name: str, size: int, *, round_robin: bool = False, **more: object) -> Path:
    """Write the JSON with buckets and prefetches of `size` elements, reduced beside the computation."""
    config = json.loads((ROOT / "ds_configs" / f"{name}.json").read_text())
    zero = config["zero_optimization"]
    if zero["stage"] > 0:
        zero |= {"overlap_comm": True, "reduce_bucket_size": size, "allgather_bucket_size": size}
    if round_robin:
        zero["round_robin_gradients"] = True
    if zero["stage"] == 3:
        zero["stage3_prefetch_bucket_size"] = size
    config["fp16"]["initial_scale_power"] = 10  # no step is skipped
    path = folder / f"{name}-{size}.json"
    path.write_text(json.dumps(config | more))
    return path


def failures(folder: Path, precision: str, cases: Iterable[LayoutCase]) -> dict[str, list[float]]:
    """Train the cases there for three steps; return what was wrong by name of the case."""
    settings = [*SETTINGS, f"precision={precision}"]
    found = train_layouts(catalog.DEFAULT_RECIPE, settings, cases, folder, 3, on_board())
    wrong = {}
    for name, each in found.items():
        losses = [*each.losses.values()]
        if len(losses) < 3 or losses[2] >= losses[0]:
            wrong[name] = losses
    return wrong


def train_two_ranks(
    folder: Path, stage: int, script: Path, *, round_robin: bool = False
) -> subprocess.CompletedProcess[str]:
    """Train in bf16 with sums in fp32, where the largest gradients exceed the bucket and a half."""
    fp32 = {"communication_data_type": "fp32"}
    path = with_bucket(folder, f"zero{stage}", 10_000, round_robin=round_robin, **fp32)
    flags = ["--tiny", "--steps", 3, "--ds_config", path, "--out", folder / "run"]
    for setting in TIGHT:
        flags += ["--set", setting]
    return run_ranks(2, script, *flags, env=on_board())


@pytest.mark.parametrize(
    "stage",
    [
        pytest.param(1, marks=pytest.mark.long),
        pytest.param(2, marks=pytest.mark.ci),
        pytest.param(3, marks=pytest.mark.long),
    ],
)
def test_a_gradient_larger_than_the_bucket_is_reduced_in_peace(tmp_path, stage):
    done = train_two_ranks(tmp_path, stage, ROOT / "launch/pretrain.py")
    assert done.returncode == 0, done.stdout[-3000:]


RACE = "writes memory that a copy on stream 2 writes, and has not waited for it"


def test_deepspeed_alone_frees_gradients_that_are_being_reduced(tmp_path):
    done = train_two_ranks(tmp_path, 2, WORKERS / "freed_gradients.py")
    assert done.returncode != 0, "launch/deepspeed_fixes/freed_gradients.py can go"
    assert RACE in done.stdout


@pytest.mark.ci
def test_deepspeeds_own_step_reduces_such_gradients_in_peace_too(tmp_path):
    mended = train_two_ranks(tmp_path, 2, ROOT / "launch/pretrain.py", round_robin=True)
    assert mended.returncode == 0, mended.stdout[-3000:]
    assert "round_robin_gradients: DeepSpeed's own step" in mended.stdout
    shutil.rmtree(tmp_path / "run")
    alone = train_two_ranks(tmp_path, 2, WORKERS / "freed_gradients.py", round_robin=True)
    assert alone.returncode != 0 and RACE in alone.stdout, alone.stdout[-3000:]


@pytest.mark.ci
def test_a_bucket_below_a_parameter_has_the_cpus_losses(tmp_path):
    bucket = str(with_bucket(tmp_path, "zero2", BELOW))
    cases = [LayoutCase(f"x{accumulation}", 1, 1, 2, bucket, accumulation) for accumulation in (1, 3)]
    check_equal(tmp_path, catalog.DEFAULT_RECIPE, [*SETTINGS, "precision=fp32"], cases)


# The second tier


def open_or_of(name: str, precision: str) -> bool:
    """Say whether the JSON leaves the precision to the recipe, or has this one."""
    config = json.loads((ROOT / "ds_configs" / f"{name}.json").read_text())
    return config.get(precision, {}).get("enabled", False) is not False


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", [name for name in JSONS if name != "zero_infinity"])  # libaio
def test_every_json_trains_with_every_bucket(tmp_path, name, ranks, precision):
    if not open_or_of(name, precision):
        pytest.skip("the JSON has another precision")
    stages = 2 if name in ("pipeline", "3d") else 1
    tensor = ranks // 2 if name == "3d" else 1
    recomputed = "full" if "checkpointing" in name else "none"
    cases = []
    for size, accumulation in itertools.product(SIZES, (1, 3)):
        layout = (tensor, stages, ranks // (tensor * stages), str(with_bucket(tmp_path, name, size)))
        cases.append(LayoutCase(f"{size} x{accumulation}", *layout, accumulation, recomputed))
    assert failures(tmp_path, precision, cases) == {}
