"""Which keys DeepSpeed 0.19.8 reads.

DeepSpeed accepts unknown top-level keys in silence, so that a misspelt section does nothing; here they are
refused. Only names are listed: values are DeepSpeed's to check. A test holds the lists against the installed
package.
"""

from __future__ import annotations

from typing import Any

from ds_configs.findings import Findings
from recipes.problems import did_you_mean


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


TOP = _words("""
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation
    optimizer scheduler fp16 bf16 torch_autocast data_types gradient_clipping zero_optimization
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer communication_data_type
    seq_parallel_communication_data_type prescale_gradients gradient_predivide_factor gradient_allreduce_op
    disable_allgather steps_per_print dump_state disable_python_gc vocabulary_size wall_clock_breakdown
    memory_breakdown dataloader_drop_last log_level activation_checkpointing pipeline tensor_parallel
    expert_parallel use_data_before_expert_parallelism sequence_parallel_size checkpoint aio comms_logger
    tensorboard wandb csv_monitor comet flops_profiler autotuning hybrid_engine data_efficiency
    datastates_ckpt compile timers weight_quantization
    """)

REMOVED = {
    "amp": "use fp16 or bf16",
    "elasticity": "remove the section; the batch is the recipe's",
    **dict.fromkeys(("graph_harvesting", "sparse_gradients"), "remove the key"),
    **dict.fromkeys(
        _words("""
            compression_training curriculum_learning eigenvalue nebula progressive_layer_drop
            quantize_training sparse_attention
            """),
        "remove the section",
    ),
}

ZERO = _words("""
    stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce
    allgather_partitions allgather_bucket_size overlap_comm compute_grad_norm load_from_fp32_weights
    elastic_checkpoint offload_param offload_optimizer zenflow sub_group_size stage3_prefetch_bucket_size
    stage3_param_persistence_threshold stage3_model_persistence_threshold stage3_max_live_parameters
    stage3_max_reuse_distance stage3_gather_16bit_weights_on_model_save stage3_module_granularity_threshold
    stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential ignore_unused_parameters legacy_stage1
    round_robin_gradients parameter_alignment zero_hpz_partition_size zero_quantized_weights
    zero_quantized_nontrainable_weights zero_quantized_gradients memory_efficient_linear
    pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings enable_sanity_checks
    save_muon_momentum_buffer_in_memory leaf_module
    """)

ZERO_REMOVED = {
    "cpu_offload": 'write "offload_optimizer": {"device": "cpu"}',
    "cpu_offload_param": 'write "offload_param": {"device": "cpu"}',
    "cpu_offload_use_pin_memory": 'write "pin_memory" within offload_optimizer or offload_param',
    "stage3_gather_fp16_weights_on_model_save": "write stage3_gather_16bit_weights_on_model_save",
    **dict.fromkeys(
        ("mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param"), "remove the key"
    ),
}

SECTIONS: dict[str, frozenset[str]] = {
    "zero_optimization": ZERO,
    "zero_optimization.offload_optimizer": _words("""
        device nvme_path buffer_count pin_memory pipeline_read pipeline_write fast_init ratio super_offload
        cpuadam_cores_perc
        """),
    "zero_optimization.offload_param": _words("""
        device nvme_path buffer_count buffer_size max_in_cpu pin_memory
        """),
    "fp16": _words("""
        enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis
        min_loss_scale fp16_master_weights_and_grads
        """),
    "bf16": _words("""
        enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states
        """),
    "optimizer": _words("type params legacy_fusion"),
    "optimizer.params": _words("""
        lr betas eps weight_decay torch_adam adam_w_mode bias_correction fp32_optimizer_states foreach
        """),
    "activation_checkpointing": _words("""
        partition_activations contiguous_memory_optimization cpu_checkpointing number_checkpoints
        synchronize_checkpoint_boundary profile
        """),
    "aio": _words("block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds"),
    "parallel": _words("tensor pipeline default_tensor default_pipeline"),  # ours
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
    "sequence_parallel_size": ("the models have no sequence parallelism", "remove the key"),
    "expert_parallel": ("the models have no experts", "remove the section"),
    "data_efficiency": ("what is in a batch is the recipe's (data.*, batch.*)", "remove the section"),
    "hybrid_engine": ("is for reinforcement learning", "remove the section"),
    "weight_quantization": ("is for inference", "remove the section"),
    "bfloat16": ("is the old name of bf16", "rename the section"),
}


def check(config: dict[str, Any], findings: Findings) -> None:
    """Refuse each key that DeepSpeed does not read, no longer reads, or must not read here."""
    for key in config:
        if key in REMOVED:
            findings.refuse(key, key, "was removed from DeepSpeed, which refuses it", REMOVED[key])
        elif key in REFUSED:
            findings.refuse(key, key, *REFUSED[key])
        elif key not in TOP and key != "parallel":
            hint = did_you_mean(key, [*TOP, "parallel"])
            findings.refuse(key, key, "unknown key, which DeepSpeed would ignore", hint)
    for name, known in SECTIONS.items():
        section = lookup(config, name)
        if not isinstance(section, dict | None):
            findings.refuse(name, f"{name}={section!r}", "is a section", "write an object, {...}")
            continue
        for key in section or ():
            dotted = f"{name}.{key}"
            if name == "zero_optimization" and key in ZERO_REMOVED:
                rule = "was removed from DeepSpeed or is deprecated"
                findings.refuse(dotted, dotted, rule, ZERO_REMOVED[key])
            elif key not in known:
                findings.refuse(dotted, dotted, "unknown key", did_you_mean(key, known))


def lookup(config: dict[str, Any], dotted: str) -> Any:
    """The value at a.b.c; None where any part is absent (or null, which DeepSpeed treats alike)."""
    value: Any = config
    for part in dotted.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(part)
    return value
