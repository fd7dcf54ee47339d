"""Predictions of published rows, and their errors."""
