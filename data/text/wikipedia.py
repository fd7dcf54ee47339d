"""Reader of Wikipedia's pages-articles dumps: the latest text of every article.

A dump is cut at its <page> tags before anything is parsed as XML. So reading stays as fast as decompression,
worker processes parse the pages, and a damaged page costs only itself; an XML parser over the whole file
would lose all pages after it.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from data.text.file_types import READ_ERRORS, open_decompressed
from data.text.records import (
    EXCERPT_BYTES,
    MAX_RECORD_BYTES,
    BrokenRecord,
    RawRecord,
    RecordFormat,
    broken_record,
    damaged_rest,
    oversized_record,
    unusable_record,
)
from data.text.wiki_markup import Pathological, plain_text

_OPEN, _CLOSE, _END = b"<page>", b"</page>", b"</mediawiki>"
_BLOCK = 1 << 20
_NAMESPACE = re.compile(rb"<ns>\s*(-?\d+)\s*</ns>")
_NAMESPACE_NAME = re.compile(rb'<namespace key="-?[1-9]\d*"[^>]*>([^<]+)</namespace>')
_TITLE = re.compile(rb"<title>([^<]*)</title>")


@dataclass(frozen=True)
class WikipediaFormat(RecordFormat):
    """Format of pages-articles XML in UTF-8.

    Described by https://www.mediawiki.org/xml/export-0.11.xsd and its predecessors. Records are the pages of
    namespace 0 that are no redirects; they are numbered among all pages of the file.
    """

    source = "wikipedia"
    max_record_bytes: int = MAX_RECORD_BYTES

    def records(self, path: Path) -> Iterator[RawRecord | BrokenRecord]:
        number = 1
        try:
            with open_decompressed(path) as file:
                scanner = _Scanner(file)
                head = scanner.until(_OPEN, _BLOCK)
                if not head.found:
                    if head.size:
                        fix = "not a pages-articles dump in UTF-8"
                        yield broken_record(path, 1, "no <page>", fix, head.kept, head.size)
                    return
                others = frozenset(_NAMESPACE_NAME.findall(head.kept))
                while True:
                    yield from self._page(path, number, scanner.until(_CLOSE, self.max_record_bytes), others)
                    gap = scanner.until(_OPEN, EXCERPT_BYTES)
                    between = gap.kept.removesuffix(_OPEN).strip()
                    if between and not between.startswith(_END):
                        why = ("text between pages", "a <page> tag is damaged, pages may be lost")
                        yield broken_record(path, number, *why, between, gap.size)
                    if not gap.found:
                        if not between.startswith(_END):
                            yield damaged_rest(path, number + 1, "no </mediawiki> at the end")
                        return
                    number += 1
        except READ_ERRORS as error:
            yield damaged_rest(path, number, error)

    def _page(
        self, path: Path, number: int, span: _Span, others: frozenset[bytes]
    ) -> Iterator[RawRecord | BrokenRecord]:
        """Yield the page of a span, after a `BrokenRecord` for a page before it without an end."""
        page = span.kept
        if (last := page.rfind(_OPEN)) >= 0:
            yield broken_record(
                path, number, "page without an end", "the next one begins within it", page[:last]
            )
            page = page[last + len(_OPEN) :]
        if span.size > self.max_record_bytes:
            yield oversized_record(path, number, page, span.size, self.max_record_bytes)
        elif not span.found:
            yield broken_record(
                path, number, "page without an end", "the file ends within it", page, span.size
            )
        elif _is_article(page, others):
            yield RawRecord(str(path), number, _OPEN + page)

    def title(self, raw: RawRecord) -> str:
        assert isinstance(raw.payload, bytes)
        found = _TITLE.search(raw.payload)
        return html.unescape(found[1].decode("utf-8", "replace")).strip() if found else ""

    def parse(self, raw: RawRecord) -> str | BrokenRecord | None:
        try:
            page = ElementTree.fromstring(raw.payload)
        except ElementTree.ParseError as error:
            return unusable_record(raw, "malformed XML", f"{error} of the page")
        if not (revisions := page.findall("revision")):
            return unusable_record(raw, "page without a <revision>", "nothing to read")
        latest = revisions[-1]
        if latest.findtext("model", "wikitext") != "wikitext":  # scripts, style sheets, JSON
            return None
        try:
            return plain_text(latest.findtext("text") or "") or None
        except Pathological as error:
            return unusable_record(raw, "wikitext", str(error))


def _is_article(page: bytes, others: frozenset[bytes]) -> bool:
    """Tell whether the page is of namespace 0 and no redirect.

    Args:
        others: names of the other namespaces, for dumps from before 2012, whose pages have no <ns>.
    """
    head = page[: page.find(b"<revision>")]
    if b"<redirect" in head:
        return False
    if namespace := _NAMESPACE.search(head):
        return namespace[1] == b"0"
    title = _TITLE.search(head)
    return title is None or title[1].partition(b":")[0] not in others


class _Span(NamedTuple):
    kept: bytes  # with the marker, where it is found and kept
    size: int  # bytes in all, with the marker
    found: bool


class _Scanner:
    """Reader of a file from marker to marker, in blocks."""

    def __init__(self, file: BufferedIOBase):
        self._file, self._block, self._at = file, b"", 0

    def until(self, marker: bytes, keep: int) -> _Span:
        """Read up to the end of the marker, or of the file; keep the first `keep` bytes."""
        kept, size, overlap = bytearray(), 0, len(marker) - 1
        while True:
            begin = self._at
            found = self._block.find(marker, begin)
            end = found + len(marker) if found >= 0 else max(begin, len(self._block) - overlap)
            size += end - begin
            # One byte more than `keep`, to tell a cut span from a whole one.
            kept += self._block[begin : min(end, begin + keep + 1 - len(kept))]
            self._at = end
            if found >= 0:
                return _Span(bytes(kept), size, True)
            if not (more := self._file.read1(_BLOCK)):
                rest = self._block[end:]
                self._block, self._at = b"", 0
                return _Span(bytes(kept + rest), size + len(rest), False)
            self._block, self._at = self._block[end:] + more, 0
