"""Writes checkpoints as Megatron-LM and Megatron-DeepSpeed do, out of canonical weights.

Shares nothing with `modeling/formats/megatron`: whole tensors are taken apart here, by the text of Megatron's
own modules (each names its source), and `modeling/formats/megatron` puts them together.
"""

from __future__ import annotations

import argparse
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from torch import Tensor

from modeling.families import family_of, model_shape
from modeling.initialization import Init
from recipes.schema import Recipe


@dataclass(frozen=True)
class Form:
    """How a checkpoint is written. `names`: v1, legacy, norm (23.08 on), core; fused, engine: by TE."""

    version: float = 3.0
    tp: int = 1
    pp: int = 1
    names: str = "legacy"
    chunks: int = 1  # of an interleaved schedule
    deepspeed: str = ""  # plain, pipeline
    arguments: dict[str, Any] | None = field(default_factory=dict)  # of its own; None: none are saved
    divisible: int = 16
    extra: dict[str, Any] = field(default_factory=dict)  # next to the state dict

    def __str__(self) -> str:
        return f"{self.deepspeed or self.names} v{self.version:g} tp{self.tp} pp{self.pp}" + (
            f" x{self.chunks}" if self.chunks > 1 else ""
        )


def qkv(rows: Tensor, heads: int, version: float) -> Tensor:
    """(head, q/k/v, D) rows of one slice in the order of a version (megatron/checkpointing.py, 23.04)."""
    apart = rows.unflatten(0, (heads, 3, rows.shape[0] // heads // 3))  # N 3 D ...
    order = {0: (1, 0, 2), 1: (0, 2, 1)}.get(int(version), (0, 1, 2))
    return apart.permute(*order, *range(3, apart.dim())).flatten(0, 2).clone()


def piece(tensor: Tensor, dim: int, rank: int, tp: int) -> Tensor:
    return tensor.chunk(tp, dim)[rank].clone()


def layer(weights: dict[str, Tensor], index: int, rank: int, heads: int, form: Form) -> dict[str, Tensor]:
    """One transformer layer by the names of its modules (megatron/model/transformer.py)."""
    own = {n.split(".", 2)[2]: t for n, t in weights.items() if n.startswith(f"layers.{index}.")}
    tp = form.tp
    attention = "attention" if form.names == "v1" else "self_attention"
    first, second = {"norm": ("input_norm", "post_attention_norm")}.get(
        form.names, ("input_layernorm", "post_attention_layernorm")
    )
    fused = {leaf: own[f"attention.qkv.{leaf}"] for leaf in ("weight", "bias")}
    out = {
        f"{first}.weight": own["attention_norm.weight"],
        f"{first}.bias": own["attention_norm.bias"],
        **{
            f"{attention}.query_key_value.{leaf}": qkv(piece(t, 0, rank, tp), heads // tp, form.version)
            for leaf, t in fused.items()
        },
        f"{attention}.dense.weight": piece(own["attention.projection.weight"], 1, rank, tp),
        f"{attention}.dense.bias": own["attention.projection.bias"],
        f"{second}.weight": own["mlp_norm.weight"],
        f"{second}.bias": own["mlp_norm.bias"],
        "mlp.dense_h_to_4h.weight": piece(own["mlp.expand.weight"], 0, rank, tp),
        "mlp.dense_h_to_4h.bias": piece(own["mlp.expand.bias"], 0, rank, tp),
        "mlp.dense_4h_to_h.weight": piece(own["mlp.contract.weight"], 1, rank, tp),
        "mlp.dense_4h_to_h.bias": own["mlp.contract.bias"],
    }
    if form.names == "engine":
        names = {
            "self_attention.query_key_value.": "self_attention.layernorm_qkv.",
            "self_attention.dense.": "self_attention.proj.",
            "mlp.dense_h_to_4h.": "layernorm_mlp.fc1_",
            "mlp.dense_4h_to_h.": "layernorm_mlp.fc2_",
            "input_layernorm.": "self_attention.layernorm_qkv.layer_norm_",
            "post_attention_layernorm.": "layernorm_mlp.layer_norm_",
        }
        for old, new in names.items():
            out = {n.replace(old, new): t for n, t in out.items()}
        out["layernorm_mlp._extra_state"] = torch.zeros(4, dtype=torch.uint8)
    if form.names in ("core", "fused"):
        names = {
            "self_attention.query_key_value": "self_attention.linear_qkv",
            "self_attention.dense": "self_attention.linear_proj",
            "mlp.dense_h_to_4h": "mlp.linear_fc1",
            "mlp.dense_4h_to_h": "mlp.linear_fc2",
            "input_layernorm": "input_layernorm",
            "post_attention_layernorm": "pre_mlp_layernorm",
        }
        out = {f"{names[n.rpartition('.')[0]]}.{n.rpartition('.')[2]}": t for n, t in out.items()}
        if form.names == "fused":
            within = {
                "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
                "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
            }
            for norm, place in within.items():
                out = {n.replace(norm, place): t for n, t in out.items()}
            out["self_attention.linear_qkv._extra_state"] = torch.zeros(4, dtype=torch.uint8)
    return out


def vocabulary(tensor: Tensor, form: Form) -> Sequence[Tensor]:
    """The slices of a tensor with a row for each token, after random padding."""
    padding = torch.randn(-len(tensor) % (form.divisible * form.tp), *tensor.shape[1:], dtype=tensor.dtype)
    return torch.cat([tensor, padding]).chunk(form.tp)


def written(recipe: Recipe, weights: dict[str, Tensor], form: Form) -> Iterator[tuple[str, Any]]:
    """(path, what torch.save writes there) of every file."""
    torch.manual_seed(5)
    writer = _Writer(recipe, weights, form)
    client = _client_state(recipe, writer, form)
    if form.deepspeed == "pipeline":
        yield from writer.layer_files()
        for rank in range(form.tp * form.pp):
            yield f"global_step7/mp_rank_{rank:02d}_model_states.pt", {"module": None, **client}
    elif form.deepspeed:
        for rank in range(form.tp):
            content = {"module": writer.part(rank, 0, 0), **client}
            yield f"global_step7/mp_rank_{rank:02d}_model_states.pt", content
    else:
        yield from writer.rank_files(client)


def _client_state(recipe: Recipe, writer: _Writer, form: Form) -> dict[str, Any]:
    """What stands next to the weights: version, arguments, random states."""
    model = recipe.model
    client = dict(checkpoint_version=form.version, iteration=7, **form.extra)
    if form.version == 0:
        del client["checkpoint_version"]  # as version 1.0 of Megatron-LM
    if form.arguments is not None:
        told = dict(
            num_layers=model.layers, hidden_size=model.hidden, num_attention_heads=model.heads,
            max_position_embeddings=writer.position.shape[0],
            padded_vocab_size=sum(words.shape[0] for words in writer.words),
            ffn_hidden_size=4 * model.hidden, bias_gelu_fusion=True, layernorm_epsilon=1e-5,
            make_vocab_size_divisible_by=form.divisible, params_dtype=torch.float16,
        )  # fmt: skip
        if form.version < 3:
            told["model_parallel_size"] = form.tp
        else:
            told |= dict(tensor_model_parallel_size=form.tp, pipeline_model_parallel_size=form.pp)
        client["args"] = argparse.Namespace(**told | form.arguments)
    client |= dict(
        random_rng_state=random.getstate(), np_rng_state=np.random.get_state(),
        optimizer={"exp_avg": torch.zeros(64)},
    )  # fmt: skip
    return client


class _Writer:
    """The parts of one model in a form."""

    def __init__(self, recipe: Recipe, weights: dict[str, Tensor], form: Form) -> None:
        self.model = recipe.model
        self.bert = recipe.model.family == "bert"
        self.weights = weights
        self.form = form
        self.position = weights["embedding.position" if self.bert else "position.weight"]
        self.words = vocabulary(weights["word.weight"], form)

    def embedding(self, rank: int) -> dict[str, Any]:
        out = {
            "word_embeddings": {"weight": self.words[rank].clone()},
            "position_embeddings": {"weight": self.position.clone()},
        }
        if self.bert:
            out["tokentype_embeddings"] = {"weight": self.weights["embedding.token_type"]}
        return out

    def final_norm(self) -> dict[str, Tensor]:
        return {leaf: self.weights[f"final_norm.{leaf}"].clone() for leaf in ("weight", "bias")}

    def part(self, rank: int, stage: int, chunk: int) -> dict[str, Any]:
        """state_dict_for_save_checkpoint of one rank."""
        form = self.form
        is_first = stage == 0 and chunk == 0
        is_last = stage == form.pp - 1 and chunk == form.chunks - 1
        layers = self._layers(rank, chunk * form.pp + stage)
        if is_last:
            norm = "final_norm" if form.names == "norm" else "final_layernorm"
            layers |= {f"{norm}.{leaf}": t for leaf, t in self.final_norm().items()}
        head = head_of(self.weights, rank, form) if self.bert and is_last else {}
        if form.names in ("core", "fused"):
            return self._core_part(rank, layers, is_first, is_last) | head
        language: dict[str, Any] = {"transformer" if form.names == "v1" else "encoder": layers}
        if is_first:
            language["embedding"] = self.embedding(rank)
        if "pooler" in head:
            language["pooler"] = head.pop("pooler")
        out = {"language_model": language, **head}
        if is_last and not is_first:
            out["word_embeddings_for_head"] = {"weight": self.words[rank].clone()}
        return out

    def _layers(self, rank: int, number: int) -> dict[str, Tensor]:
        """The layers of a stage's chunk, the `number`th of the model."""
        per = self.model.layers // (self.form.pp * self.form.chunks)
        layers = {}
        for i in range(per):
            for name, tensor in layer(
                self.weights, number * per + i, rank, self.model.heads, self.form
            ).items():
                layers[f"layers.{i}.{name}"] = tensor
        return layers

    def _core_part(
        self, rank: int, layers: dict[str, Tensor], is_first: bool, is_last: bool
    ) -> dict[str, Any]:
        """A rank's tensors by the names of Megatron core."""
        out: dict[str, Any] = {f"{'encoder' if self.bert else 'decoder'}.{n}": t for n, t in layers.items()}
        if is_first:
            out |= {f"embedding.{m}.weight": t["weight"] for m, t in self.embedding(rank).items()}
        if is_last and not is_first:
            out["output_layer.weight"] = self.words[rank].clone()
        return out

    def layer_files(self) -> Iterator[tuple[str, Any]]:
        """A file for each layer, as DeepSpeed's pipeline writes them."""
        after = 3 + self.model.layers
        for rank in range(self.form.tp):
            at = f"model_{rank:02d}-model_states.pt"
            flat = {f"{m}.weight": t["weight"] for m, t in self.embedding(rank).items()}
            yield f"global_step7/layer_01-{at}", flat
            for i in range(self.model.layers):
                own = layer(self.weights, i, rank, self.model.heads, self.form)
                yield f"global_step7/layer_{3 + i:02d}-{at}", own
            yield f"global_step7/layer_{after + 1:02d}-{at}", self.final_norm()
            yield f"global_step7/layer_{after + 2:02d}-{at}", dict(flat)

    def rank_files(self, client: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        """A file for each rank, as Megatron-LM writes them."""
        form = self.form
        for stage in range(form.pp):
            for rank in range(form.tp):
                place = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if form.pp > 1 else "")
                chunks = [self.part(rank, stage, chunk) for chunk in range(form.chunks)]
                state = {"model": chunks[0]}
                if form.chunks > 1:
                    state = {f"model{i}": chunk for i, chunk in enumerate(chunks)}
                yield f"iter_0000007/{place}/model_optim_rng.pt", {**client, **state}


def head_of(weights: dict[str, Tensor], rank: int, form: Form) -> dict[str, Any]:
    """lm_head, pooler and binary_head (megatron/model/bert_model.py)."""
    core = form.names in ("core", "fused")
    bias = vocabulary(weights["decoder_bias.bias"], form)[rank].clone()
    norm = {"norm": "norm", "core": "layer_norm", "fused": "layer_norm"}.get(form.names, "layernorm")
    lm = {
        **{f"dense.{leaf}": weights[f"head.transform.{leaf}"] for leaf in ("weight", "bias")},
        **{f"{norm}.{leaf}": weights[f"head.norm.{leaf}"] for leaf in ("weight", "bias")},
    }
    out: dict[str, Any] = {}
    if "head.pooler.weight" in weights:
        pooler = {f"dense.{leaf}": weights[f"head.pooler.{leaf}"] for leaf in ("weight", "bias")}
        binary = {leaf: weights[f"head.sentence.{leaf}"] for leaf in ("weight", "bias")}
        if core:
            out |= {f"pooler.{n}": t for n, t in pooler.items()}
            out |= {f"binary_head.{n}": t for n, t in binary.items()}
        else:
            out |= {"pooler": pooler, "binary_head": binary}
    if core:
        return out | {f"lm_head.{n}": t for n, t in lm.items()} | {"output_layer.bias": bias}
    return out | {"lm_head": {"bias": bias, **lm}}


def write(directory: Path, recipe: Recipe, weights: dict[str, Tensor], form: Form) -> Path:
    """Save a checkpoint, with what says that it is the newest."""
    for path, content in written(recipe, weights, form):
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, directory / path)
    (directory / "latest_checkpointed_iteration.txt").write_text("7")
    return directory


def random_weights(recipe: Recipe) -> dict[str, Tensor]:
    """Canonical weights none of which is near its initial value."""
    generator = torch.Generator().manual_seed(11)
    init = Init(recipe.seed, recipe.init_std, recipe.model.layers)
    shape = model_shape(recipe, recipe.model.vocab_size)
    module = family_of(recipe.model).plain(shape, group=None, init=init)
    parameters = {parameter.canonical_name: parameter for parameter in module.parameters()}
    return {name: torch.randn(p.shape, generator=generator) for name, p in parameters.items()}


# --- DeepSpeed's universal checkpoints


@dataclass(frozen=True)
class Program:
    """Whose run it is. `order`: of QKV's rows, by a version; `names`: of `Form`."""

    name: str
    order: float = 3.0
    names: str = "legacy"
    pipeline: bool = True


MEGATRON_2023 = Program("Megatron-DeepSpeed of 2023")
MEGATRON = Program("Megatron-DeepSpeed", order=0)
WITHOUT_PIPELINE = Program("without a pipeline", order=0, pipeline=False)
NEOX = Program("gpt-neox", names="v1")
# gpt_model.py, UniversalCheckpointInfo: of the pipeline's modules
REPLICATED = [
    r"\d+.input_layernorm.weight", r"\d+.input_layernorm.bias", r"\d+.post_attention_layernorm.weight",
    r"\d+.post_attention_layernorm.bias", r"\d+.self_attention.dense.bias", r"\d+.mlp.dense_4h_to_h.bias",
    r"\d+.weight", r"\d+.bias",
    "tied_modules.embed.position_embeddings.weight",
]  # fmt: skip
BY_COLUMNS = [r"\d+.mlp.dense_4h_to_h.weight", r"\d+.self_attention.dense.weight"]


def of_program(recipe: Recipe, weights: dict[str, Tensor], rank: int, form: Form, program: Program):
    """A tensor rank's parameters by the names of the program's modules."""
    writer = _Writer(recipe, weights, form)
    out = {f"tied_modules.embed.{m}.weight": t["weight"] for m, t in writer.embedding(rank).items()}
    for i in range(recipe.model.layers):
        own = layer(weights, i, rank, recipe.model.heads, form)
        out |= {f"{2 + i}.{name}": tensor for name, tensor in own.items()}
    norm = f"{3 + recipe.model.layers}."
    norm += "norm." if program is NEOX else ""
    out |= {f"{norm}{leaf}": tensor for leaf, tensor in writer.final_norm().items()}
    if program is NEOX:
        new = {"dense_h_to_4h": "linear1", "dense_4h_to_h": "linear2"}
        for old, name in new.items():
            out = {n.replace(old, name): t for n, t in out.items()}
    if program.pipeline:
        return out
    names = {"tied_modules.embed.": "embedding.", norm: "encoder.final_layernorm."}
    names |= {f"{2 + i}.": f"encoder.layers.{i}." for i in range(recipe.model.layers)}
    found = {}
    for name, tensor in out.items():
        start = next(start for start in names if name.startswith(start))
        found[f"language_model.{names[start]}{name.removeprefix(start)}"] = tensor
    return found


def patterns_of(tp: int, program: Program) -> dict[str, list[str]]:
    """How DeepSpeed's tool joins what is not cut along dimension 0; gpt-neox does not say it."""
    if program is NEOX:
        return {}
    found = {"vocabulary_parameter_patterns": ["tied_modules.embed.word_embeddings.weight"]}
    if tp > 1:
        found["tp_replicated_parameter_patterns"] = REPLICATED
        found["parameter_with_row_parallelism_patterns"] = BY_COLUMNS
    if program.pipeline:
        return found
    layers = (r"\d+.", r"language_model.encoder.layers.\d+.")
    norm = {rf"\d+.{leaf}": f"language_model.encoder.final_layernorm.{leaf}" for leaf in ("weight", "bias")}
    for key, patterns in found.items():
        moved = [p.replace("tied_modules.embed", "language_model.embedding") for p in patterns]
        found[key] = [norm.get(p) or p.replace(*layers) for p in moved]
    return found


def write_universal(
    directory: Path, recipe: Recipe, by_kind: dict[str, dict[str, Tensor]], tp: int, program: Program,
    **stated: Any,
) -> Path:  # fmt: skip
    """What DeepSpeed's own functions make of a run's slices; `by_kind`: canonical tensors."""
    form = Form(version=program.order, tp=tp, names=program.names, divisible=1 if program is NEOX else 16)
    info = {"universal_checkpoint_version": 0.4, "original_vocab_size": recipe.model.vocab_size}
    info |= patterns_of(tp, program)
    slices = directory / "slices"
    shapes: dict[str, list[Any]] = {}
    for kind, weights in by_kind.items():
        for rank in range(tp):
            torch.manual_seed(5)
            for name, tensor in of_program(recipe, weights, rank, form, program).items():
                flat = tensor.reshape(-1)
                ds_to_universal.dump_param_fragment(slices, rank, 0, kind, flat, name, 0, len(flat))
                if program is not NEOX:
                    step = torch.tensor(6.0)
                    ds_to_universal.dump_param_fragment(slices, rank, 0, "step", step, name, 0, 0)
                if kind == "fp32":
                    shapes.setdefault(name, []).append(tensor.shape)
    for each in shapes.items():
        ds_to_universal.merge_tp_slices(info, directory / "zero", slices, tp, each)
    shutil.rmtree(slices)
    group = {"lr": 7.5e-4, "betas": (0.9, 0.95), "eps": 1e-8, "bias_correction": True}
    if program is NEOX:  # as apex counts
        group["step"] = 6
    groups = [{**group, "weight_decay": decay, "params": [number]} for number, decay in enumerate([0.1, 0.0])]
    grouped = [
        {name: own[0] for name, own in shapes.items() if (len(own[0]) > 1) == decayed}
        for decayed in (True, False)
    ]
    scale = DynamicLossScaler(2.0**24, 1000, 1, 2, False)
    torch.save({"param_groups": groups, "loss_scaler": scale}, directory / "zero/optimizer_state.pt")
    engine = {
        "global_steps": 6, "skipped_steps": 0, "global_samples": 72, "ds_version": "0.19.8", "module": None,
        "ds_config": {"gradient_clipping": 0.5, "fp16": {"enabled": True}}, "param_shapes": grouped,
        **_program_state(recipe, tp, program, stated),
    }  # fmt: skip
    if program is NEOX:
        engine["ds_config"]["optimizer"] = {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}}
    else:
        engine["universal_checkpoint_info"] = info
    for rank in range(2):
        torch.save(engine, directory / f"mp_rank_{rank:02d}_model_states.pt")
    return directory


def _program_state(recipe: Recipe, tp: int, program: Program, stated: dict[str, Any]) -> dict[str, Any]:
    """What a program adds to DeepSpeed's state: arguments, scheduler, version."""
    model = recipe.model
    args = dict(
        num_layers=model.layers, hidden_size=model.hidden, num_attention_heads=model.heads,
        max_position_embeddings=recipe.positions,
    )  # fmt: skip
    if program is NEOX:
        args |= dict(model_parallel_size=tp, tokenizer_type="HFTokenizer", **stated)
        schedule = dict(
            decay_style="cosine", num_iters=6, start_lr=1e-3, warmup_iter=3, end_iter=12, min_lr=0.0
        )
        return {"args": args, "lr_scheduler": schedule}
    args |= dict(
        tensor_model_parallel_size=tp, bias_gelu_fusion=True, normalization="layernorm", train_iters=12,
        seq_length=recipe.sequence_length, optimizer="adam", hidden_dropout=0.1, attention_dropout=0.0,
        params_dtype=torch.float16,
    ) | stated  # fmt: skip
    if program.order == 0:
        args["ds_sequence_parallel_fpdt"] = False
    schedule = dict(
        lr_decay_style="cosine", num_steps=72, max_lr=1e-3, lr_warmup_steps=36, lr_decay_steps=144, min_lr=0.0
    )
    return {"args": argparse.Namespace(**args), "lr_scheduler": schedule, "checkpoint_version": 3.0}


def write_sliced(
    directory: Path, recipe: Recipe, by_kind: dict[str, dict[str, Tensor]], tp: int, pp: int, program: Program
) -> Path:
    """What DeepSpeed's save_checkpoint leaves of a program under ZeRO-1, of one data-parallel rank."""
    directory.mkdir()
    form = Form(version=program.order, tp=tp, names=program.names, divisible=1 if program is NEOX else 16)
    after = 2 + recipe.model.layers // pp  # the first layer of the second stage
    for rank in range(tp * pp):
        stage = rank // tp
        flats = {kind: [[], []] for kind in by_kind}
        addresses: list[dict[str, Any]] = [{}, {}]
        for kind, weights in by_kind.items():
            addresses, starts = [{}, {}], [0, 0]
            torch.manual_seed(5)  # of padding rows
            for name, tensor in of_program(recipe, weights, rank % tp, form, program).items():
                tied = name.startswith("tied_modules.")
                if not tied and (int(name.split(".")[0]) >= after) != stage and pp > 1:
                    continue
                own = torch.zeros_like(tensor) if tied and stage else tensor
                group = int(tensor.dim() == 1)
                flats[kind][group].append(own.flatten())
                place = SimpleNamespace(start=starts[group], numel=own.numel(), shape=own.shape)
                addresses[group][name] = place
                starts[group] += own.numel()
        joined = {kind: [torch.cat(parts) for parts in groups] for kind, groups in flats.items()}
        shapes = [{name: place.shape for name, place in group.items()} for group in addresses]
        state = {
            number: {
                "step": 6,
                "exp_avg": joined["exp_avg"][number],
                "exp_avg_sq": joined["exp_avg_sq"][number],
            }
            for number in (0, 1)
        }
        group = {"lr": 7.5e-4, "betas": (0.9, 0.95), "eps": 1e-8, "bias_correction": True}
        groups = [{**group, "weight_decay": decay, "params": [n]} for n, decay in enumerate([0.1, 0.0])]
        held = {
            "base_optimizer_state": {"state": state, "param_groups": groups},
            "single_partition_of_fp32_groups": joined["fp32"], "param_slice_mappings": addresses,
            "partition_count": [1, 1], "zero_stage": 1,
        }  # fmt: skip
        file = directory / f"zero_pp_rank_0_mp_rank_{rank:02d}_optim_states.pt"
        torch.save({"optimizer_state_dict": held}, file)
        optimizer = {"type": "Adam", "params": {"lr": 1e-3}}
        engine = {
            "global_steps": 6, "skipped_steps": 0, "global_samples": 72, "module": None,
            "mp_world_size": tp * pp, "param_shapes": shapes,
            "ds_config": {"gradient_clipping": 0.5, "optimizer": optimizer},
            **_program_state(recipe, tp, program, {}),
        }  # fmt: skip
        if program is not NEOX:
            engine["universal_checkpoint_info"] = patterns_of(tp, program)
        torch.save(engine, directory / f"mp_rank_{rank:02d}_model_states.pt")
    return directory
