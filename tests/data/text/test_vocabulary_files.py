"""A tokenizer is the one in its file, whatever class and version of transformers is named beside it."""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from data.text.documents import Document, end_of_document
from data.text.encoder import Encoder
from data.text.ready_made_vocabulary import store_tokenizer
from data.text.trained_vocabulary import BERT_SPECIAL_TOKENS, train_bpe, wordpiece_backend
from data.text.vocabulary import save_tokenizer, unused_numbers, vocabulary_digest, vocabulary_size
from data.text.vocabulary_files import read_tokenizer
from launch.records import vocabulary
from recipes.problems import ProblemsError

END = "</s>"
PIECES = [
    *"aZ\u00e9\u00c5\u00df\u0130\u0301\u4e2d\u3042\u0e01\uff01\u2028\u00a0\u200b\ufeff\t\n\r\x00\x07\x7f",
    *("the", "Town", "don't", "1234", "98", "\u0663", "\u00bd", "  ", "##er", "\u2581", "\u0120"),
    *("\U0001f600", "e\u0301", "\ufb01", "\u2014", "...", "[MASK]", "[UNK]", END, "<|endoftext|>", "<extra>"),
]


def odd_strings(count: int = 300) -> list[str]:
    rng = random.Random(41)
    return ["".join(rng.choices(PIECES, k=rng.randrange(14))) for _ in range(count)]


def bytes_bpe(*first: Any, normalizer: Any = None, prefix: bool = False) -> Tokenizer:
    backend = train_bpe(["the town of don't 1234 98 the Town er er the"] * 3, 280)
    last = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*first, last]) if first else last
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_special_tokens([END])
    return backend


LETTERS = "abcdehnorstwDTZA0123489.'-\u00e9\u4e2d\u3042\u00bd"
TOKENS = [*BERT_SPECIAL_TOKENS, "the", "Town", "town", "##er", *LETTERS, *(f"##{c}" for c in LETTERS)]
WORDS = {token: number for number, token in enumerate(TOKENS)}


def words(normalizer: Any, splitter: Any) -> Tokenizer:
    backend = wordpiece_backend(WORDS, lowercase=True)
    backend.normalizer, backend.pre_tokenizer = normalizer, splitter
    backend.add_tokens([AddedToken("<extra>", lstrip=True)])
    return backend


def pieces(splitter: Any) -> Tokenizer:
    scores = [("<unk>", 0.0), (END, 0.0), *((c, -3.0) for c in "atheown\u2581T1298"), ("\u2581the", -1.0)]
    backend = Tokenizer(models.Unigram(scores, unk_id=0))
    backend.normalizer, backend.pre_tokenizer = normalizers.NFKC(), splitter
    backend.decoder = decoders.Metaspace()
    return backend


BERT = normalizers.BertNormalizer
SPLIT = pre_tokenizers
LOWER = normalizers.Lowercase()
WORDS_AND_MARKS = SPLIT.Sequence([SPLIT.WhitespaceSplit(), SPLIT.Punctuation()])
PLAIN = normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents()])
FILES = {
    "digits": bytes_bpe(SPLIT.Digits(individual_digits=True)),
    "a regular expression": bytes_bpe(SPLIT.Split("o", "isolated")),
    "blanks": bytes_bpe(SPLIT.Whitespace()),
    "nfc, lower-cased": bytes_bpe(normalizer=normalizers.Sequence([normalizers.NFC(), LOWER])),
    "nfkd without accents": bytes_bpe(normalizer=PLAIN),
    "prefix space": bytes_bpe(prefix=True),
    "gpt-2's": bytes_bpe(),
    "cased": words(BERT(lowercase=False), SPLIT.BertPreTokenizer()),
    "cased without accents": words(BERT(lowercase=False, strip_accents=True), SPLIT.BertPreTokenizer()),
    "chinese in one piece": words(BERT(handle_chinese_chars=False), SPLIT.BertPreTokenizer()),
    "control characters kept": words(BERT(clean_text=False), SPLIT.WhitespaceSplit()),
    "words of nfd": words(normalizers.NFD(), SPLIT.Whitespace()),
    "punctuation": words(LOWER, WORDS_AND_MARKS),
    "unigram": pieces(SPLIT.Metaspace()),
    "unigram, first": pieces(SPLIT.Metaspace(prepend_scheme="first")),
}
CLASSES = ("GPT2Tokenizer", "BertTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast", None)


def write(folder: Path, backend: Tokenizer, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def right(file: Path) -> list[list[int]]:
    """What tokenizers itself makes of the file; a special token spelled out in a text is text."""
    backend = Tokenizer.from_file(str(file))
    backend.encode_special_tokens = True
    return [each.ids for each in backend.encode_batch(odd_strings(), add_special_tokens=False)]


def ours(tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    tokenizer.eos_token = tokenizer.eos_token or tokenizer.sep_token
    documents = [Document(number, text) for number, text in enumerate(odd_strings())]
    return [tokens.tolist()[:-1] for _, tokens in Encoder(tokenizer)(documents)]


@pytest.mark.parametrize("name", FILES)
def test_tokens_are_those_of_the_file_under_every_class_and_kept_anywhere(name, tmp_path):
    backend = FILES[name]
    roles = {"eos_token": END} if backend.token_to_id(END) is not None else {"sep_token": "[SEP]"}
    folder = write(tmp_path / "given", backend)
    expected = right(folder / "tokenizer.json")
    for kind in CLASSES:
        write(folder, backend, **({"tokenizer_class": kind} if kind else {}), **roles)
        tokenizer = read_tokenizer(folder)
        assert ours(tokenizer) == expected, kind
        assert vocabulary_size(tokenizer) == backend.get_vocab_size()
    (tmp_path / "run").mkdir()
    vocabulary.keep(tmp_path / "run", tokenizer)
    save_tokenizer(tokenizer, tmp_path / "store" / "tokenizer")
    for again in (vocabulary.load(tmp_path / "run"), store_tokenizer([str(tmp_path / "store")])):
        assert vocabulary_digest(again) == vocabulary_digest(tokenizer) and ours(again) == expected
        assert end_of_document(again) == backend.token_to_id(next(iter(roles.values())))


def test_a_pair_of_files_has_the_end_token_and_the_prefix_space_that_stand_beside_it(tmp_path):
    for prefix in (False, True):
        backend = bytes_bpe(prefix=prefix)
        backend.save(str(tmp_path / "whole.json"))
        backend.model.save(str(tmp_path))
        size = backend.get_vocab_size(with_added_tokens=False)
        (tmp_path / "added_tokens.json").write_text(json.dumps({END: size}))
        (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": END}}))
        config = {"add_prefix_space": prefix, "tokenizer_class": "GPT2Tokenizer"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        tokenizer = read_tokenizer(tmp_path)
        assert ours(tokenizer) == right(tmp_path / "whole.json")
        assert (end_of_document(tokenizer), vocabulary_size(tokenizer)) == (size, size + 1)


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("how", [{}, {"strip_accents": False}, {"tokenize_chinese_chars": False}])
def test_a_vocab_txt_is_read_by_the_rules_beside_it(lowercase, how, tmp_path):
    rules = {"tokenize_chinese_chars": "handle_chinese_chars"}
    normalizer = BERT(lowercase=lowercase, **{rules.get(key, key): value for key, value in how.items()})
    backend = wordpiece_backend(WORDS, lowercase=True)
    backend.normalizer = normalizer
    backend.save(str(tmp_path / "whole.json"))
    lines = sorted(backend.get_vocab(), key=backend.token_to_id)
    (tmp_path / "vocab.txt").write_text("\n".join(lines), encoding="utf-8")
    config = {"do_lower_case": lowercase, "tokenizer_class": "BertTokenizer", **how}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ours(read_tokenizer(tmp_path)) == right(tmp_path / "whole.json")


ADDED = {"content": "<new>", "lstrip": False, "rstrip": False, "single_word": False, "special": False}


def test_what_the_files_beside_add_is_applied(tmp_path):
    config = {
        "added_tokens_decoder": {"281": {**ADDED, "normalized": False}},
        "additional_special_tokens": ["<mark>"],
        "bos_token": None,
        "eos_token": {"__type": "AddedToken", "content": END},
        "model_max_length": 77,
    }
    folder = write(tmp_path, bytes_bpe(), **config)
    (folder / "added_tokens.json").write_text('{"<mark>": 282}')
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": END}))
    tokenizer = read_tokenizer(folder)
    assert tokenizer.encode("<new>") == [281] and vocabulary_size(tokenizer) == 283
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.model_max_length) == (END, END, 77)
    assert 282 in tokenizer.all_special_ids and not unused_numbers(tokenizer)
    lone = read_tokenizer(folder / "tokenizer.json")
    assert vocabulary_digest(lone) == vocabulary_digest(tokenizer), (
        "named by its file it has the same beside it"
    )
    (folder / "tokenizer.json").rename(folder / "other.json")
    assert vocabulary_size(read_tokenizer(folder / "other.json")) == 281, "under another name it stands alone"


def test_a_bert_without_a_rule_for_its_ends_gets_them(tmp_path):
    backend = words(BERT(), SPLIT.BertPreTokenizer())
    backend.post_processor = None
    content = json.loads(backend.to_str()) | {"post_processor": None}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    ids = read_tokenizer(tmp_path).encode("the", "the")
    assert [ids[0], ids[2], ids[4]] == [2, 3, 3] and len(ids) == 5


@pytest.mark.parametrize(
    ("backend", "config", "special", "said"),
    [
        ("gpt-2's", {"add_prefix_space": True}, {}, "add_prefix_space is true: .*decide; remove the key"),
        ("prefix space", {"add_prefix_space": False}, {}, "add_prefix_space is false"),
        ("unigram", {"add_prefix_space": False}, {}, "add_prefix_space is false"),
        ("cased", {"do_lower_case": True}, {}, "do_lower_case is true"),
        ("gpt-2's", {"do_lower_case": True}, {}, "do_lower_case is true"),
        ("nfc, lower-cased", {"do_lower_case": False}, {}, "do_lower_case is false"),
        ("cased without accents", {"strip_accents": False}, {}, "strip_accents is false"),
        ("chinese in one piece", {"tokenize_chinese_chars": True}, {}, "tokenize_chinese_chars is true"),
        ("cased", {"do_basic_tokenize": False}, {}, "do_basic_tokenize is false"),
        ("cased", {"never_split": ["the"]}, {}, "never_split is "),
        ("gpt-2's", {"eos_token": "<eos>"}, {}, "names '<eos>' as a special token: .* no such"),
        ("gpt-2's", {"eos_token": END}, {"eos_token": "a"}, "'</s>', and 'a' in special_tokens_map"),
        ("gpt-2's", {"additional_special_tokens": ["<x>"]}, {}, "names '<x>' as a special token"),
        ("gpt-2's", {"added_tokens_decoder": {"999": ADDED}}, {}, "'<new>' 999: .* makes it token 281"),
        ("gpt-2's", {"eos_token": 7}, {}, "cannot be read as a tokenizer"),
    ],
)  # fmt: skip
def test_what_contradicts_the_file_is_refused(backend, config, special, said, tmp_path):
    folder = write(tmp_path, FILES[backend], **config)
    if special:
        (folder / "special_tokens_map.json").write_text(json.dumps(special))
    with pytest.raises(ProblemsError, match=said):
        read_tokenizer(folder)


# Files of a folder, and what is said of them where the rules of others than GPT-2 and BERT apply.
WITHOUT_RULES = (
    ({"tokenizer_config.json": '{"tokenizer_class": "Qwen2Tokenizer"}'},
     "tokenizer_class is Qwen2Tokenizer: .*convert it"),
    ({"vocab.json": '{"a": 0, "b</w>": 1}', "merges.txt": "#version: 0.2\n"},
     "vocab.json: is of another kind: .*convert it"),
    ({"vocab.txt": "\n".join(BERT_SPECIAL_TOKENS),
      "tokenizer_config.json": '{"tokenizer_class": "BertJapaneseTokenizer"}'},
     "tokenizer_class is BertJapaneseTokenizer"),
)  # fmt: skip


@pytest.mark.parametrize(("files", "said"), WITHOUT_RULES, ids=["a class", "words", "Japanese"])
def test_vocabularies_without_rules_are_refused(files, said, tmp_path):
    if "vocab.txt" not in files:
        bytes_bpe().model.save(str(tmp_path))
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ProblemsError, match=said):
        read_tokenizer(tmp_path)


LETTERS_ALONE = dict(zip("abé", range(3), strict=True))
CANNOT_SPELL = {  # a vocabulary, what it spells, and what it would lose
    "letters": (models.BPE(LETTERS_ALONE, []), SPLIT.Whitespace(), "ab é", "ab <中>", "'<', '>', '中'"),
    "no such unknown token": (models.BPE(LETTERS_ALONE, [], unk_token="?"), None, "abé", "a中", "'中'"),
    "ends of words": (
        models.BPE({"a": 0, "b": 1, "b</w>": 2}, [], end_of_word_suffix="</w>"),
        SPLIT.Whitespace(), "ab", "ab<", "'<'",
    ),
    "scores": (models.Unigram([("a", -1.0), ("ab", -1.0)], unk_id=None), None, "aab", "aba b", "' ', 'b'"),
    "few bytes": (models.BPE(LETTERS_ALONE, []), SPLIT.ByteLevel(False), "ab", "abé", "'©', 'Ã'"),
}  # fmt: skip


@pytest.mark.parametrize("case", CANNOT_SPELL)
def test_a_vocabulary_that_would_lose_characters_is_refused_where_a_text_has_them(case, tmp_path):
    model, splitter, spelled, beyond, lost = CANNOT_SPELL[case]
    backend = Tokenizer(model)
    backend.pre_tokenizer = splitter
    backend.add_special_tokens([END])
    encoder = Encoder(read_tokenizer(write(tmp_path / "own", backend, eos_token=END)))
    if case != "scores":
        ((_, ids),) = encoder([Document(0, spelled)])
        assert ids.size == len(spelled.replace(" ", "")) + 1
    with pytest.raises(ProblemsError, match=f"would lose {lost}: .*data.tokenizer.kind=trained_bpe"):
        [*pickle.loads(pickle.dumps(encoder))([Document(0, beyond)])]


def test_words_without_a_token_for_unknown_ones_are_refused(tmp_path):
    backend = Tokenizer(models.WordLevel({"the": 0, END: 1}, unk_token="<none>"))
    with pytest.raises(ProblemsError, match="lacks its unk_token <none>"):
        read_tokenizer(write(tmp_path / "words", backend))


OF_OTHERS = {
    "tokenizer.model": (b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02", "is of SentencePiece: .*save_pretrained"),
    "qwen.tiktoken": (b"IQ== 0\nIg== 1\n", "is of tiktoken: it lacks the pattern .*TikTokenConverter"),
}


@pytest.mark.parametrize("name", OF_OTHERS)
def test_vocabularies_of_other_libraries_are_named_with_the_way(name, tmp_path):
    content, said = OF_OTHERS[name]
    (tmp_path / name).write_bytes(content)
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(ProblemsError, match=said):
            read_tokenizer(path)


def test_merges_left_out_at_random_are_refused(tmp_path):
    random_merges = bytes_bpe()
    random_merges.model.dropout = 0.1
    with pytest.raises(ProblemsError, match="dropout 0.1: merges left out at random"):
        read_tokenizer(write(tmp_path / "random", random_merges))
