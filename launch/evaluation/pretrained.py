"""The pretraining run of a fine-tuned encoder: RUN/pretrained.json, read by reports."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from data.durable_files import write_json
from launch.records.directory import RunDirectory
from recipes import catalog, files
from recipes.families import FAMILIES, OF_CONFIG
from recipes.key_paths import PRETRAINED, changes
from recipes.problems import Problem, RecipeError
from recipes.schema import Recipe

if TYPE_CHECKING:
    from launch.weights.starting_model import StartingModel

NAME = "pretrained.json"  # in the directory of a fine-tuning run


@dataclass(frozen=True)
class Pretrained:
    """The pretraining run of an encoder's weights.

    Attributes:
        directory: of the checkpoint.
        recipe: table/row as the user named it.
        step, steps: of the checkpoint; of the whole run by its recipe.
        changed: decisive keys that differ from the row's; None: the row cannot be read.
    """

    directory: str
    recipe: str
    tiny: bool
    step: int
    steps: int
    changed: tuple[str, ...] | None


_FORM = TypeAdapter(Pretrained)


def encoder_in(given: StartingModel) -> tuple[dict[str, Any], Path]:
    """Return the model of given weights for a recipe that fine-tunes it, and its vocabulary's directory.

    Raises ProblemsError if the model is none of our BERTs, or has no vocabulary.
    """
    from launch.weights.initial_weights import shown

    model = given.model()
    if model.form.family in OF_CONFIG:
        raise given.error(
            Problem(
                given.key,
                "is a run of a model by its config (model.config)",
                "heads for tasks stand on our own BERT here",
                "export it with launch/export_hf.py, and fine-tune the export with transformers",
            )
        )
    if not FAMILIES[model.form.family].masked:
        raise given.error(
            Problem(
                given.key,
                f"is a model of type {shown(model.form.model_type)}",
                "heads for tasks stand on a BERT",
                "give a run with a checkpoint, or a directory that save_pretrained or export_hf.py wrote",
            )
        )
    if given.tokenizer is None:
        raise given.error(
            Problem(
                given.key,
                "holds no vocabulary",
                fix="pretrain from it with --init_from, and fine-tune that run",
            )
        )
    return model.model_values, Path(given.tokenizer).resolve()


def pretrained_in(weights: str) -> Pretrained | None:
    """Return the pretraining run of the weights in a directory; None if unknown or without one."""
    from launch.weights.foreign_weights import RunWeights, saved_in

    saved = saved_in(weights)
    if not isinstance(saved, RunWeights):
        return None
    checkpoint = saved.checkpoint
    run = RunDirectory.around(checkpoint.directory)
    launch = None
    with contextlib.suppress(ValueError, OSError):
        launch = run and run.newest_launch()
    if not launch:
        return None
    return Pretrained(
        str(checkpoint.directory.resolve()),
        launch.row,
        launch.tiny,
        checkpoint.step,
        saved.recipe.steps,
        changed_from_row(launch.row, saved.recipe),
    )


def changed_from_row(name: str, recipe: Recipe) -> tuple[str, ...] | None:
    """Return the decisive keys that differ from the row of that name; None if it cannot be read."""
    try:
        row = catalog.load(name)
    except RecipeError:
        return None
    changed = changes(row, recipe, PRETRAINED, stated=True)
    return tuple(key for key, _, _ in changed)


def keep(run: Path, pretrained: Pretrained) -> None:
    write_json(run / NAME, asdict(pretrained), indent=2)


def read(run: Path) -> Pretrained | None:
    """Read the pretraining run of a fine-tuning run; None without one. Raises FileError."""
    path = run / NAME
    if not path.exists():
        return None
    return files.checked(_FORM, files.read_json_object(path), path)
