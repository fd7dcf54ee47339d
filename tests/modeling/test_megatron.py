"""Checkpoints of every version and split of Megatron become the canonical weights that they were made of."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import os
import shutil
import signal
import sys
import types
import weakref
from pathlib import Path

import pytest
import torch
from megatron_writer import Form, random_weights, write
from numpy.testing._private.utils import runstring

from modeling.formats.megatron.checkpoint import UNREAD, open_checkpoint
from modeling.formats.megatron.files import is_checkpoint
from modeling.formats.megatron.names import name_map
from recipes import catalog
from recipes.files import FileError
from recipes.schema import Recipe

GPT2 = ("default/sotu", ())
BERT = ("bert/sotu", ())
ONE_SEGMENT = ("bert/sotu", ("model.sentence_head=none",))


def tiny(name: str = "default/sotu", settings: tuple[str, ...] = ()) -> Recipe:
    return catalog.load(name, [*settings, "precision=fp32"], tiny=True)


FORMS = [
    *[Form(version=v, tp=tp, names="v1") for v in (0, 1.0, 2.0) for tp in (1, 2)],
    *[Form(tp=tp, pp=pp) for tp, pp in ((1, 1), (4, 1), (1, 4), (2, 2))],
    Form(pp=2, chunks=2),
    Form(tp=2, pp=2, chunks=2, names="core"),
    Form(tp=2, names="norm"),
    Form(tp=2, pp=2, names="fused"),
    Form(tp=2, pp=2, names="engine"),
    Form(tp=2, deepspeed="plain"),
    Form(tp=2, deepspeed="pipeline"),
    Form(version=1.0, tp=2, deepspeed="pipeline"),
]
PIPELINED_BY_DEEPSPEED = [form for form in FORMS if form.deepspeed == "pipeline"]


def equal(found, expected) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in expected)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("name", [GPT2, BERT, ONE_SEGMENT], ids=["gpt2", "bert", "bert without sentences"])
def test_every_version_and_split_is_read_to_the_bit(name, form, tmp_path):
    if name is not GPT2 and form in PIPELINED_BY_DEEPSPEED:
        return  # Megatron-DeepSpeed has no pipelined BERT
    recipe = tiny(*name)
    weights = random_weights(recipe)
    found = open_checkpoint(write(tmp_path, recipe, weights, form))
    assert equal(found.weights(recipe.model), weights)
    assert found.tensors.keys() == {*name_map(recipe.model).values()}, "nothing is left over"
    assert (found.version, found.slices, found.layers) == (form.version, form.tp, recipe.model.layers)
    assert bool(found.copies) == (form.pp > 1 or form.deepspeed == "pipeline") and not [*found.untied()]


def test_newer_megatron_deepspeed_has_another_order_by_the_same_version(tmp_path):
    """Since its commit 676a482c; an argument of that commit tells it."""
    recipe = tiny()
    weights = random_weights(recipe)
    told = {"ds_sequence_parallel_fpdt": False}
    write(tmp_path, recipe, weights, Form(version=0, tp=2, deepspeed="plain", arguments=told))
    for file in tmp_path.glob("global_step7/*.pt"):
        torch.save({**torch.load(file, weights_only=False), "checkpoint_version": 3.0}, file)
    assert equal(open_checkpoint(tmp_path).weights(recipe.model), weights)


def test_half_precision_and_classes_of_megatron_are_read(tmp_path, monkeypatch):
    """Arguments hold enumerations of modules that nobody has installed, of which nothing is called."""
    recipe = tiny()
    weights = {name: t.half().float() for name, t in random_weights(recipe).items()}
    half = {name: t.half() for name, t in weights.items()}
    parts = ("megatron", "megatron.core", "megatron.core.enums")
    for name in parts:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    kind = enum.Enum("ModelType", {"encoder_or_decoder": 1}, module=parts[-1])
    sys.modules[parts[-1]].ModelType = kind
    told = dict(model_type=kind.encoder_or_decoder, exit_signal=signal.SIGTERM, save=tmp_path)
    write(tmp_path, recipe, half, Form(tp=2, arguments=told))
    for name in parts:
        monkeypatch.delitem(sys.modules, name)
    found = open_checkpoint(tmp_path)
    assert equal(found.weights(recipe.model), weights)
    assert found.tensors["embedding.word_embeddings.weight"].dtype == torch.float16
    classes = ("model_type", "exit_signal", "save", "params_dtype")
    assert {found.arguments[name] for name in classes} == {UNREAD}
    assert found.arguments["num_layers"] == recipe.model.layers


@dataclasses.dataclass
class Args:
    num_attention_heads: int
    orig_vocab_size: int
    gelu: object


@dataclasses.dataclass(slots=True)
class SlottedArgs(Args):
    num_layers: int = 4


@pytest.mark.parametrize("kind", [argparse.Namespace, types.SimpleNamespace, dict, Args, SlottedArgs])
def test_arguments_are_read_in_every_container_of_converters(kind, tmp_path, monkeypatch):
    """transformers' converter writes a SimpleNamespace; other classes are those of scripts."""
    recipe = tiny()
    directory = write(tmp_path, recipe, random_weights(recipe), Form())
    said = {"num_attention_heads": 4, "orig_vocab_size": recipe.model.vocab_size - 1}
    own = kind(**said, gelu=signal.SIGTERM)
    with monkeypatch.context() as patch:
        if kind in (Args, SlottedArgs):
            patch.setattr(kind, "__module__", "converter")
            patch.setitem(sys.modules, "converter", types.SimpleNamespace(**{kind.__name__: kind}))
        in_one(lambda content: content.update(args=own))(directory)
    found = open_checkpoint(directory)
    assert said.items() <= found.arguments.items() and found.arguments["gelu"] == UNREAD
    config = found.config(())
    assert (config["num_attention_heads"], config["vocab_size"]) == tuple(said.values())
    assert config["num_layers"] == recipe.model.layers


def test_a_distributed_optimizer_of_one_stage_is_left(tmp_path):
    recipe = tiny()
    weights = random_weights(recipe)
    write(tmp_path, recipe, weights, Form(tp=2))
    for file in tmp_path.glob("*/mp_rank*/*"):
        file.rename(file.with_name("model_rng.pt"))
        for rank in range(2):
            (part := Path(f"{file.parent}_{rank:03d}")).mkdir()
            torch.save({"optimizer": {}}, part / "optim.pt")
    assert equal(open_checkpoint(tmp_path).weights(recipe.model), weights)
    shutil.copytree(tmp_path / "iter_0000007/mp_rank_00", tmp_path / "iter_0000007/mp_rank_000_000")
    with pytest.raises(FileError, match="mp_rank_00/model_rng.pt and mp_rank_000_000/model_rng.pt: a rank"):
        open_checkpoint(tmp_path)


def test_what_is_whole_need_not_be_as_its_arguments_say(tmp_path):
    """Merged over ranks and stages by a converter that kept the arguments of the training."""
    recipe = tiny()
    weights = random_weights(recipe)
    told = {"tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 3}
    found = open_checkpoint(write(tmp_path, recipe, weights, Form(tp=2, pp=2, arguments=told)))
    assert equal(found.weights(recipe.model), weights)


class Payload:
    def __init__(self, call, *arguments):
        self.how = (call, arguments)

    def __reduce__(self):
        return self.how


@pytest.mark.parametrize("place", ["model", "args", "file"])
def test_a_payload_is_refused_and_not_run(place, tmp_path):
    run = tmp_path / "run"
    write(tmp_path, tiny(), random_weights(tiny()), Form())
    file = tmp_path / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    payload = Payload(os.system, f"touch {run}")
    torch.save(payload if place == "file" else {**content, place: payload}, file)
    with pytest.raises(FileError, match="names posix.system.*might run a program"):
        open_checkpoint(tmp_path)
    assert not run.exists()
    torch.load(file, weights_only=False)
    assert run.exists(), "unpickled, it runs"


def test_a_function_of_an_allowed_module_is_replaced_and_not_run(tmp_path):
    run, recipe, weights = tmp_path / "run", tiny(), random_weights(tiny())
    payload = Payload(runstring, f"open({str(run)!r}, 'w')", {})
    write(tmp_path, recipe, weights, Form(extra={"np_rng": payload}))
    assert equal(open_checkpoint(tmp_path).weights(recipe.model), weights)
    assert not run.exists()


def cut_off(directory):
    file = directory / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt"
    file.write_bytes(file.read_bytes()[:-5000])


def in_one(change):
    """Changes the state dict of the last tensor slice."""

    def damage(directory):
        file = sorted(directory.glob("*/mp_rank*/model_optim_rng.pt"))[-1]
        content = torch.load(file, weights_only=False)
        change(content)
        torch.save(content, file)

    return damage


def gone(pattern):
    def damage(directory):
        for path in directory.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


def old_form(directory):
    file = directory / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt"
    torch.save(torch.load(file, weights_only=False), file, _use_new_zipfile_serialization=False)


def pickled_otherwise(directory):
    file = directory / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt"
    torch.save(torch.load(file, weights_only=False), file, pickle_protocol=4)


def renamed(name):
    def damage(directory):
        for file in directory.glob("*/*/*"):
            file.rename(file.with_name(name))

    return damage


def encoder(content):
    return content["model"]["language_model"]["encoder"]


TP2, PIPE = Form(tp=2), Form(tp=2, deepspeed="pipeline")
DAMAGED = {
    "cut off": (TP2, cut_off, "cannot be read .*: it was cut off or changed"),
    "an old file": (TP2, old_form, "before torch 1.6, which cannot be mapped"),
    "a slice gone": (Form(tp=4), gone("*/mp_rank_01"), "lacks slice 1 of 4 of pipeline stage 00"),
    "the last slice gone": (TP2, gone("*/mp_rank_01"), "1 tensor-parallel ranks, and .* tell of 2"),
    "the last slice of an old one gone": (
        Form(version=0, tp=2, names="v1"), gone("*/mp_rank_01"), "its arguments tell of 2",
    ),
    "a stage's slice gone": (
        Form(tp=2, pp=2), gone("*/mp_rank_01_001"), "lacks slice 1 of 2 of pipeline stage 01",
    ),
    "a stage gone": (Form(pp=2), gone("*/mp_rank_00_001"), "1 pipeline-parallel ranks, and .* tell of 2"),
    "a stage between gone": (
        Form(pp=4, arguments=None), gone("*/mp_rank_00_002"), "lacks pipeline stage 2: it holds stage 3",
    ),
    "a layer gone": (PIPE, gone("*/layer_04*"), "lacks the files of layer_04"),
    "a layer's slice gone": (PIPE, gone("*/layer_04-model_00*"), "lacks slice 0 of 2 of layer_04"),
    "no arguments' file": (PIPE, gone("*/mp_rank_00*"), "lacks mp_rank_00_model_states.pt"),
    "no weights' file": (TP2, gone("*/mp_rank_01/*"), "mp_rank_01: holds nothing, and .*; copy the whole"),
    "weights of another kind": (
        TP2, renamed("model_weights.ckpt"), "mp_rank_00: holds model_weights.ckpt, .*; give a checkpoint",
    ),
    "pickled otherwise": (TP2, pickled_otherwise, "pickled in another way .*save it again with its own"),
    "no iteration": (TP2, gone("iter*"), "says 'iter_0000007', and next to it is no iteration"),
    "one slice lacks a tensor": (
        TP2, in_one(lambda c: encoder(c).pop("layers.0.input_layernorm.bias")),
        "slices differ in language_model.encoder.layers.0.input_layernorm.bias",
    ),
    "slices of two sizes": (
        TP2, in_one(lambda c: encoder(c).update({"layers.1.mlp.dense_h_to_4h.bias": torch.ones(3)})),
        "slices differ in language_model.encoder.layers.1.mlp.dense_h_to_4h.bias",
    ),
    "a version to come": (Form(version=4.0), lambda d: None, "checkpoint_version 4.0: versions 0 to 3"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_what_is_not_whole_is_refused(case, tmp_path):
    form, damage, said = DAMAGED[case]
    write(tmp_path, tiny(), random_weights(tiny()), form)
    damage(tmp_path)
    with pytest.raises(FileError, match=said):
        open_checkpoint(tmp_path)


def test_iterations_are_found_where_megatron_looks_for_them(tmp_path):
    recipe = tiny()
    weights = random_weights(recipe)
    write(tmp_path, recipe, weights, Form())
    assert open_checkpoint(tmp_path / "iter_0000007").where == tmp_path / "iter_0000007"
    shutil.copytree(tmp_path / "iter_0000007", tmp_path / "release")
    assert open_checkpoint(tmp_path).where.name == "iter_0000007"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release\n")
    assert open_checkpoint(tmp_path).where.name == "release"
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    with pytest.raises(FileError, match="holds iter_0000007, release.*give one of them"):
        open_checkpoint(tmp_path)
    assert is_checkpoint(tmp_path) and is_checkpoint(tmp_path / "release")
    (tmp_path / "config.json").write_text("{}")
    assert not is_checkpoint(tmp_path), "transformers' Trainer leaves DeepSpeed's folders next to its own"


def test_weights_are_read_one_by_one_and_let_go(tmp_path):
    recipe = tiny()
    weights = random_weights(recipe)
    lazy = open_checkpoint(write(tmp_path, recipe, weights, Form(tp=2))).weights(recipe.model)
    first = lazy["position.weight"]
    held = weakref.ref(first)
    first.zero_()
    assert torch.equal(lazy["position.weight"], weights["position.weight"]), "what is mapped stays"
    del first
    assert held() is None
    assert lazy.not_finite() == []
