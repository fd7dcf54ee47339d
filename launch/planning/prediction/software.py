"""Training systems: their memory and time besides the arithmetic common to all.

Ours is read off `modeling/`; the others' properties off their public code of the time, as the comments of
`software.yaml` next to this file say. They let published rows be predicted as their authors ran them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import yaml
from pydantic import TypeAdapter

from modeling.cost import Widths


@dataclass(frozen=True)
class Passes:
    """Memory traffic of a layer's forward pass between its matrix products.

    Attributes:
        whole: of w b S h, done in full by every tensor rank: norms, bias, dropout and the residual sums.
        cut: of w b S h, of which a tensor rank does 1/t: copies of queries, keys, values and context, and
            GELU with its bias, on 4 h.
        scores: of w a b S^2 / t, where a system keeps its scores: scale, mask, softmax, dropout.
        kernels: started by the host.
    """

    whole: float
    cut: float
    scores: float
    kernels: int


@dataclass(frozen=True)
class Software:
    """A training system.

    Attributes:
        passes_of_bert: whose GELU by erf is one kernel, which keeps its input alone; None: the same.
        keeps_scores: attention keeps its S x S scores for the backward pass.
        gelu_copies: tensors of 4 h that the GELU's backward pass needs besides its input.
        logit_bytes: bytes per logit at the fullest moment of the loss.
        dropout_bytes: of a dropout of the residual stream while it is computed, per element.
        states: bytes per number of the model states where DeepSpeed does not place them; None: DeepSpeed's.
        step_gradients: bytes per parameter of gradients during the optimizer's step, where `states` is given.
        update_kernels: started for each parameter tensor of a rank's share, from gradients to new weights; 1:
            as good as none. DeepSpeed's: to the bucket, the norm and its sum, three to find an overflow.
        update_bytes: moved by the optimizer's step per parameter, in mixed precision.
        predicts_everywhere: a BERT's logits are computed at all positions, not only at the masked ones.
        overlaps_gradients: gradients are averaged over data-parallel ranks while the backward pass runs.
        overlaps_weights: so are the weights that ZeRO-1 and -2 gather, while the forward pass runs.
        cuts_boundaries: tensor ranks send 1/t each of what goes to the next pipeline stage.
        balances_stages: a last stage whose output layer takes longer than a layer has fewer layers.
    """

    __pydantic_config__ = {"extra": "forbid"}

    name: str
    passes: Passes
    passes_of_bert: Passes | None = None
    keeps_scores: bool = False
    gelu_copies: int = 0
    logit_bytes: float = 14
    dropout_bytes: float = 1
    states: Widths | None = None
    step_gradients: float = 0.0
    update_kernels: int = 1
    # Norm, unscaling, master weight and two moments read and written, weight written.
    update_bytes: float = 42
    predicts_everywhere: bool = True
    overlaps_gradients: bool = False
    overlaps_weights: bool = False
    cuts_boundaries: bool = False
    balances_stages: bool = False


_READ = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())["systems"]
SYSTEMS = {
    each.name: each for each in TypeAdapter(list[Software]).validate_python(_READ)
}
OURS = SYSTEMS["megarecipes"]


def as_it_runs(name: str, *, masked: bool) -> Software:
    """Return a training system as it runs a BERT (`masked`) or a GPT."""
    system = SYSTEMS[name]
    if masked and system.passes_of_bert:
        return replace(system, passes=system.passes_of_bert, gelu_copies=0)
    return system
