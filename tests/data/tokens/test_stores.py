"""The token store in Megatron's format, splits by document, and GPT samples from a store."""

import os
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from data.durable_files import DamagedFile
from data.samples.gpt import GptSamples, TokenStream
from data.text.held_out import PARTS, documents_of, part_of, parts
from data.tokens.opened import ready_made_store
from data.tokens.store import StoreWriter, open_store, token_dtype
from recipes.problems import ProblemsError
from recipes.schema import Origin

END = 9


def index_bytes(
    sizes, documents, code=8, itemsize=2, pointers=None, version=1, magic=b"MMIDIDX\x00\x00"
) -> bytes:
    """An .idx by the format's description, byte by byte: nothing of ours has a part in it."""
    if pointers is None:
        pointers = [itemsize * sum(sizes[:i]) for i in range(len(sizes))]
    head = magic + struct.pack("<QBQQ", version, code, len(sizes), len(documents))
    arrays = struct.pack(f"<{len(sizes)}i", *sizes) + struct.pack(f"<{len(pointers)}q", *pointers)
    return head + arrays + struct.pack(f"<{len(documents)}q", *documents)


TOKENS = [5, 6, 7, 8, 1, 2, 3, 4, 300]  # three sequences of 4, 2 and 3 tokens; the first two are document 0
GOOD = {"sizes": [4, 2, 3], "documents": [0, 2, 3]}


def write_pair(tmp_path: Path, idx: bytes, tokens: bytes | None = None) -> Path:
    prefix = tmp_path / "corpus.v1_text_document"
    (tmp_path / "corpus.v1_text_document.idx").write_bytes(idx)
    tokens = struct.pack("<9H", *TOKENS) if tokens is None else tokens
    (tmp_path / "corpus.v1_text_document.bin").write_bytes(tokens)
    return prefix


def read_independently(prefix: Path) -> tuple[str, list[list[list[int]]]]:
    """A second reader, of the format's description: the type, and documents as lists of sequences."""
    raw = Path(f"{prefix}.idx").read_bytes()
    assert raw[:9] == b"MMIDIDX\x00\x00" and struct.unpack_from("<Q", raw, 9) == (1,)
    code, n, m = raw[17], *struct.unpack_from("<QQ", raw, 18)
    letter, size = {8: ("H", 2), 4: ("i", 4)}[code]
    lengths = struct.unpack_from(f"<{n}i", raw, 34)
    pointers = struct.unpack_from(f"<{n}q", raw, 34 + 4 * n)
    documents = struct.unpack_from(f"<{m}q", raw, 34 + 12 * n)
    assert len(raw) == 34 + 12 * n + 8 * m
    tokens = Path(f"{prefix}.bin").read_bytes()
    assert len(tokens) == size * sum(lengths)
    places = zip(lengths, pointers, strict=True)
    found = [list(struct.unpack_from(f"<{length}{letter}", tokens, at)) for length, at in places]
    return letter, [found[a:b] for a, b in zip(documents, documents[1:], strict=False)]


@pytest.mark.parametrize("modes", [b"", bytes(3)], ids=["text", "multimodal"])
def test_a_store_of_another_tool_is_read(tmp_path, modes):
    store = open_store(write_pair(tmp_path, index_bytes(**GOOD) + modes))
    assert (len(store), store.documents, store.tokens, store.dtype) == (3, 2, 9, np.uint16)
    sequences = np.split(store.tokens_array, store.sequence_starts(np.array([1, 2])))
    assert [sequence.tolist() for sequence in sequences] == [[5, 6, 7, 8], [1, 2], [3, 4, 300]]
    assert [store.document(i).tolist() for i in range(2)] == [[5, 6, 7, 8, 1, 2], [3, 4, 300]]
    assert store.sequence_starts(np.array([0, 1, 2, 3])).tolist() == [0, 4, 6, 9]


@pytest.mark.parametrize(("code", "letter"), [(1, "B"), (2, "b"), (3, "h"), (4, "i"), (5, "q"), (8, "H")])
def test_every_integer_type_is_read(tmp_path, code, letter):
    idx = index_bytes([2, 1], [0, 1, 2], code, struct.calcsize(letter))
    store = open_store(write_pair(tmp_path, idx, struct.pack(f"<3{letter}", 3, 100, 7)))
    assert store.document(0).tolist() == [3, 100] and store.document(1).tolist() == [7]


@pytest.mark.parametrize("vocab_size", [65499, 65500, 70000])
def test_what_is_written_is_read_by_an_independent_reader_and_by_ours(tmp_path, vocab_size):
    rng = np.random.default_rng(0)
    documents = [
        [rng.integers(vocab_size, size=rng.integers(1, 30)) for _ in range(rng.integers(1, 5))]
        for _ in range(50)
    ]
    documents[7] = []  # an empty document keeps its number
    documents[0][0][0] = vocab_size - 1
    with StoreWriter(tmp_path / "a.b", vocab_size) as writer:
        for document in documents:
            writer.add_document(document)
    expected = [[sequence.tolist() for sequence in document] for document in documents]
    letter, found = read_independently(tmp_path / "a.b")
    assert found == expected
    assert letter == ("H" if vocab_size < 65500 else "i"), "Megatron's rule"
    assert token_dtype(vocab_size) == (np.uint16 if letter == "H" else np.int32)
    store = open_store(tmp_path / "a.b")
    assert store.document(7).size == 0
    assert [store.document(i).tolist() for i in range(50)] == [sum(document, []) for document in expected]
    assert (writer.documents, writer.sequences, writer.tokens) == (50, sum(map(len, expected)), store.tokens)
    assert writer.checksum == store.checksum()


def test_many_documents_at_once_make_the_same_files(tmp_path, monkeypatch):
    monkeypatch.setattr("data.tokens.store.BLOCK", 3)  # several blocks of pointers
    documents = [[[1, 2], [3]], [], [[4, 5, 6], [], [7]], [[8]]]
    with StoreWriter(tmp_path / "one", 100) as writer:
        for document in documents:
            writer.add_document([np.array(sequence, dtype=np.uint32) for sequence in document])
    with StoreWriter(tmp_path / "bulk", 100) as writer:
        writer.add_documents(np.arange(1, 9), np.array([2, 1, 3, 0, 1, 1]), np.array([2, 0, 3, 1]))
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"one{ending}").read_bytes() == (tmp_path / f"bulk{ending}").read_bytes()
    # Only the empty sequence is left out.
    assert read_independently(tmp_path / "one")[1] == [[[1, 2], [3]], [], [[4, 5, 6], [7]], [[8]]]


def test_a_store_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    with pytest.raises(KeyError), StoreWriter(tmp_path / "a", 100) as writer:
        writer.add_document([np.array([1])])
        raise KeyError
    assert not list(tmp_path.iterdir())
    for tokens in ([1, 2], [3, 4]):  # as long, so that the old .idx would fit the new .bin
        with StoreWriter(tmp_path / "a", 100) as writer:
            writer.add_document([np.array(tokens)])
            there = len(list(tmp_path.glob("a.???")))
            assert there == (0 if tokens[0] == 1 else 2), "the names are taken at the end"
    renamed = []

    def stop_at_idx(source, target):
        if str(target).endswith(".idx"):
            raise OSError("killed here")
        renamed.append(str(target))
        original(source, target)

    original = os.replace
    monkeypatch.setattr("os.replace", stop_at_idx)
    with pytest.raises(OSError, match="killed here"), StoreWriter(tmp_path / "a", 100) as writer:
        writer.add_document([np.array([5, 6])])
    assert renamed == [str(tmp_path / "a.bin")]
    with pytest.raises(DamagedFile, match=r"a\.idx is missing"):
        open_store(tmp_path / "a")


def test_a_full_disk_at_the_end_leaves_nothing(tmp_path, monkeypatch):
    def full(*files):
        raise OSError("No space left on device")

    monkeypatch.setattr("shutil.copyfileobj", full)
    with pytest.raises(OSError, match="No space") as kept, StoreWriter(tmp_path / "a", 100) as writer:
        writer.add_document([np.array([1])])
    assert kept and writer.checksum is None and not list(tmp_path.iterdir())


def test_an_empty_store(tmp_path):
    StoreWriter(tmp_path / "a", 100).finish()
    store = open_store(tmp_path / "a")
    assert (len(store), store.documents, store.tokens) == (0, 0, 0)


def test_tokens_outside_the_vocabulary_are_not_written(tmp_path):
    for wrong in (100, -1):
        refused = pytest.raises(AssertionError, match="outside the vocabulary")
        with refused, StoreWriter(tmp_path / "a", 100) as writer:
            writer.add_document([np.array([wrong])])


GOOD_IDX = index_bytes(**GOOD)


@pytest.mark.parametrize(
    ("idx", "message"),
    [
        (b"", "no index of a token store"),
        (GOOD_IDX[:20], "less than its header"),
        (b"TNTIDX\x00\x00" + GOOD_IDX[8:], "no index of a token store"),
        (index_bytes(**GOOD, version=2), "version 2"),
        (index_bytes(**GOOD, code=9), "type 9"),
        (index_bytes(**GOOD, code=6, itemsize=4), "not tokens"),
        (GOOD_IDX[:-1], "promises 94 .or 97"),
        (GOOD_IDX + b"\0", "promises 94"),
        (GOOD_IDX[:18] + struct.pack("<Q", 1 << 62) + GOOD_IDX[26:], "promises"),
        (index_bytes([4, -2, 7], [0, 2, 3]), "sequence 1 has -2 tokens"),
        (index_bytes(**GOOD, pointers=[0, 8, 14]), "sequence 2 begins at byte 14"),
        (index_bytes(**GOOD, pointers=[2, 8, 12]), "sequence 0 begins at byte 2"),
        (index_bytes([4, 2, 3], [0, 2]), "from 0 to 2: it must lead from 0 to the number of sequences, 3"),
        (index_bytes([4, 2, 3], [1, 2, 3]), "from 1 to 3"),
        (index_bytes([4, 2, 3], []), "empty"),
        (index_bytes([4, 2, 3], [0, 3, 2, 3]), "entry 2 of the document index is 2, below the 3"),
        (index_bytes([4, 2, 4], [0, 2, 3]), r"\.bin has 18 bytes where .*\.idx promises 20"),
        (index_bytes([4, 2, 2], [0, 2, 3]), r"\.bin has 18 bytes where .*\.idx promises 16"),
    ],
)
def test_a_broken_store_is_refused_with_what_is_wrong(tmp_path, monkeypatch, idx, message):
    monkeypatch.setattr("data.tokens.store.BLOCK", 2)  # what is wrong may lie in a later block
    with pytest.raises(ValueError if message == "not tokens" else DamagedFile, match=message):
        open_store(write_pair(tmp_path, idx))


def test_missing_halves(tmp_path):
    with pytest.raises(FileNotFoundError, match="no a.bin and no a.idx"):
        open_store(tmp_path / "a")
    prefix = write_pair(tmp_path, GOOD_IDX)
    for ending in (".bin", ".idx"):
        kept = Path(f"{prefix}{ending}").read_bytes()
        Path(f"{prefix}{ending}").unlink()
        with pytest.raises(DamagedFile, match=f"{ending} is missing"):
            open_store(prefix)
        Path(f"{prefix}{ending}").write_bytes(kept)
    assert open_store(prefix).tokens == 9


@pytest.mark.parametrize(("validation_every", "test_every"), [(20, None), (20, 20), (4, 2), (2, 2), (3, 7)])
def test_every_document_has_one_part_of_the_promised_share(validation_every, test_every):
    n = 840 * 20
    found = [part_of(i, validation_every, test_every) for i in range(500)]
    assert [PARTS[code] for code in parts(np.arange(500), validation_every, test_every)] == found
    documents = {name: documents_of(name, n, validation_every, test_every) for name in PARTS}
    assert np.array_equal(np.sort(np.concatenate(list(documents.values()))), np.arange(n))
    assert np.array_equal(documents["validation"], np.arange(validation_every - 1, n, validation_every))
    left = n - len(documents["validation"])
    assert abs(len(documents["test"]) - (left / test_every if test_every else 0)) <= 1
    assert len(documents["train"]) > 0


def make_store(tmp_path, documents):
    """Each document a list of sequences."""
    with StoreWriter(tmp_path / "store", 1000) as writer:
        for document in documents:
            writer.add_document([np.array(sequence) for sequence in document])
    return open_store(tmp_path / "store")


def random_documents(ended: str, sentences: bool) -> list[list[list[int]]]:
    rng = np.random.default_rng(3)
    documents = []
    for i in range(60):
        sizes = rng.integers(1, 12, size=rng.integers(1, 4) if sentences else 1)
        document = [rng.integers(10, 1000, size=size).tolist() for size in sizes] if i % 11 else []
        if document and (ended == "all" or (ended == "some" and i % 2)):
            document[-1].append(END)
        documents.append(document)
    return documents


@pytest.mark.parametrize("sentences", [False, True])
@pytest.mark.parametrize("ended", ["all", "none", "some"])
def test_the_stream_is_the_splits_documents_each_ended_once(tmp_path, ended, sentences):
    documents = random_documents(ended, sentences)
    store = make_store(tmp_path, documents)
    chosen = documents_of("train", len(documents), 5, 7)
    expected = []
    for i in chosen:
        text = sum(documents[i], [])
        expected += text if not text or text[-1] == END else [*text, END]
    stream = TokenStream(store, chosen, END)
    assert len(stream) == len(expected)
    assert stream.documents == sum(bool(documents[i]) for i in chosen)
    rng = np.random.default_rng(0)
    for _ in range(300):
        start, end = np.sort(rng.integers(len(expected) + 1, size=2)).tolist()
        assert stream.read(start, end).tolist() == expected[start:end]
    assert stream.read(0, len(expected)).tolist() == expected


def test_a_stream_whose_documents_end_themselves_keeps_one_entry_per_run(tmp_path):
    store = make_store(tmp_path, random_documents("all", False))
    assert len(TokenStream(store, np.arange(60), END)._ends) == 1
    assert len(TokenStream(store, documents_of("train", 60, 20), END)._ends) == 3


def test_a_large_store_is_judged_by_a_part_of_its_documents(tmp_path, monkeypatch):
    monkeypatch.setattr("data.samples.gpt._LOOKED_AT", 5)
    for ended in ("all", "none", "some"):
        store = make_store(tmp_path, random_documents(ended, False))
        stream = TokenStream(store, np.arange(60), END)
        tokens = stream.read(0, len(stream))
        assert (tokens == END).sum() == stream.documents and tokens[-1] == END


@pytest.fixture
def samples(tmp_path) -> GptSamples:
    store = make_store(tmp_path, random_documents("all", False))
    return GptSamples(TokenStream(store, documents_of("train", 60, 5), END), 16)


def test_windows_cover_the_stream_and_every_epoch_has_each_once(samples):
    stream = samples.stream
    count = (len(stream) - 1) // 16
    assert len(samples) == count
    text = stream.read(0, len(stream))
    windows = {tuple(text[i * 16 : i * 16 + 17].tolist()) for i in range(count)}
    orders = []
    for epoch in range(3):
        found = samples.take(range(epoch * count, (epoch + 1) * count), seed=1)["window"]
        assert found.dtype == np.int64 and found.shape == (count, 17)
        orders.append([tuple(row) for row in found.tolist()])
        assert set(orders[-1]) == windows
    assert orders[0] != orders[1] != orders[2]
    one, two = (samples.take(range(count), seed)["window"] for seed in (1, 2))
    assert not np.array_equal(one, two)


def test_any_order_of_access_and_any_thread_give_the_same_windows(samples):
    positions = np.random.default_rng(0).permutation(6 * len(samples)).tolist()
    expected = {p: samples.take([p], seed=5)["window"][0].tolist() for p in sorted(positions)}
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda p: samples.take([p], seed=5)["window"][0].tolist(), positions))
    assert found == [expected[p] for p in positions]
    samples.restore(samples.state(17))
    assert samples.fresh().take([3], seed=5)["window"][0].tolist() == expected[3]
    assert samples.state(17) == {"position": 17} and samples.random_access


def test_fixed_windows_are_spread_and_in_order(samples):
    held = samples.fixed(5)
    text = samples.stream.read(0, len(samples.stream))
    starts = [i * len(samples) // 5 * 16 for i in range(5)]
    assert held.fields["window"].tolist() == [text[start : start + 17].tolist() for start in starts]
    assert len(samples.fixed(10_000)) == len(samples)


def test_too_little_text_is_refused(tmp_path):
    store = make_store(tmp_path, [[[1, 2, END]]])
    with pytest.raises(ValueError, match="3 tokens.*sequence_length=3 needs 4"):
        GptSamples(TokenStream(store, np.arange(1), END), 3)
    assert len(GptSamples(TokenStream(store, np.arange(1), END), 2)) == 1
    with pytest.raises(ValueError, match="0 tokens"):
        GptSamples(TokenStream(store, np.arange(0), END), 3)


@pytest.mark.parametrize(
    ("ends", "inside", "refused"),
    [
        ((4999,) * 30, (), True),  # of another vocabulary
        ((299,) * 30, (), False),  # of ours
        ((4999,) * 29 + (7,), (), False),  # none has an end token
        ((4999,) * 30, (4999,), False),  # a word
        ((13,) * 30, (), False),  # a full stop
        ((13,) * 150, (), True),
        ((4999,), (), False),  # too few to know
    ],
)
def test_a_store_that_ends_documents_with_another_token_is_refused(ends, inside, refused, tmp_path):
    with StoreWriter(tmp_path / "text_document", 5000) as writer:
        for number, end in enumerate(ends):
            writer.add_document([np.array([number % 9, 20, *inside, end])])
            writer.add_document([np.array([], dtype=np.int64)])
    words = {f"w{number}": number for number in range(5000) if number not in (13, 299)}
    words |= {".": 13, "</s>": 299}
    backend = Tokenizer(models.WordLevel(words, "w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    origin = Origin.model_validate({"source": "store", "name": str(tmp_path)})
    said = f"every document ends in token {ends[0]}, .* end in 299: .*; set"
    with pytest.raises(ProblemsError, match=said) if refused else nullcontext():
        ready_made_store("file", "documents", origin, tokenizer, tmp_path, print)
