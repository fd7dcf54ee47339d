"""Values in a DeepSpeed JSON: what does not fit is refused, with reasons; DeepSpeed takes what is left."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ds_configs import known_keys
from ds_configs.findings import Findings
from ds_configs.jsonfile import FOLDER, ConfigError
from ds_configs.plan import Machine, Plan
from ds_configs.resolver import resolve
from recipes import catalog
from recipes.schema import Recipe

GPU = Machine("cuda", fp16=True, bf16=True, compiler=True, libaio=True)
CPU = dataclasses.replace(GPU, accelerator="cpu", lacks=frozenset({"wandb", "comet_ml"}))
STAGES = {stage: json.loads((FOLDER / f"zero{stage}.json").read_text()) for stage in range(4)}
STAGES["offload"] = json.loads((FOLDER / "zero3_offload.json").read_text())


@functools.cache
def recipe(sets: tuple[str, ...]) -> Recipe:
    return catalog.load("default", sets)


def changed(config: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A copy with a dotted key set."""
    config = copy.deepcopy(config)
    *sections, last = key.split(".")
    section = config
    for name in sections:
        section[name] = section.get(name) if isinstance(section.get(name), dict) else {}
        section = section[name]
    section[last] = value
    return config


@pytest.fixture
def made(tmp_path: Path):
    """The plan of the default recipe with a JSON of `STAGES` in which dotted keys are changed."""

    def make(base: Any, *sets: str, world: int = 1, machine: Machine = CPU, **changes: Any) -> Plan:
        config = STAGES[base]
        for key, value in changes.items():
            config = changed(config, key.replace("__", "."), value)
        path = tmp_path / "mine.json"
        path.write_text(json.dumps(config))
        return resolve(recipe(sets), path, world, machine)

    return make


def only(made, base: Any, *sets: str, **changes: Any) -> str:
    """The one problem, without the file's name."""
    with pytest.raises(ConfigError) as error:
        made(base, *sets, **changes)
    assert len(error.value.problems) == 1, error.value
    return str(error.value).split("mine.json: ")[1]


# --- one value

REFUSED = {
    "steps_per_print": (0, "=0: must be a whole number from 1, or null; write one, or remove the key"),
    "communication_data_type": ("fp64", '="fp64": must be fp16, bf16 or fp32 in any case;'),
    "prescale_gradients": (1, "=1: must be true or false;"),
    "gradient_predivide_factor": (0, "=0: must be a number above 0"),
    "log_level": ("loud", "must be debug, info, warning, error or critical"),
    "managed_gradient_accumulation": (False, "=false: a step's end is left to DeepSpeed's counting"),
    "zero_optimization.reduce_bucket_size": (-1, "=-1: must be a whole number from 1 to 100,000,000,000"),
    "zero_optimization.allgather_bucket_size": (3, "=3: must be an even number from 2 to"),
    "zero_optimization.sub_group_size": (1e30, "=1e+30: must be a whole number from 1"),
    "zero_optimization.load_from_fp32_weights": (False, "=false: DeepSpeed reads and writes no checkpoints"),
    "zero_optimization.elastic_checkpoint": (True, "=true: DeepSpeed reads and writes no checkpoints"),
    "zero_optimization.compute_grad_norm": (False, "=false: a run's records have the gradient norm"),
    "zero_optimization.zenflow": ({"topk_ratio": 0.1}, "later, which is another rule of descent"),
    "zero_optimization.overlap_comm": ("yes", '="yes": must be true or false'),
    "zero_optimization.leaf_module": ("x", '="x": is a section; write an object'),
    "fp16.loss_scale": (-1, "=-1: must be a number from 0 to 4,294,967,296"),
    "fp16.loss_scale_window": (0, "=0: must be a whole number from 1"),
    "fp16.initial_scale_power": (2000, "=2000: must be a whole number from 0 to 32"),
    "fp16.hysteresis": (True, "=true: must be a whole number from 1"),
    "fp16.min_loss_scale": ("1e9", '="1e9": must be a whole number from 1'),
    "bf16.check_grad_overflow": ([], "=[]: must be true or false"),
    "optimizer.params.bias_correction": (False, "=false: without it, it is another rule of descent"),
    "optimizer.params.foreach": (0.5, "=0.5: must be true or false"),
    "data_types.grad_accum_dtype": ("float", '="float": must be fp16, bf16 or fp32'),
    "data_types.keep_in_fp32_modules": ("norm", 'must be a list of texts, or "auto"'),
    "pipeline.stages": (2, "=2: DeepSpeed reads it nowhere; parallel.pipeline is"),
    "aio.block_size": (0.5, "=0.5: must be a whole number from 1"),
    "comms_logger.prof_ops": (["all_reduce", 1], "must be a list of texts"),
    "flops_profiler.profile_step": (-1, "=-1: must be a whole number from 1"),
    "timers.throughput.enabled": ("on", '="on": must be true or false'),
    "wandb.project": (3, "=3: must be text"),
}


@pytest.mark.parametrize("key", REFUSED)
def test_a_value_of_another_kind_is_refused(made, key):
    value, message = REFUSED[key]
    found = only(made, 1, **{key: value})
    assert found.startswith(key) and message in found


def test_numbers_without_a_value_are_refused(made):
    for value in (float("nan"), float("inf"), 10**400, 1e308 * 10):
        with pytest.raises(ConfigError, match="fp16.loss_scale|NaN|Infinity|an integer of"):
            made(1, fp16__loss_scale=value)


def test_null_is_an_absent_key_and_5e8_a_whole_number(made):
    nulls = {"gradient_clipping": None, "bf16__immediate_grad_update": None, "aio": None}
    assert made(1, **nulls).ds == made(1).ds
    size = made(1, zero_optimization__reduce_bucket_size=5e8).ds["zero_optimization"]["reduce_bucket_size"]
    assert size == 500_000_000 and isinstance(size, int)
    assert made(1, steps_per_print=None).ds["steps_per_print"] is None, "DeepSpeed prints nothing then"


WRONG = (True, 0, -1, 0.5, 1e30, "auto", "1e9", "", [], [1], {}, {"a": 1}, None)


def trials() -> Iterator[tuple[str, Any]]:
    for name, keys in known_keys.KEYS.items():
        for key in keys:
            yield from ((f"{name}.{key}" if name else key, value) for value in WRONG)


def test_every_key_with_every_kind_of_value_is_refused_or_taken_by_deepspeed(made):
    """DeepSpeed's own models are the second judge; what it asserts later, a run of each key has shown."""
    from launch.training import deepspeed_judgement

    refused, taken, left_to_deepspeed = 0, 0, []
    for key, value in trials():
        findings = Findings("")
        known_keys.check(changed(STAGES[1], key, value), findings)
        refused += bool(findings.problems)
        if findings.problems:
            assert all(each.rule and each.fix for each in findings.problems), findings.problems
            continue
        try:
            plan = made(1, **{key: value})
        except ConfigError as error:
            assert all(each.rule and each.fix for each in error.problems), error
            continue
        try:
            deepspeed_judgement.check(plan, "mine.json")
            taken += 1
        except ConfigError as error:
            left_to_deepspeed.append(key)
            assert "DeepSpeed refuses it (" in str(error)
    assert refused > 1000 and taken > 150
    assert set(left_to_deepspeed) == {"compile"}, "a section that it alone reads"


# --- values that others rule out

TOGETHER = [
    ((2, {"prescale_gradients": True}), "prescale_gradients=true with zero_optimization.stage=2: stages 2"),
    ((3, {"gradient_predivide_factor": 2}), "gradient_predivide_factor=2 with zero_optimization.stage=3"),
    ((1, {"fp16__min_loss_scale": 2**17}), "=131072 with fp16.initial_scale_power=16: the search starts at"),
    ((1, {"data_types__param_dtype": "fp32"}), "param_dtype=fp32 in a run of bf16: fp16 and bf16 decide"),
    ((1, {"bf16__bf16_optimizer_states": True}), "needs bf16.bf16_master_weights_and_grads"),
    ((1, {"bf16__bf16_master_weights_and_grads": True}), "only DeepSpeed's compiled CPU Adam steps such"),
    ((1, {"fp16__fp16_master_weights_and_grads": True}), "=true in a run of bf16: is for fp16"),
    ((0, {"bf16__bf16_master_weights_and_grads": True}), "stage=0: is for sharded states"),
    ((1, {"optimizer__params__fp32_optimizer_states": False}), "is read by DeepSpeed's CPU Adam alone"),
    ((1, {"optimizer__params__bias_correction": True}), "torch's AdamW, which has it, takes no such key"),
    (
        ("offload", {"optimizer__params__foreach": True, "optimizer__params__torch_adam": False}),
        "is read by torch's AdamW alone",
    ),
    (
        (1, {"optimizer__params__foreach": True, "optimizer__params__fused": True}),
        "are both true: they are two forms of one step; remove foreach",
    ),
    ((2, {"zero_optimization__zero_hpz_partition_size": 2}), "with zero_optimization.stage=2: is of stage 3"),
    ((3, {"zero_optimization__zero_hpz_partition_size": 2}), "=2 with dp=1: the data-parallel ranks are"),
    ((1, {"zero_optimization__pipeline_loading_checkpoint": True}), "is of stage 3; remove the key"),
    ((3, {"zero_optimization__stage3_module_granularity_threshold": 1}), "keep weights that no checkpoint"),
    (("offload", {"zero_optimization__offload_optimizer__super_offload": True}), "is for a GPU next to"),
    (
        (3, {"zero_optimization__stage3_prefetch_bucket_size": 0,
             "zero_optimization__offload_optimizer": {
                 "device": "nvme", "nvme_path": "/", "buffer_count": 3}}),
        "=3 with device=nvme: a weight, its gradient and Adam's two moments are in buffers at once",
    ),
    ((1, {"aio__use_gds": True}), "GPUDirect Storage reads into a GPU's memory"),
    ((1, {"autotuning__enabled": True}), "ends such a process after autotuning.end_profile_step"),
    ((1, {"wandb__enabled": True}), "the package wandb is missing; pip install wandb"),
    ((1, {"comet__enabled": True}), "the package comet_ml is missing; pip install comet_ml"),
    ((1, {"csv_monitor": {"enabled": True, "output_path": "/dev/null/x"}}), "/dev/null is not a directory"),
    ((1, {"tensorboard": {"enabled": True, "output_path": "x" * 300}}), "too long: tensorboard writes there"),
    ((1, {"flops_profiler": {"enabled": True, "output_file": "/"}}), "=/: is a directory"),
    ((1, {"flops_profiler": {"enabled": True, "output_file": "x" * 300}}), "its name is too long"),
    (
        (1, {"activation_checkpointing": {"cpu_checkpointing": True}}, "activation_checkpointing=full"),
        "empties whole activations before it has copied them; set partition_activations to \"auto\"",
    ),
    ((1, {"pipeline__activation_checkpoint_interval": 1}), "what is recomputed is the recipe's"),
    (
        (1, {"activation_checkpointing": {"partition_activations": True,
                                          "contiguous_memory_optimization": True}},
         "activation_checkpointing=full"),
        "with number_checkpoints=null: DeepSpeed makes room for so many, and the recipe has 6; set number_",
    ),
    (
        (1, {"activation_checkpointing": {"contiguous_memory_optimization": True, "number_checkpoints": 9}}),
        "DeepSpeed has it for partitioned activations only",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("case", "message"), TOGETHER, ids=[message[:40] for _, message in TOGETHER])
def test_values_that_do_not_go_together_are_refused(made, case, message):
    base, changes, *sets = case
    assert message in only(made, base, *sets, **changes)


def test_a_pipeline_has_no_timers(made):
    for key in ("wall_clock_breakdown", "flops_profiler.enabled"):
        found = only(made, 1, "parallel.pp=2", world=2, **{key: True})
        assert f"{key}=true with parallel.pp=2: DeepSpeed 0.19 starts a timer" in found
        assert made(1, **{key: True}).layout.pp == 1


def test_what_goes_together_is_taken(made):
    scatter = {"zero_optimization__reduce_scatter": False}
    assert made(2, prescale_gradients=True, gradient_predivide_factor=2, **scatter).zero_stage == 2
    assert made(0, prescale_gradients=True, gradient_predivide_factor=2).zero_stage == 0
    assert made(1, fp16__min_loss_scale=2**17, fp16__loss_scale=128).zero_stage == 1, "none is searched for"
    states = {"bf16__bf16_master_weights_and_grads": True, "bf16__bf16_optimizer_states": True}
    (notice,) = made(1, **states).notices
    assert notice.text.startswith("optimizer: steps weights and Adam's moments in bf16, as ")
    assert made("offload", bf16__bf16_master_weights_and_grads=True).zero_stage == 3
    both = {**states, "optimizer__params__fp32_optimizer_states": False}
    assert made("offload", **both).zero_stage == 3
    assert "set optimizer.params.fp32_optimizer_states to false" in only(made, "offload", **states)
    assert made(3, zero_optimization__zero_hpz_partition_size=2, world=2).layout.dp == 2


# --- what is said


def test_what_no_test_has_run_is_named(made):
    def said(**changes: Any) -> list[str]:
        return [notice.text for notice in made(3, **changes).notices if notice.key == "unchecked"]

    assert said(compile={"deepcompile": False}, autotuning={"enabled": False}) == []
    (text,) = said(compile={"deepcompile": True}, zero_optimization__leaf_module__names=["x"])
    assert text.startswith("unchecked: compile.deepcompile, zero_optimization.leaf_module: passed on to")


def test_checkpointing_without_recomputation_says_that_it_does_nothing():
    def said(*sets: str) -> list[str]:
        plan = resolve(catalog.load("default", sets), "zero3_cpu_checkpointing", 1, CPU)
        return [notice.text for notice in plan.notices if notice.key == "activation_checkpointing"]

    assert "partition_activations and cpu_checkpointing of ds_configs/" in said()[0]
    assert "do nothing: the recipe recomputes no layer" in said()[0]
    assert said("activation_checkpointing=full") == []


def test_the_comms_logger_says_what_it_does_not_see(made):
    logger = {"comms_logger": {"enabled": True}}
    assert not made(1, **logger).notices
    (notice,) = made(1, "parallel.tp=2", world=2, **logger).notices
    assert notice.text == (
        "comms_logger: sees DeepSpeed's own collectives; those of tensor parallelism go through torch and "
        "are missing in it"
    )
