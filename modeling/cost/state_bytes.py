"""Bytes of model states (weights, gradients, optimizer) under each ZeRO stage and offload target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Place = Literal["gpu", "host", "nvme"]
# elements, about, of matrices that a rank sends and gets in one round of Muon's step
MUON_AT_ONCE = 2**26


class StateBytes(NamedTuple):
    """Bytes of one process's model states in each place."""

    gpu: float
    host: float
    nvme: float


class Widths(NamedTuple):
    """Bytes of one number of each kind of model state."""

    weight: int = 2
    gradient: int = 2  # while it is accumulated
    master: int = 4  # the optimizer's copy of a weight, and its gradient
    moment: int = 4
    moments: float = 2  # of Adam and LAMB; on average over the parameters

    @property
    def saved(self) -> float:
        """Bytes of a parameter in a checkpoint: weight and moments of the optimizer, shared over ranks."""
        return self.master + self.moments * self.moment

    def of_muon(self, parameters: float, matrices: float) -> Widths:
        """Return the widths of Muon's states: `matrices` of the `parameters` have one moment."""
        return self._replace(moments=2 - matrices / parameters)


class Places(NamedTuple):
    """Places of the optimizer states with the step, and of stage 3's weights."""

    optimizer: Place = "gpu"
    weights: Place = "gpu"


ON_GPU = Places()
MIXED = Widths()
FP32 = Widths(weight=4, gradient=4)


@dataclass(frozen=True)
class PlacedStates:
    """Bytes of each kind of model state of one process, by place, during the optimizer's step."""

    weights: StateBytes
    gradients: StateBytes
    optimizer: StateBytes

    @property
    def total(self) -> StateBytes:
        """All kinds together."""
        kinds = (self.weights, self.gradients, self.optimizer)
        return StateBytes(*(sum(places) for places in zip(*kinds, strict=True)))


def placed_state_bytes(
    parameters: float,
    zero_stage: int,
    dp: int,
    *,
    widths: Widths = MIXED,
    places: Places = ON_GPU,
    accumulates: bool = False,
    sub_group: float = 1e9,
) -> PlacedStates:
    """Return the bytes of model states by place at a step's fullest moment, when Adam gets fp32 gradients.

    Nothing offloaded: ZeRO-0 in half precision holds all gradients in fp32 until the step is done
    (launch/deepspeed_fixes/zero0.py), in place of those in half precision: 18 bytes per parameter. Stages 1
    and 2 replace those of the rank's partition: w + max(g, 4 / N_d) + 12 / N_d. Stage 3 adds them for one
    sub-group of `sub_group` elements after the other.

    Optimizer offloaded (ZeRO-Offload, arXiv 2101.06840, section 4; DeepSpeed 0.19.8): the host holds the
    partition's 12 bytes of optimizer states and 4 of fp32 gradients, 16, which is what deepspeed's
    estimate_zero2_model_states_mem_needs counts. The code holds one more copy of the partition in the
    precision of training, which makes 18: stages 1 and 2 (stage_1_and_2.py) copy the weights on their way to
    the GPU, and with gradient accumulation the gradients as well; stage 3 (stage3.py) copies the gradients.
    The weights stay on the GPU. NVMe takes the 16 bytes; the copy stays on the host. Staging buffers of a
    bucket or of a parameter come on top.

    These are the bytes of mixed precision; `widths` may have others.

    Args:
        accumulates: more than one micro-batch per step.
        sub_group: zero_optimization.sub_group_size, elements.
    """
    optimizer, weights = places
    assert optimizer == "gpu" or zero_stage >= 1, (
        "only sharded optimizer states are offloaded"
    )
    assert weights == "gpu" or zero_stage == 3, "only sharded weights are offloaded"
    weight, gradient, states = sharded_bytes(parameters, zero_stage, dp, widths)
    share = parameters / dp if zero_stage else parameters
    if optimizer != "gpu":
        copies = 2 if accumulates and zero_stage < 3 else 1
        stays = gradient if zero_stage == 1 else 0.0
        gradients = StateBytes(stays, widths.weight * share * copies, 0.0)
        stepped = _at(optimizer, states + widths.master * share)
    elif zero_stage == 3:
        gradients = _at("gpu", gradient + widths.master * min(share, sub_group))
        stepped = _at("gpu", states)
    else:
        gradients = _at("gpu", max(gradient, widths.master * share))
        stepped = _at("gpu", states)
    return PlacedStates(_at(weights, weight), gradients, stepped)


def _at(place: Place, size: float) -> StateBytes:
    return StateBytes(**{"gpu": 0.0, "host": 0.0, "nvme": 0.0, place: size})


def sharded_bytes(
    parameters: float, zero_stage: int, dp: int, widths: Widths = MIXED
) -> tuple[float, float, float]:
    """Return the bytes of a rank's weights, gradients and optimizer states between steps, without offload.

    Rajbhandari et al., arXiv 1910.02054, section 3.1: mixed precision keeps 2 bytes of weight, 2 of gradient
    and K = 12 of optimizer states (fp32 weight, momentum, variance) per parameter; fp32 keeps 4, 4 and 8 (the
    weight is its own master), and under DeepSpeed's ZeRO 4, 4 and 12, since its optimizer steps a copy of the
    weights in fp32 as well. ZeRO stage 1 divides the optimizer states by N_d, stage 2 the gradients too,
    stage 3 the weights too. Other `widths`: DeepSpeed's half-precision states, and gradients in fp32.
    """
    assert zero_stage in (0, 1, 2, 3), f"no such ZeRO stage: {zero_stage}"
    copied = zero_stage > 0 or widths.weight < widths.master
    optimizer = widths.moments * widths.moment + (widths.master if copied else 0)
    ranks = [dp if zero_stage >= least else 1 for least in (3, 2, 1)]
    sizes = (widths.weight, widths.gradient, optimizer)
    weights, gradients, states = (
        parameters * size / n for size, n in zip(sizes, ranks, strict=True)
    )
    return weights, gradients, states
