"""What of DeepSpeed's insides is imported or overridden here, and the releases that have it.

`tests/workers/deepspeed_versions.py` trains every layout under every release of `SEEN` and compares them with
the newest; docs/design.md has its figures. What is corrected or done otherwise in some releases asks
`at_least`.
"""

from __future__ import annotations

import functools
from importlib import metadata
from typing import NamedTuple

from packaging.version import Version

from recipes.problems import ProblemsError

# Releases that train and agree, oldest first. The last is the one that requirements.txt pins.
SEEN = (
    "0.18.9",
    "0.19.0",
    "0.19.1",
    "0.19.2",
    "0.19.3",
    "0.19.4",
    "0.19.5",
    "0.19.6",
    "0.19.7",
    "0.19.8",
)


class Inside(NamedTuple):
    """Names of one module below `deepspeed`.

    Attributes:
        purpose: what they are used for.
        names: what is imported from the module.
        overridden: methods that a class here has in place of the imported one's.
        since: the first release of `SEEN` in which all that is used is as it is used; before it, the code
            that uses it is left out.
    """

    purpose: str
    names: tuple[str, ...]
    overridden: tuple[str, ...] = ()
    since: str = SEEN[0]


INSIDES = {
    "accelerator.cpu_accelerator": Inside(
        "a subclass emulates fp16", ("CPU_Accelerator",)
    ),
    "git_version_info": Inside("compiled ops", ("accelerator_name", "installed_ops")),
    "ops.adam": Inside(
        "where moments lie; the bias correction", ("DeepSpeedCPUAdam", "FusedAdam")
    ),
    "pipe": Inside(
        "stages of a pipeline", ("LayerSpec", "PipelineModule", "TiedLayerSpec")
    ),
    "runtime": Inside("Muon is imported uncompiled", ("compiler",)),
    "runtime.activation_checkpointing.checkpointing": Inside(
        "random states of tensor-parallel ranks", ("get_cuda_rng_tracker",)
    ),
    "runtime.base_optimizer": Inside("the base of stage 0's", ("DeepSpeedOptimizer",)),
    "runtime.bf16_optimizer": Inside(
        "where weights and moments lie; a shorter step",
        ("BF16_Optimizer",),
        (
            "clear_hp_grads",
            "clear_lp_grads",
            "get_grads_for_reduction",
            "_update_hp_grad",
            "step",
        ),
    ),
    "runtime.config": Inside("the judgement of a JSON", ("DeepSpeedConfig",)),
    "runtime.engine": Inside(
        "the engine; that of stage 0",
        ("DeepSpeedEngine",),
        (
            "forward",
            "backward",
            "get_data_types",
            "allreduce_gradients",
            "_take_model_step",
            "clip_fp32_gradients",
            "_configure_fp16_optimizer",
        ),
    ),
    "runtime.fp16.loss_scaler": Inside("stage 0's loss scale", ("CreateLossScaler",)),
    "runtime.pipe.engine": Inside(
        "the engine of a pipeline", ("PipelineEngine", "TRAIN_BATCH_TIMER")
    ),
    "runtime.pipe.topology": Inside(
        "the grid of a pipeline", ("PipeModelDataParallelTopology",)
    ),
    "runtime.utils": Inside(
        "gathers weights; knows cut parameters",
        ("all_gather_dp_groups", "is_model_parallel_parameter"),
    ),
    "runtime.zero": Inside("handles are replaced there", ("partition_parameters",)),
    "runtime.zero.partition_parameters": Inside(
        "ZeRO-3's copies on one rank; torch's `linear` is put back",
        (
            "InsertPostInitMethodToModuleSubClasses",
            "NoGatherCoalescedHandle",
            "ZeroParamStatus",
        ),
        ("wait",),
    ),
    "runtime.zero.stage3": Inside(
        "where weights and moments lie; a shorter step",
        ("DeepSpeedZeroOptimizer_Stage3",),
        (
            "_constant_buffered_norm2",
            "check_overflow",
            "get_grad_norm_direct",
            "reduce_independent_p_g_buckets_and_remove_grads",
        ),
        since="0.19.8",
    ),
    "runtime.zero.stage_1_and_2": Inside(
        "where weights and moments lie; shorter steps",
        ("DeepSpeedZeroOptimizer",),
        (
            "_use_compact_grad_partition_buffer",
            "async_accumulate_grad_in_cpu_via_gpu",
            "check_overflow",
            "complete_grad_norm_calculation_for_cpu_offload",
            "copy_grads_in_partition",
            "independent_gradient_partition_epilogue",
            "reduce_independent_p_g_buckets_and_remove_grads",
            "reset_cpu_buffers",
            "set_norm_for_param_grad_in_gpu",
            "setup_buckets",
            "step",
            "update_lp_params",
            "update_offload_overflow_tracker",
        ),
        since="0.19.8",
    ),
    "utils": Inside(
        "lends our groups; layers that ZeRO-3 gathers at once",
        ("groups", "set_z3_leaf_modules"),
    ),
    "utils.bwc": Inside("tensor-parallel ranks", ("bwc_tensor_model_parallel_rank",)),
}


@functools.cache
def installed() -> Version:
    """Return the release that is installed, without what its build adds. Raises PackageNotFoundError."""
    return Version(Version(metadata.version("deepspeed")).base_version)


def at_least(release: str) -> bool:
    """Check that the installed release is this one or a newer one."""
    return installed() >= Version(release)


def is_as_overridden(kind: type) -> bool:
    """Check that the installed release has the class as methods here override it; other classes are."""
    inside = INSIDES.get(kind.__module__.removeprefix("deepspeed."))
    return inside is None or at_least(inside.since)


def is_newer_than_seen() -> bool:
    """Check that the installed release is newer than all that were compared."""
    return installed() > Version(SEEN[-1])


def refuse_others() -> None:
    """Check that the installed release is seen or newer. Raises ProblemsError."""
    version = str(installed())
    if version in SEEN or is_newer_than_seen():
        return
    came = f"DeepSpeed {version} is installed"
    rule = f"{SEEN[0]} to {SEEN[-1]} were seen to agree"
    fix = f"pip install deepspeed=={SEEN[-1]}"
    raise ProblemsError.of("deepspeed", came, rule, fix)
