"""Which rows fit a machine.

Arithmetic on model states, and what `recipe.py list --fits` tells the user to set.
"""

from dataclasses import replace

import pytest

from ds_configs.jsonfile import ConfigError
from ds_configs.plan import Machine
from launch.machine import memory
from launch.planning import memory_fit
from modeling import cost
from recipes import catalog

ROWS = [f"{table.name}/{row}" for table in catalog.tables() for row in table.rows]
V100S = memory.Memory(16, 32e9, 1e12)
LAPTOP = memory.Memory(0, 0.0, 16e9)
ONE_V100 = memory.Memory(1, 32e9, 1.5e12)


def says(name: str, memory: memory.Memory, *settings: str) -> tuple[bool, str]:
    return memory_fit.verdict(catalog.load(name, settings), memory)


def test_what_fits_is_arithmetic_on_model_states():
    assert says("dgx2_gpt2_data_parallel/40x1536-b8", V100S) == (True, "as published")
    assert says("dgx2_gpt2_data_parallel/54x1920-b2-oom", V100S) == (
        False, "model states of 44.8 GB on the GPU per process, 16 processes")  # fmt: skip
    assert says("megatron_paper_table1/8.3b-mp-dp", V100S) == (
        True,
        "with --set parallel.dp=2: 16 of 512 processes",
    )
    assert says("jeanzay_megatron_performance/48b-pp16-ga256-mb8", V100S) == (
        False,
        "tp x pp = 64 processes, 16 GPUs here",
    )
    assert says("default/sotu", LAPTOP) == (True, "on 1 process")
    assert says("default/sotu", memory.Memory(8, 32e9, 1e12)) == (True, "on 8 processes"), (
        "any number is as the recipe says"
    )


def test_what_does_not_fit_is_said_per_process():
    # 72 layers of 3072 over 8 tensor ranks with their duplicates: printed 8,348,393,472 / 8 parameters each,
    # in ZeRO-0, 18 bytes.
    ok, why = says("dgx2_gpt2_torch_ddp/72x3072-h8-tp8", LAPTOP)
    assert not ok and why == f"model states of {18 * 8_348_393_472 / 8 / 1e9:.3g} GB per process, 8 processes"
    # 98.03B parameters, 20 bytes offloaded to the host, over the 16 ranks that can be had.
    ok, why = says("jeanzay_hf_deepspeed_max_size/91b-g64", V100S)
    assert (
        not ok and why == f"model states of {20 * 98.03 / 16:.3g} GB in host memory per process, 16 processes"
    )


def test_a_row_that_cannot_be_resolved_says_why():
    ok, why = says(
        "jeanzay_megatron_performance/18b-pp8-ga64-mb4", memory.Memory(64, 80e9, 2e12), "ds_config=zero3"
    )
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
        fewer = memory_fit.published_plan(
            catalog.load(name, [word for word in command.split() if word != "--set"])
        )
        assert fewer.layout.world == int(count.split()[0]) < memory_fit.processes(recipe), name
        assert fewer.layout.global_batch == recipe.batch.global_, name
        again, how = memory_fit.verdict(fewer.recipe, memory)
        assert again and "--set" not in how, name
    assert told > 5


def test_rows_that_ran_fit_the_gpus_they_ran_on():
    for name in ROWS:
        recipe = catalog.load(name)
        if (
            recipe.hardware
            and recipe.hardware.gpu_memory_gb
            and recipe.published
            and not recipe.published.oom
        ):
            assert (
                memory_fit.state_bytes(memory_fit.published_plan(recipe)).gpu
                <= recipe.hardware.gpu_memory_gb * 1e9
            ), name


def plan(name: str, *settings: str):
    return memory_fit.published_plan(catalog.load(name, settings))


def test_both_offload_devices_count():
    name, share = "jeanzay_hf_deepspeed_max_size/91b-g64", 98_029_093_888 / 64
    assert memory_fit.state_bytes(plan(name)) == pytest.approx((0, 20 * share, 0))
    assert memory_fit.state_bytes(plan(name, "ds_config=zero3_offload_optimizer")) == pytest.approx(
        (2 * share, 18 * share, 0)
    )
    assert memory_fit.state_bytes(plan(name, "ds_config=zero_infinity")) == pytest.approx(
        (0, 2 * share, 18 * share)
    )
    mixed = plan(name, "ds_config=zero_infinity")
    mixed.ds["zero_optimization"]["offload_param"] = {"device": "cpu"}
    assert memory_fit.state_bytes(mixed) == pytest.approx((0, 4 * share, 16 * share))
    mixed.ds["zero_optimization"]["offload_optimizer"] = {"device": "none"}
    mixed.ds["zero_optimization"]["sub_group_size"] = 1e8
    assert memory_fit.state_bytes(mixed) == pytest.approx((14 * share + 4e8, 2 * share, 0))


def test_the_jsons_half_precision_states_count():
    def widths(half="bf16", /, params=None, **ds):
        made = plan("default/sotu", f"precision={half}", "ds_config=zero2")
        params = {**made.ds["optimizer"]["params"], **(params or {})}
        changed = {**made.ds, "optimizer": {"params": params}, **ds}
        return memory_fit.state_widths(replace(made, ds=changed))

    low = {"enabled": True, "bf16_master_weights_and_grads": True}
    assert widths() == widths("fp16") == cost.MIXED and widths("fp32") == cost.FP32
    assert widths(bf16=low) == cost.Widths(master=2)
    assert widths("fp16", fp16={"fp16_master_weights_and_grads": True}) == cost.Widths(master=2)
    states = cost.Widths(master=2, moment=2)
    assert widths(bf16={**low, "bf16_optimizer_states": True}) == states
    assert widths(bf16=low, params={"fp32_optimizer_states": False}) == states
    assert widths(params={"fp32_optimizer_states": False}) == cost.MIXED, "its weights are in fp32"
    assert widths(data_types={"grad_accum_dtype": "fp32"}) == cost.Widths(gradient=4)


def test_a_plan_for_another_machine_says_what_this_one_refuses():
    bare = Machine("cpu", fp16=False, bf16=True, compiler=True, libaio=False)
    made = memory_fit.anywhere(catalog.load("megatron_paper_table1/8.3b-mp-dp"), "fp16_dynamic", bare)
    assert made.layout.world == 512 and made.precision == "fp16"
    (notice,) = [notice for notice in made.notices if notice.key == "machine"]
    assert "refused on this machine: ds_configs/fp16_dynamic.json: fp16.enabled=true: the cpu" in str(notice)
    assert memory_fit.anywhere(catalog.load(), "3d", bare).layout.world == 4
    with pytest.raises(ConfigError, match="heads") as refused:
        memory_fit.anywhere(catalog.load("default", ["parallel.tp=4"]), "fp16_dynamic", bare)
    assert "no fp16" in str(refused.value), "both reasons"


def test_accumulated_gradients_are_on_the_host_under_zero2_offload():
    of = plan("default/sotu", "ds_config=zero2_offload", "precision=fp16", "batch.micro=1", "batch.global=1")
    held = memory_fit.stage_parameters(of)
    assert memory_fit.state_bytes(of) == (2 * held, 18 * held, 0)
    layout = replace(of.layout, accumulation=4, global_batch=4)
    assert memory_fit.state_bytes(replace(of, layout=layout)) == (2 * held, 20 * held, 0)


def test_zero_offload_fits_a_13b_model_on_one_gpu():
    model = ["model.layers=40", "model.hidden=5120", "model.heads=32", "precision=fp16", "batch.global=8"]
    ok, _ = says("default/sotu", ONE_V100, *model, "ds_config=zero2_offload")
    assert ok, "Ren et al., arXiv 2101.06840: 13B on one V100 of 32 GB with 1.5 TB of host memory"
    assert not says("default/sotu", memory.Memory(1, 32e9, 200e9), *model, "ds_config=zero2_offload")[0], (
        "16 x 12.6B is 202 GB"
    )
    assert not says("default/sotu", ONE_V100, *model, "ds_config=zero2")[0]
