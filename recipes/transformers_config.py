"""A config.json of transformers as the definition of a recipe's model; needs no transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
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
# parts of class names in `architectures` -> the family
_HEADS = {
    "ForCausalLM": "causal_lm",
    "LMHeadModel": "causal_lm",
    "ForMaskedLM": "masked_lm",
}


class TransformersConfig(dict[str, Any]):
    """The keys of a config.json; nothing changes them."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(json.dumps(self, sort_keys=True))


def stated(config: Mapping[str, Any], size: str) -> str:
    """Return the name under which a config states a size; "": it does not."""
    return next((name for name in SIZES[size] if config.get(name)), "")


def open_config(model: dict[str, Any]) -> None:
    """Put the keys of the file or directory that a recipe's model names in its place. Raises FileError."""
    config = model.get("config")
    if isinstance(config, str):
        path = path_of(config, KEY)
        path = path / "config.json" if path.is_dir() else path
        model["config"] = read_json_object(path)


def complete(model: dict[str, Any]) -> Iterator[Problem]:
    """Read the config that a recipe's model names, and state its shape and family beside it, in place.

    Yields a problem for each thing that it does not say, or that contradicts it.
    """
    try:
        open_config(model)
    except FileError as error:
        yield Problem(KEY, f"{KEY}: {error}", fix="give a config.json")
        return
    config = model["config"]
    if not isinstance(config, Mapping):
        yield Problem(KEY, f"{KEY} is no mapping", fix="give the keys of a config.json")
        return
    if config.get("auto_map"):
        rule = "only classes of transformers itself are run"
        fix = "remove it if transformers has the class"
        yield Problem(KEY, f"{KEY}.auto_map names Python code beside it", rule, fix)
    for key, value in _derived(config).items():
        if value is None:
            came = f"{KEY} does not say {SIZES[key][0]}"
            rule = "a default of transformers is somebody's model"
            fix = f"state it there, or with --set {KEY}.{SIZES[key][0]}=N"
            yield Problem(KEY, came, rule, fix)
        elif model.setdefault(key, value) != value:
            came = f"model.{key}={model[key]}, and {value} by {KEY}"
            fix = f"leave model.{key} out, or set both"
            yield Problem(f"model.{key}", came, "the config decides", fix)


def _derived(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the shape, None where it is not stated, and the family, if a class is named."""
    derived = {size: config.get(stated(config, size)) for size in SIZES}
    named = str(config.get("architectures"))
    families = {family for part, family in _HEADS.items() if part in named}
    if len(families) == 1:
        derived["family"] = families.pop()
    return derived


def shrunk(config: Mapping[str, Any], sizes: Mapping[str, int]) -> TransformersConfig:
    """Return the config of a small model with these sizes, by the keys of a recipe's model.

    What is as wide as the model gets its new width, an MLP as many times, and heads of keys their share.
    """
    names = {size: stated(config, size) for size in SIZES}
    hidden = config[names["hidden"]]
    heads = config[names["heads"]]
    wide = sizes["hidden"]
    few = sizes["heads"]
    small = TransformersConfig(config)
    for key, value in config.items():
        if type(value) is not int or key == names["positions"]:
            continue
        if key.endswith(("head_dim", "rotary_dim")):
            small[key] = value * wide * heads // (few * hidden)
        elif key.startswith("num_key_value"):
            small[key] = max(1, few * value // heads)
        elif value == hidden or key.endswith(("intermediate_size", "ffn_dim")):
            small[key] = value * wide // hidden
    if config.get("layer_types"):
        small["layer_types"] = config["layer_types"][: sizes["layers"]]
    for size, number in sizes.items():
        small[names[size]] = number
    return small
