"""Predictions of published rows, and how wrong they are."""
