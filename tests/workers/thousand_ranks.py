"""Builds ranks of large layouts in this one process, over torch's fake process group, and counts their costs.

thousand_ranks.py own|every FOUND.json    builds engines of published layouts
thousand_ranks.py costs WORLD ...         prints what one rank of such worlds costs
thousand_ranks.py files WORLD ...         prints the files and connections that ranks of such worlds have open
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import math
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from launch.console import terminal
from launch.ranks import door, processes

terminal.quiet_libraries()

import deepspeed  # noqa: E402  (after the accelerator is chosen)
import torch.distributed as dist  # noqa: E402
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology  # noqa: E402
from deepspeed.runtime.zero import partitioned_param_coordinator  # noqa: E402
from deepspeed.utils import groups as deepspeeds  # noqa: E402
from random_batch import random_batch  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from ds_configs.plan import ANY_GPU, HOST, Machine, Plan  # noqa: E402
from ds_configs.resolver import resolve  # noqa: E402
from launch.checkpoints import manifest  # noqa: E402
from launch.checkpoints.engine_state import EngineState  # noqa: E402
from launch.checkpoints.geometry import share  # noqa: E402
from launch.checkpoints.manifest import ListedTensor, Manifest, Progress, Series, StoredFile, file_name  # noqa: E402
from launch.checkpoints.shares import Part, contents  # noqa: E402
from launch.records.facts import RunFacts  # noqa: E402
from launch.training.engine import build_engine, release_at_end, train_step  # noqa: E402
from launch.training.job import Job  # noqa: E402
from launch.training.micro_batches import dropout_seeds_of_step  # noqa: E402
from modeling.families import family_of, meta_parameters  # noqa: E402
from modeling.parallel.layers import seed_step  # noqa: E402
from modeling.parallel.process_grid import ProcessGrid  # noqa: E402
from recipes import catalog  # noqa: E402

CPU = Machine(HOST, fp16=False, bf16=True, compiler=True, libaio=False)
STAGES = ("zero0", "zero1", "zero2", "zero3")
partitioned_param_coordinator.assert_ints_same_as_other_ranks = lambda numbers: None  # it asks real ones
RECIPE = catalog.load(tiny=True).model_dump(mode="json", by_alias=True)
LEAST = 64  # ranks of a layout
opened: list[str] = []  # files, since it was emptied
sys.addaudithook(lambda event, given: opened.append(str(given[0])) if event == "open" else None)


@contextlib.contextmanager
def rank_of(world: int, rank: int) -> Iterator[list[int]]:
    """Be `rank` of a fake world; yields the sizes of the groups that are made in the block."""
    made: list[int] = []
    new_group, kept = dist.new_group, dict(vars(deepspeeds))

    def counted(ranks=None, timeout=None, backend=None, **how):
        made.append(world if ranks is None else len(ranks))
        return new_group(ranks, backend="fake", **how)

    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(world))
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    processes.switch_shared_memory_op_off()
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    dist.new_group = counted
    try:
        yield made
    finally:
        dist.new_group = new_group
        vars(deepspeeds).update(kept)
        deepspeed.comm.comm.cdb = None
        dist.destroy_process_group()


def published() -> dict[tuple[str, int, int, int, str], str]:
    """Family, degrees and configuration of every published layout of `LEAST` ranks or more -> a row of it."""
    found = {}
    for name in catalog.titles():
        recipe = catalog.load(name)
        plan = resolve(recipe, recipe.ds_config, None, ANY_GPU)
        of = plan.layout
        if of.world >= LEAST and recipe.model.implementation == "megarecipes":
            found.setdefault((recipe.model.family, of.tp, of.pp, of.dp, plan.ds_name), name)
    return found


def tiny_plan(row: str, layout: tuple[int, int, int], ds_config: str) -> Plan:
    """Plan a row's layout with a model that has few numbers: a head a tensor rank, a layer a stage."""
    tp, pp, dp = layout
    settings = [f"parallel.tp={tp}", f"parallel.pp={pp}", f"parallel.dp={dp}", f"model.layers={max(2, pp)}"]
    settings += ["model.heads=8", "model.hidden=64", "precision=fp32"]
    settings += ["batch.micro=1", "batch.accumulation=1", f"batch.global={dp}"]
    recipe = catalog.load(row, settings, tiny=True, steps=1)
    return resolve(recipe, ds_config, tp * pp * dp, CPU)


def engine_of(plan: Plan, rank: int, out: Path) -> dict[str, Any]:
    """Make the engine of one rank, take a step, and describe the rank's share of a checkpoint.

    A pipeline takes no step: it would wait for the shapes that its neighbours send.
    """
    recipe, layout = plan.recipe, plan.layout
    opened.clear()
    with rank_of(layout.world, rank) as made:
        grid = ProcessGrid(layout.tp, layout.pp, layout.dp)
        engine = build_engine(Job(RunFacts(plan, "x"), out), grid, lambda text: None)
        with release_at_end(engine):
            if grid.pp == 1:
                fields = family_of(recipe.model).fields
                sizes = 1, recipe.sequence_length, recipe.predictions or 1, recipe.model.vocab_size
                dropout_seeds = dropout_seeds_of_step(plan, grid.at.dp, 0, engine.device)
                seed_step(recipe.seed, 0, grid.at)
                train_step(engine, [random_batch(fields, *sizes)], grid, dropout_seeds)
            entries, tensors = contents(EngineState(engine, grid), ("weight",), rank)
            elements = sum(entry.shape[0] for entry in entries)
            files_open = open_files()
    found = {"groups": made, "tensors": len(tensors), "elements": elements, "opened": len(opened)}
    return found | {"world": layout.world, "dp": layout.dp, "files": files_open}


def main(stages: str, out: Path) -> None:
    """Write what `engine_of` finds for the first, a middle and the last rank of every published layout.

    `stages`: "own" runs a layout as its row does, in one rank; "every" under each ZeRO stage, in all three.
    """
    found = {}
    for (family, tp, pp, dp, ds_config), row in published().items():
        for ds in dict.fromkeys([ds_config, *(STAGES if pp == 1 and stages == "every" else ())]):
            plan = tiny_plan(row, (tp, pp, dp), ds)
            ranks = 0, plan.layout.world // 2 + 1, plan.layout.world - 1
            for rank in ranks if stages == "every" else ranks[1:2]:
                name = f"{family} tp{tp} pp{pp} dp{dp} {ds} rank {rank}"
                found[name] = engine_of(plan, rank, out.parent)
                print(name, found[name], flush=True)
    out.write_text(json.dumps(found))


def groups_of_3d(world: int) -> int:
    """Count the groups that rank 0 makes, with those for DeepSpeed: tp 4 x pp 4, of 8 ranks 2 x 2."""
    tp = pp = 4 if world > 8 else 2
    with rank_of(world, 0) as made:
        grid = ProcessGrid(tp, pp, world // (tp * pp))
        topology = PipeModelDataParallelTopology(num_pp=pp, num_mp=tp, num_dp=grid.dp)
        with grid.lend_groups(), contextlib.redirect_stdout(io.StringIO()):
            PipelineParallelGrid(topology=topology)
    return len(made)


def costs(world: int) -> str:
    """Time what rank 0 does for the manifest of a model of 48B parameters under ZeRO-3."""
    recipe = catalog.load("jeanzay_megatron_deepspeed_zero_tp_sweep/48b-tp1-mb16")
    shapes = {name: tuple(p.shape) for name, p in meta_parameters(recipe).items()}

    def part(rank: int) -> Part:
        tensors = {}
        for name, shape in shapes.items():
            first, count = share(math.prod(shape), rank, world)
            if count:
                tensors[name] = ListedTensor(shape, (Series(rank, None, first, count, count),))
        return Part(rank, {file_name(rank): StoredFile(10**9, "0" * 8)}, tensors, {})

    whole, heard, seconds, distance = part(0), 0, 0.0, 1
    while distance < world:
        ranks = range(distance, min(2 * distance, world))
        theirs = functools.reduce(Part.followed_by, map(part, ranks))
        heard += len(processes._text_of(theirs, Part))
        began = time.perf_counter()
        whole = whole.followed_by(theirs)
        seconds += time.perf_counter() - began
        distance *= 2
    held = Manifest(Progress(1, 1, 1), {}, "", RECIPE, {}, {}, whole.files, whole.tensors)
    with tempfile.TemporaryDirectory() as folder:
        times = [time.perf_counter()]
        for work in (partial(manifest.write, held), manifest.read):
            work(Path(folder))
            times.append(time.perf_counter())
        size = (Path(folder) / manifest.NAME).stat().st_size
    written, read = (after - before for before, after in itertools.pairwise(times))
    return (
        f"{world:>6} ranks: {groups_of_3d(world)} groups (3D); "
        f"{sum(len(tensor.series) for tensor in held.tensors.values())} series; "
        f"rank 0 hears {(world - 1).bit_length()} parts of {heard / 1e6:.2f} MB, joins them in "
        f"{seconds:.2f} s; "
        f"manifest {size / 1e6:.2f} MB, written in {written:.2f} s, read in {read:.2f} s"
    )


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def files(world: int) -> str:
    """Count the open files of ranks: those of an engine, and those of a real meeting of so many ranks."""
    before = open_files()
    plan = tiny_plan("default/sotu", (1, 1, world), "zero1")
    with tempfile.TemporaryDirectory() as folder:
        most = [engine_of(plan, rank, Path(folder))["files"] - before for rank in (0, world // 2)]
        met = meeting_of(world, Path(folder))
    return f"{world:>6} ranks: an engine {max(most)}, rank 0 by the meeting {met[0]}, another {met[1]:.0f}"


def meeting_of(world: int, folder: Path) -> tuple[int, float]:
    """Let so many ranks meet, the others in a child; return the files of rank 0 and of another."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ.update(WORLD_SIZE=str(world), RANK="0", LOCAL_WORLD_SIZE=str(world), MASTER_PORT=str(port))
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        before = open_files()
        kept = []
        for rank in range(1, world):
            os.environ["RANK"] = str(rank)
            store = door._open_store()
            kept.append((store, door._reach_rank_0(store, [folder])))
        os.write(write, json.dumps((open_files() - before) / len(kept)).encode())
        time.sleep(600)
    before = open_files()
    store = door._open_store()
    connections = door._let_others_in(store, [folder])
    other = json.loads(os.read(read, 100))
    met = open_files() - before
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert len(connections) == world - 1
    return met, other


if __name__ == "__main__":
    printed = {"costs": costs, "files": files}.get(sys.argv[1])
    if printed is not None:
        for number in sys.argv[2:]:
            print(printed(int(number)), flush=True)
    else:
        main(sys.argv[1], Path(sys.argv[2]))
