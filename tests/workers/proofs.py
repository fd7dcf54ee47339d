"""Reads a checkpoint into engines, soundly and with faults in reader, maps and shards, and notes refusals.

proofs.py JOBS.json     a list; of each job: name, out, case (as in any_layout.py), steps, source (a
                        checkpoint after so many; null: the job trains them), faults (names of `FAULTS`;
                        TABLE: all of `TABLE`)

Leaves found.json in `out`: fault -> the refusal, or null; "sound" is a reading without a fault.
"""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import any_layout
import torch

from data.corpus import build
from launch.checkpoints import reading, run_checkpoints
from launch.checkpoints.engine_state import EngineState
from launch.checkpoints.geometry import Cut
from launch.checkpoints.stored import StoredTensors
from launch.experiments.groups import temporary_groups
from launch.ranks import ending, processes
from launch.records.facts import RunFacts
from launch.training.job import Job
from launch.training.run import Start
from launch.training.validations import Validations
from modeling.parallel.process_grid import ProcessGrid
from recipes.files import FileError

QKV, FC, POSITION = "layers.1.attention.qkv.weight", "layers.1.mlp.expand.weight", "position.weight"
FC_BIAS, NORM = "layers.1.mlp.expand.bias", "layers.1.mlp_norm.bias"
FILL = StoredTensors.fill


def changed(name, change, kinds=("weight", "exp_avg", "exp_avg_sq")):
    """Have a tensor read as `change` makes it of the full one."""

    def fill(self, target, place, first, kind):
        FILL(self, target, place, first, kind)
        if place.name == name and kind in kinds:
            full = change(self.canonical(name, kind)).reshape(place.shape)
            target.copy_(place.slice_of(full).reshape(-1)[first : first + len(target)])

    return mock.patch.object(StoredTensors, "fill", fill)


def elsewhere(place_of, ranks=(0, 1)):
    """Have pieces read from another place: `place_of` (place, first, kind) returns these three."""

    def fill(self, target, place, first, kind):
        if processes.rank() in ranks:
            place, first, kind = place_of(place, first, kind)
        FILL(self, target, place, first, kind)

    return mock.patch.object(StoredTensors, "fill", fill)


def missing(ranks):
    def fill(self, target, place, first, kind):
        FILL(self, target, place, first, kind)
        if processes.rank() in ranks:
            target.zero_()

    return mock.patch.object(StoredTensors, "fill", fill)


def next_layer(place, first, kind):
    top, number, *rest = place.name.split(".")
    if top == "layers":
        place = place._replace(name=".".join((top, str((int(number) + 1) % 4), *rest)))
    return place, first, kind


def other_head(place, first, kind):
    cut = place.cut
    if cut and place.name == QKV:
        place = place._replace(cut=Cut(cut.dim, cut.length - cut.start, cut.length))
    return place, first, kind


def after(method, work):
    """Do `work` (EngineState) after one of its methods."""
    original = getattr(EngineState, method)

    def replaced(self, *given):
        original(self, *given)
        work(self)

    return mock.patch.object(EngineState, method, replaced)


def stale(name, ranks, tied=False):
    """Have a copy of a tensor's master weights keep other numbers."""

    def work(state):
        for partition in state.partitions:
            for fragment in partition.fragments:
                parameter = fragment.parameter
                of_copy = getattr(parameter, "ds_pipe_replicated", False) == tied
                if parameter.canonical_name == name and of_copy and processes.rank() in ranks:
                    state.read(partition, fragment, "weight").mul_(1.0001)

    return after("finish", work)


def round_weights(state):
    """Round master weights to bf16, as initial weights are."""
    for partition in state.partitions:
        partition.master().data.copy_(partition.master().bfloat16())


@contextlib.contextmanager
def rounded_and_transposed():
    with changed(QKV, transposed), after("finish", round_weights):
        yield


def transposed(full):
    return full.t().contiguous()


def odd_step(state):
    """Have Adam correct the bias of one tensor for fewer updates."""
    state.adam.state[state.partitions[0].master()]["step"] -= 1


@torch.no_grad()
def stale_rounded(state):
    """Set the low-precision weights alone to others."""
    for parameter in state.engine.module.parameters():
        if parameter.canonical_name.endswith("norm.weight"):
            parameter.data.mul_(0.5)


def steps_before(state, partition, steps, names):
    NEW_MOMENTS(state, partition, steps - 1, names)


def doubled_scale(state, scaler):
    SET_SCALER(state, replace(scaler, cur_scale=2 * scaler.cur_scale))


def in_place(name, kind, change):
    """Have a tensor of one kind changed in the engine's own type, where it is read from its beginning."""

    def fill(self, target, place, first, read):
        FILL(self, target, place, first, read)
        if (place.name, read, first) == (name, kind, 0):
            change(target)

    return mock.patch.object(StoredTensors, "fill", fill)


def one_bit(target):
    """Move the first number to the next one of its type."""
    target.view({2: torch.int16, 4: torch.int32}[target.itemsize])[0] += 1


def halved(change):
    """Change the second half of a tensor alone."""
    return lambda full: torch.cat([full[: len(full) // 2], change(full[len(full) // 2 :])])


def swapped(full):
    return full[[1, 0, *range(2, len(full))]]


def of_earlier_step(name):
    """Have a tensor's weights read from the checkpoint of the step before."""

    def fill(self, target, place, first, kind):
        source = self
        if place.name == name and kind == "weight":
            source = StoredTensors(run_checkpoints.directory_of(self.directory.parent, 1))
        FILL(source, target, place, first, kind)

    return mock.patch.object(StoredTensors, "fill", fill)


@torch.no_grad()
def stale_model(state):
    """Move one weight of the model, not of the master weights, to the next number."""
    for parameter in state.engine.module.parameters():
        if parameter.canonical_name == FC:
            one_bit(getattr(parameter, "ds_tensor", parameter.data).view(-1))


NEW_MOMENTS = EngineState.new_moments
SET_SCALER = EngineState.set_scaler
PLACES = {
    "moment of another tensor": lambda p, f, k: (
        p._replace(name=p.name.replace("1", "2")) if p.name == FC and k == "exp_avg" else p, f, k
    ),
    "layer norm of another layer": lambda p, f, k: (
        p._replace(name="layers.2.mlp_norm.weight") if p.name == "layers.1.mlp_norm.weight" else p, f, k
    ),
    "moments swapped": lambda p, f, k: (p, f, {"exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}.get(k, k)),
}  # fmt: skip
TABLE = {  # each in every precision, of fp32, fp16, bf16 and pure bf16
    "rows of weights": lambda: changed(FC, swapped, ["weight"]),
    "rows of a moment": lambda: changed(FC, swapped, ["exp_avg"]),
    "columns of weights": lambda: changed(FC, lambda full: swapped(full.t()).t(), ["weight"]),
    "columns of a moment": lambda: changed(FC, lambda full: swapped(full.t()).t(), ["exp_avg_sq"]),
    "half a norm is zero": lambda: changed(NORM, halved(torch.zeros_like), ["weight"]),
    "half a norm's moment is zero": lambda: changed(NORM, halved(torch.zeros_like), ["exp_avg"]),
    "a moment is zero": lambda: changed(FC_BIAS, torch.zeros_like, ["exp_avg"]),
    "moments of one tensor swapped": lambda: elsewhere(
        lambda p, f, k: (p, f, {"exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}[k])
        if p.name == FC and k != "weight" else (p, f, k)
    ),
    "bias of another layer": lambda: elsewhere(
        lambda p, f, k: (p._replace(name=p.name.replace("1", "2")) if p.name == FC_BIAS else p, f, k)
    ),
    "weights of the step before": lambda: of_earlier_step(FC),
    "a sign": lambda: in_place(FC, "weight", lambda target: target[:1].neg_()),
    "next number of a weight": lambda: in_place(FC, "weight", one_bit),
    "next number of a moment": lambda: in_place(FC, "exp_avg_sq", one_bit),
    "next number of the model's weight": lambda: after("finish", stale_model),
    "a batch on": contextlib.nullcontext,
    "dropout of the step before": contextlib.nullcontext,
}  # fmt: skip
FAULTS = {
    **TABLE,
    "sound": contextlib.nullcontext,
    "without sums": contextlib.nullcontext,
    "without a sum of the step": contextlib.nullcontext,
    "a batch on, of another seed": contextlib.nullcontext,
    "initial weights": lambda: after("finish", round_weights),
    "transposed initial weights": rounded_and_transposed,
    "transposed QKV": lambda: changed(QKV, transposed),
    "QKV in another order": lambda: changed(QKV, lambda full: full.view(4, 3, -1, 64).transpose(0, 1)),
    "positions shifted": lambda: changed(POSITION, lambda full: full.roll(1, 0)),
    "two rows swapped": lambda: changed(FC, swapped, ["exp_avg"]),
    **{name: lambda place=place: elsewhere(place) for name, place in PLACES.items()},
    "step of Adam": lambda: mock.patch.object(EngineState, "new_moments", steps_before),
    "step of one tensor": lambda: after("finish", odd_step),
    "loss scale": lambda: mock.patch.object(EngineState, "set_scaler", doubled_scale),
    "rounded weights": lambda: after("finish", stale_rounded),
    "stage off by one": lambda: elsewhere(next_layer, ranks=[1]),
    "tied copy": lambda: stale("word.weight", [1], tied=True),
    "shard twice": lambda: elsewhere(lambda p, f, k: (p, 0, k), ranks=[1]),
    "shard missing": lambda: missing([1]),
    "heads of ranks permuted": lambda: elsewhere(other_head),
    "copy of a tensor rank": lambda: stale("final_norm.weight", [1]),
    "copy of a data rank": lambda: stale(FC, [1]),
}


def prove(run, checkpoint, fault):
    """Return the refusal of a reading with a fault, or the line of one without sums; None: neither."""
    with FAULTS[fault]():
        reading.load(run.state, checkpoint)
    if fault == "without sums":
        held = checkpoint.manifest
        tensors = {name: replace(tensor, sums={}) for name, tensor in held.tensors.items()}
        checkpoint = replace(checkpoint, manifest=replace(held, known_loss=None, tensors=tensors))
    any_layout.go_to(run, checkpoint)
    held = checkpoint.manifest
    if fault == "without a sum of the step":
        checkpoint = replace(checkpoint, manifest=replace(held, next_step=None))
    if fault == "a batch on, of another seed":
        checkpoint = replace(checkpoint, manifest=replace(held, recipe=held.recipe | {"seed": 99}))
    if fault.startswith("a batch on"):
        next(run.batches)
    if fault == "dropout of the step before":
        run.done -= 1
    try:
        Validations(run).prove(checkpoint, weights="initial weights" in fault)
    except FileError as error:
        return str(error)
    return run.recorder.said[-1] if fault.startswith("without") else None


def work(job):
    out = Path(job["out"])
    source = job["source"] and run_checkpoints.read(Path(job["source"]))
    plan = any_layout.plan_of(job["case"], job["steps"])
    records = any_layout.Records()
    corpus = build(plan.recipe, say=records.say)
    grid = ProcessGrid(plan.layout.tp, plan.layout.pp, plan.layout.dp)
    found = {}

    def prove_all(run):
        for fault in job["faults"]:
            for each in TABLE if fault == "TABLE" else [fault]:
                found[each] = prove(run, source, each)

    any_layout.train_then(
        Start(Job(RunFacts(plan, job["name"]), out), records, corpus, grid, source), prove_all
    )
    if processes.rank() == 0:
        out.mkdir(exist_ok=True)
        (out / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    with ending.clean_exit():
        processes.start_processes()
        for each in json.loads(Path(sys.argv[1]).read_text()):
            with temporary_groups():
                work(each)
