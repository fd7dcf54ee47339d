"""The title of a run: its family, its parameters and its data, as they are."""

from __future__ import annotations

from pathlib import Path

from launch.console.text_table import short
from modeling import cost
from recipes.schema import Data, Model, Recipe

PACKAGED = "the State of the Union addresses"


def title_of(recipe: Recipe) -> str:
    """Return the title of what a recipe trains, such as "GPT-2 of 14M parameters on my.txt"."""
    parameters = cost.parameters(recipe.model, recipe.positions)
    named = []
    for source, name in texts(recipe.data):
        text = name or PACKAGED
        # data sets of the hub in full, files and folders without the way to them
        named.append(text if source == "hub" else Path(text).name)
    data = " + ".join(named)
    task = recipe.task
    if task is not None:
        from recipes.tasks import TASKS

        data = TASKS[task.name].title.partition(",")[0]
        if task.train:
            data = f"{Path(task.train).name} ({data})"
    return f"{kind_of(recipe.model)} of {short(parameters)} parameters on {data}"


def kind_of(model: Model) -> str:
    """Name the family of a model, and the type of one by its config."""
    title = model.facts.title
    return f"{title} ({model.config['model_type']})" if model.config else title


def texts(data: Data) -> list[tuple[str, str | None]]:
    """Return the source and the name of each text: the same lists are the same text."""
    return [(origin.source, origin.name) for origin in data.origins]
