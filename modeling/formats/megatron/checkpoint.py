"""A checkpoint of Megatron-LM, Megatron-DeepSpeed or gpt-neox, mapped into memory: arguments and tensors."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from modeling.formats.megatron.files import LAYER as LAYER_FILE
from modeling.formats.megatron.files import WHOLE, Files, find
from modeling.formats.megatron.names import (
    LAST,
    LAYER,
    POSITION,
    WITH_PADDING,
    WORD,
    common_name,
    cut_dimension,
    heads_first,
    is_qkv,
    is_whole,
    name_map,
)  # fmt: skip
from modeling.formats.pickles import load_dict
from modeling.lazy_weights import LazyWeights, same_numbers
from recipes import yaml_lines
from recipes.files import FileError, refuse
from recipes.key_paths import flatten
from recipes.problems import Problem, some
from recipes.schema import Model

UNREAD = "in a form that is not read"  # instead of an argument's value
NO_PIPELINE = -2
EMBEDDING = -1
# Argument of Megatron-DeepSpeed since its commit 676a482c of December 2024, which states version 3.0 and has
# QKV's rows in the order of version 0.
FPDT = "ds_sequence_parallel_fpdt"
# of gpt-neox, which states no version and few arguments
NEOX_ARGUMENTS = {"model_parallel_size", "tokenizer_type"}
NEOX_VERSION = 2
# of its configuration, whose settings are no tensors
NEOX_DEFAULTS = {"bias_gelu_fusion": False, "gpt_j_residual": False}
NEOX_DENSE = {"global", "flash"}
KEYS = ("model", "module")  # of the state dict: Megatron-LM's, DeepSpeed's
CHUNK = re.compile(r"model(\d+)")  # of an interleaved pipeline schedule
# of parameters in DeepSpeed's pipelines; the tied embedding has no number, and stands first
_OF_LAYER = re.compile(r"(?:tied_modules\.embed|(?:sequential\.)?(\d+))\.(.+)")
BERT_ALONE = ("lm_head.", "pooler.", "binary_head.", "embedding.tokentype_embeddings.")
# padding rows that are accepted in any case: 128 x 8 slices is common
SMALLEST_PADDING = 1024


class Slices(NamedTuple):
    """The tensor ranks' slices of one tensor; `dim`: dimension of the cut, None: each rank has all of it."""

    parts: tuple[Tensor, ...]
    dim: int | None

    @property
    def shape(self) -> torch.Size:
        sizes = list(self.parts[0].shape)
        if self.dim is not None and self.dim < len(sizes):
            sizes[self.dim] *= len(self.parts)
        return torch.Size(sizes)

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    def join(self) -> Tensor:
        """Return the whole tensor, a copy only if it is cut."""
        if self.dim is None or len(self.parts) == 1:
            return self.parts[0]
        return torch.cat(self.parts, self.dim)


@dataclass(frozen=True)
class MegatronCheckpoint:
    """One iteration.

    Attributes:
        where: its directory.
        arguments: settings of its training, by Megatron's names; UNREAD: no plain value.
        version: of the checkpoint; it decides the order of QKV's rows.
        slices: number of tensor ranks.
        tensors: by the names of `names.py`, layers counted over all stages.
        copies: (stored name of a copy, its tensor) -> the copy, for tied tensors of several stages.
    """

    where: Path
    arguments: Mapping[str, Any]
    version: float
    slices: int
    tensors: Mapping[str, Slices] = field(repr=False)
    copies: Mapping[tuple[str, str], Slices] = field(repr=False)

    @property
    def is_bert(self) -> bool:
        return any(name.startswith(BERT_ALONE) for name in self.tensors)

    @property
    def layers(self) -> int:
        return sum(name.endswith("input_layernorm.weight") for name in self.tensors)

    @property
    def tanh_gelu(self) -> bool:
        """True if the MLP has the tanh form of GELU, as Megatron's default (fused with the bias) has."""
        return bool(
            self.arguments.get("openai_gelu")
            or self.arguments.get("bias_gelu_fusion", True)
        )

    def size(self, name: str, dim: int) -> int | None:
        """Return one size of a tensor, or None without such a tensor or dimension."""
        shape = self.tensors[name].shape if name in self.tensors else ()
        if dim < len(shape):
            return shape[dim]
        return None

    def config(self, vocabularies: Sequence[int]) -> dict[str, Any]:
        """Return the configuration in the keys of `MEGATRON_FORMS`, without what is nowhere stated.

        Sizes that the arguments leave out come from the tensors. Only some converters store the number of
        tokens without padding: else it is the first of `vocabularies` that padding can make the number of
        rows, or the number of rows.
        """
        rows = self.size(WORD, 0)
        most = SMALLEST_PADDING
        multiple = self.arguments.get("make_vocab_size_divisible_by")
        if type(multiple) is int:
            most = max(most, multiple * self.slices)
        padded = [v for v in vocabularies if rows and 0 <= rows - v < most]
        stated = {
            key: value for key, value in self.arguments.items() if value is not None
        }
        own: dict[str, Any] = {
            "num_layers": self.layers,
            "hidden_size": self.size(WORD, 1),
            "max_position_embeddings": self.size(POSITION, 0),
        }
        own |= {
            key: value
            for key, value in stated.items()
            if key not in own or value != UNREAD
        }
        own["model_type"] = "megatron-lm-bert" if self.is_bert else "megatron-lm-gpt"
        own["vocab_size"] = stated.get("orig_vocab_size") or next(iter(padded), rows)
        gelus = {"openai_gelu", "bias_gelu_fusion"} & stated.keys()
        if gelus:
            own["gelu"] = "tanh" if self.tanh_gelu else "exact"
        if any(stated[key] == UNREAD for key in gelus):
            own["gelu"] = UNREAD
        return own

    def untied(self) -> Iterator[tuple[str, str]]:
        """Yield (copy, tensor) for each copy that differs from its tensor. Reads their numbers."""
        for (copy, name), slices in self.copies.items():
            if not all(map(same_numbers, slices.parts, self.tensors[name].parts)):
                yield copy, name

    def weights(self, model: Model) -> LazyWeights:
        """Return the canonical weights of `model` from these tensors."""
        names = name_map(model)

        def read(ours: str) -> Tensor:
            name = names[ours]
            slices = self.tensors[name]
            if is_qkv(name):
                heads = model.heads // len(slices.parts)
                parts = [
                    heads_first(each, heads, self.version) for each in slices.parts
                ]
                slices = slices._replace(parts=tuple(parts))
            whole = slices.join()
            if name in WITH_PADDING:
                return whole[: model.vocab_size]
            return whole

        return LazyWeights(names, read)


def open_checkpoint(directory: str | Path) -> MegatronCheckpoint:
    """Open the newest iteration in a directory. Reads names, shapes and arguments; raises FileError."""
    files = find(Path(directory))
    problems: list[Problem] = []
    paths = dict.fromkeys([files.stated, *chain.from_iterable(files.stages)])
    contents: dict[Path, dict[str, Any]] = {}
    for file in paths:
        try:
            contents[file] = load_dict(file)
        except FileError as error:
            problems += error.problems
    if problems:
        raise FileError(problems)
    stated = contents[files.stated]
    arguments = _arguments(files.where, stated)
    if "ds_version" in stated and not arguments:
        fix = (
            f"go on with the run: launch/pretrain.py --adopt {directory}; or load its `module` into the model "
            "of transformers that it is of, and give the directory that save_pretrained writes"
        )
        refuse(
            files.where,
            "is a plain checkpoint of DeepSpeed, not of Megatron-DeepSpeed",
            "it holds the tensors of a program's own modules, and does not say of which model",
            fix,
        )
    version = _version(files.stated, stated)
    tensors = dict[str, Slices]()
    copies = dict[tuple[str, str], Slices]()
    offset = 0
    for called, slices in _stages(files, contents):
        offset += _take(called, slices, offset, tensors, copies, problems)
    layers = {file for file, content in contents.items() if _has_attention(content)}
    problems += _missing(files, arguments, layers, tensors)
    if problems:
        raise FileError(problems)
    return MegatronCheckpoint(
        files.where, arguments, version, len(files.stages[0]), tensors, copies
    )


def of_universal(
    where: Path,
    stated: Mapping[str, Any],
    parameters: Mapping[str, Tensor],
    sliced: bool,
) -> MegatronCheckpoint:
    """Return the checkpoint of DeepSpeed with these tensors, whose slices are joined. Raises FileError.

    All are joined along dimension 0 if `sliced`, and in a universal checkpoint of a program that does not
    state how it cuts them (gpt-neox).

    Args:
        stated: values of its model's file.
        parameters: by their names in the program's modules.
    """
    arguments = _arguments(where, stated)
    ranks = _stated_ranks(arguments, "tensor") or 1
    layers: dict[int, dict[str, Tensor]] = {}
    for name, tensor in parameters.items():
        number = NO_PIPELINE
        leaf = name
        match = _OF_LAYER.fullmatch(name)
        if match:
            number = int(match[1] or EMBEDDING)
            leaf = match[2]
        layers.setdefault(number, {})[leaf] = tensor
    tensors = dict[str, Slices]()
    offset = 0
    for number, layer in sorted(layers.items()):
        called = f"layer {number}"
        prefix = ""
        if number != NO_PIPELINE:
            prefix = _layer_prefix(layer, called)
        whole = _prefixed(prefix, layer)
        offset += _take(called, [whole], offset, tensors, {}, [])
    for name, joined in tensors.items():
        if is_qkv(name) or sliced or "universal_checkpoint_info" not in stated:
            slices = joined.parts[0].chunk(ranks)
            tensors[name] = joined._replace(parts=slices)
    return MegatronCheckpoint(
        where, arguments, _version(where, stated), ranks, tensors, {}
    )


def _has_attention(names: Iterable[object]) -> bool:
    return any(".query_key_value." in str(name) for name in names)


def _arguments(where: Path, stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stored arguments, UNREAD instead of values that are not plain."""
    stored = stated.get("args")
    arguments = stored if isinstance(stored, dict) else getattr(stored, "__dict__", {})
    if _is_neox(stated):
        arguments = {**_neox_settings(where), **arguments}
    plain = (bool, int, float, str, list, type(None))
    read = {}
    for key, value in arguments.items():
        if type(value) not in plain:
            value = UNREAD
        read[key] = value
    return read


def _version(file: Path, stated: Mapping[str, Any]) -> float:
    """Return the checkpoint's version, by the order of QKV's rows. Raises FileError."""
    version = stated.get("checkpoint_version", 0)
    if _is_neox(stated):
        version = NEOX_VERSION
    if hasattr(stated.get("args"), FPDT):
        version = 0
    if type(version) not in (int, float) or not 0 <= version <= 3:
        refuse(
            file,
            f"has checkpoint_version {str(version)[:60]}",
            "versions 0 to 3 are known",
        )
    return float(version)


def _is_neox(stated: Mapping[str, Any]) -> bool:
    stored = stated.get("args")
    return isinstance(stored, dict) and stored.keys() >= NEOX_ARGUMENTS


def _neox_settings(where: Path) -> dict[str, Any]:
    """Return gpt-neox's configuration, which it saves beside its files; UNREAD where it is not there.

    ds_to_universal.py leaves it in the save that it reads.
    """
    for place in (where, where.with_name(where.name.removesuffix("_universal"))):
        files = sorted((place / "configs").glob("*.yml"))
        settings: dict[str, Any] = dict(NEOX_DEFAULTS)
        for file in files:
            for key, value in yaml_lines.read(file, str(file)).value.items():
                settings[key.replace("-", "_")] = value
        kinds = set()
        for pattern, _ in settings.get("attention_config") or ():
            kinds |= {*pattern}
        if kinds <= NEOX_DENSE:
            settings["attention_config"] = None
        if files:
            return settings
    return dict.fromkeys(NEOX_DEFAULTS, UNREAD)


def _stages(
    files: Files, contents: Mapping[Path, Mapping[str, Any]]
) -> Iterator[tuple[str, Sequence[Mapping[str, Tensor]]]]:
    """Yield (name, tensors of each slice by stored names) of each stage, in the model's order."""
    if files.by_layer:
        for stage in files.stages:
            slices = [_flat(contents[file]) for file in stage]
            prefix = _layer_prefix(slices[0], stage[0].stem)
            yield stage[0].name, [_prefixed(prefix, tensors) for tensors in slices]
        return
    chunks = {file: _chunks(content) for file, content in contents.items()}
    most = max(len(chunks[file]) for stage in files.stages for file in stage)
    # chunk 0 of all stages comes before chunk 1 of the first
    for number in range(most):
        for stage in files.stages:
            name = str(stage[0].relative_to(files.where))
            slices = []
            for file in stage:
                chunk = chunks[file][number] if number < len(chunks[file]) else {}
                slices.append(_flat(chunk))
            yield name, slices


def _prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def _chunks(content: Mapping[str, Any]) -> list[Any]:
    numbered = sorted(
        (int(m[1]), key) for key in content if (m := CHUNK.fullmatch(str(key)))
    )
    named = [key for _, key in numbered] or [key for key in KEYS if key in content][:1]
    return [content[key] for key in named] or [{}]


def _layer_prefix(tensors: Mapping[str, Tensor], called: str) -> str:
    """Return the prefix for a layer of DeepSpeed's pipeline; its own names do not tell the layer."""
    if any(name.startswith("word_embeddings.") for name in tensors):
        return "embedding."
    if tensors.keys() == {"weight", "bias"}:
        return "encoder.final_layernorm."
    if tensors.keys() == {"norm.weight", "norm.bias"}:
        return "encoder.final_"
    return "encoder.layers.0." if _has_attention(tensors) else f"{called}."


def _flat(state: Any) -> dict[str, Tensor]:
    """Return the tensors of nested dictionaries, by their keys joined with dots."""
    found = dict[str, Tensor]()
    if not isinstance(state, dict):
        return found
    for name, leaf in flatten(state):
        if isinstance(leaf, Tensor) and not name.endswith("_extra_state"):
            found[name] = leaf.detach()
    return found


def _take(
    called: str,
    slices: Sequence[Mapping[str, Tensor]],
    offset: int,
    tensors: dict[str, Slices],
    copies: dict[tuple[str, str], Slices],
    problems: list[Problem],
) -> int:
    """Add a stage to `tensors` and `copies`, its layers counted from `offset`; return their number."""
    uneven = sorted(set().union(*slices) - set(slices[0]).intersection(*slices))
    for name in slices[0]:
        if name not in uneven and len({slice_[name].shape for slice_ in slices}) > 1:
            uneven.append(name)
    if uneven:
        problems.append(
            Problem(
                called,
                f"{called}: its tensor-parallel slices differ in {some(uneven, 3)}",
                "each holds an equal part of the same tensors",
                WHOLE,
            )
        )
    layers = 0
    for stored in slices[0]:
        name = common_name(stored)
        layer = LAYER.fullmatch(name)
        if layer:
            layers = max(layers, int(layer[2]) + 1)
            name = f"{layer[1]}{offset + int(layer[2])}{layer[3]}"
        if stored in uneven:
            continue
        joined = Slices(tuple(each[stored] for each in slices), cut_dimension(name))
        if name in tensors:
            copies[f"{stored} of {called}", name] = joined
        else:
            tensors[name] = joined
    return layers


def _stated_ranks(arguments: Mapping[str, Any], kind: str) -> int | None:
    """Return the number of tensor- or pipeline-parallel ranks by the arguments; None: they do not say it."""
    stated = arguments.get(f"{kind}_model_parallel_size")
    if kind == "tensor" and stated is None:
        stated = arguments.get("model_parallel_size")
    return stated if type(stated) is int else None


def _missing(
    files: Files,
    arguments: Mapping[str, Any],
    layers: Collection[Path],
    tensors: Mapping[str, Slices],
) -> Iterator[Problem]:
    """Yield problems: ranks of the arguments without files, and gaps between the files in `layers`.

    Ranks whose parts are there are not missed: converters leave the arguments of other layouts.
    """
    where = str(files.where)
    counts = dict[str, int]()
    if not all(is_whole(name, slices.shape) for name, slices in tensors.items()):
        counts["tensor"] = len(files.stages[0])
    if not files.by_layer and LAST not in tensors:
        counts["pipeline"] = len(files.stages)
    for kind, count in counts.items():
        stated = _stated_ranks(arguments, kind)
        if stated not in (None, count):
            yield Problem(
                where,
                f"holds files of {count} {kind}-parallel ranks, and its arguments tell of {stated}",
                "each has a part of the weights",
                WHOLE,
                where,
            )
    present = set[int]()
    for file, *_ in files.stages:
        match = LAYER_FILE.fullmatch(file.name)
        if match and file in layers:
            present.add(int(match[1]))
    between = range(min(present, default=0), max(present, default=0))
    gaps = [f"layer_{number:02d}" for number in between if number not in present]
    if gaps:
        yield Problem(
            where,
            f"lacks the files of {some(gaps, 4)}",
            "every layer is needed",
            WHOLE,
            where,
        )
