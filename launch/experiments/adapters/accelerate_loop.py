"""A loop on accelerate, proven: DDP, DeepSpeed's ZeRO, torch's FSDP2.

python launch/prove.py launch/experiments/adapters/accelerate_loop.py \\
    --layouts dp2 dp2-accumulation2 dp2-zero2 dp2-fsdp
"""

import torch
from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, DistributedType, PartialState
from tiny_model import batch, llama

__all__ = ["batch", "train"]


def train(proof):
    """Your loop. What starts with `proof.` is what the proof needs."""
    accumulation = proof.layout["accumulation"]
    plugins = {}
    if proof.layout["zero"]:
        plugins["deepspeed_plugin"] = DeepSpeedPlugin(
            zero_stage=proof.layout["zero"], gradient_clipping=1.0
        )
    if proof.layout["fsdp"]:
        plugins["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap"
        )
    AcceleratorState._reset_state(True)  # of the training before, in this process
    # of itself accelerate takes a machine without GPUs for one process, and FSDP for a GPU's
    state = PartialState(cpu=not torch.cuda.is_available())
    if proof.layout["fsdp"]:
        state.distributed_type = DistributedType.MULTI_GPU
    accelerator = Accelerator(
        mixed_precision="no" if proof.precision == "fp32" else "bf16",
        gradient_accumulation_steps=accumulation,
        **plugins,
    )
    tokens = torch.cat([rows["input_ids"] for rows in proof.batches()])
    loader = torch.utils.data.DataLoader(tokens, batch_size=8 // proof.layout.shares)
    model = llama()
    proof.load(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    proof.watch(model, optimizer)
    total = 0.0
    for tokens in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            total += loss.item() / accumulation
            norm = None
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            proof.step(total, norm)
            total = 0.0
