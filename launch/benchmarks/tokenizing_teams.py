"""The same texts tokenized in several ways, by turns, for comparing their speeds on a machine that others use too.

A team is one or more processes that wait, take batches from a common counter when told to, and say when all is done. Teams
run in turn, round after round, so that what else happens on the machine meets all of them; compare medians.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

RAW_BATCH_CHARACTERS = (
    1 << 23
)  # of one `encode_batch` by threads: long enough that none of them waits for the last texts


@dataclass(frozen=True)
class Way:
    """How a team tokenizes."""

    name: str
    raw: bool  # `tokenizers` alone, tokens left in its own objects; else the step of data/prepare
    processes: int
    threads: int  # of each process


def ways(workers: int) -> list[Way]:
    """Raw with threads and with processes, the step as the preparation runs it; with more than one worker also raw on one core."""
    several = [
        Way("raw, threads", True, 1, workers), Way("raw, processes", True, workers, 1), Way("preparation's step", False, workers, 1),
    ]  # fmt: skip
    return [Way("raw, one thread", True, 1, 1), *several] if workers > 1 else several[1:]


class Turn(NamedTuple):
    """Seconds of one way in one round."""

    wall: float
    processor: float  # of all its processes and threads


@dataclass(frozen=True)
class Task:
    """What all teams do."""

    batches: Path  # pickled list of batches: lists of documents, each a list of texts (a GPT's document is one, a BERT's its sentences)
    tokenizer: Path  # directory that transformers saved
    samples: str  # gpt, bert


def measure(
    task: Task, chosen: Sequence[Way], rounds: int, between: Callable[[], None] = lambda: None
) -> dict[str, list[Turn]]:
    """The turns of every round, by the name of the way.

    Args:
        rounds: of all ways; every second one in reverse order.
        between: called after each round, for something that is to be compared with the teams.
    """
    with ExitStack() as stack:
        teams = {way.name: stack.enter_context(_team(way, task)) for way in chosen}
        turns: dict[str, list[Turn]] = {name: [] for name in teams}
        for number in range(rounds):
            for name in list(teams)[:: -1 if number % 2 else 1]:
                turns[name].append(teams[name]())
            between()
    return turns


@dataclass(frozen=True)
class Comparison:
    """Medians over the rounds."""

    ceiling: Turn  # the least that `tokenizers` needs on all cores, by threads or by processes
    ceiling_way: str  # that took the least wall time
    step: Turn

    @property
    def ratio(self) -> Turn:
        """Speed of the step as a share of the raw speed."""
        return Turn(self.ceiling.wall / self.step.wall, self.ceiling.processor / self.step.processor)


def median(turns: Sequence[Turn]) -> Turn:
    return Turn(
        statistics.median(turn.wall for turn in turns), statistics.median(turn.processor for turn in turns)
    )


def compare(rounds: dict[str, list[Turn]]) -> Comparison:
    medians = {name: median(turns) for name, turns in rounds.items()}
    raw = {name: medians[name] for name in ("raw, threads", "raw, processes") if name in medians}
    best = min(raw, key=lambda name: raw[name].wall)
    return Comparison(
        Turn(raw[best].wall, min(turn.processor for turn in raw.values())),
        best,
        medians["preparation's step"],
    )


@contextmanager
def _team(way: Way, task: Task):
    """Yields a function that runs one round."""
    context = multiprocessing.get_context("spawn")  # threads of `tokenizers` do not survive a fork
    taken = context.Value("q", 0)
    members: list[tuple[Connection, Any]] = []
    try:
        for _ in range(way.processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, way, task, taken), daemon=True)
            process.start()
            theirs.close()
            members.append((ours, process))

        def run_round() -> Turn:
            taken.value = 0
            _tell_all(members)  # get ready
            started = time.perf_counter()
            spent = _tell_all(members)  # go
            return Turn(time.perf_counter() - started, sum(spent))

        yield run_round
    finally:
        for connection, process in members:
            connection.close()
            process.join(5)
            process.kill()


def _tell_all(members: Sequence[tuple[Connection, Any]]) -> list[float]:
    """Has all go on; returns what they answer."""
    for connection, _ in members:
        connection.send(None)
    return [connection.recv() for connection, _ in members]


def _serve(connection: Connection, way: Way, task: Task, taken: Any) -> None:
    """A member: gets ready, answers, waits, works, answers; until the other side closes."""
    os.environ.update(
        TOKENIZERS_PARALLELISM="true" if way.threads > 1 else "false", RAYON_NUM_THREADS=str(way.threads)
    )
    documents = pickle.loads(task.batches.read_bytes())
    prepared = (
        [_raw_batch(batch) for batch in documents] if way.raw else [_documents(batch) for batch in documents]
    )
    if way.threads > 1:
        prepared = joined(prepared, RAW_BATCH_CHARACTERS)
    del documents
    while True:
        try:
            connection.recv()
            # A new one for every round: how fast one is depends by several percent on where it happens to lie in memory.
            work = _raw(task) if way.raw else _step(task)
            connection.send(0.0)
            connection.recv()
            spent = time.process_time()
            while (number := _take(taken)) < len(prepared):
                work(prepared[number])
            connection.send(time.process_time() - spent)
        except (EOFError, OSError):
            return


def _take(taken: Any) -> int:
    with taken.get_lock():
        taken.value += 1
        return taken.value - 1


def _raw_batch(batch: list[list[str]]) -> list[str]:
    return [text for texts in batch for text in texts]


def joined(batches: Sequence[list[str]], characters: int) -> list[list[str]]:
    """Neighbouring batches put together until each has at least so many characters."""
    result: list[list[str]] = []
    size = characters
    for batch in batches:
        if size >= characters:
            result.append([])
            size = 0
        result[-1] += batch
        size += sum(map(len, batch))
    return result


def _raw(task: Task) -> Callable[[list[str]], object]:
    backend = raw_tokenizer(task.tokenizer)
    return lambda texts: backend.encode_batch_fast(texts, add_special_tokens=False)


def raw_tokenizer(directory: Path):
    """The `tokenizers` object with nothing of ours about it."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True  # as in our step: special tokens in a text are text
    return backend


def _documents(batch: list[list[str]]):
    from data.prepare.batch import Documents

    return Documents(
        [], [], [], [texts[0] for texts in batch], [], sentences=batch
    )  # what the two steps look at


def _step(task: Task) -> Callable[[Any], object]:
    from data.prepare import steps
    from data.vocabularies.encoder import ONE_CORE_BATCH_CHARACTERS, Encoder
    from data.vocabularies.published import read_tokenizer

    encoder = Encoder(read_tokenizer(str(task.tokenizer)), ONE_CORE_BATCH_CHARACTERS)
    tokenize = {"gpt": steps.tokenize_documents, "bert": steps.tokenize_sentences}[task.samples]
    return lambda documents: tokenize(documents, encoder)
