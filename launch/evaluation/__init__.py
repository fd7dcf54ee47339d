"""Evaluation of trained models: scores, fine-tuning, generated text."""
