"""torch's DistributedDataParallel as the average of ZeRO-0: equal to DeepSpeed's, to the last bit."""

import pytest
from compared import folder, layouts_of, train
from stored import load_weights

from ds_configs.findings import ConfigError
from ds_configs.plan import ANY_GPU
from ds_configs.resolver import resolve
from launch.checkpoints.run_checkpoints import newest
from launch.experiments.parity.layout_cases import LayoutCase
from recipes import catalog

ACCUMULATED = [LayoutCase("dp2 accumulated", 1, 1, 2, "zero0", accumulation=4, checkpointing="full")]
ONE_MICRO_BATCH = [LayoutCase("dp2", 1, 1, 2, "zero0")]
SLOW = [LayoutCase("tp2 dp2", 2, 1, 2, "zero0", accumulation=2)]


def check_equal(tmp_path, recipe: str, cases, *settings: str) -> None:
    figures, weights = [], []
    for ddp in ("true", "false"):
        layouts = layouts_of(tmp_path / ddp, [*settings, f"parallel.torch_ddp={ddp}"], recipe)
        found = train(layouts, cases)
        figures.append({name: (each.losses, each.norms) for name, each in found.items()})
        saves = [newest(tmp_path / ddp / folder(case.name) / "checkpoints") for case in cases]
        weights.append([load_weights(saved.directory) for saved in saves])
    assert figures[0] == figures[1]
    for torchs, deepspeeds in zip(*weights, strict=True):
        assert torchs.keys() == deepspeeds.keys()
        assert all(torchs[name].equal(deepspeeds[name]) for name in torchs)


@pytest.mark.ci
def test_both_averages_are_equal(tmp_path):
    check_equal(tmp_path, "default/sotu", ACCUMULATED)


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["default/sotu", "bert/sotu"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_both_averages_are_equal_with_tensor_parallelism(tmp_path, recipe, precision):
    """In bf16 of one micro-batch: several have their averages in bf16, and DeepSpeed's in fp32."""
    cases = [*SLOW, *ONE_MICRO_BATCH] if precision == "fp32" else ONE_MICRO_BATCH
    check_equal(tmp_path, recipe, cases, f"precision={precision}")


@pytest.mark.parametrize("config", ["zero1", "zero3"])
def test_it_is_refused_where_gradients_are_sharded(config):
    recipe = catalog.load("dgx2_gpt2_torch_ddp/72x3072-h32-tp8")
    assert recipe.parallel.torch_ddp and resolve(recipe, "zero0", 16, ANY_GPU).zero_stage == 0
    with pytest.raises(ConfigError, match=r"parallel.torch_ddp=true with stage.*--ds_config zero0"):
        resolve(recipe, config, 16, ANY_GPU)
