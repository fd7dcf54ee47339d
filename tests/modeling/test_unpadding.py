"""BERT without padding: losses and gradients are those of padded samples; nothing is computed for padding.

Under ZeRO-3 and tensor parallelism: test_layouts.py, whose pipelines are padded.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import deepspeed
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint

from launch.training.micro_batches import for_plain
from launch.training.padded_batches import PREDICTIONS_MULTIPLE
from modeling import unpadding
from modeling.bert import FAMILY, BertShape
from modeling.hidden_dropout import dropout_seeds_of
from modeling.initialization import Init
from modeling.layer_list import Stack
from modeling.unpadding import ROW_MULTIPLE, PackedRow, attention_of_samples, row_of, unpadded_attention
from recipes.families import BERT

S, P, V = 48, 6, 90
LENGTHS = (48, 17, 9, 30, 1, 48, 22, 13)
B = len(LENGTHS)
BOTH = pytest.mark.parametrize("post", [False, True], ids=["pre-LN", "post-LN"])


def bert(post: bool = False, head: str = "sop", **options) -> Stack:
    shape = BertShape(
        layers=2, hidden=32, heads=4, vocab=V, padded_vocab=128, positions=S, post_norm=post,
        sentence_head=head, **options,
    )  # fmt: skip
    return FAMILY.plain(shape, group=None, init=Init(seed=3, std=0.1, layers=2))


def batch(lengths=LENGTHS) -> dict[str, torch.Tensor]:
    """Samples that predict 1 to P tokens."""
    g = torch.Generator().manual_seed(0)
    count, ends = len(lengths), torch.tensor(lengths)
    real = torch.arange(P) < (1 + torch.arange(count) % P)[:, None]
    return {
        "tokens": torch.randint(5, V, (count, S), generator=g),
        "token_types": torch.randint(0, 2, (count, S), generator=g),
        "lengths": ends,
        "positions": torch.stack([torch.randint(0, n, (P,), generator=g) for n in lengths]) * real,
        "labels": torch.randint(5, V, (count, P), generator=g) * real,
        "weights": real * torch.rand(count, P, generator=g),
        "sentence_labels": torch.arange(count) % 2,
        "sentence_weights": torch.full((count,), 1 / count),
    }


def losses_and_gradients(model: Stack, arguments, named):
    model.zero_grad()
    loss, parts = model(*arguments, **named)
    loss.backward()
    return loss.detach(), parts, {p.canonical_name: p.grad.clone() for p in model.parameters()}


def compare(one, other):
    for expected, found in zip(one[:2], other[:2], strict=True):
        torch.testing.assert_close(found, expected)
    for name, gradient in one[2].items():
        torch.testing.assert_close(other[2][name], gradient, msg=lambda text, name=name: f"{name}: {text}")


@BOTH
@pytest.mark.parametrize(
    "options", [{}, {"hidden_dropout": 0.2}, {"head": "none"}], ids=["dense", "dropout", "no sentence head"]
)
def test_losses_and_gradients_are_those_of_padded_samples(post, options):
    model, b = bert(post, **options).train(), batch()
    dropout_seeds = dropout_seeds_of(3, 0, torch.arange(B), S) if options.get("hidden_dropout") else None
    padded = (
        [b[name] for name in BERT.fields.names],
        ({} if dropout_seeds is None else {"dropout_seeds": dropout_seeds}),
    )
    unpadded = for_plain(b, "cpu", dropout_seeds)
    assert isinstance(unpadded[0][2], PackedRow)
    compare(losses_and_gradients(model, *padded), losses_and_gradients(model, *unpadded))
    if dropout_seeds is not None:  # another token's seeds are others
        shifted = {"dropout_seeds": unpadded[1]["dropout_seeds"].roll(1, 1)}
        assert abs(model(*unpadded[0], **shifted)[0] - model(*padded[0], **padded[1])[0]) > 1e-3


@BOTH
def test_recomputation_changes_no_gradient(post, monkeypatch):
    recompute = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    monkeypatch.setattr(deepspeed.checkpointing, "checkpoint", recompute)
    dropout_seeds = dropout_seeds_of(3, 0, torch.arange(B), S)
    made = [
        losses_and_gradients(
            bert(post, hidden_dropout=0.2, checkpoint_interval=i).train(),
            *for_plain(batch(), "cpu", dropout_seeds),
        )
        for i in (0, 1)
    ]
    compare(*made)


def test_nothing_is_computed_for_padding():
    """Beyond the filling of the two rows up to a multiple."""
    (tokens, types, row, positions, labels, weights, *_), named = for_plain(batch(), "cpu")
    assert tokens.shape == types.shape == row.places.shape == (1, 192) and not named
    assert 0 <= 192 - sum(LENGTHS) < ROW_MULTIPLE
    real = int((batch()["weights"] > 0).sum())
    assert positions.shape == labels.shape == weights.shape == (1, 32)
    assert int((weights > 0).sum()) == real > 32 - PREDICTIONS_MULTIPLE
    assert row.offsets.tolist() == [0, 48, 65, 74, 104, 105, 153, 175, 188, 192] and row.longest == 48


def test_samples_without_padding_stay_as_they_are():
    """Except on a CPU, which is faster by rows."""
    full, dropout_seeds = batch((S,) * B), dropout_seeds_of(3, 0, torch.arange(B), S)
    arguments, named = for_plain(full, "meta", dropout_seeds)
    assert arguments[0].shape == arguments[1].shape == named["dropout_seeds"].shape[:2] == (B, S)
    assert arguments[2] is None and arguments[3].shape == (B, P)
    arguments, named = for_plain(full, "cpu", dropout_seeds)
    assert torch.equal(arguments[0], full["tokens"].view(1, -1)) and arguments[2].offsets[-2] == B * S


def test_a_batch_of_no_predictions_has_a_loss_of_0():
    """Held-out batches are filled with samples of weight 0."""
    b = batch()
    b["weights"], b["sentence_weights"] = 0 * b["weights"], 0 * b["sentence_weights"]
    arguments, _ = for_plain(b, "cpu")
    assert bert()(*arguments)[0].item() == 0


def qkv_of(row: PackedRow, dtype=torch.float32) -> torch.Tensor:
    g = torch.Generator().manual_seed(1)
    return torch.randn(row.places.shape[1], 2, 3, 8, generator=g, dtype=dtype).requires_grad_()


def one_by_one(qkv: torch.Tensor, row: PackedRow) -> torch.Tensor:
    """By torch's attention on every sample alone."""
    each = [qkv[a:b].permute(2, 1, 0, 3) for a, b in pairwise(row.offsets.tolist()) if b > a]
    return torch.cat([F.scaled_dot_product_attention(*x[:, None]).squeeze(0).transpose(0, 1) for x in each])


@pytest.mark.parametrize("lengths", [LENGTHS, (32, 20, 12)], ids=["filled", "without filling"])
def test_attention_keeps_to_the_samples(lengths):
    row = row_of(torch.tensor(lengths), S)[1]
    upper = torch.randn(row.places.shape[1], 2, 8)
    upper[sum(lengths) :] = 0  # nobody looks at the filling
    found = []
    for attention in (one_by_one, unpadded_attention, partial(unpadding._padded_attention, dropout=0.0)):
        qkv = qkv_of(row)
        out = attention(qkv, row)
        found.append((out[: sum(lengths)], *torch.autograd.grad(out, qkv, upper)))
    for out, gradient in found[1:]:
        torch.testing.assert_close(out, found[0][0])
        torch.testing.assert_close(gradient, found[0][1])


def test_the_gradient_of_attention_is_exact():
    row = row_of(torch.tensor((5, 3)), 8)[1]
    offsets = row.offsets[:-1]  # without the filling, which makes it slow
    qkv = qkv_of(row, torch.float64)[:8, :, :, :2].detach().requires_grad_()
    torch.autograd.gradcheck(lambda x: attention_of_samples(x, offsets), qkv)


def test_dropout_on_attention_weights_drops_some():
    row = row_of(torch.tensor(LENGTHS), S)[1]
    qkv = qkv_of(row).detach()
    without, some, all_of_it = (unpadded_attention(qkv, row, p) for p in (0.0, 1e-9, 0.5))
    real = slice(sum(LENGTHS))
    torch.testing.assert_close(some[real], without[real])
    assert (all_of_it - without)[real].abs().max() > 0.1


@pytest.mark.ci
def test_torch_compile_makes_one_graph_for_rows_of_all_lengths_and_all_numbers_of_predictions():
    """By the backend that generates no code, which takes no time."""
    import torch._dynamo

    torch._dynamo.reset()
    model = bert(hidden_dropout=0.1).train()
    dropout_seeds = dropout_seeds_of(3, 0, torch.arange(B), S)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths, predictions in (
            (LENGTHS, 32),
            ((48, 40, 40, 8, 9, 48, 31, 2), 48),
            ((8,) * 7 + (48,), 16),
        ):
            micro_batch = batch(lengths)
            counted = {16: torch.eye(B, P), 32: micro_batch["weights"], 48: torch.ones(B, P)}
            micro_batch["weights"] = counted[predictions]
            arguments, named = for_plain(micro_batch, "cpu", dropout_seeds)
            assert isinstance(arguments[2], PackedRow) and arguments[4].shape == (1, predictions)
            eager, ours = (losses_and_gradients(m, arguments, named) for m in (model, compiled))
            compare(eager, ours)
    torch._dynamo.reset()
