"""Searches for the fastest layout on given nodes, and for the largest model."""
