"""BERT in one process: padding, predicted positions, placements, losses, recomputation, the engine's input.

Logits against `transformers` are in test_convert_bert.py, parallel layouts in
tests/launch/experiments/parity/test_layouts.py.
"""

from __future__ import annotations

from functools import partial

import deepspeed
import pytest
import torch
import torch.utils.checkpoint

from launch.training import micro_batches
from modeling.bert import FAMILY, BertShape, pretraining_loss
from modeling.hidden_dropout import dropout_seeds_of
from modeling.initialization import Init
from modeling.layer_list import Stack
from recipes.families import BERT

B, S, P, V = 3, 24, 4, 90
BOTH = pytest.mark.parametrize("post", [False, True], ids=["pre-LN", "post-LN"])


def bert(post: bool = False, head: str = "sop", **options) -> Stack:
    shape = BertShape(
        layers=3, hidden=32, heads=4, vocab=V, padded_vocab=128, positions=S, post_norm=post,
        sentence_head=head, **options,
    )  # fmt: skip
    return FAMILY.plain(shape, group=None, init=Init(seed=3, std=0.1, layers=3)).eval()


def batch(lengths=(24, 17, 9)) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    lengths = torch.tensor(lengths)
    positions = torch.stack([torch.randperm(int(n), generator=g)[:P] for n in lengths])
    return {
        "tokens": torch.randint(5, V, (B, S), generator=g),
        "token_types": (torch.arange(S) > 6).long().repeat(B, 1),
        "lengths": lengths, "positions": positions, "labels": torch.randint(5, V, (B, P), generator=g),
        "weights": torch.tensor([[1.0, 1, 1, 1], [1, 1, 1, 0], [1, 0, 0, 0]]),
        "sentence_labels": torch.tensor([0, 1, 1]),
        "sentence_weights": torch.full((B,), 1 / B),
    }  # fmt: skip


def logits(model: Stack, b: dict[str, torch.Tensor], positions=None):
    with torch.no_grad():
        return model(b["tokens"], b["token_types"], b["lengths"], positions)


@BOTH
def test_what_stands_in_the_padding_changes_nothing(post):
    model, b = bert(post), batch()
    other = dict(b, tokens=b["tokens"].clone(), token_types=b["token_types"].clone())
    padding = torch.arange(S) >= b["lengths"][:, None]
    other["tokens"][padding] = 7
    other["token_types"][padding] = 0
    (first, sentences), (second, same_sentences) = logits(model, b), logits(model, other)
    torch.testing.assert_close(first[~padding], second[~padding])
    torch.testing.assert_close(sentences, same_sentences)
    other["tokens"][0, 20] = 8  # the first sample is not padded: a real token does matter, also to its left
    assert (logits(model, other)[0][0, 3] - first[0, 3]).abs().max() > 1e-4


@BOTH
def test_a_sample_alone_without_padding_gives_the_same(post):
    model, b = bert(post), batch()
    whole, sentences = logits(model, b)
    for i, length in enumerate(b["lengths"].tolist()):
        alone, sentence = model(b["tokens"][i : i + 1, :length], b["token_types"][i : i + 1, :length], None)
        torch.testing.assert_close(alone[0], whole[i, :length])
        torch.testing.assert_close(sentence[0], sentences[i])


def test_the_head_computes_the_predicted_positions_alone():
    model, b = bert(), batch()
    whole, _ = logits(model, b)
    chosen, _ = logits(model, b, b["positions"])
    assert chosen.shape == (B, P, V)
    torch.testing.assert_close(chosen, whole.gather(1, b["positions"].unsqueeze(-1).expand(-1, -1, V)))


def test_the_placements_have_the_same_parameters_and_other_functions():
    pre, post = bert(False), bert(True)
    assert sum(p.numel() for p in pre.parameters()) == sum(p.numel() for p in post.parameters())
    names = [{p.canonical_name for p in model.parameters()} for model in (pre, post)]
    assert names[0] - names[1] == {"final_norm.weight", "final_norm.bias"}
    assert names[1] - names[0] == {"embedding.norm.weight", "embedding.norm.bias"}
    assert (logits(pre, batch())[0] - logits(post, batch())[0]).abs().max() > 0.1


def test_post_norm_normalises_what_leaves_a_layer_and_pre_norm_what_enters_a_branch():
    for post in (False, True):
        model, x = bert(post), 10 * torch.randn(2, S, 32, generator=torch.Generator().manual_seed(1))
        out = model.layers[0](x)
        assert torch.allclose(out.mean(-1), torch.zeros(2, S), atol=1e-5) is post
        scaled = model.layers[0](2 * x)
        # A pre-LN branch does not see the scale of the stream: twice the stream adds one more stream.
        assert torch.allclose(scaled - out, x, atol=1e-3) is not post


def test_the_loss_is_the_mean_over_predictions_plus_the_sentence_loss():
    b = batch()
    x, sentences = logits(bert(), b, b["positions"])
    weights = b["weights"] / b["weights"].sum()
    loss, parts = pretraining_loss(
        x, sentences, b["labels"], weights, b["sentence_labels"], b["sentence_weights"], None
    )
    real = b["weights"].bool()
    mlm = torch.nn.functional.cross_entropy(x[real], b["labels"][real])
    sentence = torch.nn.functional.cross_entropy(sentences, b["sentence_labels"])
    torch.testing.assert_close(loss, mlm + sentence)
    right = (sentences.argmax(-1) == b["sentence_labels"]).float().mean()
    torch.testing.assert_close(parts, torch.stack([mlm, sentence, right]))
    assert pretraining_loss(x, None, b["labels"], weights, b["sentence_labels"], b["sentence_weights"], None)[
        1
    ].shape == (1,)


def test_without_a_sentence_head_there_is_no_pooler():
    model = bert(head="none")
    assert not any("pooler" in p.canonical_name or "sentence" in p.canonical_name for p in model.parameters())
    assert logits(model, batch())[1] is None


@BOTH
def test_recomputation_changes_no_gradient(post, monkeypatch):
    """By torch's own checkpointing, since DeepSpeed's wants a process group."""
    recompute = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    monkeypatch.setattr(deepspeed.checkpointing, "checkpoint", recompute)
    gradients = []
    for interval in (0, 1, 2):
        model = bert(post, checkpoint_interval=interval).train()
        arguments, _ = micro_batches.for_plain(batch(), "cpu")
        model(*arguments)[0].backward()
        gradients.append({p.canonical_name: p.grad for p in model.parameters()})
    for other in gradients[1:]:
        for name, gradient in gradients[0].items():
            torch.testing.assert_close(other[name], gradient, msg=name)


def test_a_micro_batch_is_cut_after_its_longest_sample_and_needs_no_mask_if_that_is_all():
    model = bert()
    whole = model(*(batch((13, 9, 12))[name] for name in BERT.fields.names))[0]
    arguments, _ = micro_batches.for_plain(batch((13, 9, 12)), "cpu")
    assert arguments[0].shape == arguments[1].shape == (B, 16) and arguments[2] is not None
    torch.testing.assert_close(model(*arguments)[0], whole)
    shared, _ = micro_batches.for_plain(batch((13, 9, 12)), "cpu", position_ranks=3)
    assert shared[0].shape == (B, 24), "three ranks take as many positions each"
    full, _ = micro_batches.for_plain(batch((16, 16, 16)), "cpu")
    assert full[0].shape == (B, 16) and full[2] is None


@BOTH
def test_dropout_does_not_depend_on_where_padding_is_cut(post):
    model, b, dropout_seeds = (
        bert(post, hidden_dropout=0.2).train(),
        batch((13, 9, 12)),
        dropout_seeds_of(3, 0, torch.arange(B), S),
    )
    whole = model(*(b[name] for name in BERT.fields.names), dropout_seeds=dropout_seeds)[0]
    arguments, named = micro_batches.for_plain(b, "cpu", dropout_seeds)
    assert arguments[0].shape == (B, 16) == named["dropout_seeds"].shape[:2]
    torch.testing.assert_close(model(*arguments, **named)[0], whole)
    assert abs(model(*arguments, dropout_seeds=dropout_seeds[:, 8:])[0] - whole) > 1e-3, "masks do matter"
    assert abs(model.eval()(*arguments)[0] - whole) > 1e-3
