"""DeepSpeed's own check of the sections of a JSON that the resolver hands on as written, before the start."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from pydantic import ValidationError

from ds_configs.findings import lookup, shown
from ds_configs.jsonfile import ConfigError
from ds_configs.plan import Plan
from launch.deepspeed_fixes import versions
from launch.ranks import processes
from recipes.problems import Problem

# DeepSpeed's models -> the sections that they read.
_MODELS = {
    "DeepSpeedZeroConfig": "zero_optimization",
    "DeepSpeedFP16Config": "fp16",
    "DeepSpeedBF16Config": "bf16",
    "CommsLoggerConfig": "comms_logger",
    "CompileConfig": "compile",
    "DeepSpeedThroughputTimerConfig": "timers.throughput",
}
_FIX = "write what it takes, or remove the key"


def check(plan: Plan, where: str) -> None:
    """Check that DeepSpeed accepts the configuration; `where`: the JSON. Raises ConfigError.

    `ds_configs` judges the keys that it knows first. DeepSpeed judges the rest, such as sections that are
    handed on unread, and rules of another version.
    """
    from deepspeed.runtime.config import DeepSpeedConfig

    _check_release(plan, where)
    ds = copy.deepcopy(plan.ds)
    ds["train_batch_size"] = plan.layout.micro * plan.layout.accumulation
    try:
        DeepSpeedConfig(ds, SimpleNamespace(get_data_parallel_world_size=lambda: 1))
    except ValidationError as error:
        raise ConfigError(list(_refused_values(error, where))) from None
    except Exception as error:  # its other checks raise exceptions of any type
        came = f"DeepSpeed refuses it ({' '.join(str(error).split()) or type(error).__name__})"
        raise ConfigError(
            [Problem("--ds_config", came, fix=_FIX, where=where)]
        ) from None


def _check_release(plan: Plan, where: str) -> None:
    """Refuse what the installed release does wrong. Raises ConfigError.

    Before 0.19.8 `split_half_float_double` of runtime/zero/stage_1_and_2.py finds no type on a CPU, and
    gradients that do not lie in one buffer are averaged over none of the ranks.
    """
    key = "zero_optimization.contiguous_gradients"
    if lookup(plan.ds, key) is not False or versions.at_least("0.19.8"):
        return
    if plan.zero_stage in (1, 2) and not processes.device().own_memory:
        rule = f"DeepSpeed {versions.installed()} then averages no gradient on a CPU"
        fix = "set it to true, or pip install deepspeed==0.19.8"
        raise ConfigError([Problem(key, f"{key}=false", rule, fix, where=where)])


def _refused_values(error: ValidationError, where: str) -> Iterator[Problem]:
    section = _MODELS.get(error.title, "")
    for each in error.errors():
        key = ".".join(filter(None, (section, *map(str, each["loc"]))))
        value: Any = each["input"]
        came = (
            f"{key}={shown(value)}"
            if each["loc"] and not isinstance(value, Mapping)
            else key
        )
        said = (
            each["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        )
        yield Problem(
            key,
            came,
            f"DeepSpeed refuses it ({said[:1].lower()}{said[1:]})",
            _FIX,
            where=where,
        )
