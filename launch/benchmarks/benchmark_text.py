"""The text that a preparation is measured on. For `launch/benchmark.py`."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from data.prepare.settings import Settings


def varied_copies(texts: list[str], size: int, seed: int = 0) -> list[str]:
    """The texts, then copies of them, until there are `size` characters. In copies the words of each sentence change places.

    A copy has the words of its original and so their frequencies, but no shingle of it: deduplication keeps it.
    """
    result, rng, have = list(texts), random.Random(seed), sum(map(len, texts))
    for text in _endless(texts) if texts else ():
        if have >= size:
            break
        sentences = [sentence.split(" ") for sentence in text.split(". ")]
        for words in sentences:
            rng.shuffle(words)
        result.append(". ".join(" ".join(words) for words in sentences))
        have += len(result[-1])
    return result


def _endless(texts: list[str]) -> Iterator[str]:
    while True:
        yield from texts


def choose_input(settings: Settings, megabytes: float, folder: Path) -> tuple[Settings, str]:
    """Settings that read about so much text, and what it is. The packaged corpus is made longer where that is needed."""
    from data.prepare.inputs import Cursor, Inputs
    from data.sources.records import Raw
    from recipes.schema import Origin

    inputs = Inputs(settings)
    texts: list[str] = []
    documents, size = 0, 0
    for _, item in inputs.records(Cursor()):
        text = inputs.format.parse(item) if isinstance(item, Raw) else None
        documents += isinstance(item, Raw)
        if isinstance(text, str):
            size += len(text.encode("utf-8", "replace"))
            if settings.origin.source == "packaged":
                texts.append(text)
        if size >= megabytes * 1e6:
            break
    if settings.origin.source != "packaged":
        names = ", ".join(str(origin.name) for origin in settings.origins)
        return dataclasses.replace(settings, limit=documents), f"the first {documents:,} documents of {names}"
    path = folder / "packaged.jsonl"
    copies = varied_copies(texts, int(megabytes * 1e6))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in copies), encoding="utf-8")
    what = f"the packaged corpus ({size / 1e6:.1f} MB)"
    if size < megabytes * 1e6:
        what += ", then copies of it with the words of each sentence shuffled: as few different words as it has, which flatters caches"
    return dataclasses.replace(settings, origins=(Origin(source="jsonl", name=str(path)),)), what
