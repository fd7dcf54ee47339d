"""What is to be measured."""

from __future__ import annotations

from dataclasses import dataclass

from recipes import catalog
from recipes.schema import Recipe


@dataclass(frozen=True)
class Specification:
    """One measured system: a recipe, a DeepSpeed JSON, and the training code.

    Attributes:
        name: title in tables.
        system: name of the training code: "ours", "transformers", "bare", "nano" or "rate".
        settings: changes of the recipe, as for --set.
        compiled: by torch.compile.
    """

    name: str
    system: str
    recipe: str
    settings: tuple[str, ...] = ()
    tiny: bool = False
    ds_config: str = "zero1"
    compiled: bool = False

    def load(self) -> Recipe:
        """Load the recipe. Raises ValueError."""
        return catalog.load(self.recipe, self.settings, tiny=self.tiny)
