"""Values in a DeepSpeed JSON: what does not fit is refused, with reasons; DeepSpeed takes what is left."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from resolved import changed, only, plan, problems, shipped, written

from ds_configs import known_keys
from ds_configs.findings import ConfigError, Findings
from ds_configs.plan import ANY_GPU, HOST
from ds_configs.resolver import resolve
from recipes import catalog

CPU = dataclasses.replace(ANY_GPU, device=HOST, lacks=frozenset({"wandb"}))
JSONS = {**{stage: f"zero{stage}" for stage in range(4)}, "offload": "zero3_offload"}


@pytest.fixture
def made(tmp_path):
    """The plan of the default recipe with a JSON of `JSONS` in which dotted keys are changed."""

    def make(base: Any, changes: dict[str, Any], *sets: str, world: int = 1):
        return plan(written(tmp_path, JSONS[base], changes), *sets, world=world, machine=CPU)

    return make


# --- refusals

LONG = "x" * 300
ZERO, OFFLOAD = "zero_optimization", "zero_optimization.offload_optimizer"
HALF = "bf16.bf16_master_weights_and_grads"
CHECKPOINTS = "activation_checkpointing"
# JSON of `JSONS`, what is changed in it (the last key is the one that is refused), settings of the recipe.
REFUSED: tuple[tuple[Any, ...], ...] = (
    # keys that DeepSpeed does not read, no longer reads, or must not read here
    (1, {"zero_optimisation": {"stage": 3}}),
    (1, {"scheduler": {"type": "WarmupLR"}}),
    (1, {"sparse_attention": {}}),
    (1, {"amp": {"enabled": True}}),
    (1, {"curriculum_learning": {}}),
    (1, {"progressive_layer_drop": {}}),
    (1, {"eigenvalue": {}}),
    (1, {"compression_training": {}}),
    (1, {"tensor_parallel": {"autotp_size": 2}}),
    (1, {"compile": {}}),
    (1, {"compile": {"deepcompile": True}}),
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
    (1, {"torch_autocast.enabled": True}),
    (1, {"gradient_allreduce_op": "sum"}),
    (1, {"gradient_predivide_factor": "auto"}),
    (1, {"timers.throughput.enabled": "auto"}),
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
    (1, {"aio.block_size": 0.5}),
    (1, {"comms_logger.prof_ops": ["all_reduce", 1]}),
    (1, {"flops_profiler.profile_step": -1}),
    (1, {"timers.throughput.enabled": "on"}),
    (1, {"gradient_clipping": True}, "optimizer.clip=1.0"),
    (1, {"optimizer.params.weight_decay": False}, "optimizer.weight_decay=0.0"),
    (1, {"optimizer.params.betas": [False, 0.95]}, "optimizer.betas=[0.0,0.95]"),
    (1, {"wandb.project": 3}),
    # what others rule out
    (1, {f"{OFFLOAD}.device": "cpu", f"{ZERO}.stage": 0}, "precision=fp32"),
    (1, {OFFLOAD: {"device": "cpu", "ratio": 0.5}, f"{ZERO}.stage": 2}, "precision=fp32"),
    (3, {"zero_optimization.zero_quantized_weights": True}, "precision=fp32"),
    (2, {"prescale_gradients": True}),
    (3, {"gradient_predivide_factor": 2}),
    (1, {"fp16.min_loss_scale": 2**17}),
    (1, {"fp16.enabled": True, "fp16.min_loss_scale": 0}),
    (1, {"zero_optimization.sub_group_size": -1}),
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
    (1, {"wall_clock_breakdown": True}, "parallel.pp=2"),
    (1, {"flops_profiler.enabled": True}, "parallel.pp=2"),
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
    # what follows from another problem is none of its own
    (
        1,
        {f"{CHECKPOINTS}.contiguous_memory_optimization": True, f"{CHECKPOINTS}.cpu_checkpointing": True}
        | {f"{CHECKPOINTS}.number_checkpoints": 99, f"{CHECKPOINTS}.partition_activations": "yes"},
        "activation_checkpointing=full",
    ),
    (
        1,
        {f"{CHECKPOINTS}.contiguous_memory_optimization": True, f"{CHECKPOINTS}.number_checkpoints": 99}
        | {f"{CHECKPOINTS}.cpu_checkpointing": True},
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


def named(changes: dict[str, Any]) -> str:
    (*_, (key, value)) = changes.items()
    return f"{key}={value}"[:60]


@pytest.mark.parametrize(("base", "changes", "sets"), [(row[0], row[1], row[2:]) for row in REFUSED],
                         ids=[named(row[1]) for row in REFUSED])  # fmt: skip
def test_what_cannot_run_is_refused_by_its_key_with_a_rule_and_a_fix(base, changes, sets, tmp_path):
    world = 2 if "parallel.pp=2" in sets else 1
    (problem,) = problems(written(tmp_path, JSONS[base], changes), *sets, world=world, machine=CPU)
    assert problem.key == [*changes][-1] and problem.rule and problem.fix


SENTENCES = (
    ({"zero_optimisation": {}},
     "zero_optimisation: unknown key, which DeepSpeed would ignore; did you mean zero_optimization?"),
    ({"fp16.los_scale": 0},
     "fp16.los_scale: unknown key; did you mean loss_scale or min_loss_scale or loss_scale_window?"),
    ({"amp": {}}, "amp: was removed from DeepSpeed or is deprecated; use fp16 or bf16"),
    ({"bfloat16": {}},
     "bfloat16={}: is another name of bf16, which stands there, too; remove one of them"),
    ({"steps_per_print": 0},
     "steps_per_print=0: must be a whole number from 1, or null; write 1 or more"),
    ({"zero_optimization.allgather_bucket_size": 3},
     "zero_optimization.allgather_bucket_size=3: must be an even number from 2 to 100,000,000,000; write one"),
    ({"gradient_allreduce_op": "sum"},
     "gradient_allreduce_op=\"sum\": a step's gradient is the mean over its global batch, whatever dp is; "
     "write \"mean\""),
)  # fmt: skip


@pytest.mark.parametrize(("changes", "sentence"), SENTENCES, ids=[named(changes) for changes, _ in SENTENCES])
def test_refusals_are_sentences(changes, sentence, tmp_path):
    assert only(path := written(tmp_path, "zero1", changes), machine=CPU) == f"{path}: {sentence}"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400], ids=["NaN", "infinity", "10^400"])
def test_numbers_without_a_value_are_refused(value, made):
    with pytest.raises(ConfigError, match="fp16.loss_scale|NaN|Infinity|an integer of"):
        made(1, {"fp16.loss_scale": value})


def test_no_fix_of_a_value_removes_its_key():
    """DeepSpeed's default may be another: without warmup_num_steps it warms up for 1,000 steps."""
    for name, keys in known_keys.KEYS.items():
        assert not [f"{name}.{key}" for key, kind in keys.items() if "remove" in kind.fix]


HALF_STATES = {HALF: True, "bf16.bf16_optimizer_states": True}
SUMS = {"prescale_gradients": True, "gradient_predivide_factor": 2}
# JSON of `JSONS`, what is changed in it, settings of the recipe.
TAKEN: tuple[tuple[Any, ...], ...] = (
    (1, {"gradient_clipping": 1}, "optimizer.clip=1.0"),
    (1, {"optimizer.params.weight_decay": 0}, "optimizer.weight_decay=0.0"),
    (1, {"optimizer.params.betas": [0, 0.95]}, "optimizer.betas=[0.0,0.95]"),
    (1, {"wall_clock_breakdown": True}),
    (1, {"flops_profiler.enabled": True}),
    (2, {"zero_optimization.reduce_scatter": False, **SUMS}),
    (0, SUMS),
    (1, {"fp16.min_loss_scale": 2**17, "fp16.loss_scale": 128}),  # none is searched for
    (1, {"fp16.min_loss_scale": 0}),
    ("offload", {HALF: True}),
    ("offload", {**HALF_STATES, "optimizer.params.fp32_optimizer_states": False}),
    (3, {"zero_optimization.zero_hpz_partition_size": 2}, "parallel.dp=2"),
)


@pytest.mark.parametrize("row", TAKEN, ids=[named(row[1]) for row in TAKEN])
def test_what_goes_together_is_taken(row, made):
    base, changes, *sets = row
    found = made(base, changes, *sets, world=2 if "parallel.dp=2" in sets else 1)
    assert found.zero_stage == (3 if base == "offload" else base)


def test_a_factor_that_stage_3_divides_by_twice_is_refused(made):
    changes = {"zero_optimization.reduce_scatter": False, "gradient_predivide_factor": 2}
    assert made(3, changes).zero_stage == made(2, changes, "parallel.dp=2", world=2).zero_stage + 1
    with pytest.raises(ConfigError, match="gradient_predivide_factor=2 with dp=2"):
        made(3, changes, "parallel.dp=2", world=2)


def test_null_is_an_absent_key_and_5e8_a_whole_number(made):
    nulls = {"gradient_clipping": None, "bf16.immediate_grad_update": None, "aio": None}
    assert made(1, nulls).ds == made(1, {}).ds
    bucket = {"zero_optimization.reduce_bucket_size": 5e8}
    size = made(1, bucket).ds["zero_optimization"]["reduce_bucket_size"]
    assert size == 500_000_000 and isinstance(size, int)
    assert made(1, {"steps_per_print": None}).ds["steps_per_print"] is None, "DeepSpeed prints nothing then"


WRONG = (True, 0, -1, 0.5, 1e30, "auto", "1e9", "", [], [1], {}, {"a": 1}, None)


def trials() -> Iterator[tuple[str, Any]]:
    for name, keys in known_keys.KEYS.items():
        for key in keys:
            yield from ((f"{name}.{key}" if name else key, value) for value in WRONG)


def test_every_key_with_every_kind_of_value_is_refused_or_taken_by_deepspeed(made):
    """DeepSpeed's own models are the second judge; what it asserts later, a run of each key has shown."""
    from launch.training.job import check_by_deepspeed

    refused, taken, left_to_deepspeed = 0, 0, []
    for key, value in trials():
        findings = Findings("", changed(shipped("zero1"), {key: value}))
        known_keys.check(findings)
        refused += bool(findings.problems)
        if findings.problems:
            assert all(each.rule and each.fix for each in findings.problems), findings.problems
            continue
        try:
            plan = made(1, {key: value})
        except ConfigError as error:
            assert all(each.rule and each.fix for each in error.problems), error
            continue
        try:
            check_by_deepspeed(plan, "mine.json")
            taken += 1
        except ConfigError as error:
            left_to_deepspeed.append(key)
            assert "DeepSpeed refuses it (" in str(error)
    assert refused > 1000 and taken > 150
    assert set(left_to_deepspeed) == {"comet"}, "nothing here reads that section"


# --- what is said


# JSON of `JSONS`, what is changed, settings; the key of the notice, and how it begins ("": there is none).
NOTICES = (
    (1, {"checkpoint": {"tag_validation": "Warn"}}, (), "checkpoint", "checkpoint: without effect: DeepSpeed"),
    (1, {f"{ZERO}.elastic_checkpoint": True}, (), f"{ZERO}.elastic_checkpoint", f"{ZERO}.elastic_checkpoint: "),
    (1, {f"{ZERO}.elastic_checkpoint": False}, (), f"{ZERO}.elastic_checkpoint", ""),
    (1, {"pipeline.stages": 2}, (), "pipeline.stages", "pipeline.stages: without effect: DeepSpeed reads it n"),
    (1, {"pipeline.chunks": 4}, (), "pipeline.chunks", "pipeline.chunks: without effect: DeepSpeed reads no"),
    (1, {"zero_optimization": True}, (), ZERO, f"{ZERO}: true is stage 1"),
    (2, {f"{ZERO}.offload_param.device": "cpu"}, (), f"{ZERO}.offload_param",
     f"{ZERO}.offload_param: without effect: stage 2 does not shard parameters"),
    (3, {f"{ZERO}.sub_group_size": "auto"}, (), f"{ZERO}.sub_group_size",
     f'{ZERO}.sub_group_size: "auto" is DeepSpeed\'s default'),
    (1, {"offload_optimizer": {"device": "cpu"}}, (), "offload_optimizer",
     "offload_optimizer: without effect: it belongs into zero_optimization"),
    (1, {"cpu_offload": True}, (), "cpu_offload", "cpu_offload: without effect: it belongs into zero_"),
    (1, {"optimizer.eps": 1e-6}, (), "optimizer.eps", "optimizer.eps: without effect: it belongs into opti"),
    (1, {"gradient_checkpointing": 1}, (), "gradient_checkpointing", "gradient_checkpointing: without effect"),
    (1, HALF_STATES, (), "optimizer", "optimizer: steps weights and Adam's moments in bf16, as "),
    (3, {"aio.use_gds": False, "autotuning": {"enabled": False}}, (), "unchecked", ""),
    (3, {"zero_optimization.leaf_module.names": ["x"]}, (), "unchecked",
     "unchecked: zero_optimization.leaf_module: passed on to"),
    (1, {"comms_logger": {"enabled": True}}, (), "comms_logger", ""),
    (1, {"comms_logger": {"enabled": True}}, ("parallel.tp=2",), "comms_logger",
     "comms_logger: sees DeepSpeed's own collectives; those of tensor parallelism go through torch and are "
     "missing in it"),
)  # fmt: skip


@pytest.mark.parametrize(("base", "changes", "sets", "key", "said"), NOTICES)
def test_what_differs_or_was_never_run_is_said(base, changes, sets, key, said, made):
    found = made(base, changes, *sets, world=2 if sets else 1).notices
    texts = [notice.text for notice in found if notice.key == key]
    assert len(texts) == bool(said) and all(text.startswith(said) for text in texts)


def test_checkpointing_without_recomputation_says_that_it_does_nothing():
    def said(*sets: str) -> list[str]:
        plan = resolve(catalog.load("default", sets), "zero3_cpu_checkpointing", 1, CPU)
        return [notice.text for notice in plan.notices if notice.key == "activation_checkpointing"]

    assert "partition_activations and cpu_checkpointing of ds_configs/" in said()[0]
    assert "do nothing: the recipe recomputes no layer" in said()[0]
    assert said("activation_checkpointing=full") == []
