"""Universal checkpoints of Megatron-DeepSpeed's and gpt-neox's GPTs are adopted; other models are refused."""

from __future__ import annotations

import pytest
import torch
from megatron_writer import (
    MEGATRON,
    MEGATRON_2023,
    NEOX,
    WITHOUT_PIPELINE,
    random_weights,
    write_sliced,
    write_universal,
)
from stored import load_weights

from ds_configs.plan import ANY_GPU
from ds_configs.resolver import resolve
from launch.checkpoints import run_checkpoints
from launch.training.schedule import learning_rate
from launch.weights.adoption import Adoption
from recipes import catalog
from recipes.problems import ProblemsError

RECIPE = catalog.load("default/sotu", ["model.vocab_size=500"], tiny=True)
KINDS = {"weight": "fp32", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
SAID = ["data.tokenizer.kind=file", "data.tokenizer.path=DIR"]
UNSTATED = [
    "steps=12", "dropout.hidden=0.1", "dropout.attention=0", f"sequence_length={RECIPE.sequence_length}",
]  # fmt: skip


def tensors():
    """Canonical weights and moments that gradients can give."""
    weights = random_weights(RECIPE)
    return {
        "fp32": weights,
        "exp_avg": {name: tensor / 10 for name, tensor in weights.items()},
        "exp_avg_sq": {name: tensor**2 + 0.5 for name, tensor in weights.items()},
    }


def adopted(directory, root, *settings, stated=()):
    found = Adoption(str(directory), stated=stated, named="default/sotu", data_from="next")
    recipe = found.begun([*SAID, *settings], {}, None)
    plan = found.with_remarks(resolve(recipe, "zero1", 1, ANY_GPU), [], learning_rate)
    root.mkdir(exist_ok=True)
    found.write(plan, root, "0")
    return recipe, run_checkpoints.directory_of(root, 6)


@pytest.fixture
def tokenized(monkeypatch):
    """The vocabulary is not compared."""
    monkeypatch.setattr(Adoption, "_vocabulary_problems", lambda self, recipe: iter(()))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("program", [MEGATRON_2023, MEGATRON, WITHOUT_PIPELINE, NEOX], ids=lambda p: p.name)
def test_every_program_and_split_is_read_to_the_bit(program, tp, tmp_path, tokenized):
    expected = tensors()
    given = write_universal(tmp_path / "universal", RECIPE, expected, tp, program)
    said = {}
    if program is NEOX:
        said = {"settings": UNSTATED, "stated": ["gelu=tanh", "gpt_j_residual=false"]}
    settings = said.pop("settings", ())
    recipe, directory = adopted(given, tmp_path / "run", *settings, **said)
    for kind, theirs in KINDS.items():
        found = load_weights(directory, kind)
        assert found.keys() == expected[theirs].keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected[theirs].items()), kind
    progress = run_checkpoints.read(directory).manifest.progress
    assert (progress.step, progress.adam_steps, progress.loss_scaler.cur_scale) == (6, 6, 2.0**24)
    schedule = recipe.schedule
    assert (schedule.kind, schedule.warmup_steps, schedule.decay_steps) == ("cosine", 3, 12)
    assert (recipe.batch.global_, recipe.precision, recipe.optimizer.clip) == (12, "fp16", 0.5)
    assert (recipe.steps, recipe.dropout.hidden, recipe.model.layers) == (12, 0.1, 4)


CONFIGS = {
    "GPT-2's": ('{"bias_gelu_fusion": true, "attention-config": [[["flash"], 4]], "pos_emb": "learned"}', ""),
    "the exact GELU": ('{"pos_emb": "learned"}', 'gelu="exact"'),
    "parallel blocks": ('{"bias_gelu_fusion": true, "gpt_j_residual": true}', "gpt_j_residual=true"),
    "other norms": ('{"bias_gelu_fusion": true, "norm": "rmsnorm"}', 'norm="rmsnorm"'),
    "sparse": ('{"bias_gelu_fusion": true, "attention_config": [[["local"], 4]]}', "attention_config="),
    "none": (None, "--weights_args gpt_j_residual=false(.|\n)*--weights_args gelu=tanh"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_the_configuration_of_gpt_neox_decides(case, tmp_path, tokenized):
    """ds_to_universal leaves it in the save that it reads."""
    text, said = CONFIGS[case]
    given = write_universal(tmp_path / "global_step6_universal", RECIPE, tensors(), 1, NEOX)
    if text is not None:
        place = tmp_path / "global_step6" / "configs"
        place.mkdir(parents=True)
        (place / "model.yml").write_text(text)
    if not said:
        assert adopted(given, tmp_path / "run", *UNSTATED)
        return
    with pytest.raises(ProblemsError, match=said):
        adopted(given, tmp_path / "run", *UNSTATED)


REFUSED = {
    "rotary positions": ({"use_rotary_position_embeddings": True}, "use_rotary_position_embeddings=true"),
    "RMSNorm": ({"normalization": "rmsnorm"}, 'normalization="rmsnorm"'),
    "an untied head": ({"untie_embeddings_and_output_weights": True}, "untie_.*=true"),
    "experts": ({"num_experts": [8]}, "num_experts="),
    "more layers": ({"num_layers": 5}, r"lacks encoder\.layers\.4"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_models_are_refused(case, tmp_path, tokenized):
    told, said = REFUSED[case]
    given = write_universal(tmp_path / "universal", RECIPE, tensors(), 1, MEGATRON, **told)
    with pytest.raises(ProblemsError, match=said):
        adopted(given, tmp_path / "run")


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("program", [MEGATRON_2023, MEGATRON, NEOX], ids=lambda p: p.name)
def test_slices_and_stages_are_read_without_a_conversion(program, pp, tmp_path, tokenized):
    """ds_to_universal converts no pipeline of gpt-neox. A last stage's copy of the embedding never trained."""
    expected = tensors()
    given = write_sliced(tmp_path / "save", RECIPE, expected, 2, pp, program)
    said = {"stated": ["gelu=tanh", "gpt_j_residual=false"]} if program is NEOX else {}
    told = [*UNSTATED, "model.vocab_size=500"]
    _, directory = adopted(given, tmp_path / "run", *told, **said)
    for kind, theirs in KINDS.items():
        found = load_weights(directory, kind)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected[theirs].items()), kind
    (given / f"mp_rank_{2 * pp - 1:02d}_model_states.pt").unlink()
    with pytest.raises(ProblemsError, match=f"holds {2 * pp - 1} model-parallel ranks"):
        adopted(given, tmp_path / "other", *UNSTATED, **said)


def test_positions_of_a_stage_that_never_trained_are_refused(tmp_path, tokenized):
    """Without universal_checkpoint_info DeepSpeed's tool takes the last pipeline stage's copy of them."""
    found = tensors()
    for kind in ("exp_avg", "exp_avg_sq"):
        found[kind]["position.weight"] = torch.zeros_like(found[kind]["position.weight"])
    given = write_universal(tmp_path / "universal", RECIPE, found, 1, NEOX)
    with pytest.raises(ProblemsError, match="position.weight never had a gradient"):
        adopted(given, tmp_path / "run", *UNSTATED, stated=["gelu=tanh", "gpt_j_residual=false"])
