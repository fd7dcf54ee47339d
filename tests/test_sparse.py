"""Banded layers: the kernels against a loop over positions, the model, layouts, conversion, what is said and measured about them.

Under tensor parallelism they are checked in the launch of tests/test_modeling.py too (tests/workers/sparse.py).
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import sparse_layouts
import torch
from compared import outcome
from launching import WORKERS, run_ranks

from launch import attention_speed, build_model, export_hf, initial_weights, plan_text
from launch.attention_speed import Case, Row, Taken
from launch.compare_layouts import FORCED
from launch.parity import Outcome, compare
from modeling import banded_attention as band
from modeling.convert_hf import hf_config, state_dict_of
from modeling.generation import continue_tokens
from modeling.gpt2 import GPT2, GPT2Shape
from modeling.initialization import Init
from recipes import catalog
from recipes.schema import Model

BANDED = ("model.attention=[dense,banded]", "model.attention_window=24")
KERNELS = {"blocks": band.by_blocks, "dense mask": band.by_dense_mask, "chosen": band.banded_attention}
SIZES = [  # positions, window, head size
    (1, 1, 3), (7, 3, 5), (65, 1, 8), (97, 33, 4), (129, 64, 7), (130, 129, 8), (130, 130, 8), (130, 500, 8), (261, 40, 6), (300, 101, 1),
]  # fmt: skip


def by_loop(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
    """The definition, one position after the other."""
    out = []
    for i in range(q.shape[2]):
        seen = slice(max(0, i - window + 1), i + 1)
        scores = (q[:, :, i, None] * k[:, :, seen]).sum(-1) / math.sqrt(q.shape[3])
        out.append((scores.softmax(-1)[..., None] * v[:, :, seen]).sum(2))
    return torch.stack(out, 2)


def tensors(positions: int, head_size: int, *, dtype: torch.dtype = torch.float64, grad: bool = True) -> list[torch.Tensor]:
    """q, k and v of two samples and three heads, strided as a layer hands them over."""
    generator = torch.Generator().manual_seed(positions)
    qkv = 2 * torch.randn(2, positions, 3, 3, head_size, generator=generator, dtype=torch.float64).to(dtype)
    return [x.detach().requires_grad_(grad) for x in qkv.permute(3, 0, 2, 1, 4).unbind(0)]


def check_kernel(kernel, positions: int, window: int, head_size: int) -> None:
    """Output and the gradients of q, k and v are those of the loop."""
    inputs = tensors(positions, head_size)
    cotangent = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    results = []
    for function in (kernel, by_loop):
        out = function(*inputs, window)
        results.append([out.detach(), *torch.autograd.grad(out, inputs, cotangent)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tensors this small gain nothing from more, and threads that wait for each other cost much beside other tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# Kernels


@pytest.mark.parametrize(("positions", "window", "head_size"), SIZES)
@pytest.mark.parametrize("name", KERNELS)
def test_kernel_is_the_loop(name, positions, window, head_size):
    check_kernel(KERNELS[name], positions, window, head_size)


BREAKS = {
    "one too wide": lambda query, key, window: (key <= query) & (key >= query - window),
    "one too narrow": lambda query, key, window: (key <= query) & ((key > query - window + 1) | (key == query)),
    "looks ahead": lambda query, key, window: (key <= query + 1) & (key > query - window),
}


@pytest.mark.parametrize("how", BREAKS)
@pytest.mark.parametrize("name", ["blocks", "dense mask"])
def test_a_broken_band_is_noticed(name, how, monkeypatch):
    monkeypatch.setattr(band, "in_band", BREAKS[how])
    with pytest.raises(AssertionError, match="not close"):
        check_kernel(KERNELS[name], 97, 33, 4)


@pytest.mark.parametrize("size", [1, 7, 63, 200])
def test_blocks_of_any_size_will_do(size, monkeypatch):
    monkeypatch.setattr(band, "block_size", lambda window: size)
    check_kernel(band.by_blocks, 130, 64, 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_other_precisions_stay_near(dtype):
    inputs = tensors(300, 16, dtype=dtype, grad=False)
    exact = by_loop(*(x.double() for x in inputs), 40)
    found = band.by_blocks(*inputs, 40)
    assert found.dtype == dtype
    assert float((found - exact).norm() / exact.norm()) < {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-6}[dtype]


@pytest.mark.parametrize(("positions", "window"), [(256, 1), (384, 200)])
def test_mask_of_flex_attention(positions, window, monkeypatch):
    """What is compiled for a GPU, run uncompiled: it has a forward pass on a CPU."""
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(band, "_compiled_flex", lambda: flex_attention.flex_attention)
    inputs = tensors(positions, 16, dtype=torch.float32, grad=False)
    torch.testing.assert_close(band.by_flex(*inputs, window), band.by_dense_mask(*inputs, window), rtol=1e-5, atol=1e-5)
    mask = band._block_mask(positions, window, torch.device("cpu"))
    blocks = positions // band.FLEX_BLOCK
    visited = [min(i + 1, -(-(window - 1) // band.FLEX_BLOCK) + 1) for i in range(blocks)]
    assert mask.kv_num_blocks.flatten().tolist() == visited, "blocks outside of the band must be skipped, or nothing is gained"


def test_dropout_drops_weights():
    """Of the band alone, with the right mean, and anew in every call."""
    torch.manual_seed(0)
    q, k, v = tensors(300, 4, dtype=torch.float32, grad=False)
    for kernel in (band.by_blocks, band.by_dense_mask):
        found = torch.stack([kernel(q, k, torch.ones_like(v), 40, 0.25) for _ in range(20)])
        assert float(found.mean()) == pytest.approx(1, abs=0.01) and not torch.equal(found[0], found[1])
        first = found[:, :, :, 0].unique()  # position 0 sees itself alone: all or nothing
        assert first.tolist() == pytest.approx([0, 4 / 3])


CASES = [  # device, dtype, dropout, positions, window, head size, compiler -> kernel
    ("cpu", torch.float32, 0.0, 1024, 1024, 64, False, "causal"),
    ("cpu", torch.float32, 0.0, 255, 16, 64, False, "dense mask"),
    ("cpu", torch.float32, 0.0, 1024, 64, 64, False, "blocks"),
    ("cpu", torch.bfloat16, 0.1, 1000, 64, 64, True, "blocks"),
    ("cpu", torch.float32, 0.0, 1024, 700, 64, False, "dense mask"),
    ("cuda", torch.bfloat16, 0.0, 1024, 64, 64, True, "flex_attention"),
    ("cuda", torch.float16, 0.0, 1024, 1000, 80, True, "flex_attention"),
    ("cuda", torch.bfloat16, 0.1, 1024, 64, 64, True, "blocks"),
    ("cuda", torch.bfloat16, 0.1, 1024, 1000, 64, True, "dense mask"),
    ("cuda", torch.bfloat16, 0.0, 1000, 64, 64, True, "blocks"),
    ("cuda", torch.float64, 0.0, 1024, 64, 64, True, "blocks"),
    ("cuda", torch.bfloat16, 0.0, 1024, 64, 8, True, "blocks"),
    ("cuda", torch.bfloat16, 0.0, 1024, 64, 64, False, "blocks"),
]


@pytest.mark.parametrize(("device", "dtype", "dropout", "positions", "window", "head_size", "compiler", "kernel"), CASES)
def test_choice(device, dtype, dropout, positions, window, head_size, compiler, kernel):
    found = band.choose(device, dtype, dropout, positions, window, head_size, compiler=compiler)
    assert found.kernel == kernel and found.why
    if kernel == "blocks":
        assert band.keys_per_block(window) < positions, "it must not compute more than the dense mask"


def test_the_chosen_kernel_runs(monkeypatch):
    """The choice for the tensors at hand, dropout among it, and no other."""
    ran, asked, choose = [], [], band.choose
    monkeypatch.setattr(band, "choose", lambda *args, **more: asked.append(args) or choose(*args, **more))
    for name in ("by_blocks", "by_dense_mask"):
        monkeypatch.setattr(band, name, lambda *args, name=name: ran.append((name, args[3:])) or args[0])
    for positions, window in ((300, 20), (300, 250), (100, 20), (100, 100)):
        band.banded_attention(*tensors(positions, 4, grad=False), window, 0.1)
    assert ran == [("by_blocks", (20, 0.1)), ("by_dense_mask", (250, 0.1)), ("by_dense_mask", (20, 0.1))]
    assert asked[0] == ("cpu", torch.float64, 0.1, 300, 20, 4)


# Model


def model(windows: tuple[int | None, ...], dropout: float = 0.0) -> GPT2:
    shape = GPT2Shape(
        layers=len(windows), hidden=16, heads=2, vocab=50, padded_vocab=64, positions=300, attention_dropout=dropout, windows=windows
    )  # fmt: skip
    return GPT2(shape, group=None, init=Init(seed=0, std=0.3, layers=len(windows)))


def logits(of: GPT2, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return of(tokens)


TOKENS = torch.arange(300)[None] * 37 % 50


@pytest.mark.parametrize(("windows", "reach"), [((20, 20), 39), ((None, 20), 300), ((20,), 20), ((1, 1), 1), ((20, 5), 24)])
def test_how_far_a_token_reaches(windows, reach):
    """Position 0 is seen by the window of the first layer, and what saw it by that of the second."""
    changed = TOKENS.clone()
    changed[:, 0] += 1
    different = (logits(model(windows), TOKENS) != logits(model(windows), changed)).any(-1)[0]
    assert not different[reach:].any() and different[reach - 1], f"seen up to {int(different.nonzero().max())}"


def test_layers_have_their_own_windows():
    recipe = catalog.load("default/sotu", ["model.attention=[dense,banded,banded]", "model.attention_window=64"])
    shape = build_model.model_shape(recipe, 8192)
    assert [shape.layer_at(i).window for i in range(6)] == [None, 64, 64, None, 64, 64]
    assert shape.layer == shape.layer_at(0) == replace(shape.layer_at(1), window=None)
    assert build_model.model_shape(catalog.load("default/sotu"), 8192).layer_at(5).window is None
    bert = build_model.model_shape(catalog.load("bert/sotu"), 8192)
    assert bert.layer.window is None


def test_dropout_of_banded_layers_is_that_of_training():
    used, without = model((20, 20), dropout=0.3), logits(model((20, 20)), TOKENS)
    assert torch.equal(logits(used.eval(), TOKENS), without)
    drawn = [logits(used.train(), TOKENS) for _ in range(2)]
    assert not torch.equal(drawn[0], without) and not torch.equal(*drawn)


def test_a_prefix_has_the_same_logits():
    """Whichever kernel its length asks for: blocks at 300 positions, a dense mask at 200, no mask at 15."""
    used = model((None, 24, 24))
    whole = logits(used, TOKENS)
    for length in (200, 25, 24, 15, 1):
        torch.testing.assert_close(logits(used, TOKENS[:, :length]), whole[:, :length], rtol=1e-4, atol=1e-4)


def test_generation_goes_on_as_the_whole_text_says():
    used = model((None, 24))
    text = TOKENS[0, :270].tolist()
    more = continue_tokens(used, text, 3, seed=0, top_k=1)
    whole = logits(used, torch.tensor([text + more]))[0].argmax(-1)
    assert more == whole[len(text) - 1 : -1].tolist()


# Layouts


@pytest.fixture(scope="module")
def layouts(tmp_path_factory) -> Path:
    """Run directories of tests/workers/sparse_layouts.py."""
    out = tmp_path_factory.mktemp("sparse")
    settings = (*FORCED, *BANDED, "sequence_length=256")  # long enough for the kernel of blocks
    recipe = catalog.load("default/sotu", settings, tiny=True).model_copy(update={"steps": 2})
    (out / "recipe.yaml").write_text(catalog.dump(recipe))
    done = run_ranks(sparse_layouts.PROCESSES, WORKERS / "sparse_layouts.py", out, timeout=300)
    assert done.returncode == 0, done.stdout[-6000:]
    return out


@pytest.fixture(scope="module")
def in_one_process(layouts) -> Outcome:
    """The first step in this process, without DeepSpeed, by the reference kernel."""
    from data.corpus import build
    from data.loader import StepBatches

    recipe = catalog.load_resolved(layouts / "recipe.yaml")
    used = GPT2(build_model.model_shape(recipe, 512), group=None, init=Init(recipe.seed, recipe.init_std, recipe.model.layers))
    whole = SimpleNamespace(micro=recipe.batch.global_, accumulation=1, dp=1, global_batch=recipe.batch.global_)
    (batch,) = next(StepBatches(build(recipe, say=lambda text: None).train, recipe.seed, whole, 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(band, "by_blocks", band.by_dense_mask)
        loss = used(batch["tokens"], batch["labels"], batch["weights"])
        loss.backward()
    gradients = {p.canonical_name: p.shard.join([p.grad]) if p.shard else p.grad for p in used.parameters()}
    norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    return Outcome("one process", 1, [loss.item()], [norm.item()], gradients, NO_WEIGHTS)


NO_WEIGHTS = {"final_norm.weight": torch.ones(1)}  # those after the last step are not compared


def check_layout(reference: Outcome, found: Outcome) -> None:
    """The first step: loss, norm and every gradient."""
    assert found.failure is None, found.failure
    difference = compare(reference, replace(found, losses=found.losses[:1], norms=found.norms[:1], weights=NO_WEIGHTS))
    assert difference.loss <= 2e-6 and difference.norm <= 1e-5 and difference.gradient <= 1e-4, difference


@pytest.mark.long
@pytest.mark.parametrize("case", sparse_layouts.CASES, ids=lambda case: case.name)
def test_layout_agrees(layouts, in_one_process, case):
    found = outcome(layouts, case.name)
    check_layout(in_one_process, found)
    assert found.losses[1] == pytest.approx(outcome(layouts, sparse_layouts.CASES[0].name).losses[1], abs=2e-6)


@pytest.mark.long
def test_a_broken_band_under_a_layout_is_noticed(layouts, in_one_process):
    with pytest.raises(AssertionError, match="Difference"):
        check_layout(in_one_process, outcome(layouts, sparse_layouts.BROKEN.name))


# Conversion


def test_export_is_refused_before_anything_is_read_or_written(tmp_path, monkeypatch):
    run, out = tmp_path / "run", tmp_path / "out" / "exported"
    run.mkdir()
    (run / "recipe.yaml").write_text(catalog.dump(catalog.load("default/sotu", BANDED)))
    monkeypatch.setattr(export_hf, "choose_checkpoint", lambda run, step: None)
    with pytest.raises(ValueError, match=r"model.attention=\['dense', 'banded'\].*dense layers alone.*model.attention=\[dense\]"):
        export_hf.export(run, out)
    assert not out.parent.exists()
    with pytest.raises(ValueError, match="model.attention_window=5"):
        state_dict_of({}, Model(layers=1, hidden=8, heads=1, vocab_size=300, attention=("banded",), attention_window=5))


def test_weights_of_a_dense_model_are_taken_and_that_is_said(tmp_path, capsys):
    recipe = catalog.load("default/sotu", BANDED, tiny=True)
    m = recipe.model
    config = hf_config(layers=m.layers, hidden=m.hidden, heads=m.heads, vocab=m.vocab_size, positions=recipe.sequence_length)
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    initial_weights.check(tmp_path, recipe)
    said = capsys.readouterr().err
    assert "layers 1, 3 are banded here: they see 24 of 64 positions (model.attention_window)" in said and str(tmp_path) in said
    initial_weights.check(tmp_path, catalog.load("default/sotu", tiny=True))
    assert capsys.readouterr().err == ""


# What is said and measured


def plan_of(*settings: str, precision: str = "fp32") -> SimpleNamespace:
    return SimpleNamespace(recipe=catalog.load("default/sotu", settings), precision=precision)


def test_the_plan_names_the_kernel():
    (layers, kernel) = plan_text.describe_attention(plan_of(*BANDED))
    assert layers == ("attention", "layers dense, banded, repeated: 3 of 6 see 24 positions")
    assert kernel[1] == "blocks (flex_attention has no backward pass on a CPU)"
    assert plan_text.describe_attention(plan_of()) == []
    wide = build_model.band_kernel(plan_of("model.attention=[banded]", "model.attention_window=200"))
    assert wide == "dense mask (the window covers most of the sequence); dense layers would take no longer"


def flags(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    attention_speed.add_parser(parser.add_subparsers())
    return parser.parse_args(["attention", *given])


def test_benchmark(tmp_path, capsys):
    out = tmp_path / "speeds.json"
    attention_speed.run(flags("--positions", "256", "64", "--windows", "16", "100", "--dtypes", "fp32", "--heads", "1", "--head_size", "4",
                              "--rounds", "1", "--out", str(out)))  # fmt: skip
    found, printed = json.loads(out.read_text()), capsys.readouterr().out
    kernels = {(row["positions"], row["window"]): row["kernel"] for row in found["rows"]}
    assert kernels == {(64, 16): "dense mask", (256, 16): "blocks", (256, 100): "dense mask"}
    assert all(row["dense_s"] > 0 and row["banded_s"] > 0 and row["masked_s"] > 0 and row["status"] == "measured" for row in found["rows"])
    assert found["device"] == "cpu" and found["not_measured"] == [
        "flex_attention and GPUs: this machine has no CUDA device",
        "fp32, 64 positions with windows of 100: such a band is the whole triangle",
    ]
    assert all(f"not measured: {line}" in printed for line in found["not_measured"]) and printed.count("blocks") == 1


def test_a_slow_length_ends_the_table(monkeypatch):
    def measured(case: Case, args, device: str) -> Row:
        return Row(**vars(case), kernel="blocks", why="", scores=0.5, dense_s=case.positions / 100, banded_s=1, masked_s=1)

    monkeypatch.setattr(attention_speed, "measure", measured)
    args, rows = flags("--positions", "300", "100", "200", "--windows", "16", "--dtypes", "fp32", "--seconds", "1.5"), []
    attention_speed.measure_dtype(args, "fp32", "cpu", rows)
    assert [row.positions for row in rows] == [100, 200]
    (line,) = [line for line in attention_speed.not_measured(args, "cpu", rows) if line.startswith("fp32")]
    assert line == "fp32, 300 positions with windows of 16: a pass at fewer positions took longer than --seconds 1.5"


def test_ratios_are_taken_turn_by_turn():
    """A machine that slows down in one turn slows all three."""
    turns = [[Taken(4, 2), Taken(2, 2), Taken(8, 4)], [Taken(40, 2), Taken(10, 1), Taken(80, 4)], [Taken(3, 9), Taken(1, 3), Taken(6, 4)]]
    known = dict(vars(Case("fp32", 8, 2)), kernel="blocks", why="", scores=0.5)
    row = attention_speed.row_of(known, turns, "cpu")
    assert (row.dense_s, row.banded_s, row.masked_s, row.faster, row.faster_by_processor_time) == (4, 2, 8, 3, 2)
    assert attention_speed.row_of(known, turns, "cuda").faster_by_processor_time is None


def test_bad_flags_are_refused_together(tmp_path):
    with pytest.raises(ValueError) as found:
        given = ("--heads", "0", "--windows", "0", "900", "--positions", "0", "--dropout", "1", "--out", f"{tmp_path}/a/b")
        attention_speed.check(flags(*given))
    for said in ("--heads 0", "--windows 0: give 1", "--positions 0", "--dropout 1.0", "the directory is not there"):
        assert said in str(found.value)
    with pytest.raises(ValueError, match="such a band is the whole triangle; give a window below 512"):
        attention_speed.check(flags("--positions", "256", "512", "--windows", "512"))
