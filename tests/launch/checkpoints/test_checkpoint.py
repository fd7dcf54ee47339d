"""The form of a checkpoint: pieces, manifest, what is whole, what is damaged, and what goes."""

import contextlib
import errno
import json
import math
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from launching import environment, run
from safetensors.torch import load_file
from stored import checksum, complete_checkpoints, load_weights, write_checkpoint

from launch.checkpoints import manifest, reading, run_checkpoints, tensor_file
from launch.checkpoints import stored as stored_tensors
from launch.checkpoints.geometry import Cut, copies, rectangles, share
from launch.checkpoints.manifest import Series, joined
from launch.checkpoints.run_checkpoints import DamagedCheckpoint
from launch.checkpoints.stored import StoredTensors, TensorPlacement
from launch.checkpoints.tensor_file import TensorEntry
from launch.pretrain import sample
from recipes import catalog
from recipes.files import FileError
from recipes.schema import Recipe

TENSORS = {"word.weight": torch.arange(60.0).view(10, 6), "final_norm.bias": torch.arange(7.0)}


# --- pieces


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=8))
def test_a_piece_stays_with_its_rank_however_the_ranks_are_spaced(gaps):
    """`gaps`: ranks from one piece to the next, and the elements of each piece."""
    alone = []
    rank = 0
    first = 0
    for gap, count in gaps:
        rank += gap
        alone.append(Series(rank, None, first, count, count))
        first += count
    found = [piece for series in joined(alone) for piece in series.pieces()]
    assert found == alone


@st.composite
def layouts(draw, shape):
    """Pieces of a tensor: cut over tensor-parallel ranks, and each slice over data-parallel ones."""
    dim = draw(st.integers(0, len(shape) - 1))
    ranks, shares = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    length = -(-shape[dim] // ranks)  # the last slices may reach into padding
    local = [*shape]
    local[dim] = length
    cuts = [Cut(dim, rank * length, length) for rank in range(ranks)] if ranks > 1 else [None]
    size = math.prod(local) if ranks > 1 else math.prod(shape)
    return [(cut, *share(size, part, shares)) for cut in cuts for part in range(shares)]


@given(st.data(), st.lists(st.integers(1, 9), min_size=1, max_size=2))
def test_any_pieces_of_a_tensor_become_any_others(data, shape):
    full = torch.arange(1.0, math.prod(shape) + 1).view(shape)
    want, each_alone = data.draw(layouts(shape)), data.draw(layouts(shape))
    alone = [Series(n, cut, first, count, count) for n, (cut, first, count) in enumerate(each_alone) if count]
    have = joined(alone)
    pieces = {piece for series in have for piece in series.pieces()}
    assert pieces == {piece for series in alone for piece in series.pieces()}

    def slice_of(cut):
        return TensorPlacement("x", "canonical", tuple(shape), cut).slice_of(full).reshape(-1)

    for cut, first, count in want:
        target = torch.zeros(count)
        wanted = rectangles(shape, cut, first, count)
        near = [(p, part) for part in wanted for series in have for p in series.pieces_around(shape, part)]
        for piece, part in near:
            held = slice_of(piece.cut)[piece.first : piece.first + piece.count]
            for copy in copies(piece.rectangles(shape), [part]):
                size = copy.rows, copy.columns
                read = held.as_strided(size, (copy.source_stride, 1), held.storage_offset() + copy.source)
                target.as_strided(size, (copy.target_stride, 1), copy.target).copy_(read)
        assert torch.equal(target, slice_of(cut)[first : first + count])


def test_a_file_is_one_that_safetensors_reads_and_memory_holds_one_tensor(tmp_path):
    alive, most = set(), 0

    def made(number):
        nonlocal most
        tensor = torch.full((number, 3), float(number), dtype=torch.bfloat16)
        alive.add(number)
        most = max(most, len(alive))
        alive.discard(number - 1)
        return tensor

    entries = [TensorEntry(f"t{n}", torch.bfloat16, (n, 3), lambda n=n: made(n)) for n in range(6)]
    told = tensor_file.write(tmp_path / "x", entries)
    read = load_file(tmp_path / "x")
    assert {name: (tuple(t.shape), float(t.sum())) for name, t in read.items()} == {
        f"t{n}": ((n, 3), 3.0 * n * n) for n in range(6)
    }
    assert most <= 2 and checksum(tmp_path / "x") == told
    with pytest.raises(FileExistsError):
        tensor_file.write(tmp_path / "x", entries)


def test_tensors_are_read_whole_and_in_pieces(tmp_path):
    directory = write_checkpoint(tmp_path, 4, TENSORS, ranks=3)
    stored = StoredTensors(directory)
    assert [*stored] == [*TENSORS] and stored.shape("word.weight") == (10, 6)
    for name, tensor in load_weights(directory).items():
        assert torch.equal(tensor, TENSORS[name])
    # Rows 6 to 11 of which the last two are padding, from the fourth element on.
    target = torch.full((30,), -1.0)
    place = TensorPlacement("word.weight", "canonical", (10, 6), Cut(0, 6, 6))
    stored.fill(target, place, 3, "weight")
    assert target.tolist() == [*range(39, 60), *[0] * 9]
    target = torch.zeros(10)
    stored.fill(target, TensorPlacement("word.weight", "canonical", (10, 6), Cut(1, 2, 2)), 5, "weight")
    assert target.tolist() == [15, 20, 21, 26, 27, 32, 33, 38, 39, 44]
    with pytest.raises(FileError, match=r"word.weight has shape \[10, 6\]: the model's has \[10, 5\]"):
        stored.fill(target, TensorPlacement("word.weight", "canonical", (10, 5), None), 0, "weight")
    with pytest.raises(FileError, match="holds no layers.0.x"):
        stored.fill(target, TensorPlacement("layers.0.x", "canonical", (10,), None), 0, "weight")


def test_of_a_checkpoint_of_many_files_few_are_open(tmp_path, monkeypatch):
    monkeypatch.setattr(stored_tensors, "MOST_OPEN", 2)
    directory = write_checkpoint(tmp_path, 4, TENSORS, ranks=5)
    stored = StoredTensors(directory)
    for _ in range(2):  # those that were closed are opened again
        for name, tensor in TENSORS.items():
            assert torch.equal(stored[name], tensor)
            links = (os.path.realpath(link) for link in Path("/proc/self/fd").iterdir())
            assert sum(link.startswith(str(directory.resolve())) for link in links) <= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_elements_of_every_width_are_those_asked_for(tmp_path, dtype):
    """Of the second tensor, from its middle; a piece that leaves its tensor is refused."""
    one, two = torch.arange(7).to(dtype), torch.arange(100, 124).to(dtype).view(4, 6)
    entries = [
        TensorEntry(name, dtype, tuple(t.shape), lambda t=t: t) for name, t in (("one", one), ("two", two))
    ]
    tensor_file.write(tmp_path / "x", entries)
    reader = tensor_file.Reader(tmp_path / "x")
    assert torch.equal(reader.elements("two", 5, 11), two.flatten()[5:16])
    assert torch.equal(reader.whole("two"), two) and reader.whole("one").dtype == dtype
    for name, first in ("one", 4), ("two", 20):
        with pytest.raises(FileError, match=f"ends within {name}"):
            reader.elements(name, first, 6)


# --- manifests


def reason(directory):
    found = run_checkpoints.read(directory)
    assert isinstance(found, DamagedCheckpoint), found
    return found.why


def written_anew(directory, change):
    """The reason why the checkpoint is damaged once its manifest, with a checksum that fits, has changed."""
    path = directory / manifest.NAME
    values = json.loads(path.read_text())
    del values["sha256"]
    change(values)
    path.write_text(json.dumps({**values, "sha256": manifest.digest(values)}))
    return reason(directory)


def series(values):
    return values["tensors"]["word.weight"]["series"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda values: values.update(format=1), "format=1: input should be 2"),
        (lambda values: series(values)[0].update(first=21), "a piece lies within its tensor"),
        (lambda values: series(values)[0].update(rank="../rank-00000"), "word.weight.series.0.rank='../rank"),
        (lambda values: series(values)[0].update(count="many"), "word.weight.series.0.count='many'"),
        (lambda values: series(values)[0].update(cut=[1]), "word.weight.series.0.cut"),
        (lambda values: series(values)[0].pop("rank"), "has no tensors.word.weight.series.0.rank"),
        (lambda values: values["tensors"].update({"word.weight": 3}), "word.weight=3"),
    ],
)
def test_a_manifest_of_another_form_is_damaged(tmp_path, change, said):
    assert said in written_anew(write_checkpoint(tmp_path, 4, TENSORS, ranks=3), change)


# --- whole, damaged, gone


def steps(root):
    return [c.step for c in complete_checkpoints(root)]


def test_only_whole_checkpoints_count(tmp_path):
    assert run_checkpoints.newest(tmp_path) is None
    for step in (4, 8, 12, 20, 100000, 2000000):
        write_checkpoint(tmp_path, step, TENSORS)
    (tmp_path / "step-000012" / manifest.NAME).unlink()
    (tmp_path / "step-000020" / "rank-00000.safetensors").unlink()
    os.truncate(tmp_path / "step-000008" / "rank-00000.safetensors", 300)
    (tmp_path / "step-000030.writing").mkdir()
    assert steps(tmp_path) == [4, 100000, 2000000] and run_checkpoints.newest(tmp_path).step == 2000000
    damaged = {
        each.step: each.why for each in run_checkpoints.found(tmp_path) if isinstance(each, DamagedCheckpoint)
    }
    assert "no such file" in damaged[12]
    assert "rank-00000.safetensors cannot be read (No such file" in damaged[20]
    assert damaged[8].endswith("it holds word.weight, final_norm.bias") and "has 300 bytes" in damaged[8]


def test_old_checkpoints_go_and_damaged_ones_stay(tmp_path):
    for step in (1, 2, 3, 4):
        write_checkpoint(tmp_path, step, TENSORS)
    (tmp_path / "step-000002" / manifest.NAME).unlink()
    run_checkpoints.prune(tmp_path, None)
    assert steps(tmp_path) == [1, 3, 4]
    run_checkpoints.prune(tmp_path, 2)
    assert steps(tmp_path) == [3, 4] and (tmp_path / "step-000002").is_dir()


def test_a_checkpoint_that_is_read_stays_until_its_reader_ends(tmp_path):
    write_checkpoint(tmp_path, 1, TENSORS)
    program = (
        "import sys; from pathlib import Path; from launch.checkpoints import run_checkpoints;"
        "print(run_checkpoints.newest_whole(Path(sys.argv[1]))[0].step, flush=True); sys.stdin.read()"
    )
    reader = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(None),
    )  # fmt: skip
    assert reader.stdout is not None and reader.stdout.readline() == "1\n"
    write_checkpoint(tmp_path, 2, TENSORS)
    run_checkpoints.prune(tmp_path, 1)
    assert steps(tmp_path) == [1, 2]
    reader.communicate()
    run_checkpoints.prune(tmp_path, 1)
    assert steps(tmp_path) == [2]


def test_where_a_checkpoint_is_pruned_while_it_is_opened_the_newest_is_taken(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, 1, TENSORS)
    whole = run_checkpoints.first_whole

    def later(every):
        chosen = whole(every)
        monkeypatch.setattr(run_checkpoints, "first_whole", whole)
        write_checkpoint(tmp_path, 2, TENSORS)
        run_checkpoints.prune(tmp_path, 1)
        return chosen

    monkeypatch.setattr(run_checkpoints, "first_whole", later)
    assert run_checkpoints.newest_whole(tmp_path)[0].step == 2


@pytest.mark.parametrize("name", ["step-100", "step-000100.pruned", "step-000100.writing"])
def test_a_run_named_like_a_checkpoint_is_a_run(tmp_path, name):
    run = tmp_path / name
    write_checkpoint(run / "checkpoints", 7, TENSORS)
    (run / "recipe.yaml").write_text("its name tells a run")
    assert run_checkpoints.newest_whole(run)[0].step == 7 and run_checkpoints.holds_ours(run)
    assert not run_checkpoints.holds_ours(tmp_path)
    with pytest.raises(ValueError, match="holds no checkpoint"):
        run_checkpoints.below(tmp_path)


def test_what_killed_runs_leave_is_removed_and_nothing_else(tmp_path):
    write_checkpoint(tmp_path, 1, TENSORS)
    (tmp_path / "step-000002").mkdir()
    for name in ("step-000003.writing", "step-000001.pruned"):
        (tmp_path / name).mkdir()
    run_checkpoints.remove_remains(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000001", "step-000002"]


@pytest.mark.parametrize(("number", "whole"), [(errno.EINVAL, True), (errno.EIO, False)])
def test_a_file_system_that_flushes_no_directories_costs_no_checkpoint(tmp_path, monkeypatch, number, whole):
    fsync = os.fsync

    def refused(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refused)
    with contextlib.nullcontext() if whole else pytest.raises(OSError):
        write_checkpoint(tmp_path, 1, TENSORS)
    assert steps(tmp_path) == ([1] if whole else [])


def test_a_manifest_is_read_without_memory_for_the_largest_one(tmp_path):
    directory = write_checkpoint(tmp_path, 1, TENSORS)
    tracemalloc.start()
    manifest.read(directory)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 20 < manifest.MOST_BYTES


def test_a_damaged_checkpoint_is_moved_aside_for_a_whole_one(tmp_path):
    write_checkpoint(tmp_path, 1, TENSORS)
    (tmp_path / "step-000001" / manifest.NAME).write_text("{}")
    write_checkpoint(tmp_path, 1, TENSORS)
    assert steps(tmp_path) == [1] and (tmp_path / "step-000001.damaged-1" / manifest.NAME).exists()


def test_files_are_on_the_disk_before_the_manifest_and_the_name_after_it(tmp_path, monkeypatch):
    """A crash of the machine finds no name without a manifest, and no manifest without its files."""
    order = []
    fsync, rename, swap = os.fsync, os.rename, os.replace

    def synced(descriptor):
        order.append(
            ("sync", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")).split(".json.")[0])
        )
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append(("name", os.path.basename(b))), swap(a, b)))
    monkeypatch.setattr(
        os, "rename", lambda a, b: (order.append(("name", os.path.basename(b))), rename(a, b))
    )
    write_checkpoint(tmp_path / "checkpoints", 4, TENSORS)
    assert order == [
        ("sync", "rank-00000.safetensors"), ("sync", "manifest"), ("name", "manifest.json"),
        ("sync", "step-000004.writing"), ("name", "step-000004"), ("sync", "checkpoints"),
    ]  # fmt: skip


# --- no checkpoint of the last step


def test_without_a_checkpoint_every_reader_says_which_key_keeps_one(tmp_path):
    recipe = catalog.load(overrides=["run.save_last=false", "run.save_every=0"], tiny=True)
    (tmp_path / "recipe.yaml").write_text(catalog.dump(recipe))
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ValueError, match="holds no checkpoint: a run saves .* with run.save_last"):
        run_checkpoints.newest_whole(tmp_path)
    not_sampled = (
        r"no checkpoint of the last step \(run.save_last=false\); --set run.save_last=true keeps one"
    )
    with pytest.raises(ValueError, match=not_sampled):
        sample(recipe, tmp_path / "checkpoints", None)
    write_checkpoint(tmp_path / "checkpoints", 7, TENSORS)
    with pytest.raises(ValueError, match=not_sampled):  # a sample is by the final weights
        sample(recipe, tmp_path / "checkpoints", None)
    assert run_checkpoints.newest_whole(tmp_path)[0].step == 7


def test_a_checkpoint_of_other_tokens_is_no_damage_and_refuses_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "from_rank_0", lambda own, group, form: own)
    monkeypatch.setattr(reading, "problem_of", lambda candidate, grid: None)
    write_checkpoint(tmp_path, 7, TENSORS)
    (tmp_path / "step-000008").mkdir()
    held = manifest.read(tmp_path / "step-000007")
    how = tmp_path, Mock(rank=0), Recipe.model_validate(held.recipe)
    chosen = reading.choose(*how, held.corpus)
    assert chosen.checkpoint.step == 7 and [each.step for each in chosen.damaged] == [8]
    with pytest.raises(ValueError, match=f"on tokens with CRC-32 {held.corpus}, .* now have other: "):
        reading.choose(*how, "other")


@pytest.mark.long
def test_a_row_that_only_times_iterations_leaves_results_and_no_checkpoint(tmp_path):
    out = tmp_path / "run"
    done = run([
        sys.executable, "launch/pretrain.py", "--recipe", "megatron_paper_table1/1.2b-mp", "--tiny",
        "--steps", "4", "--ds_config", "zero1", "--set", "run.prompt=We", "--out", str(out),
    ])  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert not any((out / "checkpoints").iterdir()) and "checkpoints/" not in done.stdout
    assert (
        "metrics.jsonl; no checkpoint" in done.stdout and "not sampled: there is no checkpoint" in done.stdout
    )
    assert json.loads((out / "result.json").read_text())["status"] == "ok"
