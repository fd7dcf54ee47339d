"""Tensor-parallel GPT-2 and BERT, plain and in a pipeline; their conversion to `transformers`; their cost.

`modeling.families` knows them all. Layers receive their process group; nothing fetches it. `modeling.cost`
and `modeling.formats.huggingface.config_forms` import neither torch nor deepspeed.
"""
