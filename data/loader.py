"""Micro-batches for one data-parallel rank. The batch of a step does not depend on the layout.

Sample j of step s is sample s * global + j of the training order. It belongs to data-parallel rank r,
micro-batch a and row m with j = (r * accumulation + a) * micro + m: a rank has consecutive samples, so that
ranks can read different files of a stream. Where the samples come from memory-mapped tokens any thread makes
any step; a stream has one thread.

`recipes.families` names the tensors. The loss of a micro-batch is sum(cross_entropy * weights). A
GPT's weights make its mean over micro-batches and ranks the mean over all tokens of the global batch. A
BERT's samples predict different numbers of tokens, so its weights are 1 for a prediction and 0 for filling,
and the engine divides by the number of predictions of the whole step; its sentence weights need no such
division.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from data.prefetch import Prefetcher
from data.samples.fields import Fields, HeldOut, TrainingSamples
from recipes.layout import Layout
from recipes.problems import Key, Problem, ProblemsError, Setting

MicroBatch = dict[str, torch.Tensor]
_WEIGHTS = ("weights", "sentence_weights")


def micro_batch(fields: Fields, row_weights: np.ndarray) -> MicroBatch:
    """The tensors of B samples; `row_weights` (B,) as for `Fields.micro_batch`."""
    arrays = fields.micro_batch(row_weights)
    return {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in arrays.items()}


def batch_digest(batches: Iterable[MicroBatch]) -> str:
    """SHA-256 of a step's micro-batches, given in the order of their rows in the global batch.

    How the batch is cut does not matter. Weights count as real or filling: their values depend on the
    micro-batch.
    """
    joined: dict[str, list[np.ndarray]] = {}
    for batch in batches:
        for key, tensor in batch.items():
            values = tensor.numpy() if key not in _WEIGHTS else tensor.numpy() > 0
            joined.setdefault(key, []).append(values.astype("<i8"))
    digest = hashlib.sha256()
    for key in sorted(joined):
        found = np.concatenate(joined[key])
        digest.update(f"{key} {found.shape}\n".encode() + found.tobytes())
    return digest.hexdigest()


def rank_rows(layout: Layout, dp_rank: int) -> np.ndarray:
    """(accumulation, micro) int64: the samples of the global batch that this rank reads.

    Raises ValueError: the layout has no such data-parallel rank.
    """
    if not 0 <= dp_rank < layout.dp:
        raise ValueError(f"data-parallel rank {dp_rank} is not in 0..{layout.dp - 1}")
    rows = np.arange(layout.global_batch).reshape(layout.dp, layout.accumulation, layout.micro)
    return rows[dp_rank]


class StepBatches:
    """Endless iterator: each `next` is the list of `accumulation` micro-batches of the next optimizer step.

    Reads `samples.fresh()`: several of them can be made from the same samples.
    """

    def __init__(
        self,
        samples: TrainingSamples,
        seed: int,
        layout: Layout,
        dp_rank: int,
        start_step: int = 0,
        start_state: dict[str, Any] | None = None,
        workers: int = 0,
    ):
        """Make batches of one rank.

        Args:
            start_step: optimizer steps that are already done; batches continue after them.
            start_state: what `merge_states` made of all ranks' `state` then. Only speed depends on it, and
                only for streamed sources, which otherwise tokenize again what they already went through.
            workers: threads that make batches ahead of their use (at most one for a stream); 0: made when
                asked for.

        Raises ValueError: the state is of another step or another reading of the data.
        """
        self._samples, self._seed, self._layout = samples.fresh(), seed, layout
        self.step = start_step
        position = start_step * layout.global_batch
        if start_state is not None:
            if start_state.get("position") != position:
                wrong = f"data position {start_state.get('position')} is not that of step {start_step} with "
                came = (wrong, Setting("batch.global", layout.global_batch))
                fix = ("resume with the ", Key("batch.global"), " of the checkpoint")
                raise ProblemsError([Problem("batch.global", came, fix=fix)])
            self._samples.restore(start_state)
        # Known before the first batch, and never asked of a stream that a thread is reading; without a start
        # state a stream would have to be read through, so then `state` does it if it is called at once.
        self._state = start_state or (self._samples.state(0) if position == 0 else None)
        self._produce = partial(_make_step, self._samples, seed, layout, rank_rows(layout, dp_rank))
        threads = workers if samples.random_access else min(workers, 1)
        self._ahead = (
            Prefetcher(self._produce, start_step, threads, prepare=_cuda_device()) if threads else None
        )

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        return self

    def __next__(self) -> list[MicroBatch]:
        batches, self._state = self._ahead.next() if self._ahead else self._produce(self.step)
        self.step += 1
        return batches

    def state(self) -> dict[str, Any]:
        """JSON-able position of this rank after the last step handed out, whatever was read ahead."""
        if self._state is None:
            self._state = self._samples.fresh().state(self.step * self._layout.global_batch)
        return self._state

    def digest(self, step: int) -> str:
        """SHA-256 of a step's global batch, in order. Reads all of it: for checks, not for every step."""
        first = step * self._layout.global_batch
        fields = self._samples.fresh().take(range(first, first + self._layout.global_batch), self._seed)
        return batch_digest([micro_batch(fields, np.ones(self._layout.global_batch))])

    def close(self) -> None:
        """Ends the threads; no batch comes after it."""
        if self._ahead:
            self._ahead.close()


def _make_step(
    samples: TrainingSamples, seed: int, layout: Layout, rows: np.ndarray, step: int
) -> tuple[list[MicroBatch], dict[str, Any]]:
    """The batches of a step and the state after it; `rows` as `rank_rows` gives them."""
    size, micro = layout.global_batch, layout.micro
    fields = samples.take((step * size + rows).ravel().tolist(), seed)
    weights = np.full(micro, 1.0 / micro)
    batches = [micro_batch(fields.rows(slice(at, at + micro)), weights) for at in range(0, rows.size, micro)]
    return [pinned(batch) for batch in batches], samples.state((step + 1) * size)


def pinned(batch: MicroBatch) -> MicroBatch:
    """The same in pinned memory, which is copied to a GPU without waiting; as it is without a GPU."""
    if not torch.cuda.is_available():
        return batch
    return {key: tensor.pin_memory() for key, tensor in batch.items()}


def _cuda_device() -> Callable[[], None]:
    """For a new thread: this rank's device, without which pinning would open a context on the first one."""
    if not torch.cuda.is_available():
        return lambda: None
    device = torch.cuda.current_device()
    return lambda: torch.cuda.set_device(device)


def merge_states(states: list[dict[str, Any]]) -> dict[str, Any]:
    """One state of the states of all ranks, each of which knows the parts of a stream that it reads."""
    merged = json.loads(json.dumps(states[0]))
    for key, value in merged.items():
        if key == "parts":
            parts = zip(*(state[key] for state in states), strict=True)
            merged[key] = [merge_states(list(part)) for part in parts]
            continue
        for other in (state[key] for state in states[1:]):
            if not isinstance(value, dict):
                assert value == other, f"ranks disagree about {key}: {value} and {other}"
                continue
            for name, entry in other.items():
                assert value.setdefault(name, entry) == entry, f"ranks disagree about {key} {name}"
    return merged


def validation_batches(
    samples: HeldOut, micro: int, accumulation: int, dp: int, dp_rank: int
) -> list[list[MicroBatch]]:
    """All validation steps of one rank, each a list of `accumulation` micro-batches.

    Every rank gets the same number: the last step is filled up with copies of weight 0. The mean of the loss
    over all micro-batches of all steps and ranks is the mean over the real samples (of a BERT's predictions,
    once the engine has divided by their number).
    """
    assert len(samples) > 0, "build() refuses corpora without validation samples"
    layout = Layout(1, 1, dp, micro, accumulation, micro * accumulation * dp)
    rows = rank_rows(layout, dp_rank)
    steps = -(-len(samples) // layout.global_batch)
    real_weight = steps * accumulation * dp / len(samples)

    def batch(part: np.ndarray) -> MicroBatch:
        weights = np.where(part < len(samples), real_weight, 0.0)
        return micro_batch(samples.take(np.minimum(part, len(samples) - 1)), weights)

    return [[batch(part) for part in step * layout.global_batch + rows] for step in range(steps)]
