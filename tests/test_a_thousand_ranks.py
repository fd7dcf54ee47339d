"""What one rank of a large run costs: no part of it may grow with the number of ranks.

The ranks are made one at a time, in a world that torch fakes (`workers/thousand_ranks.py`).
"""

import json
import math
import queue
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from launching import WORKERS, run

from launch.checkpoints import manifest
from launch.checkpoints.geometry import Cut, share
from launch.checkpoints.manifest import ListedTensor, Manifest, Progress, Series, StoredFile, file_name
from launch.checkpoints.shares import Part
from launch.ranks import processes
from recipes import catalog

RECIPE = catalog.load(tiny=True).model_dump(mode="json", by_alias=True)
SHAPES = {"word.weight": (1000, 64), "layers.0.mlp.weight": (256, 64), "layers.0.mlp.bias": (256,)}


@pytest.mark.parametrize(
    "stages", ["own", pytest.param("every", marks=pytest.mark.long)], ids=lambda stages: stages
)
def test_every_large_layout_starts_steps_and_saves(stages, tmp_path):
    """Published layouts of 64 ranks and more, as their rows run them, and under every ZeRO stage."""
    worker = [sys.executable, str(WORKERS / "thousand_ranks.py"), stages, str(tmp_path / "found.json")]
    done = run(worker, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert {rank["world"] for rank in found.values()} >= {64, 128, 256, 512}
    for name, rank in found.items():
        alone = rank["groups"].count(1)
        assert alone == (rank["dp"] == 1), f"{name}: DeepSpeed needs a data group of one rank, and no other"
        assert len(rank["groups"]) <= 6, f"{name}: {rank['groups']}"
        assert rank["elements"] > 0 or rank["tensors"] == 0
    # The first has torch look for its compiler; a file for each rank would be 512 at the largest.
    assert max(rank["opened"] for rank in found.values()) < 200


def parts(world, tp=1):
    """Each rank's part under ZeRO-3: every tensor cut over `tp` ranks, and each slice over the others."""
    for rank in range(world):
        tensors = {}
        for name, shape in SHAPES.items():
            cut = Cut(0, rank % tp * shape[0] // tp, shape[0] // tp) if tp > 1 else None
            first, count = share(math.prod(shape) // tp, rank // tp, world // tp)
            if count:
                tensors[name] = ListedTensor(shape, (Series(rank, cut, first, count, count),))
        yield Part(rank, {file_name(rank): StoredFile(1, "0" * 8)}, tensors, {})


def merged(values):
    """Merge neighbours, as ranks do over their tree."""
    values = list(values)
    while len(values) > 1:
        pairs = [values[at : at + 2] for at in range(0, len(values), 2)]
        values = [pair[0].followed_by(pair[1]) if len(pair) > 1 else pair[0] for pair in pairs]
    return values[0]


@pytest.mark.parametrize("tp", [1, 4])
def test_a_manifest_has_a_line_for_a_tensor_and_not_for_each_of_its_pieces(tp, tmp_path):
    whole = merged(parts(1024, tp))
    for name, tensor in whole.tensors.items():
        assert len(tensor.series) == tp, name
        assert sum(piece.count for piece in tensor.pieces) == math.prod(SHAPES[name])
    held = Manifest(Progress(1, 1, 1), {}, "", RECIPE, {}, {}, whole.files, whole.tensors)
    manifest.write(held, tmp_path)
    assert manifest.read(tmp_path) == held
    assert (tmp_path / manifest.NAME).stat().st_size < 1024 * 60 + 3 * tp * 150 + 2000 + len(
        json.dumps(RECIPE)
    )


@pytest.fixture
def on_ranks(monkeypatch):
    """Calls a function of a rank on all of a world, in threads; outcomes, and what each rank heard."""

    def call(world, of_rank):
        pairs = {(rank, rank - 2**power) for rank in range(world) for power in range(11)}
        # Every queue stands before the threads start: two of them could make one of a defaultdict twice.
        sent = {pair: queue.Queue() for pair in pairs | {(0, rank) for rank in range(world)}}
        me, heard = threading.local(), [[] for _ in range(world)]

        def send(tensor, group, group_dst):
            sent[me.rank, group_dst].put(tensor)

        def receive(tensor, group, group_src):
            tensor.copy_(sent[group_src, me.rank].get(timeout=60))
            heard[me.rank].append(tensor.nbytes)

        def share(tensor, group, group_src):
            for other in range(1, world) if me.rank == 0 else ():
                sent[0, other].put(tensor)
            if me.rank != 0:
                receive(tensor, group, 0)

        fakes = {"send": send, "recv": receive, "broadcast": share}
        fakes |= {"get_rank": lambda group: me.rank, "get_world_size": lambda group: world}
        for name, fake in fakes.items():
            monkeypatch.setattr(dist, name, fake)

        def rank(number):
            me.rank = number
            return of_rank(number)

        with ThreadPoolExecutor(world) as pool:
            outcome = list(pool.map(rank, range(world)))
        return outcome, heard

    return call


@pytest.mark.parametrize("world", [1, 2, 7, 8])
def test_values_of_all_ranks_are_merged_in_their_order_and_few_come_to_each(world, on_ranks):
    outcome, heard = on_ranks(world, lambda n: processes.merged([n], lambda one, other: one + other, None))
    assert outcome[0] == [*range(world)]
    assert max(map(len, heard)) <= 2 * (world - 1).bit_length(), "a length and a text of each"
    outcome, _ = on_ranks(world, lambda number: processes.gathered(number, None))
    assert all(each == [*range(world)] for each in outcome)


def test_of_a_thousand_ranks_each_hears_a_text_and_not_a_word_of_each(on_ranks):
    """Nor of those that say the same; what all ranks have to have alike, rank 0 alone compares."""
    said = {3: "no compiler", 700: "no compiler", 900: "no room"}
    outcome, heard = on_ranks(1024, lambda number: processes.texts_of_all([said.get(number)], None))
    assert all(each == ["no compiler", "no room"] for each in outcome)
    assert max(map(sum, heard)) < 400 and max(map(len, heard)) <= 20
