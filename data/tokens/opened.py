"""The token stores of a recipe's origins: made in the cache of a finite source, or prepared before.

Ready-made ones are of prepare_data or of another tool of the Megatron family.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers
from transformers import PreTrainedTokenizerFast

from data import durable_files
from data.durable_files import DamagedFile, Say, now_and_then, write_json
from data.text.documents import Document, SkippedRecords, Source, end_of_document
from data.text.vocabulary import vocabulary_digest, vocabulary_size
from data.tokens.store import (
    Checksum,
    Store,
    StoreWriter,
    bin_path,
    idx_path,
    open_store,
    read_header,
)
from recipes import files
from recipes.families import FAMILIES
from recipes.problems import Key, Problem, ProblemsError, Setting, Text, counted
from recipes.schema import Origin, Recipe

FORMAT_VERSION = 2  # of a cached store's facts
# bytes; every process reads a .bin up to this size itself: 0.05 s at zlib's 1.3 GB/s
READ_BY_ALL = 1 << 26
REPORT = "report.json"
MOST_REPORT = 1 << 30  # bytes; it names every input file
LOOKED_AT = 1 << 22  # bytes of tokens to check when a run is planned
JUDGED = 1000  # documents whose ends are compared
FEW = 100  # documents, which may all end in a full stop
Sequences = Literal["documents", "sentences"]  # content of one sequence of a store


@dataclass(frozen=True)
class OpenedStore:
    """An open store and facts about it."""

    name: str
    store: Store
    text_bytes: int | None  # UTF-8 bytes of its documents; None: unknown
    checksum: str


def sequences_of(family: str) -> Sequences:
    return "sentences" if FAMILIES[family].masked else "documents"


def opened_store(
    recipe: Recipe,
    origin: Origin,
    source: Source | None,
    tokenizer: PreTrainedTokenizerFast,
    directory: Path,
    say: Say,
) -> OpenedStore | None:
    """Open the store of an origin, or make it in the cache of its source; None: the source is a stream."""
    sequences = sequences_of(recipe.model.family)
    if source is None:
        return ready_made_store(
            recipe.data.tokenizer.kind, sequences, origin, tokenizer, directory, say
        )
    if source.finite:
        return cached_store(sequences, origin, source, tokenizer, directory, say)
    return None


def checksum_of(store: Store, directory: Path, say: Say) -> Checksum:
    """Return the CRC-32 of both files.

    Of processes with one cache `directory`, one reads a large store and keeps the result there for all later
    ones, until size, inode or times of a file change.
    """
    if store.tokens_array.nbytes <= READ_BY_ALL:
        return store.checksum()
    paths = (idx_path(store.prefix).resolve(), bin_path(store.prefix).resolve())
    facts = [(path, path.stat()) for path in paths]
    version = [
        (str(path), f.st_size, f.st_ino, f.st_mtime_ns, f.st_ctime_ns)
        for path, f in facts
    ]
    kept = (
        directory
        / f"{hashlib.sha256(json.dumps(version).encode()).hexdigest()[:20]}.crc32.json"
    )

    def read() -> Checksum:
        try:
            return Checksum(**json.loads(kept.read_text()))
        except (TypeError, ValueError) as error:
            raise DamagedFile(f"{kept} holds no checksums") from error

    def write() -> None:
        write_json(kept, store.checksum(say)._asdict())

    try:
        return durable_files.cached(
            (kept,), read, write, f"checksum of {store.prefix}", say
        )
    except durable_files.UnwritableCache:  # then every process reads for itself
        return store.checksum(say)


def cached_store(
    sequences: Sequences,
    origin: Origin,
    source: Source,
    tokenizer: PreTrainedTokenizerFast,
    directory: Path,
    say: Say,
) -> OpenedStore:
    """Open the cached token store of a source; make it where the cache lacks it.

    Document d of it is document d of the source, empty ones too, so that one store serves every split. A JSON
    file next to it has its origin and its checksums.

    Raises ValueError: the source or the cache directory cannot be read.
    """
    sentences = origin.sentences if sequences == "sentences" else None
    made_of = {
        "format": FORMAT_VERSION,
        "source": source.fingerprint(),
        "vocabulary": vocabulary_digest(tokenizer),
        "tokenizers": tokenizers.__version__,
        "sentences": sentences,
    }
    key = hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:20]
    prefix = directory / f"{key}.{sequences}"
    facts_path = prefix.with_name(prefix.name + ".json")
    what = f"tokens of {source.name}"

    def write() -> None:
        from data.text.encoder import Encoder, SentenceEncoder

        encode = (
            SentenceEncoder(tokenizer, sentences) if sentences else Encoder(tokenizer)
        )
        facts = made_of | _tokenize(
            encode(source.documents()),
            StoreWriter(prefix, vocabulary_size(tokenizer)),
            what,
            say,
        )
        left_out = source.skipped.found() if source.skipped else []
        facts["left_out"] = SkippedRecords.describe(left_out) if left_out else ""
        content = json.dumps(facts, indent=2)
        with durable_files.replacing(facts_path) as file:
            file.write(
                f"{content}\n{hashlib.sha256(content.encode()).hexdigest()}\n".encode()
            )

    def read() -> OpenedStore:
        content, _, digest = facts_path.read_bytes().rstrip(b"\n").rpartition(b"\n")
        if hashlib.sha256(content).hexdigest().encode() != digest:
            raise DamagedFile(f"{facts_path} does not match its checksum")
        facts = json.loads(content)
        store = open_store(prefix)
        checksum = checksum_of(store, directory, say)
        if (checksum.idx, checksum.bin) != (facts["idx_crc32"], facts["bin_crc32"]):
            raise DamagedFile(f"{prefix} does not match its checksum")
        if facts.get("left_out"):
            say(f"{what}: {facts['left_out']}")
        return OpenedStore(
            source.name, store, facts["text_bytes"], f"{checksum.bin:08x}"
        )

    return durable_files.cached(
        (facts_path, bin_path(prefix), idx_path(prefix)), read, write, what, say
    )


def _tokenize(
    encoded: Iterable[tuple[Document, Any]], writer: StoreWriter, what: str, say: Say
) -> dict[str, int]:
    """Write the documents to a store; `say` the progress every few seconds and at the end."""
    text_bytes = 0
    started = time.monotonic()
    tell = now_and_then(say)

    def progress(since: str) -> str:
        done = f"{counted(writer.documents, 'document')}, {counted(writer.tokens, 'token')}"
        return f"{what}: {done} {since} {time.monotonic() - started:.1f} s"

    with writer:
        for document, tokens in encoded:
            for _ in range(writer.documents, document.index):
                writer.add_document([])  # the source passes over its empty documents
            sequences = tokens if isinstance(tokens, list) else [tokens]
            writer.add_document(sequences)
            text_bytes += len(document.text.encode())
            tell(progress("after"))
    say(progress("in"))
    assert writer.checksum
    made = {
        "documents": writer.documents,
        "tokens": writer.tokens,
        "text_bytes": text_bytes,
    }
    return made | {"idx_crc32": writer.checksum.idx, "bin_crc32": writer.checksum.bin}


def ready_made_store(
    kind: str,
    sequences: Sequences,
    origin: Origin,
    tokenizer: PreTrainedTokenizerFast,
    directory: Path,
    say: Say,
) -> OpenedStore:
    """Open and check the store of an origin.

    Args:
        kind: `data.tokenizer.kind`, the source of `tokenizer`.
        sequences: content of one sequence; a GPT can train from either.
        directory: cache for the checksums of large stores.

    Raises ValueError: there is no sound store, it differs from its report, any token is outside the
    vocabulary or all are of another, or a BERT's store has no sentences.
    """
    prefix = store_prefix(origin, sequences)
    try:
        store = open_store(prefix)
    except (OSError, DamagedFile) as error:
        raise _refused(origin, str(error), "prepare or copy the store again") from error
    facts = _reported(prefix.parent / REPORT)
    stated = {key: facts[key] for key in ("documents", "tokens") if key in facts}
    if stated != {key: getattr(store, key) for key in stated}:
        raise _refused(
            origin,
            f"has {store.documents} documents and {store.tokens} tokens, and {REPORT} says {stated}"
            ": they do not belong together",
            "copy the whole directory again",
        )
    _check_digest(kind, origin, facts, tokenizer)
    _check_ends(kind, origin, store, tokenizer)
    each = np.diff(store.document_index)
    if sequences == "sentences" and each.size and each.max() <= 1:
        rule = "every document of the store is one sequence, and a BERT's samples are made of sentences"
        raise _refused(
            origin,
            rule,
            "prepare it with launch/prepare_data.py --samples bert (Megatron: --split-sentences)",
        )
    checksum = checksum_of(store, directory, say)
    recorded = facts["crc32"] if isinstance(facts.get("crc32"), dict) else {}
    now = {half: f"{crc:08x}" for half, crc in checksum._asdict().items()}
    changed = [half for half, crc in now.items() if recorded.get(half, crc) != crc]
    if changed:
        came = [
            f"{prefix}.{x} has CRC-32 {now[x]}, and {REPORT} recorded {recorded[x]}"
            for x in changed
        ]
        rule = "it has changed since prepare_data wrote it"
        fix = "copy the whole directory again, or prepare the store again"
        raise ProblemsError(Problem("data.name", one, rule, fix) for one in came)
    tokens = vocabulary_size(tokenizer)
    if checksum.largest >= tokens:
        place = store.outside(tokens)
        token = store.tokens_array[place]
        raise outside_vocabulary(
            f"{origin.name}: token {token} at place {place:,}", tokens
        )
    text_bytes = facts.get("text_bytes")
    if not isinstance(text_bytes, int):
        text_bytes = None
    return OpenedStore(str(origin.name), store, text_bytes, now["bin"])


def check_ready_made(
    kind: str,
    sequences: Sequences,
    origin: Origin,
    vocab_size: int,
    tokenizer: PreTrainedTokenizerFast | None,
) -> None:
    """Check the first bytes of a store and its report; `ready_made_store` checks all of it.

    Args:
        vocab_size: `model.vocab_size`.
        tokenizer: the recipe's; None: not made yet.

    Raises ValueError: there is no store, or one of another vocabulary.
    """
    prefix = store_prefix(origin, sequences)
    try:
        dtype = read_header(idx_path(prefix)).dtype
        tokens = np.fromfile(bin_path(prefix), dtype, LOOKED_AT // dtype.itemsize)
    except (OSError, DamagedFile) as error:
        raise _refused(origin, str(error), "prepare or copy the store again") from error
    facts = _reported(prefix.parent / REPORT)
    made_with = facts.get("vocab_size", vocab_size)
    if tokenizer is None and made_with != vocab_size:
        came = Setting("model.vocab_size", vocab_size)
        rule = (
            f"the store {origin.name} was made with a vocabulary of {made_with} tokens"
        )
        fix = ("set ", Setting("model.vocab_size", made_with))
        raise ProblemsError.of("model.vocab_size", came, rule, fix)
    if tokenizer is not None:
        _check_digest(kind, origin, facts, tokenizer)
    beyond = tokens >= vocab_size
    wrong = tokens[beyond | (tokens < 0)]
    if wrong.size:
        raise outside_vocabulary(f"{origin.name}: token {wrong[0]}", vocab_size)


def outside_vocabulary(what: str, vocab_size: int) -> ProblemsError:
    """Make the error for a token of a store outside the recipe's vocabulary."""
    came = (
        f"{what} is outside the vocabulary of ",
        Setting("model.vocab_size", vocab_size),
    )
    vocabulary = ("set ", Key("data.tokenizer.kind"), " and ", Key("model.vocab_size"))
    fix = (*vocabulary, " to the vocabulary that the store was made with")
    return ProblemsError.of("model.vocab_size", came, fix=fix)


def _check_digest(
    kind: str, origin: Origin, facts: dict[str, Any], tokenizer: PreTrainedTokenizerFast
) -> None:
    digest = vocabulary_digest(tokenizer)
    if facts.get("vocabulary_digest", digest) != digest:
        given = Setting("data.tokenizer.kind", kind)
        fix = (
            "set ",
            Setting("data.tokenizer.kind", "store"),
            ", which takes the one kept with it",
        )
        raise _refused(
            origin,
            ("the store was made with another vocabulary than ", given, " gives"),
            fix,
        )


def _check_ends(
    kind: str, origin: Origin, store: Store, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Refuse a store whose documents all end in a token that stands nowhere else and does not end ours."""
    first = store.document_index[: JUDGED + 1]
    edges = np.unique(store.sequence_starts(first))
    ends = store.tokens_array[edges[1:] - 1]
    if (
        len(ends) < 2
        or (ends != ends[0]).any()
        or ends[0] == end_of_document(tokenizer)
    ):
        return
    last = int(ends[0])
    sentence_end = len(ends) < FEW and not any(
        map(str.isalnum, tokenizer.decode([last]))
    )
    if sentence_end or np.count_nonzero(store.tokens_array[: edges[-1]] == last) > len(
        ends
    ):
        return
    given = Setting("data.tokenizer.kind", kind)
    rule = (
        f"every document ends in token {last}, which stands nowhere else, and those of"
    )
    ours = f"gives end in {end_of_document(tokenizer)}: the store was made with another vocabulary"
    fix = (
        "set ",
        Key("data.tokenizer.kind"),
        " and ",
        Key("data.tokenizer.path"),
        " to that one",
    )
    raise _refused(origin, (rule, " ", given, f" {ours}"), fix)


def store_prefix(origin: Origin, sequences: Sequences) -> Path:
    """Return the path of a store without .bin or .idx. Raises ValueError: there is none, or several."""
    from data.text.file_types import looks_like
    from data.text.local_files import named_path

    path, _ = named_path(origin)
    if not path.is_dir():
        prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
        if not (bin_path(prefix).exists() or idx_path(prefix).exists()):
            if path.with_name(path.name + ".partial").exists():
                fix = "run its command again, which resumes the work"
                raise _refused(origin, "prepare_data has not finished there", fix)
            rule = f"no such directory, and no {bin_path(prefix).name} (seen from {Path.cwd()})"
            if path.is_file() and (kind := looks_like(path)):
                rule = f"it is {kind}, and no token store"
            fix = "give what prepare_data wrote, or the path of a .bin and an .idx without the ending"
            raise _refused(origin, rule, fix)
        _check_index(origin, prefix)
        return prefix
    prefixes = sorted(file.with_suffix("") for file in path.glob("*.idx"))
    if not prefixes:
        for file in path.glob("*.bin"):
            _check_index(origin, file.with_suffix(""))
    preferred = [
        prefix for prefix in prefixes if sequences.removesuffix("s") in prefix.name
    ]
    chosen = preferred if len(prefixes) > 1 else prefixes
    if len(chosen) != 1:
        names = ", ".join(prefix.name for prefix in prefixes) or "none"
        rule = f"a directory with {len(prefixes)} token stores ({names})"
        raise _refused(origin, rule, f"name one of them, as {path / 'NAME'}")
    files.check_names("data.name", chosen)
    return chosen[0]


def _check_index(origin: Origin, prefix: Path) -> None:
    from data.text.file_types import RAW, way_from

    if bin_path(prefix).exists() and not idx_path(prefix).exists():
        rule = f"{bin_path(prefix).name} has no {idx_path(prefix).name}, and a token store is both"
        raise _refused(
            origin, rule, f"copy the .idx too; if it is {RAW}, {way_from(RAW)}"
        )


def _refused(origin: Origin, rule: Text, fix: Text) -> ProblemsError:
    return ProblemsError.of("data.name", Setting("data.name", origin.name), rule, fix)


def _reported(report: Path) -> dict[str, Any]:
    """Read the part on the store of prepare_data's report; {} without a report."""
    if not report.exists():
        return {}
    facts = files.read_json_object(report, MOST_REPORT).get("store", {})
    if not isinstance(facts, dict):
        came = f'its "store" is {files.named_kind(facts)}'
        files.refuse(
            report,
            came,
            "prepare_data writes an object there",
            "prepare the store again",
        )
    return facts
