"""A result.json of version 1, as the values of a result."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any


def from_version_1(row: Mapping[str, Any], names: Set[str], last_steps: int) -> dict[str, Any]:
    """From a flat row, whose launch says in its command whether it was tiny or emulated.

    `names`: the fields of a result; `last_steps`: over how many its training loss is a mean.
    """

    def held_out(name: str) -> dict[str, Any] | None:
        loss = row.get(f"{name}_loss")
        step = row.get("validation_step") if name == "validation" else row.get("steps")
        return None if loss is None else {"loss": loss, "parts": row.get(f"{name}_parts"), "step": step}

    speed = ("seconds_per_step", "data_wait_share", "samples_per_s", "tokens_per_s", "tflops", "exact_tflops")
    # What version 1 wrote otherwise, or computed from what is here.
    other = {"precision", "deviations", "comparison", "not_comparable"}
    kept = names & row.keys() - other
    last = min(last_steps, row.get("steps") or 0)
    training = {"loss": row.get("train_loss"), "parts": row.get("train_parts"), "steps": last}
    memory = {"peak_bytes": "peak_memory_bytes", "kind": "memory_kind", "cached_bytes": "cached_bytes"}
    return {
        **{key: row[key] for key in kept},
        "reason": row.get("status_is"),
        "precision": str(row.get("precision")).split(" ")[0],  # it may be "fp16 (emulated)"
        "losses": {"training": training, "validation": held_out("validation"), "test": held_out("test")},
        "entropies": {kind: row.get(f"{kind}_entropy") for kind in ("uniform", "unigram")},
        "speed": {key: row.get(key) for key in speed},
        "memory": {name: row.get(key) for name, key in memory.items()},
        "deviations": [{"kind": "said", "is": str(text)} for text in row.get("deviations") or ()],
    }
