"""The fastest layout on given nodes, and the largest model for a node."""
