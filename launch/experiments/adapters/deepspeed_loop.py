"""A plain DeepSpeed loop, proven. Copy it, and put your own model, data and JSON in.

python launch/prove.py launch/experiments/adapters/deepspeed_loop.py --layouts dp2-zero1 dp2-zero3
"""

import deepspeed
import torch
from torch import nn

VOCABULARY = 64
LENGTH = 16


class Model(nn.Module):
    """A causal model of two layers, (batch, length) -> (batch, length, vocabulary)."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        layer = nn.TransformerEncoderLayer(
            32, 4, 64, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden = self.layers(
            self.embedding(tokens), mask.to(self.embedding.weight.dtype), is_causal=True
        )
        return self.head(hidden)


def batch(step):
    """The global batch of a step: the same under every layout."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (8, LENGTH + 1), generator=generator)
    return {"tokens": tokens}


def train(proof):
    """Your loop. What starts with `proof.` is what the proof needs."""
    accumulation = proof.layout["accumulation"]
    config = {
        "train_micro_batch_size_per_gpu": 8 // proof.layout.shares,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": proof.layout["zero"]},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-3, "weight_decay": 0.1, "torch_adam": True},
        },
        "bf16": {"enabled": proof.precision == "bf16"},
    }
    model = Model()
    proof.load(model)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    if proof.resumed:
        engine.load_checkpoint(str(proof.resumed))
    proof.watch(engine)
    for rows in proof.batches():
        losses = []
        for micro in proof.micro_batches(rows, proof.rank):
            tokens = micro["tokens"].to(engine.device)
            logits = engine(tokens[:, :-1])
            loss = nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), tokens[:, 1:].flatten()
            )
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        proof.step(sum(losses) / accumulation)
    if proof.checkpoint:
        engine.save_checkpoint(str(proof.checkpoint))
