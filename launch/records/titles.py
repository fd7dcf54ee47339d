"""The title of a run: its family, its parameters and its data, as they are."""

from __future__ import annotations

from pathlib import Path

from launch.console.text_table import short
from modeling import cost
from recipes.schema import Data, Recipe

PACKAGED = "the State of the Union addresses"


def title_of(recipe: Recipe) -> str:
    """Return the title of what a recipe trains, such as "GPT-2 of 14M parameters on my.txt"."""
    parameters = cost.parameters(recipe.model, recipe.positions)
    data = " + ".join(_named(*text) for text in texts(recipe.data))
    task = recipe.task
    if task is not None:
        from recipes.tasks import TASKS

        data = TASKS[task.name].title.partition(",")[0]
        if task.train:
            data = f"{Path(task.train).name} ({data})"
    return f"{recipe.model.facts.title} of {short(parameters)} parameters on {data}"


def texts(data: Data) -> list[tuple[str, str | None]]:
    """Return the source and the name of each text: the same lists are the same text."""
    return [(origin.source, origin.name) for origin in data.origins]


def _named(source: str, name: str | None) -> str:
    """Name a text: data sets of the hub in full, files and folders without the way to them."""
    if source == "hub" or name is None:
        return name or PACKAGED
    return Path(name).name
