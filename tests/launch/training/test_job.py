"""Plans of runs that this machine does not start."""

import pytest

from ds_configs.jsonfile import ConfigError
from ds_configs.plan import HOST, Machine
from launch.training.job import plan_anywhere
from recipes import catalog


def test_a_plan_for_another_machine_says_what_this_one_refuses():
    bare = Machine(HOST, fp16=False, bf16=True, compiler=True, libaio=False)
    made = plan_anywhere(catalog.load("megatron_paper_table1/8.3b-mp-dp"), "fp16_dynamic", bare)
    assert made.layout.world == 512 and made.precision == "fp16"
    (notice,) = [notice for notice in made.notices if notice.key == "machine"]
    assert "refused on this machine: ds_configs/fp16_dynamic.json: fp16.enabled=true: the cpu" in str(notice)
    assert plan_anywhere(catalog.load(), "3d", bare).layout.world == 4
    with pytest.raises(ConfigError, match="heads") as refused:
        plan_anywhere(catalog.load("default", ["parallel.tp=4"]), "fp16_dynamic", bare)
    assert "no fp16" in str(refused.value), "both reasons"
