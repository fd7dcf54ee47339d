"""The manifest for Kubernetes: a PyTorchJob of kubeflow's training operator, and the claim that runs lie on.

Fields and rules by the operator's CRD and webhook (kubeflow/training-operator, v1): metadata.name is an RFC
1035 label, spec.pytorchReplicaSpecs has Master (one replica) and Worker (one or more), each with a container
named `pytorch` that has an image. The operator tells each pod MASTER_ADDR, MASTER_PORT and, in RANK, its
place among the pods (pkg/controller.v1/pytorch/envvar.go).
"""

from __future__ import annotations

import json

from launch.console import launch_lines
from launch.planning.clusters.job import Job, filled
from modeling import cost

RUNS = "/runs"  # where the claim is mounted
BESIDES = 50e9  # bytes for text, caches and logs
BYTES_OF_PARAMETER = 12  # in a checkpoint: fp32 weights and Adam's two moments
GIB = 2**30
RESTARTS = 10  # of every pod, after which the job has failed


def manifest(job: Job) -> str:
    """The text of pytorchjob.yaml."""
    words = ["torchrun", launch_lines.SCRIPT, *job.words]
    return filled(
        "pytorchjob.yaml",
        name=job.name,
        slug=job.slug,
        layout=job.layout,
        nodes=job.nodes,
        gpus=job.gpus,
        image=json.dumps(job.image),
        run=json.dumps(f"{RUNS}/{job.run_directory.strip('/').removeprefix('runs/')}"),
        # Kubernetes puts variables in for $(NAME); $$ stands for $.
        words=[json.dumps(word.replace("$(", "$$("), ensure_ascii=False) for word in words[1:]],
        restarts=RESTARTS * job.nodes,
        storage=f"{-(-claimed_bytes(job) // GIB):.0f}Gi",
    )


def claimed_bytes(job: Job) -> float:
    """Of all checkpoints that are kept at once, one that is being written, and what else a run needs."""
    recipe = job.placement.plan.recipe
    parameters = cost.parameters(recipe.model, recipe.positions)
    saved = recipe.steps // recipe.run.save_every if recipe.run.save_every else 0
    kept = recipe.run.keep_checkpoints or saved + recipe.run.save_last
    return (min(kept, saved + 1) + 1) * BYTES_OF_PARAMETER * parameters + BESIDES
