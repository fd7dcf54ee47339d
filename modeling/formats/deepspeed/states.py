"""Weights, moments and counters of a DeepSpeed run, of ZeRO stages 0 to 3 or from a universal checkpoint.

A rank's partition of a group of parameters is flat. Stages 1 and 2 say where in it which parameter lies
(`param_slice_mappings`); under stage 3 each rank has an equal piece of each parameter, the last ones padded;
under stage 0 a parameter is whole. Tensors are read on use, from files that are mapped into memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from modeling.formats.deepspeed.files import (
    COPY,
    SaveFiles,
    StandIn,
    expect,
    expect_ranks,
    find,
    load,
    load_object,
)
from recipes.files import refuse
from recipes.problems import some

# DeepSpeed's names of master weights and of Adam's moments.
WEIGHT = "fp32"
MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = (WEIGHT, *MOMENTS)
Flat = Mapping[str, Tensor]  # by kind


@dataclass(frozen=True)
class TheirParameter:
    """A parameter under its name in the module.

    Attributes:
        read: returns the full tensor of a kind, float32.
        decay: its weight decay; None: unknown.
    """

    shape: torch.Size
    read: Callable[[str], Tensor]
    decay: float | None = None
    dtype = torch.float32


class Piece(NamedTuple):
    """Consecutive elements of a parameter in one partition."""

    partition: Flat
    start: int
    length: int


@dataclass(frozen=True)
class DeepSpeedState:
    """The state of a run.

    Attributes:
        where: the directory of the save.
        form: the kind of the save, in words.
        parameters: by name, each once.
        groups: the optimizer's groups of parameters, with its settings.
        module: rounded weights by name, next to the master weights; {} where a save has none.
        steps, skipped, samples: as DeepSpeed's engine counts them.
        updates: as the optimizer counts them, to correct its moments' bias.
        config: DeepSpeed's configuration; {} where the engine got it from a file.
        scaler: of fp16, by DeepSpeed's names; {} in other precisions.
    """

    where: Path
    form: str
    parameters: Mapping[str, TheirParameter]
    groups: Sequence[Mapping[str, Any]]
    module: Mapping[str, Tensor]
    steps: int
    skipped: int
    samples: int
    updates: int
    config: Mapping[str, Any]
    scaler: Mapping[str, Any]


def read(directory: Path) -> DeepSpeedState:
    """Read the newest save in a directory, or the save that it is. Raises FileError."""
    files = find(directory)
    where = files.where
    slices = sorted({rank for _, rank in files.models})
    rule = (
        "only a universal checkpoint of tensor or pipeline parallel ranks is read here"
    )
    fix = "make one with DeepSpeed's ds_to_universal.py, and give its directory"
    whole = slices == [0] or files.universal is not None
    expect(whole, where, f"holds mp_rank {some([*map(str, slices)])}", rule, fix)
    nvme = where / "offloaded_tensors"
    expect(not nvme.is_dir(), nvme, "holds optimizer states from NVMe", "they are not read here",
           "save once with the optimizer offloaded to the CPU")  # fmt: skip
    stated = load_object(files.models[min(files.models)])
    common = _common(where, stated)
    if files.universal is not None:
        return _universal(common, files.universal, stated)
    if stated.get("optimizer") is not None:
        return _unpartitioned(common, stated)
    return _partitioned(common, files, stated)


def _common(where: Path, stated: Mapping[str, Any]) -> DeepSpeedState:
    """Return what the model's file states, without parameters and optimizer."""
    counts = {
        key: stated.get(key)
        for key in ("global_steps", "skipped_steps", "global_samples")
    }
    odd = [key for key, value in counts.items() if type(value) is not int or value < 0]
    expect(
        not odd, where, f"does not say {some(odd)}", "DeepSpeed's engine counts them"
    )
    config = stated.get("ds_config")
    frozen = stated.get("frozen_param_shapes") or {}
    expect(not frozen, where, f"has frozen parameters, {some([*frozen], 3)}", "all of them are trained here",
           "give a run that trained them all")  # fmt: skip
    module = stated.get("module") or {}
    return DeepSpeedState(
        where, "", {}, (),
        {name: tensor for name, tensor in module.items() if tensor.numel()},
        stated["global_steps"], stated["skipped_steps"], stated["global_samples"], 0,
        config if isinstance(config, dict) else {},
        {},
    )  # fmt: skip


# --- partitions of ranks


def _partitioned(
    common: DeepSpeedState, files: SaveFiles, stated: Mapping[str, Any]
) -> DeepSpeedState:
    where = common.where
    expect(
        bool(files.optimizers),
        where,
        "lacks the optimizer's files",
        "each rank writes one",
    )
    optimizers = {}
    for (rank, _), file in sorted(files.optimizers.items()):
        optimizers[rank] = load_object(file).get("optimizer_state_dict") or {}
    first = next(iter(optimizers.values()))
    count = first.get("partition_count")
    count = max(count) if isinstance(count, (list, tuple)) and count else count
    expect(
        isinstance(count, int),
        where,
        "does not say of how many ranks its partitions are",
        "each states it",
    )
    assert isinstance(count, int)
    expect_ranks(where, files.optimizers, count, "optimizer's file")
    by_parameter = "fp32_flat_groups" in first
    if by_parameter:
        expect_ranks(where, files.models, count, "model's file")
    shapes = [dict(group) for group in stated.get("param_shapes") or ()]
    bases = [
        _base(where, rank, each, by_parameter)
        for rank, each in sorted(optimizers.items())
    ]
    partitions = [_flats(where, rank, *base) for rank, base in enumerate(bases)]
    if by_parameter:
        runs = _equal_pieces(shapes, partitions)
    else:
        mappings = [
            optimizers[rank].get("param_slice_mappings") or () for rank in range(count)
        ]
        runs = _mapped_pieces(mappings, partitions)
    decays = [
        float(group.get("weight_decay", 0.0)) for group in bases[0][0]["param_groups"]
    ]
    known = len(decays) == len(shapes)  # stage 3 may cut a group into several
    parameters = {}
    for number, group in enumerate(shapes):
        for name, shape in group.items():
            whole = _parameter(where, name, torch.Size(shape), runs.get(name, []))
            parameters[name] = replace(whole, decay=decays[number] if known else None)
    same = bool(runs) and parameters.keys() == runs.keys()
    expect(same, where, "its files name other parameters", "they were saved together")
    stage = _number(first.get("zero_stage"))
    form = (
        f"ZeRO-{stage if stage is not None else 1} of {count} rank{'s' * (count > 1)}"
    )
    return _with_optimizer(
        common, [base for base, _ in bases], form, parameters, first.get("loss_scaler")
    )


def _base(
    where: Path, rank: int, found: Mapping[str, Any], by_parameter: bool
) -> tuple[Any, Any]:
    """Return the state of the optimizer within DeepSpeed's, and the flat master weights."""
    base = found.get("optimizer_state_dict" if by_parameter else "base_optimizer_state")
    flats = found.get(
        "fp32_flat_groups" if by_parameter else "single_partition_of_fp32_groups"
    )
    sound = (
        isinstance(base, dict)
        and isinstance(base.get("state"), dict)
        and isinstance(flats, list)
    )
    rule = "it has an optimizer and flat master weights"
    fix = f"{COPY}; elastic checkpoints become universal ones by ds_to_universal.py"
    expect(sound, where, f"the partition of rank {rank} is in another form", rule, fix)
    return base, flats


def _flats(
    where: Path, rank: int, base: Mapping[str, Any], flats: Sequence[Tensor]
) -> list[Flat]:
    """Return the flat buffers of a rank, of each group. Raises FileError: it has no moments of Adam."""
    rule = "they are Adam's moments, and no other optimizer's state is read"
    found = list[Flat]()
    for number, flat in enumerate(flats):
        held = base["state"].get(number, {})
        tensors = {WEIGHT: flat}
        for kind in MOMENTS:
            moment = held.get(kind)
            if isinstance(moment, Tensor):
                tensors[kind] = moment
        absent = [kind for kind in MOMENTS if kind not in tensors]
        came = f"the optimizer of rank {rank} lacks {some(absent)}"
        expect(not (absent and flat.numel()), where, came, rule, "give a run of AdamW")
        found.append(tensors)
    return found


def _mapped_pieces(
    mappings: Sequence[Sequence[Mapping[str, Any]]],
    partitions: Sequence[Sequence[Flat]],
) -> dict[str, list[Piece]]:
    """Return the pieces of each parameter under stages 1 and 2, in the order of the ranks."""
    runs: dict[str, list[Piece]] = {}
    for groups, flats in zip(mappings, partitions, strict=True):
        for addresses, flat in zip(groups, flats, strict=True):
            for name, address in addresses.items():
                runs.setdefault(name, []).append(
                    Piece(flat, address.start, address.numel)
                )
    return runs


def _equal_pieces(
    shapes: Sequence[Mapping[str, Any]], partitions: Sequence[Sequence[Flat]]
) -> dict[str, list[Piece]]:
    """Return the pieces of each parameter under stage 3, in the order of the ranks."""
    runs: dict[str, list[Piece]] = {}
    ranks = len(partitions)
    for number, group in enumerate(shapes):
        offset = 0
        for name, shape in group.items():
            elements = math.prod(shape)
            each = -(-elements // ranks)
            for rank, flats in enumerate(partitions):
                count = max(0, min(each, elements - rank * each))
                runs.setdefault(name, []).append(Piece(flats[number], offset, count))
            offset += each
    return runs


def _parameter(
    where: Path, name: str, shape: torch.Size, runs: Sequence[Piece]
) -> TheirParameter:
    """Return a parameter in pieces. Raises FileError unless they are all of it."""
    held = sum(run.length for run in runs)
    expect(held == shape.numel(), where, f"holds {held:,} of the {shape.numel():,} elements of {name}",
           "the ranks' pieces are all of it")  # fmt: skip
    short = [
        k
        for run in runs
        for k, flat in run.partition.items()
        if flat.numel() < run.start + run.length
    ]
    expect(
        not short,
        where,
        f"ends within {name}, {some(short)}",
        "its pieces lie in the ranks' partitions",
    )

    def read(kind: str) -> Tensor:
        parts = [
            run.partition[kind].view(-1)[run.start : run.start + run.length]
            for run in runs
            if run.length
        ]
        return torch.cat(parts).detach().view(shape).float()

    return TheirParameter(shape, read)


# --- whole parameters


def _unpartitioned(common: DeepSpeedState, stated: Mapping[str, Any]) -> DeepSpeedState:
    """Read stage 0, whose optimizer numbers its parameters and does not name them.

    In fp16 and bf16 it makes an update of zero gradients when it is built. FusedAdam counts the updates in the
    last parameter of a group alone.
    """
    where = common.where
    optimizer = stated["optimizer"]
    base = optimizer.get("optimizer_state_dict", optimizer)
    buffers = {*(stated.get("buffer_names") or ())}
    named = {
        name: each
        for name, each in _distinct(common.module).items()
        if name not in buffers
    }
    states = base["state"]
    members = []
    for group in base["param_groups"]:
        members.append([states.get(key, {}) for key in group["params"]])
    flats = optimizer.get("fp32_groups_flat")
    masters = optimizer.get("fp32_groups")
    if flats is not None:
        sizes = [flat.numel() for flat in flats]
        groups = _groups(
            named, lambda names: sum(named[name].numel() for name in names), sizes
        )
        shapes = []
        for group in groups:
            shapes.append({name: named[name].shape for name in group})
        pieces = _equal_pieces(shapes, [_flats(where, 0, base, flats)])
    else:
        moments = []
        for group in members:
            moments.append([_moment(where, held).shape for held in group])
        groups = _groups(
            named, lambda names: [named[name].shape for name in names], moments
        )
        own = masters
        if not own:
            own = []
            for group in groups:
                own.append([named[name] for name in group])
        pieces = {}
        for names, held, weights in zip(groups, members, own, strict=False):
            for name, state, weight in zip(names, held, weights, strict=True):
                kinds = {WEIGHT: weight, **{kind: state[kind] for kind in MOMENTS}}
                pieces[name] = [Piece(kinds, 0, weight.numel())]
    rule = "stage 0 does not name the optimizer's parameters, and they are in no known order"
    expect(
        bool(groups),
        where,
        "does not say which moments are whose",
        rule,
        "save once under ZeRO-1",
    )
    parameters = {
        name: _parameter(where, name, named[name].shape, pieces[name])
        for name in pieces
    }
    counts = {
        number: {"step": max(held.get("step", 0) for held in group)}
        for number, group in enumerate(members)
    }
    scaler = optimizer if optimizer.get("dynamic_loss_scale") else None
    built = int(flats is not None or masters is not None)
    base = {**base, "state": counts}
    return _with_optimizer(common, [base], "ZeRO-0", parameters, scaler, built)


def _moment(where: Path, held: Mapping[str, Any]) -> Tensor:
    moment = held.get(MOMENTS[0])
    if not isinstance(moment, Tensor):
        came = f"the optimizer lacks {MOMENTS[0]}"
        refuse(where, came, "only Adam's state is read", "give a run of AdamW")
    return moment


def _distinct(module: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Leave out the second names of tied tensors, which lie in one place."""
    first: dict[int, str] = {}
    for name, tensor in module.items():
        first.setdefault(tensor.data_ptr(), name)
    return {name: module[name] for name in first.values()}


def _groups(
    named: Mapping[str, Tensor], fact: Callable[[list[str]], Any], wanted: Sequence[Any]
) -> list[list[str]]:
    """Return the names in the groups that training scripts make: one, or matrices and vectors apart.

    `fact`: of a group's names, equal to what is `wanted` of each group; [] where no such groups are.
    """
    matrices = [name for name, tensor in named.items() if tensor.dim() > 1]
    vectors = [name for name, tensor in named.items() if tensor.dim() <= 1]
    for groups in ([[*named]], [matrices, vectors], [vectors, matrices]):
        if [fact(group) for group in groups] == list(wanted):
            return groups
    return []


# --- universal checkpoints


def _universal(
    common: DeepSpeedState, folder: Path, stated: Mapping[str, Any]
) -> DeepSpeedState:
    optimizer = load_object(folder / "optimizer_state.pt")
    groups = optimizer.get("param_groups")
    expect(isinstance(groups, list) and bool(groups), folder, "has no groups of parameters",
           "optimizer_state.pt holds them")  # fmt: skip
    names = sorted(path.parent.name for path in folder.glob(f"*/{WEIGHT}.pt"))
    expect(
        bool(names),
        folder,
        "holds no parameters",
        f"each has a directory with {WEIGHT}.pt",
    )
    parameters = {}
    states = {}
    tied = stated.get("shared_params") or {}
    for number, name in enumerate(names):
        own = {kind: folder / name / f"{kind}.pt" for kind in KINDS}
        missing = [file.name for file in own.values() if not file.is_file()]
        if missing and name in tied:
            continue
        expect(
            not missing,
            folder / name,
            f"lacks {some(missing)}",
            "each parameter has its moments",
        )
        shapes = {kind: tuple(_param(file).shape) for kind, file in own.items()}
        expect(len({*shapes.values()}) == 1, folder / name, f"holds tensors of shapes {[*shapes.values()]}",
               "moments have the shape of their weights")  # fmt: skip
        parameters[name] = TheirParameter(
            torch.Size(shapes[WEIGHT]), partial(_read_param, own)
        )
        step = folder / name / "step.pt"
        if step.is_file():
            states[number] = {"step": load(step)}
    inner = optimizer.get("optimizer_state_dict") or {}
    base = {"state": states or inner.get("state", {}), "param_groups": groups}
    return _with_optimizer(
        common,
        [base],
        "a universal checkpoint",
        parameters,
        optimizer.get("loss_scaler"),
    )


def _read_param(own: Mapping[str, Path], kind: str) -> Tensor:
    return _param(own[kind]).float()


def _param(file: Path) -> Tensor:
    found = load_object(file).get("param")
    if not isinstance(found, Tensor):
        refuse(
            file, "holds no tensor `param`", "a universal checkpoint's files do", COPY
        )
    return found


# --- the optimizer


def _with_optimizer(
    common: DeepSpeedState, bases: Sequence[Mapping[str, Any]], form: str,
    parameters: Mapping[str, TheirParameter], scaler: Any, built: int = 0,
) -> DeepSpeedState:  # fmt: skip
    """Add parameters and optimizer. Raises FileError: its counts contradict those of the steps.

    `built`: updates that stage 0 may have made before the first step.
    """
    counted = set()
    for base in bases:
        last = base["param_groups"][0].get("step", -1)
        counted |= {int(held.get("step", last)) for held in base["state"].values()}
    made = common.steps - common.skipped
    said = some([str(count) for count in sorted(counted)]) or "no"
    rule = f"after {common.steps} steps, of them {common.skipped} skipped, it has made {made}"
    sound = len(counted) == 1 and counted <= {made, made + built}
    expect(sound, common.where, f"Adam has counted {said} updates", rule)
    state = vars(scaler) if isinstance(scaler, StandIn) else scaler or {}
    return replace(
        common,
        form=form,
        parameters=parameters,
        groups=bases[0]["param_groups"],
        updates=counted.pop(),
        scaler=state if "cur_iter" in state else {},
    )


def _number(value: Any) -> int | None:
    """Return the number of a stand-in for an enumeration."""
    if isinstance(value, StandIn) and value.arguments:
        value = value.arguments[0]
    return value if isinstance(value, int) else None
