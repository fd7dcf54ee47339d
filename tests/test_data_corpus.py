"""Sources, vocabularies, the token files, and `build`, which puts them together."""

import gzip
import json
import math
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

import data
from data.cache import Damaged, default_directory, locked
from data.sources import Document, JsonlSource, PackagedSource, held_out
from data.store import TokenWriter, open_tokens, token_dtype
from data.vocabulary import END_OF_DOCUMENT, Encoder, gpt2_tokenizer, train_bpe
from recipes.schema import Recipe

DOCUMENTS, EVERY, VOCABULARY = 40, 4, 300


def text_of_document(index: int) -> str:
    """Some words of a small artificial language; held-out documents have words of their own."""
    draw = np.random.default_rng(index)
    syllables = ["zo", "zu", "za"] if held_out(index, EVERY) else ["ba", "de", "ki", "mo", "nu", "ra", "si", "to", "vé", "lu"]
    return " ".join("".join(draw.choice(syllables, draw.integers(1, 5))) for _ in range(draw.integers(20, 60)))


@pytest.fixture
def corpus_file(tmp_path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text_of_document(i)}) + "\n" for i in range(DOCUMENTS)))
    return path


def make_recipe(name: Path | str | None, vocab_size: int = VOCABULARY, **data_settings) -> Recipe:
    source = {"source": "jsonl", "name": str(name)} if name else {"source": "packaged"}
    return Recipe.model_validate(
        {
            "title": "test",
            "model": {"layers": 1, "hidden": 8, "heads": 1, "vocab_size": vocab_size},
            "sequence_length": 16,
            "batch": {"micro": 2, "global": 4},
            "steps": 3,
            "optimizer": {"lr": 1e-3},
            "data": {**source, "validation_every": EVERY, **data_settings},
            "run": {"validation_samples": 6},
        }
    )


def quiet(line: str) -> None:
    pass


def test_build_keeps_held_out_documents_out_of_training(corpus_file, tmp_path):
    corpus = data.build(make_recipe(corpus_file), tmp_path / "cache", quiet)
    train_text = corpus.tokenizer.decode(corpus.train._tokens)
    held_out_text = corpus.tokenizer.decode(corpus.validation._tokens)
    expected = [[], []]
    for index in range(DOCUMENTS):
        expected[index % EVERY == EVERY - 1].append(text_of_document(index) + END_OF_DOCUMENT)
    assert train_text == "".join(expected[False])
    assert held_out_text == "".join(expected[True])
    learned = {corpus.tokenizer.decode(i) for i in range(257, VOCABULARY)}
    assert not any("z" in token for token in learned), "the vocabulary has seen held-out words"
    assert len(learned) == VOCABULARY - 257


def test_build_measures_the_entropies_on_the_validation_labels(corpus_file, tmp_path):
    corpus = data.build(make_recipe(corpus_file), tmp_path / "cache", quiet)
    train = corpus.train._tokens.tolist()
    assert corpus.uniform_entropy == math.log(VOCABULARY)
    labels = [int(label) for i in range(6) for label in corpus.validation[i][1:]]
    frequency = {label: (train.count(label) + 1) / (len(train) + VOCABULARY) for label in set(labels)}
    expected = -sum(math.log(frequency[label]) for label in labels) / len(labels)
    assert corpus.unigram_entropy == pytest.approx(expected, rel=1e-9)
    batches = data.loader.validation_batches(corpus.validation, 4, 1, 1, 0)
    counted = [int(x) for (micro,) in batches for x in micro["labels"][micro["weights"] > 0]]
    assert counted == labels


def test_validation_samples_are_spread_over_the_held_out_part(corpus_file, tmp_path):
    corpus = data.build(make_recipe(corpus_file), tmp_path / "cache", quiet)
    windows = corpus.validation._windows
    available = (len(corpus.validation._tokens) - 1) // 16
    assert len(windows) == 6 < available
    assert windows[0] == 0 and windows[-1] >= available * 5 // 6


def test_summary_is_json_and_adds_up(corpus_file, tmp_path):
    corpus = data.build(make_recipe(corpus_file), tmp_path / "cache", quiet)
    summary = json.loads(json.dumps(corpus.summary))
    assert summary["documents"] == DOCUMENTS == summary["train_documents"] + summary["held_out_documents"]
    assert summary["text_bytes"] == sum(len(text_of_document(i).encode()) for i in range(DOCUMENTS))
    assert summary["samples_per_epoch"] == len(corpus.train) == (summary["train_tokens"] - 1) // 16
    assert summary["vocabulary_size"] == len(corpus.tokenizer) == VOCABULARY


def test_second_build_reads_the_cache_and_changed_text_is_noticed(corpus_file, tmp_path):
    def build():
        said = []
        return data.build(make_recipe(corpus_file), tmp_path / "cache", said.append), said

    first, said_first = build()
    second, said_second = build()
    assert said_first and not said_second
    assert first.summary == second.summary
    corpus_file.write_text(corpus_file.read_text().replace("ba", "bi"))
    third, said_third = build()
    assert said_third
    assert third.summary["vocabulary_digest"] != first.summary["vocabulary_digest"]


def test_one_cache_serves_other_vocabularies_and_splits(corpus_file, tmp_path):
    recipe = make_recipe(corpus_file)
    larger = make_recipe(corpus_file, VOCABULARY + 20)
    other_split = make_recipe(corpus_file, validation_every=EVERY + 1)
    gpt2 = {"tokenizer": {"kind": "gpt2"}}  # the same vocabulary for every split
    gpt2_splits = [make_recipe(corpus_file, 50257, validation_every=every, **gpt2) for every in (EVERY, EVERY + 1)]
    for number, variant in enumerate([recipe, larger, other_split, *gpt2_splits]):
        shared = data.build(variant, tmp_path / "shared", quiet)
        alone = data.build(variant, tmp_path / f"alone{number}", quiet)
        assert shared.summary == alone.summary


@pytest.mark.parametrize("kind", ["vocabulary", "train.tokens", "validation.tokens"])
@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "missing"])
def test_damaged_cache_is_noticed_and_made_again(corpus_file, tmp_path, kind, damage):
    cache = tmp_path / "cache"
    first = data.build(make_recipe(corpus_file), cache, quiet)
    (victim,) = cache.glob(f"*{kind}")
    content = victim.read_bytes()
    middle = len(content) // 2
    if damage == "missing":
        victim.unlink()
    else:
        flipped = content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]
        victim.write_bytes({"cut": content[:-5], "flip": flipped, "empty": b""}[damage])
    said = []
    again = data.build(make_recipe(corpus_file), cache, said.append)
    assert victim.read_bytes() == content
    assert again.summary == first.summary
    assert any("making it again" in line for line in said) == (damage != "missing")


def test_leftovers_of_killed_processes_are_removed(corpus_file, tmp_path):
    cache = tmp_path / "cache"
    data.build(make_recipe(corpus_file), cache, quiet)
    for kind in ("train", "validation"):
        (tokens,) = cache.glob(f"*.{kind}.tokens")
        tokens.rename(tokens.with_name(tokens.name + ".0123.tmp"))
    data.build(make_recipe(corpus_file), cache, quiet)
    assert not list(cache.glob("*.tmp"))


FETCH = """
import importlib.util, pathlib, sys, time
spec = importlib.util.spec_from_file_location("cache", sys.argv[1])  # alone: importing torch would take seconds
cache = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cache)
path = pathlib.Path(sys.argv[2])

def write():
    print("made", flush=True)
    with cache.replacing(path) as file:
        for _ in range(10):
            file.write(b"part ")
            time.sleep(0.02)

print(cache.fetch([path], path.read_bytes, write, "thing", lambda line: None).decode())
"""


def test_of_processes_that_want_a_file_at_once_one_makes_it(tmp_path):
    command = [sys.executable, "-c", FETCH, data.cache.__file__, str(tmp_path / "thing")]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    outputs = [run.communicate(timeout=60)[0].splitlines() for run in runs]
    assert [run.returncode for run in runs] == [0] * 4
    assert [output[-1] for output in outputs] == ["part " * 10] * 4, "nobody sees half a file"
    assert sum("made" in output for output in outputs) == 1
    assert not list(tmp_path.glob("*.tmp"))


def test_builds_at_once_agree(corpus_file, tmp_path):
    recipe, said = make_recipe(corpus_file), []
    with ThreadPoolExecutor(3) as pool:  # each opens the lock file itself, as processes do
        corpora = list(pool.map(lambda _: data.build(recipe, tmp_path / "cache", said.append), range(3)))
    assert all(corpus.summary == corpora[0].summary for corpus in corpora)
    assert sum("trained in" in line for line in said) == 1, said


def test_lock_of_a_killed_process_holds_nobody_up(tmp_path):
    path = tmp_path / "thing"
    hold = "import fcntl, sys, time; f = open(sys.argv[1], 'ab'); fcntl.flock(f, 2); print(1, flush=True); time.sleep(60)"
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


def test_token_file_round_trip_and_types(tmp_path):
    assert (token_dtype(1 << 16).itemsize, token_dtype((1 << 16) + 1).itemsize) == (2, 4)
    for vocabulary in (300, 70_000):
        documents = [np.array([1, 2, vocabulary - 1], np.uint32), np.array([2], np.uint32)]
        path = tmp_path / str(vocabulary)
        with open(path, "w+b") as file:
            writer = TokenWriter(file, vocabulary)
            for ids in documents:
                writer.add(ids, text_bytes=10)
            writer.finish()
        opened = open_tokens(path)
        assert opened.tokens.tolist() == [1, 2, vocabulary - 1, 2]
        assert opened.counts.tolist() == np.bincount(opened.tokens, minlength=vocabulary).tolist()
        assert (opened.documents, opened.text_bytes) == (2, 20)
        whole = path.read_bytes()
        for position in (0, 9, 20, 45, 64, len(whole) - 1):  # magic, version, tokens, vocabulary or checksum, payload
            path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
            with pytest.raises(Damaged):
                open_tokens(path)


def test_trained_vocabulary_is_deterministic_exact_and_covers_all_text():
    texts = [text_of_document(i) for i in range(DOCUMENTS)]
    first, second = (train_bpe(texts, VOCABULARY) for _ in range(2))
    assert first.to_str() == second.to_str()
    assert first.get_vocab_size() == VOCABULARY
    odd = "naïve 日本語 \x00\t\n\U0001f600 Ωmega"
    assert first.decode(first.encode(odd).ids, skip_special_tokens=False) == odd


def test_vocabulary_larger_than_the_text_yields_is_refused():
    with pytest.raises(ValueError, match=r"vocab_size=5000: .* only (\d+) tokens: set model.vocab_size=\1 or less"):
        train_bpe(["to be or not to be"], 5000)


def test_trained_tokenizer_is_saved_and_loaded_by_transformers(corpus_file, tmp_path):
    tokenizer = data.build(make_recipe(corpus_file), tmp_path / "cache", quiet).tokenizer
    tokenizer.save_pretrained(tmp_path / "saved")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "saved")
    text = text_of_document(0)
    assert loaded.encode(text) == tokenizer.encode(text) and loaded.decode(loaded.encode(text)) == text
    assert (loaded.eos_token, len(loaded), loaded.model_max_length) == (END_OF_DOCUMENT, VOCABULARY, 16)


def test_gpt2_vocabulary_is_the_published_one():
    tokenizer = gpt2_tokenizer()
    assert (len(tokenizer), tokenizer.eos_token_id) == (50257, 50256)
    assert tokenizer.encode("Hello world") == [15496, 995]


def test_a_document_cannot_end_itself():
    tokenizer = gpt2_tokenizer()
    document = Document(0, f"before {END_OF_DOCUMENT} after")
    ((_, ids),) = Encoder(tokenizer)([document])
    assert ids.tolist().count(50256) == 1 and ids[-1] == 50256
    assert tokenizer.decode(ids[:-1]) == document.text


def test_batches_of_the_encoder_change_nothing():
    tokenizer = gpt2_tokenizer()
    documents = [Document(i, text_of_document(i)) for i in range(7)]
    whole = [(d.index, ids.tolist()) for d, ids in Encoder(tokenizer)(documents)]
    assert whole == [(d.index, ids.tolist()) for d, ids in Encoder(tokenizer, batch_characters=1)(documents)]


def test_packaged_corpus_is_chronological_and_held_out_in_every_century():
    documents = list(PackagedSource().documents())
    years = [int(path.name[:4]) for path in PackagedSource()._paths]
    assert len(documents) == len(years) >= 240 and years == sorted(years)
    held = {years[d.index] // 100 for d in documents if held_out(d.index, 20)}
    assert held == {year // 100 for year in years if year >= 1800}
    assert all(len(d.text) > 1000 for d in documents)


def test_jsonl_reads_globs_gzip_blank_lines_and_other_fields(tmp_path):
    (tmp_path / "b.jsonl").write_text('{"body": "three"}\n\n{"body": ""}\n{"body": "\\ud800four"}\n')
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write('{"body": "one"}\n{"body": "two"}')
    source = JsonlSource(str(tmp_path / "*.jsonl*"), "body")
    found = [(d.index, d.text) for d in source.documents()]
    assert found == [(0, "one"), (1, "two"), (2, "three"), (4, "?four")]
    assert [(d.index, d.text) for d in source.documents(2)] == found[2:]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\n{"text": ', r"corpus.jsonl:2: not a JSON object"),
        (b'{"text": "a"}\n"b"', r"corpus.jsonl:2: a JSON str where an object"),
        (b'{"body": "a", "id": 1}', r"corpus.jsonl:1: no field 'text': set data.text_column to one of body, id"),
        (b'{"text": 7}', r"corpus.jsonl:1: field 'text' is int, not a string"),
        (b'{"text": "\xff"}', r"corpus.jsonl:1: not a JSON object in UTF-8"),
        (gzip.compress(b'{"text": "abcdefghijkl"}\n')[:-12], r"corpus.jsonl: cannot be read to its end"),
        (b'{"text": "short"}\n' * 3, r"yields a vocabulary of only"),
    ],
)
def test_bad_files_are_refused_with_their_place(tmp_path, content, message):
    (tmp_path / "corpus.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        data.build(make_recipe(tmp_path / "corpus.jsonl"), tmp_path / "cache", quiet)


def test_missing_files_and_directories_are_refused(tmp_path):
    with pytest.raises(ValueError, match="data.name=.*absent.*: no such file"):
        data.build(make_recipe(tmp_path / "absent*.jsonl"), tmp_path, quiet)
    with pytest.raises(ValueError, match="is a directory: name the files in it"):
        data.build(make_recipe(tmp_path), tmp_path, quiet)


def test_parts_shorter_than_a_sample_are_refused(corpus_file, tmp_path):
    with pytest.raises(ValueError, match="held-out part has 0 documents with 0 tokens, .* needs 17"):
        data.build(make_recipe(corpus_file, validation_every=DOCUMENTS + 1), tmp_path / "cache", quiet)
    with pytest.raises(ValueError, match="data.validation_every=1 holds out every document"):
        data.build(make_recipe(corpus_file, validation_every=1), tmp_path / "cache", quiet)


def test_cache_directory_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("MEGARECIPES_CACHE", "/chosen")
    assert default_directory() == Path("/chosen")
    monkeypatch.delenv("MEGARECIPES_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert default_directory() == Path("/xdg/megarecipes")


def test_unusable_cache_directory_is_refused_with_the_fix(corpus_file, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cache directory .*file/cache.*; set MEGARECIPES_CACHE"):
        data.build(make_recipe(corpus_file), tmp_path / "file" / "cache", quiet)
