"""Command lines that launch a recipe: the launcher with its flags, and the flags of pretrain.py."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from ds_configs.findings import available

SCRIPT = "launch/pretrain.py"


def arguments(
    recipe_name: str,
    ds_config: str,
    settings: Sequence[str] = (),
    *,
    tiny: bool = False,
    steps: int | None = None,
) -> list[str]:
    """Return the flags of pretrain.py; a JSON of ds_configs/ by its path, the user's own as written."""
    json_file = (
        f"ds_configs/{ds_config}.json" if ds_config in available() else ds_config
    )
    sets = [word for setting in settings for word in ("--set", setting)]
    more = ["--tiny"] * tiny + (["--steps", str(steps)] if steps else [])
    return ["--ds_config", json_file, "--recipe", recipe_name, *sets, *more]


def quoted(words: Sequence[str]) -> str:
    """Join the words into one line of a shell."""
    return " ".join(shlex.quote(word) for word in words)


def deepspeed(nodes: int, gpus_per_node: int) -> str:
    """Return the deepspeed launcher's command for `nodes` machines of `gpus_per_node` processes."""
    if nodes == 1:
        return f"deepspeed --num_gpus {gpus_per_node}"
    return f"deepspeed --hostfile hosts --num_nodes {nodes} --num_gpus {gpus_per_node}"
