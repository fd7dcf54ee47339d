"""torch's FSDP2 with tensor and sequence parallelism over a device mesh, proven.

python launch/prove.py launch/experiments/adapters/fsdp2_tensor_parallel.py \\
    --layouts dp2 tp2 tp2-dp2 tp2-sequence
"""

import torch
from tiny_model import LENGTH, batch, llama
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

__all__ = ["batch", "train"]


def plan(sequence):
    """What is cut how; under sequence parallelism what lies between the layers is cut by positions."""
    stream = Shard(1) if sequence else Replicate()
    into = ColwiseParallel(input_layouts=stream)
    out = RowwiseParallel(output_layouts=stream)
    cut = {
        "model.embed_tokens": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=stream
        ),
        "model.layers.*.self_attn.[qkv]_proj": into,
        "model.layers.*.self_attn.o_proj": out,
        "model.layers.*.mlp.[gu]*_proj": into,
        "model.layers.*.mlp.down_proj": out,
        "lm_head": ColwiseParallel(input_layouts=stream, output_layouts=Replicate()),
    }
    if sequence:
        cut["model.layers.*.*_layernorm"] = SequenceParallel()
        cut["model.norm"] = SequenceParallel()
    return cut


def train(proof):
    """Your loop. What starts with `proof.` is what the proof needs."""
    dp, tp = proof.layout["dp"], proof.layout["tp"]
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    model = llama()
    proof.load(model)
    if tp > 1:
        parallelize_module(model, mesh["tp"], plan(proof.layout["sequence"]))
    half = torch.bfloat16 if proof.precision == "bf16" else None
    for layer in (*model.model.layers, model):
        fully_shard(layer, mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(half))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    proof.watch(model, optimizer)
    places = torch.arange(LENGTH)[None]
    for rows in proof.batches():
        losses = []
        micro_batches = proof.micro_batches(rows, proof.rank // tp)
        for micro in micro_batches:
            loss = model(**micro, position_ids=places).loss / len(micro_batches)
            loss.backward()
            losses.append(loss.item())
        # clip_grad_norm_ takes no gradients of different meshes
        gradients = [each.grad.full_tensor() for each in model.parameters()]
        norm = torch.nn.utils.get_total_norm(gradients)
        torch.nn.utils.clip_grads_with_norm_(
            model.parameters(), 1.0, norm, foreach=False
        )
        optimizer.step()
        optimizer.zero_grad()
        proof.step(sum(losses), norm)
