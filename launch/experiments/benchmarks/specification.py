"""Specification of one measured system, passed to the process that measures it."""

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
        ds_config: None: the recipe's own.
        compiled: by torch.compile.
        processes: ranks on this machine.
        shared_device: all ranks on one GPU, through gloo.
        threads: torch threads of each rank; None: the ranks share the cores.
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
        """Load the recipe. Raises ValueError."""
        return catalog.load(self.recipe, self.settings, tiny=self.tiny)
