"""Given weights are refused before a start with all that is wrong with them, or taken to the last bit."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from given import ONE_RANK, notices, planned, refusal, tiny
from safetensors.torch import load_file, save_file

from launch.records import vocabulary
from launch.training import build_model, transformers_model
from launch.weights import export
from launch.weights import foreign_weights as given_tensors
from launch.weights.initial_weights import GivenModel, InitialWeights
from modeling.families import conversion_of
from modeling.formats.huggingface.config_forms import SHAPE, form_of
from modeling.formats.huggingface.weight_files import read_state_dict
from recipes import catalog, families
from recipes.key_paths import flatten
from recipes.problems import ProblemsError
from recipes.schema import Recipe

POST = ("bert/sotu", ("model.layer_norm=post",))
W = "transformer.h.0.mlp.c_fc.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Callable[..., Path]:
    """(recipe, positions, class) -> a directory of transformers, no weight near its initial value."""
    made: dict[tuple, Path] = {}

    def get(recipe: Recipe, positions: int = 64, kind: str | None = None) -> Path:
        conversion = conversion_of(recipe.model)
        key = (recipe.model.family, recipe.model.layer_norm, positions, kind)
        if key not in made:
            torch.manual_seed(3)
            which = getattr(transformers, kind) if kind else conversion.model_class(recipe.model)
            model = which(conversion.config(recipe.model, positions))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.2)
            made[key] = tmp_path_factory.mktemp("saved")
            model.save_pretrained(made[key])
        return made[key]

    return get


@pytest.fixture
def copy(saved, tmp_path) -> Callable[..., Path]:
    """A copy to be damaged."""
    return lambda *asked: shutil.copytree(saved(*asked), tmp_path / "given")


def state(change: Callable[[dict], object]) -> Callable[[Path], None]:
    """A change of the tensors."""

    def damage(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

    return damage


def cut_off(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def config(**values: object) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        file = directory / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return damage


def sharded(change: Callable[[dict[str, str]], object], *, lost: bool = False) -> Callable[[Path], None]:
    """Weights in two shards whose index was changed."""

    def damage(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        (directory / "model.safetensors").unlink()
        listed = {name: f"model-{1 + i % 2}.safetensors" for i, name in enumerate(sorted(tensors))}
        for file in ("model-1.safetensors", "model-2.safetensors"):
            part = {name: tensors[name] for name in tensors if listed[name] == file}
            save_file(part, directory / file, metadata={"format": "pt"})
        changed = change(listed)
        index = {"weight_map": listed if changed is None else changed}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        if lost:
            (directory / "model-2.safetensors").unlink()

    return damage


def pickled(save: object, **how: bool) -> Callable[[Path], None]:
    """A pytorch_model.bin in place of safetensors; `save` None: of the same tensors."""

    def damage(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        (directory / "model.safetensors").unlink()
        torch.save(tensors if save is None else save, directory / "pytorch_model.bin", **how)

    return damage


def flipped_bit(directory: Path) -> None:
    pickled(None)(directory)
    file = directory / "pytorch_model.bin"
    whole = bytearray(file.read_bytes())
    whole[len(whole) // 2] ^= 4
    file.write_bytes(whole)


DAMAGED = {
    "cut off": (cut_off, r"model.safetensors: has \d+ bytes, and its header tells of"),
    "a tensor missing": (state(lambda t: t.pop(W)), f"lacks {W}: a GPT2LMHeadModel of this config.json"),
    "a tensor too many": (state(lambda t: t.update(x=torch.ones(2))), "holds transformer.x: .* has no such"),
    "two names": (
        state(lambda t: t.update({"wte.weight": t["transformer.wte.weight"].clone()})),
        "transformer.wte.weight under two names",
    ),
    "another shape": (
        state(lambda t: t.update({W: t[W].t().contiguous()})),
        re.escape(f"{W} of [256, 64] instead of [64, 256]"),
    ),
    "packed numbers": (state(lambda t: t.update({W: t[W].to(torch.int8)})), rf"holds {W} \(int8\)"),
    "an untied head": (
        state(lambda t: t.update({"lm_head.weight": t["transformer.wte.weight"] + 1})),
        "lm_head.weight differs from transformer.wte.weight",
    ),
    "a shard lost": (sharded(lambda m: None, lost=True), "names model-2.safetensors, which the directory"),
    "a shard outside": (
        sharded(lambda m: m.update({W: "../model-1.safetensors"})),
        "c_fc.weight is in \"../model-1.safetensors\"",
    ),
    "an index of nothing": (sharded(lambda m: {}), "its weight_map is empty"),
    "an index of numbers": (sharded(lambda m: {W: 3}), "c_fc.weight is in 3"),
    "an index that errs": (
        sharded(lambda m: m.update({"transformer.h.9.x": "model-1.safetensors"})),
        "model-1.safetensors: lacks transformer.h.9.x: the index says otherwise",
    ),
    "an old pickle": (
        pickled(None, _use_new_zipfile_serialization=False),
        r"before torch 1.6, which cannot be mapped into memory; .* save it again with its own program",
    ),
    "a pickle of a program": (pickled({"a": shutil.rmtree}), r"names shutil\.rmtree"),
    "a flipped bit": (flipped_bit, r"pytorch_model\.bin: is damaged in its record 'pytorch_model/data/\d+'"),
    "a pickle of a list": (pickled([1]), "holds a list: a checkpoint is a dictionary"),
    "a pickle of numbers": (pickled({"a": 1}), "something else than tensors by their names"),
    "no weights": (lambda d: (d / "model.safetensors").rename(d / "old.safetensors"), "but old.safetensors"),
    "no config": (lambda d: (d / "config.json").unlink(), "config.json: no such file; give a directory"),
    "a config of a list": (lambda d: (d / "config.json").write_text("[]"), "config.json: holds a list"),
    "a size as text": (config(n_layer="4"), 'n_layer="4": it is a whole number from 1'),
    "no size": (config(n_embd=None), "n_embd=null: it is a whole number from 1"),
    "a size without end": (config(n_embd=10**30), "n_embd=1000000000000000000000000000000: it is a whole"),
    "a billion layers": (config(n_layer=10**8), "n_layer=100000000, but(.|\n)*lacks transformer.h.4"),
    "odd heads": (config(n_head=5), "n_embd=64 and n_head=5: the first is divisible by the second"),
    "another width": (config(n_inner=100), "n_inner=100: our gpt2 has 256"),
    "scaled layers": (config(scale_attn_by_inverse_layer_idx=True), "layer_idx=true: our gpt2 has false"),
    "an untied config": (config(tie_word_embeddings=False), "tie_word_embeddings=false: our gpt2 has true"),
    "an unknown model": (config(model_type="llama"), "of type llama: the recipe's is of type gpt2; leave"),
    "another vocabulary": (
        config(vocab_size=50257),
        "add --set data.tokenizer.kind=gpt2 --set model.vocab_size=50257",
    ),
    "no model": (config(model_type=None), "names no model_type"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_weights_and_odd_configurations_are_refused(case, copy):
    damage, said = DAMAGED[case]
    directory, recipe = copy(tiny()), tiny()
    damage(directory)
    assert re.search(said, refusal(directory, recipe)), refusal(directory, recipe)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            "BertModel",
            "lacks cls.predictions.*and 4 more: an encoder alone has no head.*a whole BertForPreTraining",
        ),
        ("BertForMaskedLM", "lacks bert.pooler.*add --set model.sentence_head=none to train without one"),
        ("BertForSequenceClassification", "an encoder alone has no head(.|\n)*holds classifier.bias"),
    ],
)
def test_a_bert_without_its_heads_is_refused(kind, said, saved):
    assert re.search(said, refusal(saved(tiny(*POST), 64, kind), tiny(*POST)))


def test_an_untied_bert_is_refused_by_one_process_of_a_machine(copy, monkeypatch):
    directory, recipe = copy(tiny(*POST)), tiny(*POST)
    word = "bert.embeddings.word_embeddings.weight"
    state(lambda t: t.update({"cls.predictions.decoder.weight": t[word] * 1.001}))(directory)
    assert f"cls.predictions.decoder.weight differs from {word}" in refusal(directory, recipe)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert notices(planned(directory, recipe)), "the other processes leave the numbers where they are"


@pytest.mark.parametrize("name", ["gpt2", "org/model", "", "x" * 5000, "a\0b", "config.json"])
def test_what_is_no_directory_of_weights_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").touch()
    said = refusal(name, tiny())
    assert "give a directory that save_pretrained" in said
    assert (f"hf download {name} --local-dir DIR" in said) == (name in ("gpt2", "org/model"))


UNREAD = {  # files in a directory, and what is said of them and of the first one alone
    "lora": (
        ("adapter_config.json", "adapter_model.safetensors"),
        r"is an adapter \(LoRA\).*merge_and_unload",
    ),
    "gguf": (("q8_0.gguf", "config.json"), "is in GGUF; .*gguf_file='q8_0.gguf'"),
    "tensorflow": (("tf_model.h5", "config.json"), "is of TensorFlow; .*from_tf=True"),
    "bert's own": (("bert_model.ckpt.index", "bert_model.ckpt.meta"), "is of TensorFlow"),
    "nanochat": (("meta_000650.json", "model_000650.pt"), "is of nanochat, whose model is no GPT-2"),
    "llm.c": (("model_00019552.bin", "DONE_00019552"), "is of llm.c; .*given/model_00019552.bin -o NEW"),
    "llm.c's start": (("gpt2_124M.bin",), "is of llm.c; .*export_hf.py"),
}


@pytest.mark.parametrize("case", UNREAD)
def test_weights_of_other_programs_are_named_with_the_way(case, tmp_path):
    names, said = UNREAD[case]
    (tmp_path / "given").mkdir()
    for name in names:
        (tmp_path / "given" / name).write_bytes(bytes(8))
    assert re.search(said, refusal(tmp_path / "given", tiny()))
    assert re.search(said.split(";")[0], refusal(tmp_path / "given" / names[0], tiny()))


def test_a_file_of_another_program_beside_the_weights_is_passed_over(copy):
    directory = copy(tiny())
    for name in ("tf_model.h5", "adapter_config.json"):
        (directory / name).touch()
    assert planned(directory, tiny())


@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module._orig_mod."])
def test_a_checkpoint_of_nanogpt_is_read_to_the_bit(prefix, saved, tmp_path):
    recipe = tiny()
    biased = prefix != ""
    linear = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    stored = read_state_dict(saved(recipe))
    model = {}
    for name, tensor in stored.items():
        rows = torch.ones(51, tensor.shape[-1]) if "wte" in name else tensor[:0]  # of padding
        if biased or not name.endswith("bias"):
            model[prefix + name] = tensor.t() if name.endswith(linear) else torch.cat([tensor, rows])
    model[f"{prefix}lm_head.weight"] = model[f"{prefix}transformer.wte.weight"]
    shape = recipe.model
    sizes = dict(n_layer=shape.layers, n_head=shape.heads, n_embd=shape.hidden, block_size=recipe.positions)
    sizes |= dict(bias=biased, vocab_size=shape.vocab_size + 51, dropout=0.0)
    torch.save({"model": model, "model_args": sizes, "iter_num": 3}, tmp_path / "ckpt.pt")
    said = "\n".join(map(str, notices(planned(tmp_path, recipe))))
    assert "nanoGPT" in said and "the rest pads" in said and ("has no biases" in said) == (not biased)
    found = InitialWeights(str(tmp_path)).read(recipe)
    expected = InitialWeights(str(saved(recipe))).read(recipe)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        bias = name.endswith("bias") and not biased
        assert torch.equal(tensor, torch.zeros_like(tensor) if bias else expected[name]), name


@pytest.mark.parametrize("content", [{"model": {}}, {"model_args": {}, "model": {"wte": 5}}])
def test_another_programs_ckpt_is_refused(content, tmp_path):
    torch.save(content, tmp_path / "ckpt.pt")
    assert 'a checkpoint of nanoGPT has tensors in "model"' in refusal(tmp_path, tiny())


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_names_of_wrapped_modules_are_read(prefix, copy, saved):
    state(lambda t: [t.update({prefix + name: t.pop(name)}) for name in [*t]])(directory := copy(tiny()))
    planned(directory, tiny())
    found, expected = (InitialWeights(str(each)).read(tiny()) for each in (directory, saved(tiny())))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_pipe_in_place_of_weights_is_refused(copy):
    directory = copy(tiny())
    (directory / "model.safetensors").unlink()
    os.mkfifo(directory / "model.safetensors")
    assert "no ordinary file" in refusal(directory, tiny())


@pytest.mark.parametrize(
    ("given", "name", "settings"),
    [
        (POST, "bert/sotu", ()),  # the other placement of LayerNorm, and every size another
        (POST, "default/sotu", ()),
        (("default/sotu", ()), "bert/sotu", ()),
        (("default/sotu", ()), "default/sotu", ("model.implementation=transformers",)),
        (POST, "default/sotu", ("model.attention=[dense,banded]", "model.attention_window=9")),
    ],
)
def test_kind_and_shape_are_refused_together_and_what_is_advised_is_taken(given, name, settings, saved):
    """At full size nothing of the recipe is that of the tiny weights."""
    directory, changes = saved(tiny(*given)), [*settings, "precision=fp32"]
    said = refusal(directory, catalog.load(name, changes))
    other_kind = given[0] != name or given is POST
    assert ("is a model of type" in said) == other_kind
    ours, own = (
        dict(flatten(catalog.load(*each).model_dump())) for each in ((name, changes), (*given, True))
    )
    stated = ["sequence_length" if key == "model.positions" else key for key in SHAPE]
    differing = [key for key in stated if ours[key] != own[key]]
    assert len(differing) > 3 and all(f"the recipe's {key} is" in said for key in differing)
    advised = re.findall(r"--set (\S+)", said)
    # Weights of these sizes train in a recipe whose other settings fit the size.
    recipe = catalog.load(name, [*changes, *advised])
    assert notices(planned(directory, recipe))


SHORTER = {
    "gpt2": ("default/sotu", ()),
    "transformers": ("default/sotu", ("model.implementation=transformers",)),
    "post-LN bert": POST,
    "pre-LN bert": ("bert/sotu", ()),
}


@pytest.mark.parametrize("case", SHORTER)
def test_shorter_samples_keep_all_positions(case, saved, tmp_path):
    """Logits are those of transformers, beyond the samples' length too; an export has all positions."""
    name, settings = SHORTER[case]
    directory = saved(tiny(name, settings), 64)
    alone = tiny(name, (*settings, "sequence_length=40"))
    asked = "=64, but the recipe's sequence_length is 40; to train .* add --set model.positions=64$"
    assert re.search(asked, refusal(directory, alone))
    recipe = tiny(name, (*settings, "sequence_length=40", "model.positions=64"))
    plan = planned(directory, recipe)
    said = notices(plan)
    assert said == [f"initial weights: those of {directory}"]
    batch = export.RandomBatch.of(recipe)
    assert batch.tokens.shape[1] == 64
    expected = export.their_logits(recipe, directory, batch)
    conversion = conversion_of(recipe.model)
    weights = given_tensors.read(directory, recipe)
    if case == "transformers":
        model = transformers_model.build(recipe, InitialWeights(str(directory))).eval()
        with torch.no_grad():
            ours = conversion.logits(model, batch.tokens, None, batch.mask)
    else:
        ours = export.our_logits(recipe, weights, batch)
    assert expected[0].abs().max() > 1 and export.compare(ours, expected, directory) < 1e-4
    if case != "transformers":  # as the run builds it
        module = build_model.build_module(plan, ONE_RANK, weights)
        built = {parameter.canonical_name: parameter for parameter in module.parameters()}
        table = "embedding.position" if "bert" in case else "position.weight"
        assert len(built[table]) == 64 and torch.equal(built[table], weights[table])
    special = SimpleNamespace(eos_token_id=0, pad_token_id=0)
    export.write_model(recipe, weights, special, tmp_path / "out", torch.float32)
    assert export.compare(ours, export.their_logits(recipe, tmp_path / "out", batch), directory) < 1e-4
    notices(planned(tmp_path / "out", recipe))
    notices(planned(tmp_path / "out", tiny(name, settings)))
    longer = tiny(name, (*settings, "sequence_length=70", "model.positions=80"))
    said = refusal(tmp_path / "out", longer)
    assert "=64, but the recipe's model.positions is 80; to train" in said
    advised = re.findall(r"--set (\S+)", said)
    assert set(advised) == {"sequence_length=64", "model.positions=null"}
    planned(tmp_path / "out", tiny(name, (*settings, *advised)))


def test_numbers_that_are_not_finite_are_refused_where_they_are_read(copy):
    """Headers do not tell of them, and a run would call it divergence."""
    directory, recipe = copy(tiny()), tiny()
    state(lambda t: t[W].fill_(torch.nan))(directory)
    with pytest.raises(ProblemsError, match="not finite, in layers.0.mlp.expand.weight"):
        given_tensors.read(directory, recipe)


def test_the_files_of_transformers_choice_are_read(copy):
    """model.safetensors comes before what else lies there; links and pickles are followed and read."""
    directory = copy(tiny())
    expected = load_file(directory / "model.safetensors")
    save_file({"x": torch.ones(3)}, directory / "adapter_model.safetensors")
    assert read_state_dict(directory).keys() == expected.keys()
    (directory / "model.safetensors").rename(directory / "blob")
    (directory / "model.safetensors").symlink_to("blob")
    assert notices(planned(directory, tiny()))
    pickled(None)(directory)
    found = read_state_dict(directory)
    assert notices(planned(directory, tiny())) and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *[("tokenizer.json", text) for text in ("[]", "3", "{}", '{"model": []}', "[" * 10**5, "", "hello")],
        ("tokenizer.json", '{"model": {"vocab": "a"}}'),
        ("tokenizer.json", '{"model": {"vocab": {"a": []}}}'),
        *[("vocab.json", text) for text in ("[]", "null", '{"a": [1]}')],
    ],
)
def test_an_odd_vocabulary_next_to_weights_is_said_to_be_odd(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 1})
    said = vocabulary.foreign_tokens(tmp_path, tokenizer) or ""
    assert name in said and said.endswith("whether the given weights know this run's tokens is not known")


@pytest.mark.parametrize(
    ("name", "same", "other"),
    [
        ("vocab.json", '{"a": 0, "b": 1}', '{"a": 1, "b": 0}'),
        (
            "tokenizer.json",
            '{"model": {"vocab": [["a", -1.5], ["b", -2]]}}',
            '{"model": {"vocab": [["b", 0.1]]}}',
        ),
        ("vocab.txt", "a\nb\n", "b\na\n"),
    ],
)
def test_vocabularies_next_to_weights_are_compared(name, same, other, tmp_path):
    tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 1})
    (tmp_path / name).write_text(same)
    assert vocabulary.foreign_tokens(tmp_path, tokenizer) is None
    (tmp_path / name).write_text(other)
    assert "tokens differ" in (vocabulary.foreign_tokens(tmp_path, tokenizer) or "")


def test_a_run_of_a_family_that_is_registered_later_can_be_given(monkeypatch, tmp_path):
    monkeypatch.setitem(families.FAMILIES, "later", replace(families.GPT2, name="later"))
    model = SimpleNamespace(family="later", layer_norm="pre")
    form = form_of(model, given_tensors.RunWeights(tmp_path).forms)
    assert GivenModel(form, {}).form.family == "later"
