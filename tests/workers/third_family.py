"""Registers a third family, a GPT-2 with the exact GELU, then trains as any_layout.py does."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import any_layout

from launch.ranks import ending
from modeling import families, gpt2
from modeling.transformer import LayerShape
from recipes.families import FAMILIES, GPT2

NAME = "exact_gpt2"


class ExactShape(gpt2.GPT2Shape):
    """Its layers have another activation."""

    def layer_at(self, index: int) -> LayerShape:
        return replace(super().layer_at(index), tanh_gelu=False)


def shape_of(recipe, padded_vocab):
    return ExactShape(**vars(gpt2.shape_of(recipe, padded_vocab)))


def register() -> None:
    FAMILIES[NAME] = replace(GPT2, name=NAME, title="GPT-2 with the exact GELU")
    families.FAMILIES[NAME] = lambda: replace(gpt2.FAMILY, name=NAME, shape=shape_of)


if __name__ == "__main__":
    with ending.clean_exit():
        register()
        any_layout.main(Path(sys.argv[1]))
