"""What one measured system is, as the process that measures it is told."""

from __future__ import annotations

from dataclasses import dataclass

from recipes import catalog
from recipes.schema import Recipe


@dataclass(frozen=True)
class Specification:
    """One system: a recipe, a DeepSpeed JSON, and who trains it.

    Attributes:
        name: for tables.
        system: key of `worker.SYSTEMS`.
        settings: of the recipe, as --set has them.
        ds_config: None: the recipe's own.
        compiled: by torch.compile.
        processes: ranks on this machine.
        shared_device: all ranks on one GPU, through gloo.
        threads: of torch on each rank's cores; None: the cores are shared by the ranks.
    """

    name: str
    system: str
    recipe: str
    settings: tuple[str, ...] = ()
    tiny: bool = False
    ds_config: str | None = None
    compiled: bool = False
    processes: int = 1
    threads: int | None = None
    emulate_fp16: bool = False
    shared_device: bool = False

    def load(self) -> Recipe:
        """Its recipe. Raises ValueError."""
        return catalog.load(self.recipe, self.settings, tiny=self.tiny)
