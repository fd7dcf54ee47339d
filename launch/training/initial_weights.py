"""Whether given weights fit a recipe, seen from their config.json before anything is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launch.machine import ending
from modeling.huggingface.config_forms import FORMS, form_of
from recipes.nested import flatten
from recipes.schema import Recipe
from recipes.vocabularies import PUBLISHED_VOCABULARIES

SAVED = "give a directory that save_pretrained wrote"
TOKENIZERS = {size: kind for kind, size in PUBLISHED_VOCABULARIES.items()}


def check(path: str | Path, recipe: Recipe) -> None:
    """Refuse initial weights that are not a `transformers` model of the recipe's kind; say what else differs.

    Reads no weights. Raises ValueError with every mismatch, and what to put on the command line instead.
    """
    directory = Path(path)
    if not directory.is_dir():
        what = "is a file" if directory.exists() else "does not exist"
        fix = "give a directory that save_pretrained or launch/export_hf.py wrote"
        raise ValueError(f"--init_from {path} {what}: {fix}")
    problems = []
    if not any(any(directory.glob(pattern)) for pattern in ("*.safetensors", "pytorch_model*.bin")):
        problems.append(f"holds no weights, *.safetensors or pytorch_model*.bin: {SAVED}")
    try:
        config = json.loads((directory / "config.json").read_text())
        if not isinstance(config, dict):
            raise ValueError("not a mapping")
    except (OSError, ValueError) as e:
        problems.append(f"has no readable config.json ({e.__class__.__name__}): {SAVED}")
    else:
        problems += _problems(config, recipe)
    if problems:
        raise ValueError("\n".join(f"--init_from {path}: {problem}" for problem in problems))
    for remark in remarks(recipe):
        ending.explain(f"--init_from {path}: {remark}")


def remarks(recipe: Recipe) -> list[str]:
    """How a model of the recipe differs from the one that weights of the same shape were trained in."""
    model = recipe.model
    banded = [str(i) for i, window in enumerate(model.windows) if window is not None]
    if not banded:
        return []
    seen = f"{model.attention_window} of {recipe.sequence_length} positions (model.attention_window)"
    return [
        f"these weights were trained in dense layers, and layers {', '.join(banded)} are banded here: they "
        f"see {seen}, so the loss starts above that of the dense model"
    ]


def _problems(config: dict[str, Any], recipe: Recipe) -> list[str]:
    """Settings of a config.json that differ from the recipe's model."""
    form, model = form_of(recipe.model), recipe.model
    if config.get("model_type") != form.model_type:
        others = [f.layer_norm for f in FORMS[model.family] if f.model_type == config.get("model_type")]
        kind = model.family + (f" with model.layer_norm={model.layer_norm}" if form.layer_norm else "")
        fix = f"; add --set model.layer_norm={others[0]}" if others else ""
        came = f"is a model of type {config.get('model_type')!r}"
        return [f"{came}: only {form.model_type} can be given to model.family={kind}{fix}"]
    values = dict(flatten(recipe.model_dump()))
    found, fixes = [], []
    for key, (theirs, default) in form.shape.items():
        value, ours = config.get(theirs, default), values[key]
        if value != ours:
            found.append(f"{theirs}={value}, but the recipe's {key} is {ours}")
            fixes.append(f"--set {key}={value}")
            tokenizer = TOKENIZERS.get(value) if key == "model.vocab_size" else None
            if tokenizer and recipe.data.tokenizer.kind != tokenizer:
                fixes.append(f"--set data.tokenizer.kind={tokenizer}")
    if fixes:
        found[-1] += f"; to train a model of this shape add {' '.join(fixes)}"
    hidden, default = form.shape["model.hidden"]
    wide = 4 * config.get(hidden, default)
    width, standard = form.width
    inner = {width: (wide,) if standard else (wide, None)}
    for theirs, allowed in {**form.fixed, **inner}.items():
        value = config.get(theirs, standard if theirs == width else allowed[0])
        if value not in allowed:
            ours = f"our {form.model_type} has {allowed[0]}, and no switch"
            found.append(f"{theirs}={value}: {ours}; give other weights")
    return found
