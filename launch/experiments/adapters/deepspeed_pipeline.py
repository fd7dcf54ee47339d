"""DeepSpeed's pipeline, proven. Its parameters are named by the number of their layer, in any stage.

python launch/prove.py launch/experiments/adapters/deepspeed_pipeline.py \\
    --layouts pp2 pp2-dp2-accumulation2 pp2-accumulation4-zero1
"""

import deepspeed
from deepspeed.pipe import PipelineModule
from tiny_model import LENGTH, VOCABULARY, WIDTH, batch, deepspeed_json
from torch import nn

__all__ = ["batch", "train"]


class Layer(nn.TransformerEncoderLayer):
    """A layer in which a token sees those before it."""

    def forward(self, hidden):
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        return super().forward(hidden, mask.to(hidden), is_causal=True)


def loss_of(logits, tokens):
    return nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()
    )


def train(proof):
    """Your loop. What starts with `proof.` is what the proof needs."""
    layers = [
        nn.Embedding(VOCABULARY, WIDTH),
        Layer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True),
        Layer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True),
        nn.Linear(WIDTH, VOCABULARY),
    ]
    model = PipelineModule(layers, num_stages=proof.layout["pp"], loss_fn=loss_of)
    proof.load(model)
    engine, *_ = deepspeed.initialize(model=model, config=deepspeed_json(proof))
    proof.watch(engine)
    for rows in proof.batches():
        micro = proof.micro_batches(rows, engine.grid.get_data_parallel_id())
        pairs = [(each["input_ids"], each["labels"]) for each in micro]
        proof.step(engine.train_batch(iter(pairs)))
