"""Which runs stand next to a published row, and what is stated of those that do not."""

import math
from dataclasses import replace

import pytest
from launching import ROOT
from recorded import facts, plan

from ds_configs.findings import find, read
from ds_configs.plan import GPU, Machine
from ds_configs.resolver import resolve
from launch.records.deviations import Incomparable, not_comparable
from launch.records.facts import Ending, Peaks, StepRecord
from launch.records.metrics import Records
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


def test_work_that_is_not_the_rows_is_not_compared():
    published = small(activation_checkpointing="full")
    for other in ("none", 2):
        run = published.model_copy(update={"activation_checkpointing": other})
        why = not_comparable(published, plan(run), tiny=False)
        assert why == Incomparable("other", ("activation_checkpointing",))
        assert str(why) == "other activation_checkpointing"
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
    world = math.prod(changed.parallel.model_parallel) * changed.parallel.dp
    machine = Machine(GPU, fp16=True, bf16=True, compiler=True, libaio=True)
    resolved = resolve(changed, ds_name or changed.ds_config, world, machine)
    steps = tuple(StepRecord(n, 1.0, False, 0.5, n, 1, "GPU memory allocated") for n in (1, 2))
    ending = Ending(peaks=Peaks(cached_bytes=10**9))
    return make_result(facts(resolved, original=original), Records(steps), ending)


OTHER_SHARE = ["batch.micro: 4, the recipe's is 8", "batch.accumulation: 2, the recipe's is 1"]


@pytest.mark.parametrize(
    ("overrides", "said", "why"),  # why: the reason for no ratios
    [
        ((), [], None),
        (("batch.micro=4",), OTHER_SHARE, None),
        (("batch.micro=null", "batch.accumulation=2"), OTHER_SHARE, None),
        (("precision=bf16",), ["precision: bf16, the recipe's is fp16"], None),
        (
            ("parallel.dp=1", "batch.micro=16"),
            ["parallel.dp: 1, the recipe's is 2", "batch.micro: 16, the recipe's is 8"],
            "other parallel.dp",
        ),
        (
            ("parallel.tp=2", "parallel.pp=2", "ds_config=pipeline"),
            [
                "ds_config: run with pipeline, the recipe's is zero0",
                "parallel.tp: 2, the recipe's is 8",
                "parallel.pp: 2, the recipe's is 1",
            ],
            "other parallel.tp, parallel.pp, ds_config (ZeRO-1, offload none; the row's is ZeRO-0",
        ),
    ],
    ids=str,
)
def test_what_differs_from_the_row_is_stated_and_other_work_has_no_ratios(overrides, said, why):
    result = dgx2(*overrides)
    stated = {str(each): each for each in result.deviations if each.kind in ("recipe", "ds_config")}
    assert [
        text for text in stated if text.startswith(("parallel", "ds_config", "batch", "precision"))
    ] == said
    assert any(str(each).startswith("data: not as in the source") for each in result.deviations)
    ratios = [entry.ratio for entry in result.comparison if entry.ratio is not None]
    if why is None:
        assert result.not_comparable is None and len(ratios) >= 2
    else:
        assert str(result.not_comparable).startswith(why) and not ratios
        assert f"no ratios: {result.not_comparable}" in result_text(result)


def test_other_sharding_or_offload_has_no_ratios_whatever_the_file_is_called(tmp_path):
    own = tmp_path / "zero0.json"
    own.write_text((ROOT / "ds_configs" / "zero2_offload.json").read_text())
    other = "other ds_config (ZeRO-2, offload optimizer; the row's is ZeRO-0, offload none)"
    assert str(dgx2(ds_name=own).not_comparable) == other


JSONS = [("zero3", "zero3_cpu_checkpointing"), ("zero3_offload", "zero3_offload_optimizer")]


@pytest.mark.parametrize(("a", "b"), [*JSONS, ("zero3_offload", "zero_infinity")])
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
