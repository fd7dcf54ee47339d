"""Tokens on disk, in the format of Megatron-LM's indexed datasets."""
