"""Datasets of the Hugging Face hub, read as a stream that outlives network errors.

The libraries below retry single requests (huggingface_hub: five times in about 20 s). Where they give up, the
shard is opened again and skipped to the first record that was not read yet, so that every document comes out
once and in order.
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
from http.client import HTTPException
from typing import Any

from data.cache import Say
from data.sources.documents import Document, refusal
from data.sources.records import Broken, Raw, broken, field_text
from recipes.problems import Key, Problem, ProblemsError, Setting, Words

_NETWORK_MODULES = {"aiohttp", "httpcore", "httpx", "httpx2", "requests", "urllib3"}
_SCRIPT_HINT: tuple[Words, ...] = (
    *("set ", Setting("data.revision", "refs/convert/parquet")),
    ", the branch that the hub converts datasets to parquet in (it has no configurations: leave ",
    *(Key("data.config"), " out), or "),
)
_WITHOUT_HUB: tuple[Words, ...] = (
    *("check the name, ", Key("data.config"), ", ", Key("data.revision"), ", ", Key("data.split")),
    " and the network, or do without the hub: with a local copy (download the dataset's parquet files where ",
    *(
        "there is a network; ",
        Setting("data.source", "parquet"),
        " ",
        Setting("data.name", "DIRECTORY/*.parquet"),
    ),
    *("; JSON lines with ", Setting("data.source", "jsonl"), ") or with the packaged corpus ("),
    *(Setting("data.source", "packaged"), ")"),
)
# Two kinds of timeouts until Python 3.11.
_NETWORK_ERRORS = (ConnectionError, TimeoutError, asyncio.TimeoutError, HTTPException)


@dataclass(frozen=True)
class Backoff:
    """Exponential pauses with jitter: a thousand ranks must not come back at the same moment."""

    attempts: int = 10  # failures in a row, without a record between them, after which the reader gives up
    first_s: float = 1.0
    longest_s: float = 60.0
    sleep: Callable[[float], None] = field(default=time.sleep, compare=False)

    def pause_s(self, failures: int) -> float:
        """Seconds after that many failures in a row: 50 to 100 % of first_s x 2^(failures - 1)."""
        return min(self.longest_s, self.first_s * 2 ** (failures - 1)) * random.uniform(0.5, 1.0)


class HubSource:
    """A dataset of the Hugging Face hub, streamed. Its shards are its files."""

    finite = False

    def __init__(
        self,
        name: str,
        config: str | None = None,
        split: str = "train",
        text_column: str = "text",
        revision: str | None = None,
        open_stream: Callable[[], Any] | None = None,
        say: Say | None = None,
        backoff: Backoff | None = None,
    ):
        """Name a dataset, which is opened when it is first read.

        Args:
            revision: branch, tag or commit; None: the newest.
            open_stream: returns the `datasets.IterableDataset` to read; by default the hub's.
            say: gets a line per retry; by default standard error does.
        """
        self.name = "/".join(filter(None, (name, config, split)))
        self._settings = [name, config, split, text_column, revision]
        self._column = text_column
        wanted = f", revision={revision!r}" if revision else ""
        self._tried = f"load_dataset({name!r}, {config!r}, split={split!r}{wanted}, streaming=True)"
        self._open_stream = open_stream or _hub_stream(name, config, split, revision)
        self._stream: Any = None  # opened; None after an error
        self._say = say or _to_standard_error
        self._backoff = backoff or Backoff()
        self._reached = False  # whether the hub has ever answered
        self._shards: int | None = None

    @property
    def shards(self) -> int:
        if self._shards is None:
            # One attempt after another, as for records.
            self._shards = next(self._with_retries(lambda done: iter([self._open().num_shards])))
        return self._shards

    def fingerprint(self) -> str:
        """Of the settings alone: the hub says nothing of a stream's content before it is read."""
        return hashlib.sha256(json.dumps(self._settings).encode()).hexdigest()

    def documents(self, start: int = 0) -> Iterator[Document]:
        """Documents in order, from index `start` on.

        Raises:
            ValueError: the dataset cannot be opened or read; the message says how to do without the hub. Or a
                record is broken.
        """
        return _documents(self.records(start))

    def records(self, start: int = 0) -> Iterator[Raw | Broken]:
        """All records in order, after the first `start` ones.

        Their texts, empty ones too, and the broken records.

        Raises:
            ValueError: as of `documents`, but not for a broken record.
        """
        return self._records(self._open, self.name, start)

    def shard_documents(self, shard: int, start: int = 0) -> Iterator[Document]:
        count = self.shards
        assert 0 <= shard < count, (shard, count)

        def open_shard() -> Any:
            stream = self._open()
            if (now := stream.num_shards) != count:
                named = Setting("data.name", self.name)
                rule = f"the dataset had {count} shards and has {now} now: it was changed while it was read"
                raise ProblemsError([Problem("data.name", named, rule, "start the run again")])
            return stream.shard(num_shards=count, index=shard)

        where = f"{self.name}, shard {shard}" if count > 1 else self.name
        return _documents(self._records(open_shard, where, start))

    def _records(self, open_stream: Callable[[], Any], where: str, start: int) -> Iterator[Raw | Broken]:
        def read(done: int) -> Iterator[dict[str, Any]]:
            stream, skipped = open_stream(), start + done
            return iter(stream.skip(skipped) if skipped else stream)

        for number, record in enumerate(self._with_retries(read), start + 1):
            found = field_text(record, self._column, Raw(where, number, ""))
            if isinstance(found, Broken):
                payload = json.dumps(record, ensure_ascii=False, default=str)
                yield broken(where, number, found.kind, found.detail, payload)
            else:
                yield Raw(where, number, found or "")

    def _open(self) -> Any:
        """The dataset; asking the hub for its files takes seconds, so that this is done once."""
        stream = self._stream
        if stream is None:
            stream = self._stream = self._open_stream()
            self._reached = True
        return stream

    def _with_retries(self, read: Callable[[int], Iterator[Any]]) -> Iterator[Any]:
        """The items of `read(0)`; after a network error those of `read(n)`, n being the items that came out.

        Raises:
            ValueError: another error, or too many network errors in a row.
        """
        done = failures = 0
        while True:
            try:
                for item in read(done):
                    yield item
                    done += 1
                    failures = 0
                return
            except Exception as error:  # datasets, huggingface_hub, httpx and fsspec each raise their own
                failures += 1
                self._stream = None  # opened anew by the next attempt
                # Nothing answered at all, and the libraries have retried that already: there is no network.
                unreachable = not self._reached and _status(error) is None
                if not is_temporary(error) or unreachable or failures >= self._backoff.attempts:
                    raise self._given_up(error, failures) from error
                pause = self._backoff.pause_s(failures)
                self._say(
                    f"{self.name}: {type(error).__name__}: {_first_line(error)}: attempt {failures + 1} of "
                    f"{self._backoff.attempts} "
                    f"in {pause:.1f} s, from record {done} on"
                )
                self._backoff.sleep(pause)

    def _given_up(self, error: Exception, failures: int) -> ProblemsError:
        times = f", {failures} times in a row" if failures > 1 else ""
        rule = f"tried {self._tried}{times}: {type(error).__name__}: {error}"
        script = _SCRIPT_HINT if "scripts are no longer supported" in str(error) else ()
        came = Setting("data.name", self.name)
        return ProblemsError([Problem("data.name", came, rule, (*script, *_WITHOUT_HUB))])


def is_temporary(error: BaseException) -> bool:
    """Whether trying again may help: connection errors, timeouts, HTTP 408, 429 and 5xx; not 404."""
    status = _status(error)
    if status is not None:
        return status in (408, 429) or status >= 500
    return any(
        isinstance(cause, _NETWORK_ERRORS)
        or any(base.__module__.split(".")[0] in _NETWORK_MODULES for base in type(cause).__mro__)
        for cause in _chain(error)
    )


def _status(error: BaseException) -> int | None:
    """The HTTP status that an error, or one that it came from, carries."""
    for cause in _chain(error):
        # httpx, requests and huggingface_hub keep the response, aiohttp the number.
        response = getattr(cause, "response", None)
        for found in (getattr(response, "status_code", None), getattr(cause, "status", None)):
            if isinstance(found, int):
                return found
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:200]


def _to_standard_error(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _documents(found: Iterator[Raw | Broken]) -> Iterator[Document]:
    """The documents among the records of a dataset.

    Raises:
        ProblemsError: a record is broken.
    """
    for record in found:
        if isinstance(record, Broken):
            raise refusal(f"{record.file}, document {record.number - 1}", record)
        if record.payload:
            assert isinstance(record.payload, str)
            yield Document(record.number - 1, record.payload)


def _hub_stream(name: str, config: str | None, split: str, revision: str | None) -> Callable[[], Any]:
    def open_stream() -> Any:
        from datasets import load_dataset

        return load_dataset(name, config, split=split, revision=revision, streaming=True)

    return open_stream
