"""Scoring a trained model: perplexity and cloze accuracy, under any layout."""
