"""BERT samples: chunks, masking, segments.

Every token of the test store is unique, so that a token tells where it comes from.
"""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from texted import small_recipe, word_pieces

from data.samples.bert import BertFamily, BertSamples, generator, segments, truncate
from data.samples.chunks import Lengths, build_chunks, chunks_of_document
from data.samples.masking import BertVocabulary, check_whole_words, choose, mask
from data.text.held_out import documents_of
from data.tokens.store import Store, StoreWriter, open_store
from recipes.schema import Masking

CLS, SEP, MASK, PAD, TEXT = 1, 2, 3, 0, 10  # tokens from TEXT on are text: TEXT + place in the store
EVERY_DOCUMENT = 400
FIELDS = ("tokens", "token_types", "lengths", "positions", "labels", "predicted", "sentence_labels")


def document_sizes() -> list[np.ndarray]:
    """Tokens of the sentences of each document: many sentences, or few, or one, or none."""
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 60, size=EVERY_DOCUMENT)
    counts[::9], counts[5] = 1, 0
    return [rng.integers(1, 40, size=count) for count in counts]


SIZES = document_sizes()
TOTAL = sum(int(sizes.sum()) for sizes in SIZES)


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Store:
    prefix = tmp_path_factory.mktemp("store") / "sentences"
    counts = np.array([len(sizes) for sizes in SIZES])
    with StoreWriter(prefix, TEXT + TOTAL) as writer:
        writer.add_documents(TEXT + np.arange(TOTAL), np.concatenate(SIZES), counts)
    return open_store(prefix)


@pytest.fixture(scope="module")
def vocabulary() -> BertVocabulary:
    """Three of ten tokens continue a word."""
    continuation = np.random.default_rng(1).random(TEXT + TOTAL) < 0.3
    continuation[:TEXT] = False
    return BertVocabulary(CLS, SEP, MASK, PAD, continuation, np.arange(TEXT, TEXT + TOTAL))


STARTS = np.concatenate([[0], np.cumsum(np.concatenate(SIZES))])  # of sentences, and the end
DOCUMENT_STARTS = np.concatenate([[0], np.cumsum([sizes.sum() for sizes in SIZES])])


def document_of(token: int) -> int:
    return int(np.searchsorted(DOCUMENT_STARTS, token - TEXT, side="right")) - 1


@pytest.fixture(scope="module")
def family(vocabulary):
    """Makes a family of BERT's samples."""

    def make(length=128, head="sop", seed=7, **masking) -> BertFamily:
        chosen = Masking(**masking)
        most = max(1, round(chosen.probability * length))
        return BertFamily(None, vocabulary, length, most, head, chosen, seed)

    return make


def rows_of(fields) -> list[dict]:
    return [{key: values[i] for key, values in fields.items()} for i in range(len(fields["tokens"]))]


def unmasked(row: dict) -> tuple[list[int], list[int]]:
    """Tokens of A and of B as they were before masking."""
    tokens = row["tokens"].copy()
    tokens[row["positions"][: row["predicted"]]] = row["labels"][: row["predicted"]]
    tokens = tokens[: row["lengths"]].tolist()
    assert tokens[0] == CLS and tokens[-1] == SEP
    middle = tokens.index(SEP)
    first, second = tokens[1:middle], tokens[middle + 1 : -1]
    types = np.zeros(len(row["tokens"]), dtype=int)
    types[middle + 1 : len(tokens)] = 1
    assert row["token_types"].tolist() == types.tolist()
    return first, second


def sentences_in(run: list[int]) -> int:
    """Sentences of which a run of tokens has a part."""
    first, last = np.searchsorted(STARTS, [run[0] - TEXT, run[-1] - TEXT], side="right")
    return int(last - first) + 1


def is_run(tokens: list[int]) -> bool:
    return tokens == list(range(tokens[0], tokens[0] + len(tokens)))


# --- chunks


def greedy(sizes, document: int, lengths: Lengths) -> list[tuple[int, int]]:
    """(start, tokens) by the description, sentence by sentence."""
    pieces = []
    for size in sizes:
        whole, rest = divmod(size, lengths.target)
        pieces += [lengths.target] * whole + [rest] * bool(rest)
    found, start, taken = [], 0, 0
    for i, piece in enumerate(pieces):
        taken += piece
        if i == len(pieces) - 1 or taken >= lengths.of(np.array([document]), len(found))[0]:
            found.append((start, taken))
            start, taken = start + taken, 0
    return found


@pytest.mark.parametrize("target", [10, 61, 125, 10_000])  # 10: most sentences are longer than a sample
@pytest.mark.parametrize("block", [1 << 16, 7])
def test_chunks_are_those_of_the_greedy_loop(store, monkeypatch, target, block):
    monkeypatch.setattr("data.samples.chunks._BLOCK", block)
    lengths = Lengths(target, 0.3, seed=5)
    documents = documents_of("train", EVERY_DOCUMENT, 20)
    chunks = build_chunks(store, documents, lengths)
    expected = {d: greedy(SIZES[d].tolist(), d, lengths) for d in documents.tolist()}
    assert chunks.documents.tolist() == [d for d in documents.tolist() if expected[d]]
    bounds = zip(chunks.documents.tolist(), chunks.first, chunks.first[1:], strict=False)
    found = {
        d: [*zip(chunks.starts[a:b] - DOCUMENT_STARTS[d], chunks.lengths[a:b], strict=True)]
        for d, a, b in bounds
    }
    assert found == {d: of for d, of in expected.items() if of}
    starts, tokens = chunks_of_document(np.cumsum([0, *SIZES[3]]), 3, lengths)
    assert [*zip(starts, tokens, strict=True)] == expected[3], "a stream cuts as a store does"
    assert chunks.of_same_document(0) == tuple(chunks.first[:2])
    assert chunks.of_same_document(len(chunks) - 1) == tuple(chunks.first[-2:])


@pytest.mark.parametrize(
    "documents", [np.arange(399, 400), np.arange(3, 400, 100), np.arange(100, 180), np.arange(0)]
)
def test_sentences_of_few_documents_are_looked_up_block_by_block(store, monkeypatch, documents):
    """However far apart the documents are, one block of the store is looked at at a time."""

    class Watched:
        document_index = store.document_index

        def sequence_starts(self, sequences):
            documents = np.searchsorted(store.document_index, sequences[[0, -1]], side="right")
            spans.append(int(documents[1] - documents[0]))
            return store.sequence_starts(sequences)

    spans: list[int] = []
    lengths = Lengths(20, 0.1, 1)
    whole = build_chunks(store, documents, lengths)
    monkeypatch.setattr("data.samples.chunks._BLOCK", 50)
    found = build_chunks(Watched(), documents, lengths)
    for name in ("documents", "starts", "lengths", "first"):
        assert np.array_equal(getattr(found, name), getattr(whole, name))
    assert len(spans) == len(set((documents // 50).tolist())) and max(spans, default=0) <= 50


def test_random_lengths_have_their_share_and_are_uniform():
    lengths = Lengths(50, 0.1, seed=3)
    found = np.concatenate([lengths.of(np.arange(20_000), k) for k in range(10)])
    short = found[found < 50]
    assert abs(len(short) / len(found) - 0.1 * 48 / 49) < 0.003
    counts = np.bincount(short, minlength=50)[2:50]
    assert counts.min() > 0.85 * counts.mean() and counts.max() < 1.15 * counts.mean()
    assert found.min() == 2 and found.max() == 50
    assert not np.array_equal(lengths.of(np.arange(1000), 0), Lengths(50, 0.1, 4).of(np.arange(1000), 0))
    # No part of (seed, document, chunk) repeats another one's draws.
    a, *others = (lengths.of(np.arange(20_000) + k, n) < 50 for k, n in ((0, 0), (0, 1), (1, 0)))
    for other in others:
        assert abs((a & other).mean() - 0.01) < 0.004
    assert np.all(Lengths(50, 0.0, 1).of(np.arange(1000), 0) == 50)


# --- masking


def masked(tokens, vocabulary, masking=None, seed=0, special=None):
    tokens = np.array(tokens)
    places, rng = special or [0, len(tokens) - 1], np.random.default_rng(seed)
    positions, labels = mask(rng, tokens, places, vocabulary, masking or Masking(), len(tokens))
    return tokens, positions, labels


def text(length: int, start: int = 1000) -> list[int]:
    return [CLS, *range(start, start + length - 2), SEP]


def test_exactly_the_share_is_predicted_and_the_labels_are_what_stood_there(vocabulary):
    for seed, length in enumerate([8, 20, 100, 128, 511, 512]):
        original = np.array(text(length))
        tokens, positions, labels = masked(original, vocabulary, seed=seed)
        assert len(positions) == max(1, round(0.15 * length)) or length < 30
        assert 1 <= len(positions) <= max(1, round(0.15 * length))
        assert np.array_equal(labels, original[positions])
        assert np.all(np.diff(positions) > 0) and positions.min() > 0 and positions.max() < length - 1
        changed = np.flatnonzero(tokens != original)
        assert set(changed) <= set(positions.tolist())


def test_of_chosen_tokens_80_percent_are_masked_10_random_10_kept(vocabulary):
    counts, others = Counter(), []
    for seed in range(600):
        tokens, positions, labels = masked(text(512), vocabulary, seed=seed)
        found = tokens[positions]
        kept = found == labels
        counts.update(mask=int((found == MASK).sum()), kept=int(kept.sum()), all=len(found))
        others += found[(found != MASK) & ~kept].tolist()
    assert abs(counts["mask"] / counts["all"] - 0.8) < 0.01
    assert abs(counts["kept"] / counts["all"] - 0.1) < 0.01
    others_are = replace(vocabulary, ordinary=np.array([TEXT + 5]))
    for seed in range(50):
        tokens, positions, labels = masked(text(512), others_are, seed=seed)
        found = tokens[positions]
        assert set(found[found != labels].tolist()) <= {MASK, TEXT + 5}, "a random token is an ordinary one"
    assert abs(np.mean(others) / (TEXT + TOTAL / 2) - 1) < 0.04 and max(others) > 0.95 * TOTAL


def test_whole_words_are_predicted_or_not_at_all(vocabulary):
    pieces = Counter()
    for seed in range(200):
        original = np.array(text(256, 1000 + 200 * seed))
        _, positions, _ = masked(original, vocabulary, seed=seed)
        chosen = np.zeros(256, dtype=bool)
        chosen[positions] = True
        begins = ~vocabulary.continuation[original]
        begins[[0, 1, -1]] = True
        same_word = ~begins[1:]
        assert np.array_equal(chosen[1:][same_word], chosen[:-1][same_word])
        pieces.update(chosen[1:][same_word].tolist())
    assert pieces[True] > 500, "words of several pieces are chosen too"
    broken = 0
    for seed in range(20):
        original = np.array(text(256))
        _, positions, _ = masked(original, vocabulary, Masking(whole_words=False), seed)
        inside = [p for p in positions.tolist() if vocabulary.continuation[original[p]] and p > 1]
        broken += sum(p - 1 not in positions for p in inside)
    assert broken > 20, "without whole words, pieces are chosen one by one"


@pytest.mark.parametrize("max_ngram", [1, 2, 3, 5])
def test_ngrams_have_probability_proportional_to_one_over_n(max_ngram):
    counts, rng = Counter(), np.random.default_rng(0)
    borders, usable = np.arange(401), np.ones(400, dtype=bool)
    for _ in range(400):
        found = choose(rng, borders, usable, 60, max_ngram)
        counts.update(n for _, n in found[:-1])  # the last one may be shortened
    total, weights = sum(counts.values()), 1 / np.arange(1, max_ngram + 1)
    assert set(counts) == set(range(1, max_ngram + 1))
    for n in counts:
        assert abs(counts[n] / total - weights[n - 1] / weights.sum()) < 0.012


def test_chosen_words_are_spread_evenly_do_not_overlap_and_avoid_the_unusable():
    rng, hits = np.random.default_rng(1), np.zeros(200)
    sizes = np.random.default_rng(2).integers(1, 5, size=200)
    borders, usable = np.concatenate([[0], np.cumsum(sizes)]), np.ones(200, dtype=bool)
    usable[[0, 90, 199]] = False
    for _ in range(4000):
        found = choose(rng, borders, usable, 75, 3)
        words = [word for first, n in found for word in range(first, first + n)]
        assert len(words) == len(set(words)) and usable[words].all()
        tokens = sum(sizes[word] for word in words)
        assert tokens <= 75
        hits[words] += 1
    inner = np.delete(np.arange(200), [0, 1, 2, 88, 89, 90, 91, 92, 197, 198, 199])
    assert hits[inner].min() > 0.75 * hits[inner].mean() and hits[inner].max() < 1.25 * hits[inner].mean()


def test_a_budget_near_the_whole_text_is_filled_with_single_words():
    found = choose(np.random.default_rng(0), np.arange(101), np.ones(100, dtype=bool), 97, 3)
    assert sum(n for _, n in found) == 97


def test_words_and_ngrams_do_not_cross_from_a_to_b(vocabulary):
    continuing = np.flatnonzero(vocabulary.continuation)[:3]
    tokens = [CLS, continuing[0], continuing[1], SEP, continuing[2], SEP]
    chosen = Counter()
    for seed in range(200):
        found, positions, _ = masked(tokens, vocabulary, Masking(probability=0.5), seed, special=[0, 3, 5])
        assert found[0] == CLS and found[3] == SEP and found[5] == SEP
        chosen[tuple(positions.tolist())] += 1
    assert set(chosen) == {(1, 2, 4)}
    for seed in range(300):  # two words around a [SEP]: the budget of 2 holds both, but they are no bigram
        two_words, fifth = [CLS, 5000, SEP, 5002, SEP], Masking(probability=0.2)
        _, positions, _ = masked(two_words, vocabulary, fifth, seed, special=[0, 2, 4])
        assert positions.tolist() in ([1], [3])


def test_a_sample_always_has_a_prediction(vocabulary):
    one_word = replace(vocabulary, continuation=np.ones_like(vocabulary.continuation))
    for seed in range(20):
        _, positions, labels = masked(text(8), one_word, seed=seed)  # one word of 6 pieces, and a budget of 1
        assert len(positions) == 1 and 0 < positions[0] < 7


SPECIAL_PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def vocabulary_of(pieces: list[str]) -> BertVocabulary:
    names = [*SPECIAL_PIECES, *pieces]
    return BertVocabulary.of(word_pieces({name: number for number, name in enumerate(names)}))


def test_the_vocabulary_of_a_tokenizer():
    found = vocabulary_of(["a", "##b", "c", "##"])
    assert (found.pad, found.cls, found.sep, found.mask) == (0, 2, 3, 4)
    assert found.continuation.tolist() == [False] * 6 + [True, False, True]
    assert found.ordinary.tolist() == [5, 6, 7, 8]
    check_whole_words(found, Masking())
    no_words = replace(found, continuation=np.zeros(9, dtype=bool))
    check_whole_words(no_words, Masking(whole_words=False))
    with pytest.raises(ValueError, match="data.masking.whole_words=true"):
        check_whole_words(no_words, Masking())
    gaps = {name: number for number, name in enumerate(SPECIAL_PIECES)} | {"a": 9, "##b": 12}
    found = BertVocabulary.of(word_pieces(gaps))
    assert np.flatnonzero(found.continuation).tolist() == [12] and len(found.continuation) == 13
    assert found.ordinary.tolist() == [9, 12]


def test_every_token_of_a_script_without_blanks_is_a_word():
    """Where WordPiece makes one word of a clause, which no budget would hold."""
    pieces = [
        *("a", "##b", "ส", "##วั", "##ส", "こ", "##れは", "中"),
        *("##文", "ខ", "##ែ", "မ", "##ြ", "한", "##국"),
    ]
    found = vocabulary_of(pieces)
    assert [pieces[i - 5] for i in np.flatnonzero(found.continuation)] == ["##b", "##국"]
    clause = np.array([found.cls, *[7, *[8, 9] * 30], found.sep])
    positions, _ = mask(np.random.default_rng(0), clause, [0, len(clause) - 1], found, Masking(), 20)
    assert len(positions) == round(0.15 * len(clause))


# --- segments and samples


def all_rows(store, chosen: BertFamily, epochs=1) -> list[dict]:
    samples = BertSamples(store, np.arange(EVERY_DOCUMENT), chosen)
    return rows_of(samples.take(range(epochs * len(samples)), chosen.seed))


@pytest.mark.parametrize("head", ["none", "nsp", "sop"])
@pytest.mark.parametrize("length", [8, 64, 256])
def test_fields_have_the_promised_shapes(store, family, head, length):
    chosen = family(length, head)
    samples = BertSamples(store, np.arange(EVERY_DOCUMENT), chosen)
    fields = samples.take(range(100), 1)
    most = chosen.predictions
    shapes = [(100, length)] * 2 + [(100,)] + [(100, most)] * 2 + [(100,)] * 2
    assert [fields[key].shape for key in FIELDS] == shapes and len(fields) == len(FIELDS)
    assert all(values.dtype == np.int64 for values in fields.values())
    for row in rows_of(fields):
        size, real = row["lengths"], row["predicted"]
        assert 0 < size <= length
        assert np.all(row["tokens"][size:] == PAD) and np.all(row["tokens"][:size] != PAD)
        assert 1 <= real <= max(1, round(0.15 * size)) <= most
        assert np.all(row["positions"][real:] == 0) and np.all(row["labels"][real:] == 0)
        assert np.all(row["labels"][:real] >= TEXT), "special tokens are never predicted"
        first, second = unmasked(row)
        assert first and is_run(first) and (not second or is_run(second))
        if head == "none":
            assert not second and row["sentence_labels"] == 0


def test_sop_swaps_half_and_unswapped_the_document_is_in_order(store, family):
    rows = all_rows(store, family(128, "sop"), epochs=2)
    labels = []
    for row in rows:
        first, second = unmasked(row)
        if not second:
            continue
        labels.append(int(row["sentence_labels"]))
        before, after = (second, first) if row["sentence_labels"] else (first, second)
        assert before[-1] < after[0], "unswapped, A comes before B"
        assert document_of(before[0]) == document_of(after[-1])
        if before[-1] + 1 == after[0] and after[0] - TEXT not in STARTS:
            assert sentences_in(before + after) == 1, "divided between sentences, where there are two"
    assert abs(np.mean(labels) - 0.5) < 0.03


def test_nsp_takes_half_of_its_second_segments_from_other_documents(store, family):
    rows = all_rows(store, family(128, "nsp"), epochs=2)
    labels, partners = [], set()
    for row in rows:
        first, second = unmasked(row)
        a, b = document_of(first[0]), document_of(second[0])
        if row["sentence_labels"]:
            assert a != b
            partners.add(b)
        else:
            assert a == b and first[-1] < second[0]
        labels.append(int(row["sentence_labels"]))
        assert a == document_of(first[-1]) and b == document_of(second[-1]), "a segment is of one document"
    assert 0.48 < np.mean(labels) < 0.58, "half, and chunks of one sentence on top"
    assert len(partners) > 0.8 * EVERY_DOCUMENT


def test_nsp_reads_up_to_the_end_of_the_store(tmp_path, family):
    with StoreWriter(tmp_path / "two", TEXT + TOTAL) as writer:
        writer.add_documents(TEXT + np.arange(43), np.array([20, 3, 20]), np.array([2, 1]))
    samples = BertSamples(open_store(tmp_path / "two"), np.arange(2), family(8, "nsp"))
    seconds = {unmasked(row)[1][-1] for row in rows_of(samples.take(range(300), 1)) if row["sentence_labels"]}
    assert {TEXT + 22, TEXT + 42} <= seconds, "the last token of each document"


def test_segments_of_both_labels_are_equally_long(store, family):
    lengths = {0: [], 1: []}
    for row in all_rows(store, family(128, "nsp", short_probability=0.0)):
        if row["lengths"] == 128:
            lengths[int(row["sentence_labels"])].append(len(unmasked(row)[1]))
    assert abs(np.mean(lengths[0]) - np.mean(lengths[1])) < 6, "length must not tell whether B is random"


@pytest.mark.parametrize("head", ["none", "nsp", "sop"])
def test_samples_are_filled_with_several_sentences(store, family, head):
    rows = all_rows(store, family(128, head, short_probability=0.0))
    fill = np.mean([row["lengths"] for row in rows]) / 128
    two_sentences = (2 * np.mean(np.concatenate(SIZES)) + 3) / 128
    assert fill > 0.85 and fill > 2.5 * two_sentences
    # Most; the last chunk of a document is shorter.
    assert np.mean([row["lengths"] == 128 for row in rows]) > 0.75
    assert np.mean([sentences_in(segment) for row in rows for segment in unmasked(row) if segment]) > 2.5


def test_the_share_of_short_samples(store, family):
    def whole(share):
        rows = all_rows(store, family(128, "sop", short_probability=share))
        return np.mean([row["lengths"] == 128 for row in rows])

    assert whole(0.0) > 0.8 and 0.4 < whole(0.5) < 0.65


def test_a_chunk_of_one_sentence_still_gives_two_segments(family):
    tokens, none = np.arange(100, 120), np.empty(0, np.int64)
    cuts = set()
    for seed in range(200):
        first, second, label = segments(np.random.default_rng(seed), tokens, none, "sop", lambda n: None)
        assert np.concatenate([second, first] if label else [first, second]).tolist() == tokens.tolist()
        assert len(first) and len(second)
        cuts.add(len(second) if label else len(first))
        others, rng = (lambda n: np.array([7] * n)), np.random.default_rng(seed)
        first, second, label = segments(rng, tokens, none, "nsp", others)
        assert first.tolist() == tokens.tolist() and second.tolist() == [7] and label == 1
        first, second, label = segments(np.random.default_rng(seed), tokens, none, "nsp", lambda n: None)
        assert label == 0 and np.concatenate([first, second]).tolist() == tokens.tolist()
    assert cuts == set(range(1, 20))
    one = segments(np.random.default_rng(0), tokens[:1], none, "sop", lambda n: None)
    sample = family(16).assemble(np.random.default_rng(0), *one)
    assert len(sample.tokens) == 4 and sample.labels.tolist() == [100] and sample.sentence_label == 0


@pytest.mark.parametrize(
    ("a", "b", "room", "expected"),
    [
        (10, 5, 20, (10, 5)),
        (10, 5, 12, (7, 5)),
        (3, 30, 10, (3, 7)),
        (10, 5, 8, (4, 4)),
        (10, 5, 7, (4, 3)),
        (40, 0, 10, (10, 0)),
    ],
)
def test_tokens_are_dropped_from_the_longer_segment_at_both_ends(a, b, room, expected):
    fronts = Counter()
    for seed in range(300):
        first, second = truncate(np.random.default_rng(seed), np.arange(a), np.arange(b), room)
        assert (len(first), len(second)) == expected
        assert all(is_run(part.tolist()) for part in (first, second) if len(part))
        fronts[int(first[0]) if len(first) < a else int(second[0])] += 1
    dropped = max(a - expected[0], b - expected[1])
    mean = np.average(list(fronts), weights=list(fronts.values()))
    if dropped > 6:
        assert 0.35 < mean / dropped < 0.65
    elif dropped:
        assert 0 in fronts and abs(mean - dropped / 2) < 0.4


@pytest.mark.parametrize("head", ["none", "nsp", "sop"])
def test_any_order_of_access_and_any_thread_give_equal_samples(store, family, head):
    chosen, documents = family(64, head), documents_of("train", EVERY_DOCUMENT, 20)
    samples = BertSamples(store, documents, chosen)
    positions = [*range(150), len(samples) - 1, len(samples), 2 * len(samples) + 3]
    expected = samples.take(positions, 1)
    order = np.random.default_rng(0).permutation(len(positions))
    again = BertSamples(store, documents, chosen)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: again.take([positions[i]], 1), order))
    for i, fields in zip(order.tolist(), found, strict=True):
        assert all(fields[key][0].tobytes() == expected[key][i].tobytes() for key in FIELDS)
    samples.restore(samples.state(9))
    assert samples.state(9) == {"position": 9} and samples.random_access
    assert np.array_equal(samples.fresh().take(positions, 1)["tokens"], expected["tokens"])
    assert not np.array_equal(samples.take(positions, 2)["tokens"], expected["tokens"])


def test_every_epoch_has_every_chunk_once_and_masks_it_anew(store, family):
    samples = BertSamples(store, np.arange(EVERY_DOCUMENT), family(64, "none"))
    epochs = [samples.take(range(e * len(samples), (e + 1) * len(samples)), 1) for e in range(2)]
    firsts = []
    for fields in epochs:
        found = [unmasked(row)[0] for row in rows_of(fields)]
        first = np.array([run[0] - TEXT for run in found])
        chunk = np.searchsorted(samples._chunks.starts, first, side="right") - 1
        assert sorted(chunk.tolist()) == list(range(len(samples)))
        firsts.append(dict(zip(chunk.tolist(), fields["positions"].tolist(), strict=True)))
        assert chunk.tolist() != sorted(chunk.tolist())
    assert np.mean([firsts[0][c] == firsts[1][c] for c in firsts[0]]) < 0.15


def test_a_split_reads_only_its_documents(store, family):
    documents = documents_of("validation", EVERY_DOCUMENT, 4)
    for head in ("nsp", "sop"):
        samples = BertSamples(store, documents, family(64, head))
        rows = rows_of(samples.take(range(len(samples)), 3))
        found = {document_of(run[0]) for row in rows for run in unmasked(row) if run}
        assert found <= set(documents.tolist()) and len(found) > 0.9 * len(documents)


def test_fixed_samples_are_spread_and_do_not_depend_on_the_seed(store, family):
    documents = documents_of("validation", EVERY_DOCUMENT, 4)
    every = (family(64, "sop", seed).for_held_out() for seed in (1, 2))
    one, two = (chosen.stored_samples(store, documents).fixed(40) for chosen in every)
    assert len(one) == 40 and all(np.array_equal(one.fields[key], two.fields[key]) for key in FIELDS)
    origin = [document_of(unmasked(row)[0][0]) for row in rows_of(one.fields)]
    assert origin == sorted(origin) and len(set(origin)) > 25 and origin[-1] > 0.95 * EVERY_DOCUMENT
    assert len(family(64, "nsp").stored_samples(store, documents[:2]).fixed(10_000)) < 100


def test_too_little_text_is_refused(store, family):
    with pytest.raises(ValueError, match="model.sentence_head=nsp with text of one document"):
        BertSamples(store, np.array([4, 5]), family(64, "nsp"))  # document 5 is empty
    BertSamples(store, np.array([4, 5]), family(64, "sop"))
    for none in (np.array([5]), np.array([], dtype=np.int64)):
        with pytest.raises(ValueError, match="no text in [01] document"):
            BertSamples(store, none, family(64, "sop"))


def test_generators_differ_in_each_number_and_carry_no_state():
    keys = [(1, 2, 3), (1, 3, 2), (2, 2, 3), (1, 2, 4), (1, 3, 3), (0, 2, 3), (1 << 70, 2, 3)]
    draws = {key: generator(*key).random(4).tobytes() for key in keys}
    assert len(set(draws.values())) == len(draws)
    long = [set(generator(1, *key).random(200)) for key in [(2, 3), (2, 4), (3, 3)]]
    assert len(set.union(*long)) == 600, "neighbours draw from runs of the counter that do not overlap"
    assert generator(1, 2, 3).random(4).tobytes() == draws[1, 2, 3]


def test_the_family_of_a_recipe_and_padding_of_a_stack(vocabulary):
    shape = {"family": "bert", "vocab_size": 30522, "sentence_head": "nsp"}
    data = {"tokenizer": {"kind": "bert_uncased"}, "masking": {"probability": 0.2}}
    names = {name: number for number, name in enumerate([*SPECIAL_PIECES, "a", "##b"])}
    found = BertFamily.of(small_recipe(shape, data, sequence_length=64), word_pieces(names))
    assert (found.sequence_length, found.predictions, found.sentence_head) == (64, 13, "nsp")
    assert (found.seed, found.room) == (1234, 61)
    assert replace(found, sentence_head="none").room == 62
    found = replace(found, vocabulary=vocabulary)
    sample = found.assemble(np.random.default_rng(0), np.arange(20, 25), np.arange(30, 33), 1)
    fields = found.stack([sample, sample])
    assert fields["lengths"].tolist() == [11, 11] and fields["predicted"].tolist() == [2, 2]
    assert fields["sentence_labels"].tolist() == [1, 1]
    assert fields["token_types"][0].tolist() == [0] * 7 + [1] * 4 + [0] * 53
