"""The length of a pretraining that is said in epochs of its text."""

from __future__ import annotations

import math
from bisect import bisect_left

from data.durable_files import Say
from recipes.problems import ProblemsError
from recipes.schema import Recipe


def steps_of(recipe: Recipe, epochs: float, say: Say) -> int:
    """Return the steps that read the training samples so often; the last one may read a few more.

    Makes the samples, or opens them in the cache. `say`: prints a line of progress. Raises ProblemsError: no
    epoch of the text has an end.
    """
    from data.corpus import build

    data = recipe.data
    if data.blend or data.streamed:
        raise ProblemsError.of(
            "--epochs",
            f"--epochs {epochs:g} of a {'blend' if data.blend else 'stream'}",
            "only one text that is not streamed has epochs",
            "write --set steps=N",
        )
    samples = build(recipe, say=say).summary["samples_per_epoch"]
    wanted = math.ceil(epochs * samples)
    steps = bisect_left(range(wanted), wanted, key=recipe.sizes.samples)
    say(f"--epochs {epochs:g}: {steps:,} steps for {samples:,} samples an epoch")
    return steps
