"""The command lines that launch a recipe: what follows the launcher, and the launcher's own flags."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from ds_configs.jsonfile import available

SCRIPT = "launch/pretrain.py"


def arguments(
    recipe_name: str,
    ds_config: str,
    settings: Sequence[str] = (),
    *,
    tiny: bool = False,
    steps: int | None = None,
) -> list[str]:
    """What pretrain.py is given: one of ds_configs/ by its path, the user's own as it is written."""
    json_file = f"ds_configs/{ds_config}.json" if ds_config in available() else ds_config
    sets = [word for setting in settings for word in ("--set", setting)]
    more = ["--tiny"] * tiny + (["--steps", str(steps)] if steps else [])
    return ["--ds_config", json_file, "--recipe", recipe_name, *sets, *more]


def run_directory(recipe_name: str, ds_name: str) -> str:
    """Where a run is kept that no --out says: runs/default-sotu-zero3_offload for recipe "default/sotu"."""
    return "runs/" + re.sub(r"[^A-Za-z0-9._]+", "-", f"{recipe_name}-{ds_name}").strip("-")


def quoted(words: Sequence[str]) -> str:
    """The words as one line of a shell."""
    return " ".join(shlex.quote(word) for word in words)


def deepspeed(nodes: int, gpus_per_node: int, hostfile: str = "hosts") -> str:
    """The deepspeed launcher with its flags for `nodes` machines of `gpus_per_node` processes."""
    if nodes == 1:
        return f"deepspeed --num_gpus {gpus_per_node}"
    return f"deepspeed --hostfile {shlex.quote(hostfile)} --num_nodes {nodes} --num_gpus {gpus_per_node}"


def torchrun(nodes: int, gpus_per_node: int, first_host: str, port: int) -> str:
    """torchrun with its flags on each of the machines, on which NODE_RANK is its place among them.

    With a rank given, global ranks follow the order of the machines; c10d's rendezvous would number them as
    they come.
    """
    if nodes == 1:
        return f"torchrun --nproc_per_node {gpus_per_node}"
    meet = f"--master_addr {shlex.quote(first_host)} --master_port {port}"
    return f'torchrun --nnodes {nodes} --nproc_per_node {gpus_per_node} --node_rank "$NODE_RANK" {meet}'
