"""The modules on four gloo ranks against the dense model, and in this process; conversion."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import modeling_checks
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from launching import WORKERS, run_ranks
from safetensors.torch import load_file, save_file
from slices import joined
from transformers import GPT2LMHeadModel

from launch.training.engine import parameter_groups
from modeling.formats.huggingface.gpt2 import CONVERSION, config
from modeling.formats.huggingface.weight_files import read_state_dict
from modeling.gpt2 import FAMILY, GPT2Shape
from modeling.initialization import Init, Shard, canonical_name
from modeling.layer_list import Stack, first, recomputed_chunks
from modeling.transformer import tanh_gelu
from recipes.layout import Coordinates, coordinates, data_groups, model_groups, pipeline_groups, tensor_groups
from recipes.schema import Model

SHAPE = GPT2Shape(layers=2, hidden=32, heads=4, vocab=300, padded_vocab=384, positions=16)
MODEL = Model(layers=2, hidden=32, heads=4, vocab_size=300)
# word.weight of seed 1234
PINNED_DRAW = [0.18042792, 0.58320785, -0.03542988, 1.23329926, 0.95046782, -0.10789277]


to_canonical = CONVERSION.to_canonical


@pytest.fixture(scope="module")
def theirs() -> GPT2LMHeadModel:
    """A `transformers` GPT-2 of which no parameter is zero or one and attention is far from uniform."""
    torch.manual_seed(0)
    ends = SimpleNamespace(eos_token_id=7)
    model = GPT2LMHeadModel(config(MODEL, positions=SHAPE.positions, tokenizer=ends)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.arange(2 * SHAPE.positions).view(2, -1) * 37 % SHAPE.vocab


def logits_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits = model(tokens)
    return getattr(logits, "logits", logits)


def gpt2(given=None, *, seed: int = 0, shape: GPT2Shape = SHAPE, std: float = 0.02) -> Stack:
    return FAMILY.plain(shape, group=None, init=Init(seed=seed, std=std, layers=shape.layers, given=given))


def canonical(model: Stack) -> dict[str, torch.Tensor]:
    """Full, unpadded weights by name."""
    return {
        canonical_name(p): p.detach() if p.shard is None else joined(p.shard, [p.detach()])
        for p in model.parameters()
    }


# On four ranks


@pytest.fixture(scope="module")
def on_ranks(theirs, tokens, tmp_path_factory) -> list[dict[str, str | None]]:
    return launched(theirs, tokens, tmp_path_factory.mktemp("modeling"))


@pytest.fixture(scope="module")
def graphs_on_ranks(theirs, tokens, tmp_path_factory) -> list[dict[str, str | None]]:
    return launched(theirs, tokens, tmp_path_factory.mktemp("graphs"), "graphs")


def launched(theirs, tokens, directory, *which) -> list[dict[str, str | None]]:
    """What each rank of one launch found: check -> traceback, or None."""
    ours = to_canonical(theirs.state_dict(), MODEL)
    save_file(
        {**ours, "tokens": tokens, "logits": logits_of(theirs, tokens)},
        directory / "transformers.safetensors",
    )
    done = run_ranks(
        modeling_checks.PROCESSES, WORKERS / "modeling_checks.py", directory, *which, timeout=300
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return [json.loads(file.read_text()) for file in sorted(directory.glob("rank-*.json"))]


def check_on_ranks(ranks, name):
    assert len(ranks) == modeling_checks.PROCESSES
    failures = [f"rank {rank}:\n{found[name]}" for rank, found in enumerate(ranks) if found[name] is not None]
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("name", modeling_checks.NAMES)
def test_on_ranks(on_ranks, name):
    check_on_ranks(on_ranks, name)


@pytest.mark.ci
@pytest.mark.parametrize("name", modeling_checks.GRAPHS)
def test_graphs_on_ranks(graphs_on_ranks, name):
    check_on_ranks(graphs_on_ranks, name)


def test_grid_of_eight_is_the_picture():
    """The table of layout.py: tensor fastest, pipeline slowest."""
    assert tensor_groups(2, 2, 2) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert data_groups(2, 2, 2) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert pipeline_groups(2, 2, 2) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert model_groups(2, 2, 2) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert coordinates(5, tp=2, dp=2) == Coordinates(tp=1, dp=0, pp=1)
    assert coordinates(6, tp=2, dp=2) == Coordinates(tp=0, dp=1, pp=1)


@pytest.mark.parametrize("degrees", [(1, 1, 1), (4, 1, 1), (1, 3, 1), (2, 3, 4), (8, 2, 1)])
def test_grid_agrees_with_deepspeeds_topology(degrees):
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    tp, pp, dp = degrees
    topology = PipeModelDataParallelTopology(num_pp=pp, num_mp=tp, num_dp=dp)
    for rank in range(tp * pp * dp):
        at = coordinates(rank, tp, dp)
        assert topology.get_rank(pipe=at.pp, data=at.dp, model=at.tp) == rank
    for axis, groups in (("model", tensor_groups), ("data", data_groups), ("pipe", pipeline_groups)):
        # it leaves out groups of one
        theirs = topology.get_axis_comm_lists(axis) or [[rank] for rank in range(tp * pp * dp)]
        assert sorted(groups(*degrees)) == sorted(map(list, theirs))


# Initial weights


def test_weights_depend_on_seed_and_name_alone():
    """Another depth, order of construction or state of the global generator leaves a tensor as it is."""
    first = canonical(gpt2())
    torch.manual_seed(99)
    np.random.seed(99)
    deeper = canonical(gpt2(shape=replace(SHAPE, layers=5)))
    init = Init(seed=0, std=0.02, layers=SHAPE.layers)
    alone = init.child("layers.1").child("mlp").child("expand").normal("weight", (128, 32), 0.02)
    assert torch.equal(first["layers.1.mlp.expand.weight"], deeper["layers.1.mlp.expand.weight"])
    assert torch.equal(first["layers.1.mlp.expand.weight"], alone)
    other_seed = canonical(gpt2(seed=1))
    assert not torch.equal(first["word.weight"], other_seed["word.weight"])
    assert not torch.equal(first["layers.0.mlp.expand.weight"], first["layers.1.mlp.expand.weight"])


def test_weights_stay_what_they_are():
    """A published run can be repeated: a change of the draw needs a word in the notes of a release."""
    drawn = Init(seed=1234, std=1.0, layers=1).normal("word.weight", (2, 3), 1.0).flatten().tolist()
    assert drawn == pytest.approx(PINNED_DRAW, abs=1e-6)


def test_gpt2_statistics():
    """N(0, 0.02); projections onto the residual stream 0.02 / sqrt(2 layers); LayerNorms one, biases zero."""
    shape = replace(SHAPE, hidden=128, layers=8)
    for name, tensor in canonical(gpt2(shape=shape)).items():
        if name.endswith("bias"):
            assert not tensor.any(), name
        elif "norm" in name:
            assert (tensor == 1).all(), name
        else:
            residual = name.endswith(("projection.weight", "contract.weight"))
            std = 0.02 / (2 * shape.layers) ** 0.5 if residual else 0.02
            error = 4 / (2 * tensor.numel()) ** 0.5  # four standard errors
            assert float(tensor.std()) == pytest.approx(std, rel=error), name
            assert abs(float(tensor.mean())) < 4 * std / tensor.numel() ** 0.5, name


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("dim", "shape", "padded"), [(0, (16, 3), None), (1, (3, 16), None), (0, (10, 3), 16), (0, (16,), None)]
)
def test_slices_join_to_the_full_tensor(size, dim, shape, padded):
    full = torch.randn(shape)
    shards = [Shard(dim, rank, size, padded, entries=shape[dim]) for rank in range(size)]
    slices = [shard.of(full) for shard in shards]
    assert all(s.shape == shards[0].local_shape(shape) and s.is_contiguous() for s in slices)
    assert all(torch.equal(joined(shard, slices), full) for shard in shards)
    assert not torch.cat(slices, dim).narrow(dim, shape[dim], (padded or shape[dim]) - shape[dim]).any()
    before = full.clone()
    slices[0].add_(1)
    assert torch.equal(full, before), "a slice must be a copy"


def test_shapes_alone_take_no_memory():
    model = FAMILY.plain(SHAPE, group=None, init=Init(seed=0, std=0.02, layers=2, meta=True))
    assert all(p.is_meta for p in model.parameters())
    assert {p.canonical_name: p.shape for p in model.parameters()} == {
        p.canonical_name: p.shape for p in gpt2().parameters()
    }


def test_other_precisions_round_the_same_draw():
    full, half = (
        Init(seed=0, std=0.02, layers=2, dtype=d).normal("w", (16, 16), 0.02)
        for d in (torch.float32, torch.bfloat16)
    )
    assert half.dtype == torch.bfloat16 and torch.equal(full.bfloat16(), half)


def test_given_weights_of_another_shape_are_refused():
    given = canonical(gpt2())
    with pytest.raises(ValueError, match=r"layers.1.mlp.expand.bias has shape \(128,\).*lack it"):
        gpt2({name: t for name, t in given.items() if name != "layers.1.mlp.expand.bias"})
    with pytest.raises(ValueError, match=r"word.weight has shape \(300, 32\).*have shape \(301, 32\)"):
        gpt2({**given, "word.weight": torch.zeros(301, 32)})


# What the optimizer decays


def test_biases_and_layer_norms_are_not_decayed():
    model = gpt2()
    decayed, plain = parameter_groups(model, 0.1)
    names = {id(p): p.canonical_name for p in model.parameters()}
    undecayed = {names[id(p)] for p in plain["params"]}
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert undecayed == {n for n in names.values() if n.endswith(".bias") or "norm" in n}
    assert sorted([*undecayed, *(names[id(p)] for p in decayed["params"])]) == sorted(names.values())


def test_partitioned_parameters_are_told_apart_by_their_full_shape():
    """ZeRO-3 leaves every parameter empty and one-dimensional."""
    module = torch.nn.Linear(3, 2)
    for parameter in module.parameters():
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0)
    decayed, plain = parameter_groups(module, 0.1)
    assert decayed["params"][0] is module.weight and plain["params"][0] is module.bias
    assert [len(group["params"]) for group in (decayed, plain)] == [1, 1]


# Loss


def test_weights_average_micro_batches_to_the_mean(tokens):
    model, labels = gpt2(std=0.3), tokens.roll(-1, 1)
    whole = model(tokens, labels, torch.full(tokens.shape, 1 / tokens.numel()))
    per_token = torch.nn.functional.cross_entropy(logits_of(model, tokens).flatten(0, 1), labels.flatten())
    torch.testing.assert_close(whole, per_token)
    without_first = torch.full(tokens.shape, 1 / (tokens.numel() - 2))
    without_first[:, 0] = 0
    loss = model(tokens, labels, without_first)
    expected = torch.nn.functional.cross_entropy(
        logits_of(model, tokens)[:, 1:].flatten(0, 1), labels[:, 1:].flatten()
    )
    torch.testing.assert_close(loss, expected)


def test_a_token_sees_none_after_it(tokens):
    model = gpt2(std=0.3)
    changed = tokens.clone()
    changed[:, 9] += 1
    before, after = logits_of(model, tokens), logits_of(model, changed)
    assert torch.equal(before[:, :9], after[:, :9]) and not torch.equal(before[:, 9:], after[:, 9:])


# Conversion to and from transformers


def test_logits_of_imported_weights(theirs, tokens):
    ours = gpt2(to_canonical(theirs.state_dict(), MODEL)).eval()
    torch.testing.assert_close(logits_of(ours, tokens), logits_of(theirs, tokens), rtol=1e-5, atol=1e-4)


def test_gradients_of_imported_weights(theirs, tokens):
    """Equal logits say nothing of what is cut off, or no longer tied."""
    ours = gpt2(to_canonical(theirs.state_dict(), MODEL))
    weights = torch.full(tokens.shape, 1 / (tokens.numel() - len(tokens)))
    weights[:, -1] = 0
    ours(tokens, tokens.roll(-1, 1), weights).backward()
    names, parameters = zip(*theirs.named_parameters(), strict=True)
    gradients = torch.autograd.grad(theirs(tokens, labels=tokens).loss, parameters)
    expected = to_canonical(dict(zip(names, gradients, strict=True)), MODEL)
    for parameter in ours.parameters():
        right = expected[canonical_name(parameter)]
        torch.testing.assert_close(parameter.grad[: len(right)], right, rtol=1e-4, atol=1e-5)


def test_logits_of_exported_weights(theirs, tokens):
    ours = gpt2(std=0.3, seed=3).eval()
    exported = GPT2LMHeadModel(theirs.config).eval()
    missing, unexpected = exported.load_state_dict(
        CONVERSION.to_transformers(canonical(ours), MODEL), strict=False
    )
    assert (missing, unexpected) == (["lm_head.weight"], [])  # tied
    torch.testing.assert_close(logits_of(exported, tokens), logits_of(ours, tokens), rtol=1e-5, atol=1e-4)


def test_round_trips_are_bit_equal(theirs):
    state = theirs.state_dict()
    ours = to_canonical(state, MODEL)
    back = CONVERSION.to_transformers(ours, MODEL)
    assert set(state) - set(back) == {"lm_head.weight"} and not set(back) - set(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in back.items())
    assert all(t.is_contiguous() for t in (*ours.values(), *back.values()))
    drawn = canonical(gpt2(std=0.3))
    again = to_canonical(CONVERSION.to_transformers(drawn, MODEL), MODEL)
    assert drawn.keys() == again.keys() and all(torch.equal(drawn[n], again[n]) for n in drawn)


def test_older_and_headless_forms_are_read(theirs):
    """`GPT2Model`'s names have no prefix; checkpoints of old versions hold the causal mask."""
    state, expected = theirs.state_dict(), to_canonical(theirs.state_dict(), MODEL)
    headless = {name.removeprefix("transformer."): t for name, t in state.items() if name != "lm_head.weight"}
    masks = {
        f"h.{i}.attn.{kind}": torch.ones(1) for i in range(SHAPE.layers) for kind in ("bias", "masked_bias")
    }
    found = to_canonical({**headless, **masks}, MODEL)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    half = to_canonical({name: t.bfloat16() for name, t in state.items()}, MODEL)
    assert {t.dtype for t in half.values()} == {torch.float32}


@pytest.mark.parametrize("form", ["one file", "several files", "bin"])
def test_saved_directories_are_read(theirs, tmp_path, form):
    if form == "bin":
        torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
    else:
        theirs.save_pretrained(tmp_path, max_shard_size="20KB" if form == "several files" else "1GB")
        assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (form == "several files")
    expected = to_canonical(theirs.state_dict(), MODEL)
    found = to_canonical(read_state_dict(tmp_path), MODEL)
    assert found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in found)


def test_exported_file_is_the_state_dict(theirs, tmp_path):
    """What `to_transformers` gives can be saved as a safetensors file, and from_pretrained finds it whole."""
    save_file(
        CONVERSION.to_transformers(canonical(gpt2(std=0.3)), MODEL),
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    theirs.config.save_pretrained(tmp_path)
    model, report = GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert torch.equal(
        model.lm_head.weight, load_file(tmp_path / "model.safetensors")["transformer.wte.weight"]
    )


def test_recomputed_chunks_begin_at_transformer_layers():
    """Embedding, five layers and the final norm in chunks of two.

    DeepSpeed alone would pair the embedding with a layer.
    """
    group = torch.nn.ModuleList(
        FAMILY.plain(GPT2Shape(5, 8, 2, 16, 16, 4), group=None, init=Init(1, 0.02, 5)).layers
    )
    word, norm = torch.nn.Identity(), torch.nn.Identity()
    in_order = [(first, layer) for layer in (word, *group, norm)]
    chunks = recomputed_chunks(in_order, 2)
    assert [(len(layers), recomputed) for layers, recomputed in chunks] == [
        (1, False),
        (2, True),
        (2, True),
        (1, True),
        (1, False),
    ]
    assert [pair for layers, _ in chunks for pair in layers] == in_order
    assert not any(recomputed for _, recomputed in recomputed_chunks(in_order, 0))


def test_the_gelu_of_compiled_code_is_the_tanh_form_with_its_gradient():
    x = torch.linspace(-40, 40, 4001, dtype=torch.float32, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(tanh_gelu, backend="aot_eager")(x)
    exact = F.gelu(x.double(), approximate="tanh")
    assert torch.allclose(compiled.double(), exact, atol=1e-6)
    (gradient,) = torch.autograd.grad(compiled.sum(), x)
    (expected,) = torch.autograd.grad(exact.sum(), x)
    assert torch.allclose(gradient, expected, atol=2e-6), "finite far out, too"
