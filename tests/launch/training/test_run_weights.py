"""A run starts from the weights of another one, or is refused with everything that does not fit."""

import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from given import ONE_RANK, notices, planned, refusal
from stored import model_tensors, write_checkpoint

from data.text.trained_vocabulary import train_bpe
from launch.checkpoints.manifest import MOMENTS, WEIGHT
from launch.records import vocabulary
from launch.training import agreement, build_model, transformers_model
from launch.weights import foreign_weights as given_tensors
from launch.weights.initial_weights import InitialWeights
from recipes import catalog
from recipes.files import FileError


def tiny(name="default/sotu", *settings):
    return catalog.load(name, [*settings, "precision=fp32"], tiny=True)


def make_run(path, recipe, step=4, **how):
    path.mkdir(exist_ok=True)
    (path / "recipe.yaml").write_text(catalog.dump(recipe))
    return write_checkpoint(path / "checkpoints", step, model_tensors(recipe, step), recipe, ranks=2, **how)


def built(plan, path):
    """Canonical weights of the model that is built."""
    if plan.recipe.model.implementation == "transformers":
        module = transformers_model.build(plan.recipe, InitialWeights(str(path)))
        return {
            p.canonical_name: p.shard.form.to_ours([p.detach()], p.shard.heads) for p in module.parameters()
        }
    module = build_model.build_module(plan, ONE_RANK, given_tensors.read(path, plan.recipe))
    full = given_tensors.meta_parameters(plan.recipe)
    return {p.canonical_name: p.detach()[: len(full[p.canonical_name])] for p in module.parameters()}


@pytest.mark.parametrize("form", ["canonical", "transformers"])
@pytest.mark.parametrize("implementation", ["megarecipes", "transformers"])
def test_weights_of_any_form_become_those_of_any_model(form, implementation, tmp_path):
    given = tiny()
    directory = make_run(tmp_path / "run", given, kinds=(WEIGHT, *MOMENTS), form=form)
    shorter = ("sequence_length=40", f"model.implementation={implementation}")
    recipe = tiny("default/sotu", *shorter, "model.positions=64")
    for path in (tmp_path / "run", directory.parent, directory):
        plan = planned(path, recipe)
        assert InitialWeights(str(path)).resolved().directory == str(directory)
    expected = model_tensors(given, 4)
    made = built(plan, directory)
    assert made.keys() == expected.keys() and all(torch.equal(made[n], expected[n]) for n in made)
    said = notices(plan)
    assert any("step 4" in text for text in said) and not any("positions" in text for text in said)
    assert "add --set model.positions=64" in refusal(directory, tiny("default/sotu", *shorter))


def test_phases_have_one_table_of_positions(tmp_path):
    """Each starts from the other's weights; what the shorter one has not trained is said."""
    short, long = tiny("bert/sotu", "sequence_length=16", "model.positions=64"), tiny("bert/sotu")
    for name, given, other in (("short", short, long), ("long", long, short)):
        directory = make_run(tmp_path / name, given)
        plan, expected = planned(directory, other), model_tensors(given, 4)
        made = built(plan, directory)
        assert len(made["embedding.position"]) == 64 and all(torch.equal(made[n], expected[n]) for n in made)
        said = "that run trained the first 16 of its 64 positions" in str(plan.notices)
        assert said == (name == "short")


def test_everything_that_does_not_fit_is_said_at_once(tmp_path):
    directory = make_run(tmp_path / "run", tiny("bert/sotu"))
    said = refusal(directory, tiny("bert/sotu", "model.layer_norm=post", "model.hidden=32", "model.layers=1"))
    assert 'is a model of type "megarecipes-bert-pre-LN"' in said
    assert "model.hidden=64, but the recipe's model.hidden is 32" in said
    assert re.search(r"--set model.layer_norm=pre .*--set model.hidden=64", said)
    said = refusal(directory, tiny("default/sotu"))
    assert "only megarecipes-gpt2 can be given to model.family=gpt2" in said
    assert "--set model.family=bert" in said


def test_a_sentence_head_that_is_not_needed_is_left_and_one_that_is_missing_is_said(tmp_path):
    without = tiny("bert/sotu", "model.sentence_head=none")
    directory = make_run(tmp_path / "with", tiny("bert/sotu"))
    assert not any("head.sentence" in name for name in built(planned(directory, without), directory))
    said = refusal(make_run(tmp_path / "without", without), tiny("bert/sotu"))
    assert "lacks head.pooler.weight" in said and "--set model.sentence_head=none" in said


def test_banded_layers_are_remarked_where_they_differ(tmp_path):
    banded = tiny("default/sotu", "model.attention=[banded]", "model.attention_window=8")
    directory = make_run(tmp_path / "run", banded)
    assert "loss starts higher" in str(planned(directory, tiny()).notices)
    assert "loss starts" not in str(planned(directory, banded).notices)


def test_the_newest_whole_checkpoint_is_taken_and_a_damaged_one_refused(tmp_path):
    recipe = tiny()
    make_run(tmp_path / "run", recipe, step=4)
    newest = make_run(tmp_path / "run", recipe, step=8)
    assert InitialWeights(str(tmp_path / "run")).resolved().directory == str(newest)
    file = newest / "rank-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 8
    file.write_bytes(content)
    with pytest.raises(FileError, match="step-000008: rank-00001.safetensors has checksum"):
        given_tensors.read(newest, recipe)
    file.unlink()
    plan = planned(tmp_path / "run", recipe)
    assert "WARNING" in str(plan.notices) and "step-000008 is damaged" in str(plan.notices)
    assert InitialWeights(str(tmp_path / "run")).resolved().directory.endswith("step-000004")
    assert "is damaged" in refusal(newest, recipe)
    (newest / "manifest.json").unlink()
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000004")
    assert "step-000008: is damaged" in refusal(tmp_path / "run", recipe)


def test_a_rank_reads_a_tensor_when_it_builds_it_and_not_before(tmp_path, monkeypatch):
    directory = make_run(tmp_path / "run", tiny())
    read = []
    canonical = given_tensors.StoredTensors.canonical

    def noted(stored, name, kind):
        read.append(name)
        return canonical(stored, name, kind)

    monkeypatch.setattr(given_tensors.StoredTensors, "canonical", noted)
    weights = given_tensors.read(directory, tiny())
    assert "word.weight" in weights and not read
    assert weights["word.weight"].shape == (509, 64) and read == ["word.weight"]


def test_the_vocabulary_of_the_run_is_compared(tmp_path):
    def tokenizer(text):
        return vocabulary.PreTrainedTokenizerFast(tokenizer_object=train_bpe([text] * 3, 262))

    directory = make_run(tmp_path / "run", tiny())
    first = tokenizer("the thin thing this there")
    assert vocabulary.foreign_tokens(directory, first) is None
    first.save_pretrained(tmp_path / "run" / "tokenizer")
    assert vocabulary.foreign_tokens(directory, first) is None
    assert "tokens differ" in (vocabulary.foreign_tokens(directory, tokenizer("on and on anon")) or "")


def test_ranks_that_would_start_from_other_checkpoints_are_refused():
    """Of a run that saves while ranks look which one is its newest."""

    plan, corpus = SimpleNamespace(ds={}, recipe=tiny()), SimpleNamespace(summary={})
    own, same, other = (
        agreement.facts(plan, corpus, f"runs/a/checkpoints/step-00000{step}", False) for step in (4, 4, 8)
    )
    agreement.check([own, same])
    with pytest.raises(ValueError, match="initial weights: .*step-000004 on .*step-000008 on other"):
        agreement.check([own, {**other, "host": "other"}])


def test_directories_of_others_are_not_taken_for_runs(tmp_path):
    (tmp_path / "step-1000").mkdir()
    (tmp_path / "step-1000" / "config.json").write_text("{}")
    saved = given_tensors.saved_in(tmp_path / "step-1000")
    assert isinstance(saved, given_tensors.TransformersWeights)


@pytest.mark.parametrize("shares", ["true", "false"])
def test_a_shared_layer_is_not_taken_for_layers_of_their_own(shares, tmp_path):
    """Nor the other way; a run says which it has, and what is advised is taken."""
    other = {"true": "false", "false": "true"}[shares]
    own, foreign = (tiny("bert/sotu", f"model.shared_layers={each}") for each in (shares, other))
    directory = make_run(tmp_path / "run", own)
    assert notices(planned(directory, own))
    said = refusal(directory, foreign)
    (advised,) = re.findall(r"--set (model.shared_layers=\S+)", said)
    assert notices(planned(directory, tiny("bert/sotu", f"model.shared_layers={other}", advised)))
