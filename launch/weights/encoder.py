"""The model of a given encoder, for a recipe that fine-tunes it."""

from __future__ import annotations

from typing import NoReturn

from launch.weights.foreign_weights import MegatronWeights
from launch.weights.initial_weights import LARGEST, SAVED, SHARED, GivenModel, InitialWeights, shown
from modeling.formats.huggingface.config_forms import family_of
from recipes.families import FAMILIES
from recipes.problems import Problem


def encoder_in(weights: InitialWeights) -> GivenModel:
    """Read the model of weights of `save_pretrained` or of a run, for a recipe with its shape.

    Raises ProblemsError if it is none of our models.
    """
    saved = weights.saved()
    fix = "give a run with a checkpoint, or a directory that save_pretrained or export_hf.py wrote"

    def refuse(came: str, rule: str, fix: str) -> NoReturn:
        raise weights.error([Problem(weights.key, came, rule, fix)])

    if isinstance(saved, MegatronWeights):
        rule = "weights of Megatron say nothing of their vocabulary"
        refuse(
            "is a checkpoint of Megatron", rule, "pretrain from it with --init_from, and fine-tune that run"
        )
    config = saved.config(None)
    known = {form.model_type: form for forms in saved.forms.values() for form in forms}
    form = known.get(str(config.get("model_type")))
    if form is None or not FAMILIES[family_of(form)].masked:
        came = f"is a model of type {shown(config.get('model_type'))}"
        refuse(came, "heads for tasks stand on a BERT", fix)
    sizes = {key: config.get(theirs, default) for key, (theirs, default) in form.shape.items()}
    if odd := [key for key, size in sizes.items() if type(size) is not int or not 0 < size <= LARGEST]:
        came = f"{form.says} {', '.join(f'{form.shape[key][0]}={shown(sizes[key])}' for key in odd)}"
        refuse(came, "sizes are whole numbers", SAVED)
    return GivenModel(form, sizes, config.get(SHARED, False))
