"""Weights, moments and counters of a DeepSpeed run, of ZeRO stages 0 to 3 or from a universal checkpoint.

A rank's partition of a group of parameters is flat. Stages 1 and 2 say where in it which parameter lies
(`param_slice_mappings`); under stage 3 each rank has an equal piece of each parameter, the last ones padded;
under stage 0 parameters follow each other. Tensors are read on use, from files that are mapped into memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from modeling.formats.deepspeed.files import COPY, UNIVERSAL, SaveFiles, expect, find
from modeling.formats.pickles import StandIn, load, load_dict
from recipes.problems import some

# DeepSpeed's names of master weights and of Adam's moments.
WEIGHT = "fp32"
MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = (WEIGHT, *MOMENTS)
Flat = Mapping[str, Tensor]  # by kind
ZERO_1 = "save once under DeepSpeed's ZeRO-1"
# of the engine, in the model's file
COUNTS = ("global_steps", "skipped_steps", "global_samples")


@dataclass(frozen=True)
class TheirParameter:
    """A parameter under its name in the module.

    `read`: returns the full tensor of a kind, float32.
    """

    shape: torch.Size
    read: Callable[[str], Tensor]
    dtype = torch.float32


class Piece(NamedTuple):
    """Consecutive elements of a parameter in one partition."""

    partition: Flat
    start: int
    length: int


class Optimizer(NamedTuple):
    """What a save holds of the optimizer.

    Attributes:
        form: the kind of the save, in words.
        parameters: by name, each once.
        numbered: number of the group of each parameter; {}: the save does not say it.
        bases: the state dict of each rank's Adam.
        scaler: the loss scaler, or its state.
        built: updates that stage 0 may have made before the first step.
        slices: tensor-parallel ranks, whose slices follow each other along dimension 0 of `parameters`.
    """

    form: str
    parameters: Mapping[str, TheirParameter]
    numbered: Mapping[str, int]
    bases: Sequence[Mapping[str, Any]]
    scaler: Any
    built: int = 0
    slices: int = 1


@dataclass(frozen=True)
class DeepSpeedState:
    """The state of a run.

    Attributes:
        where: the directory of the save.
        stated: values of the model's file: the engine's, and those of the training script.
        form, parameters, numbered, slices: of its `Optimizer`.
        groups: the optimizer's groups of parameters, with its settings.
        module: rounded weights by name, next to the master weights; {} where a save has none.
        updates: as the optimizer counts them, to correct its moments' bias.
        scaler: of fp16, by DeepSpeed's names; {} in other precisions.
    """

    where: Path
    stated: Mapping[str, Any]
    form: str
    parameters: Mapping[str, TheirParameter]
    groups: Sequence[Mapping[str, Any]]
    numbered: Mapping[str, int]
    module: Mapping[str, Tensor]
    updates: int
    scaler: Mapping[str, Any]
    slices: int

    @property
    def steps(self) -> int:
        return int(self.stated["global_steps"])

    @property
    def skipped(self) -> int:
        return int(self.stated["skipped_steps"])

    @property
    def samples(self) -> int:
        """Samples that were read; 0: no file states it."""
        return int(self.stated["global_samples"])

    @property
    def config(self) -> Mapping[str, Any]:
        """DeepSpeed's configuration; {} where the engine got it from a file."""
        config = self.stated.get("ds_config")
        return config if isinstance(config, dict) else {}


def read(directory: Path) -> DeepSpeedState:
    """Read the newest save in a directory, or the save that it is. Raises FileError."""
    files = find(directory)
    where = files.where
    stated = _stated(files, min(files.models))
    for key in COUNTS:
        count = stated.get(key)
        sound = type(count) is int and count >= 0
        expect(sound, where, f"says {key}={count}", "DeepSpeed's engine counts it")
    if (where / UNIVERSAL).is_dir():
        return state_of(where, stated, _universal(where / UNIVERSAL, files))
    return state_of(where, stated, _joined(files, stated))


def state_of(
    where: Path, stated: Mapping[str, Any], optimizer: Optimizer
) -> DeepSpeedState:
    """Return the state of a run. Raises FileError: its counts contradict each other."""
    scaler = optimizer.scaler or {}
    if isinstance(scaler, StandIn):
        scaler = vars(scaler)
    if "cur_iter" not in scaler:
        scaler = {}
    module = stated.get("module") or {}
    if optimizer.slices > 1:
        module = {}
    return DeepSpeedState(
        where,
        stated,
        optimizer.form,
        optimizer.parameters,
        optimizer.bases[0]["param_groups"],
        optimizer.numbered,
        _tensors(module),
        _updates(where, stated, optimizer),
        scaler,
        optimizer.slices,
    )


def _tensors(module: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a module; Megatron's are nested, and ZeRO-3's are empty."""
    return {
        name: tensor
        for name, tensor in module.items()
        if isinstance(tensor, Tensor) and tensor.numel()
    }


def _updates(where: Path, stated: Mapping[str, Any], optimizer: Optimizer) -> int:
    """Return the updates that Adam has counted. Raises FileError: they are not those of the steps."""
    counted = set()
    for base in optimizer.bases:
        # some kernels count in the group
        last = base["param_groups"][0].get("step", -1)
        for held in base["state"].values():
            counted.add(int(held.get("step", last)))
    counted = counted or {int(last)}
    steps = stated["global_steps"]
    skipped = stated["skipped_steps"]
    made = steps - skipped
    counts = some([*map(str, sorted(counted))])
    sound = len(counted) == 1 and counted <= {made, made + optimizer.built}
    expect(
        sound,
        where,
        f"Adam has counted {counts} updates",
        f"after {steps} steps, of them {skipped} skipped, it has made {made}",
    )
    return counted.pop()


# --- partitions of ranks


def _joined(files: SaveFiles, stated: Mapping[str, Any]) -> Optimizer:
    """Join what tensor and pipeline parallel ranks have; of tied tensors the first stage's."""
    where = files.where
    count = stated.get("mp_world_size", 1)
    came = f"holds {len(files.models)} model-parallel ranks"
    expect(len(files.models) == count, where, came, f"{count} ranks saved it")
    if stated.get("optimizer"):
        expect(
            count == 1,
            where,
            came,
            "of several, stage 0 does not say which moments are whose",
            ZERO_1,
        )
        return unpartitioned(where, stated)
    of_ranks = []
    for rank in sorted(files.models):
        optimizers = files.optimizers.get(rank, {})
        of_ranks.append(_partitioned(where, optimizers, _stated(files, rank)))
    first = of_ranks[0]
    if count == 1:
        return first
    parts: dict[str, list[TheirParameter]] = {}
    numbered: dict[str, int] = {}
    bases = list[Mapping[str, Any]]()
    for each in of_ranks:
        bases += each.bases
        numbered |= each.numbered
        for name, parameter in each.parameters.items():
            parts.setdefault(name, []).append(parameter)
    slices = min(map(len, parts.values()))
    parameters = {name: _whole(own[:slices]) for name, own in parts.items()}
    form = f"{first.form} for each of {count} model-parallel ones"
    return Optimizer(form, parameters, numbered, bases, first.scaler, slices=slices)


def _stated(files: SaveFiles, rank: int) -> dict[str, Any]:
    """Read what the model's file of a model-parallel rank states."""
    of_rank = files.models[rank]
    return load_dict(of_rank[min(of_rank)])


def _whole(slices: Sequence[TheirParameter]) -> TheirParameter:
    rows, *rest = slices[0].shape
    shape = torch.Size((len(slices) * rows, *rest))
    return TheirParameter(
        shape, lambda kind: torch.cat([each.read(kind) for each in slices])
    )


def _numbered(
    groups: Sequence[Mapping[str, Any]], buffers: Sequence[Mapping[str, Any]]
) -> dict[str, int]:
    """Return the group of each parameter in the buffers that Adam numbers; stage 3 may cut one into several."""
    numbers = [n for n, group in enumerate(groups) for _ in group.get("params", ())]
    group_of: dict[str, int] = {}
    if len(numbers) == len(buffers):
        for number, buffer in zip(numbers, buffers, strict=True):
            group_of |= dict.fromkeys(buffer, number)
    return group_of


def _partitioned(
    where: Path, optimizers: Mapping[int, Path], stated: Mapping[str, Any]
) -> Optimizer:
    """Read ranks by their files."""
    ranks = []
    for _, file in sorted(optimizers.items()):
        ranks.append(load_dict(file).get("optimizer_state_dict") or {})
    first = ranks[0] if ranks else {}
    by_parameter = "fp32_flat_groups" in first
    base_key = "base_optimizer_state"
    flat_key = "single_partition_of_fp32_groups"
    if by_parameter:
        base_key = "optimizer_state_dict"
        flat_key = "fp32_flat_groups"
    count = first.get("partition_count")
    if isinstance(count, (list, tuple)):
        count = max(count, default=None)
    bases: list[Any] = [rank.get(base_key) for rank in ranks]
    sound = all(isinstance(base, dict) and "state" in base for base in bases)
    expect(
        sound and isinstance(count, int),
        where,
        "has no optimizer's files, or files in another form",
        "each rank's has an Adam, flat master weights and the number of ranks",
        f"{COPY}; elastic checkpoints become universal ones by ds_to_universal.py",
    )
    assert isinstance(count, int)
    odd = {*range(count)} ^ optimizers.keys()
    named = some([str(rank) for rank in sorted(odd)], 4)
    expect(
        not odd,
        where,
        f"lacks the optimizer's file of rank {named}, or has one too many",
        f"{count} ranks saved it",
    )
    partitions = []
    for rank, base in zip(ranks, bases, strict=True):
        state = base["state"]
        flats = enumerate(rank[flat_key])
        partitions.append([{**state.get(n, {}), WEIGHT: flat} for n, flat in flats])
    groups = stated.get("param_shapes") or ()
    if by_parameter:
        pieces = _equal_pieces(groups, partitions)
    else:
        mappings = [rank.get("param_slice_mappings") or () for rank in ranks]
        pieces = _mapped_pieces(mappings, partitions)
    runs: dict[str, list[Piece]] = {}
    for name, piece in pieces:
        runs.setdefault(name, []).append(piece)
    parameters = {}
    for group in groups:
        for name, shape in group.items():
            own = runs.get(name, [])
            parameters[name] = _parameter(where, name, torch.Size(shape), own)
    stage = first.get("zero_stage", 1)
    if isinstance(stage, StandIn):
        stage = stage.arguments[0]
    form = f"ZeRO-{stage} of {count} rank{'s' * (count > 1)}"
    numbered = _numbered(bases[0]["param_groups"], groups)
    return Optimizer(form, parameters, numbered, bases, first.get("loss_scaler"))


def _mapped_pieces(
    mappings: Sequence[Sequence[Mapping[str, Any]]],
    partitions: Sequence[Sequence[Flat]],
) -> Iterator[tuple[str, Piece]]:
    """Yield (name of a parameter, piece) under stages 1 and 2, in the order of the ranks."""
    for groups, flats in zip(mappings, partitions, strict=True):
        for addresses, flat in zip(groups, flats, strict=True):
            for name, address in addresses.items():
                yield name, Piece(flat, address.start, address.numel)


def _equal_pieces(
    shapes: Sequence[Mapping[str, Any]], partitions: Sequence[Sequence[Flat]]
) -> Iterator[tuple[str, Piece]]:
    """Yield (name of a parameter, piece) under stage 3, of each in the order of the ranks."""
    ranks = len(partitions)
    for number, group in enumerate(shapes):
        offset = 0
        for name, shape in group.items():
            elements = math.prod(shape)
            each = -(-elements // ranks)
            for rank, flats in enumerate(partitions):
                count = max(0, min(each, elements - rank * each))
                yield name, Piece(flats[number], offset, count)
            offset += each


def _parameter(
    where: Path, name: str, shape: torch.Size, runs: Sequence[Piece]
) -> TheirParameter:
    """Return a parameter in pieces. Raises FileError unless they are all of it."""
    odd = set()
    for run in runs:
        for kind in KINDS:
            held = run.partition.get(kind)
            there = isinstance(held, Tensor) and held.numel() >= run.start + run.length
            if run.length and not there:
                odd.add(kind)
    if sum(run.length for run in runs) != shape.numel():
        odd.add(WEIGHT)
    expect(
        not odd,
        where,
        f"lacks a part of {some(sorted(odd))} of {name}",
        "the ranks have all of it; moments on NVMe, and those of others than Adam, are not read",
        f"{COPY}, or one with the optimizer on the CPU",
    )

    def read(kind: str) -> Tensor:
        parts = []
        for run in runs:
            if run.length:
                flat = run.partition[kind].view(-1)
                parts.append(flat[run.start : run.start + run.length])
        return torch.cat(parts).detach().view(shape).float()

    return TheirParameter(shape, read)


# --- whole parameters


def unpartitioned(
    where: Path, stated: Mapping[str, Any], form: str = "ZeRO-0"
) -> Optimizer:
    """Read stage 0, or torch's own Adam, which numbers its parameters and does not name them.

    In fp16 and bf16 it makes an update of zero gradients when it is built. FusedAdam counts the updates in the
    last parameter of a group alone.
    """
    optimizer = stated["optimizer"]
    base = optimizer.get("optimizer_state_dict", optimizer)
    masters = optimizer.get("fp32_groups_flat")
    if masters is not None:
        masters = [[flat] for flat in masters]
    masters = masters or optimizer.get("fp32_groups")
    named = _distinct(stated.get("module") or {})
    buffers: list[list[Flat]] = []
    counts = {}
    for number, group in enumerate(base["param_groups"]):
        states = [base["state"].get(key, {}) for key in group["params"]]
        steps = [held.get("step", 0) for held in states]
        counts[number] = {"step": max(steps, default=0)}
        if masters:
            pairs = zip(states, masters[number], strict=True)
            states = [{**held, WEIGHT: weight} for held, weight in pairs]
        buffers.append(states)
    groups = _groups(named, [sum(map(_elements, states)) for states in buffers])
    rule = "its optimizer does not name its parameters, and they are no known groups of Adam's"
    came = "does not say which moments are whose"
    expect(bool(groups), where, came, rule, ZERO_1)
    parameters = {}
    numbered: dict[str, int] = {}
    for number, (names, states) in enumerate(zip(groups, buffers, strict=True)):
        numbered |= dict.fromkeys(names, number)
        left = iter(states)
        flat = next(left, {})
        start = 0
        for name in names:
            if start == _elements(flat):
                flat = next(left)
                start = 0
            shape = named[name].shape
            held = flat
            if WEIGHT not in held:
                held = {**flat, WEIGHT: named[name]}
            moment = held.get(MOMENTS[0])
            if isinstance(moment, Tensor) and moment.dim() > 1:
                expect(moment.shape == shape, where, came, rule, ZERO_1)
            piece = Piece(held, start, shape.numel())
            parameters[name] = _parameter(where, name, shape, [piece])
            start += piece.length
    scaler = optimizer if optimizer.get("dynamic_loss_scale") else None
    base = {**base, "state": counts}
    built = int(masters is not None)
    return Optimizer(form, parameters, numbered, [base], scaler, built)


def _elements(held: Mapping[str, Any]) -> int:
    moment = held.get(MOMENTS[0])
    if isinstance(moment, Tensor):
        return moment.numel()
    return 0


def _distinct(module: Mapping[str, Any]) -> dict[str, Tensor]:
    """Leave out second names of tied parameters, which lie in one place."""
    by_place: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in _tensors(module).items():
        by_place.setdefault(tensor.data_ptr(), (name, tensor))
    return dict(by_place.values())


def _groups(named: Mapping[str, Tensor], sizes: Sequence[int]) -> list[list[str]]:
    """Return the names in the groups that training scripts make: one, or matrices and vectors apart.

    `sizes`: elements of each group; [] where no such groups are.
    """
    matrices = [name for name, tensor in named.items() if tensor.dim() > 1]
    vectors = [name for name, tensor in named.items() if tensor.dim() <= 1]
    for groups in ([[*named]], [matrices, vectors], [vectors, matrices]):
        counts = []
        for group in groups:
            counts.append(sum(named[name].numel() for name in group))
        if counts == [*sizes]:
            return groups
    return []


# --- universal checkpoints


def _universal(folder: Path, files: SaveFiles) -> Optimizer:
    """Read the parameters that have all kinds of files; second names of tied ones have none of moments."""
    optimizer = load_dict(folder / "optimizer_state.pt")
    groups = optimizer["param_groups"]
    shapes: dict[str, Any] = {}
    numbered: dict[str, int] = {}
    for rank in files.models:  # each of a pipeline's stages has its own
        buffers = _stated(files, rank).get("param_shapes") or ()
        numbered |= _numbered(groups, buffers)
        for buffer in buffers:
            shapes |= buffer
    parameters = {}
    states = {}
    for place in sorted(folder.glob("*/")):
        name = place.name
        own = {kind: place / f"{kind}.pt" for kind in KINDS}
        if not all(file.is_file() for file in own.values()):
            continue
        weight = load(own[WEIGHT])
        shape = _param(own[WEIGHT]).shape
        if isinstance(weight, Tensor):  # of ZeRO-3 it is flat
            shape = torch.Size(shapes.get(name, shape))
        parameters[name] = TheirParameter(shape, partial(_read_param, own, shape))
        if (place / "step.pt").is_file():
            states[name] = {"step": load(place / "step.pt")}
    inner = optimizer.get("optimizer_state_dict") or {}
    base = {"state": states or inner.get("state", {}), "param_groups": groups}
    scaler = optimizer.get("loss_scaler")
    return Optimizer("a universal checkpoint", parameters, numbered, [base], scaler)


def _read_param(own: Mapping[str, Path], shape: torch.Size, kind: str) -> Tensor:
    tensor = _param(own[kind])
    expect(
        tensor.numel() == shape.numel(),
        own[kind],
        f"holds {tensor.numel():,} numbers",
        f"its parameter has {shape.numel():,}",
    )
    return tensor.view(shape).float()


def _param(file: Path) -> Tensor:
    held = load(file)
    if isinstance(held, dict):
        held = held.get("param")
    sound = isinstance(held, Tensor)
    expect(sound, file, "holds no tensor", "a universal checkpoint's files do")
    return held  # type: ignore[no-any-return]  # `expect` has made sure
