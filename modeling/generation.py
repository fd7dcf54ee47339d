"""Continuing a prompt with a one-process model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from modeling.gpt2 import GPT2


@torch.no_grad()
def continue_tokens(
    model: GPT2, prompt: Sequence[int], length: int, *, seed: int, temperature: float = 0.8, top_k: int = 40, end: int | None = None
) -> list[int]:
    """`length` tokens sampled after `prompt` from the `top_k` most likely; the context slides when it exceeds the positions.

    Stops early at token `end`. The model must hold the whole vocabulary (no tensor parallelism).
    """
    assert model.group is None, "generation needs the whole vocabulary on one rank"
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    model.eval()
    device = next(model.parameters()).device
    for _ in range(length):
        context = torch.tensor([tokens[-model.shape.positions :]], device=device)
        logits = model(context)[0, -1].float().cpu() / temperature
        best = logits.topk(min(top_k, len(logits)))
        choice = best.indices[torch.multinomial(best.values.softmax(-1), 1, generator=generator)]
        if int(choice) == end:
            break
        tokens.append(int(choice))
    return tokens[len(prompt) :]
