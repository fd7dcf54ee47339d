"""Averages of gradients over the data-parallel ranks."""

from __future__ import annotations

from typing import Any

from ds_configs.findings import Findings
from ds_configs.known_keys import shown, stated


def check(config: dict[str, Any], stage: int | None, findings: Findings) -> None:
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
