"""In what a run is not its recipe.

Fields changed by --set, what --tiny changes, and what a recipe says of itself.
"""

import dataclasses

import pytest
from recorded import facts, plan

from ds_configs.plan import HOST, Machine
from launch import pretrain
from launch.records.deviations import deviations
from launch.training.job import check_by_deepspeed
from launch.training.start import show_plan
from recipes import catalog
from recipes.layout import Layout
from recipes.schema import Recipe
from recipes.tiny import tiny as shrink


def recipe(**changes) -> Recipe:
    values = {
        "title": "small",
        "model": {"layers": 24, "hidden": 128, "heads": 8, "vocab_size": 50257},
        "sequence_length": 1024,
        "batch": {"micro": 2, "global": 8},
        "steps": 1000,
        "optimizer": {"lr": 1.5e-4},
        "ds_config": "zero1",
        "dropout": {"hidden": 0.1},
        "schedule": {"warmup_steps": 100},
    }
    return Recipe(**{**values, **changes})


def said(run: Recipe, original: Recipe, tiny: bool = True) -> list[str]:
    """The lines on the fields of the recipe."""
    accumulation, micro = run.batch.accumulation or 1, run.batch.micro
    micro = micro or run.batch.global_ // accumulation
    layout = Layout(1, 1, 1, micro, accumulation, micro * accumulation)
    used = plan(run, layout=layout, precision=run.precision)
    found = deviations(facts(used, original=original, tiny=tiny), run.steps)
    return [str(each) for each in found if each.kind != "tiny"]


def changed(run: Recipe, **fields) -> Recipe:
    return Recipe.model_validate({**run.model_dump(by_alias=True, exclude_unset=True), **fields})


def test_tiny_says_that_it_raises_the_learning_rate_and_no_more():
    raised = "optimizer.lr: 0.001 (tiny raises it), the recipe's is 0.00015"
    assert said(shrink(recipe()), recipe()) == [raised]
    high = recipe(optimizer={"lr": 2e-3})
    assert said(shrink(high), high) == [], "already as high as tiny wants it"


def test_a_tiny_run_is_compared_with_the_recipe_in_what_tiny_keeps():
    small = shrink(recipe())
    other = "optimizer.lr: 0.0003, the recipe's is 0.00015"
    assert said(changed(small, optimizer={"lr": 3e-4}), recipe()) == [other]
    assert said(changed(small, optimizer={"lr": 1.5e-4}), recipe()) == [], "--set gave back the recipe's own"
    kept = changed(small, optimizer={"lr": 1.5e-4}, dropout={"hidden": 0.0}, seed=7)
    others = ["dropout.hidden: 0.0, the recipe's is 0.1", "seed: 7, the recipe's is 1234"]
    assert said(kept, recipe()) == others


def test_a_tiny_run_is_compared_with_tiny_in_what_tiny_shrinks():
    lr = {"lr": 1.5e-4}
    longer = changed(shrink(recipe()), optimizer=lr, sequence_length=32, steps=30)
    assert said(longer, recipe())[:2] == ["sequence_length: 32, tiny's is 64", "steps: 30, tiny's is 20"]
    wide = recipe(parallel={"tp": 4, "pp": 1}, optimizer={"lr": 1e-3})
    assert said(shrink(wide), wide) == ["parallel.tp: 1, tiny's is 2"], "the layout of these tests has tp 1"


def test_what_a_recipe_says_of_itself_is_said_of_a_tiny_run_too_where_tiny_keeps_it():
    differs = {"data": "a Wikipedia", "model.attention": "banded by blocks", "ds_config": "ZeRO-1 for none"}
    unknown = {"steps": "no source says", "activation_checkpointing": "the paper's stands in", "model": "its"}
    original = recipe(optimizer={"lr": 1e-3}, differs=differs, unknown=unknown)
    full = said(original, original, tiny=False)
    assert full[0] == "data: not as in the source; a Wikipedia" and len(full) == 6
    assert "steps: not published; no source says" in full
    assert said(shrink(original), original) == [
        "model.attention: not as in the source; banded by blocks",
        "ds_config: not as in the source; ZeRO-1 for none",
        "activation_checkpointing: not published; the paper's stands in",
    ]


@pytest.fixture
def cpu(monkeypatch):
    machine = Machine(HOST, fp16=False, bf16=True, compiler=True, libaio=True)
    monkeypatch.setattr("launch.machine.description.detect_machine", lambda emulate, **on_paper: machine)


@pytest.mark.usefixtures("cpu")
def test_a_plan_needs_neither_the_processes_nor_the_machine(monkeypatch, capsys):
    """…as long as no launcher has started any; what would be started is refused as ever."""
    row = ["--recipe", "megatron_paper_table1/8.3b-mp-dp", "--ds_config", "fp16_dynamic"]
    parse = pretrain.build_parser().parse_args
    job = pretrain.checked_job(parse([*row, "--plan"]))
    show_plan(job, [])
    shown = capsys.readouterr().out
    assert "= 512 processes, planned; not started here" in shown
    assert "! refused on this machine: ds_configs/fp16_dynamic.json: fp16.enabled=true" in shown
    for arguments, launcher in ((row, {}), ([*row, "--plan"], {"RANK": "0", "WORLD_SIZE": "1"})):
        with monkeypatch.context() as environment, pytest.raises(ValueError) as refused:
            for name, value in launcher.items():
                environment.setenv(name, value)
            pretrain.checked_job(parse(arguments))
        said = str(refused.value)
        assert "start 512 (deepspeed --num_gpus 512" in said and "has no fp16" in said


@pytest.mark.usefixtures("cpu")
def test_deepspeed_judges_what_is_handed_on():
    plan = pretrain.checked_job(pretrain.build_parser().parse_args([])).plan
    later = {**plan.ds, "compile": {"passes": ["z1", "z4"]}}  # as a rule of another version
    with pytest.raises(ValueError) as refused:
        check_by_deepspeed(dataclasses.replace(plan, ds=later), "mine.json")
    assert 'mine.json: compile.passes.1="z4": DeepSpeed refuses it (input should be' in str(refused.value)


@pytest.mark.usefixtures("cpu")
def test_pretrain_hands_over_the_recipe_before_tiny_and_set(monkeypatch):
    monkeypatch.setattr("launch.ranks.processes.world_size", lambda: 2)
    row = "dgx2_gpt2_data_parallel/40x1536-b8"
    asked = pretrain.build_parser().parse_args(["--recipe", row, "--tiny", "--set", "optimizer.lr=3e-4"])
    job = pretrain.checked_job(asked)
    original, used = job.facts.original, job.plan.recipe
    assert original == catalog.load(row) and used.optimizer.lr == 3e-4
    assert f"optimizer.lr: 0.0003, the recipe's is {original.optimizer.lr}" in said(used, original)
