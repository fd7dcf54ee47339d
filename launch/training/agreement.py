"""What the ranks of a run must have in common, and what they tell each other at its end."""

from __future__ import annotations

import hashlib
import json
import socket
from typing import Any

import torch.distributed as dist

from data.corpus import Corpus
from ds_configs.plan import Plan
from launch.machine import description, memory
from launch.ranks.processes import gathered
from launch.records.facts import Peaks
from recipes import catalog


def check(plan: Plan, corpus: Corpus, group: dist.ProcessGroup, initial_weights: str | None = None) -> None:
    """Refuse to train where ranks read other data or weights, or run other code or settings. Collective.

    Every machine prepares its own copy of the corpus; a package or file of another version there would train
    silently on something else. Raises ValueError with what differs.
    """
    ds = json.dumps(without_paths(plan.ds), sort_keys=True).encode()
    own = {
        "host": socket.gethostname(),
        "vocabulary": corpus.summary.get("vocabulary_digest", "absent"),
        "recipe": catalog.digest(plan.recipe)[:12],
        "training tokens (crc32)": corpus.summary.get("train_tokens_crc32", "absent"),
        "initial weights": initial_weights or "random",
        "resolved DeepSpeed configuration": hashlib.sha256(ds).hexdigest()[:12],
        **{f"version of {name}": version for name, version in description.versions().items()},
    }
    facts = gathered(own, group)
    differing = [key for key in own if key != "host" and len({str(f[key]) for f in facts}) > 1]
    if differing:
        lines = [f"  {k}: " + ", ".join(sorted({f"{f[k]} on {f['host']}" for f in facts})) for k in differing]
        first = "the ranks of this run do not train on the same thing; make the machines equal in:"
        raise ValueError("\n".join([first, *lines]))


def without_paths(ds: dict[str, Any]) -> dict[str, Any]:
    """The resolved JSON but for where each machine offloads to, which may be a place of its own."""
    zero = dict(ds.get("zero_optimization") or {})
    for kind in ("offload_optimizer", "offload_param"):
        if isinstance(section := zero.get(kind), dict):
            zero[kind] = {key: value for key, value in section.items() if key != "nvme_path"}
    return {**ds, "zero_optimization": zero}


def peak_memory(group: dist.ProcessGroup) -> Peaks:
    """The largest peak and cached memory of any rank. Collective."""
    ranks = gathered((memory.peak_memory().bytes, memory.peak_cached_bytes()), group)
    cached = [c for _, c in ranks if c is not None]
    return Peaks(max(peak for peak, _ in ranks), max(cached, default=None))
