"""One chunk through all steps, and the worker processes that do it."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.prepare import chunk_file, steps
from data.prepare.batch import Documents, sift
from data.prepare.chunk_file import Finished
from data.prepare.contamination import Evaluation
from data.prepare.inputs import Chunk
from data.prepare.language import make_detector
from data.prepare.settings import Settings
from data.prepare.tally import Step, Tally
from data.prepare.words import Words
from data.sources.records import RecordFormat
from data.stores.indexed import token_dtype
from data.vocabularies.encoder import Encoder


@dataclass(frozen=True)
class Plan:
    """What a worker is given once."""

    settings: Settings
    form: RecordFormat
    encoder: Encoder
    vocab_size: int
    evaluation: Evaluation | None
    directory: Path  # of chunk files


@dataclass(frozen=True)
class Done:
    """What a worker answers for a chunk."""

    number: int
    tally: Tally
    progress: float  # as of Chunk
    peak_bytes: int  # most memory that this worker has held
    seconds: float  # of processor time that the worker has spent since its last answer


class Worker:
    """Takes chunks through the steps that a plan asks for."""

    def __init__(self, plan: Plan):
        self._plan = plan
        self._detect = make_detector() if plan.settings.language else None
        self._spent = time.process_time()

    def answer(self, chunk: Chunk) -> Done:
        """What the main process is told about a processed chunk."""
        tally, before = self.process(chunk), self._spent
        self._spent = time.process_time()
        return Done(chunk.number, tally, chunk.progress, peak_memory(), self._spent - before)

    def process(self, chunk: Chunk) -> Tally:
        """Runs the steps and commits the chunk's file."""
        finished = self.finish(chunk)
        chunk_file.commit(self._plan.directory, chunk.number, finished)
        return finished.tally

    def finish(self, chunk: Chunk) -> Finished:
        settings, tally, rejected = self._plan.settings, Tally(), _Rejected()
        documents = Documents([], [], [], [], [])
        with _timed(tally, "read") as step:
            documents = steps.parse(chunk.items, self._plan.form, step, rejected.into("broken"))
            _out(step, documents)
        if settings.repair:
            with _counted(tally, "repair", documents) as step:
                documents = steps.repair_texts(documents, step)
                _out(step, documents)
        if self._detect:
            with _counted(tally, "language", documents) as step:
                verdicts = steps.judge_language(
                    documents, self._detect, str(settings.language), settings.language_score
                )
                documents = _sifted(documents, verdicts, step, rejected, "language")
        if settings.sentences:
            with _counted(tally, "sentences", documents) as step:
                documents.sentences.extend(steps.split_sentences(documents, settings.origin.sentences))
                _out(step, documents)
        with _counted(tally, "tokenize", documents) as step:
            documents = self._tokenize(documents, step, rejected)
        documents, marks = self._words(documents, tally, rejected)
        return Finished(
            end=chunk.end,
            tally=tally,
            rejected=rejected.blobs(),
            files=np.array(documents.files, dtype=np.int32),
            numbers=np.array(documents.numbers, dtype=np.int64),
            sizes=np.array(documents.sizes, dtype=np.int64),
            digests=steps.digests(documents.texts),
            marks=marks,
            articles=steps.article_lines(documents) if settings.write_articles else b"",
            sentences=steps.sentence_lines(documents) if settings.write_sentences else b"",
            **chunk_file.token_arrays(documents, token_dtype(self._plan.vocab_size)),
        )

    def _tokenize(self, documents: Documents, step: Step, rejected: _Rejected) -> Documents:
        bert = self._plan.settings.samples == "bert"
        tokens = (steps.tokenize_sentences if bert else steps.tokenize_documents)(
            documents, self._plan.encoder
        )
        documents.tokens.extend(tokens)
        verdicts = steps.judge_length(documents, self._plan.settings.min_tokens, ends=0 if bert else 1)
        return _sifted(documents, verdicts, step, rejected, "tokenize")

    def _words(self, documents: Documents, tally: Tally, rejected: _Rejected) -> tuple[Documents, np.ndarray]:
        """Decontamination and signatures, which share the words."""
        settings, evaluation = self._plan.settings, self._plan.evaluation
        blocks: list[Words] | None = None
        if evaluation is not None:
            with _counted(tally, "decontaminate", documents) as step:
                blocks = steps.hash_words(documents.texts)
                clean = _sifted(
                    documents, steps.judge_contamination(blocks, evaluation), step, rejected, "decontaminate"
                )
                blocks = blocks if len(clean) == len(documents) else None
                documents = clean
        if settings.dedup is None:
            return documents, np.zeros((len(documents), 0), dtype=np.uint32)
        with _counted(tally, "signatures", documents) as step:
            _out(step, documents)
            blocks = blocks or steps.hash_words(documents.texts)
            return documents, steps.sign(blocks, settings.shingle, settings.permutations, settings.seed)


_worker: Worker  # of a worker process


def begin(plan: Plan) -> None:
    """Make this process a worker of a pool."""
    global _worker
    # The cores are shared by processes.
    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1")
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches all processes; the main one ends the workers
    threading.Thread(target=_end_with_the_main_process, daemon=True).start()
    _worker = Worker(plan)


def _end_with_the_main_process() -> None:
    """A pool's workers hold its queue open, so a killed main process does not end them."""
    main = multiprocessing.parent_process()
    assert main is not None
    main.join()
    os._exit(1)


def answer(chunk: Chunk) -> Done:
    """Process one chunk, in a worker process."""
    return _worker.answer(chunk)


def peak_memory() -> int:
    """Most bytes that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if os.uname().sysname == "Darwin" else 1024
    )


class _Rejected:
    """Lines about what is dropped, by step."""

    def __init__(self) -> None:
        self._lines: dict[str, list[str]] = {}

    def into(self, step: str) -> Callable[[str], None]:
        return self._lines.setdefault(step, []).append

    def blobs(self) -> dict[str, bytes]:
        return {
            step: "".join(lines).encode("utf-8", "replace") for step, lines in self._lines.items() if lines
        }


@contextmanager
def _timed(tally: Tally, name: str) -> Iterator[Step]:
    step = tally.step(name)
    started = time.process_time()
    yield step
    step.seconds += time.process_time() - started


@contextmanager
def _counted(tally: Tally, name: str, documents: Documents) -> Iterator[Step]:
    """Times a step and counts what goes into it."""
    with _timed(tally, name) as step:
        step.documents_in += len(documents)
        step.bytes_in += documents.bytes
        yield step


def _out(step: Step, documents: Documents) -> None:
    step.documents_out += len(documents)
    step.bytes_out += documents.bytes


def _sifted(documents: Documents, verdicts: list, step: Step, rejected: _Rejected, name: str) -> Documents:
    kept = sift(documents, verdicts, step, rejected.into(name))
    _out(step, kept)
    return kept
