"""Values of "auto" for sizes: buckets, gathered parameters, the first loss scale."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ds_configs.findings import stated
from ds_configs.plan import Machine, Precision
from ds_configs.sections.recomputation import PARTITION, partitions
from recipes.layout import Layout
from recipes.schema import Recipe

# Elements of a bucket large enough that latency hardly counts in a GPU's collective.
_BUCKET = 50_000_000
# Bits by which the first loss scale exceeds 1, for one micro-batch.
_FIRST_SCALE = 16
# Number of ranks from which a sum in bf16 is off by half a percent or more.
_MANY_RANKS = 16


def sizes(
    recipe: Recipe, layout: Layout, machine: Machine, stage: int | None
) -> dict[str, Any]:
    """Return the values of "auto", by dotted key; sizes in elements.

    A bucket holds hidden^2 elements, at least 5e7, and at most a rank's parameters. Stage 2 frees gradients
    early, so its buckets hold the largest one: launch/deepspeed_fixes/freed_gradients.py says why. Stage 3
    keeps parameters below 10 hidden whole, as Hugging Face's integration does. It gathers the next layer,
    12 hidden^2 / tp, during the computation of one, and has room for three.
    """
    hidden = recipe.model.hidden
    tp = layout.tp
    layer = 12 * hidden * hidden // tp
    embedding = recipe.model.embedding_rows(tp) // tp * hidden
    own = _parameters(recipe, layout, layer, embedding)
    # the embedding, or an MLP matrix
    largest = max(embedding, 4 * hidden * hidden // tp)
    bucket = min(max(hidden * hidden, _BUCKET), own + own % 2)
    reduced = max(bucket, largest) if stage == 2 else bucket
    return {
        "zero_optimization.reduce_bucket_size": reduced,
        "zero_optimization.allgather_bucket_size": bucket,
        "zero_optimization.stage3_prefetch_bucket_size": layer,
        "zero_optimization.stage3_max_live_parameters": max(1_000_000_000, 3 * layer),
        "zero_optimization.stage3_max_reuse_distance": max(1_000_000_000, 3 * layer),
        "zero_optimization.stage3_param_persistence_threshold": 10 * hidden,
        # A CPU computes nothing while it copies a bucket.
        "zero_optimization.overlap_comm": machine.device.asynchronous,
        PARTITION: partitions(recipe, layout, machine),
        # DeepSpeed saves nothing
        "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
        "zero_optimization.offload_param.buffer_size": largest,  # any one parameter
        # DeepSpeed divides a loss by the accumulation before it scales it.
        "fp16.initial_scale_power": min(
            32, _FIRST_SCALE + math.ceil(math.log2(layout.accumulation))
        ),
    }


def sums(
    config: Mapping[str, Any], precision: Precision | None, layout: Layout
) -> dict[str, Any]:
    """Return the data types for sums of gradients over micro-batches and over ranks.

    bf16 has 8 bits: a sum of 512 gradients is off by 2 %, or by half if they agree in sign, since it stops
    growing at 256 times an addend. fp16 has 11, and a loss scale. For sums in fp32 DeepSpeed's stage 1
    takes another optimizer, whose sums are scattered in fp32 for the bytes of an all-reduce in bf16.
    """
    own = precision or "fp32"
    short = own == "bf16" and not stated(config, "bf16.bf16_master_weights_and_grads")
    summed = short and layout.accumulation > 1
    scattered = (
        summed
        and stated(config, "zero_optimization.stage") == 1
        and stated(config, "zero_optimization.offload_optimizer.device")
        in (None, "none")
    )
    return {
        "data_types.grad_accum_dtype": "fp32" if summed else own,
        "communication_data_type": "fp32"
        if scattered or short and layout.dp >= _MANY_RANKS
        else own,
    }


def _parameters(recipe: Recipe, layout: Layout, layer: int, embedding: int) -> int:
    """Estimate the parameters of a rank of the largest pipeline stage."""
    model = recipe.model
    layers = model.different_layers(math.ceil(model.layers / layout.pp))
    positions = recipe.positions * model.hidden
    return layers * (layer + 13 * model.hidden) + embedding + positions
