"""Data sets of tasks: windows of tokens to score models on, and samples to fine-tune them on."""
