"""The `zero_optimization` section: stage, offload, NVMe, and averages of gradients."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from ds_configs.findings import Findings
from ds_configs.known_keys import lookup, shown, stated
from ds_configs.plan import Machine, Offload, ZeroStage
from recipes.layout import Layout, divisors
from recipes.problems import Problem, either

NVME_VARIABLE = "MEGARECIPES_NVME"
_Device = Literal["none", "cpu", "nvme"]
_QUANTISED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
_OF_GPUS = {
    **{f"zero_optimization.{name}": "ZeRO++ quantisation has no CPU kernel" for name in _QUANTISED},
    "zero_optimization.offload_optimizer.super_offload": "SuperOffload is for a GPU next to its CPU",
    "aio.use_gds": "GPUDirect Storage reads into a GPU's memory",
}
_OF_STAGE_3 = (
    *_QUANTISED,
    *("zero_hpz_partition_size", "pipeline_loading_checkpoint", "offload_optimizer.super_offload"),
)


def stage(config: dict[str, Any], findings: Findings) -> ZeroStage | None:
    """Read the ZeRO stage, 0 to 3; an absent section is 0, as in DeepSpeed; None for a broken one."""
    key = "zero_optimization.stage"
    value = lookup(config, key)
    if value is None or (value in get_args(ZeroStage) and not isinstance(value, bool)):
        return int(value or 0)  # type: ignore[return-value]
    findings.refuse(key, f"{key}={value!r}", "ZeRO has the stages 0, 1, 2 and 3", "write one of them")
    return None


def offload(config: dict[str, Any], stage: int | None, machine: Machine, findings: Findings) -> Offload:
    """Return the parts of the model states to keep outside the GPU."""
    optimizer, parameters = _device("optimizer", config, findings), _device("param", config, findings)
    if stage is not None:
        _check_stage(config, optimizer, parameters, stage, findings)
    for key, why in () if machine.device.own_memory else _OF_GPUS.items():
        if lookup(config, key) is True:
            findings.refuse(key, f"{key}=true", why, "set it to false")
    if "nvme" in (optimizer, parameters):
        _check_nvme_op(machine, findings)
        return "nvme"
    if optimizer == "cpu":
        return "optimizer+parameters" if parameters == "cpu" else "optimizer"
    return "parameters" if parameters == "cpu" else "none"


def nvme_paths(config: dict[str, Any], environ: Mapping[str, str], findings: Findings) -> dict[str, str]:
    """Return the writable nvme_path of each NVMe offload, with "auto" filled from the environment."""
    found = {}
    for kind in ("optimizer", "param"):
        section = lookup(config, f"zero_optimization.offload_{kind}")
        if not isinstance(section, dict) or section.get("device") != "nvme":
            continue
        key = f"zero_optimization.offload_{kind}.nvme_path"
        given = section.get("nvme_path", "auto")
        path = environ.get(NVME_VARIABLE) if given == "auto" else given
        if not path or not isinstance(path, str):
            came = f"{key}={given!r} and {NVME_VARIABLE} is not set"
            fix = f"export {NVME_VARIABLE}=/path/to/it, or write the path in the JSON"
            findings.refuse(key, came, "NVMe offload needs a directory on a fast disk", fix)
        elif (reason := _unusable(Path(path))) is not None:
            rule, fix = "NVMe offload writes its files there", "name a directory on a fast disk"
            origin = f"${NVME_VARIABLE}" if given == "auto" else f"{findings.where}: {key}"
            findings.problems.append(Problem(key, f"{origin}={path}: {reason}", rule, fix))
        else:
            found[key] = path
    return found


def check_rest(config: dict[str, Any], stage: int | None, layout: Layout | None, findings: Findings) -> None:
    """Refuse keys of another stage, and groups of ranks that do not divide the data-parallel ranks."""
    for name in () if stage in (3, None) else _OF_STAGE_3:
        key = f"zero_optimization.{name}"
        if (value := stated(config, key)) is True or (value or 1) > 1:
            came = f"{key}={shown(value)} with zero_optimization.stage={stage}"
            findings.refuse(key, came, "is of stage 3", "remove the key, or take stage 3 (--ds_config zero3)")
    key = "zero_optimization.offload_optimizer.buffer_count"
    count = stated(config, key)
    if count and count < 4 and stated(config, "zero_optimization.offload_optimizer.device") == "nvme":
        rule = "a weight, its gradient and Adam's two moments are in buffers at once"
        findings.refuse(key, f"{key}={count} with device=nvme", rule, "set it to 4 or more")
    key = "zero_optimization.zero_hpz_partition_size"
    ranks = stated(config, key) or 1
    if stage == 3 and layout and layout.dp % ranks:
        rule = "the data-parallel ranks are divided into groups of so many"
        fix = f"set it to {either(divisors(layout.dp))}"
        findings.refuse(key, f"{key}={ranks} with dp={layout.dp}", rule, fix)


def check_averages(config: dict[str, Any], stage: int | None, findings: Findings) -> None:
    """Refuse another average than the mean, and divisions foreign to the stage."""
    key = "gradient_allreduce_op"
    if (op := stated(config, key)) not in (None, "mean"):
        rule = "a step's gradient is the mean over its global batch, whatever dp is"
        findings.refuse(key, f"{key}={op if isinstance(op, str) else shown(op)}", rule, "remove the key")
    if stage not in (2, 3) or stated(config, "zero_optimization.reduce_scatter") is False:
        return
    for key, ineffective in (("prescale_gradients", False), ("gradient_predivide_factor", 1)):
        if (value := stated(config, key)) not in (None, ineffective):
            came = f"{key}={shown(value)} with zero_optimization.stage={stage}"
            rule = "stages 2 and 3 average while they reduce and scatter; stages 0 and 1 can divide before"
            fix = "remove the key, or set zero_optimization.reduce_scatter to false"
            findings.refuse(key, came, rule, fix)


def _device(kind: str, config: dict[str, Any], findings: Findings) -> _Device:
    key = f"zero_optimization.offload_{kind}.device"
    value = lookup(config, key)
    if value in get_args(_Device):
        return value
    if value is not None:
        findings.refuse(key, f"{key}={value!r}", "can be none, cpu or nvme", "write one of them")
    return "none"


def _check_stage(
    config: dict[str, Any], optimizer: _Device, parameters: _Device, stage: int, findings: Findings
) -> None:
    def refuse(came: str, rule: str, fix: str) -> None:
        findings.refuse("zero_optimization.stage", f"{came} with zero_optimization.stage={stage}", rule, fix)

    if optimizer != "none" and stage == 0:
        fix = "use stage 2 (--ds_config zero2_offload), or remove offload_optimizer"
        refuse("offload_optimizer", "only sharded optimizer states are offloaded (stages 1 to 3)", fix)
    if optimizer == "nvme" and stage in (1, 2):
        fix = "use stage 3 (--ds_config zero_infinity), or device cpu"
        refuse("offload_optimizer.device=nvme", "DeepSpeed swaps to NVMe in stage 3 only", fix)
    if parameters != "none" and stage != 3:
        fix = "use stage 3 (--ds_config zero3_offload), or remove offload_param"
        refuse("offload_param", "only stage 3 shards parameters", fix)
    ratio = lookup(config, "zero_optimization.offload_optimizer.ratio")
    if isinstance(ratio, (int, float)) and ratio < 1 and stage != 3:
        rule, fix = "partial offload works in stage 3 only", "use stage 3, or remove ratio"
        refuse(f"offload_optimizer.ratio={ratio}", rule, fix)
    prefetch = lookup(config, "zero_optimization.stage3_prefetch_bucket_size")
    if parameters == "nvme" and prefetch != 0:
        came = f"stage3_prefetch_bucket_size={prefetch!r} with offload_param.device=nvme"
        rule = "DeepSpeed 0.19 runs out of buffers when it prefetches parameters from NVMe"
        findings.refuse("zero_optimization.stage", came, rule, "set it to 0")


def _check_nvme_op(machine: Machine, findings: Findings) -> None:
    if not machine.libaio:
        rule = "DeepSpeed's asynchronous I/O is built on it"
        fix = "install it (Debian and Ubuntu: apt-get install libaio-dev), or --ds_config zero3_offload"
        findings.refuse("device", "NVMe offload, but libaio is missing", rule, fix)
    if not machine.compiler:
        rule = "DeepSpeed compiles its asynchronous I/O at first use"
        fix = "install g++ and ninja, or --ds_config zero3_offload"
        findings.refuse("device", "NVMe offload, but there is no compiler", rule, fix)
    if not machine.cuda_compiler:
        rule = "DeepSpeed compiles its asynchronous I/O against CUDA's headers"
        fix = "install it and set CUDA_HOME, or --ds_config zero3_offload"
        findings.refuse("device", "NVMe offload, but there is no CUDA toolkit (nvcc)", rule, fix)


def _unusable(path: Path) -> str | None:
    if not path.is_dir():
        return "is not a directory" if path.exists() else "does not exist"
    return None if os.access(path, os.W_OK | os.X_OK) else "is not writable"
