"""Worker processes, and the way of a chunk through the steps."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import pickle
import resource
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np

from data.prepare import chunk_file, fork_server, steps
from data.prepare.chunk_file import DTYPES, Tally
from data.prepare.cleaning import make_detector
from data.prepare.contamination import Evaluation
from data.prepare.inputs import Chunk
from data.prepare.settings import PreparationFailed, Settings
from data.prepare.words import Bands
from data.text.encoder import Encoder
from data.text.records import RecordFormat
from data.tokens.store import token_dtype


@dataclass(frozen=True)
class WorkPlan:
    """Everything a worker gets once, besides its chunks."""

    settings: Settings
    form: RecordFormat
    encoder: Encoder
    vocab_size: int
    evaluation: Evaluation | None
    bands: Bands | None  # None: near-duplicates stay
    directory: Path  # of chunk files
    origin: str  # digest of the preparation's manifest, which chunks bear


@dataclass(frozen=True)
class Answer:
    """A worker's answer for a chunk."""

    tally: Tally
    progress: float  # as of Chunk
    peak_bytes: int  # most memory of this worker so far
    seconds: float  # of the worker's processor time since its last answer


class Worker:
    """Worker to take chunks through the steps of a plan."""

    def __init__(self, plan: WorkPlan):
        self._plan = plan
        self._detect = make_detector() if plan.settings.language is not None else None
        self._spent = time.process_time()

    def answer(self, chunk: Chunk) -> Answer:
        """Run the steps, commit the chunk's file, and return its counts."""
        finished = self._finish(chunk)
        chunk_file.commit(
            self._plan.directory, chunk.number, self._plan.origin, finished
        )
        before = self._spent
        self._spent = time.process_time()
        return Answer(
            finished.tally, chunk.progress, peak_memory(), self._spent - before
        )

    def _finish(self, chunk: Chunk) -> chunk_file.FinishedChunk:
        plan = self._plan
        settings = self._plan.settings
        tally = Tally()
        documents = steps.Documents()
        rejected: dict[str, list[bytes]] = {}

        def run(
            name: str, change: Callable[..., steps.Documents], *arguments: object
        ) -> None:
            """Run and time a step; count documents before and after it."""
            nonlocal documents
            step = tally.step(name)
            started = time.process_time()
            step.enter(len(documents), documents.bytes)
            kind = "broken" if name == "read" else name
            documents = change(
                documents,
                steps.StepLog(step, rejected.setdefault(kind, [])),
                *arguments,
            )
            step.leave(len(documents), documents.bytes)
            step.seconds += time.process_time() - started

        run("read", steps.parse, chunk.items, plan.form)
        if settings.repair:
            run("repair", steps.repair_texts)
        if self._detect:
            run("language", steps.keep_language, self._detect, settings)
        if settings.samples == "bert" or settings.write_sentences:
            run("sentences", steps.split_sentences, settings.origin.sentences)
        run("tokenize", steps.tokenize, plan.encoder, settings)
        if plan.evaluation:
            run("decontaminate", steps.decontaminate, plan.evaluation)
        if plan.bands:
            run("signatures", steps.sign, settings)
        flat = [sequence for sequences in documents.tokens for sequence in sequences]
        columns = {
            "files": documents.files,
            "numbers": documents.numbers,
            "sizes": documents.sizes,
            "digests": steps.digests(documents.texts),
            "marks": documents.marks,
            "shingles": np.concatenate([np.empty(0, np.uint32), *documents.sets]),
            "set_sizes": [len(each) for each in documents.sets],
            "sequences": [len(sequences) for sequences in documents.tokens],
            "lengths": [len(sequence) for sequence in flat],
        }
        tokens = np.concatenate([np.empty(0, np.uint32), *flat]).astype(
            token_dtype(plan.vocab_size)
        )
        articles = b""
        if settings.write_articles:
            articles = steps.article_lines(documents, documents.texts)
        by_sentence = b""
        if settings.write_sentences:
            # each with a line feed behind it
            lined = ("\n".join([*each, ""]) for each in documents.sentences)
            by_sentence = steps.article_lines(documents, lined)
        return chunk_file.FinishedChunk(
            end=chunk.end,
            tally=tally,
            rejected={
                name: b"".join(lines) for name, lines in rejected.items() if lines
            },
            **{name: np.array(each, DTYPES[name]) for name, each in columns.items()},
            tokens=tokens,
            articles=articles,
            sentences=by_sentence,
        )


_worker: Worker  # of a worker process


def begin(plan: bytes) -> None:
    """Make this process a worker of a pool, with the plan pickled by its parent."""
    global _worker
    # The cores are shared by processes.
    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1")
    # Ctrl-C reaches all; the main process ends the workers
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with_the_main_process()
    _worker = Worker(pickle.loads(plan))


def _end_with_the_main_process() -> None:
    """Have the kernel end this process with the main one: a pool's workers hold its queue open.

    It is done by a signal. A waiting thread would make tokenizing 9 % slower: the C library locks each
    allocation of a process once it has had a second thread.
    """
    main = multiprocessing.parent_process()
    assert main
    # at its end the kernel sends SIGIO, which ends a process that does not handle it
    pipe = main.sentinel
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if not main.is_alive():
        os._exit(1)


def answer(chunk: Chunk) -> Answer:
    """Process one chunk, in a worker process."""
    return _worker.answer(chunk)


def peak_memory() -> int:
    """Return the most bytes this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run(
    plan: WorkPlan,
    chunks: Iterator[Chunk],
    workers: int,
    on_done: Callable[[Answer], None],
) -> None:
    """Have every chunk processed and committed; at most one chunk per worker is framed ahead.

    Args:
        workers: processes; 0: this one does the work, for a debugger.

    Raises:
        PreparationFailed: a worker was killed, as happens when memory runs out.
        Exception: of a step, the framing or `on_done`.
    """
    if not workers:
        worker = Worker(plan)
        for chunk in chunks:
            on_done(worker.answer(chunk))
        return
    # As bytes, which all workers unpickle at once: of an object, the pool waits for one after the other.
    pickled = pickle.dumps(plan)
    fork_server.start()
    # Threads of tokenizers and torch do not survive a fork.
    context = multiprocessing.get_context("forkserver")
    pool = ProcessPoolExecutor(workers, context, initializer=begin, initargs=(pickled,))
    team: list[BaseProcess] = []
    running: set[Future[Answer]] = set()
    try:
        more = True
        while more or running:
            framing = more and len(running) < 2 * workers
            timeout = 0 if framing else None
            done, running = wait(running, timeout, FIRST_COMPLETED)
            for future in done:
                on_done(future.result())
            if framing:
                following = next(chunks, None)
                if following:
                    running.add(pool.submit(answer, following))
                else:
                    more = False
                team = team or list(multiprocessing.active_children())
        pool.shutdown()
    except BrokenProcessPool:
        # The pool's thread ends the others by SIGTERM, and waits for all. Of two threads that wait for one
        # process of a fork server, one gets its exit code and the other 255.
        pool.shutdown()
        codes = [
            process.exitcode or 0
            for process in team
            if process.exitcode not in (0, -signal.SIGTERM)
        ]
        how = (
            " and ".join(
                f"signal {-code}" if code < 0 else f"code {code}" for code in codes
            )
            or "signal 15"
        )
        raise PreparationFailed(
            f"a worker process ended with {how}; "
            "if memory ran out (signal 9), the same command with fewer --workers resumes from here",
            exit_code=1,
        ) from None
    finally:  # nothing waits for the work of a run that ends early
        pool.shutdown(wait=False, cancel_futures=True)
        for process in team:
            process.kill()
