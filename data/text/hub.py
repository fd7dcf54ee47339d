"""Datasets of the Hugging Face hub as streams, with retries after network errors.

The libraries below retry single requests (huggingface_hub: five times in about 20 s). Where they give up, the
shard is opened again and skipped to the first record not read yet: every document comes once and in order.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from http.client import HTTPException
from typing import Any

from data.durable_files import Say
from data.text.documents import Document, SkippedRecords
from data.text.records import (
    AnyRecord,
    BrokenRecord,
    RawRecord,
    broken_record,
    field_text,
    skip_or_refuse,
)
from recipes.problems import Key, ProblemsError, Setting, Words

# failures in a row after which a reader gives up; each record read resets the count
ATTEMPTS = 10
# each pause is twice the one before
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
_NETWORK_MODULES = {"aiohttp", "httpcore", "httpx", "httpx2", "requests", "urllib3"}
# Two kinds of timeouts until Python 3.11.
_NETWORK_ERRORS = (ConnectionError, TimeoutError, asyncio.TimeoutError, HTTPException)
_SCRIPT_HINT: tuple[Words, ...] = (
    "set ",
    Setting("data.revision", "refs/convert/parquet"),
    ", the branch that the hub converts datasets to parquet in (it has no configurations: leave ",
    Key("data.config"),
    " out), or ",
)
_WITHOUT_HUB: tuple[Words, ...] = (
    "check the name, ",
    Key("data.config"),
    ", ",
    Key("data.revision"),
    ", ",
    Key("data.split"),
    " and the network, or do without the hub: with a local copy (",
    Setting("data.source", "parquet"),
    " ",
    Setting("data.name", "DIRECTORY/*.parquet"),
    ") or with the packaged corpus (",
    Setting("data.source", "packaged"),
    ", without ",
    Key("data.name"),
    ")",
)


@dataclass(eq=False)
class HubSource:
    """A streamed dataset of the Hugging Face hub, opened at its first read; its shards are its files."""

    dataset: str
    config: str | None = None
    split: str = "train"
    text_column: str = "text"
    revision: str | None = None  # branch, tag or commit; None: the newest
    # the `datasets.IterableDataset` to read; None: the hub's
    open_stream: Callable[[], Any] | None = None
    say: Say | None = None  # gets a line per retry; None: standard error does
    skipped: SkippedRecords | None = None

    name: str = field(init=False)
    _stream: Any = field(default=None, init=False)  # opened; None after an error
    finite = False
    _reached = False  # whether the hub has ever answered

    def __post_init__(self) -> None:
        self.name = "/".join(filter(None, (self.dataset, self.config, self.split)))

    @cached_property
    def shards(self) -> int:
        # datasets' streams are Any here
        shards = self._with_retries(lambda done: iter([self._open().num_shards]))
        return next(shards)  # type: ignore[no-any-return]

    def fingerprint(self) -> str:
        """Digest the settings alone: the content of a stream is not known before it is read."""
        settings = [
            self.dataset,
            self.config,
            self.split,
            self.text_column,
            self.revision,
        ]
        return hashlib.sha256(json.dumps(settings).encode()).hexdigest()

    def documents(self, start: int = 0) -> Iterator[Document]:
        return self._documents(self.records(start))

    def records(self, start: int = 0) -> Iterator[AnyRecord]:
        """Yield all records in order after the first `start`, empty and broken ones too.

        Raises ValueError: the dataset cannot be opened or read; the message says how to do without the hub.
        """
        return self._records(self._open, self.name, start)

    def shard_documents(self, shard: int, start: int = 0) -> Iterator[Document]:
        count = self.shards
        assert 0 <= shard < count, (shard, count)

        def open_shard() -> Any:
            stream = self._open()
            now = stream.num_shards
            if now != count:
                named = Setting("data.name", self.name)
                rule = f"the dataset had {count} shards and has {now} now: it was changed while it was read"
                raise ProblemsError.of("data.name", named, rule, "start the run again")
            return stream.shard(num_shards=count, index=shard)

        where = f"{self.name}, shard {shard}" if count > 1 else self.name
        return self._documents(self._records(open_shard, where, start))

    def _documents(self, records: Iterator[AnyRecord]) -> Iterator[Document]:
        for record in records:
            if isinstance(record, BrokenRecord):
                skip_or_refuse(
                    f"{record.file}, document {record.number - 1}", record, self.skipped
                )
            elif record.payload:
                assert isinstance(record.payload, str)
                yield Document(record.number - 1, record.payload)

    def _records(
        self, open_stream: Callable[[], Any], where: str, start: int
    ) -> Iterator[AnyRecord]:
        def read(done: int) -> Iterator[dict[str, Any]]:
            stream = open_stream()
            if start + done:
                stream = stream.skip(start + done)
            return iter(stream)

        for number, record in enumerate(self._with_retries(read), start + 1):
            parsed = field_text(record, self.text_column, RawRecord(where, number, ""))
            if isinstance(parsed, BrokenRecord):
                payload = json.dumps(record, ensure_ascii=False, default=str)
                yield broken_record(where, number, parsed.kind, parsed.detail, payload)
            else:
                yield RawRecord(where, number, parsed or "")

    def _open(self) -> Any:
        """Return the dataset, opened once: asking the hub for its files takes seconds."""
        if self._stream is None:
            if self.open_stream:
                self._stream = self.open_stream()
            else:
                from datasets import load_dataset

                where = dict(split=self.split, revision=self.revision)
                self._stream = load_dataset(
                    self.dataset, self.config, **where, streaming=True
                )
            self._reached = True
        return self._stream

    def _with_retries(self, read: Callable[[int], Iterator[Any]]) -> Iterator[Any]:
        """Yield the items of `read(0)`; after n items and a network error continue with `read(n)`."""
        done = 0
        failures = 0
        while True:
            try:
                for item in read(done):
                    yield item
                    done += 1
                    failures = 0
                return
            # datasets, huggingface_hub, httpx and fsspec each raise their own
            except Exception as error:
                failures += 1
                self._stream = None  # opened anew by the next attempt
                # Nothing answered at all, and the libraries have retried that already: there is no network.
                unreachable = not self._reached and _status(error) is None
                if not is_temporary(error) or unreachable or failures >= ATTEMPTS:
                    raise self._failure(error, failures) from error
                # With jitter: a thousand ranks must not come back at the same moment.
                longest = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (failures - 1))
                pause = longest * random.uniform(0.5, 1.0)
                what = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
                attempt = f"attempt {failures + 1} of {ATTEMPTS} in {pause:.1f} s"
                say = self.say or partial(print, file=sys.stderr, flush=True)
                say(f"{self.name}: {what}: {attempt}, from record {done} on")
                time.sleep(pause)

    def _failure(self, error: Exception, failures: int) -> ProblemsError:
        times = f", {failures} times in a row" if failures > 1 else ""
        wanted = f"split={self.split!r}" + (
            f", revision={self.revision!r}" if self.revision else ""
        )
        rule = (
            f"tried load_dataset({self.dataset!r}, {self.config!r}, {wanted}, streaming=True)"
            f"{times}: {type(error).__name__}: {error}"
        )
        script = _SCRIPT_HINT if "scripts are no longer supported" in str(error) else ()
        came = Setting("data.name", self.name)
        return ProblemsError.of("data.name", came, rule, (*script, *_WITHOUT_HUB))


def is_temporary(error: BaseException) -> bool:
    """Tell whether trying again may help: connection errors, timeouts, HTTP 408, 429 and 5xx; not 404."""
    status = _status(error)
    if status is not None:
        return status in (408, 429) or status >= 500
    for cause in _chain(error):
        packages = {base.__module__.split(".")[0] for base in type(cause).__mro__}
        if isinstance(cause, _NETWORK_ERRORS) or packages & _NETWORK_MODULES:
            return True
    return False


def _status(error: BaseException) -> int | None:
    """Return the HTTP status of an error or of one of its causes; None without one."""
    for cause in _chain(error):
        # httpx, requests and huggingface_hub keep the response, aiohttp the number.
        status = getattr(
            getattr(cause, "response", cause),
            "status_code",
            getattr(cause, "status", None),
        )
        if isinstance(status, int):
            return status
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or (
            None if error.__suppress_context__ else error.__context__
        )
