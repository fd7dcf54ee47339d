"""Micro-batches of one data-parallel rank; the global batch of a step is the same under every layout.

Sample j of a step is the j-th of the training order after earlier steps. It is in row m of micro-batch
a of data-parallel rank r with j = (r * accumulation + a) * micro + m. A rank has consecutive samples, so that
ranks can read different files of a stream. Any thread makes any step of memory-mapped tokens; a stream has
one thread.

`recipes.families` names the tensors. The loss of a micro-batch is sum(cross_entropy * weights). With a GPT's
weights its mean over micro-batches and ranks is the mean over all tokens of the global batch. A BERT's
samples predict different numbers of tokens. So its weights are 1 for a prediction and 0 for filling, and the
engine divides by the number of predictions of the whole step. Sentence weights need no such division.
"""

from __future__ import annotations

import hashlib
import json
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from data.bit_sums import batch_sum
from data.samples.fields import Fields, HeldOut, TrainingSamples
from recipes.layout import BatchSchedule, Layout, batch_schedule
from recipes.problems import Key, ProblemsError, Setting

T = TypeVar("T")
MicroBatch = dict[str, torch.Tensor]
# batches of a step, state after it, sum of their bits
Made = tuple[list[MicroBatch], dict[str, Any] | None, int]
_WEIGHTS = ("weights", "sentence_weights")
JOIN_TIMEOUT_S = 5.0  # for a thread that waits for the network


def micro_batch(fields: Fields, row_weights: np.ndarray) -> MicroBatch:
    """Return the tensors of B samples; `row_weights` (B,) as for `Fields.micro_batch`."""
    arrays = fields.micro_batch(row_weights)
    return {
        name: torch.from_numpy(np.ascontiguousarray(values))
        for name, values in arrays.items()
    }


def batch_digest(batches: Iterable[MicroBatch]) -> str:
    """Return the SHA-256 of a step's micro-batches, given in row order of the global batch.

    The size of the micro-batches does not matter. So a weight, which depends on it, counts only as zero or
    positive.
    """
    joined: dict[str, list[np.ndarray]] = {}
    for batch in batches:
        for key, tensor in batch.items():
            values = tensor.numpy() if key not in _WEIGHTS else tensor.numpy() > 0
            joined.setdefault(key, []).append(values.astype("<i8"))
    digest = hashlib.sha256()
    for key in sorted(joined):
        whole = np.concatenate(joined[key])
        digest.update(f"{key} {whole.shape}\n".encode() + whole.tobytes())
    return digest.hexdigest()


def samples_sum(batches: Iterable[MicroBatch], factors: Iterable[list[int]]) -> int:
    """Return the sum of the samples' digests, each times its factor, of micro-batches and their factors."""
    total = 0
    for batch, of_rows in zip(batches, factors, strict=True):
        for row, factor in enumerate(of_rows):
            sample = {name: values[row : row + 1] for name, values in batch.items()}
            total += factor * int(batch_digest([sample]), 16)
    return total


def rank_rows(layout: Layout, dp_rank: int, samples: int | None = None) -> np.ndarray:
    """Return this rank's rows of a step of `samples` (None: a full one), (accumulation, micro) int64.

    Raises ValueError: the layout has no such data-parallel rank.
    """
    if not 0 <= dp_rank < layout.dp:
        raise ValueError(f"data-parallel rank {dp_rank} is not in 0..{layout.dp - 1}")
    rows = np.arange(samples or layout.global_batch).reshape(
        layout.dp, -1, layout.micro
    )
    return rows[dp_rank, :]


class Prefetcher(Generic[T]):
    """Iterator over produce(start), produce(start + 1), ...; threads work ahead.

    They keep ready one result more than there are threads, and share mapped files and tokenizers, which
    release Python's lock. Where a call fails, its `next` and all later ones raise the error. One thread makes
    the calls in order. The threads end with `close`, with the object or with the interpreter.
    """

    def __init__(
        self,
        produce: Callable[[int], T],
        start: int,
        threads: int,
        prepare: Callable[[], None] = lambda: None,
    ):
        """Start the threads.

        Args:
            produce: must hold neither this object nor its owner; else neither can be freed.
            prepare: called once in every thread.
        """
        running: list[threading.Thread] = []
        failed: list[int] = []

        def begin() -> None:
            running.append(threading.current_thread())
            prepare()

        def produce_until_one_fails(number: int) -> T:
            if failed and number > min(failed):  # a failed reader cannot continue
                raise CancelledError
            try:
                return produce(number)
            except BaseException:
                failed.append(number)
                raise

        def end() -> None:
            pool.shutdown(wait=False, cancel_futures=True)
            for thread in running:
                if thread is not threading.current_thread():
                    thread.join(JOIN_TIMEOUT_S)

        self._produce = produce_until_one_fails
        self._following = start
        self._pool = pool = ThreadPoolExecutor(threads, "loader-", begin)
        self._results: deque[Future[T]] = deque()
        for _ in range(threads + 1):
            self._submit()
        self._finalizer = weakref.finalize(self, end)

    def _submit(self) -> None:
        self._results.append(self._pool.submit(self._produce, self._following))
        self._following += 1

    def next(self) -> T:
        """Wait for the next result.

        Raises RuntimeError: `close` was called.
        """
        try:
            if not self._finalizer.alive:
                raise CancelledError
            value = self._results[0].result()
        except CancelledError:
            raise RuntimeError("the loader is closed") from None
        self._results.popleft()
        self._submit()
        return value

    def close(self) -> None:
        self._finalizer()


class StepBatches:
    """Endless iterator over optimizer steps; an item is the list of a step's `accumulation` micro-batches.

    It reads a copy, `samples.fresh()`: several iterators can be made of the same samples.

    Attributes:
        last: the step handed out last.
        bit_sum: its `batch_sum` when it was made.
    """

    def __init__(  # noqa: PLR0913 - a run states each in a line of its own
        self,
        samples: TrainingSamples,
        seed: int,
        layout: Layout,
        dp_rank: int,
        start_step: int = 0,
        start_state: dict[str, Any] | None = None,
        workers: int = 0,
        pinned: bool = False,
        sizes: BatchSchedule | None = None,
    ):
        """Make batches of one rank.

        Args:
            start_step: number of optimizer steps already done.
            start_state: all ranks' `state` at that step, joined by `merge_states`. It only saves time:
                without it a stream is tokenized again from its beginning.
            workers: threads that make batches ahead of their use (at most one for a stream); 0: none.
            pinned: make them in pinned memory, for asynchronous copies to this process's current device.
            sizes: samples of each step; None: those of the layout.

        Raises ValueError: the state is of another step, or of data read in another way.
        """
        self._samples = samples.fresh()
        self._seed = seed
        self._layout = layout
        self._pinned = pinned
        self.step = start_step
        self.last: list[MicroBatch] = []
        self.bit_sum = 0
        self._made: Made | None = None  # of the next step, once it is peeked at
        self._sizes = sizes or batch_schedule(
            layout.global_batch, layout.global_batch, 1, 1
        )
        position = self._sizes.samples(start_step)
        if start_state is not None:
            if start_state.get("position") != position:
                came = (
                    f"data position {start_state.get('position')} is not that of step {start_step} with ",
                    Setting("batch.global", layout.global_batch),
                )
                fix = ("resume with the ", Key("batch.global"), " of the checkpoint")
                raise ProblemsError.of("batch.global", came, fix=fix)
            self._samples.restore(start_state)
        # Taken before any thread reads the samples. At a later position without a start state, a stream would
        # have to be read up to it: `state` does so only when it is called before the first batch.
        self._state = start_state or (self._samples.state(0) if position == 0 else None)
        rank_rows(layout, dp_rank)  # refuses a wrong rank
        self._produce = partial(
            _make_step, self._samples, seed, layout, self._sizes, dp_rank, pinned
        )
        threads = workers if samples.random_access else min(workers, 1)
        begin = _current_device() if pinned else lambda: None
        self._ahead = (
            Prefetcher(self._produce, start_step, threads, prepare=begin)
            if threads
            else None
        )

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        return self

    def __next__(self) -> list[MicroBatch]:
        self.last, self._state, self.bit_sum = self.peek()
        self._made = None
        self.step += 1
        return self.last

    def peek(self) -> Made:
        """Make the next step, which stays the next. Collective where ranks share it."""
        if self._made is None:
            self._made = self._take()
        return self._made

    def _take(self) -> Made:
        """Wait for the batches of the next step, the state after it and the sum of their bits."""
        if self._ahead:
            return self._ahead.next()
        return self._produce(self.step)

    def fetch(self) -> str | None:
        """Fetch the next step ahead of its use, where ranks share it; return why this rank cannot read it."""
        return None

    def state(self) -> dict[str, Any]:
        """Return this rank's position after the last step handed out, as JSON values."""
        if self._state is None:
            self._state = self._samples.fresh().state(self._sizes.samples(self.step))
        return self._state

    def digest(self, step: int) -> str:
        """Return the SHA-256 of a step's global batch. It reads the whole batch: for checks only."""
        first = self._sizes.samples(step)
        size = self._sizes.size(step)
        fields = self._samples.fresh().take(range(first, first + size), self._seed)
        return batch_digest([micro_batch(fields, np.ones(size))])

    def close(self) -> None:
        """End the threads; no batch follows."""
        if self._ahead:
            self._ahead.close()


def _make_step(
    samples: TrainingSamples,
    seed: int,
    layout: Layout,
    sizes: BatchSchedule,
    dp_rank: int,
    pinned: bool,
    step: int,
) -> Made:
    """Make the batches of the step after `step` completed ones, the state after it and their `batch_sum`."""
    rows = sizes.samples(step) + rank_rows(layout, dp_rank, sizes.size(step))
    micro = layout.micro
    fields = samples.take(rows.ravel().tolist(), seed)
    weights = np.full(micro, 1.0 / micro)
    batches = [
        micro_batch(fields.rows(slice(at, at + micro)), weights)
        for at in range(0, rows.size, micro)
    ]
    bit_sum = int(batch_sum(batches))
    state = samples.state(sizes.samples(step + 1))
    return pin_batches(batches) if pinned else batches, state, bit_sum


def pin_batches(batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Copy batches to pinned memory."""
    pinned = []
    for batch in batches:
        pinned.append({key: tensor.pin_memory() for key, tensor in batch.items()})
    return pinned


def _current_device() -> Callable[[], None]:
    """Return a function to select this rank's device in a new thread; else pinning would use the first."""
    return partial(
        torch.accelerator.set_device_index, torch.accelerator.current_device_index()
    )


def merge_states(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the states of all ranks into one; each rank knows its own parts of a stream."""
    merged = dict(json.loads(json.dumps(states[0])))
    for key, value in merged.items():
        if key == "parts":
            parts = zip(*(state[key] for state in states), strict=True)
            merged[key] = [merge_states(list(part)) for part in parts]
            continue
        for other in (state[key] for state in states[1:]):
            if not isinstance(value, dict):
                assert value == other, (
                    f"ranks disagree about {key}: {value} and {other}"
                )
                continue
            for name, entry in other.items():
                assert value.setdefault(name, entry) == entry, (
                    f"ranks disagree about {key} {name}"
                )
    return merged


def validation_batches(
    samples: HeldOut, micro: int, accumulation: int, dp: int, dp_rank: int
) -> list[list[MicroBatch]]:
    """Return all validation steps of one rank, each a list of `accumulation` micro-batches.

    Every rank gets equally many: copies of weight 0 fill the last step. The mean of the loss over all
    micro-batches of all steps and ranks is the mean over the real samples (for a BERT over their predictions,
    once the engine has divided by the number of predictions).
    """
    assert len(samples) > 0, "build() refuses corpora without validation samples"
    layout = Layout(1, 1, dp, micro, accumulation, micro * accumulation * dp)
    rows = rank_rows(layout, dp_rank)
    steps = -(-len(samples) // layout.global_batch)
    real_weight = steps * accumulation * dp / len(samples)

    def batch(part: np.ndarray) -> MicroBatch:
        weights = np.where(part < len(samples), real_weight, 0.0)
        return micro_batch(samples.take(np.minimum(part, len(samples) - 1)), weights)

    batches = []
    for step in range(steps):
        of_step = step * layout.global_batch + rows
        batches.append([batch(part) for part in of_step])
    return batches
