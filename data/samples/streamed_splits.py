"""Training, validation and test samples of a stream, and token counts of its beginning."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from data.durable_files import Say, now_and_then
from data.samples.fields import HELD_OUT_SEED, Array, Fields, HeldOut, Parts
from data.samples.lanes import (
    Lane,
    LanePlace,
    LaneReader,
    PlacedDocument,
    StreamedSamples,
    lane_count,
)
from data.samples.splits import Family
from data.text.documents import Source
from data.text.held_out import Part, part_of
from recipes.families import PLACES
from recipes.problems import Key, ProblemsError, Setting
from recipes.schema import Origin, Recipe

UNIGRAM_TOKENS = 200_000
# lanes of held-out samples are numbered from here, above all others
_FIRST_HELD_OUT = 1 << 10
_FILES_AT_ONCE = 8  # to take held-out documents from in turn
# Tokenized at once, over all lanes: about 0.1 s, so that the first batch comes soon.
_BATCH_CHARACTERS = 1 << 19
_LEAST_BATCH = 1 << 15  # of one lane
# small, to read little too much: 1 document of 20 is held out
_HEAD_BATCH_CHARACTERS = 1 << 16
Split = Callable[[int], Part]  # the part of a document, by its index within its file
# Returns the result of `make`: of several ranks one makes it, and the others receive it as JSON of its form.
MakeOnce = Callable[
    [Callable[[], "StreamHead"], TypeAdapter["StreamHead"]], "StreamHead"
]


@dataclass
class _HeldOutDocuments:
    """Held-out documents of one split, up to enough samples."""

    family: Family
    number: int  # of the lane
    wanted: int
    documents: list[tuple[PlacedDocument, Any]] = field(default_factory=list)
    measured: int = 0

    @property
    def found(self) -> int:
        """Number of samples of the documents."""
        return self.family.samples(self.measured)

    @property
    def full(self) -> bool:
        return self.found >= self.wanted

    def add(self, placed: PlacedDocument, encoded: Any) -> None:
        if not self.full:
            self.documents.append((placed, encoded))
            self.measured += self.family.measure(self.number, placed.place, encoded)

    def finish(self, source: Source) -> Fields:
        """Make the samples, in a lane that reads the documents as they are encoded already."""
        reader = LaneReader(
            source, self.number, 1, lambda _: iter(self.documents), lambda _: True
        )
        lane = self.family.lane(reader)
        samples = [
            lane.take(item, HELD_OUT_SEED)
            for item in range(min(self.found, self.wanted))
        ]
        return self.family.stack(samples)


@dataclass(frozen=True)
class StreamHead:
    """Held-out samples and counts of the first documents of a stream, the same on every rank."""

    held_out: dict[str, dict[str, Array]]  # fields of the samples, by split
    counts: Array  # (V,) of the first training tokens
    documents: int  # number of documents read


HEAD = TypeAdapter(StreamHead)


def read_head(
    recipe: Recipe,
    family: Family,
    origin: Origin,
    source: Source,
    wanted: int,
    part: Split,
    say: Say,
) -> StreamHead:
    """Read until every held-out split has `wanted` samples and enough training tokens are counted.

    Raises ValueError: the stream cannot be read, or ends before it has held out one sample.
    """
    data = recipe.data
    vocabulary = recipe.model.vocab_size
    say(
        f"{source.name}: streaming; holding out its first {wanted:,} validation samples, "
        f"every {data.validation_every}th document"
    )
    splits: tuple[Part, ...] = (
        ("validation", "test") if data.test_every else ("validation",)
    )
    held = {}
    for lane, name in enumerate(splits, _FIRST_HELD_OUT):
        held[name] = _HeldOutDocuments(family.for_held_out(), lane, wanted)
    counts = np.zeros(vocabulary, np.int64)
    counted = 0
    documents = 0
    tell = now_and_then(say)

    def needed() -> Iterator[PlacedDocument]:
        nonlocal documents
        for placed in interleave_files(source):
            documents += 1
            name = part(placed.index)
            trained_enough = counted >= UNIGRAM_TOKENS
            enough = trained_enough if name == "train" else held[name].full
            if not enough:
                yield placed  # other documents are not tokenized
            elif trained_enough and all(split.full for split in held.values()):
                return
            progress = ", ".join(
                f"{h.found:,} of {h.wanted:,} {n} samples" for n, h in held.items()
            )
            tell(f"{source.name}: {progress} after {documents:,} documents")

    for placed, encoded in family.encoder(origin, _HEAD_BATCH_CHARACTERS)(needed()):
        name = part(placed.index)
        if name != "train":
            held[name].add(placed, encoded)
        elif counted < UNIGRAM_TOKENS:
            ids = family.tokens(encoded)[: UNIGRAM_TOKENS - counted]
            counts += np.bincount(ids, minlength=vocabulary)
            counted += ids.size
    _check_found(recipe, source, held)
    return StreamHead(
        {name: split.finish(source) for name, split in held.items()}, counts, documents
    )


def _check_found(
    recipe: Recipe, source: Source, held: Mapping[Part, _HeldOutDocuments]
) -> None:
    """Check that no held-out split wants for a sample at the end of the stream. Raises ProblemsError."""
    for name, split in held.items():
        if not min(split.found, split.wanted):
            key = f"data.{name}_every"
            every_nth = Setting(key, getattr(recipe.data, f"{name}_every"))
            why = split.family.too_short(split.measured)
            came = (
                f"{source.name}: with ",
                every_nth,
                " the held-out documents ",
                *why,
            )
            fix = ("set ", Key(key), " or ", Key("sequence_length"), " lower")
            raise ProblemsError.of(key, came, fix=fix)


def interleave_files(source: Source) -> Iterator[PlacedDocument]:
    """Yield documents of the first files in turn, then of the next files; a place's turn is the file."""
    for first in range(0, source.shards, _FILES_AT_ONCE):
        files = range(first, min(first + _FILES_AT_ONCE, source.shards))
        readers = deque((file, source.shard_documents(file)) for file in files)
        while readers:
            file, reader = readers.popleft()
            document = next(reader, None)
            if document:
                yield PlacedDocument(
                    LanePlace(turn=file, record=document.index), document.text
                )
                readers.append((file, reader))


def stream_parts(
    recipe: Recipe,
    family: Family,
    origin: Origin,
    source: Source,
    wanted: int,
    say: Say,
    once: MakeOnce,
) -> Parts:
    """Make the samples of every split of a stream.

    Held-out samples are made of the first held-out documents of its files.

    Args:
        wanted: samples of each held-out split.
        once: as for `data.corpus.build`.

    Raises ValueError: the stream cannot be read, or ends before it has held out one sample.
    """
    data = recipe.data

    def part(index: int) -> Part:
        return part_of(index, data.validation_every, data.test_every)

    head = once(
        lambda: read_head(recipe, family, origin, source, wanted, part, say), HEAD
    )
    held_out = {
        split: HeldOut(family.fields(values)) for split, values in head.held_out.items()
    }
    counts = head.counts
    lanes = 1 if data.blend else lane_count(recipe.batch.global_, source.shards)
    encode = family.encoder(origin, max(_LEAST_BATCH, _BATCH_CHARACTERS // lanes))
    buffer = -(-data.shuffle_buffer // lanes)

    def is_training(index: int) -> bool:
        return part(index) == "train"

    def open_lane(number: int) -> Lane:
        reader = LaneReader(
            source, number, lanes, encode, is_training, recipe.seed, buffer
        )
        return family.lane(reader)

    # The checksum tells streams apart by their head. It takes one held-out sample, since a run may be resumed
    # with more of them.
    checksum = zlib.crc32(counts.astype("<i8").tobytes(), source.shards)
    for name, values in sorted(held_out["validation"].fields.items()):
        if name == PLACES:  # follow from the tokens
            continue
        checksum = zlib.crc32(np.ascontiguousarray(values[:1]).tobytes(), checksum)
    summary = {
        "source": source.name,
        "files": source.shards,
        "lanes": lanes,
        "train_tokens_crc32": f"{checksum:08x}",
        "documents_read_for_validation": head.documents,
        "unigram_tokens": int(counts.sum()),
    }
    train = StreamedSamples(
        source, lanes, open_lane, family.stack, recipe.batch.global_, buffer, say
    )
    return Parts(train, held_out["validation"], held_out.get("test"), counts, summary)
