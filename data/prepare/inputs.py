"""The input files, and their records cut into chunks.

The ends of chunks depend only on the input and on the chunk size. Each chunk records its end in the input. A
continued run does not open the files before that place. In the file of that place it reads the records before
it again (of Parquet, those of the row group) and skips them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data.durable_files import Say, quiet
from data.prepare.settings import Settings
from data.text.file_types import SOURCES, looks_like, way_from
from data.text.listing import splits_of
from data.text.local_files import files_of, format_of
from data.text.records import (
    AnyRecord,
    BrokenRecord,
    FoundFile,
    Parsed,
    RawRecord,
    RecordFormat,
)
from data.text.sources import hub_source
from recipes.problems import Problem, ProblemsError, Text, some

# before any work is done
FILES_LOOKED_AT = 8
RECORDS_LOOKED_AT = 100
CHUNK_RECORDS = 4096  # at most; the bytes of a chunk are given by `Settings.chunk_mb`
# Text per byte of file, for the progress bar only.
_EXPANSION = {".gz": 3.0, ".bz2": 4.0, ".xz": 4.5, ".zst": 3.3, ".parquet": 1.8}


@dataclass(frozen=True)
class Cursor:
    """A place in the input: before item `position` of file `file`, after `documents` records."""

    file: int = 0
    position: int = 0
    documents: int = 0


@dataclass(frozen=True)
class Chunk:
    number: int
    items: list[tuple[int, AnyRecord]]  # (number of the file, record)
    end: Cursor
    # bytes of the input files up to `end`; an estimate inside compressed files
    progress: float


class HubFormat(RecordFormat):
    """Format of the hub's records; they hold text, and need no parsing."""

    def __init__(self, settings: Settings):
        self._origins = {str(origin.name): origin for origin in settings.origins}

    def frame(self, path: Path, start: int = 0) -> Iterator[AnyRecord]:
        return hub_source(self._origins[str(path)]).records(start)

    def parse(self, raw: RawRecord) -> Parsed:
        assert isinstance(raw.payload, str)
        return raw.payload or None


class Inputs:
    """All input files in the order they are read.

    Raises ValueError: there are none, or one cannot be opened.
    """

    def __init__(self, settings: Settings, say: Say = quiet):
        """Find the files; `say` gets what is told of many."""
        self._settings = settings
        origins = settings.origins
        self._hub = settings.origin.source == "hub"
        self.format: RecordFormat
        if self._hub:
            self.format = HubFormat(settings)
            self.files = [FoundFile(Path(str(each.name)), ()) for each in origins]
        else:
            self.format = format_of(settings.origin, settings.max_record_mb << 20)
            self.files = [file for each in origins for file in files_of(each, say)]
        self._local = [] if self._hub else self.files
        self.paths = [file.path for file in self.files]
        times = Counter(file.version or file.path for file in self.files)
        repeated = {str(f.path) for f in self.files if times[f.version or f.path] > 1}
        if repeated:
            told = some(sorted(repeated))
            raise ValueError(
                f"--name matches {told} more than once: give each file one time"
            )

    def check_beginning(self) -> list[str]:
        """Read the first records of some files; return warnings for the user.

        Raises ProblemsError: none of these files has a text.
        """
        warnings = list[str]()
        refused = list[Problem]()
        splits = splits_of(self._local) if self._local else {}
        if splits:
            warnings.append(f"files named {' and '.join(splits)} become one store")
        for path, _ in self._local[:FILES_LOOKED_AT]:
            problem = self._first_problem(path)
            if problem:
                refused.append(Problem("data.name", *problem))
                continue
            if self._settings.origin.source == "text" and (likely := looks_like(path)):
                fitting = SOURCES.get(likely)
                way = f"give --source {fitting}" if fitting else way_from(likely)
                warnings.append(
                    f"{path} looks like {likely} and is read as plain text: {way}"
                )
            return warnings
        if refused:
            raise ProblemsError(refused)
        return warnings

    def _first_problem(self, path: Path) -> tuple[str, Text] | None:
        """Return place and reason of a file's first fault; None if its first records have a text."""
        broken = list[BrokenRecord]()
        empty = False
        for item in self.format.frame(path):
            text = self.format.text_of(item)
            if isinstance(text, BrokenRecord):
                broken.append(text)
                if len(broken) >= RECORDS_LOOKED_AT:
                    break
            elif text:
                return None
            else:
                empty = True
        if broken:
            first, *others = broken
            more = f" (and so {len(others)} more records)" if others else ""
            return f"{path}:{first.number}: {first.kind}{more}", first.detail
        rule = "all its records are empty" if empty else "it has no records"
        return str(path), f"no text in it: {rule}"

    def check_unchanged(self) -> None:
        """Check that the files are those of the beginning. Raises ProblemsError."""
        for file in self._local:
            file.check_unchanged()

    @property
    def bytes(self) -> int:
        """Size of the files on this machine."""
        return sum(file.size for file in self._local)

    def records(self, start: Cursor) -> Iterator[tuple[Cursor, AnyRecord]]:
        """Yield (place after the record, record), up to `--limit` documents."""
        documents = start.documents
        limit = self._settings.limit
        for file in range(start.file, len(self.paths)):
            skip = start.position if file == start.file else 0
            for position, item in enumerate(
                self.format.frame(self.paths[file], skip), skip + 1
            ):
                if limit is not None and documents >= limit:
                    return
                documents += isinstance(item, RawRecord)
                yield Cursor(file, position, documents), item

    def chunks(self, start: Cursor, number: int) -> Iterator[Chunk]:
        """Yield the chunks from `start` on; the first one has this number."""
        items: list[tuple[int, AnyRecord]] = []
        size = 0
        at = start
        most = max(1, int(self._settings.chunk_mb * 1e6))
        in_file = 0  # bytes of records since the file, or `start`, began
        for after, item in self.records(start):
            # Bytes of the record in memory.
            content = item.payload if isinstance(item, RawRecord) else item.excerpt
            held = len(content)
            if after.file != at.file:
                in_file = 0
            in_file += held
            at = after
            items.append((after.file, item))
            size += held
            if size >= most or len(items) >= CHUNK_RECORDS:
                yield Chunk(number, items, at, self._progress(at, in_file))
                number += 1
                items = []
                size = 0
        if items:
            yield Chunk(number, items, at, float(self.bytes))

    def _progress(self, at: Cursor, in_file: int) -> float:
        if self._hub:
            return 0.0
        before = sum(file.size for file in self.files[: at.file])
        size = self.files[at.file].size
        return before + min(
            size, in_file / _EXPANSION.get(self.paths[at.file].suffix, 1.0)
        )
