"""The ds_configs, and the resolver's refusals: each bad input with its message."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import math
import os
import re
from pathlib import Path

import pytest

from ds_configs import jsonfile, known_keys
from ds_configs.jsonfile import FOLDER, ConfigError, available
from ds_configs.plan import ANY_GPU, FORM, HOST, Machine, Plan, plan_to_json
from ds_configs.resolver import resolve
from recipes import catalog
from recipes.layout import divisors, padded_vocab, share_batch
from recipes.problems import Problem, RecipeError
from recipes.schema import Recipe

GPU = ANY_GPU
CPU = Machine(HOST, fp16=False, bf16=True, compiler=True, libaio=True)
OLD = dataclasses.replace(CPU, bf16=False)
V100 = dataclasses.replace(GPU, bf16=False)
EVERY_RECIPE = [*catalog.titles()]
EVERY_CONFIG = available()
WORLDS = (1, 2, 3, 4, 8)
REMOVED = {key for key, (rule, _) in known_keys.REFUSED.items() if "removed" in rule}


@pytest.fixture
def nvme(tmp_path: Path) -> dict[str, str]:
    return {"MEGARECIPES_NVME": str(tmp_path)}


@pytest.fixture
def written(tmp_path: Path):
    """Writes a JSON, zero1.json with dotted keys changed or a text, and returns its path."""

    def write(text: str | None = None, base: str = "zero1", **changes) -> Path:
        path = tmp_path / "mine.json"
        if text is None:
            config = json.loads((FOLDER / f"{base}.json").read_text())
            for dotted, value in changes.items():
                *sections, last = dotted.split("__")
                section = config
                for name in sections:
                    section = section.setdefault(name, {})
                section[last] = value
            text = json.dumps(config)
        path.write_text(text, encoding="utf-8")
        return path

    return write


def plan(
    config, *overrides: str, name: str = "default", world: int = 1, machine: Machine = CPU, **how
) -> Plan:
    return resolve(catalog.load(name, overrides), config, world, machine, **how)


def problems(config, *overrides: str, **how) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as error:
        plan(config, *overrides, **how)
    return tuple(map(str, error.value.problems))


def only(config, *overrides: str, **how) -> str:
    """The one problem."""
    found = problems(config, *overrides, **how)
    assert len(found) == 1, found
    return found[0]


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


@pytest.mark.parametrize("config", EVERY_CONFIG)
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


@pytest.mark.parametrize("config", EVERY_CONFIG)
def test_the_default_recipe_runs_with_every_ds_config(config, nvme):
    """…with the processes its layout wants, on a GPU."""
    world = {"pipeline": 2, "3d": 8}.get(config, 2)
    assert plan(config, world=world, machine=GPU, environ=nvme).layout.global_batch == 8


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
    not_read = {"parallel", "sequence_parallel_size"}  # ours; only once a process group runs
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
    assert {name for name, extra in fields.items() if not extra.get("deprecated")} == {
        *known_keys.KEYS["zero_optimization"]
    }
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


def test_a_file_by_name_by_path_and_from_another_directory(monkeypatch, tmp_path, written):
    path = written()
    monkeypatch.chdir(tmp_path)
    assert (
        plan("zero3_offload").ds == plan("ds_configs/zero3_offload.json").ds == plan("zero3_offload.json").ds
    )
    assert (plan("zero3_offload").ds_name, plan("mine.json").ds_name, plan(path).ds_name) == (
        "zero3_offload",
        "mine",
        "mine",
    )


def test_a_missing_file_gets_near_matches(tmp_path):
    near = "zero3_offload or zero2_offload or zero3_offload_optimizer"
    assert only("zero3_ofload") == f"--ds_config zero3_ofload: no such file; did you mean {near}?"
    assert "ds_configs/ has 3d, bf16" in only("ds_configs/qqq.json")
    assert "is a directory" in only(tmp_path)


MALFORMED = {
    '{"a": 1,\n "b" 2}': ":2:6: not JSON: expecting ':' delimiter: '\"b\" 2}'",
    '{"a": 1,\n}': "comma",  # Python 3.13 says itself that it is one too many
    '{\n// note\n"a": 1}': "expecting property name enclosed in double quotes: '// note'; JSON has no com",
    "": "is empty",
    "[1]": "holds a list: an object, {...}, is needed here",
    '{"fp16": {"enabled": true,\n "enabled": false}}': ':2: key "enabled" stands twice in one object (lines',
}


@pytest.mark.parametrize("text", MALFORMED)
def test_malformed_json_says_where(written, text):
    path = written(text)
    found = only(path)
    assert found.startswith(str(path)) and MALFORMED[text] in found


# --- filling


def test_what_passes_through(written):
    extra = {
        "activation_checkpointing": {"cpu_checkpointing": True},
        "csv_monitor": {"enabled": True},
        "log_level": "info",
    }
    ds = plan(written(**extra, data_types={"grad_accum_dtype": "fp32"}, fp16__auto_cast=True)).ds
    assert {key: ds[key] for key in extra} == extra
    assert ds["fp16"]["auto_cast"] is True and ds["fp16"]["hysteresis"] == 2


def test_torchs_fused_adam_steps_everywhere_but_on_nvme(written, nvme):
    def params(name, machine):
        found = plan(name, machine=machine, environ=nvme)
        force = found.ds.get("zero_force_ds_cpu_optimizer")
        asked = found.ds["optimizer"]["params"]
        return asked["torch_adam"], asked.get("fused"), force

    for name in ("zero0", "zero1", "zero3", "fp32"):
        assert params(name, CPU) == params(name, GPU) == (True, True, None)
    for name in ("zero2_offload", "zero3_offload", "zero3_offload_optimizer"):
        assert params(name, CPU) == params(name, GPU) == (True, True, False)
    assert params("zero_infinity", CPU) == (False, None, None)
    assert params(written(optimizer__params__torch_adam=False), CPU) == (False, None, None)
    assert params(written(optimizer__params__foreach=True), CPU) == (True, None, None)
    assert params(written(optimizer__params__fused=False), CPU) == (True, False, None)


OF_DEEPSPEED = {
    "bf16__bf16_master_weights_and_grads": True,
    "zero_force_ds_cpu_optimizer": True,
    "optimizer__params__fp32_optimizer_states": True,
    "zero_optimization__offload_optimizer__ratio": 0.5,
}


@pytest.mark.parametrize("key", OF_DEEPSPEED)
def test_what_deepspeeds_cpu_adam_alone_does_is_done_by_it(written, key):
    path = written(base="zero3_offload", **{key: OF_DEEPSPEED[key]})
    found = plan(path, "precision=bf16").ds["optimizer"]["params"]
    assert found["torch_adam"] is False and "fused" not in found
    bare = dataclasses.replace(CPU, compiler=False)
    dotted = key.replace("__", ".")
    assert f"{dotted}=" in (said := only(path, "precision=bf16", machine=bare)) and "g++" in said


def test_autos_are_the_recipes():
    ds = plan("zero3", "optimizer.clip=0.5", "optimizer.eps=1e-6", world=2).ds
    assert ds["optimizer"] == {
        "type": "AdamW",
        "params": {
            **{"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1},
            **{"torch_adam": True, "fused": True},
        },
    }
    assert ds["gradient_clipping"] == 0.5
    assert (
        ds["train_batch_size"],
        ds["train_micro_batch_size_per_gpu"],
        ds["gradient_accumulation_steps"],
    ) == (8, 4, 1)
    assert ds["zero_optimization"]["stage3_param_persistence_threshold"] == 3840


def test_a_json_that_leaves_everything_out_is_filled_too(written):
    result = plan(written("{}"), "precision=fp32")
    assert (result.zero_stage, result.offload, result.precision) == (0, "none", "fp32")
    assert result.ds["train_batch_size"] == 8 and result.ds["optimizer"]["params"]["lr"] == 1e-3


def test_equal_numbers_are_no_disagreement(written):
    params = {"lr": 0.001, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    path = written(gradient_clipping=1, optimizer={"type": "Adam", "params": params}, train_batch_size=8)
    assert plan(path).ds["optimizer"]["type"] == "Adam"


DISAGREE = {
    "optimizer__params__lr": (3e-4, "optimizer.lr=0.001", "optimizer.lr=0.0003"),
    "optimizer__params__betas": ([0.9, 0.99], "optimizer.betas=[0.9, 0.95]", "optimizer.betas=[0.9,0.99]"),
    "gradient_clipping": (0.5, "optimizer.clip=1.0", "optimizer.clip=0.5"),
    "train_batch_size": (16, "batch.global=8", "batch.global=16"),
}


def test_disagreement_names_both_places_and_the_fixes_work(written):
    for key, (value, own, fix) in DISAGREE.items():
        path = written(**{key: value})
        found = only(path)
        assert f"disagrees with the recipe's {own}" in found
        assert 'to "auto" in the JSON' in found and f"--set {fix}" in found
        assert plan(path, fix)


def test_without_a_compiler_deepspeeds_adam_is_refused(written):
    bare = dataclasses.replace(CPU, compiler=False)
    for name in ("zero1", "zero2_offload", "zero3_offload"):
        assert plan(name, machine=bare).notices == ()
    own = written(optimizer__params__torch_adam=False)
    assert "torch_adam=false, but a C++ compiler (g++, ninja, Python's headers) is missing" in only(
        own, machine=bare
    )
    toolless = dataclasses.replace(GPU, cuda_compiler=False)
    assert "torch_adam=false, but nvcc (the CUDA toolkit) is missing" in only(own, machine=toolless)
    offloading = written(base="zero2_offload", optimizer__params__torch_adam=False)
    assert not plan(offloading, machine=toolless).notices, "CPU Adam needs no nvcc"
    changes = {"zero_force_ds_cpu_optimizer": True, "optimizer__params__torch_adam": True}
    assert "demands DeepSpeed's compiled CPU Adam" in only(written(base="zero2_offload", **changes))


# --- precision


SLOW = dataclasses.replace(CPU, slow_bf16=True)


@pytest.mark.parametrize(
    ("machine", "config", "chosen"),
    [
        (GPU, "zero1", "bf16"), (V100, "zero1", "fp16"), (CPU, "zero1", "bf16"), (SLOW, "zero1", "fp32"),
        (OLD, "zero1", "fp32"), (GPU, "fp32", "fp32"), (CPU, "fp32", "fp32"), (GPU, "fp16_dynamic", "fp16"),
    ],
)  # fmt: skip
def test_a_recipe_may_leave_the_precision_to_the_machine(machine, config, chosen):
    made = plan(config, "precision=auto", machine=machine)
    assert made.precision == chosen
    assert not [notice for notice in made.notices if notice.key == "precision"]
    enabled = [half for half in ("fp16", "bf16") if made.ds.get(half, {}).get("enabled")]
    assert enabled == ([] if chosen == "fp32" else [chosen])


def test_bf16_without_instructions_is_trained_in_where_it_is_asked_for_and_said_to_be_slow():
    made = plan("zero1", "precision=bf16", machine=SLOW)
    (notice,) = [notice for notice in made.notices if notice.key == "precision"]
    assert made.precision == "bf16" and "IS SLOW here" in str(notice)
    assert "--set precision=fp32" in str(notice)
    assert plan("zero1", "precision=fp16", machine=SLOW).precision == "fp32", "no slower half instead"


def test_auto_takes_the_recipes_precision_without_a_word():
    for wanted in ("fp32", "bf16", "fp16"):
        result = plan("zero1", f"precision={wanted}", machine=GPU)
        assert (result.precision, result.notices) == (wanted, ())


@pytest.mark.parametrize(
    ("wanted", "machine", "got"),
    [("fp16", CPU, "bf16"), ("fp16", OLD, "fp32"), ("bf16", OLD, "fp32"), ("bf16", V100, "fp16")],
)
def test_auto_falls_to_what_the_machine_has_in_one_loud_line(wanted, machine, got):
    result = plan("zero1", f"precision={wanted}", machine=machine)
    assert result.precision == got
    (notice,) = result.notices
    assert notice.key == "precision" and f"{got} INSTEAD OF {wanted}" in str(notice)


def test_an_explicit_choice_wins_over_the_recipe_with_a_notice(written):
    (notice,) = plan("fp16_static", "precision=bf16", machine=GPU).notices
    assert str(notice) == "precision: fp16, as ds_configs/fp16_static.json says; the recipe asks for bf16"
    assert plan("fp32").precision == "fp32"
    assert "the recipe asks for bf16" in plan("fp32", "precision=bf16").notices[0].text
    path = written(bf16={"enabled": False})  # fp16 "auto" does not stand in for a bf16 that is off
    assert plan(path, "precision=bf16", machine=GPU).precision == "fp32"


def test_what_is_demanded_is_never_changed():
    found = only("fp16_dynamic")
    assert (
        "fp16.enabled=true: the cpu accelerator of this machine has no fp16" in found
        and "--ds_config bf16" in found
    )
    assert "the cpu accelerator of this machine has no bf16" in only("bf16", machine=OLD)


def test_emulated_fp16_is_said_loudly():
    result = plan("fp16_dynamic", "precision=fp16", machine=dataclasses.replace(CPU, emulated_fp16=True))
    assert result.precision == "fp16" and "EMULATED" in result.notices[0].text


def test_loss_scaler_keys_reach_deepspeed(written):
    scaler = {
        "loss_scale": 0,
        "initial_scale_power": 4,
        "loss_scale_window": 3,
        "hysteresis": 1,
        "min_loss_scale": 2,
    }
    ds = plan(written(fp16={"enabled": True, **scaler}, bf16={"enabled": False}), machine=GPU).ds
    assert ds["fp16"] == {"enabled": True, **scaler}


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


def test_lamb_is_for_zero_0_and_says_why_it_is_refused():
    ds = plan("zero0", "optimizer.name=lamb").ds
    assert ds["optimizer"]["type"] == "Lamb"
    usual = {"bias_correction": True, "min_coeff": 0.01, "max_coeff": 10.0}
    params = ds["optimizer"]["params"]
    assert params.keys() == {"lr", "betas", "eps", "weight_decay", *usual} and usual.items() <= params.items()
    assert plan("zero0").ds["optimizer"]["type"] == "AdamW"
    for name, stage in (("zero1", 1), ("zero3", 3), ("bf16", 1)):
        found = only(name, "optimizer.name=lamb")
        assert f"optimizer.name=lamb with zero_optimization.stage={stage}" in found and "zero0" in found
    assert "its Trainer steps AdamW" in only(
        "zero0", "optimizer.name=lamb", "model.implementation=transformers"
    )


def test_a_json_for_another_optimizer_is_refused(written):
    adam = written(base="zero0", optimizer__type="AdamW", optimizer__params__torch_adam=True)
    found = problems(adam, "optimizer.name=lamb")
    assert any('optimizer.type="AdamW"' in each and '"auto" or "Lamb"' in each for each in found)
    assert any("torch_adam=true: is a key of Adam's" in each for each in found)
    fixed = only(written(base="zero0", fp16__loss_scale=1024), "optimizer.name=lamb")
    assert "fp16.loss_scale=1024: DeepSpeed runs LAMB with a loss scale that moves" in fixed
    lamb = only(written(base="zero0", optimizer__type="Lamb"))
    assert "the recipe's optimizer.name is adamw" in lamb and 'write "auto" or "AdamW"' in lamb


def test_the_megatron_scaler_is_all_that_sets_its_config_apart():
    ours, plain = (json.loads((FOLDER / f"{name}.json").read_text()) for name in ("zero0_megatron", "zero0"))
    scaler = {"initial_scale_power", "loss_scale_window", "hysteresis"}
    assert {key for key in plain["fp16"] if plain["fp16"][key] != ours["fp16"][key]} == scaler
    assert {**ours, "fp16": None} == {**plain, "fp16": None}


def test_two_precisions_or_none_that_is_one(written):
    assert "are both true" in only(written(fp16__enabled=True, bf16__enabled=True), machine=GPU)


def test_zero_0_takes_every_precision(written):
    for wanted in ("fp32", "bf16", "fp16"):
        result = plan("zero0", f"precision={wanted}", machine=GPU)
        assert (result.precision, result.zero_stage, result.notices) == (wanted, 0, ())
    assert plan("zero0", "precision=fp16", "parallel.tp=2", world=4, machine=GPU).layout.dp == 2
    assert "pp=2 with zero_optimization.stage=0" in only("zero0", "parallel.pp=2", "precision=bf16", world=2)


def test_zero_0_sums_gradients_in_its_own_precision_or_in_fp32(written):
    path = written(base="zero0", data_types__grad_accum_dtype="fp32")
    for wanted in ("fp32", "bf16", "fp16"):
        assert plan(path, f"precision={wanted}", machine=GPU).precision == wanted
    path = written(base="zero0", data_types__grad_accum_dtype="fp16")
    assert 'grad_accum_dtype="fp16" with bf16 and zero_optimization.stage=0: gradients are summed' in only(
        path, "precision=bf16", machine=GPU
    )


def sums(result):
    """Types in which gradients are summed: over micro-batches, over ranks."""
    return result.ds["data_types"]["grad_accum_dtype"], result.ds["communication_data_type"]


@pytest.mark.parametrize("name", ["zero0", "zero1", "zero2", "zero3", "zero3_offload"])
def test_bf16_gradients_are_summed_in_fp32_where_there_are_many(name, written):
    def summed(precision, accumulation=1, world=1, name=name):
        batch = f"batch.global={accumulation * world}", "batch.micro=1", f"batch.accumulation={accumulation}"
        return sums(plan(name, f"precision={precision}", *batch, world=world, machine=GPU))

    assert summed("bf16") == ("bf16", "bf16"), "no cast without a sum"
    assert summed("bf16", 2) == ("fp32", "fp32" if name == "zero1" else "bf16")
    assert summed("bf16", 1, 16) == ("bf16", "fp32") and summed("bf16", 1, 8) == ("bf16", "bf16")
    assert summed("fp16", 64, 16) == ("fp16", "fp16") and summed("fp32", 64, 16) == ("fp32", "fp32")
    own = written(base=name, data_types__grad_accum_dtype="bf16", communication_data_type="bf16")
    assert summed("bf16", 64, 16, own) == ("bf16", "bf16")


def test_the_first_loss_scale_makes_up_for_the_accumulation(written):
    """DeepSpeed divides the loss by it before the scale multiplies it."""

    def power(accumulation, name="zero1"):
        batch = f"batch.global={accumulation}", "batch.micro=1", f"batch.accumulation={accumulation}"
        return plan(name, "precision=fp16", *batch, machine=GPU).ds["fp16"]["initial_scale_power"]

    assert (power(1), power(2), power(5), power(512)) == (16, 17, 19, 25)
    assert power(512, written(fp16__initial_scale_power=8)) == 8


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
        assert jsonfile.read(jsonfile.find(name))["timers"]["throughput"]["enabled"] is False


# --- layout


def test_json_and_recipe_share_the_choice_of_degrees(written):
    assert plan("3d", world=8).layout.identity() == "2 micro x 2 accumulation x 2 dp = 8 global"
    result = plan("3d", "parallel.tp=1", world=4)  # stated, so the JSON's default gives way
    assert (result.layout.tp, result.layout.pp, result.layout.dp) == (1, 2, 2)
    assert plan("pipeline", "parallel.pp=3", world=3).layout.pp == 3
    path = written(parallel={"tensor": 2})
    assert plan(path, world=2).layout.tp == 2
    found = only(path, "parallel.tp=3", world=6)
    assert (
        "parallel.tensor=2 disagrees with the recipe's parallel.tp=3" in found
        and "--set parallel.tp=2" in found
    )


def test_a_default_stands_for_auto_alone(written):
    assert "a default is used with" in only(written(parallel={"tensor": 2, "default_tensor": 2}), world=2)


def test_tp_has_to_divide_the_heads():
    assert only("zero1", "parallel.tp=4", world=4) == (
        "model.heads=6 is not divisible by parallel.tp=4: each tensor-parallel rank takes heads/tp heads; "
        "set parallel.tp to 1, 2, "
        "3 or 6"
    )


def test_world_size():
    found = only("3d", world=6)
    assert found.startswith(
        "6 processes started, with parallel.tp=2 (default_tensor of ds_configs/3d.json) x parallel.pp=2"
    )
    assert "start 4 (deepspeed --num_gpus 4" in found
    found = only("zero1", "parallel.tp=2", "parallel.dp=2", world=2)
    assert "parallel.tp=2 x parallel.pp=1 x parallel.dp=2 = 4, but 2 processes started" in found
    assert "start 4" in found and "--set parallel.dp=1" in found


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


@pytest.mark.parametrize("degree", ["tp", "pp"])
def test_gpt2_of_transformers_is_cut_by_zero_alone(degree, written):
    """Whether the recipe or the JSON states the degree."""
    own = "model.implementation=transformers"
    with pytest.raises(RecipeError, match=f"parallel.{degree}=2 with {own}: its GPT-2 is cut by ZeRO alone"):
        catalog.load("default", [own, f"parallel.{degree}=2"])
    path = written(parallel={{"tp": "tensor", "pp": "pipeline"}[degree]: 2})
    assert f"parallel.{degree}=2 ({path}) with {own}: its GPT-2 is cut" in only(path, own, world=2)


def test_pipeline_rules():
    assert "parallel.pp=7 is more than model.layers=6" in only("pipeline", "parallel.pp=7", world=7)
    for stage, config in ((2, "zero2"), (3, "zero3")):
        found = only(config, "parallel.pp=2", world=2)
        assert (
            f"parallel.pp=2 with zero_optimization.stage={stage}" in found and "--ds_config pipeline" in found
        )
    assert "wrong norm" in only("zero0", "parallel.pp=2", world=2)


BATCHES = [
    (("batch.micro=3",), 1, "--set batch.micro=2 or 4, or --set batch.global=6 or 9"),
    (("batch.accumulation=3",), 1, "--set batch.accumulation=2 or 4, or --set batch.global=6 or 9"),
    (("batch.micro=8",), 2, "--set batch.micro=2 or 4, or --set batch.global=16"),
    (("batch.micro=2", "batch.accumulation=2"), 1, "= 4 is not batch.global=8: micro x accumulation x dp = "
     "global; --set batch.global=4, or --set batch.accumulation=4, or --set batch.micro=4"),
    ((), 3, "batch.global=8 is not divisible by dp=3: every data-parallel rank takes the same number of "
     "samples; --set batch.global=6 or 9"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "world", "message"), BATCHES)
def test_batch_identity(overrides, world, message):
    assert message in only("zero1", *overrides, world=world)


def test_the_json_may_state_what_the_recipe_leaves_open(written):
    layout = plan(written(train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=4)).layout
    assert (layout.micro, layout.accumulation) == (2, 4)


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


def test_sequence_parallelism_is_for_tensor_ranks_that_divide_the_sequence(written):
    on = "parallel.sequence=true"
    alone = only("zero1", on)
    assert "parallel.sequence=true with parallel.tp=1" in alone and "--set parallel.tp=2" in alone
    odd = only("zero1", on, "parallel.tp=2", "sequence_length=255", world=2)
    assert "sequence_length=255 is not divisible by parallel.tp=2" in odd and "254" in odd
    by_json = only(written(parallel__tensor=2), on, "sequence_length=255", world=2)
    assert "parallel.tp=2 (" in by_json
    assert "pipeline" not in plan("zero1", "parallel.tp=2", world=2).ds


def test_with_sequence_parallelism_stages_send_what_each_tensor_rank_has(written):
    degrees = ("parallel.tp=2", "parallel.pp=2", "parallel.sequence=true")
    sent = plan("3d", *degrees, world=4).ds["pipeline"]
    assert sent == {"pipe_partitioned": False, "grad_partitioned": False}
    assert "pipeline" not in plan("3d", *degrees[:2], world=4).ds
    stated = written(base="3d", pipeline={"grad_partitioned": True})
    assert "sends its own positions" in only(stated, *degrees, world=4)


def test_chunks_of_a_cut_sequence_are_not_partitioned_again():
    sequence = ("parallel.tp=2", "parallel.sequence=true")
    found = only("zero3_cpu_checkpointing", *sequence, "activation_checkpointing=full", world=2)
    assert "partition_activations=true with parallel.sequence=true" in found, "on a CPU, whose auto is true"
    # Where nothing is recomputed by DeepSpeed, the key does nothing.
    assert plan("zero3_cpu_checkpointing", *sequence, "activation_checkpointing=selective", world=2)


def test_padding():
    assert [padded_vocab(50257, tp) for tp in (1, 2, 4, 8)] == [50304, 50432, 50688, 51200]
    assert padded_vocab(128, 1) == 128 and padded_vocab(509, 2) == 512
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


# --- offload and NVMe


def test_offload_is_named():
    assert [plan(name).offload for name in ("zero3", "zero2_offload", "zero3_offload")] == [
        "none", "optimizer", "optimizer+parameters"
    ]  # fmt: skip


def test_the_optimizer_can_be_offloaded_from_stage_1(written):
    assert plan(written(zero_optimization__offload_optimizer={"device": "cpu"})).offload == "optimizer"


def test_nvme_wants_a_directory_libaio_and_a_compiler(tmp_path, nvme):
    result = plan("zero_infinity", environ=nvme)
    assert result.offload == "nvme"
    zero = result.ds["zero_optimization"]
    assert zero["offload_param"]["nvme_path"] == zero["offload_optimizer"]["nvme_path"] == str(tmp_path)
    assert "MEGARECIPES_NVME is not set" in problems("zero_infinity", environ={})[0]
    bare = dataclasses.replace(CPU, libaio=False, compiler=False)
    found = "\n".join(problems("zero_infinity", environ=nvme, machine=bare))
    assert "apt-get install libaio-dev" in found and "install g++ and ninja" in found
    without_nvcc = dataclasses.replace(GPU, cuda_compiler=False)
    found = problems("zero_infinity", environ=nvme, machine=without_nvcc)
    assert "set CUDA_HOME" in "\n".join(found)


def test_nvme_paths_that_cannot_be_written(tmp_path, written):
    file = tmp_path / "file"
    file.touch()
    for path, reason in ((tmp_path / "no", "does not exist"), (file, "is not a directory")):
        found = only("zero_infinity", environ={"MEGARECIPES_NVME": str(path)})
        assert found.startswith(f"$MEGARECIPES_NVME={path}: {reason}")
    path = written(base="zero_infinity", zero_optimization__offload_param__nvme_path="/no/such")
    found = only(path, environ={"MEGARECIPES_NVME": str(tmp_path)})
    assert found.startswith(f"{path}: zero_optimization.offload_param.nvme_path=/no/such: does not exist")


def test_a_read_only_nvme_path(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)  # root may write anywhere
    assert "is not writable" in only("zero_infinity", environ={"MEGARECIPES_NVME": str(tmp_path)})


def test_nvme_rules_of_deepspeed(written, nvme):
    path = written(base="zero_infinity", zero_optimization__stage3_prefetch_bucket_size="auto")
    assert "set it to 0" in only(path, environ=nvme)
    path = written(zero_optimization={"stage": 2, "offload_optimizer": {"device": "nvme"}})
    assert "DeepSpeed swaps to NVMe in stage 3 only" in only(path, environ=nvme)


# --- all at once


def test_all_problems_come_at_once(written):
    path = written(
        scheduler={"type": "OneCycle"},
        zero_optimisation={},
        gradient_clipping=3,
        fp16={"enabled": True},
        zero_optimization__stage=2,
    )
    found = problems(path, "parallel.tp=4", "parallel.pp=7", "batch.micro=3", world=28)
    for part in (
        "scheduler",
        "zero_optimisation",
        "gradient_clipping",
        "no fp16",
        "heads=6",
        "pp=7 is more",
        "stage=2",
        "batch.micro=3",
    ):
        assert len([line for line in found if part in line]) == 1, part
    assert len(found) == 8


def test_resolving_changes_nothing_it_was_given():
    recipe = catalog.load()
    before = recipe.model_dump()
    first, second = resolve(recipe, "zero3", 1, CPU), resolve(recipe, "zero3", 1, CPU)
    assert recipe.model_dump() == before and isinstance(recipe, Recipe)
    assert first.ds == second.ds and first.ds is not second.ds and first.recipe is recipe
