"""A loop in nanoGPT's manner, proven: plain torch, DDP, accumulation, clipping, a tied head.

python launch/prove.py launch/experiments/adapters/ddp_loop.py --layouts dp2 dp4 dp2-accumulation2
"""

import torch
from tiny_model import batch, llama
from torch.nn.parallel import DistributedDataParallel

__all__ = ["batch", "train"]


def train(proof):
    """Your loop. What starts with `proof.` is what the proof needs."""
    model = llama(tie_word_embeddings=True)
    proof.load(model)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    proof.watch(ddp, optimizer)
    half = torch.autocast("cpu", torch.bfloat16, enabled=proof.precision == "bf16")
    for rows in proof.batches():
        losses = []
        micro_batches = proof.micro_batches(rows, proof.rank)
        for number, micro in enumerate(micro_batches, 1):
            ddp.require_backward_grad_sync = number == len(micro_batches)
            with half:
                loss = ddp(**micro).loss / len(micro_batches)
            loss.backward()
            losses.append(loss.item())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        proof.step(sum(losses), norm)
