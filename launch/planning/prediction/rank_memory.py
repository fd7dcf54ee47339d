"""Memory of a rank of each pipeline stage, in bytes by category, at a step's fullest moment."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from launch.planning.prediction.constants import Constants
from launch.planning.prediction.hardware import GIB, Gpu
from launch.planning.prediction.software import OURS
from launch.planning.prediction.workload import Workload
from modeling import cost

Moment = Literal["backward pass", "optimizer step"]
AVERAGED_AT_ONCE = 5e8  # elements; DeepSpeed 0.19.8, MEMORY_OPT_ALLREDUCE_SIZE
# Bytes of a process that has imported torch and DeepSpeed without CUDA, measured by getrusage.
IMPORTED = 0.4e9
NOT_IN_THE_TOTAL = ("stage", "moment", "host", "nvme")


@dataclass(frozen=True)
class RankMemory:
    """Bytes on a rank of pipeline stage `stage` at the fullest moment of a step.

    Attributes:
        weights, gradients, optimizer: model states; the optimizer's with its fp32 master weights.
        buffers: DeepSpeed's communication buffers, and parameters gathered by stage 3.
        activations: numbers kept for the backward pass of all micro-batches in flight.
        working: a recomputed chunk of layers, and gradients of a layer's backward pass; a round of Muon's step.
        logits: logits and loss, on the last stage.
        fragmentation: reserved by torch's allocator and not allocated; given back where memory runs short.
        context: memory of CUDA and the communication library, which torch does not report as reserved.
        host, nvme: bytes outside the GPU.
    """

    stage: int
    moment: Moment
    weights: float
    gradients: float
    optimizer: float
    buffers: float
    activations: float
    working: float
    logits: float
    fragmentation: float
    context: float
    host: float
    nvme: float

    @property
    def on_gpu(self) -> dict[str, float]:
        """Bytes by category on the GPU; their sum is the total."""
        every = vars(self).items()
        return {name: size for name, size in every if name not in NOT_IN_THE_TOTAL}

    @property
    def total(self) -> float:
        """Bytes on the GPU, with all that torch would reserve."""
        return sum(self.on_gpu.values())

    @property
    def allocated(self) -> float:
        """Bytes of tensors on the GPU: the most that torch reports as allocated."""
        return self.reserved - self.fragmentation

    @property
    def reserved(self) -> float:
        """Bytes of tensors and of what torch's allocator keeps for later ones, where the GPU has room."""
        return self.total - self.context

    @property
    def least(self) -> float:
        """Bytes without which it runs out of memory: the allocator gives back what no tensor uses."""
        return self.allocated + self.context

    @property
    def states(self) -> float:
        """Bytes of model states on the GPU."""
        return self.weights + self.gradients + self.optimizer

    def cached(self, memory: float) -> float:
        """Return the most bytes reported by torch as cached (reserved) on a GPU of `memory` bytes."""
        return min(self.reserved, memory - self.context)


def of_stages(work: Workload, gpu: Gpu, constants: Constants) -> list[RankMemory]:
    """Predict a rank of each pipeline stage; all data and tensor ranks of a stage hold as much."""
    return [of_stage(work, stage, gpu, constants) for stage in range(work.layout.pp)]


def of_ends(work: Workload, gpu: Gpu, constants: Constants) -> list[RankMemory]:
    """Predict a rank of the first stages and of the last one; those between are like the second."""
    pp = work.layout.pp
    stages = sorted({0, 1, pp - 1} & {*range(pp)})
    return [of_stage(work, stage, gpu, constants) for stage in stages]


def fullest_rank(work: Workload, gpu: Gpu, constants: Constants) -> RankMemory:
    """Predict a rank of the fullest stage."""
    return max(of_ends(work, gpu, constants), key=lambda rank: rank.total)


def of_stage(work: Workload, stage: int, gpu: Gpu, constants: Constants) -> RankMemory:
    """Predict a rank of one stage at the fuller of two moments.

    In the backward pass all activations are held, in the optimizer's step the gradients that it takes.
    """
    placed, computing = _states(work, stage)
    kept, working, logits = _activations(work, stage)
    backward = RankMemory(
        stage=stage,
        moment="backward pass",
        weights=placed.weights.gpu,
        gradients=computing,
        optimizer=placed.optimizer.gpu,
        buffers=_buffers(work, stage),
        activations=kept.gpu,
        working=working,
        logits=logits,
        fragmentation=0.0,
        context=gpu.context_gib * GIB,
        host=placed.total.host + kept.host,
        nvme=placed.total.nvme,
    )
    update = replace(
        backward,
        moment="optimizer step",
        gradients=placed.gradients.gpu,
        activations=0.0,
        working=muon_bytes(work, stage) if work.muon else 0.0,
        logits=0.0,
    )
    rank = max(backward, update, key=lambda each: each.total)
    return replace(rank, fragmentation=constants.fragmentation * rank.allocated)


def _states(work: Workload, stage: int) -> tuple[cost.PlacedStates, float]:
    """Return the model states during the update, and the bytes of gradients in the backward pass."""
    parameters = work.parameters_of(stage)
    software = work.software
    dp = work.layout.dp
    share = parameters / (dp if work.zero_stage >= 2 else 1)
    if software.states:
        widths = cost.FP32 if work.precision == "fp32" else software.states
        placed = cost.placed_state_bytes(parameters, work.zero_stage, dp, widths=widths)
        stepped = (
            widths.gradient if work.precision == "fp32" else software.step_gradients
        )
        gradients = placed.gradients._replace(gpu=stepped * share)
        return replace(placed, gradients=gradients), widths.gradient * share
    placed = cost.placed_state_bytes(
        parameters,
        work.zero_stage,
        dp,
        widths=work.widths_of(stage),
        places=cost.Places(work.optimizer_at, work.weights_at),
        accumulates=work.layout.accumulation > 1,
        sub_group=work.sub_group,
    )
    # Those of a micro-batch, before they are added to sums in fp32; stages 2 and 3 do that bucket by bucket.
    fresh = work.width * parameters if sums_whole_gradients(work) else 0.0
    # its gradients are in fp32 throughout (deepspeed_fixes/zero0)
    if work.zero_stage == 0:
        return placed, placed.gradients.gpu + fresh
    stays = work.optimizer_at == "gpu" or work.zero_stage == 1
    return placed, work.widths.gradient * share + fresh if stays else 0.0


def muon_bytes(work: Workload, stage: int) -> float:
    """Return the most bytes that Muon's step takes beside the states (launch/deepspeed_fixes/muon.py).

    18 h^2 numbers for an MLP matrix: its pieces, these joined, its iterate twice, and two Gram matrices. Of a
    round what a rank sends and gets is there twice; a round has at least one matrix.
    """
    tp = work.layout.tp
    dp = work.layout.dp
    square = work.model.hidden**2
    numbers = 18.0 * square
    if dp * tp > 1:
        matrices = cost.hidden_matrices(work.model, work.layers_of(stage), tp)
        sent = matrices / dp if work.zero_stage else matrices
        most = max(cost.MUON_AT_ONCE, 8 * square / tp)
        numbers += 2 * min(sent + matrices / dp, most)
    return work.width * numbers


def _buffers(work: Workload, stage: int) -> float:
    """Return the bytes of ZeRO's buckets and gathered parameters."""
    parameters = work.parameters_of(stage)
    buffers = work.buffers
    if work.zero_stage == 1 and sums_whole_gradients(work):
        # DeepSpeed's BF16_Optimizer: copies of what is averaged at once, in fp32 and in bf16. Ours has none.
        copied = work.layout.dp > 1 and work.software is not OURS
        return min(parameters, AVERAGED_AT_ONCE) * (4 + work.width) if copied else 0.0
    gathered = 0.0
    if work.zero_stage == 3:
        # Two layers: the computed one, and the next, gathered ahead.
        one = cost.parameters_per_rank(
            work.model,
            work.positions,
            work.padded_vocab,
            work.layout.tp,
            layers=1,
            first=False,
            last=False,
        )
        gathered = min(parameters, buffers.live) if buffers.live else 2 * one
    return work.width * (buffers.reduce + gathered)


def sums_whole_gradients(work: Workload) -> bool:
    """Check whether a rank sums all gradients in fp32 but computes them in half precision."""
    return (
        work.zero_stage <= 1
        and work.width < work.widths.gradient
        and work.software.states is None
    )


def _activations(work: Workload, stage: int) -> tuple[cost.StateBytes, float, float]:
    """Return the bytes kept over a stage, at work in one layer, and of logits."""
    layer = work.activations
    layers = work.layers_of(stage)
    flights = work.in_flight(stage)
    chunk = work.recomputed
    if chunk:
        kept = layer.stream * -(-layers // chunk) * flights
        if work.cuts_checkpoints and not work.sequence_parallel:
            kept /= work.layout.tp
        working = layer.kept * min(chunk, layers) + layer.transient
    else:
        again = layer.kept_scores * (work.selective and layer.keeps_scores)
        kept = (layer.kept - again) * layers * flights
        working = layer.transient + again
    logits = ends = 0.0
    if stage == work.layout.pp - 1:
        # A pipeline's engine holds the output as well.
        each = work.software.logit_bytes + (work.width if work.layout.pp > 1 else 0)
        logits = work.logits * each
        ends += 2 * layer.stream  # the last norm's output and input
    if stage == 0:
        ends += layer.stream * flights  # the embedding's output before dropout
    # While the loss is at its fullest no layer is at work yet.
    working, logits = (working, 0.0) if working >= logits else (0.0, logits)
    away = kept if work.checkpoints_at == "host" else 0.0
    return cost.StateBytes(kept - away + ends, away, 0.0), working, logits


def resident(work: Workload, rank: RankMemory) -> RankMemory:
    """Convert to a rank without a GPU: host memory, counted once it is written to.

    What is offloaded lies there too, and of a reduction's bucket the gradients that are in it. No allocator
    keeps what nothing uses.
    """
    written = work.width * work.parameters_of(rank.stage)
    if work.zero_stage == 3:
        written *= 2
    return replace(
        rank,
        optimizer=rank.optimizer + rank.host,
        buffers=min(rank.buffers, written),
        fragmentation=0.0,
        context=IMPORTED,
        host=0.0,
    )
