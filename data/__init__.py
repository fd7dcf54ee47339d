"""Documents in, batches out: sources, vocabularies, token stores, samples and the loader.

`corpus.build(recipe)` gives a `Corpus`; `loader.StepBatches(corpus.train, recipe.seed, layout, dp_rank)` its
batches. Importing the package imports nothing, so that worker processes of `data.prepare` start without
torch.
"""
