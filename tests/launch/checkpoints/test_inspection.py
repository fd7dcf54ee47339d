"""What is damaged in a checkpoint is found and named."""

import json
import os
import re
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from stored import model_tensors, rewrite_manifest, write_checkpoint

from launch import checkpoint as command
from launch.checkpoints import inspection, manifest, run_checkpoints, tensor_file
from launch.checkpoints.geometry import Cut, overlap, rectangles
from launch.checkpoints.manifest import MOMENTS, WEIGHT, Fault, Series
from launch.console import ends
from recipes import catalog
from recipes.files import FileError

KINDS = (WEIGHT, *MOMENTS)
RECIPE = catalog.load("default/sotu", ["model.layers=1"], tiny=True)


@pytest.fixture
def directory(tmp_path):
    """A whole checkpoint of two ranks."""
    return write_checkpoint(tmp_path / "checkpoints", 4, model_tensors(RECIPE), RECIPE, kinds=KINDS, ranks=2)


def run(monkeypatch, capsys, *line):
    """Exit code, output and errors of the command."""
    monkeypatch.setattr(sys, "argv", [command.__file__, *map(str, line)])
    with pytest.raises(SystemExit) as ended:
        ends.run(command.main)
    said = capsys.readouterr()
    return ended.value.code, said.out, said.err


def rewrite(directory, name, change):
    """Write a file of a checkpoint anew with other tensors; its size and checksum in the manifest fit."""
    path = directory / name
    reader = tensor_file.Reader(path)
    tensors = {key: reader.whole(key) for key in reader.tensors}
    change(tensors)
    path.unlink()
    entries = [tensor_file.TensorEntry(k, t.dtype, tuple(t.shape), lambda t=t: t) for k, t in tensors.items()]
    told = tensor_file.write(path, entries)
    rewrite_manifest(directory, lambda held: replace(held, files={**held.files, name: told}))


def flip(path):
    content = bytearray(path.read_bytes())
    content[-3] ^= 8
    path.write_bytes(content)


TOLD = {"bytes": 0, "crc32": "00000000"}
SCALER = {"cur_scale": 2.0, "cur_iter": 4, "last_overflow_iter": -1, "cur_hysteresis": 1}
PIECE = {"rank": 0, "cut": None, "first": 0, "count": 509 * 64, "each": 509 * 64, "step": 1}


def in_place_of(path, make):
    path.unlink()
    make(path)


def forge(directory, **changes):
    """Merge changes into a manifest's JSON, whose own checksum fits again."""

    def merged(old, new):
        both = isinstance(old, dict) and isinstance(new, dict)
        return {**old, **{key: merged(old.get(key), value) for key, value in new.items()}} if both else new

    path = directory / manifest.NAME
    values = json.loads(path.read_text())
    del values["sha256"]
    values = merged(values, changes)
    path.write_text(json.dumps({**values, "sha256": manifest.digest(values)}))


def forge_recipe(directory, **changes):
    """Another recipe, that is sound in itself, than the recipe.yaml of the run."""
    (directory.parents[1] / "recipe.yaml").write_text(catalog.dump(RECIPE))
    forge(directory, recipe=changes)


def forge_word(directory, **changes):
    forge(directory, tensors={"word.weight": changes})


def change_tensors(directory, change):
    def changed(held):
        tensors = dict(held.tensors)
        change(tensors)
        return replace(held, tensors=tensors)

    rewrite_manifest(directory, changed)


def set_piece(number, **values):
    """Another piece of word.weight."""

    def change(tensors):
        tensor = tensors["word.weight"]
        series = [Series(p.rank, p.cut, p.first, p.count, p.count) for p in tensor.pieces]
        series[number] = replace(series[number], **values)
        tensors["word.weight"] = replace(tensor, series=tuple(series))

    return change


FILE, KEY = "rank-00001.safetensors", "exp_avg_sq/final_norm.bias"
HALF = RECIPE.model.vocab_size * RECIPE.model.hidden // 2
# What is done to a checkpoint -> what is said.
DAMAGE = {
    "a flipped bit": (
        lambda d: flip(d / FILE), "rank-00001.safetensors has checksum .* it holds word.weight",
    ),
    "a cut file": (lambda d: os.truncate(d / FILE, 999), "rank-00001.safetensors has 999 bytes instead of"),
    "a lost file": (lambda d: (d / FILE).unlink(), "rank-00001.* cannot be read .No such .* it holds word.w"),
    "NaN": (
        lambda d: rewrite(d, FILE, lambda t: t[KEY].fill_(torch.nan)),
        f"rank-00001.safetensors holds numbers that are not finite, or negative squares; in {KEY}$",
    ),
    "a negative square": (
        lambda d: rewrite(d, FILE, lambda t: t[KEY][3:4].fill_(-1e-9)), f"negative squares; in {KEY}$",
    ),
    "infinity": (
        lambda d: rewrite(d, FILE, lambda t: t["weight/word.weight"][7:8].fill_(-torch.inf)),
        "not finite, .*; in weight/word.weight$",
    ),
    "a tensor that is not in its file": (
        lambda d: rewrite(d, FILE, lambda t: t.pop(KEY)), f"lacks {KEY}, which the manifest",
    ),
    "a tensor of which nobody knows": (
        lambda d: rewrite(d, FILE, lambda t: t.update(x=torch.ones(2))), "holds x, of which the manifest",
    ),
    "a piece of another length": (
        lambda d: rewrite(d, FILE, lambda t: t.update({KEY: torch.ones(3)})),
        rf"holds {KEY} as \[3\] of F32 instead of \[32\] of a float",
    ),
    "no recipe": (
        lambda d: rewrite_manifest(d, lambda held: replace(held, recipe={})),
        "manifest.json has no recipe.title, recipe.model",
    ),
    "another model": (
        lambda d: rewrite_manifest(
            d, lambda held: replace(held, recipe={**held.recipe, "sequence_length": 32})
        ),
        r"has shape \[64, 64\] where the recipe has \[32, 64\]; it holds position.weight",
    ),
    "a tensor less": (
        lambda d: change_tensors(d, lambda t: t.pop("final_norm.weight")),
        "lacks tensors of the recipe's model; it holds final_norm.weight",
    ),
    "a tensor more": (
        lambda d: change_tensors(d, lambda t: t.update(x=t["final_norm.weight"])),
        "has tensors that the recipe's model has not; it holds x",
    ),
    "a gap": (
        lambda d: change_tensors(d, set_piece(1, count=HALF - 1)),
        "the pieces of word.weight leave gaps or overlap",
    ),
    "a gap as large as an overlap": (
        lambda d: change_tensors(d, set_piece(1, first=HALF - 64)),
        "the pieces of word.weight leave gaps or overlap",
    ),
    "an edited manifest": (
        lambda d: (d / "manifest.json").write_text(
            (d / "manifest.json").read_text().replace('"step": 4', '"step": 5')
        ),
        "manifest.json its own checksum is another",
    ),
    "no manifest": (lambda d: (d / "manifest.json").unlink(), "manifest.json"),
}  # fmt: skip


# Files of a run that were made by hand: their checksums are right.
FORGERIES = {
    "a weight file of another kind": (lambda d: in_place_of(d / FILE, Path.mkdir), f"{FILE} is no file"),
    "a pipe for a weight file": (
        lambda d: (in_place_of(d / FILE, os.mkfifo), forge(d, files={FILE: {"bytes": 0}})),
        f"{FILE} is no file",
    ),
    "another step's name": (
        lambda d: forge(d.rename(d.with_name("step-000006"))),
        "the step in its directory's name is 6: after 4 st",
    ),
    "another place in the data": (
        lambda d: forge(d, data={"position": 5}),
        "data.position is 5: after 4 .* is 32",
    ),
    "no moments": (lambda d: forge(d, kinds=["weight"]), "kinds is .*exp_avg"),
    "kinds of its own": (lambda d: forge(d, kinds=["weight", "../x"]), "kinds.1='../x'"),
    "a recipe that ends before": (lambda d: forge(d, recipe={"steps": 2}), "the last step is 4: .*it is 2"),
    "a recipe of no model": (lambda d: forge(d, recipe={"model": 3}), "recipe.model=3"),
    "another form": (lambda d: forge_word(d, form="transformers"), "in transformers' form"),
    "a cut before the tensor": (lambda d: forge_word(d, series=[{**PIECE, "cut": [0, -1, 600]}]), "cut.1=-1"),
    "more pieces than files": (
        lambda d: forge_word(d, series=[{**PIECE, "each": 1}]),
        "leave gaps or overlap",
    ),
    "two pieces in a file": (
        lambda d: forge_word(
            d, series=[{**PIECE, "first": n, "count": HALF, "each": HALF} for n in (0, HALF)]
        ),
        "leave gaps or overlap",
    ),
    "a tensor beyond all memory": (
        lambda d: forge_word(d, shape=[2**31, 2**31], series=[{**PIECE, "count": 2**62, "each": 1}]),
        "leave gaps or overlap",
    ),
}
CHANGED = {
    "model.heads is 2 instead of 4": {"model": {"heads": 2}},
    "model.attention_window is 8 instead of None": {
        "model": {"attention": ["dense", "banded"], "attention_window": 8}
    },
    "seed is 5 instead of 1234": {"seed": 5},
    "optimizer.lr is 0.0003 instead of 0.001, dropout.hidden": {
        "dropout": {"hidden": 0.5},
        "optimizer": {"lr": 3e-4},
    },
}
for said, changes in CHANGED.items():
    FORGERIES[f"another recipe: {said}"] = (
        partial(forge_recipe, **changes),
        f"has another recipe than its run .*recipe.yaml.: .*{said}",
    )
for content in "", "[]", "title: x", "\udc80", "model: {heads: 3}":
    FORGERIES[f"a recipe.yaml of {content!r}"] = (
        lambda d, c=content: (d.parents[1] / "recipe.yaml").write_text(c, errors="surrogateescape"),
        "cannot be compared with the run's recipe: .*recipe.yaml",
    )
FORGERIES["a directory for recipe.yaml"] = (
    lambda d: (d.parents[1] / "recipe.yaml").mkdir(),
    "cannot be compared with the run's recipe: .*recipe.yaml: is a directory",
)
FORGERIES["no checksum of the tokens"] = partial(forge, corpus=None), "corpus=None: .* a valid string"
UPDATES = "after 4 steps, of them 0 skipped, it is 4"
PROGRESS = {
    f"adam_steps is .*: {UPDATES}": [{"adam_steps": 0}, {"adam_steps": 10**18}],
    f"schedule is .*: {UPDATES}": [{"schedule": 0}, {"schedule": 5}],
    "after 4 steps, of them 4 skipped, it is 0": [{"skipped": 4}],
    "after 3 steps": [{"step": 3}, {"step": 3, "adam_steps": 3, "schedule": 3}],
    "after 99 steps": [{"step": 99, "adam_steps": 99, "schedule": 99}],
    "progress.step=": [{"step": -4}, {"step": 10**30}],
    "progress.loss_scaler": [
        {"loss_scaler": {"cur_scale": 2.0}},
        {"loss_scaler": {**SCALER, "cur_scale": 0}},
    ],
}
NAMES = (
    *("../../outside.safetensors", "/etc/passwd", "rank-00007\0.safetensors", "rank-00007.safetensors\n"),
    *(
        "r" * 255,
        "\N{GRINNING FACE}",
        "",
        ".",
        "rank-000007.safetensors",
        "rank-" + "\u0660" * 5 + ".safetensors",
    ),
)
for said, every in PROGRESS.items():
    for values in every:
        FORGERIES[f"progress of {values}"] = partial(forge, progress=values), said
for name in NAMES:
    FORGERIES[f"a file named {name[:20]!r}"] = (
        partial(forge, files={name: TOLD}),
        "should match pattern .*rank-",
    )


@pytest.mark.parametrize("case", [*DAMAGE, *FORGERIES])
def test_verify_finds_damage_and_names_it(case, directory, monkeypatch, capsys):
    assert [*inspection.faults(directory)] == []
    damage, said = {**DAMAGE, **FORGERIES}[case]
    damage(directory)
    root = directory.parent
    (directory,) = root.iterdir()
    found = [str(fault) for fault in inspection.faults(directory)]
    assert found and any(re.search(said, line) for line in found), found
    code, out, _ = run(monkeypatch, capsys, "verify", root.parent)
    *said, last = out.splitlines()
    assert code == 1 and said == [f"{directory}: damaged", *(f"  {line}" for line in found)]
    assert last.startswith("read ") and last.endswith("of 1 checkpoint: 1 damaged")


def test_verify_does_not_call_a_removed_checkpoint_damaged(directory, monkeypatch, capsys):
    def faults(path, seen):
        shutil.rmtree(path)
        return iter([Fault("manifest.json", "no such file")])

    monkeypatch.setattr(inspection, "faults", faults)
    code, out, _ = run(monkeypatch, capsys, "verify", directory.parent.parent)
    removed, last = out.splitlines()
    assert code == 0 and removed == f"{directory}: removed meanwhile, as the run keeps newer ones"
    assert last.endswith("of 0 checkpoints: none damaged")


def test_verify_reads_each_file_once_and_in_small_parts(directory):
    held = run_checkpoints.read(directory).manifest
    seen = []
    assert not [*inspection.faults(directory, seen.append)]
    assert sum(seen) == held.bytes and max(seen) <= tensor_file.BUCKET
    flip(directory / FILE)
    of_files = {name: [*inspection.file_faults(directory, held, name)] for name in held.files}
    assert [name for name, found in of_files.items() if found] == [FILE], (
        "and of a file that is sound, nothing"
    )


def test_overlapping_pieces_of_a_tensor_are_seen_in_any_cut():
    def pieces(*cuts):
        return [
            r
            for cut in cuts
            for first, count in ((0, 7), (7, 5))
            for r in rectangles((6, 4), cut, first, count)
        ]

    columns, rows = (Cut(1, 0, 2), Cut(1, 2, 2)), (Cut(0, 0, 3), Cut(0, 3, 3))
    assert not overlap(pieces(*columns)) and not overlap(pieces(*rows))
    assert overlap(pieces(columns[0], Cut(1, 1, 2))) and overlap(pieces(rows[0], columns[1]))


def test_numbers_that_are_of_no_concern_do_not_keep_weights_from_being_used(directory):
    rewrite(directory, FILE, lambda tensors: tensors[KEY].fill_(torch.nan))
    assert inspection.faults_of_kinds(directory, [WEIGHT], "") == []
    assert [problem.key for problem in inspection.faults_of_kinds(directory, ["exp_avg_sq"], "")] == [FILE]


# --- show


def test_show_lists_whole_and_damaged_checkpoints(directory, monkeypatch, capsys):
    root = directory.parent
    write_checkpoint(root, 8, model_tensors(RECIPE), RECIPE)
    (root / "step-000008" / "rank-00000.safetensors").unlink()
    (root / "step-000012").mkdir()
    code, out, _ = run(monkeypatch, capsys, "show", root.parent)
    lines = out.splitlines()
    assert code == 0 and [line.split()[0] for line in lines[1:5]] == ["step", "12", "8", "4"]
    assert "manifest.json" in lines[2] and "cannot be read" in lines[3] and lines[4].endswith("whole")


def test_show_says_what_is_in_one_checkpoint(directory, monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "show", directory)
    assert code == 0 and RECIPE.title in out and "2 files" in out
    rows = {line.split()[0]: line.split()[1:] for line in out.split("\n\n")[1].splitlines()}
    assert rows["word.weight"] == ["509", "x", "64", "2", "canonical"]
    assert run(monkeypatch, capsys, "show", directory.parent, "--step", "4")[1] == out


@pytest.mark.parametrize("name", ["show", "verify"])
def test_what_is_no_run_is_refused(name, directory, tmp_path, monkeypatch, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "step-000001.writing").mkdir()
    (tmp_path / "file").touch()
    for given, said in {
        "nowhere": "does not exist; give a run directory", "file": "is no directory",
        "empty": "holds no checkpoint", "step-000001.writing": "half written",
        "x" * 300: "File name too long",
    }.items():  # fmt: skip
        code, out, err = run(monkeypatch, capsys, name, tmp_path / given)
        assert code == 2 and not out and said in " ".join(err.split()), err
    code, _, err = run(monkeypatch, capsys, name, tmp_path, "--step", "5")
    assert code == 2 and "holds no checkpoint of step 5: only of 4" in " ".join(err.split())


def test_reading_a_file_that_was_cut_meanwhile_is_refused(directory):
    reader = tensor_file.Reader(directory / FILE)
    os.truncate(directory / FILE, 5000)
    with pytest.raises(FileError, match="ends within exp_avg_sq/layers"):
        reader.whole("exp_avg_sq/layers.0.mlp.contract.weight")
