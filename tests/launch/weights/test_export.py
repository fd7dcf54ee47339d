"""Exports of checkpoints made by hand: a tensor at a time, in shards, of whole checkpoints alone."""

import json
import shutil
import weakref

import pytest
import torch
from stored import model_tensors, write_checkpoint, write_run
from transformers import GPT2LMHeadModel

from launch import export_hf
from launch.checkpoints import tensor_file
from launch.checkpoints.manifest import MOMENTS, WEIGHT
from launch.checkpoints.stored import StoredTensors
from launch.machine import memory
from launch.weights import export
from launch.weights.export import ExportMismatch, compare
from modeling.families import conversion_of
from recipes import catalog
from recipes.problems import ProblemsError

GPT2, BERT = (catalog.load(name, ["model.layers=2"], tiny=True) for name in ("default/sotu", "bert/sotu"))


@pytest.fixture
def no_memory(monkeypatch):
    """Shards of 100 KB, and no memory for two models."""
    monkeypatch.setattr(memory, "available", lambda: 0.0)
    monkeypatch.setattr(export, "SHARD", 100_000)


@pytest.mark.parametrize(
    ("recipe", "form", "dtype"),
    [(GPT2, "canonical", "float32"), (GPT2, "transformers", "float32"), (BERT, "canonical", "bfloat16")],
)
def test_shards_are_written_and_read_again_with_one_tensor_in_memory(
    recipe, form, dtype, tmp_path, no_memory, monkeypatch
):
    run = write_run(tmp_path / "run", recipe, form=form)
    alive, most = [], 0
    read = StoredTensors.canonical

    def canonical(stored, name, kind):
        nonlocal most
        made = read(stored, name, kind)
        alive.append(weakref.ref(made.untyped_storage()))
        most = max(most, sum(each() is not None for each in alive))
        return made

    monkeypatch.setattr(StoredTensors, "canonical", canonical)
    done, _ = export_hf.export(run, tmp_path / "out", dtype=dtype)
    assert most == 1 and done.difference is None and done.files > 2
    said = export_hf.describe(done, recipe)
    assert "was not compared with our model: that takes" in said and f"{dtype} in {done.files} files" in said
    conversion = conversion_of(recipe.model)
    expected = conversion.to_transformers(model_tensors(recipe), recipe.model)
    model = conversion.model_class(recipe.model).from_pretrained(tmp_path / "out")
    state = model.state_dict()
    assert model.dtype == getattr(torch, dtype)
    assert all(torch.equal(state[name], tensor.to(model.dtype)) for name, tensor in expected.items())
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == expected.keys()
    assert all(
        (tmp_path / "out" / file).stat().st_size < 100_000 + max(t.nbytes for t in expected.values())
        for file in index["weight_map"].values()
    )


def test_a_flag_compares_logits_all_the_same(tmp_path, no_memory):
    run = write_run(tmp_path / "run", GPT2)
    done, _ = export_hf.export(run, tmp_path / "out", compare_logits=True)
    assert done.difference is not None and done.difference < 1e-5


def test_the_config_is_that_of_save_pretrained(tmp_path):
    done, _ = export_hf.export(write_run(tmp_path / "run", GPT2), tmp_path / "out")
    assert done.files == 1
    GPT2LMHeadModel.from_pretrained(tmp_path / "out").save_pretrained(tmp_path / "again")
    for name in ("config.json", "generation_config.json"):
        ours, theirs = (json.loads((tmp_path / d / name).read_text()) for d in ("out", "again"))
        assert ours == theirs


def test_what_the_disk_changed_is_noticed_without_logits(tmp_path, no_memory, monkeypatch):
    run = write_run(tmp_path / "run", GPT2)
    write = tensor_file.write

    def written(path, entries, metadata=None):
        told = write(path, entries, metadata)
        if path.name.startswith("model-00002"):
            content = bytearray(path.read_bytes())
            content[-3] ^= 8
            path.write_bytes(content)
        return told

    monkeypatch.setattr(tensor_file, "write", written)
    with pytest.raises(ExportMismatch, match="the written files hold other numbers of layers"):
        export_hf.export(run, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_only_whole_checkpoints_are_exported(tmp_path, capsys):
    run = write_run(tmp_path / "run", GPT2, kinds=(WEIGHT, *MOMENTS))
    root = run / "checkpoints"
    write_checkpoint(root, 8, model_tensors(GPT2), GPT2, ranks=2)
    (root / "step-000008" / "rank-00001.safetensors").unlink()
    done, _ = export_hf.export(run, tmp_path / "out")
    said = " ".join(capsys.readouterr().err.split())
    assert done.step == 4 and "step-000008 is damaged" in said and "step 4 is exported" in said
    with pytest.raises(ProblemsError, match="step-000008: is damaged: rank-00001.* or give another step"):
        export_hf.export(run, tmp_path / "again", step=8)
    file = root / "step-000004" / "rank-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 8  # of a moment
    file.write_bytes(content)
    with pytest.raises(
        ProblemsError, match=r"step-000004: rank-00001.safetensors has checksum .*it holds word"
    ):
        export_hf.export(run, tmp_path / "again")
    shutil.rmtree(root / "step-000004")
    (root / "step-000008" / "manifest.json").unlink()
    with pytest.raises(ValueError, match="step-000008: is damaged: .*manifest.json"):
        export_hf.export(run, tmp_path / "again")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
@pytest.mark.parametrize("ours", [True, False])
def test_weights_that_overflow_are_no_fault_of_the_conversion(odd, ours, tmp_path):
    sound, broken = (torch.ones(2),), (torch.tensor([1.0, odd]),)
    with pytest.raises(ExportMismatch, match="not finite, the weights overflow.*export in float32") as caught:
        compare(*((broken, sound) if ours else (sound, broken)), tmp_path)
    assert "conversion" not in str(caught.value)
