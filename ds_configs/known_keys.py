"""Which keys DeepSpeed 0.19.8 reads, and what value each may have.

DeepSpeed accepts unknown top-level keys in silence, so that a misspelt section does nothing, and asks after
many a value only when it meets it, in the middle of a start; here both are refused. Tests hold the tables
against the installed package.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from ds_configs.findings import Findings
from ds_configs.values import (
    JUDGED_LATER,
    SECTION,
    SWITCH,
    TEXT,
    TEXTS,
    Kind,
    count,
    never,
    number,
    only,
    shown,
    word,
)
from recipes.problems import did_you_mean

T = TypeVar("T")
Table = Mapping[str, Kind]


def _each(one: T, keys: str) -> dict[str, T]:
    return dict.fromkeys(keys.split(), one)


_DTYPE = word("fp16", "bf16", "fp32")
# Elements; DeepSpeed allocates a buffer of as many.
_BUFFER = count(1, 10**11)
_UNREAD = "DeepSpeed reads it nowhere"
_UNREAD_HERE = "DeepSpeed reads and writes no checkpoints here"
_RULE_OF_DESCENT = "is another rule of descent than the recipe's adamw"

TOP: Table = {
    **_each(
        SECTION,
        """
        optimizer fp16 bf16 torch_autocast data_types zero_optimization activation_checkpointing pipeline
        aio comms_logger tensorboard wandb csv_monitor comet flops_profiler autotuning compile
        timers
        """,
    ),
    **_each(
        JUDGED_LATER,
        """
        train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping
        gradient_allreduce_op
        """,
    ),
    **_each(
        SWITCH,
        """
        zero_allow_untested_optimizer zero_force_ds_cpu_optimizer prescale_gradients disable_allgather
        dump_state disable_python_gc wall_clock_breakdown memory_breakdown dataloader_drop_last
        use_data_before_expert_parallelism
        """,
    ),
    **_each(
        word("fp16", "bf16", "fp32", any_case=True),
        "communication_data_type seq_parallel_communication_data_type",
    ),
    "managed_gradient_accumulation": only(True, "a step's end is left to DeepSpeed's counting here"),
    "gradient_predivide_factor": number(0, above=True),
    "steps_per_print": count(1, null=True),
    "vocabulary_size": count(1),
    "log_level": word("debug", "info", "warning", "error", "critical", any_case=True),
    "datastates_ckpt": only(False, _UNREAD_HERE),
}

REMOVED = {
    "amp": "use fp16 or bf16",
    "elasticity": "remove the section; the batch is the recipe's",
    **_each("remove the key", "graph_harvesting sparse_gradients"),
    **_each(
        "remove the section",
        """
        compression_training curriculum_learning eigenvalue nebula progressive_layer_drop
        quantize_training sparse_attention
        """,
    ),
}

ZERO: Table = {
    **_each(SECTION, "offload_param offload_optimizer leaf_module"),
    **_each(
        SWITCH,
        """
        contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions overlap_comm
        stage3_gather_16bit_weights_on_model_save stage3_use_all_reduce_for_fetch_params
        stage3_allgather_sequential ignore_unused_parameters round_robin_gradients parameter_alignment
        zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients
        memory_efficient_linear pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings
        enable_sanity_checks save_muon_momentum_buffer_in_memory
        """,
    ),
    **_each(
        count(),
        """
        stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_model_persistence_threshold
        stage3_max_live_parameters stage3_max_reuse_distance
        """,
    ),
    "stage": JUDGED_LATER,
    "reduce_bucket_size": _BUFFER,
    "allgather_bucket_size": count(2, 10**11, multiple=2),
    "sub_group_size": count(1),
    "zero_hpz_partition_size": count(1),
    "compute_grad_norm": only(True, "a run's records have the gradient norm, and clipping needs it"),
    "load_from_fp32_weights": only(True, _UNREAD_HERE),
    "elastic_checkpoint": only(False, _UNREAD_HERE),
    "legacy_stage1": only(False, "DeepSpeed no longer has it"),
    "stage3_module_granularity_threshold": only(0, "modules below it keep weights that no checkpoint takes"),
    "zenflow": never(f"applies a part of the gradient later, which {_RULE_OF_DESCENT}"),
}

ZERO_REMOVED = {
    "cpu_offload": 'write "offload_optimizer": {"device": "cpu"}',
    "cpu_offload_param": 'write "offload_param": {"device": "cpu"}',
    "cpu_offload_use_pin_memory": 'write "pin_memory" within offload_optimizer or offload_param',
    "stage3_gather_fp16_weights_on_model_save": "write stage3_gather_16bit_weights_on_model_save",
    **_each("remove the key", "mics_shard_size mics_hierarchical_params_gather zeropp_loco_param"),
}

SECTIONS: dict[str, Table] = {
    "zero_optimization": ZERO,
    "zero_optimization.offload_optimizer": {
        "device": JUDGED_LATER,
        "nvme_path": TEXT,
        **_each(SWITCH, "pin_memory pipeline_read pipeline_write fast_init super_offload"),
        **_each(number(0, 1), "ratio cpuadam_cores_perc"),
        "buffer_count": count(1),
    },
    "zero_optimization.offload_param": {
        "device": JUDGED_LATER,
        "nvme_path": TEXT,
        "buffer_count": count(1),
        "buffer_size": _BUFFER,
        "max_in_cpu": count(),
        "pin_memory": SWITCH,
    },
    "zero_optimization.leaf_module": _each(TEXTS, "classes names name_suffixes"),
    "fp16": {
        "enabled": JUDGED_LATER,
        **_each(SWITCH, "auto_cast consecutive_hysteresis fp16_master_weights_and_grads"),
        "loss_scale": number(0, 2.0**32),
        "initial_scale_power": count(0, 32),
        **_each(count(1), "loss_scale_window hysteresis min_loss_scale"),
    },
    "bf16": {
        "enabled": JUDGED_LATER,
        **_each(
            SWITCH,
            """
            immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states
            """,
        ),
    },
    "torch_autocast": {"enabled": JUDGED_LATER, "dtype": _DTYPE, "lower_precision_safe_modules": TEXTS},
    "data_types": {
        **_each(_DTYPE, "grad_accum_dtype param_dtype buffer_dtype"),
        "keep_in_fp32_modules": Kind(
            f'{TEXTS.rule}, or "auto"', lambda value: value == "auto" or TEXTS.fits(value)
        ),
    },
    "optimizer": {"type": JUDGED_LATER, "params": SECTION, "legacy_fusion": SWITCH},
    "optimizer.params": {
        **_each(JUDGED_LATER, "lr betas eps weight_decay adam_w_mode"),
        "bias_correction": only(True, f"without it, it {_RULE_OF_DESCENT}"),
        **_each(SWITCH, "torch_adam fp32_optimizer_states foreach fused"),
    },
    "activation_checkpointing": {
        **_each(
            SWITCH,
            """
            partition_activations contiguous_memory_optimization cpu_checkpointing
            synchronize_checkpoint_boundary profile
            """,
        ),
        "number_checkpoints": count(1),
    },
    "pipeline": {
        **_each(SWITCH, "pipe_partitioned grad_partitioned use_reentrant"),
        "stages": only("auto", f"{_UNREAD}; parallel.pipeline is the number of stages"),
        "partition": only("best", f"{_UNREAD}; stages are cut by their work"),
        "seed_layers": only(False, f"{_UNREAD}; initial weights are a function of seed and name"),
        "activation_checkpoint_interval": JUDGED_LATER,
    },
    "aio": {
        **_each(count(1), "block_size queue_depth intra_op_parallelism"),
        **_each(SWITCH, "single_submit overlap_events use_gds"),
    },
    "comms_logger": {**_each(SWITCH, "enabled prof_all verbose debug"), "prof_ops": TEXTS},
    **dict.fromkeys(
        ("tensorboard", "csv_monitor"), {"enabled": SWITCH, **_each(TEXT, "output_path job_name")}
    ),
    "wandb": {"enabled": SWITCH, **_each(TEXT, "group team project")},
    "comet": {
        **_each(SWITCH, "enabled online"),
        "samples_log_interval": count(1),
        "mode": word("get", "create", "get_or_create"),
        **_each(TEXT, "project workspace api_key experiment_name experiment_key"),
    },
    "flops_profiler": {
        **_each(SWITCH, "enabled detailed"),
        "recompute_fwd_factor": number(0),
        **_each(count(1), "profile_step top_modules"),
        "module_depth": count(-1, 3),  # no model here has fewer levels, and DeepSpeed fails beyond the last
        "output_file": TEXT,
    },
    "timers": {"throughput": SECTION},
    "timers.throughput": _each(SWITCH, "enabled synchronized"),
    "parallel": _each(JUDGED_LATER, "tensor pipeline default_tensor default_pipeline"),  # ours
}

# DeepSpeed's sections that would decide what the recipe decides, or that our models have no part for.
REFUSED = {
    "scheduler": (
        "the schedule is the recipe's: --set schedule.kind=, schedule.warmup_steps=, schedule.decay_steps=, "
        "schedule.min_lr=",
        "remove the section",
    ),
    "tensor_parallel": (
        "is DeepSpeed's AutoTP, which trains with ZeRO 0 to 2 only; ours is set by parallel.tensor",
        "remove the section",
    ),
    "sequence_parallel_size": (
        "is DeepSpeed-Ulysses', which the models have not; Megatron's is the recipe's: parallel.sequence",
        "remove the key",
    ),
    "expert_parallel": ("the models have no experts", "remove the section"),
    "data_efficiency": ("what is in a batch is the recipe's (data.*, batch.*)", "remove the section"),
    "hybrid_engine": ("is for reinforcement learning", "remove the section"),
    "checkpoint": (
        "DeepSpeed saves nothing here: a run saves by itself (run.save_every, run.save_every_minutes)",
        "remove the section",
    ),
    "weight_quantization": ("is for inference", "remove the section"),
    "bfloat16": ("is the old name of bf16", "rename the section"),
}


def check(config: Mapping[str, Any], findings: Findings) -> dict[str, Any]:
    """Refuse keys that DeepSpeed does not read, no longer reads or must not read here, and unfit values.

    Returns a copy to go on with: without what was refused, without the keys that are null, which DeepSpeed
    does not bear everywhere, and with whole numbers as such (5e8).
    """
    return _usable("", config, {**TOP, "parallel": SECTION}, findings)


def unread(config: Mapping[str, Any]) -> list[str]:
    """Sections of a JSON that are handed on to DeepSpeed with whatever they hold: no table is about them."""
    known = {"": TOP, **SECTIONS}
    within = {"": config, **{name: lookup(config, name) for name in SECTIONS}}
    dotted = ((f"{name}.{key}" if name else key, key, name) for name in known for key in within[name] or ())
    return [
        full
        for full, key, name in dotted
        if known[name].get(key) is SECTION and full not in SECTIONS and lookup(config, full)
    ]


def _usable(name: str, section: Mapping[str, Any], known: Table, findings: Findings) -> dict[str, Any]:
    usable: dict[str, Any] = {}
    for key, value in section.items():
        dotted = f"{name}.{key}" if name else key
        if key not in known:
            _refuse_key(dotted, known, findings)
            continue
        kind = known[key]
        if value is None and not kind.null:
            continue
        open_ = value is None or (value == "auto" and kind is not SECTION)
        if not open_ and not kind.fits(value):
            findings.refuse(dotted, f"{dotted}={shown(value)}", kind.rule, kind.fix)
        elif isinstance(value, dict) and dotted in SECTIONS:
            usable[key] = _usable(dotted, value, SECTIONS[dotted], findings)
        else:
            usable[key] = int(value) if kind.whole and isinstance(value, float) else value
    return usable


def _refuse_key(dotted: str, known: Table, findings: Findings) -> None:
    section, _, key = dotted.rpartition(".")
    if not section and key in REMOVED:
        findings.refuse(key, key, "was removed from DeepSpeed, which refuses it", REMOVED[key])
    elif not section and key in REFUSED:
        findings.refuse(key, key, *REFUSED[key])
    elif section == "zero_optimization" and key in ZERO_REMOVED:
        findings.refuse(dotted, dotted, "was removed from DeepSpeed or is deprecated", ZERO_REMOVED[key])
    else:
        rule = "unknown key" if section else "unknown key, which DeepSpeed would ignore"
        findings.refuse(dotted, dotted, rule, did_you_mean(key, known))


def lookup(config: Mapping[str, Any], dotted: str) -> Any:
    """The value at a.b.c; None where any part is absent or null."""
    value: Any = config
    for part in dotted.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(part)
    return value


def stated(config: Mapping[str, Any], dotted: str) -> Any:
    """The value at a.b.c; None where it is left open, by "auto" as well."""
    value = lookup(config, dotted)
    return None if value == "auto" else value
