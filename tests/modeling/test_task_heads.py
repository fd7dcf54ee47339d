"""Heads for tasks give what `transformers`' models of the same weights give, padded and as a row.

Of dropout, too, by the same masks; how random ours are is in `test_hidden_dropout.py`.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from their_bert import LENGTHS, REAL, random_input, their_bert
from torch import Tensor, nn
from torch.testing import assert_close

from modeling import cost
from modeling.families import meta_parameters, whole_model
from modeling.formats.huggingface.bert import CONVERSION
from modeling.hidden_dropout import HiddenDropout, salts_of
from modeling.unpadding import row_of
from recipes.schema import Dropout, Recipe

KINDS = [
    ("classification", "post", 3, "BertForSequenceClassification"),
    ("classification", "pre", 2, "MegatronBertForSequenceClassification"),
    ("choice", "post", 3, "BertForMultipleChoice"),
    ("span", "post", 2, "BertForQuestionAnswering"),
    ("span", "pre", 2, "MegatronBertForQuestionAnswering"),
]
ATTENTION_DROPOUT = 0.3
every_kind = pytest.mark.parametrize(("head", "layer_norm", "classes", "kind"), KINDS)


def recipe(head: str, layer_norm: str, classes: int) -> Recipe:
    shape = dict(layers=2, hidden=32, heads=4, vocab_size=83, layer_norm=layer_norm)
    return Recipe.model_validate(dict(
        title="test", sequence_length=16, steps=10, batch={"global": 4}, optimizer={"lr": 1e-3},
        model=dict(family="bert", task_head=head, head_classes=classes, **shape),
        data={"tokenizer": {"kind": "trained_wordpiece"}},
    ))  # fmt: skip


def outcomes(wanted: Recipe, model: transformers.PreTrainedModel):
    """(our padded logits, those of a row, theirs, our padded arguments) of three samples."""
    head = wanted.model.task_head
    ours = whole_model(wanted, CONVERSION.to_canonical(model.state_dict(), wanted.model))
    tokens, types = random_input()
    indices, row = row_of(LENGTHS, 16)
    given = dict(input_ids=tokens, attention_mask=REAL.long(), token_type_ids=types)
    if head == "choice":
        given = {name: value[None] for name, value in given.items()}
    with torch.no_grad():
        padded = ours(tokens, types, LENGTHS)
        in_a_row = ours(*(each.flatten()[indices][None] for each in (tokens, types)), row)
        done = model(**given)
    expected = torch.stack([done.start_logits, done.end_logits], -1) if head == "span" else done.logits
    return ours, padded, in_a_row, expected, (tokens, types, LENGTHS)


@every_kind
def test_logits_are_those_of_transformers(head, layer_norm, classes, kind):
    wanted = recipe(head, layer_norm, classes)
    assert CONVERSION.class_name(wanted.model) == kind
    _, padded, in_a_row, expected, _ = outcomes(wanted, their_bert(wanted))
    real = REAL if head == "span" else ...
    assert_close(padded[real], expected[real], atol=2e-5, rtol=1e-5)
    assert_close(in_a_row[real], expected[real], atol=2e-5, rtol=1e-5)
    if head == "span":
        assert bool((padded[~REAL] == float("-inf")).all())


@every_kind
def test_losses_are_those_of_transformers(head, layer_norm, classes, kind):
    """Of spans where nothing is padded: our softmax leaves padding out."""
    wanted = recipe(head, layer_norm, classes)
    model = their_bert(wanted)
    ours = whole_model(wanted, CONVERSION.to_canonical(model.state_dict(), wanted.model))
    tokens, types = random_input()
    given = dict(input_ids=tokens, token_type_ids=types)
    labels = torch.tensor([1]) if head == "choice" else torch.tensor([1, 0, classes - 1])
    if head == "choice":
        given = {name: value[None] for name, value in given.items()}
    if head == "span":
        starts, ends = torch.tensor([3, 0, 7]), torch.tensor([5, 0, 15])
        expected = model(**given, start_positions=starts, end_positions=ends).loss
        targets = starts, ends, torch.full((3,), 1 / 3)
    else:
        expected, targets = (
            model(**given, labels=labels).loss,
            (labels, torch.full((len(labels),), 1 / len(labels))),
        )
    loss, _ = ours(tokens, types, None, *targets)
    assert_close(loss, expected)
    loss.backward(), expected.backward()
    own = next(p for name, p in ours.named_parameters() if name.endswith("embedding.position"))
    assert_close(own.grad, model.base_model.embeddings.position_embeddings.weight.grad)


@every_kind
def test_the_round_trip_is_exact_and_counts_are_right(head, layer_norm, classes, kind):
    wanted = recipe(head, layer_norm, classes)
    state = their_bert(wanted).state_dict()
    weights = CONVERSION.to_canonical(state, wanted.model)
    assert set(weights) == set(meta_parameters(wanted))
    again = CONVERSION.to_transformers(weights, wanted.model)
    assert all(torch.equal(again[name], state[name]) for name in again)
    assert cost.parameters(wanted.model, 16) == sum(p.numel() for p in meta_parameters(wanted).values())


def test_accuracy_counts_right_answers():
    wanted = recipe("classification", "post", 3)
    ours, padded, *_, given = outcomes(wanted, their_bert(wanted))
    best = padded.argmax(-1)
    labels, weights = torch.stack([best[0], best[1], (best[2] + 1) % 3]), torch.full((3,), 1 / 3)
    _, parts = ours(*given, labels, weights)
    assert_close(parts, torch.tensor([2 / 3]))


class OurMasks(nn.Module):
    """Our hidden dropout of one place, in their model: x (B, S, H), or pooled (B, H)."""

    def __init__(self, dropout: HiddenDropout, salts: Tensor):
        super().__init__()
        self.dropout, self.salts = dropout, salts

    def forward(self, x: Tensor) -> Tensor:
        within = x if x.dim() == 3 else x[:, None]
        return self.dropout(within, self.salts[:, : within.shape[1]]).view(x.shape)


def give_our_masks(theirs: nn.Module, ours: nn.Module, salts: Tensor) -> None:
    """Put our hidden dropout in place of theirs; that of attention stays, at the probability of ours."""
    found = {name: each for name, each in theirs.named_modules() if isinstance(each, nn.Dropout)}
    hidden = [name for name in found if not name.endswith("attention.self.dropout")]
    own = {name: each for name, each in ours.named_modules() if isinstance(each, HiddenDropout)}
    in_order = sorted(own, key=lambda name: name.startswith("head"))
    for name, ours_name in zip(hidden, in_order, strict=True):
        theirs.set_submodule(name, OurMasks(own[ours_name], salts))
    for name in set(found) - set(hidden):
        found[name].p = ATTENTION_DROPOUT


@pytest.mark.parametrize("unpadded", [False, True])
@every_kind
def test_dropout_is_where_transformers_has_it(head, layer_norm, classes, kind, unpadded):
    """With our masks in their model, and one seed for attention, which draws as many numbers in both.

    In a row it draws for the filling too: their model then has a fourth sample.
    """
    dropout = Dropout(hidden=0.2, attention=ATTENTION_DROPOUT)
    wanted = recipe(head, layer_norm, classes).model_copy(update={"dropout": dropout})
    theirs = their_bert(wanted).train()
    ours = whole_model(wanted, CONVERSION.to_canonical(theirs.state_dict(), wanted.model)).train()
    (tokens, types), (indices, row) = random_input(), row_of(LENGTHS, 16)
    salts = salts_of(1, 2, torch.arange(len(LENGTHS)), 16)
    given, seen, own_salts = [tokens, types], LENGTHS, salts
    if unpadded:
        *given, own_salts = (each.flatten(0, 1)[indices][None] for each in (tokens, types, salts))
        seen = row
    torch.manual_seed(4)
    found = ours(*given, seen, salts=own_salts)
    samples = [0, 1, 2, 0] if unpadded else [0, 1, 2]
    give_our_masks(theirs, ours, salts[samples])
    padded = (each[samples] for each in (tokens, types, REAL.long()))
    named = dict(zip(("input_ids", "token_type_ids", "attention_mask"), padded, strict=True))
    if head == "choice":
        named = {name: value[None] for name, value in named.items()}
    torch.manual_seed(4)
    done = theirs(**named)
    if head == "span":
        expected = torch.stack([done.start_logits, done.end_logits], -1)[:3][REAL]
        found = found[REAL]
    else:
        expected = done.logits[..., :3] if head == "choice" else done.logits[:3]
    assert_close(found, expected, atol=1e-4, rtol=1e-4)
    found.square().sum().backward(), expected.square().sum().backward()
    own = next(p for name, p in ours.named_parameters() if name.endswith("embedding.position"))
    assert_close(own.grad, theirs.base_model.embeddings.position_embeddings.weight.grad, atol=1e-3, rtol=1e-3)
