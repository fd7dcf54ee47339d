"""Files and hub datasets as documents.

Broken records come out of formats as such, and strict sources refuse them.
"""

import bz2
import gzip
import io
import itertools
import json
import lzma
import os
import pickle
import re
import subprocess
import sys
import tarfile
import time
import tracemalloc
import zipfile
from types import SimpleNamespace

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from backports import zstd

from data.prepare import pipeline
from data.prepare.chunk_file import ChunkStep, Tally
from data.prepare.contamination import read_evaluation
from data.prepare.inputs import Cursor, Inputs
from data.prepare.pipeline import check_broken
from data.prepare.settings import PreparationFailed, Settings, in_flags
from data.text import encoder, hub, listing, records
from data.text.documents import SkippedRecords
from data.text.hub import HubSource, is_temporary
from data.text.local_files import FileSource, files_of, format_of
from data.text.packaged import PackagedSource, speeches
from data.text.records import EXCERPT_BYTES, BrokenRecord, RawRecord, read_strictly
from data.text.sources import open_source
from data.text.text_files import JsonlFormat, ParquetFormat, TextFormat
from data.text.trained_vocabulary import train_bpe, train_wordpiece
from data.text.vocabulary_files import read_tokenizer
from launch import prepare_data
from recipes.problems import Key, Problem, ProblemsError, Setting
from recipes.schema import Data, Origin, Tokenizer

ZSTD_OPTIONS = {zstd.CompressionParameter.content_size_flag: 0, zstd.CompressionParameter.checksum_flag: 1}
COMPRESS = {
    "plain": lambda content: content,
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda content: zstd.compress(content, options=ZSTD_OPTIONS),
}


def texts(form, path, start=0):
    """What a format makes of a file: texts, None, and (number, kind) of broken records."""
    found = []
    for item in form.frame(path, start):
        result = form.parse(item) if isinstance(item, RawRecord) else item
        found.append((result.number, result.kind) if isinstance(result, BrokenRecord) else result)
    return found


def jsonl(*documents) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in documents).encode()


# ---- JSON lines, and what all files share ----


@pytest.mark.parametrize("kind", COMPRESS)
def test_compression_is_told_by_content_and_archives_may_have_several_parts(tmp_path, kind):
    path = tmp_path / "corpus.txt"  # the name tells nothing
    path.write_bytes(COMPRESS[kind](jsonl("one", "two")) + COMPRESS[kind](jsonl("thrée")))
    assert texts(JsonlFormat(), path) == ["one", "two", "thrée"]
    assert texts(JsonlFormat(), path, 2) == ["thrée"]


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz", "zst"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "no frame, no member"])
def test_of_a_damaged_archive_comes_out_what_can_be_read_and_then_the_damage(tmp_path, kind, damage):
    later = jsonl(*(os.urandom(200).hex() for _ in range(200)))
    whole = COMPRESS[kind](jsonl("early")) + COMPRESS[kind](later)
    middle = len(whole) * 2 // 3
    flipped = bytes(byte ^ 255 for byte in whole[middle : middle + 99]) + whole[middle + 99 :]
    rest = {"cut": b"", "flipped": flipped}
    path = tmp_path / "corpus"
    path.write_bytes(whole[:middle] + rest.get(damage, whole[middle:] + damage.encode()))
    found = texts(JsonlFormat(), path)
    assert found[0] == "early"
    if damage in rest:
        assert "damaged file" in [each[1] for each in found if isinstance(each, tuple)]
    else:
        assert found[201:] == [(202, "damaged file")], "what stands before it is read"


@pytest.mark.parametrize("kind", ["bz2", "xz"])
def test_a_later_stream_that_cannot_be_read_is_damage_to_every_reader(tmp_path, kind):
    streams = [COMPRESS[kind](jsonl(*(f"{n} {i} some words of it" * 99 for i in range(5)))) for n in range(3)]
    path = tmp_path / f"a.jsonl.{kind}"
    for padding in (0, 4, 8, 1 << 21):
        path.write_bytes((b"\0" * padding).join([*streams, b""]))
        assert len(texts(JsonlFormat(), path)) == 15
    flipped = bytes([streams[1][3] ^ 1, streams[1][4] ^ 1])
    damaged = (
        b"".join([streams[0], streams[1][:3], flipped, streams[1][5:], streams[2]]),
        b"".join([streams[0], b"\0\0\0", streams[1]]),
        b"".join([streams[0], b"\0\0\0"]),
        b"".join([streams[0], streams[1][:3]]),
    )
    for content in damaged:
        path.write_bytes(content)
        listing.FOUND.clear()
        assert texts(JsonlFormat(), path)[5:] == [(6, "damaged file")]
        assert [each.kind for each in TextFormat().frame(path)] == ["damaged file"]
        with pytest.raises(ProblemsError, match="jsonl.*:6: damaged file"):
            list(open_source(Origin(source="jsonl", name=str(path))).documents())
        with pytest.raises(ValueError, match="--decontaminate .*: damaged file: cannot be read to its end"):
            read_evaluation([str(path)], 3)


@pytest.mark.parametrize(
    ("line", "kind", "reason"),
    [
        (b'{"text": ', "not a JSON object", "Expecting value"),
        (b"[" * 200_000, "not a JSON object", "recursion"),
        (b'["text"]', "no JSON object", "a JSON list where an object"),
        (b'{"body": "a", "id": 1}', "no field 'text'", "set data.text_column to one of body, id"),
        (b'{"text": 7}', "field 'text' is int, not a string", "set data.text_column"),
        (b'{"text": null}', "field 'text' is NoneType, not a string", "set data.text_column"),
        (b'{"text": "\xff"}', "invalid UTF-8", "at byte 10"),
        (b'{"text": "a\0b"}', "NUL bytes", "1, the first at character 11"),
        (b'{"text": "a\\u0000b"}', "NUL bytes", "1 in field 'text'"),
        (b'{"text": "' + b"x" * 500_000 + b'"}', "too large", "bytes where a record has at most 400,000"),
    ],
)
def test_a_broken_line_says_why_and_costs_only_itself(tmp_path, line, kind, reason):
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(jsonl("before") + b"\n" + line + b"\n" + jsonl("after"))
    form = JsonlFormat(max_record_bytes=400_000)
    assert texts(form, path) == ["before", (3, kind), "after"]
    _, item, _ = form.frame(path)
    broken = form.parse(item) if isinstance(item, RawRecord) else item
    assert reason in broken.reason and broken.file == str(path)
    assert broken.excerpt == (line + b"\n")[:EXCERPT_BYTES]
    assert len(line) <= broken.size <= len(line) + 1
    with pytest.raises(ValueError, match=r"corpus.jsonl:3: .*prepare_data") as refused:
        origin = Origin(source="jsonl", name=str(path))
        list(read_strictly(files_of(origin), format_of(origin, 400_000), 0))
    assert broken.reason in str(refused.value)


def test_a_line_as_long_as_the_limit_is_whole(tmp_path):
    line = jsonl("x" * 80)
    (tmp_path / "a").write_bytes(line * 2 + line.strip())
    assert texts(JsonlFormat(max_record_bytes=len(line) - 1), tmp_path / "a") == ["x" * 80] * 3
    too_large = [(n, "too large") for n in (1, 2, 3)]
    assert texts(JsonlFormat(max_record_bytes=len(line) - 2), tmp_path / "a") == too_large


MIB = 1 << 20


@pytest.mark.parametrize(
    ("form", "piece", "records"),
    [
        (JsonlFormat("text", MIB), b"x" * MIB, 2),
        (TextFormat("blank_line", MIB), b"x" * MIB, 2),
        (TextFormat("blank_line", MIB), b"x" * (MIB - 1) + b"\n", 2),
        (TextFormat("file", MIB), b"x" * MIB, 1),
    ],
)
def test_a_long_record_is_not_held_in_memory(tmp_path, form, piece, records):
    path = tmp_path / "long.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for part in (*[piece] * 60, b"\n\nafter\n"):
            file.write(part)
    tracemalloc.start()
    items = list(form.frame(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert items[0].kind == "too large" and items[0].size >= 60 * MIB
    assert len(items[0].excerpt) == EXCERPT_BYTES
    assert peak < 8 * MIB, f"{peak:,} bytes for a record of 60 MiB and a limit of 1 MiB"
    assert len(items) == records


@pytest.mark.parametrize("source", ["jsonl", "parquet", "text"])
@pytest.mark.parametrize("content", [b"", gzip.compress(b"", mtime=0)], ids=["nothing", "gzip of nothing"])
def test_an_empty_file_is_a_broken_one(tmp_path, source, content):
    (tmp_path / "empty").write_bytes(content)
    expected = "another type of file" if source == "parquet" and content else "empty file"
    form = format_of(Origin(source=source, name="x"))
    assert texts(form, tmp_path / "empty") == [(1, expected)]
    assert texts(form, tmp_path / "empty", 1) == []


def saved(kind: str) -> bytes:
    """What others' programs write."""
    out, table = io.BytesIO(), pa.table({"text": ["some text"]})
    if kind == "zip":
        zipfile.ZipFile(out, "w").close()
    elif kind == "tar":
        with tarfile.open(fileobj=out, mode="w:gz") as archive:
            archive.addfile(tarfile.TarInfo("a.txt"))
    elif kind == "npy":
        np.save(out, np.arange(9))
    else:
        make = {"stream": pa.ipc.new_stream, "arrow": pa.ipc.new_file}[kind]
        with make(out, table.schema) as writer:
            writer.write_table(table)
    return out.getvalue()


TYPES = {
    "a.warc.wet.gz": (gzip.compress(b"WARC/1.0\r\nWARC-Type: conversion\r\n"), "a web archive.*JSON lines"),
    "a.txt": (b"WARC/1.1\r\nWARC-Type: response\r\n", "a web archive"),
    "b.html": (b"<div>Some text</div>", "an HTML page"),
    "b.txt": (b"\n<!-- saved -->\n<!DOCTYPE html>\n<html><p>Some text", "an HTML page"),
    "c.csv": (b"some, words\n", "a table.*pandas"),
    "c.TSV.gz": (gzip.compress(b"some words\n"), "a table.*pandas"),
    "c.txt": (b'"id","text"\r\n1,"some, text"\r\n', "a table"),
    "d.txt": (b"label\ttext\n0\tSome text\n", "a table"),
    "e.arrow": ("stream", "an Arrow file.*from_file"),
    "e.feather": ("arrow", "an Arrow file"),
    "f.bin": (np.array([464, 13, 50256, 50000], "<u2").tobytes(), "a file of raw numbers.*data/README.md"),
    "g.7z": (b"7z\xbc\xaf\x27\x1c\0\4", "a 7-Zip archive; unpack"),
    "g.jsonl.lz4": (b"\x04\x22\x4d\x18d@", "an LZ4 archive; unpack"),
    "g.zip": ("zip", "a zip archive.*unpack"),
    "g.tgz": ("tar", "a tar archive; unpack"),
    "h.npy": ("npy", "a numpy array"),
    "h.pkl": (pickle.dumps(["some text"]), "a pickle"),
    "h.db": (b"SQLite format 3\0", "an SQLite database"),
    "h.pdf": (b"%PDF-1.7\n", "a PDF"),
    "h.txt": ("Some text".encode("utf-16"), "UTF-16.*iconv"),
    "h.parquet": (b"PARE\0\0", "an encrypted parquet file"),
}  # fmt: skip


@pytest.mark.parametrize("name", TYPES)
def test_files_of_other_types_are_named_by_every_reader(tmp_path, name):
    made, said = TYPES[name]
    (tmp_path / name).write_bytes(saved(made) if isinstance(made, str) else made)
    for form in (JsonlFormat(), TextFormat(), TextFormat("blank_line"), ParquetFormat()):
        (found,) = form.frame(tmp_path / name)
        assert isinstance(found, BrokenRecord)
        assert re.search(f"^another type of file: it is {said}", found.reason)
        assert not list(form.frame(tmp_path / name, 1))
    with pytest.raises(ProblemsError, match=f"{name}:1: another type of file: it is {said}"):
        list(FileSource(Origin(source="text", name=str(tmp_path / name))).documents())


def test_text_that_looks_a_little_like_another_type_is_text(tmp_path):
    for name, text in {
        "a.txt.gz": "Yes, no\nand so on, ever",
        "b": "Title, Text\nare the columns",
        "c": "[[File:a.png]] is wikitext",
        "d.bin": "Some text in UTF-8",
        "e": "OBJ GIF PAR1",
        "g": "BZh9 is how bzip2 files begin",
        "f.txt.xz": "The <html> tag begins a page",
    }.items():
        packed = text.encode() if name[-2:] != "gz" else lzma.compress(text.encode())  # xz named .gz
        (tmp_path / name).write_bytes(packed)
        assert texts(TextFormat(), tmp_path / name) == [text]


def test_a_directory_that_datasets_saved_is_named(tmp_path):
    (tmp_path / "saved" / "train").mkdir(parents=True)
    (tmp_path / "saved" / "train" / "data-00000-of-00001.arrow").write_bytes(saved("stream"))
    with pytest.raises(ProblemsError, match=r"a directory with an Arrow file.*from_file\('FILE.arrow'\).to_"):
        files_of(Origin(source="parquet", name=str(tmp_path / "saved")))


def test_lone_surrogates_and_byte_order_marks_do_no_harm(tmp_path):
    (tmp_path / "a").write_bytes(b'\xef\xbb\xbf{"text": "\\ud800four"}\n{"text": ""}\n')
    assert texts(JsonlFormat(), tmp_path / "a") == ["?four", None]


def test_a_file_that_cannot_be_opened_is_the_users_matter(tmp_path):
    for form in (JsonlFormat(), ParquetFormat(), TextFormat()):
        with pytest.raises(ValueError, match="absent: cannot be opened .No such file"):
            list(form.frame(tmp_path / "absent"))


# ---- text ----


def test_text_documents_are_files_or_blocks(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone\r\ntwo\r\n \r\n\n\nthree\n\nvier ö".encode())
    assert texts(TextFormat("file"), path) == ["one\ntwo\n \n\n\nthree\n\nvier ö"]
    blocks = TextFormat("blank_line")
    assert texts(blocks, path) == ["one\ntwo\n", "three\n", "vier ö"]
    assert [raw.number for raw in blocks.frame(path)] == [1, 6, 8]
    long = b"long\n" * 30 + b"\n" + b"long" * 30
    path.write_bytes(b"good\n\nb\xffd\n\nb\0d\n\n" + long + b"\nrest of it\n\nlast")
    broken = [(3, "invalid UTF-8"), (5, "NUL bytes"), (7, "too large"), (38, "too large")]
    assert texts(TextFormat("blank_line", 100), path) == ["good\n", *broken, "last"]


# ---- parquet ----


def test_parquet_rows(tmp_path):
    path = tmp_path / "a.parquet"
    values = [b"one", None, b"", b"\xff", b"n\0l", "fünf".encode(), b"x" * 200, b"last"]
    column = pa.array(values, pa.binary()).view(pa.string())  # pyarrow writes what is no UTF-8 as well
    pq.write_table(pa.table({"id": range(8), "text": column}), path, row_group_size=3)
    null = (2, "field 'text' is null, not a string")
    expected = ["one", null, None, (4, "invalid UTF-8"), (5, "NUL bytes"), "fünf", (7, "too large"), "last"]
    form = ParquetFormat(max_record_bytes=100, batch_rows=2)
    for start in range(10):
        assert texts(form, path, start) == expected[start:]
    views = (pa.string_view(), pa.binary_view())  # as Polars writes
    for kind in (pa.large_string(), pa.dictionary(pa.int32(), pa.string()), pa.binary(), *views):
        column = pa.array(["a", "b"]).dictionary_encode().cast(pa.string()).cast(kind)
        pq.write_table(pa.table({"text": column}), path)
        assert texts(form, path) == ["a", "b"]
    pq.write_table(pa.table([["a"], ["b"]], names=["text", "text"]), path)
    assert texts(form, path) == [(1, "2 fields 'text'")]


def test_parquet_that_cannot_be_used_counts_every_row(tmp_path):
    path = tmp_path / "a.parquet"
    table = pa.table({"text": [os.urandom(500).hex() for _ in range(40)], "n": range(40)})
    pq.write_table(table, path, row_group_size=10, use_dictionary=False)
    assert texts(ParquetFormat("body"), path) == [(n, "no field 'body'") for n in range(1, 41)]
    assert texts(ParquetFormat("n"), path, 38) == [(n, "field 'n' is int64, not a string") for n in (39, 40)]
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    assert texts(ParquetFormat(), path) == [(1, "damaged file")]
    place = pq.ParquetFile(pa.BufferReader(whole)).metadata.row_group(1).column(0)
    begin = place.data_page_offset
    path.write_bytes(whole[:begin] + bytes(len(b"header of a page")) + whole[begin + 16 :])
    found = texts(ParquetFormat(), path)
    assert found[10:20] == [(n, "damaged file") for n in range(11, 21)]
    assert sum(isinstance(text, str) for text in found) == 30


# ---- Wikipedia ----


def test_what_wikiextractor_writes_is_read_as_it_lies(tmp_path):
    """A tree of files without suffix; README and data/README.md show the two commands."""
    pages = []
    for number in range(12):
        text = (
            f"'''Town {number}''' is a [[town]].\n\n== History ==\nIt was built in {1900 + number}.\n\n"
            "{{Infobox|a=1}}\n[[File:a.jpg|thumb|200px|A view]]\n[[Category:Towns]]"
        )
        pages.append(
            f"<page>\n<title>Town {number}</title>\n<ns>0</ns>\n<id>{number + 1}</id>\n<revision>\n"
            f'<id>{number + 100}</id>\n<text xml:space="preserve">{text}</text>\n</revision>\n</page>\n'
        )
    head = (
        "<mediawiki>\n<siteinfo>\n<base>https://en.wikipedia.org/wiki/Main_Page</base>\n<namespaces>\n"
        '<namespace key="6" case="first-letter">File</namespace>\n'
        '<namespace key="14" case="first-letter">Category</namespace>\n'
        '<namespace key="10" case="first-letter">Template</namespace>\n</namespaces>\n</siteinfo>\n'
    )
    (tmp_path / "dump.xml.bz2").write_bytes(bz2.compress(f"{head}{''.join(pages)}</mediawiki>\n".encode()))
    program = [sys.executable, "-m", "wikiextractor.WikiExtractor", "--json"]
    subprocess.run([*program, "dump.xml.bz2", "-o", "articles"], cwd=tmp_path, check=True, timeout=100)
    found = list(open_source(Origin(source="jsonl", name=str(tmp_path / "articles"))).documents())
    assert [document.index for document in found] == list(range(12))
    assert found[3].text == "Town 3 is a town.\nHistory.\nIt was built in 1903."
    with pytest.raises(ProblemsError, match="a Wikipedia dump; extract its articles: .*wikiextractor"):
        list(open_source(Origin(source="text", name=str(tmp_path / "dump.xml.bz2"))).documents())


# ---- names ----


def test_names_are_sorted_globs_or_directories(tmp_path, monkeypatch):
    for name in ("b.jsonl", "a.jsonl.gz", "deep/er/c.jsonl", "deep/d", "deep/.hidden", "x[1].jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(jsonl(name))

    def names(pattern):
        found = files_of(Origin(source="jsonl", name=pattern))
        return [str(file.path.relative_to(tmp_path)) for file in found]

    monkeypatch.setenv("HOME", str(tmp_path))
    assert names("~/[ab].jsonl*") == ["a.jsonl.gz", "b.jsonl"]
    assert names(f"{tmp_path}/**/*.jsonl") == ["b.jsonl", "deep/er/c.jsonl", "x[1].jsonl"]
    assert names(f"{tmp_path}/x[1].jsonl") == ["x[1].jsonl"], "a name that exists is no glob"
    assert names(f"{tmp_path}/deep") == ["deep/d", "deep/er/c.jsonl"]
    assert names(f"{tmp_path}/**/e*/**") == ["deep/er/c.jsonl"]
    monkeypatch.chdir(tmp_path)
    assert [str(f.path) for f in files_of(Origin(source="jsonl", name="**/c*"))] == ["deep/er/c.jsonl"]
    with pytest.raises(ValueError, match="absent.*: no such file .*glob of jsonl files"):
        names("absent*.jsonl")


def test_a_file_is_read_once_whatever_its_names(tmp_path):
    top = tmp_path / "data"
    (top / "2024").mkdir(parents=True)
    (top / "2024" / "a.jsonl").write_bytes(jsonl("a"))
    (top / "b.jsonl").write_bytes(jsonl("b"))
    said = []

    def names(pattern="") -> list[str]:
        listing.FOUND.clear()
        said.clear()
        found = files_of(Origin(source="jsonl", name=f"{top}{pattern}"), said.append)
        return [str(file.path.relative_to(top)) for file in found]

    assert names() == names("/**/*") == ["2024/a.jsonl", "b.jsonl"] and not said
    (tmp_path / "outside.jsonl").write_bytes(jsonl("outside"))
    (top / "latest").symlink_to("2024")
    (top / "2024" / "up").symlink_to("..")  # which leads to itself, and out of the folder
    (top / "2024" / "out").symlink_to(tmp_path)
    assert names() == names("/**/*.jsonl") == ["2024/a.jsonl", "b.jsonl"] and not said
    (top / "b.jsonl.gz").write_bytes(gzip.compress(jsonl("b")))
    for name in ("b.jsonl~", "b.jsonl.~1~", "b.jsonl.bak"):
        (top / name).write_bytes(jsonl("old"))
    os.link(top / "b.jsonl", top / "c.jsonl")
    (top / "d.jsonl").symlink_to("2024/a.jsonl")
    for name in ("_SUCCESS", "_temporary/part.jsonl", ".part.jsonl.crc", "_committed_123"):
        (top / name).parent.mkdir(exist_ok=True)
        (top / name).write_bytes(b"")
    assert names() == ["2024/a.jsonl", "b.jsonl"]
    assert len(said) == 1 and f"{top}/b.jsonl.bak" in said[0] and "and 3 more: passed over" in said[0]
    assert names("/*") == ["b.jsonl", "d.jsonl"] and names("/_SUCCESS") == ["_SUCCESS"]
    settings = Settings(
        tuple(Origin(source="jsonl", name=str(top / name)) for name in ("b.jsonl", "c.jsonl")),
        "gpt",
        Tokenizer(kind="gpt2"),
    )
    with pytest.raises(ValueError, match="b.jsonl, .*c.jsonl more than once"):
        Inputs(settings)


def test_a_directory_that_cannot_be_listed_is_refused(tmp_path, monkeypatch):
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.jsonl").write_bytes(jsonl("a"))
    listed = os.scandir

    def scandir(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(ProblemsError, match="closed: cannot be listed: Permission denied"):
        files_of(Origin(source="jsonl", name=str(tmp_path)))


# ---- sources ----


@pytest.mark.parametrize("streaming", [False, True])
def test_broken_records_are_left_out_as_if_they_were_empty(tmp_path, streaming):
    texts, broken = jsonl("a0", "a1", "a2", "a3").splitlines(True), b'{"text": 7}\n'
    for name, third in (("empty", jsonl("")), ("broken", broken)):
        (tmp_path / f"{name}.jsonl").write_bytes(b"".join([texts[0], texts[1], third, texts[3]]))
    origins = (Origin(source="jsonl", name=str(tmp_path / f"{n}.jsonl")) for n in ("empty", "broken"))
    skipped = SkippedRecords()
    empty, left_out = (open_source(each, skipped=skipped) for each in origins)
    for start in range(4):
        one, other = (
            list(source.shard_documents(0, start) if streaming else source.documents(start))
            for source in (empty, left_out)
        )
        assert one == other and [d.index for d in one] == [i for i in (0, 1, 3) if i >= start]
    (place,) = skipped.found()  # it was met three times
    assert place.startswith(f"{tmp_path}/broken.jsonl:3: field 'text' is int")
    strict = open_source(Origin(source="jsonl", name=left_out.name))
    assert strict.fingerprint() != left_out.fingerprint(), "their stores differ"
    with pytest.raises(ProblemsError, match=r"broken.jsonl:3: .*data.broken_records=skip"):
        list(strict.documents())


def test_a_source_reads_its_files_in_order_and_each_as_a_shard(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl("a0", "", "a2"))
    (tmp_path / "b.jsonl").write_bytes(jsonl("b0"))
    (tmp_path / "c.jsonl").write_bytes(jsonl("c0", "c1"))
    source = open_source(Data(source="jsonl", name=str(tmp_path / "*.jsonl")))
    found = [(d.index, d.text) for d in source.documents()]
    assert found == [(0, "a0"), (2, "a2"), (3, "b0"), (4, "c0"), (5, "c1")]
    for start in range(8):
        assert [(d.index, d.text) for d in source.documents(start)] == [x for x in found if x[0] >= start]
    assert source.shards == 3
    shards = [[(d.index, d.text) for d in source.shard_documents(shard)] for shard in range(3)]
    assert shards == [[(0, "a0"), (2, "a2")], [(0, "b0")], [(0, "c0"), (1, "c1")]]
    assert [(d.index, d.text) for d in source.shard_documents(0, 1)] == [(2, "a2")]
    assert source.finite and not open_source(Origin(source="jsonl", name=source.name, streaming=True)).finite
    before = source.fingerprint()
    assert before == open_source(Origin(source="jsonl", name=source.name)).fingerprint()
    assert before != open_source(Origin(source="jsonl", name=source.name, text_column="body")).fingerprint()
    for edit in (edited, lambda path: path.write_bytes(jsonl("longer"))):
        edit(tmp_path / "b.jsonl")
        listing.FOUND.clear()
        now = open_source(Origin(source="jsonl", name=source.name)).fingerprint()
        assert before != now
        before = now
    edited(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_bytes(jsonl("b2"))
    with pytest.raises(ProblemsError, match="b.jsonl: was changed"):  # since the name was looked up
        open_source(Origin(source="jsonl", name=source.name)).fingerprint()


def edited(path) -> None:
    """Change a file and keep its size and time, as cp -p does."""
    facts = path.stat()
    time.sleep(0.02)  # a clock of the system that ticks every 10 ms
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


@pytest.mark.parametrize(
    ("change", "every"),
    [
        ("longer", 4),
        ("longer", 1 << 20),
        ("renamed", 4),
        ("renamed", 1 << 20),
        ("removed", 4),
        ("broken", 1 << 20),
        ("linked", 4),
    ],
)
def test_a_file_that_is_replaced_while_it_is_read_is_named(tmp_path, monkeypatch, change, every):
    monkeypatch.setattr(records, "CHECKED_EVERY", every)
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(*(f"text {i:05}" * 100 for i in range(4000))))
    source = open_source(Origin(source="jsonl", name=str(path), streaming=True))
    found = source.shard_documents(0)
    next(found)
    if change == "longer":
        path.write_bytes(jsonl(*("more" for i in range(9000))))
    elif change == "broken":
        path.write_bytes(b"x" * path.stat().st_size)
    elif change == "renamed":
        (tmp_path / "b").write_bytes(path.read_bytes())
        edited(tmp_path / "b")
        os.utime(tmp_path / "b", ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
        os.replace(tmp_path / "b", path)
    elif change == "removed":
        path.unlink()
    else:  # a backup's link changes nothing
        os.link(path, tmp_path / "c")
        assert len(list(found)) == 3999
        return
    with pytest.raises(ProblemsError, match="a.jsonl: was changed, replaced or removed while it was read"):
        list(found)


def test_the_packaged_corpus_is_one_shard():
    source = PackagedSource()
    documents = list(source.documents())
    assert (source.shards, len(documents)) == (1, 249)
    assert list(source.shard_documents(0, 240)) == documents[240:] == list(source.documents(240))
    assert [file.path for file in files_of(Origin())] == speeches()
    read = read_strictly(files_of(Origin()), format_of(Origin()), 0)
    assert list(read) == documents, "as prepare_data reads them"


@pytest.mark.parametrize("source", ["packaged", "jsonl", "parquet", "text"])
def test_formats_travel_to_worker_processes(source):
    form = format_of(Origin(source=source, name="x", text_column="body", documents="blank_line"), 99)
    assert pickle.loads(pickle.dumps(form)) == form and form.max_record_bytes == 99


# ---- the hub ----


@pytest.fixture
def pauses(monkeypatch) -> list[float]:
    """The pauses of readers of the hub, which make none; they try four times."""
    made: list[float] = []
    monkeypatch.setattr(hub, "time", SimpleNamespace(sleep=made.append))
    monkeypatch.setattr(hub, "ATTEMPTS", 4)
    monkeypatch.setattr(hub, "LONGEST_PAUSE_S", 3.0)
    return made


HUB_TEXTS = [[f"file {part} document {i}" * (i != 3) for i in range(5 + part)] for part in range(3)]


@pytest.fixture(scope="module", params=["wikipedia", "openwebtext"])
def hub_stream(request, tmp_path_factory):
    """Opens local files in the schema of wikimedia/wikipedia (parquet) and of Skylion007/openwebtext."""
    directory, files = tmp_path_factory.mktemp("hub"), []
    for part, documents in enumerate(HUB_TEXTS):
        if request.param == "wikipedia":
            fixed = {"url": "https://en.wikipedia.org", "title": "t"}
            rows = [{"id": str(i), **fixed, "text": text} for i, text in enumerate(documents)]
            files.append(str(directory / f"train-{part}.parquet"))
            pq.write_table(pa.Table.from_pylist(rows), files[-1], row_group_size=2)
        else:
            files.append(str(directory / f"{part}.jsonl"))
            (directory / f"{part}.jsonl").write_bytes(jsonl(*documents))
    kind = "parquet" if request.param == "wikipedia" else "json"
    return lambda: datasets.load_dataset(kind, data_files=files, split="train", streaming=True)


def expected(texts, start=0):
    return [(i, text) for i, text in enumerate(texts) if text and i >= start]


def test_a_hub_dataset_is_read_whole_or_by_its_files(hub_stream):
    source = HubSource("wikimedia/wikipedia", "20231101.en", open_stream=hub_stream)
    assert not source.finite and source.shards == 3
    for start in (0, 4, 13):
        assert [(d.index, d.text) for d in source.documents(start)] == expected(sum(HUB_TEXTS, []), start)
    for shard, documents in enumerate(HUB_TEXTS):
        for start in (0, 3, 5):
            found = [(d.index, d.text) for d in source.shard_documents(shard, start)]
            assert found == expected(documents, start)
    missing = HubSource("local", text_column="body", open_stream=hub_stream)
    with pytest.raises(ValueError, match="document 0: no field 'body': set data.text_column to .*text"):
        list(missing.documents())
    assert source.fingerprint() != missing.fingerprint()


@pytest.mark.parametrize("revision", [None, "refs/convert/parquet"])
def test_the_revision_is_asked_for_and_part_of_the_fingerprint(monkeypatch, revision):
    asked = []
    load = lambda *names, **how: asked.append((*names, how)) or Faulty(99, None)  # noqa: E731
    monkeypatch.setattr(datasets, "load_dataset", load)
    source = open_source(Origin(source="hub", name="a/b", config="c", revision=revision))
    assert len(list(source.shard_documents(1))) == 10
    assert asked == [("a/b", "c", {"split": "train", "revision": revision, "streaming": True})]
    assert (source.fingerprint() == HubSource("a/b", "c").fingerprint()) == (revision is None)


def test_a_dataset_that_is_a_script_is_refused_with_the_branch_that_does_without():
    def script():
        raise RuntimeError("Dataset scripts are no longer supported, but found openwebtext.py")

    def absent():
        raise RuntimeError("absent")

    for open_stream, hint in ((script, True), (absent, False)):
        with pytest.raises(ValueError, match="load_dataset.*revision='main'.*check the name") as refused:
            list(HubSource("a/b", revision="main", open_stream=open_stream).documents())
        assert ("set data.revision=refs/convert/parquet" in str(refused.value)) == hint


def test_a_hub_dataset_is_opened_once_and_anew_after_an_error(hub_stream, pauses):
    opened = []

    def open_stream():
        opened.append(hub_stream())
        return opened[-1]

    source = HubSource("a/b", open_stream=open_stream)
    readers = [source.shard_documents(0), source.documents(), source.documents(2)]
    readers += [source.shard_documents(0), source.shard_documents(2, 1)]
    in_turn = zip(*itertools.zip_longest(*readers), strict=True)  # one from each
    found = [[d.text for d in some if d] for some in in_turn]
    first, whole, last = HUB_TEXTS[0], sum(HUB_TEXTS, []), HUB_TEXTS[2]
    assert found == [list(filter(None, texts)) for texts in (first, whole, whole[2:], first, last[1:])]
    assert source.shards == 3 and len(opened) == 1

    streams = [Faulty(4, ConnectionError("reset")), Faulty(99, None)]
    source = HubSource("a/b", open_stream=lambda: streams.pop(0), say=lambda line: None)
    assert [d.index for d in source.shard_documents(1)] == list(range(10)) and not streams


BROKEN_RECORDS = [{"text": "one"}, {"text": "a\0b"}, {"body": "x"}, *({"text": t} for t in (7, "", "six"))]


def test_broken_records_of_the_hub_come_out_as_such_and_strict_readers_refuse_them(monkeypatch):
    stream = datasets.IterableDataset.from_generator(lambda: iter(BROKEN_RECORDS))
    source = HubSource("a/b", open_stream=lambda: stream)
    found = [item.kind if isinstance(item, BrokenRecord) else item.payload for item in source.records()]
    assert found == ["one", "NUL bytes", "no field 'text'", "field 'text' is int, not a string", "", "six"]
    assert [item.number for item in source.records(2)] == [3, 4, 5, 6]
    assert {item.file for item in source.records()} == {"a/b/train"}
    broken = list(source.records())[2]
    assert (broken.excerpt, broken.size) == (b'{"body": "x"}', 13)
    for read in (source.documents, lambda: source.shard_documents(0)):
        documents = read()
        assert next(documents).text == "one"
        with pytest.raises(ValueError, match="a/b/train, document 1: NUL bytes.*prepare_data"):
            next(documents)

    monkeypatch.setattr("data.prepare.inputs.hub_source", lambda origin: source)
    origin = Origin(source="hub", name="a/b")
    inputs = Inputs(Settings((origin,), "gpt", Tokenizer(kind="gpt2")))
    items = [item for _, item in inputs.records(Cursor())]
    assert items == list(source.records())
    texts = [inputs.format.parse(item) for item in items if isinstance(item, RawRecord)]
    assert texts == ["one", None, "six"]
    assert [item for _, item in inputs.records(Cursor(0, 4))] == items[4:]


def test_prepare_data_names_its_flags_where_the_libraries_name_keys_of_a_recipe(tmp_path):
    def message(use) -> str:
        with pytest.raises((ProblemsError, PreparationFailed)) as refused:
            use()
        if isinstance(refused.value, PreparationFailed):
            return str(refused.value)
        (problem,) = refused.value.problems
        return problem.render(in_flags)

    def no_script():
        raise RuntimeError("Dataset scripts are no longer supported")

    place = str(tmp_path / "data.name")  # a path stays what it is
    tally = Tally(read=ChunkStep(2, 2, dropped={"broken: x": [1, 1]}))
    expected = {
        f"--name {place}: no such file": lambda: files_of(Origin(source="jsonl", name=place)),
        "--revision refs/convert/parquet, the branch that": lambda: list(
            HubSource("a/b", open_stream=no_script).documents()
        ),
        f"--tokenizer KIND:{place} does not exist": lambda: read_tokenizer(place),
        "--vocab_size 3: a WordPiece": lambda: train_wordpiece(["some text"], 3),
        "--vocab_size 30000: the training text": lambda: train_bpe(["some text"], 30000),
        "more than --max_broken 0.1": lambda: check_broken(tally, 0.1, tmp_path, 0),
    }
    found = [message(use) for use in expected.values()]
    for text, part in zip(found, expected, strict=True):
        assert part in text and not re.search(r"--set|(?<!/)\b(data|model)\.", text), text
    parts = ("leave --config out", "--split and the network", "(--source packaged, without --name)")
    for part in (*parts, "--source parquet --name 'DIRECTORY/*.parquet'"):
        assert part in found[1]
    (tmp_path / "a.jsonl").write_bytes(b'{"body": "x"}\n')
    (item,) = JsonlFormat().frame(tmp_path / "a.jsonl")
    assert JsonlFormat().parse(item).render(in_flags) == "no field 'text': set --text_column to one of body"
    assert in_flags(Setting("data.tokenizer.kind", "gpt2")) == "--tokenizer gpt2"


@pytest.mark.parametrize(
    ("error", "problem", "code"),
    [
        (ProblemsError, [Problem("", ("set ", Key("data.text_column"), " to one of body"))], 2),
        (ValueError, "set --text_column to one of body", 2),
        (PreparationFailed, "set --text_column to one of body", 2),
        (lambda said: PreparationFailed(said, exit_code=1), "set --text_column to one of body", 1),
    ],
)
def test_the_command_refuses_in_its_own_flags(monkeypatch, capsys, error, problem, code):
    def refuse(*_):
        raise error(problem)

    monkeypatch.setattr(prepare_data.fork_server, "start", lambda *modules: None)
    monkeypatch.setattr(prepare_data.terminal, "quiet_libraries", lambda: None)
    monkeypatch.setattr(pipeline, "prepare", refuse)
    args = prepare_data.build_parser().parse_args(["--tokenizer", "gpt2", "--out", "x"])
    with pytest.raises(SystemExit) as end:
        prepare_data.run(args, prepare_data.Screen(sys.stderr))
    assert end.value.code == code and "\nset --text_column to one of body\n" in capsys.readouterr().err


def test_the_revision_is_a_flag():
    flags = ["--source", "hub", "--name", "a/b", "--revision", "main", "--tokenizer", "gpt2", "--out", "x"]
    settings = prepare_data.settings_of(prepare_data.build_parser().parse_args(flags))
    assert settings.origin.revision == "main" == settings.deciding()["revision"]


class Faulty:
    """A stream of `num_shards` x 10 records that fails after every k of them, wherever it is opened."""

    num_shards = 2

    def __init__(self, every, error, shard=None, skipped=0):
        self.every, self.error, self.index, self.skipped = every, error, shard, skipped

    def shard(self, num_shards, index):
        return Faulty(self.every, self.error, index, self.skipped)

    def skip(self, count):
        return Faulty(self.every, self.error, self.index, count)

    def __iter__(self):
        for read, i in enumerate(range(self.skipped, 10)):
            if read == self.every:
                raise self.error
            yield {"text": f"{self.index}/{i}"}


@pytest.mark.parametrize("every", [1, 3, 9])
def test_network_errors_neither_lose_nor_repeat_documents(every, pauses):
    said, reset = [], ConnectionError("reset")
    source = HubSource("a/b", open_stream=lambda: Faulty(every, reset), say=said.append)
    assert [(d.index, d.text) for d in source.shard_documents(1, 2)] == [(i, f"1/{i}") for i in range(2, 10)]
    assert len(said) == len(pauses) == (8 - 1) // every if every > 1 else len(said) >= 7
    assert all("a/b/train: ConnectionError: reset: attempt 2 of 4 in" in line for line in said)
    assert all(0.5 <= pause <= 1.0 for pause in pauses), "a record that came through ends a row of failures"


def test_a_reader_gives_up_after_failures_in_a_row_and_says_how_to_go_on(monkeypatch, pauses):
    monkeypatch.setattr(hub, "ATTEMPTS", 6)
    said: list[str] = []
    source = HubSource("a/b", open_stream=lambda: Faulty(0, TimeoutError("slow")), say=said.append)
    tried = r"tried load_dataset\('a/b', None, split='train', streaming=True\), 6 times in a row: Timeout"
    with pytest.raises(ValueError, match=tried) as refused:
        list(source.documents())
    assert "data.source=parquet" in str(refused.value) and "data.source=packaged" in str(refused.value)
    assert len(said) == len(pauses) == 5
    for pause, longest in zip(pauses, [1, 2, 3, 3, 3], strict=True):
        assert longest / 2 <= pause <= longest


def test_without_network_nothing_is_tried_again(pauses):
    def no_network():
        raise ConnectionError("Couldn't reach 'a/b' on the Hub")

    lists = (lambda source: list(source.documents()), lambda source: list(source.shard_documents(0)))
    for read in (*lists, lambda source: source.shards):
        with pytest.raises(ValueError, match="a/b/train: tried load_.*Couldn't reach.*without the hub"):
            read(HubSource("a/b", open_stream=no_network))
    assert not pauses


class HttpError(Exception):
    def __init__(self, status):
        super().__init__(f"HTTP {status}")
        self.response = type("Response", (), {"status_code": status})()


def wrapped(cause):
    try:
        try:
            raise cause
        except Exception as error:
            raise FileNotFoundError("dataset not found") from error
    except FileNotFoundError as error:
        return error


def test_what_may_pass_is_tried_again_and_what_may_not_is_not(pauses):
    modules = [{"__module__": f"{name}.exceptions"} for name in ("httpx", "httpx2", "aiohttp")]
    libraries = [type("ReadError", (Exception,), module)() for module in modules]
    temporary = [ConnectionResetError(), TimeoutError(), *libraries]
    temporary += map(HttpError, (408, 429, 500, 503, 504))
    lasting = [ValueError("x"), FileNotFoundError("x"), PermissionError("x"), KeyError("text")]
    lasting += map(HttpError, (400, 401, 403, 404, 416))
    for error in temporary:
        assert is_temporary(error) and is_temporary(wrapped(error)), error
    for error in lasting:
        assert not is_temporary(error) and not is_temporary(wrapped(error)), error
    absent = HubSource("a/b", open_stream=lambda: Faulty(2, HttpError(404)))
    with pytest.raises(ValueError, match="HTTP 404"):
        list(absent.documents())
    assert not pauses


def test_an_answer_of_the_hub_is_tried_again_also_at_first(pauses):
    answers = [HttpError(429), HttpError(503)]

    def busy():
        if answers:
            raise answers.pop()
        return Faulty(99, None)

    assert HubSource("a/b", open_stream=busy, say=lambda line: None).shards == 2
    assert len(pauses) == 2


# ---- sentences ----


def test_sentences_lose_nothing_but_white_space():
    text = list(PackagedSource().documents())[100].text
    for how in ("split", "lines"):
        found = encoder.sentences_of(text, how)
        assert "".join("".join(found).split()) == "".join(text.split())
        assert all(s == s.strip() and s and "\n" not in s for s in found)
    lengths = [len(sentence) for sentence in encoder.sentences_of(text, "split")]
    assert 20 < sum(lengths) / len(lengths) < 400


def test_sentences_end_where_they_end():
    text = "Dr. Smith of the U.S. paid $3.50\nfor it. He left!  Did he?\n\nA new paragraph"
    ends = ["Dr. Smith of the U.S. paid $3.50 for it.", "He left!", "Did he?", "A new paragraph"]
    assert encoder.sentences_of(text, "split") == ends
    assert encoder.sentences_of("One. Two\n\n  three \n", "lines") == ["One. Two", "three"]
    items = [f"item {i} of a list without full stops" for i in range(100)]
    assert encoder.sentences_of("\n".join(items), "split") == items
    assert encoder.sentences_of(" \n ", "split") == []
