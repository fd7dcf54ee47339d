"""What the examples train: random tokens, and a Llama of two layers."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 64
LENGTH = 16
WIDTH = 32


def batch(step):
    """The global batch of a step: the same under every layout."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (8, LENGTH), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def llama(**more):
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        **more,
    )
    return LlamaForCausalLM(config)


def deepspeed_json(proof):
    """The DeepSpeed JSON of a layout, as a dictionary."""
    accumulation = proof.layout["accumulation"]
    return {
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
