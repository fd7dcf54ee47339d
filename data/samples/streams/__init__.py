"""Samples of what is tokenized while training. Neither their order nor a resume depends on the layout."""
