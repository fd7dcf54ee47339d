"""The recipe, the DeepSpeed JSON and the initial weights of a run, as its directory records them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_configs.findings import FOLDER
from launch.records.directory import RunDirectory
from recipes import catalog
from recipes.catalog import NamedRecipe
from recipes.schema import Recipe


@dataclass(frozen=True)
class RecordedRun:
    """What another start takes from a run.

    Attributes:
        path: its directory.
        named: its recipe with every value.
        original: the same before --tiny, --set and --steps.
        name: of the recipe, table/row, without the mark of --tiny.
        ds_config: its DeepSpeed JSON, as --ds_config takes it.
        initial_weights: as `RunFacts` has them.
        command: of its newest launch; (): none is recorded.
    """

    path: Path
    named: NamedRecipe
    original: Recipe
    name: str
    tiny: bool
    ds_config: str
    initial_weights: Mapping[str, Any] | None
    command: tuple[str, ...] = ()

    @property
    def recipe(self) -> Recipe:
        return self.named.recipe

    @classmethod
    def read(cls, path: Path, flag: str) -> RecordedRun:
        """Read a run directory, which `flag` names. Raises ProblemsError."""
        return cls.of(RunDirectory(path).named_recipe(flag))

    @classmethod
    def of(cls, named: NamedRecipe) -> RecordedRun:
        """Read the rest of the directory of a run's recipe. Raises ProblemsError."""
        path = Path(named.name)
        at = RunDirectory(path)
        original = named.recipe
        if at.original_yaml.is_file():
            original = catalog.load_resolved(at.original_yaml)
        launches = at.launches()
        launch = launches[-1] if launches else None
        given = next(at.ds_config_given.glob("*.json"), at.ds_config_json)
        ours = FOLDER / given.name
        same = ours.is_file() and ours.read_bytes() == given.read_bytes()
        weights = (each.initial_weights for each in launches if each.initial_weights)
        return cls(
            path,
            named,
            original,
            name=launch.row if launch else path.name,
            tiny=launch is not None and launch.tiny,
            ds_config=ours.stem if same else str(given),
            initial_weights=next(weights, None),
            command=launch.command if launch else (),
        )
