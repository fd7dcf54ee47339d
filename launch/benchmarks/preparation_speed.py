"""How fast a preparation is: each step alone, and the whole beside the raw speed of `tokenizers`. For `launch/benchmark.py`."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import pickle
import shutil
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.benchmarks import tokenizing_teams
from launch.benchmarks.tokenizing_teams import Turn

if TYPE_CHECKING:
    from data.prepare.settings import Settings

SMALL = 16  # documents of the preparation that shows what starting costs


@dataclass
class StepSpeed:
    """One step over all documents in one process with one thread; seconds of processor time."""

    documents: int = 0
    megabytes: float = 0.0  # of text in UTF-8 that went in
    seconds: float = 0.0

    def json(self, whole: float) -> dict[str, float]:
        """`whole`: seconds of all steps."""
        seconds = max(self.seconds, 1e-9)
        return {
            "documents": self.documents, "megabytes": self.megabytes, "seconds": self.seconds,
            "documents_per_s": self.documents / seconds, "mb_per_s": self.megabytes / seconds,
            "share": self.seconds / whole if whole else 0.0,
        }  # fmt: skip


class Steps(dict[str, StepSpeed]):
    @contextmanager
    def timed(self, name: str, documents: int, size: int) -> Iterator[None]:
        """Adds what happens inside to a step; `size` in bytes."""
        started = time.process_time()
        yield
        self.add(name, documents, size, time.process_time() - started)

    def add(self, name: str, documents: int, size: float, seconds: float) -> None:
        step = self.setdefault(name, StepSpeed())
        step.documents += documents
        step.megabytes += size / 1e6
        step.seconds += seconds

    def json(self) -> dict[str, dict[str, float]]:
        whole = sum(step.seconds for step in self.values())
        return {name: step.json(whole) for name, step in self.items()}


@dataclass
class Whole:
    """Whole preparations, each in a new process, one list entry per round. Wall seconds."""

    imports: list[float] = field(
        default_factory=list
    )  # from the start of the process to the call of `pipeline.prepare`
    start: list[float] = field(
        default_factory=list
    )  # of `pipeline.prepare` on a few documents: worker processes, tokenizer, publishing
    full: list[float] = field(default_factory=list)  # of `pipeline.prepare` on everything
    processor: list[float] = field(
        default_factory=list
    )  # seconds of all processes for everything, without starting them
    report: dict[str, Any] = field(default_factory=dict)  # of the last one

    @property
    def steady(self) -> float:
        """What the documents take, without what starting takes."""
        return statistics.median(self.full) - statistics.median(self.start)


def save_tokenizer(settings: Settings, folder: Path) -> Settings:
    """Makes or trains the tokenizer; returns settings that read it from a file, so that no measurement contains its making."""
    from data.prepare import tokenizer
    from data.prepare.inputs import Inputs
    from recipes.schema import Tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.obtain(settings, Inputs(settings), folder, lambda line: print(line, flush=True))
    file = Tokenizer(kind="file", path=str(folder / tokenizer.FOLDER))
    return dataclasses.replace(settings, tokenizer=file, vocab_size=None)


def steps_alone(settings: Settings, folder: Path) -> dict[str, dict[str, float]]:
    """Every step on one core, with raw `tokenizers` on the same texts beside it ("raw tokenizers", not part of the whole).

    Leaves `folder`/batches.pickle: the texts that reach tokenization, for `tokenizing_teams`.
    """
    return _in_new_process(_steps_alone, settings, folder)


def _steps_alone(connection: Connection, settings: Settings, folder: Path) -> None:
    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1")
    from data.prepare import chunk_file, steps
    from data.prepare.batch import sift
    from data.prepare.inputs import Cursor, Inputs
    from data.prepare.language import make_detector
    from data.prepare.tally import Step
    from data.prepare.work import Plan, Worker
    from data.vocabularies.encoder import ONE_CORE_BATCH_CHARACTERS, Encoder
    from data.vocabularies.published import read_tokenizer
    from data.vocabularies.vocabulary import vocabulary_size

    tokenizer, inputs, measured, raw = (
        read_tokenizer(str(settings.tokenizer.path)),
        Inputs(settings),
        Steps(),
        StepSpeed(),
    )
    backend = tokenizing_teams.raw_tokenizer(Path(str(settings.tokenizer.path)))
    encoder = Encoder(tokenizer, ONE_CORE_BATCH_CHARACTERS)
    plan = Plan(settings, inputs.format, encoder, vocabulary_size(tokenizer), None, folder / "chunks")
    plan.directory.mkdir()
    worker = Worker(plan)
    detect = make_detector() if settings.language else None
    batches: list[list[list[str]]] = []
    chunks = inputs.chunks(Cursor(), 0)
    while True:
        started = time.process_time()
        if (chunk := next(chunks, None)) is None:
            break
        framed = time.process_time() - started
        finished = worker.finish(chunk)
        for name, step in finished.tally.items():
            measured.add(name, step.documents_in, step.bytes_in, step.seconds)
        read = finished.tally.step("read")
        measured.add("frame", read.documents_in, read.bytes_in, framed)
        with measured.timed("commit", len(finished), int(finished.sizes.sum())):
            chunk_file.commit(plan.directory, chunk.number, finished)
        # The texts that reached tokenization, once more.
        documents = steps.parse(chunk.items, plan.form, Step(), lambda _: None)
        documents = steps.repair_texts(documents, Step()) if settings.repair else documents
        if detect:
            verdicts = steps.judge_language(
                documents, detect, str(settings.language), settings.language_score
            )
            documents = sift(documents, verdicts, Step(), lambda _: None)
        bert = settings.samples == "bert"
        batches.append(
            steps.split_sentences(documents, settings.origin.sentences)
            if bert
            else [[text] for text in documents.texts]
        )
        flat = [text for texts in batches[-1] for text in texts]
        started = time.process_time()
        backend.encode_batch_fast(flat, add_special_tokens=False)
        raw.seconds += time.process_time() - started
        raw.documents += len(documents)
        raw.megabytes += documents.bytes / 1e6
    (folder / "batches.pickle").write_bytes(pickle.dumps(batches))
    connection.send(
        {
            **Steps(sorted(measured.items(), key=lambda item: _PLACE[item[0]])).json(),
            "raw tokenizers": raw.json(0),
        }
    )


ORDER = (
    "frame",
    "read",
    "repair",
    "language",
    "sentences",
    "tokenize",
    "decontaminate",
    "signatures",
    "commit",
)
_PLACE = {name: place for place, name in enumerate(ORDER)}


def prepare_once(settings: Settings, folder: Path, into: Whole) -> None:
    """Runs a whole preparation on a few documents, then on all, and adds their times."""
    for limit in (SMALL, settings.limit):
        out = folder / f"{'few' if limit == SMALL else 'all'}-{len(into.full)}"
        times = _in_new_process(_prepare, dataclasses.replace(settings, limit=limit), out, time.time())
        if limit == SMALL:
            into.imports.append(times["imports"])
            into.start.append(times["prepare"])
        else:
            into.full.append(times["prepare"])
            into.report = times["report"]
            into.processor.append(into.report["run"]["processor_seconds"])
        shutil.rmtree(out, ignore_errors=True)


def _prepare(connection: Connection, settings: Settings, out: Path, born: float) -> None:
    from launch import prepare_data
    from launch.console import quiet

    quiet.quiet_libraries()
    prepare_data.start_imports()
    from data.prepare import pipeline

    imported = time.time()
    started = time.perf_counter()
    try:
        report = pipeline.prepare(settings, out, _NoScreen())
    except pipeline.NothingLeft:  # of the few documents
        report = None
    connection.send({"imports": imported - born, "prepare": time.perf_counter() - started, "report": report})


class _NoScreen:
    def say(self, text: str) -> None: ...

    def phase(self, name: str, total: float | None, unit: str) -> None: ...

    def at(self, value: float, note: str = "") -> None: ...


def _in_new_process(function: Any, *arguments: Any) -> Any:
    """What `function(connection, *arguments)` sends. In a process of its own: threads, caches and peak memory start from nothing.

    Raises:
        RuntimeError: it ended without an answer; what it raised is on the screen.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=function, args=(theirs, *arguments))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        raise RuntimeError(f"{function.__name__} ended without an answer") from None
    finally:
        process.join()


def summary(
    text: str, steps: dict[str, dict[str, float]], rounds: dict[str, list[Turn]], done: Whole
) -> dict[str, Any]:
    """All of it as JSON values.

    Args:
        text: what the input is.
        steps: of `steps_alone`.
        rounds: of `tokenizing_teams.measure`.
        done: preparations made between the rounds.
    """
    comparison = tokenizing_teams.compare(rounds)
    megabytes = steps["tokenize"]["megabytes"]
    read = steps["read"]["megabytes"]
    start = statistics.median(done.start)
    prepared = {
        "seconds": done.steady, "least": min(done.full) - start, "most": max(done.full) - start, "mb_per_s": read / done.steady,
        "import_seconds": statistics.median(done.imports), "start_seconds": start, "peak_mb": done.report["run"]["peak_mb"],
        "processor_seconds": statistics.median(done.processor),
        "steps_in_it": done.report["steps"],
    }  # fmt: skip
    teams = {name: _team(turns, megabytes) for name, turns in rounds.items()}
    return {
        "text": text, "tokenized_mb": megabytes, "steps": steps, "teams": teams, "ceiling": comparison.ceiling_way, "whole": prepared,
        "ratios": ratios(steps, comparison, done),
    }  # fmt: skip


def ratios(
    steps: dict[str, dict[str, float]], comparison: tokenizing_teams.Comparison, done: Whole
) -> dict[str, float]:
    """The two goals, by wall and by processor time: the step of the raw speed, and the whole of what its slowest necessary step needs."""
    ceiling = comparison.ceiling
    return {
        "tokenization_of_raw": comparison.ratio.wall,
        "tokenization_of_raw_processor": comparison.ratio.processor,
        "tokenization_of_raw_one_core": steps["raw tokenizers"]["seconds"] / steps["tokenize"]["seconds"],
        "whole_of_ceiling": ceiling.wall / done.steady,
        "whole_of_ceiling_processor": ceiling.processor / statistics.median(done.processor),
        "whole_of_ceiling_with_start": ceiling.wall
        / (statistics.median(done.full) + statistics.median(done.imports)),
    }


def _team(turns: list[Turn], megabytes: float) -> dict[str, float]:
    walls = [turn.wall for turn in turns]
    middle = tokenizing_teams.median(turns)
    return {
        "median": middle.wall, "least": min(walls), "most": max(walls), "mb_per_s": megabytes / middle.wall,
        "processor_seconds": middle.processor,
    }  # fmt: skip
