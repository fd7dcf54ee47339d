"""A config.json of transformers as the definition of a recipe's model; needs no transformers."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

from recipes.files import FileError, path_of, read_json_object
from recipes.problems import Problem

KEY = "model.config"
# key of a recipe's model -> its names in configs of transformers
SIZES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim", "emb_dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "vocab_size": ("vocab_size",),
    "positions": ("max_position_embeddings", "n_positions", "max_seq_len"),
}
# endings of class names in `architectures` -> the family
_HEADS = {
    "ForCausalLM": "causal_lm",
    "LMHeadModel": "causal_lm",
    "ForMaskedLM": "masked_lm",
}
_REMOTE = "auto_map"  # where a config names Python code beside it


def read_config(where: str | Path) -> dict[str, Any]:
    """Read a config.json, or that of a directory. Raises FileError."""
    path = path_of(where, KEY)
    return read_json_object(path / "config.json" if path.is_dir() else path)


def stated(config: Mapping[str, Any], size: str) -> tuple[str, Any]:
    """Return the name and the value of a size; ("", None): it is not stated."""
    for name in SIZES[size]:
        if config.get(name) is not None:
            return name, config[name]
    return "", None


def complete(model: dict[str, Any]) -> Iterator[Problem]:
    """Read the config that a recipe's model names, and state its shape and family beside it, in place.

    Yields a problem for each thing that it does not say, or that contradicts it.
    """
    config = model["config"]
    if isinstance(config, str):
        try:
            config = model["config"] = read_config(config)
        except FileError as error:
            yield from error.problems
            return
    if not isinstance(config, Mapping):
        return  # the schema refuses it
    derived: dict[str, Any] = {}
    family = _family(config)
    if family:
        derived["family"] = family
    for size in SIZES:
        name, value = stated(config, size)
        if name:
            derived[size] = value
    yield from _unsaid(config, {*derived, *({"family"} & model.keys())})
    for key, value in derived.items():
        said = model.setdefault(key, value)
        if said != value:
            yield Problem(
                f"model.{key}",
                f"model.{key}={said}, and {value} by {KEY}",
                "the config decides",
                f"leave model.{key} out, or set both",
            )


def _unsaid(config: Mapping[str, Any], known: Set[str]) -> Iterator[Problem]:
    """Yield a problem for each thing that a config, or its recipe, has to say."""
    if config.get(_REMOTE):
        yield Problem(
            KEY,
            f"{KEY}.{_REMOTE} names Python code beside the weights",
            "it is not run here: only classes of transformers are",
            f"remove {_REMOTE} if transformers has the class of model_type itself",
        )
    if not isinstance(config.get("model_type"), str):
        yield Problem(
            KEY,
            f"{KEY} names no model_type",
            "it decides the class",
            "state it, e.g. model_type: modernbert",
        )
    for size, (name, *_) in SIZES.items():
        if size not in known and size != "positions":
            yield Problem(
                KEY,
                f"{KEY} does not say {name}",
                "a default of transformers is somebody's model, and is never taken unsaid",
                f"state {KEY}.{name}",
            )
    if "family" not in known:
        yield Problem(
            "model.family",
            f"{KEY} names no class with a language model's head in architectures",
            "some types have several",
            "set model.family to causal_lm or masked_lm",
        )


def _family(config: Mapping[str, Any]) -> str | None:
    names = config.get("architectures") or ()
    for name in names:
        for ending, family in _HEADS.items():
            if str(name).endswith(ending):
                return family
    return None


def shrunk(config: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return the config of a small model with these sizes, by the keys of a recipe's model.

    What is as wide as the model gets its new width, an MLP as many times, and heads of keys their share.
    """
    small = copy.deepcopy(dict(config))
    was: dict[str, int] = {}
    for size in sizes:
        name, was[size] = stated(config, size)
        small[name] = sizes[size]
    hidden = sizes["hidden"]
    heads = sizes["heads"]
    sized = {name for names in SIZES.values() for name in names}
    for key, value in config.items():
        if key in sized or type(value) is not int:
            continue
        if key == "head_dim":
            small[key] = hidden // heads
        elif key.startswith(("num_key_value", "num_kv")):
            small[key] = max(1, heads * value // was["heads"])
        elif value == was["hidden"] or key.endswith(("intermediate_size", "ffn_dim")):
            small[key] = max(1, value * hidden // was["hidden"])
    if isinstance(config.get("layer_types"), list):
        small["layer_types"] = config["layer_types"][: sizes["layers"]]
    return small
