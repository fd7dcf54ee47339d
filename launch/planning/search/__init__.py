"""Which layout to take on given nodes, and the largest model that a node trains."""
