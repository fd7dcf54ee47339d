"""The `zero_optimization` section: stage, offload, NVMe, and averages of gradients."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from ds_configs.findings import Findings
from ds_configs.plan import Machine, Offload, ZeroStage
from recipes.layout import Layout, divisors
from recipes.problems import Problem, either

NVME_VARIABLE = "MEGARECIPES_NVME"
_ZERO = "zero_optimization"
_STAGE = f"{_ZERO}.stage"
_OPTIMIZER = f"{_ZERO}.offload_optimizer"
_PARAM = f"{_ZERO}.offload_param"
_QUANTISED = (
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
)
_OF_GPUS = {
    **{
        f"{_ZERO}.{name}": "ZeRO++ quantisation has no CPU kernel"
        for name in _QUANTISED
    },
    f"{_OPTIMIZER}.super_offload": "SuperOffload is for a GPU next to its CPU",
    "aio.use_gds": "GPUDirect Storage reads into a GPU's memory",
}
_OF_STAGE_3 = (
    *_QUANTISED,
    "zero_hpz_partition_size",
    "pipeline_loading_checkpoint",
    "offload_optimizer.super_offload",
)


def stage(findings: Findings) -> ZeroStage | None:
    """Return the ZeRO stage; an absent section is 0, as in DeepSpeed; None if it was refused."""
    if any(problem.key == _STAGE for problem in findings.problems):
        return None
    return cast(ZeroStage, findings.stated(_STAGE) or 0)


def offload(stage: int | None, machine: Machine, findings: Findings) -> Offload:
    """Return the parts of the model states to keep outside the GPU."""
    optimizer, parameters = (
        findings.stated(f"{section}.device") or "none"
        for section in (_OPTIMIZER, _PARAM)
    )
    if parameters != "none" and stage in (0, 1, 2):
        findings.lookup(_ZERO).pop("offload_param")
        findings.notice(
            _PARAM, f"without effect: stage {stage} does not shard parameters"
        )
        parameters = "none"
    if stage is not None:
        _check_stage(optimizer, parameters, stage, findings)
    for key, why in () if machine.device.own_memory else _OF_GPUS.items():
        if findings.lookup(key) is True:
            findings.refuse(key, why, "set it to false")
    if "nvme" in (optimizer, parameters):
        _check_nvme_op(machine, findings)
        return "nvme"
    if optimizer == "cpu":
        return "optimizer+parameters" if parameters == "cpu" else "optimizer"
    return "parameters" if parameters == "cpu" else "none"


def nvme_paths(environ: Mapping[str, str], findings: Findings) -> dict[str, str]:
    """Return the writable nvme_path of each NVMe offload, with "auto" filled from the environment."""
    found = {}
    for section in (_OPTIMIZER, _PARAM):
        if findings.lookup(f"{section}.device") != "nvme":
            continue
        key = f"{section}.nvme_path"
        path = findings.stated(key) or environ.get(NVME_VARIABLE)
        origin = (
            f"{findings.where}: {key}" if findings.stated(key) else f"${NVME_VARIABLE}"
        )
        if not path:
            findings.refuse(
                key,
                "NVMe offload needs a directory on a fast disk",
                f"export {NVME_VARIABLE}=/path/to/it, or write the path in the JSON",
                beside=f" and {NVME_VARIABLE} is not set",
            )
        elif reason := _unusable(Path(path)):
            findings.problems.append(
                Problem(
                    key,
                    f"{origin}={path}: {reason}",
                    "NVMe offload writes its files there",
                    "name a directory on a fast disk",
                )
            )
        else:
            found[key] = path
    return found


def check_rest(stage: int | None, layout: Layout | None, findings: Findings) -> None:
    """Refuse keys of another stage, and groups of ranks that do not divide the data-parallel ranks."""
    beside = f" with {_STAGE}={stage}"
    for key in (
        () if stage in (3, None) else (f"{_ZERO}.{name}" for name in _OF_STAGE_3)
    ):
        value = findings.stated(key)
        if value is True or (value or 1) > 1:
            findings.refuse(
                key,
                "is of stage 3",
                "remove the key, or take stage 3 (--ds_config zero3)",
                beside=beside,
            )
    key = f"{_OPTIMIZER}.buffer_count"
    if (
        0 < (findings.stated(key) or 0) < 4
        and findings.stated(f"{_OPTIMIZER}.device") == "nvme"
    ):
        findings.refuse(
            key,
            "a weight, its gradient and Adam's two moments are in buffers at once",
            "set it to 4 or more",
            beside=" with device=nvme",
        )
    key = f"{_ZERO}.zero_hpz_partition_size"
    if stage == 3 and layout and layout.dp % (findings.stated(key) or 1):
        findings.refuse(
            key,
            "the data-parallel ranks are divided into groups of so many",
            f"set it to {either(divisors(layout.dp))}",
            beside=f" with dp={layout.dp}",
        )
    scatters = findings.stated(f"{_ZERO}.reduce_scatter") is not False
    key = "gradient_predivide_factor"
    factor = findings.stated(key) or 1
    if stage == 3 and not scatters and layout and 1 < factor == layout.dp:
        findings.refuse(
            key,
            "stage 3 divides by the ranks once more where the factor is their number",
            "remove the key",
            beside=f" with dp={layout.dp}",
        )
    if stage in (2, 3) and scatters:
        for key, ineffective in (
            ("prescale_gradients", False),
            ("gradient_predivide_factor", 1),
        ):
            if findings.stated(key) not in (None, ineffective):
                findings.refuse(
                    key,
                    "stages 2 and 3 average while they reduce and scatter; stages 0 and 1 can divide before",
                    "remove the key, or set zero_optimization.reduce_scatter to false",
                    beside=beside,
                )


def _check_stage(
    optimizer: str, parameters: str, stage: int, findings: Findings
) -> None:
    def refuse(came: str, rule: str, fix: str) -> None:
        findings.refuse(_STAGE, rule, fix, f"{came} with {_STAGE}={stage}")

    if optimizer != "none" and stage == 0:
        refuse(
            "offload_optimizer",
            "only sharded optimizer states are offloaded (stages 1 to 3)",
            "use stage 2 (--ds_config zero2_offload), or remove offload_optimizer",
        )
    if optimizer == "nvme" and stage in (1, 2):
        refuse(
            "offload_optimizer.device=nvme",
            "DeepSpeed swaps to NVMe in stage 3 only",
            "use stage 3 (--ds_config zero_infinity), or device cpu",
        )
    ratio = findings.stated(f"{_OPTIMIZER}.ratio")
    if ratio is not None and ratio < 1 and stage != 3:
        refuse(
            f"offload_optimizer.ratio={ratio}",
            "partial offload works in stage 3 only",
            "use stage 3, or remove ratio",
        )
    key = f"{_ZERO}.stage3_prefetch_bucket_size"
    if parameters == "nvme" and findings.lookup(key) != 0:
        findings.refuse(
            key,
            "DeepSpeed 0.19 runs out of buffers when it prefetches parameters from NVMe",
            "set it to 0",
            beside=" with offload_param.device=nvme",
        )


def _check_nvme_op(machine: Machine, findings: Findings) -> None:
    """Refuse NVMe offload where DeepSpeed's op for asynchronous I/O cannot be compiled."""
    for there, missing, fix in (
        (
            machine.libaio,
            "libaio is missing",
            "install it (Debian and Ubuntu: apt-get install libaio-dev)",
        ),
        (machine.compiler, "there is no compiler", "install g++ and ninja"),
        (
            machine.cuda_compiler,
            "there is no CUDA toolkit (nvcc)",
            "install it and set CUDA_HOME",
        ),
    ):
        if not there:
            findings.refuse(
                "device",
                "DeepSpeed compiles its asynchronous I/O at first use, with libaio",
                f"{fix}, or --ds_config zero3_offload",
                f"NVMe offload, but {missing}",
            )


def _unusable(path: Path) -> str | None:
    if not path.is_dir():
        return "is not a directory" if path.exists() else "does not exist"
    if os.access(path, os.W_OK | os.X_OK):
        return None
    return "is not writable"
