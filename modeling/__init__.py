"""Tensor-parallel GPT-2, its pipeline form, conversion to and from `transformers`, and cost arithmetic.

Layers receive their process group; nothing fetches it. `modeling.cost` imports neither torch nor deepspeed.
"""
