"""Documents in, batches out: sources, vocabularies, token files, samples and the loader.

`build(recipe)` gives a `Corpus`; `loader.StepBatches(corpus.train, recipe.seed, layout, dp_rank)` its batches.
"""

from data import loader
from data.corpus import Corpus, build

__all__ = ["Corpus", "build", "loader"]
