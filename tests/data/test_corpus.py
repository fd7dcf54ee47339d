"""`build`, which puts sources, vocabularies, token stores and samples together; the cache.

Launch/show_data.py.
"""

import json
import math
import re
import signal
import subprocess
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from launching import ROOT, run
from texted import jsonl, quiet, small_recipe
from tokenizers import Tokenizer, models, pre_tokenizers

from data.corpus import build, check_origin, check_sources
from data.durable_files import cache_directory, locked
from data.loader import validation_batches
from data.samples import blend, splits
from data.samples.bert import BertFields
from data.text.documents import Document
from data.text.encoder import Encoder
from data.text.held_out import part_of
from data.text.packaged import PackagedSource, speeches
from data.text.ready_made_vocabulary import gpt2_tokenizer
from data.text.trained_vocabulary import END_OF_DOCUMENT, train_bpe
from data.text.vocabulary import vocabulary_digest
from data.tokens import opened as opened_stores
from data.tokens.store import Store, StoreWriter, open_store
from recipes.problems import ProblemsError
from recipes.schema import Recipe

DOCUMENTS, EVERY, VOCABULARY = 40, 4, 300
HELD_OUT = ["zo", "zu", "za"]
USUAL = ["ba", "de", "ki", "mo", "nu", "ra", "si", "to", "vé", "lu"]


def text_of_document(index: int) -> str:
    """Some words of a small artificial language; held-out documents have words of their own."""
    draw = np.random.default_rng(index)
    held_out = part_of(index, EVERY) == "validation"
    syllables = HELD_OUT if held_out else USUAL
    count = draw.integers(20, 60)
    return " ".join("".join(draw.choice(syllables, draw.integers(1, 5))) for _ in range(count))


@pytest.fixture
def corpus_file(tmp_path) -> Path:
    return jsonl(tmp_path / "corpus.jsonl", map(text_of_document, range(DOCUMENTS)))


def make_recipe(name: Path | str | None, size: int = VOCABULARY, bert: str | None = None, **data) -> Recipe:
    """A GPT's recipe, or a BERT's with this sentence head."""
    source = {"source": "jsonl", "name": str(name)} if name else {}
    family = {"family": "bert", "sentence_head": bert} if bert else {}
    kind = {"tokenizer": {"kind": "trained_wordpiece"}} if bert else {}
    data = {**source, "validation_every": EVERY, **kind, **data}
    return small_recipe({"vocab_size": size, **family}, data, run={"validation_samples": 6})


def stream_tokens(corpus) -> np.ndarray:
    """All tokens that a GPT trains on."""
    return corpus.train.stream.read(0, len(corpus.train.stream))


def test_build_keeps_held_out_documents_out_of_training(corpus_file, tmp_path):
    corpus = build(make_recipe(corpus_file, test_every=3), tmp_path / "cache", quiet)
    parts = [part_of(i, EVERY, 3) for i in range(DOCUMENTS)]
    train, test = ([i for i in range(DOCUMENTS) if parts[i] == part] for part in ("train", "test"))
    whole = "".join(text_of_document(i) + END_OF_DOCUMENT for i in train)
    assert corpus.tokenizer.decode(stream_tokens(corpus)) == whole
    learned = {corpus.tokenizer.decode(i) for i in range(257, VOCABULARY)}
    assert not any("z" in token for token in learned), "the vocabulary has seen held-out words"
    assert len(learned) == VOCABULARY - 257
    for samples, indices in ((corpus.validation, range(EVERY - 1, DOCUMENTS, EVERY)), (corpus.test, test)):
        text = "".join(text_of_document(i) + END_OF_DOCUMENT for i in indices)
        assert len(samples) == 6
        assert all(corpus.tokenizer.decode(window) in text for window in samples.fields["window"])


def test_build_of_a_bert_keeps_held_out_sentences_out_of_training(corpus_file, tmp_path):
    recipe = make_recipe(corpus_file, 120, bert="sop", test_every=3)
    corpus = build(recipe, tmp_path / "cache", quiet)
    vocabulary = corpus.tokenizer.get_vocab()
    assert not any("z" in token for token in vocabulary)
    (prefix,) = (path.with_suffix("") for path in (tmp_path / "cache").glob("*.sentences.idx"))
    store = open_store(prefix)
    own = {name: set() for name in ("train", "validation", "test")}
    for index in range(DOCUMENTS):
        own[part_of(index, EVERY, 3)] |= set(store.document(index).tolist())
    unknown = corpus.tokenizer.unk_token_id
    assert unknown in own["validation"] - own["train"], "held-out words are unknown to the vocabulary"
    taken = corpus.train.take(range(3 * len(corpus.train)), seed=1)
    assert unknown not in taken.labels and unknown in corpus.validation.labels
    assert unknown not in corpus.test.labels
    other = build(recipe.model_copy(update={"seed": 2}), tmp_path / "cache", quiet).validation
    for key, values in corpus.validation.fields.items():
        assert np.array_equal(values, other.fields[key]), "whatever the seed"


@pytest.mark.parametrize("bert", [None, "nsp"])
def test_build_measures_the_entropies_on_the_validation_labels(corpus_file, tmp_path, bert):
    size = 120 if bert else VOCABULARY
    corpus = build(make_recipe(corpus_file, size, bert=bert), tmp_path / "cache", quiet)
    (prefix,) = (path.with_suffix("") for path in (tmp_path / "cache").glob("*.idx"))
    documents = [open_store(prefix).document(i) for i in range(DOCUMENTS) if part_of(i, EVERY) == "train"]
    special = corpus.tokenizer.all_special_ids if bert else ()
    train = [token for token in np.concatenate(documents).tolist() if token not in special]
    batches = validation_batches(corpus.validation, 4, 1, 1, 0)
    labels = [int(x) for (micro,) in batches for x in micro["labels"][micro["weights"] > 0]]
    assert labels == corpus.validation.labels.tolist()
    nats = [-math.log((train.count(label) + 1) / (len(train) + size)) for label in labels]
    assert corpus.unigram_entropy == pytest.approx(sum(nats) / len(nats), rel=1e-9)
    assert corpus.uniform_entropy == math.log(size)


def test_tokens_of_large_stores_are_counted_in_a_part_that_is_spread_over_all(monkeypatch):
    monkeypatch.setattr(splits, "COUNTED_TOKENS", 400_000)
    monkeypatch.setattr(splits, "_COUNTED_AT_ONCE", 1000)
    tokens = np.arange(4_000_000) * 50 // 4_000_000
    counts = splits.token_counts(lambda start, end: tokens[start:end], len(tokens), 50)
    assert counts.sum() == 400_000 and counts.min() > 0.9 * counts.max()
    monkeypatch.undo()
    exact = splits.token_counts(lambda start, end: tokens[start:end], len(tokens), 50)
    assert exact.tolist() == np.bincount(tokens).tolist()


def test_validation_samples_are_spread_over_the_held_out_part(corpus_file, tmp_path):
    corpus = build(make_recipe(corpus_file), tmp_path / "cache", quiet)
    held = [text_of_document(i) for i in range(EVERY - 1, DOCUMENTS, EVERY)]
    first = corpus.tokenizer.decode(corpus.validation.fields["window"][0])
    assert first == held[0][: len(first)]
    last = corpus.tokenizer.decode(corpus.validation.fields["window"][5])
    assert any(last.partition(END_OF_DOCUMENT)[0] in text for text in held[-3:])


def test_summary_is_json_and_adds_up(corpus_file, tmp_path):
    corpus = build(make_recipe(corpus_file), tmp_path / "cache", quiet)
    summary = json.loads(json.dumps(corpus.summary))
    assert summary["documents"] == DOCUMENTS == summary["train_documents"] + summary["held_out_documents"]
    assert summary["text_bytes"] == sum(len(text_of_document(i).encode()) for i in range(DOCUMENTS))
    assert summary["samples_per_epoch"] == len(corpus.train) == (summary["train_tokens"] - 1) // 16
    assert summary["train_tokens"] == len(stream_tokens(corpus))
    (prefix,) = (path.with_suffix("") for path in (tmp_path / "cache").glob("*.idx"))
    content = prefix.with_name(prefix.name + ".bin").read_bytes()
    assert summary["train_tokens_crc32"] == f"{zlib.crc32(content):08x}"
    assert summary["vocabulary_size"] == len(corpus.tokenizer) == VOCABULARY


def test_second_build_reads_the_cache_and_changed_text_is_noticed(corpus_file, tmp_path):
    def rebuild():
        said = []
        return build(make_recipe(corpus_file), tmp_path / "cache", said.append), said

    first, said_first = rebuild()
    second, said_second = rebuild()
    assert said_first and not said_second
    assert first.summary == second.summary
    corpus_file.write_text(corpus_file.read_text().replace("ba", "bi"))
    third, said_third = rebuild()
    assert said_third
    assert third.summary["vocabulary_digest"] != first.summary["vocabulary_digest"]


def test_one_cache_serves_other_vocabularies_and_splits(corpus_file, tmp_path):
    recipe = make_recipe(corpus_file)
    larger = make_recipe(corpus_file, VOCABULARY + 20)
    other_split = make_recipe(corpus_file, validation_every=EVERY + 1)
    gpt2 = {"tokenizer": {"kind": "gpt2"}}  # the same vocabulary for every split
    gpt2_splits = [make_recipe(corpus_file, 50257, validation_every=n, **gpt2) for n in (EVERY, EVERY + 1)]
    for number, variant in enumerate([recipe, larger, other_split, *gpt2_splits]):
        shared = build(variant, tmp_path / "shared", quiet)
        alone = build(variant, tmp_path / f"alone{number}", quiet)
        assert shared.summary == alone.summary


@pytest.mark.parametrize("kind", ["vocabulary", "bin", "idx", "json"])
@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "missing"])
def test_damaged_cache_is_noticed_and_made_again(corpus_file, tmp_path, kind, damage):
    cache = tmp_path / "cache"
    first = build(make_recipe(corpus_file), cache, quiet)
    (victim,) = cache.glob(f"*{kind}")
    content = victim.read_bytes()
    middle = len(content) // 2
    if damage == "missing":
        victim.unlink()
    else:
        flipped = content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]
        victim.write_bytes({"cut": content[:-5], "flip": flipped, "empty": b""}[damage])
    said = []
    again = build(make_recipe(corpus_file), cache, said.append)
    assert victim.read_bytes() == content
    assert again.summary == first.summary
    assert any("making it again" in line for line in said) == (damage != "missing" or kind in ("bin", "idx"))


def test_leftovers_of_killed_processes_are_removed(corpus_file, tmp_path):
    cache = tmp_path / "cache"
    build(make_recipe(corpus_file), cache, quiet)
    for ending in ("json", "bin", "idx"):
        (file,) = cache.glob(f"*.{ending}")
        file.rename(file.with_name(file.name + ".0123.tmp"))
    build(make_recipe(corpus_file), cache, quiet)
    assert not list(cache.glob("*.tmp"))


def test_empty_documents_keep_their_number(tmp_path):
    texts = [text_of_document(i) if i % 3 else "" for i in range(DOCUMENTS)]
    path = jsonl(tmp_path / "corpus.jsonl", texts)
    corpus = build(make_recipe(path), tmp_path / "cache", quiet)
    train = [text for i, text in enumerate(texts) if text and part_of(i, EVERY) == "train"]
    assert corpus.tokenizer.decode(stream_tokens(corpus)) == "".join(t + END_OF_DOCUMENT for t in train)


FETCH = """
import pathlib, sys, time
from data import durable_files
from data.durable_files import replacing
path = pathlib.Path(sys.argv[1])

def write():
    print("made", flush=True)
    with replacing(path) as file:
        for _ in range(10):
            file.write(b"part ")
            time.sleep(0.02)

print(durable_files.cached([path], path.read_bytes, write, "thing", lambda line: None).decode())
"""


def test_of_processes_that_want_a_file_at_once_one_makes_it(tmp_path):
    command = [sys.executable, "-c", FETCH, str(tmp_path / "thing")]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    outputs = [run.communicate(timeout=60)[0].splitlines() for run in runs]
    assert [run.returncode for run in runs] == [0] * 4
    assert [output[-1] for output in outputs] == ["part " * 10] * 4, "nobody sees half a file"
    assert sum("made" in output for output in outputs) == 1
    assert not list(tmp_path.glob("*.tmp"))


def test_builds_at_once_agree(corpus_file, tmp_path):
    recipe, said = make_recipe(corpus_file), []
    with ThreadPoolExecutor(3) as pool:  # each opens the lock file itself, as processes do
        corpora = list(pool.map(lambda _: build(recipe, tmp_path / "cache", said.append), range(3)))
    assert all(corpus.summary == corpora[0].summary for corpus in corpora)
    assert sum("trained in" in line for line in said) == 1, said


def test_lock_of_a_killed_process_holds_nobody_up(tmp_path):
    path = tmp_path / "thing"
    hold = (
        "import fcntl, sys, time; f = open(sys.argv[1], 'ab'); fcntl.flock(f, 2); print(1, flush=True); "
        "time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", hold, f"{path}.lock"], stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline()
        said = []
        holder_dies = subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -{signal.SIGKILL.value} {holder.pid}"])
        started = time.monotonic()
        with locked(path, "thing", said.append) as held:
            assert held and time.monotonic() - started < 20
        assert said == ["thing: another process is making it; waiting"]
        holder_dies.wait()
    finally:
        holder.kill()
        holder.wait()


def test_trained_vocabulary_is_deterministic_exact_and_covers_all_text():
    texts = [text_of_document(i) for i in range(DOCUMENTS)]
    first, second = (train_bpe(texts, VOCABULARY) for _ in range(2))
    assert first.to_str() == second.to_str()
    assert first.get_vocab_size() == VOCABULARY
    odd = "naïve 日本語 \x00\t\n\U0001f600 Ωmega"
    assert first.decode(first.encode(odd).ids, skip_special_tokens=False) == odd


def test_packaged_corpus_is_chronological_and_held_out_in_every_century():
    documents = list(PackagedSource().documents())
    years = [int(path.name[:4]) for path in speeches()]
    assert len(documents) == len(years) >= 240 and years == sorted(years)
    held = {years[d.index] // 100 for d in documents if part_of(d.index, 20) == "validation"}
    assert held == {year // 100 for year in years if year >= 1800}
    assert all(len(d.text) > 1000 for d in documents)


def test_a_broken_record_is_refused_with_its_place_and_keeps_no_store(tmp_path):
    (tmp_path / "corpus.jsonl").write_text('{"text": "a b"}\n{"text": ')
    recipe = make_recipe(tmp_path / "corpus.jsonl", 50257, tokenizer={"kind": "gpt2"})
    with pytest.raises(ValueError, match="corpus.jsonl:2: "):
        build(recipe, tmp_path / "cache", quiet)
    assert not [path for path in (tmp_path / "cache").glob("*") if path.suffix != ".lock"]


def test_missing_files_are_refused_before_a_run(tmp_path):
    for recipe in (make_recipe(tmp_path / "absent*.jsonl"), make_recipe(tmp_path)):
        with pytest.raises(ValueError, match="data.name="):
            check_origin(recipe.data)
    check_origin(make_recipe(None).data)


@pytest.mark.parametrize("test_every", [None, 3])
def test_where_no_whole_documents_can_be_held_out_the_end_of_the_text_is(corpus_file, tmp_path, test_every):
    """No other text is; a vocabulary trained on it has not seen its end, and training sees all else."""
    recipe = make_recipe(corpus_file, 300, validation_every=DOCUMENTS + 1, test_every=test_every)
    corpus = build(recipe, tmp_path / "cache", quiet)
    assert "the end of the text is held out" in corpus.summary["held_out"]
    learnt, held = corpus.tokenizer.decode(stream_tokens(corpus)), corpus.validation.fields["window"][-1]
    learnt = learnt.replace(END_OF_DOCUMENT, "")
    whole = "".join(text_of_document(i) for i in range(DOCUMENTS))
    assert whole.startswith(learnt) and 0.6 * len(whole) < len(learnt) < len(whole)
    assert corpus.tokenizer.decode(held).split(END_OF_DOCUMENT)[0] in whole[len(learnt) :]
    assert bool(corpus.test) == bool(test_every)


def test_one_text_without_blanks_is_cut_too(tmp_path):
    (tmp_path / "one.txt").write_text("abc" * 2000)
    corpus = build(make_recipe(tmp_path / "one.txt", 257, source="text"), tmp_path / "cache", quiet)
    assert corpus.summary["held_out_documents"] == 1 and corpus.summary["text_bytes"] == 6000


def test_parts_shorter_than_a_sample_are_refused(corpus_file, tmp_path):
    (tmp_path / "short.txt").write_text("a b c")
    with pytest.raises(ValueError, match="the training part: 1 document .*validation_every=4 decides"):
        build(make_recipe(tmp_path / "short.txt", 257, source="text"), tmp_path / "cache", quiet)
    recipe = make_recipe(corpus_file, 120, bert="nsp", validation_every=DOCUMENTS)
    with pytest.raises(ValueError, match="the part held out for validation: .*nsp.* one document alone"):
        build(recipe, tmp_path / "cache", quiet)


def test_cache_directory_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("MEGARECIPES_CACHE", "/chosen")
    assert cache_directory() == Path("/chosen")
    monkeypatch.delenv("MEGARECIPES_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_directory() == Path("/xdg/megarecipes")


def test_unusable_cache_directory_is_refused_with_the_fix(corpus_file, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cache directory .*file/cache.*; set MEGARECIPES_CACHE"):
        build(make_recipe(corpus_file), tmp_path / "file" / "cache", quiet)


# ---- stores that are there already


def write_store(prefix: Path, tokenizer, sentences: bool = False, vocab_size: int | None = None) -> None:
    encoder = Encoder(tokenizer)
    with StoreWriter(prefix, vocab_size or len(tokenizer)) as writer:
        for index in range(DOCUMENTS):
            text = text_of_document(index)
            if sentences:
                words = text.split()
                fives = [" ".join(words[i : i + 5]) for i in range(0, len(words), 5)]
                writer.add_document(encoder.encode_sentences([fives])[0])
            else:
                writer.add_document([ids for _, ids in encoder([Document(index, text)])])


checksum = Store.checksum


def store_recipe(name: Path, vocab_size: int, tokenizer: dict, bert: str | None = None) -> Recipe:
    return make_recipe(name, vocab_size, bert, source="store", tokenizer=tokenizer)


@pytest.fixture
def prepared(tmp_path, corpus_file) -> tuple[Path, int]:
    """A directory as prepare_data leaves it, and its number of tokens."""
    tokenizer = build(make_recipe(corpus_file), tmp_path / "cache", quiet).tokenizer
    directory = tmp_path / "prepared"
    directory.mkdir()
    write_store(directory / "store", tokenizer)
    tokenizer.save_pretrained(directory / "tokenizer")
    store = open_store(directory / "store")
    crc32 = {name: f"{crc:08x}" for name, crc in store.checksum()._asdict().items()}
    facts = {"documents": DOCUMENTS, "tokens": store.tokens, "text_bytes": 7, "crc32": crc32}
    facts |= {"vocabulary_digest": vocabulary_digest(tokenizer)}
    (directory / "report.json").write_text(json.dumps({"store": facts}))
    return directory, store.tokens


def test_a_prepared_store_gives_the_samples_of_its_source(prepared, corpus_file, tmp_path):
    directory, tokens = prepared
    found = build(store_recipe(directory, VOCABULARY, {"kind": "store"}), tmp_path / "cache", quiet)
    cached = build(make_recipe(corpus_file), tmp_path / "cache", quiet)
    assert np.array_equal(found.train.take(range(40), 1)["window"], cached.train.take(range(40), 1)["window"])
    assert found.unigram_entropy == cached.unigram_entropy
    different = [key for key in cached.summary if found.summary[key] != cached.summary[key]]
    assert different == ["source", "vocabulary", "text_bytes"] and found.summary["text_bytes"] == 7
    assert found.summary["train_tokens"] + found.summary["held_out_tokens"] == tokens


@pytest.mark.parametrize("large", [False, True])
def test_a_prepared_store_whose_tokens_were_replaced_is_refused(prepared, tmp_path, monkeypatch, large):
    """Half of them, by tokens of the vocabulary: sizes and index stay."""
    directory, _ = prepared
    recipe, file = store_recipe(directory, VOCABULARY, {"kind": "store"}), directory / "store.bin"
    read, whole = [], file.read_bytes()
    if large:
        monkeypatch.setattr(opened_stores, "READ_BY_ALL", 0)
    monkeypatch.setattr(Store, "checksum", lambda *_: read.append(1) or checksum(*_))
    build(recipe, tmp_path / "cache", quiet)
    build(recipe, tmp_path / "cache", quiet)
    assert len(read) == (1 if large else 2), "a large store is read once for every version of its files"
    half = len(whole) // 4 * 2
    file.write_bytes(whole[half:] + whole[:half])
    with pytest.raises(ProblemsError) as caught:
        build(recipe, tmp_path / "cache", quiet)
    message = str(caught.value)
    recorded, found = (f"{zlib.crc32(content):08x}" for content in (whole, file.read_bytes()))
    assert str(file) in message and recorded in message and found in message and "copy" in message
    file.write_bytes(whole)
    build(recipe, tmp_path / "cache", quiet)


def test_a_store_of_another_vocabulary_or_another_report_is_refused(prepared, tmp_path):
    directory, _ = prepared
    with pytest.raises(ValueError, match="another vocabulary .*kind=gpt2 .* set data.tokenizer.kind=store"):
        build(store_recipe(directory, 50257, {"kind": "gpt2"}), tmp_path / "cache", quiet)
    report = json.loads((directory / "report.json").read_text())
    report["store"]["tokens"] += 1
    (directory / "report.json").write_text(json.dumps(report))
    with pytest.raises(ValueError, match="do not belong together"):
        build(store_recipe(directory, VOCABULARY, {"kind": "store"}), tmp_path / "cache", quiet)


def test_planning_refuses_a_store_of_another_vocabulary_by_what_its_first_bytes_tell(prepared, tmp_path):
    directory, _ = prepared
    check_sources(store_recipe(directory, VOCABULARY, {"kind": "store"}))
    with pytest.raises(ProblemsError, match=f"model.vocab_size=700, but .*has {VOCABULARY} tokens"):
        check_sources(store_recipe(directory, 700, {"kind": "store"}))
    report = directory / "report.json"
    facts = json.loads(report.read_text())
    facts["store"]["vocab_size"] = VOCABULARY
    report.write_text(json.dumps(facts))
    published = {"kind": "bert_uncased"}
    with pytest.raises(ProblemsError, match=f"was made with a vocabulary of {VOCABULARY} tokens; set model"):
        check_sources(store_recipe(directory, 30522, published, bert="none"))
    report.unlink()  # as of another tool: the tokens tell
    with pytest.raises(ProblemsError, match="outside the vocabulary"):
        check_sources(store_recipe(directory, 20, published, bert="none"))
    report.write_text('{"store": 5}')
    with pytest.raises(ProblemsError, match='report.json: its "store" is a number'):
        check_sources(store_recipe(directory, 30522, published, bert="none"))
    whole = (directory / "store.idx").read_bytes()
    (directory / "store.idx").write_bytes(whole[:-8])
    with pytest.raises(ProblemsError, match="bytes where its header promises"):
        check_sources(store_recipe(directory, 30522, published, bert="none"))


def test_a_foreign_store_is_named_by_its_prefix_or_either_file_and_its_tokens_are_checked(tmp_path):
    write_store(tmp_path / "my_text_document", gpt2_tokenizer())
    for name in ("my_text_document", "my_text_document.bin", "my_text_document.idx", "."):
        corpus = build(store_recipe(tmp_path / name, 50257, {"kind": "gpt2"}), tmp_path / "cache", quiet)
        assert "text_bytes" not in corpus.summary and len(corpus.validation) == 6


@pytest.mark.parametrize("kept_in_the_cache", [False, True])
def test_a_token_outside_of_the_vocabulary_is_found_wherever_it_stands(
    kept_in_the_cache, tmp_path, monkeypatch
):
    # Neither at the beginning, nor among those that are counted, nor held out: it once reached the model.
    monkeypatch.setattr(opened_stores, "LOOKED_AT", 100)
    if kept_in_the_cache:
        monkeypatch.setattr(opened_stores, "READ_BY_ALL", 0)
    with StoreWriter(tmp_path / "store", 70000) as writer:
        for _ in range(60):
            writer.add_document([np.array([5, 6, 7] * 30), np.array([8, 50256])])
    tokens = np.memmap(tmp_path / "store.bin", "<i4", "r+")
    recipe = store_recipe(tmp_path / "store", 50257, {"kind": "gpt2"})
    build(recipe, tmp_path / "cache", quiet)
    for token in (50257, -1):
        tokens[92 * 33 + 90] = token
        tokens.flush()
        check_sources(recipe)
        here = f"token {token} at place 3,126 is outside the vocabulary of model.vocab_size=50257"
        with pytest.raises(ProblemsError, match=here):
            build(recipe, tmp_path / "cache", quiet)


def test_a_plan_says_which_share_of_a_text_its_vocabulary_does_not_know(corpus_file, tmp_path):
    words = {"[UNK]": 0, "</s>": 1, "word": 2}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (tmp_path / "text.txt").write_text("word 中文 word\n")
    kind = {"kind": "file", "path": str(tmp_path)}
    (said,) = check_sources(make_recipe(tmp_path / "text.txt", 3, source="text", tokenizer=kind))
    assert said == "25.00% of the first tokens are [UNK]"
    assert not check_sources(make_recipe(corpus_file))


def test_missing_and_damaged_stores_are_refused(tmp_path):
    write_store(tmp_path / "one", gpt2_tokenizer())
    write_store(tmp_path / "two", gpt2_tokenizer())
    (tmp_path / "empty").mkdir()
    (tmp_path / "later.partial").mkdir()
    messages = {
        ".": "a directory with 2 token stores .one, two.; name one of them",
        "empty": "a directory with 0 token stores",
        "absent": "no such directory, and no absent.bin",
        "later": "prepare_data has not finished there; run its command again",
        "raw": "train.bin has no train.idx, .* nanoGPT's train.bin, data/README.md",
        "raw/train.bin": "train.bin has no train.idx",
        "raw/train": "train.bin has no train.idx",
        "tokens.npy": "it is a numpy array, and no token store",
    }
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "train.bin").write_bytes(bytes(8))
    np.save(tmp_path / "tokens.npy", np.arange(9))
    for name, message in messages.items():
        with pytest.raises(ValueError, match=message):
            check_origin(store_recipe(tmp_path / name, 50257, {"kind": "gpt2"}).data)
    (tmp_path / "one.bin").write_bytes((tmp_path / "one.bin").read_bytes()[:-2])
    with pytest.raises(ValueError, match="data.name=.*one: .*truncated.*prepare or copy the store again"):
        build(store_recipe(tmp_path / "one", 50257, {"kind": "gpt2"}), tmp_path / "cache", quiet)


@pytest.mark.parametrize("ends", [(4, 7), (4, 9), ()])
def test_raw_tokens_become_a_store_as_the_readme_shows(ends, tmp_path, monkeypatch):
    tokens = np.arange(9, dtype=np.uint16)
    tokens[[end - 1 for end in ends]] = 50256
    tokens.tofile(tmp_path / "train.bin")
    monkeypatch.chdir(tmp_path)
    (shown,) = re.findall("```python\n(.*?)```", (ROOT / "data" / "README.md").read_text(), re.DOTALL)
    exec(shown, {})
    store = open_store(tmp_path / "store")
    documents = [0, *ends] if 9 in ends else [0, *ends, 9]
    assert np.array_equal(store.tokens_array, tokens)
    assert np.cumsum([0, *store.sizes]).tolist() == documents and store.documents == len(documents) - 1


def test_a_bert_takes_sentences_and_refuses_documents(corpus_file, tmp_path):
    tokenizer = build(make_recipe(corpus_file, 120, bert="sop"), tmp_path / "cache", quiet).tokenizer
    store = tmp_path / "store"
    store.mkdir()
    tokenizer.save_pretrained(store / "tokenizer")
    write_store(store / "my_text_document", tokenizer)
    with pytest.raises(ValueError, match="a BERT's samples are made of sentences; .* --samples bert"):
        build(store_recipe(store, 120, {"kind": "store"}, bert="sop"), tmp_path / "cache", quiet)
    write_store(store / "my_text_sentence", tokenizer, sentences=True)
    corpus = build(store_recipe(store, 120, {"kind": "store"}, bert="sop"), tmp_path / "cache", quiet)
    assert corpus.summary["documents"] == DOCUMENTS and corpus.train.take([0], 1)["tokens"].shape == (1, 16)


def test_a_blend_adds_up_its_parts_and_takes_held_out_samples_by_weight(corpus_file, tmp_path):
    upper = (text_of_document(i).upper() for i in range(DOCUMENTS // 2))
    other_file = jsonl(tmp_path / "other.jsonl", upper)
    named = ((corpus_file, 2.0), (other_file, 1.0))
    parts = [{"source": "jsonl", "name": str(file), "weight": weight} for file, weight in named]
    corpus = build(make_recipe(None, blend=parts), tmp_path / "cache", quiet)
    assert corpus.summary["documents"] == DOCUMENTS + DOCUMENTS // 2
    assert [part["weight"] for part in corpus.summary["parts"]] == [2.0, 1.0]

    def upper_case(fields):
        texts = corpus.tokenizer.batch_decode(fields["window"])
        return [text.replace(END_OF_DOCUMENT, "").isupper() for text in texts]

    assert upper_case(corpus.validation.fields) == [False] * 4 + [True] * 2
    assert sum(upper_case(corpus.train.take(range(300), 1))) == pytest.approx(100, abs=25)
    checksums = [part["train_tokens_crc32"] for part in corpus.summary["parts"]]
    assert corpus.summary["train_tokens_crc32"].split(",") == checksums
    counts, sums = [np.array([3, 1]), np.array([0, 100])], [4, 100]
    blended = blend._blended_counts(counts, [3.0, 1.0])
    assert blended.sum() == pytest.approx(sum(sums))
    assert blended[0] / blended.sum() == pytest.approx(0.75 * 0.75)


# ---- launch/show_data.py


def test_described_samples_show_segments_masks_and_padding(corpus_file, tmp_path):
    tokenizer = build(make_recipe(corpus_file, 120, bert="sop"), tmp_path / "cache", quiet).tokenizer
    ba, de, mask = (tokenizer.convert_tokens_to_ids(token) for token in ("ba", "de", "[MASK]"))
    cls, sep = tokenizer.cls_token_id, tokenizer.sep_token_id
    continued = next(token for token in tokenizer.get_vocab() if token.startswith("##"))
    piece = tokenizer.convert_tokens_to_ids(continued)
    arrays = {
        "tokens": np.array([[cls, piece, mask, ba, piece, sep, de, sep, 0, 0]]),
        "token_types": np.array([[0, 0, 0, 0, 0, 0, 1, 1, 0, 0]]),
        "lengths": np.array([8]),
        "positions": np.array([[2, 6, 0]]),
        "labels": np.array([[de, ba, 0]]),
        "predicted": np.array([2]),
        "sentence_labels": np.array([1]),
    }
    assert BertFields(arrays).describe(0, tokenizer, "sop").splitlines() == [
        "8 tokens (6 in A, 2 in B), 2 of padding; 2 predicted of at most 3",
        "sop label 1: A and B swapped",
        f"A: [CLS] {continued} [de->[MASK]] ba{continued[2:]} [SEP]",
        "B: [ba->de] [SEP]",
    ]


@pytest.fixture
def recipe_file(corpus_file, tmp_path) -> Path:
    """A table with the row `row`: a BERT on the small corpus."""
    recipe = make_recipe(corpus_file, 120, bert="sop")
    values = recipe.model_dump(by_alias=True, exclude_unset=True, mode="json")
    table = {"title": values.pop("title"), "rows": {"row": {"title": "row", **values}}}
    (tmp_path / "small.yaml").write_text(json.dumps(table))
    return tmp_path / "small.yaml"


def test_show_data_prints_samples_and_equal_hashes(recipe_file, tmp_path):
    def show(*flags: object):
        command = [sys.executable, ROOT / "launch" / "show_data.py", "--recipe", f"{recipe_file}:row", *flags]
        return run([*map(str, command)], env={"MEGARECIPES_CACHE": str(tmp_path / "cache")})

    shown = show("--samples", 1)
    assert shown.returncode == 0 and "sop label" in shown.stdout and "->[MASK]]" in shown.stdout, shown.stdout
    hashes = show("--hashes", 2, "--step", 3)
    rows = [line.split() for line in hashes.stdout.splitlines() if line.split()[0] in ("3", "4")]
    assert hashes.returncode == 0 and len(rows) == 2, hashes.stdout
    assert all(len(row) == 4 and len(set(row[1:])) == 1 for row in rows)
    refused = show("--split", "test")
    assert refused.returncode == 2 and "data.test_every is null" in refused.stdout


@pytest.mark.parametrize("bert", ["sop", None])
def test_the_summary_has_the_lengths_of_documents_and_samples(bert, tmp_path, monkeypatch, capsys):
    """Of a stream those of samples alone."""
    from launch import show_data

    monkeypatch.setenv("MEGARECIPES_CACHE", str(tmp_path / "cache"))
    texts = (text_of_document(i).replace(" ", "\n", i % 4) for i in range(DOCUMENTS))
    path = jsonl(tmp_path / "lines.jsonl", texts)
    stored = make_recipe(path, *([120, bert] if bert else []), sentences="lines")
    corpus = build(stored, say=quiet)
    tokens = sum(corpus.summary[f"{part}_tokens"] for part in ("train", "held_out"))
    streamed = stored.model_copy(update={"data": stored.data.model_copy(update={"streaming": True})})
    for recipe in (stored, streamed):
        assert show_data.show_lengths(recipe, corpus, 20) == 0
        shown = capsys.readouterr().out
        of_documents = f"{DOCUMENTS:,}, in all {tokens:,} tokens: mean {tokens / DOCUMENTS:,.0f}, "
        assert (of_documents in shown) == ("tokens per document" in shown) == (recipe is stored)
        lengths = corpus.train.take(range(20), stored.seed).get("lengths")
        if bert:
            padding = 100 * (1 - lengths.sum() / (20 * stored.sequence_length))
            assert f"{padding:.1f} % of it padding: the first 20 of training" in shown
            assert f"{np.median(lengths):,.0f}" in shown
        else:
            assert "no padding" in shown


def test_different_hashes_are_told_by_the_exit_code(monkeypatch, capsys):
    from launch import show_data

    recipe = make_recipe(None)

    def different(recipe, corpus, layout, _):
        return ["a" * 64, ("b" if layout.dp < 4 else "c") * 64]

    monkeypatch.setattr(show_data, "step_hashes", different)
    args = show_data.build_parser().parse_args(["--hashes", "2", "--step", "5"])
    assert show_data.show_hashes(recipe, None, args) == 1
    output = capsys.readouterr()
    assert output.out.splitlines()[2].endswith("DIFFERENT") and "in steps 6" in output.err
    monkeypatch.setattr(show_data, "step_hashes", lambda *_: ["a", "b"])
    assert show_data.show_hashes(recipe, None, args) == 0
