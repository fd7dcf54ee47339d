"""An optimizer step for the planner: model, layout, precision, training system."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ds_configs.plan import Plan, Precision
from launch.machine.memory import places_of, state_widths
from launch.planning.prediction.software import OURS, SYSTEMS, Software, as_it_runs
from modeling import cost
from modeling.cost.activation_bytes import LayerActivations
from recipes.layout import Layout
from recipes.schema import Dropout, Model


@dataclass(frozen=True)
class Buffers:
    """Elements of the communication buffers of DeepSpeed's ZeRO.

    Attributes:
        reduce: gradients on their way to other ranks, over all such buffers.
        live: most gathered parameters of stage 3, including those gathered ahead.
    """

    reduce: float = 0.0
    live: float = 0.0


@dataclass(frozen=True)
class Workload:
    """The computation, memory and traffic of a step.

    Attributes:
        predictions: P of a BERT; None: logits at every position.
        recomputed: layers per recomputed chunk; 0: none.
        selective: only attention's scores are recomputed (Korthikanti et al. 2022, section 5).
        sequence_parallel: the residual stream is cut over tensor ranks (there, section 4.2.2).
        interleave: chunks of layers per pipeline stage (Narayanan et al. 2021, section 2.2); 1: plain 1F1B.
        muon: it steps the layers' matrices.
        optimizer_at, weights_at: place of the optimizer's states and step, and of stage 3's weights.
        checkpoints_at: place of the inputs of recomputed chunks.
        cuts_checkpoints: each tensor rank keeps 1/t of them.
    """

    model: Model
    dropout: Dropout
    sequence_length: int
    predictions: int | None
    padded_vocab: int
    layout: Layout
    precision: Precision
    recomputed: int
    zero_stage: int
    software: Software = OURS
    widths: cost.Widths = cost.MIXED
    optimizer_at: cost.Place = "gpu"
    weights_at: cost.Place = "gpu"
    checkpoints_at: cost.Place = "gpu"
    cuts_checkpoints: bool = False
    sub_group: float = 1e9
    buffers: Buffers = Buffers()
    overlaps_gradients: bool = False
    selective: bool = False
    sequence_parallel: bool = False
    interleave: int = 1
    muon: bool = False

    @property
    def width(self) -> int:
        """Bytes per activation."""
        return 4 if self.precision == "fp32" else 2

    @property
    def positions(self) -> int:
        """Rows of the table of positions."""
        return self.model.positions or self.sequence_length

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.layout.micro * self.model.sequences * self.sequence_length

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step."""
        return self.layout.global_batch * self.model.sequences * self.sequence_length

    @property
    def activations(self) -> LayerActivations:
        """Activations of a layer for one micro-batch."""
        return LayerActivations(
            self.model,
            self.dropout,
            self.tokens,
            self.sequence_length,
            self.width,
            self.layout.tp,
            self.sequence_parallel,
            self.software.keeps_scores,
            self.software.gelu_copies,
            self.software.dropout_bytes,
        )

    def layers_of(self, stage: int) -> int:
        """Return the transformer layers of a pipeline stage."""
        if not self.software.balances_stages:
            return cost.equal_stages(self.model.layers, self.layout.pp)[stage]
        return cost.stages_by_time(
            self.model,
            self.sequence_length,
            self.padded_vocab,
            self.predicted,
            self.recomputed > 0,
            self.layout.pp,
        )[stage]

    def parameters_of(self, stage: int) -> int:
        """Return the parameters on a rank of a pipeline stage."""
        return cost.parameters_per_rank(
            self.model,
            self.positions,
            self.padded_vocab,
            self.layout.tp,
            layers=self.layers_of(stage),
            first=stage == 0,
            last=stage == self.layout.pp - 1,
        )

    def widths_of(self, stage: int) -> cost.Widths:
        """Return the bytes of one number of each kind of model state on a rank of a pipeline stage."""
        if not self.muon:
            return self.widths
        layers = self.layers_of(stage)
        matrices = cost.hidden_matrices(self.model, layers, self.layout.tp)
        return self.widths.of_muon(self.parameters_of(stage), matrices)

    def in_flight(self, stage: int) -> float:
        """Return the most micro-batches with activations in a stage at once.

        1F1B: as many as there are stages from this one on (Narayanan et al. 2021, section 2.2.1); with
        interleaving the first stage holds (1 + (p - 1) / (p v)) p (Korthikanti et al. 2022, section 4.2.3).
        """
        pp = self.layout.pp
        chunks = self.interleave
        most = pp - stage + (0 if chunks == 1 else (pp - 1) / chunks)
        return min(self.layout.accumulation, most)

    @property
    def predicted(self) -> int | None:
        """Positions of a sample with logits; None: all."""
        return None if self.software.predicts_everywhere else self.predictions

    @property
    def logits(self) -> float:
        """Logits of a micro-batch on one tensor rank: b S V / t; a BERT has those of its predictions.

        Those of a task are a few on every rank, of a sequence, or of spans at every position.
        """
        if self.model.task_head != "none":
            places = (
                self.tokens
                if self.model.task_head == "span"
                else self.tokens // self.sequence_length
            )
            return places * cost.head_outputs(self.model)
        positions = self.predicted or self.sequence_length
        return self.layout.micro * positions * self.padded_vocab / self.layout.tp

    def published_tflops(self, seconds: float, gpus: int) -> float:
        """Return TFLOPS per GPU of a step of `seconds` by the published tables' formula."""
        size = cost.parameters(self.model.unshared, self.positions)
        read = self.layout.global_batch * self.model.sequences
        again = self.recomputed > 0
        return cost.published_tflops(
            size, self.sequence_length, read, seconds, gpus, checkpointing=again
        )

    def exact_tflops(
        self, seconds: float, gpus: int, *, recomputation: bool = True
    ) -> float:
        """Return TFLOPS per GPU of a step of `seconds`, every matrix product counted."""
        flops = cost.exact_flops_per_step(
            self.model,
            self.sequence_length,
            self.layout.global_batch,
            padded_vocab=self.padded_vocab,
            checkpointing=recomputation and self.recomputed > 0,
            predictions=self.predicted,
        )
        return cost.exact_tflops(flops, seconds, gpus)

    def with_micro(self, micro: int) -> Workload:
        """Replace the micro-batch, at the same accumulation."""
        layout = self.layout
        total = micro * layout.accumulation * layout.dp
        return replace(self, layout=replace(layout, micro=micro, global_batch=total))


def of_plan(plan: Plan) -> Workload:
    """Make the workload of a resolved plan."""
    recipe = plan.recipe
    ds = plan.ds
    zero = ds.get("zero_optimization") or {}
    checkpointing = ds.get("activation_checkpointing") or {}
    if plan.layout.pp > 1:  # DeepSpeed 0.19.8, engine.py: a pipeline switches it off
        zero = {**zero, "overlap_comm": False}
    optimizer, weights = places_of(plan)
    ours = recipe.model.implementation == "megarecipes"
    masked = recipe.model.facts.masked
    software = OURS if ours else as_it_runs("transformers", masked=masked)
    cut = ours and checkpointing.get("partition_activations")
    away = checkpointing.get("cpu_checkpointing") and recipe.checkpoint_interval
    checkpoints_at: cost.Place = "host" if away else "gpu"
    predictions = recipe.predictions if masked else None
    return Workload(
        model=recipe.model,
        dropout=recipe.dropout,
        sequence_length=recipe.sequence_length,
        predictions=predictions,
        padded_vocab=plan.padded_vocab,
        layout=plan.layout,
        precision=plan.precision,
        recomputed=recipe.checkpoint_interval,
        zero_stage=plan.zero_stage,
        software=software,
        widths=state_widths(plan),
        optimizer_at=optimizer,
        weights_at=weights,
        checkpoints_at=checkpoints_at,
        cuts_checkpoints=bool(cut),
        sub_group=zero.get("sub_group_size", 1e9),
        buffers=buffers_of(plan.zero_stage, zero),
        overlaps_gradients=bool(zero.get("overlap_comm")),
        selective=recipe.recomputes_core,
        sequence_parallel=recipe.parallel.sequence,
        muon=recipe.optimizer.name == "muon",
    )


def on_system(work: Workload, software: str) -> Workload:
    """Move a plan's workload to another system; systems with their own states shard nothing."""
    moved = replace(work, software=SYSTEMS[software])
    if moved.software.states:
        return replace(moved, zero_stage=0, buffers=Buffers())
    return moved


def buffers_of(stage: int, zero: dict[str, Any]) -> Buffers:
    """Return the sizes of DeepSpeed's buffers; stages 1 and 2 have a second bucket with overlap_comm.

    DeepSpeed 0.19.8: `setup_buckets` of stage_1_and_2.py and `__ipg_bucket_flat_buffer` of stage3.py.
    """
    reduce = zero.get("reduce_bucket_size", 5e8)
    if stage == 3:
        return Buffers(reduce, zero.get("stage3_max_live_parameters", 1e9))
    if stage == 0:
        return Buffers()
    return Buffers(reduce * (2 if zero.get("overlap_comm") else 1))
