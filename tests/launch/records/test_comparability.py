"""Which runs stand next to a published row, and what is stated of those that do not."""

import math
from dataclasses import replace

import pytest
from launching import ROOT
from recorded import facts, plan

from ds_configs.jsonfile import find, read
from ds_configs.plan import GPU, Machine
from ds_configs.resolver import resolve
from launch.records.deviations import Incomparable, not_comparable
from launch.records.facts import Ending, Peaks
from launch.records.metrics import Records, StepRecord
from launch.records.result import Result, make_result
from launch.records.result_text import result_text
from recipes import catalog
from recipes.layout import Layout
from recipes.schema import Recipe


def small(**changes) -> Recipe:
    values = {
        "title": "small",
        "model": {"layers": 2, "hidden": 32, "heads": 4, "vocab_size": 300},
        "sequence_length": 16,
        "batch": {"global": 8},
        "steps": 20,
        "optimizer": {"lr": 1e-3},
        "published": {"source": "S"},
    }
    return Recipe(**{**values, **changes})


def test_a_run_that_recomputes_more_or_less_is_not_compared():
    published = small(activation_checkpointing="full")
    for other in ("none", 2):
        run = published.model_copy(update={"activation_checkpointing": other})
        why = not_comparable(published, plan(run), tiny=False)
        assert why == Incomparable("other", ("activation_checkpointing",))
        assert str(why) == "other activation_checkpointing"


def test_a_tiny_an_unreadable_and_an_emulated_run_are_not_compared():
    published = small()
    assert str(not_comparable(published, plan(published), tiny=True)) == "tiny, another model"
    for row, run in ((None, plan(published)), (published, None)):
        assert str(not_comparable(row, run, tiny=False)) == "the recipe cannot be read"
    used = replace(plan(published), precision="fp16")
    assert str(not_comparable(published, used, tiny=False, emulated_fp16=True)) == "fp16 emulated on a CPU"
    assert not_comparable(published, plan(published), tiny=False, emulated_fp16=True) is None, "an fp32 run"


def dgx2(*overrides: str, ds_name=None) -> Result:
    """The result of a published row with `overrides`, on as many processes as it then asks for."""
    original = catalog.load("dgx2_gpt2_model_parallel/72x3072-h32-tp8")
    changed = catalog.load("dgx2_gpt2_model_parallel/72x3072-h32-tp8", list(overrides))
    parallel = changed.parallel
    machine = Machine(GPU, fp16=True, bf16=True, compiler=True, libaio=True)
    resolved = resolve(
        changed, ds_name or changed.ds_config, math.prod(parallel.model_parallel) * parallel.dp, machine
    )
    steps = tuple(StepRecord(n, 1.0, False, 0.5, n, 1, "GPU memory allocated") for n in (1, 2))
    return make_result(
        facts(resolved, original=original), Records(steps), Ending(peaks=Peaks(cached_bytes=10**9))
    )


def ratios(result: Result) -> list[float]:
    return [entry.ratio for entry in result.comparison if entry.ratio is not None]


def said_of_layout(result: Result) -> list[str]:
    keys = ("parallel", "ds_config", "batch")
    return [
        str(each)
        for each in result.deviations
        if each.kind in ("recipe", "ds_config") and each.key.startswith(keys)
    ]


def test_a_row_run_as_it_is_written_has_ratios_and_no_deviation_of_layout():
    row = dgx2()
    assert said_of_layout(row) == [] and row.not_comparable is None and len(ratios(row)) >= 2
    assert any(
        str(each).startswith("data: not as in the source; a Wikipedia of November 2023")
        for each in row.deviations
    )


def test_another_layout_is_stated_against_the_row_and_has_no_ratios():
    row = dgx2("parallel.tp=2", "parallel.pp=2", "ds_config=pipeline")
    assert said_of_layout(row) == [
        "ds_config: run with pipeline, the recipe's is zero0",
        "parallel.tp: 2, the recipe's is 8",
        "parallel.pp: 2, the recipe's is 1",
    ]
    assert str(row.not_comparable).startswith(
        "other parallel.tp, parallel.pp, ds_config (ZeRO-1, offload none; the row's is ZeRO-0"
    )
    assert not ratios(row) and f"no ratios: {row.not_comparable}" in result_text(row)


def test_another_number_of_data_parallel_ranks_is_stated_and_has_no_ratios():
    row = dgx2("parallel.dp=1", "batch.micro=16")
    assert said_of_layout(row) == ["parallel.dp: 1, the recipe's is 2", "batch.micro: 16, the recipe's is 8"]
    assert str(row.not_comparable) == "other parallel.dp" and not ratios(row)


def test_another_share_of_the_batch_is_stated_and_compared():
    row = dgx2("batch.micro=4")
    assert said_of_layout(row) == [
        "batch.micro: 4, the recipe's is 8",
        "batch.accumulation: 2, the recipe's is 1",
    ]
    assert row.not_comparable is None and ratios(row)
    unstated = dgx2("batch.micro=null", "batch.accumulation=2")
    assert said_of_layout(unstated) == [
        "batch.micro: 4, the recipe's is 8",
        "batch.accumulation: 2, the recipe's is 1",
    ]


def test_another_precision_is_stated_and_compared():
    row = dgx2("precision=bf16")
    assert (
        "precision: bf16, the recipe's is fp16" in map(str, row.deviations)
        and row.not_comparable is None
        and ratios(row)
    )


def test_other_sharding_or_offload_has_no_ratios_whatever_the_file_is_called(tmp_path):
    own = tmp_path / "zero0.json"
    own.write_text((ROOT / "ds_configs" / "zero2_offload.json").read_text())
    row = dgx2(ds_name=own)
    assert said_of_layout(row) == [] and not ratios(row)
    assert (
        str(row.not_comparable)
        == "other ds_config (ZeRO-2, offload optimizer; the row's is ZeRO-0, offload none)"
    )


@pytest.mark.parametrize(
    "a, b",
    [
        ("zero3", "zero3_cpu_checkpointing"),
        ("zero3_offload", "zero3_offload_optimizer"),
        ("zero3_offload", "zero_infinity"),
    ],
)
def test_jsons_of_one_stage_that_keep_other_things_outside_the_gpu(a, b):
    published = small(ds_config=a)
    own, other = (replace(plan(published), ds_name=name, ds=read(find(name))) for name in (a, b))
    assert not_comparable(published, own, tiny=False) is None
    why = not_comparable(published, other, tiny=False)
    assert why and why.keys == ("ds_config",) and why.sharding and why.sharding[0] != why.sharding[1]


def test_degrees_that_a_row_does_not_state_are_those_of_its_ds_config():
    published = small(ds_config="3d")
    used = replace(plan(published), ds=read(find("3d")))
    three, two = Layout(2, 2, 4, 1, 2, 8), Layout(1, 2, 4, 1, 2, 8)
    assert not_comparable(published, replace(used, layout=three), tiny=False) is None
    assert str(not_comparable(published, replace(used, layout=two), tiny=False)) == "other parallel.tp"
