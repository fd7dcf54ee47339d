"""Monitors, profilers and loggers of a run, and DeepSpeed's features without a test."""

from __future__ import annotations

import os
from pathlib import Path

from ds_configs.findings import Findings
from ds_configs.plan import Machine
from recipes.layout import Layout
from recipes.problems import existing

PACKAGES = ("tensorboard", "wandb")  # of the monitors of these names
# Keys for DeepSpeed without a test here; false, {} and 1 have no effect.
UNTRIED = (
    "aio.use_gds",
    "zero_optimization.leaf_module",
    "zero_optimization.offload_optimizer.super_offload",
    "zero_optimization.offload_optimizer.pipeline_read",
    "zero_optimization.offload_optimizer.pipeline_write",
    "zero_optimization.offload_optimizer.fast_init",
    "zero_optimization.zero_hpz_partition_size",
    "zero_optimization.zero_quantized_weights",
    "zero_optimization.zero_quantized_nontrainable_weights",
    "zero_optimization.zero_quantized_gradients",
)


def check(layout: Layout | None, machine: Machine, findings: Findings) -> None:  # noqa: C901
    """Refuse monitors that cannot write; notice the limits of the logger, and unchecked keys."""
    stated = findings.stated
    for name in PACKAGES:
        if stated(f"{name}.enabled") and name in machine.lacks:
            findings.refuse(
                f"{name}.enabled",
                f"the package {name} is missing",
                f"pip install {name}",
            )
    for name in ("tensorboard", "csv_monitor"):
        folder = Path(
            stated(f"{name}.output_path") or "",
            stated(f"{name}.job_name") or "DeepSpeedJobName",
        )
        if stated(f"{name}.enabled"):
            _check_writable(f"{name}.output_path", folder, findings)
    written = stated("flops_profiler.output_file")
    if written and stated("flops_profiler.enabled"):
        _check_writable(
            "flops_profiler.output_file", Path(written), findings, file=True
        )
    if stated("autotuning.enabled"):
        findings.refuse(
            "autotuning.enabled",
            "DeepSpeed ends such a process after autotuning.end_profile_step, without a result",
            "set it to false",
        )
    for key in ("wall_clock_breakdown", "flops_profiler.enabled"):
        if layout and layout.pp > 1 and stated(key):
            findings.refuse(
                key,
                "DeepSpeed 0.19 starts a timer of its pipeline twice then, and fails",
                "set it to false",
                beside=f" with parallel.pp={layout.pp}",
            )
    if stated("comms_logger.enabled") and (layout is None or layout.tp > 1):
        traffic = "those of tensor parallelism go through torch and are missing in it"
        findings.notice("comms_logger", f"sees DeepSpeed's own collectives; {traffic}")
    untried = [
        key
        for key in UNTRIED
        if (value := stated(key)) and (value != 1 or value is True)
    ]
    if untried:
        why = "passed on to DeepSpeed; no test of this project has run with it"
        findings.notice("unchecked", f"{', '.join(untried)}: {why}")


def _check_writable(
    key: str, path: Path, findings: Findings, *, file: bool = False
) -> None:
    """Refuse a folder, or a file, that DeepSpeed could not make and write."""
    reason = None
    try:
        there = existing(path)
        if file and there == path.absolute():
            reason = "is a directory" if there.is_dir() else None
        elif not there.is_dir():
            reason = f"{there} is not a directory"
        elif not os.access(there, os.W_OK | os.X_OK):
            reason = f"{there} is not writable"
    except OSError as error:  # a name that is too long
        reason = error.strerror
    if reason:
        findings.refuse(
            key,
            f"{key.partition('.')[0]} writes there",
            f"set {key}",
            f"{path}: {reason}",
        )
