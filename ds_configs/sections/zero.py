"""The `zero_optimization` section: stage, offload, NVMe."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_configs.findings import Report
from ds_configs.known_keys import lookup
from ds_configs.plan import Machine

NVME_VARIABLE = "MEGARECIPES_NVME"
_DEVICES = ("none", "cpu", "nvme")
_QUANTISED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")


def stage(config: dict[str, Any], report: Report) -> int | None:
    """ZeRO stage 0 to 3; an absent section is 0, as in DeepSpeed; None for a broken one."""
    section = config.get("zero_optimization")
    if section is not None and not isinstance(section, dict):
        return None  # reported with the keys
    value = lookup(config, "zero_optimization.stage")
    if value is None:
        return 0
    if isinstance(value, bool) or value not in (0, 1, 2, 3):
        report.problem(
            f"{report.where}: zero_optimization.stage={value!r}: ZeRO has the stages 0, 1, 2 and 3; write one of them"
        )
        return None
    return int(value)


def offload(config: dict[str, Any], stage: int | None, machine: Machine, report: Report) -> str:
    """What is offloaded: "none", "optimizer", "parameters", "optimizer+parameters", or "nvme" if anything goes there."""
    devices = {kind: _device(kind, config, report) for kind in ("optimizer", "param")}
    _check_stage(config, devices, stage, report)
    _check_quantised(config, machine, report)
    if "nvme" in devices.values():
        _check_nvme_op(machine, report)
        return "nvme"
    named = {"optimizer": "optimizer", "param": "parameters"}
    return "+".join(named[kind] for kind, device in devices.items() if device == "cpu") or "none"


def nvme_paths(config: dict[str, Any], environ: Mapping[str, str], report: Report) -> dict[str, str]:
    """nvme_path of each section that offloads to NVMe, "auto" filled from the environment; checked to be writable."""
    found = {}
    for kind in ("optimizer", "param"):
        section = lookup(config, f"zero_optimization.offload_{kind}")
        if not isinstance(section, dict) or section.get("device") != "nvme":
            continue
        key = f"zero_optimization.offload_{kind}.nvme_path"
        given = section.get("nvme_path", "auto")
        path = environ.get(NVME_VARIABLE) if given == "auto" else given
        origin = f"${NVME_VARIABLE}" if given == "auto" else f"{report.where}: {key}"
        if not path or not isinstance(path, str):
            report.problem(
                f"{report.where}: {key}={given!r} and {NVME_VARIABLE} is not set: NVMe offload needs a directory on a fast disk; "
                f"export {NVME_VARIABLE}=/path/to/it, or write the path in the JSON"
            )
        elif (reason := _unusable(Path(path))) is not None:
            report.problem(
                f"{origin}={path}: {reason}: NVMe offload writes its files there; name a directory on a fast disk"
            )
        else:
            found[key] = path
    return found


def _device(kind: str, config: dict[str, Any], report: Report) -> str:
    key = f"zero_optimization.offload_{kind}.device"
    value = lookup(config, key)
    if value is None:
        return "none"
    if value not in _DEVICES:
        report.problem(f"{report.where}: {key}={value!r}: can be none, cpu or nvme; write one of them")
        return "none"
    return str(value)


def _check_stage(config: dict[str, Any], devices: dict[str, str], stage: int | None, report: Report) -> None:
    if stage is None:
        return
    optimizer, param = devices["optimizer"], devices["param"]
    if optimizer != "none" and stage == 0:
        report.problem(
            f"{report.where}: offload_optimizer with zero_optimization.stage=0: only sharded optimizer states are offloaded "
            "(stages 1 to 3); use stage 2 (--ds_config zero2_offload), or remove offload_optimizer"
        )
    if optimizer == "nvme" and stage in (1, 2):
        report.problem(
            f"{report.where}: offload_optimizer.device=nvme with zero_optimization.stage={stage}: DeepSpeed swaps to NVMe in stage 3 "
            "only; use stage 3 (--ds_config zero_infinity), or device cpu"
        )
    if param != "none" and stage != 3:
        report.problem(
            f"{report.where}: offload_param with zero_optimization.stage={stage}: only stage 3 shards parameters; use stage 3 "
            "(--ds_config zero3_offload), or remove offload_param"
        )
    ratio = lookup(config, "zero_optimization.offload_optimizer.ratio")
    if isinstance(ratio, (int, float)) and ratio < 1 and stage != 3:
        report.problem(
            f"{report.where}: offload_optimizer.ratio={ratio} with zero_optimization.stage={stage}: partial offload works in "
            "stage 3 only; use stage 3, or remove ratio"
        )
    prefetch = lookup(config, "zero_optimization.stage3_prefetch_bucket_size")
    if param == "nvme" and prefetch != 0:
        report.problem(
            f"{report.where}: stage3_prefetch_bucket_size={prefetch!r} with offload_param.device=nvme: DeepSpeed 0.19 runs out of "
            "buffers when it prefetches parameters from NVMe; set it to 0"
        )


def _check_quantised(config: dict[str, Any], machine: Machine, report: Report) -> None:
    for name in _QUANTISED:
        if machine.accelerator == "cpu" and lookup(config, f"zero_optimization.{name}"):
            report.problem(
                f"{report.where}: zero_optimization.{name}=true: ZeRO++ quantisation has no CPU kernel; set it to false"
            )


def _check_nvme_op(machine: Machine, report: Report) -> None:
    if not machine.libaio:
        report.problem(
            f"{report.where}: NVMe offload, but libaio is missing: DeepSpeed's asynchronous I/O is built on it; install it (Debian "
            "and Ubuntu: apt-get install libaio-dev), or --ds_config zero3_offload"
        )
    if not machine.compiler:
        report.problem(
            f"{report.where}: NVMe offload, but there is no compiler: DeepSpeed compiles its asynchronous I/O at first use; "
            "install g++ and ninja, or --ds_config zero3_offload"
        )


def _unusable(path: Path) -> str | None:
    if not path.exists():
        return "does not exist"
    if not path.is_dir():
        return "is not a directory"
    if not os.access(path, os.W_OK | os.X_OK):
        return "is not writable"
    return None
