"""Samples of token stores and of streams: windows of GPT, masked segments of BERT, and blends."""
