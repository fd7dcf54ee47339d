"""Datasets of the Hugging Face hub, read as a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from data.sources import Document, text_of


class HubSource:
    """A dataset of the Hugging Face hub, streamed."""

    finite = False

    def __init__(
        self,
        name: str,
        config: str | None = None,
        split: str = "train",
        text_column: str = "text",
        open_stream: Callable[[], Any] | None = None,
    ):
        """
        Args:
            open_stream: returns the `datasets.IterableDataset` to read; by default the hub's.
        """
        self.name = "/".join(filter(None, (name, config, split)))
        self._column = text_column
        self._tried = f"load_dataset({name!r}, {config!r}, split={split!r}, streaming=True)"
        self._open_stream = open_stream or _hub_stream(name, config, split)

    def fingerprint(self) -> str:
        raise AssertionError("streamed sources are not cached")

    def documents(self, start: int = 0) -> Iterator[Document]:
        """
        Raises:
            ValueError: the dataset cannot be opened or read; the message says how to go on without the hub.
        """
        records = self._records(start)
        for index, record in enumerate(records, start):
            if text := text_of(record, self._column, f"{self.name}, document {index}"):
                yield Document(index, text)

    def _records(self, start: int) -> Iterator[dict[str, Any]]:
        try:
            stream = self._open_stream()
            yield from stream.skip(start) if start else stream
        except Exception as error:  # datasets, huggingface_hub, httpx and fsspec each raise their own
            raise ValueError(
                f"data.name={self.name}: tried {self._tried}: {type(error).__name__}: {error}: check the name, "
                "data.config, data.split and the network, or go on without the hub, with local JSON lines "
                "(--set data.source=jsonl --set data.name=FILES) or the packaged corpus (--set data.source=packaged)"
            ) from error


def _hub_stream(name: str, config: str | None, split: str) -> Callable[[], Any]:
    def open_stream() -> Any:
        from datasets import load_dataset

        return load_dataset(name, config, split=split, streaming=True)

    return open_stream
