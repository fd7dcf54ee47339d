"""DeepSpeed's tensor parallelism (AutoTP) of a model of transformers, proven.

python launch/prove.py launch/experiments/adapters/deepspeed_autotp.py \\
    --layouts tp2 tp2-zero3 tp2-dp2-zero1
"""

import deepspeed
from tiny_model import batch, deepspeed_json, llama

__all__ = ["batch", "train"]


def train(proof):
    """Your loop. What starts with `proof.` is what the proof needs."""
    tp = proof.layout["tp"]
    config = {**deepspeed_json(proof), "tensor_parallel": {"autotp_size": tp}}
    model = llama()
    proof.load(model)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    proof.watch(engine)
    for rows in proof.batches():
        losses = []
        for micro in proof.micro_batches(rows, proof.rank // tp):
            loss = engine(**micro).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        proof.step(sum(losses) / len(losses))
