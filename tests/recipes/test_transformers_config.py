"""model.config: read where it is named, whole in what a run keeps, and contradicted by nothing in silence."""

import json

import pytest
import yaml

from recipes import catalog
from recipes.problems import ProblemsError

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 3, "hidden_size": 48,
    "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 16, "intermediate_size": 96,
    "vocab_size": 600, "max_position_embeddings": 256,
}  # fmt: skip


def model(config, **more):
    return "model=" + json.dumps({"implementation": "transformers", "config": config, **more})


def refusal(*settings):
    with pytest.raises(ProblemsError) as refused:
        catalog.load("default/sotu", settings)
    return str(refused.value)


def test_a_directory_is_read_once_and_kept_whole(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for where in (tmp_path, tmp_path / "config.json"):
        recipe = catalog.load("default/sotu", [model(str(where))])
        one_key = [model(str(where)), "model.config.rms_norm_eps=0.1"]
        assert catalog.load("default/sotu", one_key).model.config == {**LLAMA, "rms_norm_eps": 0.1}
    (tmp_path / "recipe.yaml").write_text(catalog.dump(recipe))
    (tmp_path / "config.json").unlink()
    own = recipe.model
    assert (own.family, own.layers, own.hidden, own.heads) == ("causal_lm", 3, 48, 3)
    assert (own.vocab_size, own.positions, own.embedding_rows(1)) == (600, 256, 600)
    assert yaml.safe_load((tmp_path / "recipe.yaml").read_text())["model"]["config"] == LLAMA
    again = catalog.load_resolved(tmp_path / "recipe.yaml")
    assert again == recipe and catalog.digest(again) == catalog.digest(recipe)
    elsewhere = model(str(tmp_path / "elsewhere"))
    for settings in ([elsewhere], [elsewhere, "model.config.rms_norm_eps=0.1"]):
        assert f"model.config: {tmp_path}/elsewhere: no such file" in refusal(*settings)


def test_recipes_of_our_own_have_their_digests():
    recipe = catalog.load("default/sotu")
    assert recipe.as_data()["model"]["config"] is None and "config" not in recipe.compared()["model"]


@pytest.mark.parametrize(
    "settings, told",
    [
        ([model({**LLAMA, "hidden_size": None})], "model.config does not say hidden_size"),
        ([model({**LLAMA, "auto_map": {"AutoModel": "mine.Model"}})], "auto_map names Python code"),
        ([model(LLAMA, layers=4)], "model.layers=4, and 3 by model.config"),
        ([model(LLAMA, family="masked_lm")], "model.family=masked_lm, and causal_lm by model.config"),
        ([model({**LLAMA, "architectures": None})], "set model.implementation to transformers, model.family"),
        ([model(LLAMA), "model.implementation=megarecipes"], "set model.implementation to transformers"),
        (["model.family=masked_lm"], "with model.family=masked_lm and model.implementation=megarecipes"),
        ([model(LLAMA), "dropout.hidden=0.1"], "set dropout.hidden to 0.0"),
        ([model(LLAMA), "data.attend=document"], "its causal LM sees windows; set data.attend to window"),
        ([model(LLAMA), "parallel.tp=2"], "its causal LM is cut by ZeRO alone; set parallel.tp to 1"),
        ([model(LLAMA), "parallel.pp=2"], "set parallel.pp to 1"),
        ([model(LLAMA), "model.attention=[banded]"], "set model.attention to [dense]"),
        ([model(LLAMA), "sequence_length=512"], "set sequence_length to 256 or less"),
        ([model(LLAMA), "data.tokenizer.kind=gpt2"], "the published vocabulary has 50257 tokens"),
        ([model([1])], "model.config is no mapping"),
    ],
)
def test_refusals(settings, told):
    said = refusal(*settings)
    assert told in said and "is missing" not in said, said


def test_one_key_of_it_is_set_and_it_shrinks():
    settings = [model(LLAMA), "model.config.attention_dropout=0.1"]
    assert catalog.load("default/sotu", settings).model.config == {**LLAMA, "attention_dropout": 0.1}
    few = catalog.load("default/sotu", ["model.config.head_dim=16"], settings={"model": {
        "implementation": "transformers", "config": {**LLAMA, "layer_types": ["full_attention"] * 9},
    }}).model  # fmt: skip
    from recipes.tiny import tiny

    recipe = catalog.load("default/sotu", [model({**LLAMA, "num_hidden_layers": 9, **{
        "layer_types": ["full_attention"] * 9, "num_attention_heads": 12, "num_key_value_heads": 3,
        "head_dim": 8, "hidden_size": 96,
    }})])  # fmt: skip
    assert few.config["head_dim"] == 16
    small = tiny(recipe).model
    assert small.config["num_key_value_heads"] == 1 and small.config["head_dim"] == 16
    assert small.config["intermediate_size"] == 64 and len(small.config["layer_types"]) == small.layers == 4
    assert tiny(tiny(recipe)) == tiny(recipe)
