"""Samples of what is tokenized while training, with an order and a resume that do not depend on the layout."""
