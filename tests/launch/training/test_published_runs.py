"""Published rows, shrunk, under the real `deepspeed` launcher: every distinct code path trains."""

import pytest
from launching import deepspeed, run

from launch.machine.description import detect_machine
from launch.planning import resolved_plans
from launch.records.metrics import read_metrics
from launch.records.result import read_result
from recipes import catalog


def code_path(name: str) -> tuple:
    """What decides which code a shrunk row runs through."""
    recipe = catalog.load(name, tiny=True)
    plan = resolved_plans.published_plan(recipe)
    model = recipe.model
    return (
        model.family, model.layer_norm, model.sentence_head, model.implementation, model.attention,
        recipe.data.masking, recipe.parallel, plan.ds_name, recipe.activation_checkpointing,
        plan.layout.accumulation > 1, recipe.precision,
    )  # fmt: skip


def one_of_each() -> list[str]:
    """The first row of every code path, in the order of the tables."""
    first: dict[str, str] = {}
    for table in catalog.tables():
        for row in table.rows if table.published else ():
            first.setdefault(str(code_path(f"{table.name}/{row}")), f"{table.name}/{row}")
    return list(first.values())


@pytest.mark.long
@pytest.mark.parametrize("name", one_of_each())
def test_a_published_row_runs_shrunk(name, tmp_path):
    recipe, out = catalog.load(name, tiny=True), tmp_path / "run"
    command = ["launch/pretrain.py", "--recipe", name, "--tiny", "--out", str(out)]
    done = run([*deepspeed(resolved_plans.processes(recipe)), *command], timeout=400)
    assert done.returncode == 0, done.stdout[-3000:]
    result = read_result(out / "result.json")
    assert result.status == "ok" and result.tiny and result.ds_config == recipe.ds_config
    assert result.layout and result.layout.world == resolved_plans.processes(recipe)
    if recipe.precision == "fp16" and not detect_machine().fp16:
        stated = [str(each) for each in result.deviations]
        assert any("INSTEAD OF fp16" in line for line in stated), "said where a CPU has no fp16"
    records = read_metrics(out / "metrics.jsonl")
    losses = [record.loss for record in records.steps]
    assert len(losses) == recipe.steps
    assert sum(losses[-5:]) < sum(losses[:5]) - 0.1, losses
    assert result.losses.validation.loss < records.validations[0].loss - 0.02
