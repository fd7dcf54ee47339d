"""Plans of runs that this machine does not start."""

import pytest

from ds_configs.findings import ConfigError, available
from ds_configs.plan import ANY_GPU, HOST, Machine
from launch.planning.resolved_plans import resolve_on_machine
from launch.training import job
from launch.training.job import plan_anywhere, plan_job
from recipes import catalog


def test_deepspeed_takes_our_configurations():
    """So a plan on paper need not ask it, which takes seconds; a user's own file is judged there too."""
    for name in available():
        plan = resolve_on_machine(catalog.load(), name)
        job.check_by_deepspeed(plan, name)


def test_a_users_configuration_is_judged_on_paper_too(tmp_path):
    (tmp_path / "mine.json").write_text('{"compile": {"deepcompile": true}}')
    with pytest.raises(ConfigError, match="compile"):
        plan_job(
            catalog.load(), str(tmp_path / "mine.json"), ANY_GPU, compiled=False, initial_weights=None,
            elsewhere=True,
        )  # fmt: skip


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
