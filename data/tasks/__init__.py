"""Data sets of tasks: what models are scored on, as windows of tokens, and fine-tuned on, as samples."""
