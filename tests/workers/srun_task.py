"""launch/pretrain.py, or another script, as a task that srun started on one of several nodes.

srun_task.py TASKS_PER_NODE HOMES SCRIPT [its flags]

Each node has a home directory of its own below HOMES, and rank 0 alone keeps the test's MEGARECIPES_CACHE.
What the test's launcher says is turned into what Slurm says.
"""

import os
import runpy
import sys
from pathlib import Path


def srun_environment(task: int, tasks: int, per_node: int, job: int = 4711) -> dict[str, str]:
    """What srun sets for a task, on nodes called node001, node002, ..."""
    node, nodes = task // per_node, tasks // per_node
    names = f"node[001-{nodes:03}]" if nodes > 1 else "node001"
    counts = f"{per_node}(x{nodes})" if nodes > 1 else str(per_node)
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(task),
        "SLURM_LOCALID": str(task % per_node),
        "SLURM_NODEID": str(node),
        "SLURM_NTASKS": str(tasks),
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_TASKS_PER_NODE": counts,
        "SLURM_STEP_NODELIST": names,
        "SLURM_JOB_NODELIST": names,
        "SLURMD_NODENAME": f"node{node + 1:03}",
    }


if __name__ == "__main__":
    per_node, homes, script = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    rank, ranks = int(os.environ.pop("RANK")), int(os.environ.pop("WORLD_SIZE"))
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    # A name of a node that resolves is all that is missing here: MASTER_ADDR and MASTER_PORT stay.
    os.environ.update(srun_environment(rank, ranks, per_node))
    home = homes / os.environ["SLURMD_NODENAME"]
    os.environ.update(HOME=str(home), XDG_CACHE_HOME=str(home / "cache"))
    if rank > 0:
        os.environ.pop("MEGARECIPES_CACHE", None)
    sys.argv = sys.argv[3:]
    sys.path[0] = str(Path(script).parent)  # as Python has it that starts the script
    runpy.run_path(script, run_name="__main__")
