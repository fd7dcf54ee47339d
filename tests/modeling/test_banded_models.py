"""Models with banded layers: what a layer sees, layouts, conversion, what is said about them, compilation.

Under tensor parallelism they are checked in the launch of test_modeling.py too (tests/workers/sparse.py).
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import sparse_layouts
import torch
from compared import forked, layouts_of, rows_by_name
from launching import WORKERS
from safetensors.torch import load_file
from slices import joined
from transformers import GPT2LMHeadModel

from ds_configs.plan import GPU
from launch import export_hf
from launch.experiments.parity.layout_runs import Layouts
from launch.experiments.proving.task import tensors_of
from launch.experiments.proving.verdict import Row
from launch.ranks import processes
from launch.records import plan_text
from launch.training import build_model
from launch.weights.initial_weights import InitialWeights
from modeling.families import model_shape
from modeling.formats.huggingface.gpt2 import CONVERSION
from modeling.gpt2 import FAMILY, GPT2Shape
from modeling.initialization import Init
from modeling.layer_list import Stack
from recipes import catalog
from recipes.families import Fixed
from recipes.schema import Model

BANDED = ("model.attention=[dense,banded]", "model.attention_window=24")
COLUMNS = ("model.attention_columns=4", "model.attention_patterns=3")
SPARSE = ("model.attention=[dense,banded,fixed]", "model.attention_window=24", *COLUMNS)


def model(windows: tuple[int | None, ...], dropout: float = 0.0) -> Stack:
    shape = GPT2Shape(
        layers=len(windows), hidden=16, heads=2, vocab=50, padded_vocab=64, positions=300,
        attention_dropout=dropout, windows=windows,
    )  # fmt: skip
    return FAMILY.plain(shape, group=None, init=Init(seed=0, std=0.3, layers=len(windows)))


def logits(of: Stack, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return of(tokens)


TOKENS = torch.arange(300)[None] * 37 % 50


@pytest.mark.parametrize(
    ("windows", "reach"), [((20, 20), 39), ((None, 20), 300), ((20,), 20), ((1, 1), 1), ((20, 5), 24)]
)
def test_how_far_a_token_reaches(windows, reach):
    """Position 0 is seen by the window of the first layer, and what saw it by that of the second."""
    changed = TOKENS.clone()
    changed[:, 0] += 1
    different = (logits(model(windows), TOKENS) != logits(model(windows), changed)).any(-1)[0]
    assert not different[reach:].any() and different[reach - 1], (
        f"seen up to {int(different.nonzero().max())}"
    )


def test_layers_have_their_own_windows():
    recipe = catalog.load(
        "default/sotu", ["model.attention=[dense,banded,banded]", "model.attention_window=64"]
    )
    shape = model_shape(recipe, 8192)
    assert [shape.layer_at(i).window for i in range(6)] == [None, 64, 64, None, 64, 64]
    fixed = model_shape(catalog.load("default/sotu", SPARSE), 8192)
    assert [fixed.layer_at(i).window for i in range(4)] == [None, 24, Fixed(24, 4, 3), None]
    assert shape.layer_at(0) == replace(shape.layer_at(1), window=None)
    assert model_shape(catalog.load("default/sotu"), 8192).layer_at(5).window is None
    bert = model_shape(catalog.load("bert/sotu"), 8192)
    assert bert.layer_at(0).window is None


def test_dropout_of_banded_layers_is_that_of_training():
    used, without = model((20, 20), dropout=0.3), logits(model((20, 20)), TOKENS)
    assert torch.equal(logits(used.eval(), TOKENS), without)
    drawn = [logits(used.train(), TOKENS) for _ in range(2)]
    assert not torch.equal(drawn[0], without) and not torch.equal(*drawn)


def test_a_prefix_has_the_same_logits():
    """Whichever kernel its length asks for: a dense mask, at 15 positions none."""
    used = model((None, 24, 24))
    whole = logits(used, TOKENS)
    for length in (200, 25, 24, 15, 1):
        torch.testing.assert_close(logits(used, TOKENS[:, :length]), whole[:, :length], rtol=1e-4, atol=1e-4)


# Layouts


@pytest.fixture(scope="module")
def layouts(tmp_path_factory) -> Layouts:
    return layouts_of(tmp_path_factory.mktemp("sparse"), [*SPARSE, "sequence_length=256"], steps=2)


@pytest.fixture(scope="module")
def rows(layouts) -> dict[str, Row]:
    """Sound layouts and broken ones, by name."""
    cases = [*sparse_layouts.CASES, *sparse_layouts.BROKEN]
    return rows_by_name(layouts, cases, WORKERS / "sparse_layouts.py")


@pytest.mark.ci
def test_the_reference_has_the_first_step_of_torch_alone(layouts):
    """Loss, norm and every gradient, in this process, without DeepSpeed."""
    from data.corpus import build
    from data.loader import StepBatches

    with forked():
        reference = layouts.reference()
    recipe = catalog.load_resolved(layouts.out / "recipe.yaml")
    used = FAMILY.plain(
        model_shape(recipe, 512), group=None, init=Init(recipe.seed, recipe.init_std, recipe.model.layers)
    )
    whole = SimpleNamespace(
        micro=recipe.batch.global_, accumulation=1, dp=1, global_batch=recipe.batch.global_
    )
    (batch,) = next(StepBatches(build(recipe, say=lambda text: None).train, recipe.seed, whole, 0))
    loss = used(batch["tokens"], batch["labels"], batch["weights"])
    loss.backward()
    gradients = {
        p.canonical_name: joined(p.shard, [p.grad]) if p.shard else p.grad for p in used.parameters()
    }
    norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    assert reference.found.losses[1] == pytest.approx(loss.item(), abs=2e-6)
    assert reference.found.norms[1] == pytest.approx(norm.item(), rel=1e-5)
    kept = load_file(tensors_of(reference.task.out, 1))
    for name, gradient in gradients.items():
        clipped = gradient / max(1.0, norm)
        assert (kept[f"gradient/{name}"] - clipped).norm() <= 1e-4 * clipped.norm(), name


@pytest.mark.ci
@pytest.mark.parametrize("case", sparse_layouts.CASES, ids=lambda case: case.name)
def test_layout_agrees(rows, case):
    assert rows[case.name].agrees and rows[case.name].loss <= 2e-6, rows[case.name]


@pytest.mark.ci
@pytest.mark.parametrize("case", sparse_layouts.BROKEN, ids=lambda case: case.name)
def test_a_broken_pattern_under_a_layout_is_noticed(rows, case):
    assert not rows[case.name].agrees and not rows[case.name].failure


# Conversion


def test_export_is_refused_before_anything_is_read_or_written(tmp_path):
    run, out = tmp_path / "run", tmp_path / "out" / "exported"
    run.mkdir()
    (run / "recipe.yaml").write_text(catalog.dump(catalog.load("default/sotu", BANDED)))
    said = r"model.attention=\['dense', 'banded'\].*dense layers alone.*model.attention=\[dense\]"
    with pytest.raises(ValueError, match=said):
        export_hf.export(run, out)
    assert not out.parent.exists()
    banded = Model(layers=1, hidden=8, heads=1, vocab_size=300, attention=("banded",), attention_window=5)
    with pytest.raises(ValueError, match="model.attention_window=5"):
        CONVERSION.to_transformers({}, banded)


def test_weights_of_a_dense_model_are_taken_and_that_is_said(tmp_path):
    recipe, dense = (catalog.load("default/sotu", sets, tiny=True) for sets in (BANDED, ()))
    GPT2LMHeadModel(CONVERSION.config(recipe.model, recipe.sequence_length)).save_pretrained(tmp_path)
    said = [str(notice) for notice in InitialWeights(str(tmp_path)).check(recipe)]
    assert said[0] == f"initial weights: those of {tmp_path}"
    keys = "model.attention=['dense', 'banded'], model.attention_window=24"
    assert f"layers 1, 3 are sparse here ({keys})" in said[1]
    assert [str(notice) for notice in InitialWeights(str(tmp_path)).check(dense)] == said[:1]


# What is said


def plan_of(*settings: str, precision: str = "fp32") -> SimpleNamespace:
    return SimpleNamespace(recipe=catalog.load("default/sotu", settings), precision=precision)


def test_the_plan_names_the_kernel(monkeypatch):
    plan = plan_of(*BANDED)
    (layers, kernel) = plan_text.describe_attention(plan.recipe.model, build_model.band_kernel(plan))
    assert layers == ("attention", "layers dense, banded, repeated: 3 of 6 see 24 positions")
    counted = "counted, not timed: no fewer scores than in dense layers"
    assert kernel[1] == f"dense mask (flex_attention has no backward pass on a CPU); {counted}"
    assert plan_text.describe_attention(plan_of().recipe.model, None) == []
    plan = plan_of(*SPARSE)
    said = plan_text.describe_attention(plan.recipe.model, build_model.band_kernel(plan))
    seen = "24 positions, fixed ones a window and 4 columns of each before it"
    assert said[0][1] == f"layers dense, banded, fixed, repeated: 4 of 6 see {seen}"
    sber = SimpleNamespace(recipe=catalog.load("sber_path_to_13b/07-gpt3-large-sparse"), precision="fp16")
    monkeypatch.setattr(processes, "device", lambda: GPU)
    monkeypatch.setattr(build_model, "has_gpu_compiler", lambda: True)
    why = "flex_attention has no dropout, and attention weights are dropped with probability 0.1"
    assert build_model.band_kernel(sber) == f"dense mask ({why}); {counted}; not measured on a GPU"
