"""Monitors, profilers and loggers of a run, and DeepSpeed's features without a test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ds_configs.findings import Findings
from ds_configs.known_keys import stated
from ds_configs.plan import Machine
from recipes.layout import Layout

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}  # of the monitors
_WRITERS = ("tensorboard", "csv_monitor")
# Keys for DeepSpeed without a test here -> their values without effect.
UNTRIED: dict[str, tuple[Any, ...]] = {
    "compile.deepcompile": (False,),
    "compile.autoep_non_moe": (False,),
    "aio.use_gds": (False,),
    "zero_optimization.leaf_module": ({},),
    "zero_optimization.offload_optimizer.super_offload": (False,),
    "zero_optimization.offload_optimizer.pipeline_read": (False,),
    "zero_optimization.offload_optimizer.pipeline_write": (False,),
    "zero_optimization.offload_optimizer.fast_init": (False,),
    "zero_optimization.zero_hpz_partition_size": (1,),
    "zero_optimization.zero_quantized_weights": (False,),
    "zero_optimization.zero_quantized_nontrainable_weights": (False,),
    "zero_optimization.zero_quantized_gradients": (False,),
}


def check(config: dict[str, Any], layout: Layout | None, machine: Machine, findings: Findings) -> None:
    """Refuse monitors that cannot write; notice the limits of the logger, and unchecked keys."""
    for name, package in PACKAGES.items():
        key = f"{name}.enabled"
        if stated(config, key) is True and package in machine.lacks:
            findings.refuse(key, f"{key}=true", f"the package {package} is missing", f"pip install {package}")
    for name in _WRITERS:
        key = f"{name}.output_path"
        if stated(config, f"{name}.enabled") is True:
            folder = Path(stated(config, key) or "", stated(config, f"{name}.job_name") or "DeepSpeedJobName")
            if reason := _unwritable(folder):
                findings.refuse(key, f"{folder}: {reason}", f"{name} writes there", f"set {key}")
    key = "autotuning.enabled"
    if stated(config, key):
        rule = "DeepSpeed ends such a process after autotuning.end_profile_step, without a result"
        findings.refuse(key, f"{key}=true", rule, "set it to false")
    for key in ("wall_clock_breakdown", "flops_profiler.enabled"):
        if layout and layout.pp > 1 and stated(config, key) is True:
            rule = "DeepSpeed 0.19 starts a timer of its pipeline twice then, and fails"
            findings.refuse(key, f"{key}=true with parallel.pp={layout.pp}", rule, "set it to false")
    key = "flops_profiler.output_file"
    if (written := stated(config, key)) and stated(config, "flops_profiler.enabled") is True:
        reason = "is a directory" if os.path.isdir(written) else _unwritable(Path(written).parent)
        if len(os.fsencode(Path(written).name)) > 255:
            reason = "its name is too long"
        if reason:
            findings.refuse(
                key, f"{key}={written}: {reason}", "flops_profiler writes this file", f"set {key}"
            )
    if stated(config, "comms_logger.enabled") is True:
        traffic = "those of tensor parallelism go through torch and are missing in it"
        if layout is None or layout.tp > 1:
            findings.notice("comms_logger", f"sees DeepSpeed's own collectives; {traffic}")
    if untried := list(_untried(config)):
        why = "passed on to DeepSpeed; no test of this project has run with it"
        findings.notice("unchecked", f"{', '.join(untried)}: {why}")


def _untried(config: dict[str, Any]) -> Iterator[str]:
    for key, ineffective in UNTRIED.items():
        value = stated(config, key)
        if value is not None and value not in ineffective:
            yield key


def _unwritable(folder: Path) -> str | None:
    """Return why DeepSpeed could not make the folder and write into it, or None."""
    try:
        there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    except OSError as error:  # a name that is too long
        return error.strerror or str(error)
    if not there.is_dir():
        return f"{there} is not a directory" if there != folder else "is not a directory"
    return None if os.access(there, os.W_OK | os.X_OK) else f"{there} is not writable"
