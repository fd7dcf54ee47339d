"""The ds_configs, and the resolver's refusals: each bad input with its message."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import math
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
from resolved import CPU, only, plan, problems, shipped, written

from ds_configs import known_keys
from ds_configs.findings import FOLDER, ConfigError, available, find, lookup, read
from ds_configs.plan import ANY_GPU as GPU
from ds_configs.plan import FORM, Machine, Plan, plan_to_json
from ds_configs.resolver import resolve
from recipes import catalog
from recipes.layout import divisors, padded_vocab, share_batch
from recipes.problems import Problem
from recipes.schema import Recipe

OLD = dataclasses.replace(CPU, bf16=False)
V100 = dataclasses.replace(GPU, bf16=False)
BARE = dataclasses.replace(CPU, libaio=False, compiler=False)
TOOLLESS = dataclasses.replace(GPU, cuda_compiler=False)
EVERY_RECIPE = [*catalog.titles()]
EVERY_CONFIG = available()
WORLDS = (1, 2, 3, 4, 8)
REMOVED = {key for key, (rule, _) in known_keys.REFUSED.items() if "removed" in rule}


@pytest.fixture
def nvme(tmp_path) -> dict[str, str]:
    return {"MEGARECIPES_NVME": str(tmp_path)}


@pytest.fixture
def mine(tmp_path):
    """Writes a JSON of ds_configs/ with dotted keys changed, and returns its path."""
    return lambda changes, base="zero1": written(tmp_path, base, changes)


# --- every recipe against every ds_config


def test_the_set_is_complete():
    stages = "zero0 zero1 zero2 zero3 zero2_offload zero3_offload zero3_offload_optimizer zero_infinity"
    assert set(EVERY_CONFIG) >= {*stages.split(), "pipeline", "3d"}
    assert set(EVERY_CONFIG) >= {"fp16_dynamic", "fp16_static", "bf16", "fp32"}
    readme = (FOLDER / "README.md").read_text()
    assert [name for name in EVERY_CONFIG if f"| `{name}` |" not in readme] == []


@pytest.fixture(scope="module")
def recipes_and_worlds() -> list[tuple[Recipe, tuple[int, ...]]]:
    """Every recipe in both sizes, with the number of processes it states, or several where it states none."""
    found = []
    for name in EVERY_RECIPE:
        for recipe in (catalog.load(name), catalog.load(name, tiny=True)):
            found.append((recipe, (own_world(recipe),) if recipe.parallel.dp else WORLDS))
    return found


def own_world(recipe: Recipe) -> int:
    """Processes that the recipe states, or as few as its layout takes."""
    return math.prod(recipe.parallel.model_parallel) * (recipe.parallel.dp or 1)


QUICK = ("zero0", "zero2_offload", "zero3", "3d", "fp16_dynamic", "pure_bf16")


@pytest.mark.parametrize(
    "config", [pytest.param(name, marks=() if name in QUICK else pytest.mark.ci) for name in EVERY_CONFIG]
)
def test_every_recipe_resolves_or_is_refused_with_reasons(config, nvme, recipes_and_worlds):
    resolved = dict.fromkeys((GPU, CPU, OLD), 0)
    for machine, (recipe, worlds) in itertools.product(resolved, recipes_and_worlds):
        for world in worlds:
            try:
                result = resolve(recipe, config, world, machine, nvme)
            except ConfigError as error:
                assert all(":" in line and ";" in line for line in map(str, error.problems)), error
                assert all(problem.key and problem.rule and problem.fix for problem in error.problems), error
            else:
                resolved[machine] += 1
                assert_consistent(result, world)
    half = {"fp16_dynamic": "fp16", "fp16_static": "fp16", "bf16": "bf16", "pure_bf16": "bf16"}
    needed = half.get(config)
    for machine, count in resolved.items():
        assert (count == 0) == (needed is not None and not getattr(machine, needed)), machine


def assert_consistent(result: Plan, world: int) -> None:
    layout, ds = result.layout, result.ds
    assert '"auto"' not in json.dumps(ds) and "parallel" not in ds
    assert layout.world == world and result.recipe.model.heads % layout.tp == 0
    assert layout.global_batch == result.recipe.batch.global_ == ds["train_batch_size"]
    assert layout.micro == ds["train_micro_batch_size_per_gpu"]
    assert layout.accumulation == ds["gradient_accumulation_steps"]
    model = result.recipe.model
    multiple = 1 if model.implementation == "transformers" else model.vocab_divisible_by * layout.tp
    assert result.padded_vocab % multiple == 0 and 0 <= result.padded_vocab - model.vocab_size < multiple
    assert (ds["fp16"]["enabled"], ds["bf16"]["enabled"]) == (
        result.precision == "fp16",
        result.precision == "bf16",
    )
    assert ds["optimizer"]["params"]["lr"] == result.recipe.optimizer.lr
    assert result.zero_stage == ds["zero_optimization"]["stage"]
    differs = result.recipe.precision not in (result.precision, "auto")
    assert differs == any(notice.key == "precision" for notice in result.notices)


def test_every_recipe_runs_with_its_own_ds_config(nvme, recipes_and_worlds):
    differ = {}
    for name, (recipe, _) in zip(EVERY_RECIPE, recipes_and_worlds[::2], strict=True):
        try:
            found = resolve(recipe, recipe.ds_config, own_world(recipe), GPU, nvme).notices
        except ConfigError as error:
            found = error.problems
        if found:
            differ[name] = found
    assert not differ


def test_a_plan_comes_back_from_json_equal(nvme, recipes_and_worlds):
    for recipe, _ in recipes_and_worlds:
        for machine in (GPU, CPU):
            made = resolve(recipe, recipe.ds_config, own_world(recipe), machine, nvme)
            again = FORM.validate_python(json.loads(json.dumps(plan_to_json(made))))
            assert again == made and catalog.digest(again.recipe) == catalog.digest(recipe)
            assert dataclasses.asdict(again.layout) == plan_to_json(made)["layout"]


def test_what_is_no_plan_is_refused_with_its_field():
    values = plan_to_json(plan("zero1", "precision=fp16"))
    assert values["notices"] and values["notices"][0]["key"] == "precision"
    layout = {**values["layout"], "micro": 3}
    for wrong in (
        {"zero_stage": 4},
        {"precision": "fp8"},
        {"recipe": {}},
        {"offload": "disk"},
        {"layout": layout},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            FORM.validate_python({**values, **wrong})


# --- DeepSpeed itself


@pytest.fixture(scope="module")
def deepspeed_config():
    return pytest.importorskip("deepspeed.runtime.config")


@pytest.mark.parametrize("config", EVERY_CONFIG)
def test_deepspeed_accepts_the_resolved_json(config, deepspeed_config, nvme):
    result = plan(config, world=8 if config == "3d" else 2, machine=GPU, environ=nvme)
    ds = copy.deepcopy(result.ds) | {"train_batch_size": result.layout.micro * result.layout.accumulation}
    parsed = deepspeed_config.DeepSpeedConfig(ds)  # outside a process group it takes the world for one rank
    assert parsed.zero_optimization_stage == result.zero_stage
    assert parsed.gradient_clipping == 1.0 and parsed.optimizer_params["betas"] == [0.9, 0.95]
    assert (parsed.float16_config.enabled, parsed.bfloat16_config.enabled) == (
        result.precision == "fp16", result.precision == "bf16"
    )  # fmt: skip


def test_the_known_top_level_keys_are_those_that_deepspeed_reads(deepspeed_config):
    class Recorder(dict):
        seen: set[str] = set()

        def get(self, key, default=None):
            self.seen.add(key)
            return super().get(key, default)

        def __contains__(self, key):
            self.seen.add(key)
            return super().__contains__(key)

        def keys(self):
            return self

        def __copy__(self):
            return Recorder(self)

    deepspeed_config.DeepSpeedConfig(Recorder({"train_batch_size": 1}))
    ours = {*known_keys.KEYS[""]} | {key for key in known_keys.REFUSED if "." not in key}
    ours |= {"bfloat16"}  # an older name
    ours |= {key for key in known_keys.IDLE if "." not in key}
    not_read = {"parallel", "megarecipes_fills", "sequence_parallel_size"}  # ours; once a process group runs
    assert Recorder.seen == ours - not_read
    removed = {key for key in REMOVED if "." not in key}
    assert removed == set(deepspeed_config._REMOVED_TOP_LEVEL_CONFIG_KEYS)


def test_the_known_section_keys_are_deepspeeds(deepspeed_config):
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.monitor import config as monitors
    from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT_DEFAULT
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    for section, model in (
        ("zero_optimization.offload_optimizer", DeepSpeedZeroOffloadOptimizerConfig),
        ("zero_optimization.offload_param", DeepSpeedZeroOffloadParamConfig),
        ("zero_optimization.leaf_module", DeepSpeedZeroLeafModuleConfig),
        ("fp16", DeepSpeedFP16Config),
        ("bf16", DeepSpeedBF16Config),
        ("comms_logger", CommsLoggerConfig),
        ("timers.throughput", DeepSpeedThroughputTimerConfig),
        ("tensorboard", monitors.TensorBoardConfig),
        ("csv_monitor", monitors.CSVConfig),
        ("wandb", monitors.WandbConfig),
    ):
        assert set(known_keys.KEYS[section]) == set(model.model_fields), section
    fields = {
        field.alias or name: (field.json_schema_extra or {})
        for name, field in DeepSpeedZeroConfig.model_fields.items()
    }
    idle = {key.removeprefix("zero_optimization.") for key in known_keys.IDLE if key.startswith("zero_opt")}
    assert {name for name, extra in fields.items() if not extra.get("deprecated")} == {
        *known_keys.KEYS["zero_optimization"], *idle
    }  # fmt: skip
    deprecated = {name for name, extra in fields.items() if extra.get("deprecated")}
    removed = deprecated | set(deepspeed_config._REMOVED_ZERO_CONFIG_KEYS)
    renamed = {key.removeprefix("zero_optimization.") for key in known_keys.RENAMED}
    assert {key for key in REMOVED if "." in key} == {f"zero_optimization.{key}" for key in removed - renamed}
    by_field = {name: field.alias for name, field in DeepSpeedZeroConfig.model_fields.items() if field.alias}
    own = {key: value[0] for key, value in known_keys.RENAMED.items() if key.startswith("zero_optimization.")}
    assert by_field.items() <= {key.partition(".")[2]: value for key, value in own.items()}.items()
    assert set(known_keys.KEYS["activation_checkpointing"]) == set(ACT_CHKPT_DEFAULT)
    assert set(known_keys.KEYS["aio"]) == set(AIO_DEFAULT_DICT)


# --- the file


def test_a_file_by_name_by_path_and_from_another_directory(monkeypatch, tmp_path, mine):
    path = mine({})
    monkeypatch.chdir(tmp_path)
    forms = ("zero3_offload", "ds_configs/zero3_offload.json", "zero3_offload.json")
    assert plan(forms[0]).ds == plan(forms[1]).ds == plan(forms[2]).ds
    names = [plan(config).ds_name for config in (forms[0], "mine.json", path)]
    assert names == ["zero3_offload", "mine", "mine"]


def test_a_missing_file_gets_near_matches(tmp_path):
    near = "zero3_offload or zero2_offload or zero1_offload"
    assert only("zero3_ofload") == f"--ds_config zero3_ofload: no such file; did you mean {near}?"
    assert "ds_configs/ has 3d, bf16" in only("ds_configs/qqq.json")
    assert "is a directory" in only(tmp_path)


MALFORMED = {
    '{"a": 1,\n "b" 2}': ":2:6: not JSON: expecting ':' delimiter: '\"b\" 2}'",
    '{"a": 1,\n}': "comma",  # Python 3.13 says itself that it is one too many
    '{\n// note\n"a": 1}': "expecting property name enclosed in double quotes: '// note'; JSON has no com",
    "[1]": "holds a list: an object, {...}, is needed here",
}


@pytest.mark.parametrize("text", MALFORMED)
def test_malformed_json_says_where(tmp_path, text):
    """What any file may have wrong is in tests/recipes/test_files.py."""
    path = tmp_path / "mine.json"
    path.write_text(text)
    found = only(path)
    assert found.startswith(str(path)) and MALFORMED[text] in found


# --- filling


FILLS = "megarecipes_fills"


@pytest.mark.parametrize("name", EVERY_CONFIG)
def test_a_copy_is_filled_alike_and_what_a_file_leaves_out_of_its_list_is_deepspeeds_default(
    name, nvme, mine
):
    ours = plan(name, world=8, machine=GPU, environ=nvme)
    assert plan(mine({}, name), world=8, machine=GPU, environ=nvme).ds == ours.ds
    listed = {key for key in shipped(name)[FILLS] if not key.endswith("nvme_path")}
    bare = plan(mine({FILLS: None}, name), world=8, machine=GPU, environ=nvme).ds
    for key in listed:
        assert lookup(shipped(name), key) is None and lookup(bare, key) is None
        section = key.partition(".")[0]
        off = section == "fp16" and ours.ds["fp16"] == {"enabled": False}
        assert lookup(ours.ds, key) is not None or off, key


def test_what_a_file_states_is_not_filled(mine):
    sums = "communication_data_type"
    listed = [sums, "data_types.grad_accum_dtype", "fp16.hysteresis"]
    ds = plan(mine({FILLS: listed, sums: "bf16", "data_types": None}), "precision=fp32").ds
    assert (ds[sums], ds["data_types"], ds["fp16"]["hysteresis"]) == ("bf16", {"grad_accum_dtype": "fp32"}, 2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({FILLS: "overlap_comm"}, 'megarecipes_fills="overlap_comm": must be a list of texts'),
        ({FILLS: ["overlap_comm", 1]}, "must be a list of texts"),
        ({FILLS: ["zero_optimization.overlap_com"]}, "did you mean overlap_comm"),
        ({FILLS: ["scheduler"]}, 'scheduler="auto": must be a section'),
        ({FILLS: ["fp16.enabled"], "fp16": True}, "fp16=true: must be a section"),
        ({FILLS: ["gradient_predivide_factor"]}, 'gradient_predivide_factor="auto": nothing fills it here'),
    ],
)
def test_a_list_that_cannot_be_filled_is_refused(changes, said, mine):
    assert said in only(mine(changes))


def test_what_passes_through(mine):
    extra = {
        "activation_checkpointing": {"cpu_checkpointing": True},
        "csv_monitor": {"enabled": True},
        "log_level": "info",
    }
    ds = plan(mine({**extra, "data_types": {"grad_accum_dtype": "fp32"}, "fp16.auto_cast": True})).ds
    assert {key: ds[key] for key in extra} == extra
    assert ds["fp16"]["auto_cast"] is True and ds["fp16"]["hysteresis"] == 2


TORCH, FUSED = "optimizer.params.torch_adam", "optimizer.params.fused"
FORCED = "zero_force_ds_cpu_optimizer"
OF_DEEPSPEED = {  # what DeepSpeed's CPU Adam only does, so that it does the step
    "bf16.bf16_master_weights_and_grads": True,
    FORCED: True,
    "optimizer.params.fp32_optimizer_states": True,
    "zero_optimization.offload_optimizer.ratio": 0.5,
}
BY_TORCH = {TORCH: True, FUSED: True, FORCED: None}
OFFLOADED = {TORCH: True, FUSED: True, FORCED: False}
BY_DEEPSPEED = {TORCH: False, FUSED: None}
LR = "optimizer.params.lr"
SCALER = {f"fp16.{key}": 3 for key in ("initial_scale_power", "loss_scale_window", "hysteresis")}
SHARES = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
FP32_SUMS = {"data_types.grad_accum_dtype": "fp32"}
EQUAL = {"optimizer.type": "Adam", LR: 0.001, "optimizer.params.betas": [0.9, 0.95], "gradient_clipping": 1}
AUTOS = {
    "optimizer.type": "AdamW",
    LR: 1e-3,
    "optimizer.params.betas": [0.9, 0.95],
    "optimizer.params.eps": 1e-6,
    "optimizer.params.weight_decay": 0.1,
    "gradient_clipping": 0.5,
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 1,
    "zero_optimization.stage3_param_persistence_threshold": 3840,
}
OFFLOAD = "zero_optimization.offload_optimizer"
PARAMS, BY_MUON = "optimizer.params", "optimizer.name=muon"
OF_MUON = {"optimizer.type": "Muon", f"{PARAMS}.momentum": 0.95, f"{PARAMS}.adjust_lr": "match_rms_adamw"}
# JSON of ds_configs/, what is changed in it, settings of the recipe, keys of the plan's JSON.
FILLED: tuple[tuple[str, dict[str, Any], str, dict[str, Any]], ...] = (
    *((name, {}, "", BY_TORCH) for name in ("zero0", "zero1", "zero3", "fp32")),
    *((name, {}, "", OFFLOADED) for name in ("zero2_offload", "zero3_offload", "zero3_offload_optimizer")),
    ("zero_infinity", {}, "", BY_DEEPSPEED),
    ("zero1", {TORCH: False}, "", BY_DEEPSPEED),
    ("zero1", {"optimizer.params.foreach": True}, "", {TORCH: True, FUSED: None}),
    ("zero1", {FUSED: False}, "", {TORCH: True, FUSED: False}),
    *(("zero3_offload", {key: value}, "precision=bf16", BY_DEEPSPEED) for key, value in OF_DEEPSPEED.items()),
    ("zero3", {}, "optimizer.clip=0.5 optimizer.eps=1e-6", AUTOS),
    ("zero1", EQUAL, "", EQUAL),
    ("zero0", {}, "optimizer.name=lamb", {"optimizer.type": "Lamb", TORCH: None, FUSED: None, LR: 1e-3}),
    ("zero2", {}, f"{BY_MUON} optimizer.adam_lr=2e-3", {**OF_MUON, f"{PARAMS}.adam_lr": 2e-3, TORCH: None}),
    ("zero3", OF_MUON, BY_MUON, OF_MUON),
    ("zero1", SHARES, "", SHARES),
    *(("zero0", FP32_SUMS, f"precision={each}", FP32_SUMS) for each in ("fp32", "bf16", "fp16")),
    ("zero1", SCALER, "precision=fp16", SCALER),
)  # fmt: skip


@pytest.mark.parametrize("machine", [CPU, GPU], ids=["CPU", "GPU"])
@pytest.mark.parametrize(("base", "changes", "sets", "expected"), FILLED, ids=[
    f"{base} {' '.join(changes)} {sets}" for base, changes, sets, _ in FILLED
])  # fmt: skip
def test_the_json_is_filled(base, changes, sets, expected, machine, mine, nvme):
    if "fp16" in sets and not machine.fp16:
        return
    ds = plan(mine(changes, base), *sets.split(), machine=machine, environ=nvme).ds
    assert {key: lookup(ds, key) for key in expected} == expected


def test_a_json_that_leaves_everything_out_is_filled_too(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text("{}")
    result = plan(path, "precision=fp32")
    assert (result.zero_stage, result.offload, result.precision) == (0, "none", "fp32")
    assert result.ds["train_batch_size"] == 8 and lookup(result.ds, LR) == 1e-3


# --- precision

SLOW = dataclasses.replace(CPU, slow_bf16=True)
EMULATED = dataclasses.replace(CPU, emulated_fp16=True)
MACHINES = {"GPU": GPU, "V100": V100, "CPU": CPU, "SLOW": SLOW, "OLD": OLD, "EMULATED": EMULATED}
# Machine, JSON, the recipe's precision, that of the run, and what a notice says of it.
PRECISIONS = (
    ("GPU", "zero1", "auto", "bf16", ""),
    ("V100", "zero1", "auto", "fp16", ""),
    ("CPU", "zero1", "auto", "bf16", ""),
    ("SLOW", "zero1", "auto", "fp32", ""),
    ("OLD", "zero1", "auto", "fp32", ""),
    ("GPU", "fp32", "auto", "fp32", ""),
    ("CPU", "fp32", "auto", "fp32", ""),
    ("GPU", "fp16_dynamic", "auto", "fp16", ""),
    *(("GPU", "zero0", wanted, wanted, "") for wanted in ("fp32", "bf16", "fp16")),
    *(("GPU", "zero1", wanted, wanted, "") for wanted in ("fp32", "bf16", "fp16")),
    ("CPU", "zero1", "fp16", "bf16", "bf16 INSTEAD OF fp16"),
    ("OLD", "zero1", "fp16", "fp32", "fp32 INSTEAD OF fp16"),
    ("OLD", "zero1", "bf16", "fp32", "fp32 INSTEAD OF bf16"),
    ("V100", "zero1", "bf16", "fp16", "fp16 INSTEAD OF bf16"),
    ("SLOW", "zero1", "bf16", "bf16", "IS SLOW here"),
    ("SLOW", "zero1", "bf16", "bf16", "--set precision=fp32"),
    ("SLOW", "zero1", "fp16", "fp32", "fp32 INSTEAD OF fp16"),  # no slower half instead
    ("EMULATED", "fp16_dynamic", "fp16", "fp16", "EMULATED"),
    ("GPU", "fp16_static", "bf16", "fp16",
     "precision: fp16, as ds_configs/fp16_static.json says; the recipe asks for bf16"),
    ("CPU", "fp32", "bf16", "fp32", "the recipe asks for bf16"),
)  # fmt: skip


@pytest.mark.parametrize(("machine", "config", "wanted", "chosen", "said"), PRECISIONS)
def test_the_precision_is_asked_for_demanded_or_what_the_machine_has(machine, config, wanted, chosen, said):
    made = plan(config, f"precision={wanted}", machine=MACHINES[machine])
    assert made.precision == chosen
    enabled = [half for half in ("fp16", "bf16") if lookup(made.ds, f"{half}.enabled")]
    assert enabled == ([] if chosen == "fp32" else [chosen])
    texts = [str(notice) for notice in made.notices if notice.key == "precision"]
    assert len(texts) == bool(said) and all(said in text for text in texts)


def test_fp16_auto_does_not_stand_in_for_a_bf16_that_is_off(mine):
    assert plan(mine({"bf16": {"enabled": False}}), "precision=bf16", machine=GPU).precision == "fp32"


def test_the_megatron_scaler_halves_at_once_and_doubles_after_2000_steps(monkeypatch):
    """Notes on arXiv 1909.08053: from 2^24; an overflow skips the step and halves; N = 2000 steps double."""
    import torch
    from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
    from deepspeed.runtime.precision_config import DeepSpeedFP16Config

    monkeypatch.setattr("deepspeed.comm.get_rank", lambda: 0)  # it logs on the first rank
    ds = plan("zero0_megatron", "precision=fp16", machine=GPU).ds
    rules = DeepSpeedFP16Config(**ds["fp16"]).dynamic_loss_scale_args()
    scaler = CreateLossScaler(torch.half, ds["fp16"]["loss_scale"], True, rules)
    scales = []
    for overflows in (*[True] * 3, *[False] * 2001, True):
        scales.append(scaler.cur_scale)
        scaler.update_scale(overflows)
    assert scales[:4] == [2**24, 2**23, 2**22, 2**21], "hysteresis would keep one of them twice"
    assert scales[3:-1] == [2**21] * 2001 and scales[-1] == 2**22 and scaler.cur_scale == 2**21


def test_the_megatron_scaler_is_all_that_sets_its_config_apart():
    ours, plain = (read(FOLDER / f"{name}.json") for name in ("zero0_megatron", "zero0"))
    scaler = {"initial_scale_power", "loss_scale_window", "hysteresis"}
    assert {key for key in plain["fp16"] if plain["fp16"][key] != ours["fp16"][key]} == scaler
    assert {**ours, "fp16": None} == {**plain, "fp16": None}


def sums(result):
    """Types in which gradients are summed: over micro-batches, over ranks."""
    return result.ds["data_types"]["grad_accum_dtype"], result.ds["communication_data_type"]


@pytest.mark.parametrize("name", ["zero0", "zero1", "zero2", "zero3", "zero3_offload"])
def test_bf16_gradients_are_summed_in_fp32_where_there_are_many(name, mine):
    def summed(precision, accumulation=1, world=1, name=name):
        batch = f"batch.global={accumulation * world}", "batch.micro=1", f"batch.accumulation={accumulation}"
        return sums(plan(name, f"precision={precision}", *batch, world=world, machine=GPU))

    assert summed("bf16") == ("bf16", "bf16"), "no cast without a sum"
    assert summed("bf16", 2) == ("fp32", "fp32" if name == "zero1" else "bf16")
    assert summed("bf16", 1, 16) == ("bf16", "fp32") and summed("bf16", 1, 8) == ("bf16", "bf16")
    assert summed("fp16", 64, 16) == ("fp16", "fp16") and summed("fp32", 64, 16) == ("fp32", "fp32")
    own = mine({"data_types.grad_accum_dtype": "bf16", "communication_data_type": "bf16"}, name)
    assert summed("bf16", 64, 16, own) == ("bf16", "bf16")


def test_the_first_loss_scale_makes_up_for_the_accumulation(mine):
    """DeepSpeed divides the loss by it before the scale multiplies it."""

    def power(accumulation, name="zero1"):
        batch = f"batch.global={accumulation}", "batch.micro=1", f"batch.accumulation={accumulation}"
        return plan(name, "precision=fp16", *batch, machine=GPU).ds["fp16"]["initial_scale_power"]

    assert (power(1), power(2), power(5), power(512)) == (16, 17, 19, 25)
    assert power(512, mine({"fp16.initial_scale_power": 8})) == 8


def test_buckets_are_of_the_model():
    def sizes(name, recipe=catalog.DEFAULT_RECIPE, machine=GPU, *settings):
        loaded = catalog.load(recipe, settings)
        return resolve(loaded, name, None, machine).ds["zero_optimization"]

    small = sizes("zero2")["reduce_bucket_size"]
    assert 13e6 < small < 15e6, "no larger than the model of 14 million parameters"
    assert sizes("zero1")["reduce_bucket_size"] == small
    large = "a100_blog_table4/1.2b"
    model = catalog.load(large).model
    three = sizes("zero3", large)
    assert three["reduce_bucket_size"] == sizes("zero1", large)["reduce_bucket_size"] == 5e7
    largest = model.embedding_rows(1) * model.hidden
    assert sizes("zero2", large)["reduce_bucket_size"] == largest > 5e7, "ZeRO-2 frees gradients early"
    assert three["stage3_prefetch_bucket_size"] == 12 * model.hidden**2
    assert three["stage3_max_live_parameters"] == three["stage3_max_reuse_distance"] == 1e9
    assert sizes("zero3")["overlap_comm"] is True and sizes("zero3", machine=CPU)["overlap_comm"] is False


def test_chunks_go_to_the_host_in_parts_where_tensor_ranks_have_them_alike():
    """One rank has nothing to share, and whole ones are copied while a GPU computes."""

    def partitioned(*settings, machine=GPU):
        settings = ("activation_checkpointing=full", *settings)
        made = plan("zero3_cpu_checkpointing", *settings, machine=machine, world=2)
        return made.ds["activation_checkpointing"]["partition_activations"]

    two = ("parallel.tp=2",)
    assert partitioned() is False and partitioned(machine=CPU) is True
    assert partitioned(*two) is True and partitioned(*two, "parallel.sequence=true") is False


def test_no_timer_waits_for_the_gpu():
    """DeepSpeed's synchronizes twice per micro-batch unless it is told not to."""
    for name in EVERY_CONFIG:
        assert read(find(name))["timers"]["throughput"]["enabled"] is False


# --- layout


@pytest.mark.parametrize(
    ("config", "changes", "sets", "world", "degrees"),
    [
        ("3d", {}, "", 8, (2, 2, 2)),
        ("3d", {}, "parallel.tp=1", 4, (1, 2, 2)),  # stated, so the JSON's default gives way
        ("pipeline", {}, "parallel.pp=3", 3, (1, 3, 1)),
        ("zero1", {"parallel.tensor": 2}, "", 2, (2, 1, 1)),
        ("zero0", {}, "parallel.tp=2 precision=bf16", 4, (2, 1, 2)),
    ],
)
def test_json_and_recipe_share_the_choice_of_degrees(config, changes, sets, world, degrees, mine):
    layout = plan(mine(changes, config), *sets.split(), world=world).layout
    assert (layout.tp, layout.pp, layout.dp) == degrees
    if config == "3d" and not sets:
        assert layout.identity() == "2 micro x 2 accumulation x 2 dp = 8 global"
        assert layout.degrees() == "tp 2 x pp 2 x dp 2"
        assert layout.degrees(sequence=True) == "tp 2 (and sequence) x pp 2 x dp 2"


@pytest.mark.parametrize("tiny", [True, False])
def test_what_another_number_of_processes_asks_to_set_resolves(tiny):
    """Every row whose tp x pp is one process, started on others than its own."""
    told = 0
    for name in catalog.titles():
        recipe = catalog.load(name, tiny=tiny)
        own = recipe.parallel.dp
        for world in (1, 3, 4) if own and math.prod(recipe.parallel.model_parallel) == 1 else ():
            if world == own:
                continue
            with pytest.raises(ConfigError) as refused:
                resolve(recipe, recipe.ds_config, world, GPU)
            (line,) = map(str, refused.value.problems)
            fixes = [
                part.removesuffix(" to take what is started").split("--set ")[1:]
                for part in line.split(", or ")[1:]
            ]
            assert [fix[0].strip() for fix in fixes] == [f"parallel.dp={world}", "parallel.dp=null"], line
            for fix in fixes:
                plan = resolve(
                    catalog.load(name, [setting.strip() for setting in fix], tiny=tiny),
                    recipe.ds_config,
                    world,
                    GPU,
                )
                assert plan.layout.dp == world
                assert plan.layout.global_batch == recipe.batch.global_ or recipe.batch.global_ % world
            told += 1
    assert told > 10


def test_shares_are_right_or_explained_and_every_proposed_number_works():
    for total in range(1, 25):
        for dp in range(1, 7):
            for micro in (None, *range(1, 9)):
                for accumulation in (None, *range(1, 9)):
                    shares = share_batch(micro, accumulation, total, dp, pp=2)
                    if isinstance(shares, Problem):
                        assert "; --set batch." in str(shares)
                        assert not re.search(r"=(\d+) or \1\b", str(shares)), "each number once"
                        continue
                    assert shares[0] * shares[1] * dp == total
                    assert micro in (None, shares[0]) and accumulation in (None, shares[1])


def test_a_pipeline_is_kept_full_where_the_recipe_leaves_the_shares_open():
    assert share_batch(None, None, 8, 1, pp=4) == (2, 4)
    assert share_batch(None, None, 9, 1, pp=2) == (3, 3)
    assert share_batch(None, None, 2, 2, pp=4) == (1, 1)


def test_with_sequence_parallelism_stages_send_what_each_tensor_rank_has():
    degrees = ("parallel.tp=2", "parallel.pp=2", "parallel.sequence=true")
    sent = plan("3d", *degrees, world=4).ds["pipeline"]
    assert sent == {"pipe_partitioned": False, "grad_partitioned": False}
    assert "pipeline" not in plan("3d", *degrees[:2], world=4).ds
    assert "pipeline" not in plan("zero1", "parallel.tp=2", world=2).ds


def test_padding():
    assert [padded_vocab(50257, tp) for tp in (1, 2, 4, 8)] == [50304, 50432, 50688, 51200]
    assert padded_vocab(128, 1) == 128 and padded_vocab(509, 2) == 512
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


# --- offload and NVMe


def test_offload_is_named(mine):
    names = [plan(name).offload for name in ("zero3", "zero2_offload", "zero3_offload")]
    assert names == ["none", "optimizer", "optimizer+parameters"]
    assert plan(mine({OFFLOAD: {"device": "cpu"}})).offload == "optimizer", "from stage 1 on"


def test_nvme_takes_the_directory_of_the_environment(tmp_path, nvme):
    (found, *_) = problems("zero_infinity", environ={})
    assert "MEGARECIPES_NVME is not set" in str(found)
    result = plan("zero_infinity", environ=nvme)
    zero = result.ds["zero_optimization"]
    assert result.offload == "nvme"
    assert zero["offload_param"]["nvme_path"] == zero["offload_optimizer"]["nvme_path"] == str(tmp_path)


@pytest.mark.parametrize(
    ("place", "reason"),
    [("no", "does not exist"), ("mine.json", "is not a directory"), ("", "is not writable")],
)
def test_nvme_paths_that_cannot_be_written(place, reason, tmp_path, monkeypatch, mine):
    path = mine({PARAM_PATH: str(tmp_path / place)}, "zero_infinity")
    if not place:
        monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)  # root may write anywhere
    found = only("zero_infinity", environ={"MEGARECIPES_NVME": str(tmp_path / place)})
    assert found.startswith(f"$MEGARECIPES_NVME={(tmp_path / place)}: {reason}")
    found = only(path, environ={"MEGARECIPES_NVME": "/tmp"}) if place else f"{path}: {PARAM_PATH}="
    assert found.startswith(f"{path}: {PARAM_PATH}=")


# --- refusals


class Refusal(NamedTuple):
    """Settings and JSON that cannot run.

    Attributes:
        config: JSON of ds_configs/.
        sets: settings of the recipe, separated by blanks.
        keys: of the problems, separated by blanks.
        said: where the wording carries the fix.
        fix: a setting that is offered by --set, with which the same is planned.
        changes: dotted keys of the JSON.
    """

    config: str
    sets: str
    keys: str
    said: str = ""
    fix: str = ""
    changes: Mapping[str, Any] = {}
    world: int = 1
    machine: Machine = CPU


def differs(key: str, value: object, fix: str) -> Refusal:
    return Refusal("zero1", "", key, f'set {key} to "auto" in the JSON', fix, {key: value})


NO_GCC = dataclasses.replace(CPU, compiler=False)
LAMB, SEQUENCE, ODD = "optimizer.name=lamb", "parallel.sequence=true", "sequence_length=255"
TRANSFORMERS, OURS = "model.implementation=transformers", "model.implementation=megarecipes"
PREFETCH = "zero_optimization.stage3_prefetch_bucket_size"
PARAM_PATH = "zero_optimization.offload_param.nvme_path"
GRAD_TYPE = "data_types.grad_accum_dtype"
PARTITIONED = "activation_checkpointing.partition_activations"
REFUSALS = (
    differs(LR, 3e-4, "optimizer.lr=0.0003"),
    differs("optimizer.params.betas", [0.9, 0.99], "optimizer.betas=[0.9,0.99]"),
    differs("gradient_clipping", 0.5, "optimizer.clip=0.5"),
    differs("train_batch_size", 16, "batch.global=16"),
    Refusal("zero1", "parallel.tp=3 batch.global=12", "parallel.tensor", "the recipe's parallel.tp=3",
            "parallel.tp=2", {"parallel.tensor": 2}, world=6),
    # optimizers
    *(Refusal("zero3_offload", "precision=bf16", TORCH, f"{key}=", changes={key: value}, machine=NO_GCC)
      for key, value in OF_DEEPSPEED.items()),
    Refusal("zero1", "", TORCH, "a C++ compiler (g++, ninja, Python's headers)", changes={TORCH: False},
            machine=NO_GCC),
    Refusal("zero1", "", TORCH, "nvcc (the CUDA toolkit)", changes={TORCH: False}, machine=TOOLLESS),
    Refusal("zero2_offload", "", FORCED, changes={FORCED: True, TORCH: True}),
    Refusal("zero1", LAMB, "optimizer.name", "--ds_config zero0"),
    Refusal("zero3", LAMB, "optimizer.name", "--ds_config zero0"),
    Refusal("zero0", f"{LAMB} {TRANSFORMERS}", "optimizer.name", "set optimizer.name to adamw"),
    Refusal("zero0", LAMB, f"optimizer.type {TORCH}", '"auto" or "Lamb"',
            changes={"optimizer.type": "AdamW", TORCH: True}),
    Refusal("zero0", "", "optimizer.type", '"auto" or "AdamW"', changes={"optimizer.type": "Lamb"}),
    Refusal("zero0", LAMB, "fp16.loss_scale", "the first scale as fp16.initial_scale_power",
            changes={"fp16.loss_scale": 1024}),
    Refusal("zero2_offload", BY_MUON, "optimizer.name", "--ds_config zero1, zero2 or zero3"),
    Refusal("zero1", f"{BY_MUON} {TRANSFORMERS}", "optimizer.name", "set optimizer.name to adamw"),
    Refusal("zero1", "", "optimizer.type", "set optimizer.name to muon", changes={"optimizer.type": "Muon"}),
    Refusal("zero1", "", f"{PARAMS}.momentum", "is a key of Muon's", changes={f"{PARAMS}.momentum": 0.9}),
    Refusal("zero1", BY_MUON, f"{PARAMS}.momentum", "optimizer.momentum=0.9", "optimizer.momentum=0.9",
            {f"{PARAMS}.momentum": 0.9}),
    Refusal("zero1", BY_MUON, TORCH, "not of Muon's", changes={TORCH: True}),
    # precision
    Refusal("fp16_dynamic", "", "fp16.enabled", "--ds_config bf16"),
    Refusal("bf16", "", "bf16.enabled", "--ds_config fp32", machine=OLD),
    Refusal("zero1", "", "fp16.enabled", changes={"fp16.enabled": True, "bf16.enabled": True}, machine=GPU),
    Refusal("zero0", "precision=bf16", GRAD_TYPE, changes={GRAD_TYPE: "fp16"}, machine=GPU),
    # degrees
    Refusal("zero1", "", "parallel.default_tensor", changes={"parallel": {"tensor": 2, "default_tensor": 2}},
            world=2),
    Refusal("zero1", "parallel.tp=4", "parallel.tp", "set parallel.tp to 1, 2, 3 or 6", world=4),
    Refusal("3d", "", "parallel.tp", "start 4 (deepspeed --num_gpus 4", world=6),
    Refusal("3d", "", "parallel.tp", "with parallel.tp=2 (default_tensor of ds_configs/3d.json) x ", world=6),
    Refusal("zero1", "parallel.tp=2 parallel.dp=2", "parallel.dp", "start 4", "parallel.dp=1", world=2),
    Refusal("zero1", TRANSFORMERS, "parallel.tp", "", OURS, {"parallel.tensor": 2}, world=2),
    Refusal("zero1", TRANSFORMERS, "parallel.pp", "", OURS, {"parallel.pipeline": 2}, world=2),
    Refusal("pipeline", "parallel.pp=7", "parallel.pp", "to 6 or less", world=7),
    Refusal("zero0", "parallel.pp=2", "parallel.pp", "wrong norm", "parallel.pp=1", world=2),
    Refusal("zero2", "parallel.pp=2", "parallel.pp", "--ds_config pipeline", "parallel.pp=1", world=2),
    Refusal("zero3", "parallel.pp=2", "parallel.pp", "--ds_config pipeline", "parallel.pp=1", world=2),
    # batch
    Refusal("zero1", "batch.micro=3", "batch.micro", "batch.micro=2 or 4, or --set batch.global=6 or 9",
            "batch.micro=2"),
    Refusal("zero1", "batch.accumulation=3", "batch.accumulation", "batch.accumulation=2 or 4, or --set "
            "batch.global=6 or 9", "batch.accumulation=2"),
    Refusal("zero1", "batch.micro=8", "batch.micro", "batch.micro=2 or 4, or", "batch.global=16", world=2),
    Refusal("zero1", "batch.micro=2 batch.accumulation=2", "batch", "batch.global=4, or --set "
            "batch.accumulation=4, or --set batch.micro=4", "batch.global=4"),
    Refusal("zero1", "", "batch.global", "batch.global=6 or 9", "batch.global=6", world=3),
    # positions
    Refusal("zero1", SEQUENCE, "parallel.sequence", "--set parallel.tp=2", "parallel.sequence=false"),
    Refusal("zero1", f"{SEQUENCE} parallel.tp=2 {ODD}", "parallel.sequence", "set sequence_length to 254",
            "parallel.sequence=false", world=2),
    Refusal("zero1", f"{SEQUENCE} {ODD}", "parallel.sequence", "parallel.tp=2 (", "parallel.sequence=false",
            {"parallel.tensor": 2}, world=2),
    Refusal("3d", f"{SEQUENCE} parallel.tp=2 parallel.pp=2", "pipeline.grad_partitioned", "",
            "parallel.sequence=false", {"pipeline.grad_partitioned": True}, world=4),
    Refusal("zero3_cpu_checkpointing", f"{SEQUENCE} parallel.tp=2 activation_checkpointing=full", PARTITIONED,
            "set it to false", "parallel.sequence=false", world=2),
    # NVMe
    Refusal("zero_infinity", "", f"device device {TORCH}", "apt-get install libaio-dev", machine=BARE),
    Refusal("zero_infinity", "", "device", "set CUDA_HOME", machine=TOOLLESS),
    Refusal("zero_infinity", "", PREFETCH, "set it to 0", changes={PREFETCH: "auto"}),
    Refusal("zero2", "", "zero_optimization.stage", "--ds_config zero_infinity",
            changes={f"{OFFLOAD}.device": "nvme"}),
)  # fmt: skip


@pytest.mark.parametrize("row", REFUSALS, ids=[" ".join((r.config, r.sets, *r.changes)) for r in REFUSALS])
def test_what_cannot_run_is_refused_by_its_key_and_a_setting_that_is_offered_works(row, mine, nvme):
    config = mine(row.changes, row.config) if row.changes else row.config
    sets, how = row.sets.split(), {"world": row.world, "machine": row.machine, "environ": nvme}
    found = problems(config, *sets, **how)
    assert [each.key for each in found] == row.keys.split() and all(each.rule and each.fix for each in found)
    text = "\n".join(map(str, found))
    assert row.said in text
    if row.fix:
        assert f"--set {row.fix}" in text and plan(config, *sets, row.fix, **how)


@pytest.mark.parametrize("config", ["zero1", "zero2_offload", "zero3_offload"])
def test_without_a_compiler_torchs_adam_steps(config, mine):
    assert plan(config, machine=BARE).notices == ()
    offloading = mine({TORCH: False}, "zero2_offload")
    assert not plan(offloading, machine=TOOLLESS).notices, "CPU Adam needs no nvcc"


def test_where_nothing_is_recomputed_chunks_of_a_cut_sequence_do_no_harm():
    sets = (SEQUENCE, "parallel.tp=2", "activation_checkpointing=selective")
    assert plan("zero3_cpu_checkpointing", *sets, world=2)


# --- all at once


def test_all_problems_come_at_once(mine):
    changes = {
        "scheduler": {"type": "OneCycle"},
        "zero_optimisation": {},
        "gradient_clipping": 3,
        "fp16": {"enabled": True},
        "zero_optimization.stage": 2,
    }
    found = problems(mine(changes), "parallel.tp=4", "parallel.pp=7", "batch.micro=3", world=28)
    degrees = ["parallel.tp", "parallel.pp", "parallel.pp", "batch.micro"]
    expected = ["zero_optimisation", "fp16.enabled", *degrees, "scheduler.type", "gradient_clipping"]
    assert [problem.key for problem in found] == expected


def test_resolving_changes_nothing_it_was_given():
    recipe = catalog.load()
    before = recipe.model_dump()
    first, second = resolve(recipe, "zero3", 1, CPU), resolve(recipe, "zero3", 1, CPU)
    assert recipe.model_dump() == before and isinstance(recipe, Recipe)
    assert first.ds == second.ds and first.ds is not second.ds and first.recipe is recipe
