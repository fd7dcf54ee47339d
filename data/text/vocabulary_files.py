"""Tokenizers in files, read as `tokenizers` reads them.

A tokenizer.json decides about every token. The files beside it (tokenizer_config.json,
special_tokens_map.json, added_tokens.json) name the tokens of roles, number added tokens and state rules:
what they add is applied, and what contradicts the tokenizer.json is refused. The class that they name changes
nothing: each version of transformers makes other rules of it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

from data.text.trained_vocabulary import (
    BERT_ROLES,
    BERT_SPECIAL_TOKENS,
    CONFIG,
    END_OF_DOCUMENT,
    bert_template,
    wordpiece_backend,
)
from recipes import files
from recipes.problems import ProblemsError, Setting

# of a vocabulary file; the largest published ones have 40
MOST_VOCABULARY = 256 * files.MIB
_USUAL = dict(zip(BERT_ROLES, BERT_SPECIAL_TOKENS, strict=True))
_USUAL |= dict(bos_token=END_OF_DOCUMENT, eos_token=END_OF_DOCUMENT)
_SPECIAL = "special_tokens_map.json"
_ADDED = "added_tokens.json"
# Classes of transformers without rules of their own, or with GPT-2's or BERT's.
_KNOWN = (
    "PreTrainedTokenizer",
    "TokenizersBackend",
    "GPT2Tokenizer",
    "RobertaTokenizer",
    "BartTokenizer",
    "BertTokenizer",
    "DistilBertTokenizer",
    "ElectraTokenizer",
    "MobileBertTokenizer",
)
_CONVERT = "convert it with transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(NEW)"
_TIKTOKEN = (
    "with the package tiktoken: from transformers.convert_slow_tokenizer import TikTokenConverter as C; "
    "C(FILE, pattern=PATTERN).converted().save('tokenizer.json'), with the pattern of its program"
)
# beginnings of files
_SENTENCEPIECE_MARK = re.compile(rb"\n[\0-@]\n[\0-\x1f]")
_TIKTOKEN_MARK = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")
# adds no token to a text
AS_IT_IS = processors.TemplateProcessing(
    single="$A:0", pair="$A:0 $B:1", special_tokens=[]
)


def read_tokenizer(path: str | Path) -> PreTrainedTokenizerFast:
    """Read the tokenizer of a tokenizer.json, a vocab.txt (WordPiece), or a directory with either.

    A directory may hold GPT-2's vocab.json and merges.txt instead. A vocab.txt without "do_lower_case" is
    lower-cased if no token but the special ones has an upper-case letter. Special tokens that no file names
    are known by their usual spelling. Raises ProblemsError: nothing is there, it is no tokenizer, or its
    files contradict each other.
    """
    named = Setting("data.tokenizer.path", path)
    path = files.path_of(path, "data.tokenizer.path")
    again = "give a vocab.txt, a tokenizer.json, or a directory that transformers saved"

    def refused(rule: str, fix: str = "") -> ProblemsError:
        return ProblemsError.of("data.tokenizer.path", (named, f" {rule}"), fix=fix)

    if not (files.is_file(path) or path.exists()):
        raise refused("does not exist", again)
    try:
        return _read(path)
    except files.FileError as error:  # says which file, and where in it
        (problem,) = error.problems
        raise refused(f"cannot be read as a tokenizer: {problem}", again) from error
    # tokenizers raises many types, among them Rust's panics
    except BaseException as error:
        if (
            not isinstance(error, Exception)
            and type(error).__name__ != "PanicException"
        ):
            raise
        said = str(error).strip().split("\n")[0]
        raise refused(
            f"cannot be read as a tokenizer ({type(error).__name__}: {said})", again
        ) from error


def _read(path: Path) -> PreTrainedTokenizerFast:
    """Read a tokenizer for `read_tokenizer`. Raises FileError: a file is evidently something else."""
    folder = path if path.is_dir() else path.parent
    places = [folder / name for name in ("tokenizer.json", "vocab.txt", "merges.txt")]
    every = [*places, *folder.glob("*.model"), *folder.glob("*.tiktoken")]
    file = next(filter(Path.is_file, every), None) if path.is_dir() else path
    if file is None:
        files.refuse(
            path,
            "holds no tokenizer.json, no vocab.txt, and no vocab.json with a merges.txt",
        )
    head = files.read_part(file, 0, 200)
    if _SENTENCEPIECE_MARK.match(head):
        files.refuse(file, "is of SentencePiece", "it is not read here", _CONVERT)
    if _TIKTOKEN_MARK.match(head):
        rule = "it lacks the pattern by which texts are split"
        files.refuse(file, "is of tiktoken", rule, _TIKTOKEN)
    stated = _stated(folder) if file in places else {}
    if file.name == "merges.txt":
        backend = _of_bytes(file, stated)
    elif file.suffix == ".txt":
        backend = _of_words(file, stated)
    else:
        backend = _of_json(file)
    _check_rules(backend, stated, folder)
    extra = stated.get("additional_special_tokens", [])
    extra = extra + stated.get("extra_special_tokens", [])
    roles: dict[str, Any] = {role: stated[role] for role in _USUAL if role in stated}
    _add_tokens(backend, stated, [*filter(None, roles.values()), *extra], folder)
    known = backend.get_vocab()
    roles = {role: token for role, token in _USUAL.items() if token in known} | roles
    cls = roles.get("cls_token")
    sep = roles.get("sep_token")
    if backend.post_processor is None and cls and sep:
        backend.post_processor = bert_template(cls, sep, known)
    # Lengths of its last use; kept, they would silently cut documents.
    backend.no_truncation()
    backend.no_padding()
    kept = {
        key: stated[key]
        for key in ("model_max_length", "model_input_names")
        if key in stated
    }
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, extra_special_tokens=extra, **roles, **kept
    )
    tokenizer.name_or_path = str(path)
    return tokenizer


def _of_json(file: Path) -> Tokenizer:
    model = files.read_json_object(file, MOST_VOCABULARY).get("model")
    if not isinstance(model, dict) or not model.get("vocab"):
        rule = 'a tokenizer.json has a "model" with a "vocab"'
        fix = "give their directory" if file.name == "vocab.json" else ""
        files.refuse(file, f'its "model" is {files.named_kind(model)}', rule, fix)
    dropout = model.get("dropout")
    if dropout:
        rule = "merges left out at random give a text other tokens each time"
        files.refuse(
            file, f"its model has dropout {dropout}", rule, 'set "dropout" to null'
        )
    unknown = model.get("unk_token")
    words = model.get("type") in ("WordPiece", "WordLevel")
    if words and unknown not in model["vocab"]:
        rule = "each word that it lacks becomes that token"
        files.refuse(file, f"its model lacks its unk_token {unknown}", rule)
    return Tokenizer.from_file(str(file))


def _of_words(file: Path, stated: dict[str, Any]) -> Tokenizer:
    files.read_text(file, MOST_VOCABULARY)
    vocabulary = models.WordPiece.read_file(str(file))
    missing = [token for token in BERT_SPECIAL_TOKENS if token not in vocabulary]
    if missing:
        rule = "a vocab.txt is a WordPiece vocabulary, one token a line"
        files.refuse(file, f"no line reads {', '.join(missing)}", rule)
    _check_class(file, stated)
    lower = all(t == t.lower() for t in vocabulary if t not in BERT_SPECIAL_TOKENS)
    return wordpiece_backend(
        vocabulary,
        stated.get("do_lower_case", lower),
        stated.get("strip_accents"),
        stated.get("tokenize_chinese_chars", True),
    )


def _of_bytes(merges: Path, stated: dict[str, Any]) -> Tokenizer:
    file = merges.with_name("vocab.json")
    vocabulary = files.read_json_object(file, MOST_VOCABULARY)
    files.read_text(merges, MOST_VOCABULARY)
    _check_class(merges, stated)
    if set(pre_tokenizers.ByteLevel.alphabet()) - vocabulary.keys() or any(
        "</w>" in t for t in vocabulary
    ):
        rule = "with a merges.txt it is a byte-level BPE as GPT-2's, which has a token for each byte"
        files.refuse(file, "is of another kind", rule, _CONVERT)
    return byte_level_backend(file, merges, stated.get("add_prefix_space", False))


def byte_level_backend(
    vocabulary: Path, merges: Path, prefix_space: bool = False
) -> Tokenizer:
    """Read GPT-2's rules with a vocabulary in its two files."""
    whole: dict[str, Any] = dict(
        continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False
    )
    backend = Tokenizer(models.BPE.from_file(str(vocabulary), str(merges), **whole))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = AS_IT_IS
    return backend


def _check_class(file: Path, stated: dict[str, Any]) -> None:
    """Refuse a vocabulary without rules of its own whose class has others than GPT-2's and BERT's."""
    name = str(stated.get("tokenizer_class", _KNOWN[0]))
    if name.removesuffix("Fast") not in _KNOWN:
        rule = f"a {file.name} is read by the rules of {', '.join(_KNOWN[2:])}"
        files.refuse(
            file.with_name(CONFIG), f"tokenizer_class is {name}", rule, _CONVERT
        )


def _stated(folder: Path) -> dict[str, Any]:
    """Read what the files beside a vocabulary state, nulls of roles only; tokens become their spellings.

    Raises FileError where two contradict each other.
    """
    stated: dict[str, Any] = {}
    for place in (folder / _SPECIAL, folder / CONFIG):
        given = files.read_json_object(place) if place.is_file() else {}
        for key, value in given.items():
            if key in _USUAL and isinstance(value, dict):
                value = value.get("content")
            elif key in ("additional_special_tokens", "extra_special_tokens"):
                each = value.values() if isinstance(value, dict) else value or []
                value = [
                    token["content"] if isinstance(token, dict) else token
                    for token in each
                ]
            if value is None:
                if key in _USUAL:
                    stated.setdefault(key)
                continue
            if key in _USUAL and stated.get(key) not in (value, None):
                came = f"{key} is {value!r}, and {stated[key]!r} in {_SPECIAL}"
                rule = "a role has one token"
                files.refuse(place, came, rule, "remove the wrong one")
            stated[key] = value
    if (folder / _ADDED).is_file():
        stated[_ADDED] = files.read_json_object(folder / _ADDED)
    return stated


def _add_tokens(
    backend: Tokenizer, stated: dict[str, Any], special: list[str], folder: Path
) -> None:
    """Add the tokens that the files beside a vocabulary number, and make those with a role special."""
    numbered: list[tuple[int, AddedToken]] = []
    for number, facts in stated.get("added_tokens_decoder", {}).items():
        facts.pop("__type", None)
        numbered.append((int(number), AddedToken(**facts)))
    numbered += [
        (number, AddedToken(token)) for token, number in stated.get(_ADDED, {}).items()
    ]
    for number, token in sorted(numbered, key=lambda each: each[0]):
        _add(backend, token)
        given = backend.token_to_id(token.content)
        if given != number:
            came = f"numbers the added token {token.content!r} {number}"
            rule = f"the vocabulary makes it token {given}: numbers go on without gaps"
            files.refuse(
                folder,
                came,
                rule,
                f"correct {_ADDED} or added_tokens_decoder in {CONFIG}",
            )
    for name in special:
        if backend.token_to_id(name) is None:
            rule = "the vocabulary has no such token"
            files.refuse(
                folder,
                f"names {name!r} as a special token",
                rule,
                f"name one that it has, or number it in {_ADDED}",
            )
        _add(backend, AddedToken(name, special=True, normalized=False))


def _add(backend: Tokenizer, token: AddedToken) -> None:
    """Add a token, unless the tokenizer.json has it: its flags decide."""
    added = backend.get_added_tokens_decoder().values()
    held = next((each for each in added if each.content == token.content), None)
    if held is None or (token.special and not held.special):
        backend.add_tokens([token])


def _check_rules(backend: Tokenizer, stated: dict[str, Any], folder: Path) -> None:
    """Refuse a rule beside a vocabulary that its own rules, tried on a letter, contradict."""
    normalize: Any = (
        backend.normalizer.normalize_str if backend.normalizer is not None else str
    )
    letter = first = normalize("a")
    if backend.pre_tokenizer is not None:
        first = backend.pre_tokenizer.pre_tokenize_str(letter)[0][0]
    rules = {
        "do_lower_case": normalize("A") == letter,
        "strip_accents": normalize("\N{LATIN SMALL LETTER E WITH ACUTE}")
        == normalize("e"),
        "tokenize_chinese_chars": " " in normalize("\N{CJK UNIFIED IDEOGRAPH-4E2D}"),
        "add_prefix_space": first != "a",
        "do_basic_tokenize": True,
        "never_split": False,
    }
    for key, ours in rules.items():
        if bool(stated.get(key, ours)) != ours:
            came = f"{key} is {json.dumps(stated[key])}"
            rule = "the tokenizer's own rules differ, and decide"
            files.refuse(folder / CONFIG, came, rule, "remove the key, or change them")
