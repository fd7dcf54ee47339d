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
from ds_configs.plan import ANY_GPU, HOST, Machine, Plan
from ds_configs.resolver import resolve
from recipes import catalog
from recipes.schema import Recipe

GPU = ANY_GPU
CPU = dataclasses.replace(GPU, device=HOST, lacks=frozenset({"wandb"}))
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

    def make(
        base: Any,
        *sets: str,
        world: int = 1,
        machine: Machine = CPU,
        changes: dict | None = None,
        **more: Any,
    ) -> Plan:
        config = STAGES[base]
        for key, value in {**(changes or {}), **more}.items():
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


# --- refusals

LONG = "x" * 300
ZERO, OFFLOAD = "zero_optimization", "zero_optimization.offload_optimizer"
HALF = "bf16.bf16_master_weights_and_grads"
CHECKPOINTS = "activation_checkpointing"
# JSON of `STAGES`, what is changed in it (the last key is the one that is refused), settings of the recipe.
REFUSED: tuple[tuple[Any, ...], ...] = (
    # keys that DeepSpeed does not read, no longer reads, or must not read here
    (1, {"zero_optimisation": {"stage": 3}}),
    (1, {"scheduler": {"type": "WarmupLR"}}),
    (1, {"sparse_attention": {}}),
    (1, {"checkpoint": {"tag_validation": "Warn"}}),
    (1, {"amp": {"enabled": True}}),
    (1, {"curriculum_learning": {}}),
    (1, {"progressive_layer_drop": {}}),
    (1, {"eigenvalue": {}}),
    (1, {"compression_training": {}}),
    (1, {"tensor_parallel": {"autotp_size": 2}}),
    (1, {"bfloat16": {"enabled": True}}),
    (1, {"zero_optimization.stag": 1}),
    (1, {"zero_optimization.cpu_offload": "yes"}),
    (1, {"optimizer.params.max_grad_norm": 1.0}),
    (1, {"fp16.los_scale": 0}),
    (1, {"bf16.enable": True}),
    (1, {"optimizer.params.momentum": 0.9}),
    (1, {"parallel.tensr": 2}),
    (1, {"activation_checkpointing.profil": True}),
    # values of another kind
    (1, {"fp16": True}),
    (1, {"zero_optimization": True}),
    (1, {"torch_autocast.enabled": True}),
    (1, {"gradient_allreduce_op": "sum"}),
    (1, {"gradient_predivide_factor": "auto"}),
    (1, {"zero_optimization.sub_group_size": "auto"}),
    (1, {"zero_optimization.stage": 4}),
    (1, {"zero_optimization.stage": True}),
    (2, {"zero_optimization.offload_optimizer.device": "disk"}),
    (1, {"steps_per_print": 0}),
    (1, {"communication_data_type": "fp64"}),
    (1, {"prescale_gradients": 1}),
    (1, {"gradient_predivide_factor": 0}),
    (1, {"log_level": "loud"}),
    (1, {"managed_gradient_accumulation": False}),
    (1, {"zero_optimization.reduce_bucket_size": -1}),
    (1, {"zero_optimization.allgather_bucket_size": 3}),
    (1, {"zero_optimization.sub_group_size": 1e30}),
    (1, {"zero_optimization.load_from_fp32_weights": False}),
    (1, {"zero_optimization.elastic_checkpoint": True}),
    (1, {"zero_optimization.compute_grad_norm": False}),
    (1, {"zero_optimization.zenflow": {"topk_ratio": 0.1}}),
    (1, {"zero_optimization.overlap_comm": "yes"}),
    (1, {"zero_optimization.leaf_module": "x"}),
    (1, {"fp16.loss_scale": -1}),
    (1, {"fp16.loss_scale_window": 0}),
    (1, {"fp16.initial_scale_power": 2000}),
    (1, {"fp16.hysteresis": True}),
    (1, {"fp16.min_loss_scale": "1e9"}),
    (1, {"bf16.check_grad_overflow": []}),
    (1, {"optimizer.params.bias_correction": False}),
    (1, {"optimizer.params.foreach": 0.5}),
    (1, {"data_types.grad_accum_dtype": "float"}),
    (1, {"data_types.keep_in_fp32_modules": "norm"}),
    (1, {"pipeline.stages": 2}),
    (1, {"aio.block_size": 0.5}),
    (1, {"comms_logger.prof_ops": ["all_reduce", 1]}),
    (1, {"flops_profiler.profile_step": -1}),
    (1, {"timers.throughput.enabled": "on"}),
    (1, {"wandb.project": 3}),
    # what others rule out
    (1, {f"{OFFLOAD}.device": "cpu", f"{ZERO}.stage": 0}, "precision=fp32"),
    (1, {f"{ZERO}.offload_param.device": "cpu", f"{ZERO}.stage": 2}, "precision=fp32"),
    (1, {OFFLOAD: {"device": "cpu", "ratio": 0.5}, f"{ZERO}.stage": 2}, "precision=fp32"),
    (3, {"zero_optimization.zero_quantized_weights": True}, "precision=fp32"),
    (2, {"prescale_gradients": True}),
    (3, {"gradient_predivide_factor": 2}),
    (1, {"fp16.min_loss_scale": 2**17}),
    (1, {"data_types.param_dtype": "fp32"}),
    (1, {"bf16.bf16_optimizer_states": True}),
    (1, {HALF: True}),
    (0, {HALF: True}),
    (1, {"fp16.fp16_master_weights_and_grads": True}),
    (1, {"optimizer.params.fp32_optimizer_states": False}),
    ("offload", {"optimizer.params.torch_adam": False, "optimizer.params.foreach": True}),
    (1, {"optimizer.params.foreach": True, "optimizer.params.fused": True}),
    ("offload", {HALF: True, "bf16.bf16_optimizer_states": True}),
    (2, {"zero_optimization.zero_hpz_partition_size": 2}),
    (3, {"zero_optimization.zero_hpz_partition_size": 2}),
    (1, {"zero_optimization.pipeline_loading_checkpoint": True}),
    (3, {"zero_optimization.stage3_module_granularity_threshold": 1}),
    ("offload", {"zero_optimization.offload_optimizer.super_offload": True}),
    (
        3,
        {
            f"{ZERO}.stage3_prefetch_bucket_size": 0,
            f"{OFFLOAD}.device": "nvme",
            f"{OFFLOAD}.nvme_path": "/",
            f"{OFFLOAD}.buffer_count": 3,
        },
    ),
    (1, {"aio.use_gds": True}),
    (1, {"autotuning.enabled": True}),
    (1, {"wandb.enabled": True}),
    (1, {"csv_monitor.enabled": True, "csv_monitor.output_path": "/dev/null/x"}),
    (1, {"tensorboard.enabled": True, "tensorboard.output_path": LONG}),
    (1, {"flops_profiler.enabled": True, "flops_profiler.output_file": "/"}),
    (1, {"flops_profiler.enabled": True, "flops_profiler.output_file": LONG}),
    (1, {"pipeline.activation_checkpoint_interval": 1}),
    (1, {f"{CHECKPOINTS}.cpu_checkpointing": True}, "activation_checkpointing=full"),
    (
        1,
        {f"{CHECKPOINTS}.partition_activations": True, f"{CHECKPOINTS}.contiguous_memory_optimization": True},
        "activation_checkpointing=full",
    ),
    (
        1,
        {f"{CHECKPOINTS}.number_checkpoints": 9, f"{CHECKPOINTS}.contiguous_memory_optimization": True},
        "activation_checkpointing=full",
    ),
    # what the recipe says otherwise
    (1, {"optimizer.type": "OneBitAdam"}),
    (1, {"optimizer.params.adam_w_mode": False}),
    (1, {"fp16.enabled": "yes"}),
    (1, {"train_batch_size": "8"}),
    (1, {"parallel.tensor": 0}),
    (1, {"parallel.pipeline": "two"}),
)


def test_what_cannot_run_is_refused_by_its_key_with_a_rule_and_a_fix(made):
    wrong = []
    for base, changes, *sets in REFUSED:
        try:
            wrong.append((changes, made(base, *sets, changes=changes).ds))
        except ConfigError as error:
            (*_, key) = changes
            if [each.key for each in error.problems] != [key] or not all(
                p.rule and p.fix for p in error.problems
            ):
                wrong.append((changes, str(error)))
    assert not wrong


SENTENCES = {
    "zero_optimisation": ({}, "unknown key, which DeepSpeed would ignore; did you mean zero_optimization?"),
    "fp16.los_scale": (0, "unknown key; did you mean loss_scale or min_loss_scale or loss_scale_window?"),
    "amp": ({}, "was removed from DeepSpeed or is deprecated; use fp16 or bf16"),
    "bfloat16": ({}, "is another name of bf16, which stands there, too; remove one of them"),
    "steps_per_print": (0, "must be a whole number from 1, or null; write one, or remove the key"),
    "zero_optimization.allgather_bucket_size": (
        3,
        "must be an even number from 2 to 100,000,000,000; write one, or remove the key",
    ),
    "pipeline.stages": (
        2,
        "DeepSpeed reads it nowhere; parallel.pipeline is the number of stages; remove the key",
    ),
}


def test_refusals_are_sentences(made):
    for key, (value, sentence) in SENTENCES.items():
        came = key if key in ("zero_optimisation", "amp") or "los_scale" in key else f"{key}={value}"
        assert only(made, 1, changes={key: value}) == f"{came}: {sentence}"


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
        findings = Findings("", changed(STAGES[1], key, value))
        known_keys.check(findings)
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
    assert set(left_to_deepspeed) == {"comet"}, "nothing here reads that section"


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
    assert made(3, zero_optimization__zero_hpz_partition_size=2, world=2).layout.dp == 2


# --- what is said


def test_what_no_test_has_run_is_named(made):
    def said(**changes: Any) -> list[str]:
        return [notice.text for notice in made(3, **changes).notices if notice.key == "unchecked"]

    assert said(aio__use_gds=False, autotuning={"enabled": False}) == []
    (text,) = said(zero_optimization__leaf_module__names=["x"])
    assert text.startswith("unchecked: zero_optimization.leaf_module: passed on to")


@pytest.mark.parametrize("section", [{}, {"deepcompile": True}, {"offload_activation": True}])
def test_a_section_that_nothing_reads_is_refused(made, section):
    assert "compile: is read by DeepSpeed's engine.compile() alone" in only(made, 1, compile=section)


@pytest.mark.parametrize(
    ("key", "setting", "value"),
    [
        ("gradient_clipping", "optimizer.clip=1.0", True),
        ("optimizer.params.weight_decay", "optimizer.weight_decay=0.0", False),
        ("optimizer.params.betas", "optimizer.betas=[0.0,0.95]", [False, 0.95]),
    ],
)
def test_true_is_no_1_and_1_is_one(made, key, setting, value):
    assert only(made, 1, setting, **{key: value}).startswith(f"{key}=")
    numbers = [*map(int, value[:1]), *value[1:]] if isinstance(value, list) else int(value)
    assert made(1, setting, **{key: numbers}).zero_stage == 1


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
