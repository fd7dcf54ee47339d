"""Data sets of tasks: evaluation and fine-tuning."""
