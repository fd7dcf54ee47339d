"""A Megatron checkpoint that fits is trained from; of one that does not, everything wrong is said at once."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from given import ONE_RANK, notices, planned, refusal, tiny
from megatron_writer import Form, random_weights, write

from launch.training import build_model, transformers_model
from launch.weights import foreign_weights as given_tensors
from launch.weights.initial_weights import InitialWeights
from recipes.problems import ProblemsError
from recipes.schema import Recipe

GPT2, BERT = ("default/sotu", ()), ("bert/sotu", ())


def said_of(directory: Path, recipe: Recipe) -> str:
    return "\n".join(notices(planned(directory, recipe)))


@pytest.mark.parametrize(
    ("name", "settings"),
    [GPT2, BERT, ("bert/sotu", ("model.sentence_head=none",)),
     ("default/sotu", ("model.implementation=transformers",))],
)  # fmt: skip
def test_a_run_of_shorter_samples_starts_from_them(name, settings, tmp_path):
    given = tiny(name, tuple(s for s in settings if "sentence" not in s))  # a head that is not needed is left
    recipe = tiny(name, (*settings, "sequence_length=40", "model.positions=64"))
    weights = random_weights(given)
    write(tmp_path, given, weights, Form(version=1.0, tp=2, names="v1"))
    plan = planned(tmp_path, recipe)
    if "transformers" in str(settings):
        module: torch.nn.Module = transformers_model.build(recipe, InitialWeights(str(tmp_path)))
        heads = recipe.model.heads
        built = {p.canonical_name: p.shard.form.to_ours([p.detach()], heads) for p in module.parameters()}
    else:
        module = build_model.build_module(plan, ONE_RANK, given_tensors.read(tmp_path, recipe))
        built = {
            p.canonical_name: p.detach()[: p.shard.entries] if p.shard else p for p in module.parameters()
        }
    assert built.keys() <= weights.keys() and all(torch.equal(built[n], weights[n]) for n in built)
    said = said_of(tmp_path, recipe)
    assert "a Megatron checkpoint of version 1 in 2 tensor slices" in said
    assert f"rows of the vocabulary the first {recipe.model.vocab_size:,}" in said
    assert ("the tanh form of GELU and LayerNorm's epsilon 1e-05" in said) == (name == "bert/sotu")


def test_what_no_arguments_say_is_read_off_the_tensors(tmp_path):
    """The number of heads is in no tensor; neither are arguments of other classes than numbers and texts."""
    write(tmp_path, tiny(), random_weights(tiny()), Form(version=0, tp=2, arguments=None))
    assert "say num_attention_heads: nothing else decides it; state it with --weights_args num_" in refusal(
        tmp_path, tiny()
    )
    given, heads = str(tmp_path), "num_attention_heads=4"
    assert "they keep no arguments" in str(InitialWeights(given, stated=[heads]).check(tiny())[-1])
    for stated, said in (
        ("num_attention_heads=1", "2 tensor slices, and has 1 heads: each slice holds whole heads"),
        ("num_attention_heads=x", 'num_attention_heads="x": it is a whole number'),
        ("num_attention_heads=8", "num_attention_heads=8, but the recipe's model.heads is 4"),
        ("hidden_size=32", "hidden_size=32: the weights say hidden_size=64; leave it out"),
        ("num_heads=4", "is no KEY=VALUE of the weights; did you mean num_attention_heads"),
        ("normalization=RMSNorm", 'normalization="RMSNorm": our gpt2 has "LayerNorm"'),
        ("gelu=exact", 'gelu="exact": our gpt2 has "tanh"'),
    ):
        of = [stated] if "heads" in stated else [stated, heads]
        with pytest.raises(ProblemsError) as refused:
            InitialWeights(given, stated=of).check(tiny())
        assert said in str(refused.value)


def test_arguments_of_unknown_classes_are_stated_or_refused(tmp_path):
    told = dict(num_attention_heads=np.int64(4), hidden_size=np.int64(64), normalization=np.str_("LayerNorm"))
    write(tmp_path, tiny(), random_weights(tiny()), Form(arguments=told))
    assert "does not say num_attention_heads" in refusal(tmp_path, tiny())
    stated = ["num_attention_heads=4"]
    with pytest.raises(ProblemsError, match="a form that is not read.*--weights_args normalization=VALUE"):
        InitialWeights(str(tmp_path), stated=stated).check(tiny())
    assert InitialWeights(str(tmp_path), stated=[*stated, "normalization=LayerNorm"]).check(tiny())


@pytest.mark.parametrize(
    ("given", "recipe", "said"),
    [
        (GPT2, BERT, r'type "megatron-lm-gpt": only megatron-lm-bert can be.*--set model.family=gpt2'),
        (BERT, GPT2, r'type "megatron-lm-bert": only megatron-lm-gpt can be.*--set model.family=bert'),
        (BERT, ("bert/sotu", ("model.layer_norm=post",)),
         r"none of Megatron can be given to model.family=bert with .*post; .*--set model.layer_norm=pre"),
        (GPT2, ("default/sotu", ("sequence_length=65",)), "positions?_?.*64, but .*sequence_length is 65"),
        (GPT2, ("default/sotu", ("model.layers=5",)), "num_layers=4, but the recipe's model.layers is 5"),
        (("bert/sotu", ("model.sentence_head=none",)), BERT,
         r"lacks pooler.dense.*no head for sentences; add --set model.sentence_head=none"),
    ],
)  # fmt: skip
def test_another_model_is_refused_with_the_settings_that_fit(given, recipe, said, tmp_path):
    write(tmp_path, tiny(*given), random_weights(tiny(*given)), Form(tp=2))
    found = refusal(tmp_path, tiny(*recipe))
    assert re.search(said, found), found


ARGUMENTS = {
    "exact gelu": ({"bias_gelu_fusion": False}, 'gelu="exact": our gpt2 has "tanh", and no switch'),
    "another activation": ({"swiglu": True}, "swiglu=true: our gpt2 has false"),
    "another epsilon": ({"layernorm_epsilon": 1e-6}, "layernorm_epsilon=1e-06: our gpt2 has 1e-05"),
    "another norm": ({"normalization": "RMSNorm"}, 'normalization="RMSNorm": our gpt2 has "LayerNorm"'),
    "rotary positions": ({"use_rotary_position_embeddings": True}, "use_rotary_position_embeddings=true"),
    "another width": ({"ffn_hidden_size": 100}, "ffn_hidden_size=100: our gpt2 has 256"),
    "other heads": ({"num_attention_heads": 8}, "num_attention_heads=8, but the recipe's model.heads is 4"),
    "more layers": ({"num_layers": 9}, "num_layers=9, but(.|\n)*lacks encoder.layers.4.input_layernorm"),
    "an untied head": ({"untie_embeddings_and_output_weights": True}, "untie_.*=true: our gpt2 has false"),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_what_our_model_does_not_compute_is_refused(case, tmp_path):
    told, said = ARGUMENTS[case]
    write(tmp_path, tiny(), random_weights(tiny()), Form(arguments=told))
    found = refusal(tmp_path, tiny())
    assert re.search(said, found), found


def tensors(change):
    """A change of the weights that are written."""
    weights = random_weights(tiny())
    change(weights)
    return weights


def test_a_vocabulary_of_another_size_is_refused(tmp_path):
    recipe = tiny()
    rows = recipe.model.vocab_size
    for name, other in (("larger", rows + 2000), ("smaller", rows - 100), ("gpt2", 50257)):
        weights = tensors(lambda w, other=other: w.update({"word.weight": torch.randn(other, 64)}))
        write(tmp_path / name, recipe, weights, Form())
        assert f"but the recipe's model.vocab_size is {rows}" in refusal(tmp_path / name, recipe)
    said = refusal(tmp_path / "gpt2", recipe)
    assert "--set data.tokenizer.kind=gpt2 --set model.vocab_size=50257" in said


def test_problems_of_tensors_are_said_together(tmp_path):
    recipe, form = tiny(), Form(pp=2)
    write(tmp_path, recipe, random_weights(recipe), form)
    file = tmp_path / "iter_0000007" / "mp_rank_00_001" / "model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    encoder = content["model"]["language_model"]["encoder"]
    del encoder["layers.1.mlp.dense_h_to_4h.bias"]
    encoder["layers.1.inter_attention.dense.bias"] = torch.ones(64)
    encoder["layers.0.mlp.dense_h_to_4h.weight"] = torch.ones(64, 64)
    content["model"]["word_embeddings_for_head"]["weight"] += 1
    torch.save(content, file)
    said = refusal(tmp_path, recipe).splitlines()
    assert len(said) == 4
    for part in (
        "lacks encoder.layers.3.mlp.dense_h_to_4h.bias: a Megatron gpt2 of these arguments has it",
        "holds encoder.layers.3.inter_attention.dense.bias: a Megatron gpt2 of these arguments has no such",
        "encoder.layers.2.mlp.dense_h_to_4h.weight of [64, 64] instead of [256, 64]: that is its shape by",
        "word_embeddings_for_head.weight of mp_rank_00_001/model_optim_rng.pt differs from embedding.",
    ):
        assert any(part in line for line in said), said


def test_numbers_that_are_not_finite_are_refused_where_they_are_read(tmp_path):
    spoilt = tensors(lambda w: w["layers.2.mlp.expand.bias"].fill_(torch.inf))
    write(tmp_path, tiny(), spoilt, replace(Form(), tp=2))
    with pytest.raises(ProblemsError, match="not finite, in layers.2.mlp.expand.bias"):
        given_tensors.read(tmp_path, tiny())


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("global_step7/zero_pp_rank_0_mp_rank_00_model_states.pt", "saved by DeepSpeed under ZeRO-3"),
        ("iter_0000007/common.pt", "is a distributed checkpoint .*--ckpt-format torch"),
        ("iter_0000007/README", "holds no weights of Megatron"),
    ],
)
def test_forms_that_are_not_read_are_named(file, said, tmp_path):
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).touch()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    assert re.search(said, refusal(tmp_path, tiny()))


def test_a_plain_checkpoint_of_deepspeed_is_named(tmp_path):
    """With the tensors of any program's modules, and without Megatron's arguments."""
    (tmp_path / "global_step7").mkdir()
    (tmp_path / "latest").write_text("global_step7")
    content = {"module": {"0.weight": torch.ones(2, 2)}, "ds_version": "0.19.8", "global_steps": 7}
    torch.save(content, tmp_path / "global_step7" / "mp_rank_00_model_states.pt")
    said = refusal(tmp_path, tiny())
    assert "is a plain checkpoint of DeepSpeed" in said and "save_pretrained" in said and "=0" not in said
