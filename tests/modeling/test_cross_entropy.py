"""The loss of one rank; over a tensor group it is checked by tests/workers/tensor_parallel.py."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from modeling.parallel import cross_entropy

VOCAB, PADDED = 50, 64


def case(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits as the output layer gives them, targets, and what comes back to each loss."""
    draw = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(2, 7, PADDED, generator=draw).to(dtype)
    logits[..., VOCAB:] = -torch.inf
    targets = torch.randint(VOCAB, (2, 7), generator=draw)
    return logits, targets, torch.randn(2, 7, generator=draw)


@pytest.mark.parametrize("how", ["at once", "in blocks", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_loss_and_gradient_are_those_of_torch(dtype, how, monkeypatch):
    logits, targets, incoming = case(dtype)
    exact = logits[..., :VOCAB].double().requires_grad_()
    expected = F.cross_entropy(exact.flatten(0, 1), targets.flatten(), reduction="none").view(2, 7)
    (wanted,) = torch.autograd.grad(expected, exact, incoming.double())

    if how == "in blocks":
        monkeypatch.setattr(cross_entropy, "BLOCK_ELEMENTS", 3 * PADDED)  # blocks of 3, the last one of 2
    compute = cross_entropy.token_losses
    if how == "compiled":
        compute = torch.compile(compute, fullgraph=True, backend="aot_eager")
    logits.requires_grad_()
    losses = compute(logits * 1, targets, None)
    (gradient,) = torch.autograd.grad(losses, logits, incoming)

    assert losses.dtype == torch.float32 and gradient.dtype == dtype
    torch.testing.assert_close(losses, expected.float(), rtol=1e-6, atol=1e-6)
    tolerance = 1e-6 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(gradient[..., :VOCAB], wanted.to(dtype), rtol=tolerance, atol=tolerance)
    assert not gradient[..., VOCAB:].any(), "padding must get no gradient"


def test_the_gradient_takes_the_place_of_the_logits(monkeypatch):
    monkeypatch.setattr(cross_entropy, "BLOCK_ELEMENTS", PADDED)
    logits, targets, _ = case(torch.bfloat16)
    kept = (logits.requires_grad_() * 1).detach().requires_grad_()
    cross_entropy.token_losses(kept, targets, None).sum().backward()
    assert kept.grad is not None and kept.grad.data_ptr() == kept.data_ptr()
