"""GPT-2 with borders: documents do not see each other, and cost no mask of all positions by all positions.

Under layouts: tests/launch/experiments/parity/test_documents.py.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import deepspeed
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint

from data.samples.documents import places_in_documents
from launch.training.micro_batches import for_pipeline, for_plain, move_unpadded, rows_of_documents
from modeling import documents
from modeling.documents import (
    attention_of_documents,
    attention_within_documents,
    one_by_one,
    row_of_documents,
)
from modeling.gpt2 import FAMILY, GPT2Shape
from modeling.hidden_dropout import dropout_seeds_of
from modeling.initialization import Init
from modeling.layer_list import Pipeline, Stack
from recipes.families import PLACES

S, V = 48, 50
# in three samples: several documents of every kind, a single one, documents of one token
BEGINS = ((0, 7, 8, 30), (0,), (0, 1, 2, 20, 47))
B = len(BEGINS)
SHAPE = GPT2Shape(
    layers=2, hidden=32, heads=4, vocab=V, padded_vocab=64, positions=S, borders=True,
    within_documents=True, restarts_positions=True,
)  # fmt: skip
WINDOWS = {"borders": False, "within_documents": False, "restarts_positions": False}
BOTH = pytest.mark.parametrize("restarts", [True, False], ids=["restarted", "of the window"])


def gpt2(**options) -> Stack:
    return FAMILY.plain(replace(SHAPE, **options), group=None, init=Init(seed=3, std=0.3, layers=2)).train()


def batch() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, V, (B, S), generator=g)
    for row, begins in zip(tokens, BEGINS, strict=True):
        row[list(begins[1:])] = 0
    places = torch.from_numpy(places_in_documents(tokens.numpy(), 0))
    labels = torch.randint(1, V, (B, S), generator=g)
    return {"tokens": tokens, "labels": labels, "weights": torch.full((B, S), 1 / (B * S)), PLACES: places}


def slices() -> list[tuple[int, slice]]:
    """Sample and tokens of every document."""
    return [(row, slice(*ends)) for row, begins in enumerate(BEGINS) for ends in pairwise((*begins, S))]


def losses_and_gradients(model: Stack, given, named) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(*given, **named)
    loss.backward()
    return loss.detach(), {p.canonical_name: p.grad.clone() for p in model.parameters()}


def same(one, other) -> None:
    torch.testing.assert_close(other[0], one[0])
    for name, gradient in one[1].items():
        torch.testing.assert_close(other[1][name], gradient, msg=lambda text, name=name: f"{name}: {text}")


def token_losses(model: Stack, given: dict[str, torch.Tensor], row=None) -> torch.Tensor:
    logits = model(given["tokens"], places=row)
    return F.cross_entropy(logits.flatten(0, 1), given["labels"].flatten(), reduction="none")


@BOTH
def test_a_document_has_the_losses_and_gradients_of_itself_alone(restarts):
    """Alone it is a window of its own, which begins where its positions do."""
    packed, alone = gpt2(restarts_positions=restarts), gpt2()
    given = batch()
    together = token_losses(packed, given, row_of_documents(given[PLACES], "cpu")).view(B, S)
    together.sum().backward()
    position = alone.get_parameter("position.weight")
    table = position.detach().clone()
    of_positions = torch.zeros_like(table)
    for sample, part in slices():
        begin = 0 if restarts else part.start
        position.data, position.grad = table.roll(-begin, 0), None
        document = {name: values[sample : sample + 1, part] for name, values in given.items()}
        losses = token_losses(alone, document)
        torch.testing.assert_close(together[sample, part], losses, rtol=1e-5, atol=2e-6)
        losses.sum().backward()
        of_positions += position.grad.roll(begin, 0)
    position.grad = of_positions
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(
            packed.get_parameter(name).grad,
            parameter.grad,
            rtol=1e-4,
            atol=1e-4,
            msg=lambda text, n=name: f"{n}: {text}",
        )


@BOTH
def test_a_changed_token_changes_the_logits_of_its_document_alone(restarts):
    """To the bit; and those of its own from there on."""
    model, given = gpt2(restarts_positions=restarts).eval(), batch()
    row = row_of_documents(given[PLACES], "cpu")
    with torch.no_grad():
        before = model(given["tokens"], places=row)
        for sample, part in slices():
            changed = given["tokens"].clone()
            changed[sample, part.start] += 1
            different = (model(changed, places=row) != before).any(-1)
            expected = torch.zeros(B, S, dtype=torch.bool)
            expected[sample, part] = True
            assert torch.equal(different, expected)


def test_positions_alone_can_begin_anew():
    """Then a document sees those before it."""
    model, given = gpt2(within_documents=False), batch()
    row = row_of_documents(given[PLACES], "cpu")
    window = gpt2(**WINDOWS)
    table = window.get_parameter("position.weight")
    with torch.no_grad():
        logits, plain = model(given["tokens"], places=row), window(given["tokens"])
        assert torch.equal(logits[1], plain[1]) and not torch.equal(logits[0], plain[0])
        changed = given["tokens"].clone()
        changed[0, 0] += 1
        assert (model(changed, places=row) != logits)[0].any(-1).all()
        for place in (0, 6, 7, 21, 22):  # of one document, of two, ...
            table[place] += 1
        assert (window(given["tokens"]) != plain).any()


def test_without_places_a_sample_is_one_document():
    """As in scoring, where a window holds one text."""
    given = batch()
    with torch.no_grad():
        found = gpt2()(given["tokens"])
        expected = gpt2(**WINDOWS)(given["tokens"])
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_recomputation_changes_nothing(monkeypatch, dropout):
    recompute = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    monkeypatch.setattr(deepspeed.checkpointing, "checkpoint", recompute)
    named = {"hidden_dropout": dropout, "attention_dropout": dropout}
    dropout_seeds = dropout_seeds_of(3, 0, torch.arange(B), S) if dropout else None
    found = []
    for how in ({}, {"checkpoint_interval": 1}, {"recomputes_core": True}):
        torch.manual_seed(1)
        found.append(losses_and_gradients(gpt2(**named, **how), *for_plain(batch(), "cpu", dropout_seeds)))
    for again in found[1:]:
        same(found[0], again)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_each_stage_of_a_pipeline_takes_the_rows_of_its_own_host(dropout):
    """In the order of the passes; stages exchange what they do without borders."""
    model, dropout_seeds = (
        gpt2(hidden_dropout=dropout),
        dropout_seeds_of(3, 0, torch.arange(B), S) if dropout else None,
    )
    other = batch()
    other[PLACES] = other[PLACES].roll(1, 0)
    steps = [batch(), other]
    stages = []
    for layers in (model._in_order[:3], model._in_order[3:]):
        applies, modules = zip(*layers, strict=True)
        stage = SimpleNamespace(_borders=True, _applies=applies, forward_funcs=modules, training=False)
        stage.activation_checkpoint_func = None
        stage.rows = rows_of_documents(steps, "cpu")
        stages.append(stage)
    for given in steps:
        inputs, targets = for_pipeline(given, dropout_seeds, "cpu")
        sent = Pipeline.forward(stages[0], inputs)
        shapes = [x.shape for x in sent] if dropout else [sent.shape]
        assert shapes == [(B, S, 32), (B, S, 2)][: len(shapes)]
        plain, named = for_plain(given, "cpu", dropout_seeds)
        expected = model(*plain, **named)
        assert torch.equal(model.loss(Pipeline.forward(stages[1], sent), *targets, None), expected)


def test_the_host_keeps_the_places():
    """Else a GPU would wait for them; row and all others go to it."""
    given = batch()
    move_unpadded([given], "meta")
    assert {name for name, values in given.items() if values.device.type != "meta"} == {PLACES}
    row = for_plain(given, "meta")[1][PLACES]
    assert row.places.device.type == row.offsets.device.type == "meta"


# Attention alone


def qkv(dtype=torch.float32, heads: int = 2, size: int = 16) -> torch.Tensor:
    g = torch.Generator().manual_seed(1)
    return torch.randn(B, S, heads, 3, size, generator=g, dtype=dtype).requires_grad_()


def under_a_mask(given: torch.Tensor) -> torch.Tensor:
    document = (batch()[PLACES] == 0).cumsum(1)[:, None]
    mask = (document[..., None] == document[:, :, None]) & torch.ones(S, S, dtype=torch.bool).tril()
    q, k, v = given.permute(3, 0, 2, 1, 4).unbind(0)
    return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_kernel_computes_what_a_mask_would(dtype):
    row = row_of_documents(batch()[PLACES], "cpu")
    assert row.offsets.tolist() == [0, 7, 8, 30, 48, 96, 97, 98, 116, 143, 144]
    upper = torch.randn(B, S, 2, 16, dtype=dtype)

    def single(given: torch.Tensor) -> torch.Tensor:
        return one_by_one(given.flatten(0, 1), row.offsets, 0.0).view(upper.shape)

    kernels = under_a_mask, single, lambda given: attention_within_documents(given, row, 0.0)
    found = []
    for kernel in kernels:
        given = qkv(dtype)
        out = kernel(given)
        found.append((out.detach(), *torch.autograd.grad(out, given, upper)))
    for pair in found[1:]:
        for expected, values in zip(found[0], pair, strict=True):
            close = dict(rtol=2e-2, atol=5e-2) if dtype == torch.bfloat16 else {}
            torch.testing.assert_close(values, expected, **close)


def test_the_gradient_is_exact():
    offsets = torch.tensor([0, 3, 4, 8], dtype=torch.int32)
    given = torch.randn(8, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x: attention_of_documents(x, offsets)[0], given)


def test_a_gpu_takes_the_row_of_documents_with_a_causal_kernel(monkeypatch):
    """FlashAttention's arguments; its numbers need a GPU."""
    asked = {}

    def varlen(tokens, row, dropout, *, causal):
        asked.update(row=row, dropout=dropout, causal=causal, shape=tokens.shape)
        return tokens[:, :, 0]

    monkeypatch.setattr(documents, "has_varlen", lambda given: True)
    monkeypatch.setattr(documents, "varlen_attention", varlen)
    row = row_of_documents(batch()[PLACES], "cpu")
    out = attention_within_documents(qkv(), row, 0.1)
    assert out.shape == (B, S, 2, 16) and asked["row"] is row and row.longest == S
    assert asked["causal"] and asked["dropout"] == 0.1 and asked["shape"] == (B * S, 2, 3, 16)


def test_dropout_on_attention_weights_drops_some_within_documents():
    row, given = row_of_documents(batch()[PLACES], "cpu"), qkv().detach()
    torch.manual_seed(0)
    without, least, some = (attention_within_documents(given, row, p) for p in (0.0, 1e-9, 0.5))
    torch.testing.assert_close(least, without)
    assert (some - without).abs().max() > 0.1
    changed = given.clone()
    changed[0, :30] = 9
    torch.manual_seed(2)
    one = attention_within_documents(given, row, 0.5)
    torch.manual_seed(2)
    other = attention_within_documents(changed, row, 0.5)
    assert torch.equal(one[0, 30:], other[0, 30:]) and torch.equal(one[1:], other[1:])


def test_no_mask_and_no_scores_of_all_positions_are_kept_or_made():
    """The largest tensor of attention's passes is qkv's gradient, of a document as long as its window, too."""
    length = 2048
    given = torch.randn(1, length, 1, 3, 16, requires_grad=True)
    largest = 0

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            found = function(*args, **(kwargs or {}))
            for each in torch.utils._pytree.tree_leaves(found):
                largest = max(largest, each.numel() if isinstance(each, torch.Tensor) else 0)
            return found

    row = row_of_documents(torch.arange(length)[None], "cpu")
    with Sizes():
        attention_within_documents(given, row, 0.0).sum().backward()
    assert largest == given.numel() < length**2


@pytest.mark.ci
@pytest.mark.parametrize("whole", [True, False])
def test_torch_compile_makes_one_graph_for_all_borders(whole):
    """By the backend that generates no code. Of a pipeline each layer is compiled by itself."""
    import torch._dynamo

    torch._dynamo.reset()
    options = {} if whole else {"hidden_dropout": 0.1}
    model, given = gpt2(**options), batch()
    dropout_seeds = None if whole else dropout_seeds_of(3, 0, torch.arange(B), S)
    compiled = gpt2(**options)
    if whole:
        compiled.compile(backend="aot_eager", fullgraph=True)
    else:
        for layer in compiled.layers:
            layer.forward = torch.compile(layer.forward, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for shift in range(4):
            given["tokens"] = given["tokens"].roll(shift, 1)
            given["tokens"][0, 40 : 40 + shift] = 0
            given[PLACES] = torch.from_numpy(places_in_documents(given["tokens"].numpy(), 0))
            same(
                *(losses_and_gradients(m, *for_plain(given, "cpu", dropout_seeds)) for m in (model, compiled))
            )
    torch._dynamo.reset()


@pytest.mark.ci
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_what_borders_cost(dtype):
    """Prints processor time of a pass and its backward pass, in turns; time decides nothing here."""
    length, samples, turns = 1024, 2, 3
    g = torch.Generator().manual_seed(0)
    begins = torch.randint(100, 301, (2 * samples * length // 200,), generator=g).cumsum(0)
    tokens = torch.randint(1, V, (samples, length), generator=g)
    tokens.view(-1)[begins[begins < tokens.numel()]] = 0
    row = row_of_documents(torch.from_numpy(places_in_documents(tokens.numpy(), 0)), "cpu")
    shape = dict(layers=2, hidden=384, heads=6, positions=length)
    models = {"window": gpt2(**shape, **WINDOWS).to(dtype), "document": gpt2(**shape).to(dtype)}
    given = torch.randn(samples, length, 6, 3, 64, generator=g).to(dtype).requires_grad_()
    passes = {
        "model": lambda kind: models[kind](tokens, places=row).float().square().sum().backward(),
        "attention": lambda kind: (
            attention_within_documents(given, row if kind == "document" else None, 0.0).sum().backward()
        ),
    }
    seconds: dict[tuple[str, str], list[float]] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(1 + turns):
        for what, once in passes.items():
            for kind in models:
                began = time.process_time()
                once(kind)
                seconds.setdefault((what, kind), []).append(time.process_time() - began)
    torch.set_num_threads(threads)
    for what in passes:
        window, document = (statistics.median(seconds[what, kind][1:]) for kind in models)
        told = f"{what}: window {window:.3f} s, document {document:.3f} s, {document / window:.2f} times"
        print(f"{dtype}, {len(row.offsets) - 1} documents, {told}")
