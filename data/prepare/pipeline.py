"""A whole preparation: chunks by worker processes, then duplicates, the store and the report."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from data.prepare import assemble, chunk_file, pool, report, tokenizer
from data.prepare.contamination import Evaluation, read_evaluation
from data.prepare.inputs import Chunk, Cursor, Inputs
from data.prepare.minhash import Bands, choose_bands
from data.prepare.settings import FORMAT_VERSION, PreparationFailed, Settings
from data.prepare.tally import BROKEN, Tally
from data.prepare.work import Done, Plan, peak_memory
from data.prepare.workspace import REPORT, Workspace
from data.vocabularies.encoder import ONE_CORE_BATCH_CHARACTERS, Encoder
from data.vocabularies.vocabulary import vocabulary_digest, vocabulary_size
from recipes.vocabularies import TRAINED

EARLY_RECORDS = 10_000  # from here on too many broken ones end a run at once, not at its end
EXAMPLES = 3  # broken records that are printed


class TooManyBroken(PreparationFailed):
    """More records are broken than --max_broken allows."""


class NothingLeft(PreparationFailed):
    """No document passed all steps."""


class Screen(Protocol):
    """Shows how far a preparation is."""

    def say(self, text: str) -> None: ...

    def phase(self, name: str, total: float | None, unit: str) -> None:
        """What is counted from now on; total None: unknown."""
        ...

    def at(self, value: float, note: str = "") -> None: ...


@dataclass
class Run:
    """What is known while it runs."""

    tally: Tally = field(default_factory=Tally)
    chunks: int = 0
    found: int = 0  # chunks that an earlier run had committed
    new_bytes: int = 0  # of text that this run has parsed
    worker_peak: int = 0
    worker_seconds: float = 0.0  # of processor time
    started: float = field(default_factory=time.perf_counter)
    spent: float = field(default_factory=time.process_time)  # by this process when it started


def prepare(settings: Settings, out: Path, screen: Screen, force: bool = False) -> dict[str, Any] | None:
    """Prepares `out`; returns the report, or None where the same command had completed it.

    Killed at any moment, it continues when it is called again with equal deciding settings.

    Raises:
        ValueError: the settings, the input or what is at `out` forbid it; nothing was changed.
        TooManyBroken, NothingLeft, pool.WorkerDied: it failed; the work is kept.
    """
    space = Workspace(out)
    inputs = Inputs(settings)
    bands = choose_bands(settings.permutations, settings.dedup) if settings.dedup is not None else None
    evaluation = read_evaluation(settings.decontaminate, settings.ngram) if settings.decontaminate else None
    manifest = describe_command(settings, inputs)
    with space.locked():
        if space.already_complete(manifest, force, screen.say):
            space.clear_if(manifest)
            return None
        if space.begin(manifest, force, screen.say):
            screen.say(f"{space.partial}: resuming the unfinished work of the same command")
        vocabulary = tokenizer.obtain(settings, inputs, space.partial, screen.say)
        encoder = Encoder(vocabulary, ONE_CORE_BATCH_CHARACTERS)
        plan = Plan(settings, inputs.format, encoder, vocabulary_size(vocabulary), evaluation, space.chunks)
        run = process_chunks(plan, inputs, screen)
        check_broken(run.tally, settings.max_broken, space.chunks, run.chunks)
        if inputs.look() != inputs.files:
            raise ValueError("input files changed while they were read: begin again with --force")
        result = space.new_result()
        facts = finish(plan, inputs, run, space, bands, screen)
        vocabulary.save_pretrained(result / tokenizer.FOLDER)
        whole = describe(plan, inputs, run, facts, manifest, vocabulary_digest(vocabulary), result)
        (result / REPORT).write_text(
            json.dumps(whole, indent=1, ensure_ascii=False) + "\n", encoding="utf-8", errors="replace"
        )
        (result / "report.txt").write_text(report.as_text(whole), encoding="utf-8", errors="replace")
        space.publish()
        return whole


def describe_command(settings: Settings, inputs: Inputs) -> dict[str, Any]:
    """What decides the result: two preparations with equal manifests give equal stores."""
    evaluation = {path: report.file_digest(Path(path)) for path in settings.decontaminate}
    return {
        "format": FORMAT_VERSION,
        "arguments": settings.deciding(),
        "inputs": inputs.fingerprint(),
        "evaluation": evaluation,
        "versions": report.versions(),
    }


def process_chunks(plan: Plan, inputs: Inputs, screen: Screen) -> Run:
    """Every chunk that is not committed yet goes through the workers."""
    run = Run()
    cursor = _committed_prefix(plan.directory, run)
    first = run.chunks
    seen = dict[int, float]()  # progress by chunk
    screen.phase("text", float(inputs.bytes) if inputs.bytes else None, "B")

    def missing() -> Iterator[Chunk]:
        for chunk in inputs.chunks(cursor, first):
            run.chunks = chunk.number + 1
            if _is_there(plan.directory, chunk.number):
                run.found += 1
                run.tally.add(chunk_file.read_head(plan.directory, chunk.number)[1])
            else:
                yield chunk

    def done(answer: Done) -> None:
        run.tally.add(answer.tally)
        run.new_bytes += answer.tally.step("read").bytes_in
        run.worker_peak = max(run.worker_peak, answer.peak_bytes)
        run.worker_seconds += answer.seconds
        seen[answer.number] = answer.progress
        if run.tally.records >= EARLY_RECORDS:
            check_broken(run.tally, plan.settings.max_broken, plan.directory, run.chunks)
        screen.at(
            max(seen.values()),
            f"{run.new_bytes / 1e6 / (time.perf_counter() - run.started):.2f} MB/s of text",
        )

    pool.run(plan, missing(), plan.settings.workers, done)
    return run


def _committed_prefix(directory: Path, run: Run) -> Cursor:
    """Counts the chunks that are there without a gap; the input is read from where the last of them ended."""
    cursor = Cursor()
    while _is_there(directory, run.chunks):
        cursor, tally = chunk_file.read_head(directory, run.chunks)
        run.tally.add(tally)
        run.chunks += 1
        run.found += 1
    return cursor


def _is_there(directory: Path, number: int) -> bool:
    return chunk_file.path_of(directory, number).is_file()


def check_broken(tally: Tally, most: float, chunks: Path, count: int) -> None:
    """Raises TooManyBroken where more than the share `most` of the records is broken."""
    share = tally.broken / tally.records if tally.records else 0.0
    if share <= most:
        return
    reasons = report.broken_summary(tally)["reasons"]
    records = f"{tally.broken:,} of {tally.records:,} records are broken ({share:.2%})"
    lines = [
        f"{records}, more than --max_broken {most} ({most:.2%}); nothing is published",
        *(f"  {reason}: {found['records']:,} ({found['share']:.2%})" for reason, found in reasons.items()),
        "the first ones",
        *(f"  {e['file']}:{e['number']}: {e['reason']}" for e in _broken_examples(chunks, count)),
        "repair the input, or allow more: the same command with a larger --max_broken resumes the work done",
    ]
    raise TooManyBroken("\n".join(lines))


def _broken_examples(chunks: Path, count: int) -> list[dict[str, Any]]:
    examples: list[dict[str, Any]] = []
    for number in range(count):
        if len(examples) >= EXAMPLES:
            break
        if _is_there(chunks, number):
            lines = chunk_file.read(chunks, number).rejected.get("broken", b"").split(b"\n")
            examples += [json.loads(line) for line in lines[:EXAMPLES] if line]
    return examples[:EXAMPLES]


def finish(
    plan: Plan, inputs: Inputs, run: Run, space: Workspace, bands: Bands | None, screen: Screen
) -> dict[str, Any]:
    """Deduplicates over all chunks and writes the store into the result; returns facts for the report."""
    settings = plan.settings
    documents = next((step.documents_out for step in reversed(run.tally.values())), 0)
    permutations = settings.permutations if bands else 0
    index = assemble.gather(space.chunks, run.chunks, documents, permutations, space.index)
    duplicates, dedup = None, None
    if bands is not None and settings.dedup is not None:
        screen.phase("duplicates", bands.count, "bands")
        step = run.tally.step("deduplicate")
        started = time.perf_counter()
        duplicates = assemble.deduplicate(index, bands, settings.dedup, _counter(screen))
        step.seconds = time.perf_counter() - started
        arrays = (index.files, index.numbers, index.digests, index.marks)
        dedup = {
            "threshold": settings.dedup,
            "bands": bands.count,
            "rows": bands.rows,
            "permutations": permutations,
            "probability_at_threshold": bands.probability(settings.dedup),
            "pairs_compared": duplicates.candidates,
            "index_bytes": int(sum(array.nbytes for array in arrays)),
        }
        if not (duplicates.of < 0).any():
            documents = 0
    if not documents:
        raise NothingLeft(
            f"no document passed all steps:\n{_losses(run.tally)}\ngive other input, or relax the steps that "
            "dropped it"
        )
    screen.phase("store", run.chunks, "chunks")
    started = time.perf_counter()
    names = [str(path) for path in inputs.paths]
    store = assemble.write(
        space.chunks, index, duplicates, names, plan.vocab_size, space.result, run.tally, _counter(screen)
    )
    run.tally.step("write").seconds = time.perf_counter() - started
    return {"store": asdict(store), "deduplication": dedup}


def _counter(screen: Screen) -> Callable[[], None]:
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        screen.at(count)

    return step


def _losses(tally: Tally) -> str:
    return "\n".join(
        f"  {reason}: {count:,}" for step in tally.values() for reason, (count, _) in step.dropped.items()
    )


def describe(
    plan: Plan,
    inputs: Inputs,
    run: Run,
    facts: dict[str, Any],
    manifest: dict[str, Any],
    digest: str,
    result: Path,
) -> dict[str, Any]:
    """The report."""
    settings, tally = plan.settings, run.tally
    seconds = time.perf_counter() - run.started
    first = f"the first {settings.vocabulary_mb} MB of the input's text"
    trained_on = f"{first}, before any document was dropped for its length"
    store = {"prefix": assemble.STORE, "samples": settings.samples, "vocab_size": plan.vocab_size}
    vocabulary = {**settings.tokenizer.model_dump(), "vocab_size": plan.vocab_size, "digest": digest}
    return {
        "manifest": manifest,
        "store": {**store, "vocabulary_digest": digest, **facts["store"]},
        "tokenizer": {**vocabulary, "trained_on": trained_on if settings.tokenizer.kind in TRAINED else None},
        "steps": tally.json(),
        "broken": report.broken_summary(tally),
        "warnings": warnings(tally),
        "deduplication": facts["deduplication"],
        "decontamination": _decontamination(plan.evaluation, manifest),
        "mb_per_second_and_core": report.speeds(tally),
        "inputs": report.describe_inputs(inputs.files, max(1, settings.workers)),
        "outputs": report.describe_outputs(result),
        "run": {
            "workers": settings.workers,
            "chunks": run.chunks,
            "chunks_found": run.found,
            "wall_seconds": round(seconds, 2),
            "mb_per_second": run.new_bytes / 1e6 / seconds,
            "processor_seconds": round(run.worker_seconds + time.process_time() - run.spent, 2),
            "peak_mb": round((peak_memory() + settings.workers * run.worker_peak) / 1e6),
        },
        "machine": report.machine(),
    }


def warnings(tally: Tally) -> list[str]:
    """Losses without a share: nobody knows how many records the lost end of a file held."""
    lost = tally.step("read").dropped
    kinds = (f"{BROKEN}damaged file", f"{BROKEN}empty file")
    files = sum(lost[kind][0] for kind in kinds if kind in lost)
    what = f"{files} input files are damaged or empty, and what they lack is not here"
    return [f"{what}: see {assemble.REJECTED}/broken.jsonl"] if files else []


def _decontamination(evaluation: Evaluation | None, manifest: dict[str, Any]) -> dict[str, Any] | None:
    if evaluation is None:
        return None
    return {
        "files": [{"name": name, "sha256": digest} for name, digest in manifest["evaluation"].items()],
        "ngram": evaluation.n,
        "texts": evaluation.texts,
        "texts_too_short": evaluation.too_short,
        "ngrams": len(evaluation.hashes),
    }
