"""Which rows fit a machine.

The planner's memory of each row, and what `recipe.py list --fits` tells the user to set.
"""

import pytest

from launch.machine import memory
from launch.planning import memory_fit
from launch.planning.resolved_plans import processes, published_plan
from recipes import catalog

ROWS = [f"{table.name}/{row}" for table in catalog.tables() for row in table.rows]
V100S = memory.Memory(16, 32e9, 1e12)
OOM = "dgx2_gpt2_data_parallel/54x1920-b2-oom"
LAPTOP = memory.Memory(0, 0.0, 16e9)
ONE_V100 = memory.Memory(1, 32e9, 1.5e12)


def says(name: str, memory: memory.Memory, *settings: str) -> tuple[bool, str]:
    return memory_fit.verdict(catalog.load(name, settings), memory)


def needed(name: str, *settings: str, gpus: bool = True):
    return memory_fit.memory_of_plan(published_plan(catalog.load(name, settings)), gpus=gpus)


def test_what_fits_is_what_the_planner_predicts():
    assert says("dgx2_gpt2_data_parallel/40x1536-b8", V100S) == (True, "as published")
    oom = f"{needed(OOM).total / 1e9:.3g} GB on the GPU per process, 16 processes"
    assert says(OOM, V100S) == (False, oom)
    fewer = True, "with --set parallel.dp=2: 16 of 512 processes"
    assert says("megatron_paper_table1/8.3b-mp-dp", V100S) == fewer
    too_few = False, "tp x pp = 64 processes, 16 GPUs here"
    assert says("jeanzay_megatron_performance/48b-pp16-ga256-mb8", V100S) == too_few
    assert says("default/sotu", LAPTOP) == (True, "on 1 process")
    eight = memory.Memory(8, 32e9, 1e12)
    assert says("default/sotu", eight) == (True, "on 8 processes"), "any number is as the recipe says"


def test_what_does_not_fit_is_said_per_process():
    rank = needed("dgx2_gpt2_torch_ddp/72x3072-h8-tp8")
    # 72 layers of 3072 over 8 tensor ranks with their duplicates: printed 8,348,393,472 / 8 parameters each,
    # in ZeRO-0, 18 bytes; activations and the loss come on top.
    assert rank.states == 18 * 8_348_393_472 / 8 < rank.total
    ok, why = says("dgx2_gpt2_torch_ddp/72x3072-h8-tp8", LAPTOP)
    without = needed("dgx2_gpt2_torch_ddp/72x3072-h8-tp8", gpus=False).total
    assert not ok and why == f"{without / 1e9:.3g} GB per process, 8 processes"
    assert rank.states < without < rank.total, "no CUDA context, and no bucket that nothing is written to"
    # 98.03B parameters, 20 bytes offloaded to the host, over the 16 ranks that can be had.
    ok, why = says("jeanzay_hf_deepspeed_max_size/91b-g64", V100S)
    assert not ok and why.endswith(f" and {20 * 98.03 / 16:.3g} GB in host memory per process, 16 processes")


def test_a_row_that_cannot_be_resolved_says_why():
    name, many = "jeanzay_megatron_performance/18b-pp8-ga64-mb4", memory.Memory(64, 80e9, 2e12)
    ok, why = says(name, many, "ds_config=zero3")
    assert not ok and "zero_optimization.stage=3" in why and "pipeline" in why


@pytest.mark.parametrize(
    "memory",
    [memory.Memory(4, 32e9, 1e12), memory.Memory(6, 80e9, 1e12), memory.Memory(0, 0.0, 64e9)],
    ids=str,
)
def test_what_is_told_to_set_can_be_run(memory):
    told = 0
    for name in ROWS:
        recipe = catalog.load(name)
        ok, how = memory_fit.verdict(recipe, memory)
        if not ok or "--set" not in how:
            continue
        told += 1
        command, _, count = how.removeprefix("with ").partition(": ")
        fewer = published_plan(catalog.load(name, [word for word in command.split() if word != "--set"]))
        assert fewer.layout.world == int(count.split()[0]) < processes(recipe), name
        assert fewer.layout.global_batch == recipe.batch.global_, name
        again, how = memory_fit.verdict(fewer.recipe, memory)
        assert again and "--set" not in how, name
    assert told > 5


def test_rows_that_ran_fit_the_gpus_they_ran_on():
    for name in ROWS:
        recipe = catalog.load(name)
        gb = recipe.hardware and recipe.hardware.gpu_memory_gb
        if gb and recipe.published and not recipe.published.oom:
            assert memory_fit.memory_of_plan(published_plan(recipe)).states <= gb * 1e9, name


def test_zero_offload_fits_a_13b_model_on_one_gpu():
    model = ["model.layers=40", "model.hidden=5120", "model.heads=32", "precision=fp16", "batch.global=8"]
    model += ["batch.micro=1", "activation_checkpointing=full"]
    offload, small = "ds_config=zero2_offload", memory.Memory(1, 32e9, 200e9)
    ok, how = says("default/sotu", ONE_V100, *model, offload)
    assert ok, "Ren et al., arXiv 2101.06840: 13B on one V100 of 32 GB with 1.5 TB of host memory"
    assert how == "on 1 process, snug", "torch's allocator would keep more than there is"
    assert not says("default/sotu", small, *model, offload)[0], "16 x 12.6B is 202 GB"
    assert not says("default/sotu", ONE_V100, *model, "ds_config=zero2")[0]
