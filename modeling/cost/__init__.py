"""Arithmetic of a model: parameters, operations and bytes, from only the recipe's shape.

Symbols, as in the literature: L layers, h hidden, S tokens per sample, P predicted tokens per sample of a
BERT, B samples per optimizer step, V vocabulary (padded where said), t tensor-parallel degree, N_d
data-parallel degree. A multiply-add counts as two operations.

Imports neither torch nor deepspeed, so that planning is instant and runs anywhere. Only a model by its config
(model.config) is counted by torch.
"""

# ruff: noqa: F401 # the names of this package
from modeling.cost.operation_count import (
    equal_stages,
    exact_flops_per_step,
    exact_tflops,
    operations_of,
    pairs,
    published_tflops,
    stages_by_time,
    stages_of,
    tflops,
)
from modeling.cost.parameter_count import (
    head_outputs,
    hidden_matrices,
    parameters,
    parameters_per_rank,
)
from modeling.cost.state_bytes import (
    FP32,
    MIXED,
    MUON_AT_ONCE,
    Place,
    PlacedStates,
    Places,
    StateBytes,
    Widths,
    placed_state_bytes,
    sharded_bytes,
)
