"""Tokenizers in files, read as `tokenizers` reads them, and written for transformers 4 and 5 alike.

A tokenizer.json decides about every token. The files beside it (tokenizer_config.json,
special_tokens_map.json, added_tokens.json) name the tokens of roles, number added tokens and state rules:
what they add is applied, and what contradicts the tokenizer.json is refused. The class that they name changes
nothing: each version of transformers makes other rules of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from data.text.trained_vocabulary import (
    BERT_SPECIAL_TOKENS,
    END_OF_DOCUMENT,
    bert_template,
    wordpiece_backend,
)
from recipes import files
from recipes.problems import Problem, ProblemsError, Setting

MOST_VOCABULARY = 256 * files.MIB  # of a vocabulary file; the largest published ones have 40
BERT_ROLES = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
_USUAL = dict(zip(BERT_ROLES, BERT_SPECIAL_TOKENS, strict=True))
_USUAL |= dict(bos_token=END_OF_DOCUMENT, eos_token=END_OF_DOCUMENT)
_EXTRA = ("additional_special_tokens", "extra_special_tokens")
_CONFIG, _SPECIAL, _ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
# Classes of transformers without rules of their own, and those with GPT-2's or BERT's rules.
_GENERAL = ("", "PreTrainedTokenizer", "TokenizersBackend")
_BYTE_LEVEL = ("GPT2Tokenizer", "RobertaTokenizer", "BartTokenizer", "LongformerTokenizer")
_WORDPIECE = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MobileBertTokenizer")


def read_tokenizer(path: str | Path) -> PreTrainedTokenizerFast:
    """Read the tokenizer of a tokenizer.json, a vocab.txt (WordPiece), or a directory with either.

    A directory may hold GPT-2's vocab.json and merges.txt instead. A vocab.txt without "do_lower_case" is
    lower-cased if no token but the special ones has an upper-case letter. Special tokens that no file names
    are known by their usual spelling. Raises ProblemsError: nothing is there, it is no tokenizer, or its
    files contradict each other.
    """
    named, path = Setting("data.tokenizer.path", path), files.path_of(path, "data.tokenizer.path")
    again = "give a vocab.txt, a tokenizer.json, or a directory that transformers saved"

    def refused(rule: str, fix: str = "") -> ProblemsError:
        return ProblemsError([Problem("data.tokenizer.path", (named, f" {rule}"), fix=fix)])

    if not (files.is_file(path) or path.exists()):
        raise refused("does not exist", again)
    try:
        return _read(path)
    except files.FileError as error:  # says which file, and where in it
        (problem,) = error.problems
        raise refused(f"cannot be read as a tokenizer: {problem}", again) from error
    except BaseException as error:  # tokenizers raises many types, among them Rust's panics
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        said = str(error).strip().split("\n")[0]
        raise refused(f"cannot be read as a tokenizer ({type(error).__name__}: {said})", again) from error


def _read(path: Path) -> PreTrainedTokenizerFast:
    """Read a tokenizer for `read_tokenizer`. Raises FileError: a file is evidently something else."""
    folder = path if path.is_dir() else path.parent
    places = [folder / name for name in ("tokenizer.json", "vocab.txt", "vocab.json")]
    file = next((place for place in places if place.is_file()), None) if path.is_dir() else path
    if file is None or (file == places[2] and path.is_dir() and not (folder / "merges.txt").is_file()):
        files.refuse(path, "holds no tokenizer.json, no vocab.txt, and no vocab.json with a merges.txt")
    stated = _stated(folder) if file in places else {}
    if file.suffix == ".txt":
        backend = _of_words(file, stated)
    elif path.is_dir() and file == places[2]:
        backend = _of_bytes(file, stated)
    else:
        backend = _of_json(file)
    _check_rules(backend, stated, folder)
    if file in places:
        _add_tokens(backend, stated, folder)
    known = backend.get_vocab()
    roles: dict[str, str | None] = {role: token for role, token in _USUAL.items() if token in known}
    roles |= {role: _content(stated[role], folder) for role in _USUAL if role in stated}
    cls, sep = roles.get("cls_token"), roles.get("sep_token")
    if backend.post_processor is None and cls and sep:
        backend.post_processor = bert_template((cls, known[cls]), (sep, known[sep]))
    # Lengths of its last use; kept, they would silently cut documents.
    backend.no_truncation()
    backend.no_padding()
    kept = ("model_max_length", "model_input_names")
    others: dict[str, Any] = {key: stated[key] for key in kept if key in stated}
    others["extra_special_tokens"] = _extra(stated, folder)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **roles, **others)
    tokenizer.name_or_path = str(path)
    return tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a tokenizer to a new directory, in the form and under the class that both versions know."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    config = dict(
        tokenizer_class="PreTrainedTokenizerFast",
        model_max_length=tokenizer.model_max_length,
        model_input_names=tokenizer.model_input_names,
        clean_up_tokenization_spaces=False,
        additional_special_tokens=tokenizer.extra_special_tokens,
        **{role: token for role in _USUAL if (token := getattr(tokenizer, role))},
    )
    (folder / _CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _of_json(file: Path) -> Tokenizer:
    model = files.read_json_object(file, MOST_VOCABULARY).get("model")
    if not isinstance(model, dict) or not model.get("vocab"):
        rule = 'a tokenizer.json has a "model" with a "vocab"'
        fix = "give their directory" if file.name == "vocab.json" else ""
        files.refuse(file, f'its "model" is {files.named_kind(model)}', rule, fix)
    if model.get("dropout"):
        rule = "merges left out at random give a text other tokens each time"
        files.refuse(file, f"its model has dropout {model['dropout']}", rule, 'set "dropout" to null')
    return Tokenizer.from_file(str(file))


def _of_words(file: Path, stated: dict[str, Any]) -> Tokenizer:
    files.read_text(file, MOST_VOCABULARY)
    vocabulary = models.WordPiece.read_file(str(file))
    if missing := [token for token in BERT_SPECIAL_TOKENS if token not in vocabulary]:
        rule = "a vocab.txt is a WordPiece vocabulary, one token a line"
        files.refuse(file, f"no line reads {', '.join(missing)}", rule)
    _check_class(file, stated, _WORDPIECE)
    if stated.get("do_basic_tokenize") is False or stated.get("never_split"):
        rule = "text is split into words before WordPiece, every word alike"
        files.refuse(file.with_name(_CONFIG), "do_basic_tokenize=false or never_split", rule, "remove it")
    lower = stated.get("do_lower_case")
    if lower is None:
        lower = all(t == t.lower() for t in vocabulary if t not in BERT_SPECIAL_TOKENS)
    chinese = stated.get("tokenize_chinese_chars") is not False
    return wordpiece_backend(vocabulary, bool(lower), stated.get("strip_accents"), chinese)


def _of_bytes(file: Path, stated: dict[str, Any]) -> Tokenizer:
    merges = file.with_name("merges.txt")
    vocabulary = files.read_json_object(file, MOST_VOCABULARY)
    files.read_text(merges, MOST_VOCABULARY)
    _check_class(file, stated, _BYTE_LEVEL)
    bytes_missing = set(pre_tokenizers.ByteLevel.alphabet()) - vocabulary.keys()
    if bytes_missing or any(token.endswith("</w>") for token in vocabulary):
        rule = "a vocab.json with a merges.txt is a byte-level BPE as GPT-2's, with a token for each byte"
        files.refuse(file, f"is of another kind ({len(bytes_missing)} bytes are no tokens)", rule, _CONVERT)
    return byte_level_backend(file, merges, stated.get("add_prefix_space") is True)


def byte_level_backend(vocabulary: Path, merges: Path, prefix_space: bool = False) -> Tokenizer:
    """Read GPT-2's rules with a vocabulary in its two files."""
    whole: dict[str, Any] = dict(continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False)
    backend = Tokenizer(models.BPE.from_file(str(vocabulary), str(merges), **whole))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1", special_tokens=[])
    return backend


_CONVERT = "convert it with transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(NEW)"


def _check_class(file: Path, stated: dict[str, Any], known: tuple[str, ...]) -> None:
    """Refuse a vocabulary without rules whose class has others than `known` classes."""
    name = str(stated.get("tokenizer_class") or "")
    if name.removesuffix("Fast") not in (*_GENERAL, *known):
        rule = f"{file.name} is split by the rules of {', '.join(known)}"
        files.refuse(file.with_name(_CONFIG), f"tokenizer_class is {name}", rule, _CONVERT)


def _stated(folder: Path) -> dict[str, Any]:
    """Read what the files beside a vocabulary state. Raises FileError where two contradict each other."""
    config, special = (
        files.read_json_object(folder / name) if (folder / name).is_file() else {}
        for name in (_CONFIG, _SPECIAL)
    )
    for role in _USUAL:
        tokens = [_content(each.get(role), folder) for each in (config, special)]
        if None not in tokens and tokens[0] != tokens[1]:
            came = f"{role} is {tokens[1]!r}, and {tokens[0]!r} in {_CONFIG}"
            files.refuse(folder / _SPECIAL, came, "a role has one token", "remove the wrong one")
    given = {key: value for key, value in config.items() if value is not None or key not in special}
    return {**special, **given}


def _content(value: Any, folder: Path) -> str | None:
    """Return the spelling of a token, which may stand as an object with its flags."""
    spelled = value.get("content") if isinstance(value, dict) else value
    if spelled is not None and not isinstance(spelled, str):
        files.refuse(folder, f"names {files.named_kind(value)} as a special token", "a token is a text")
    return spelled


def _extra(stated: dict[str, Any], folder: Path) -> list[str]:
    """List the special tokens without a role of ours."""
    found: list[Any] = []
    for key in _EXTRA:
        given = stated.get(key) or []
        found += given.values() if isinstance(given, dict) else given
    return [token for each in found if (token := _content(each, folder)) is not None]


def _add_tokens(backend: Tokenizer, stated: dict[str, Any], folder: Path) -> None:
    """Add the tokens that the files beside a vocabulary number, and make those of roles special."""
    wanted: dict[int, AddedToken] = {}
    for number, facts in (stated.get("added_tokens_decoder") or {}).items():
        wanted[int(number)] = AddedToken(**{key: facts[key] for key in facts if key != "__type"})
    if (folder / _ADDED).is_file():
        for token, number in files.read_json_object(folder / _ADDED).items():
            wanted.setdefault(number, AddedToken(token))
            if wanted[number].content != token:
                came = f"token {number} is {token!r}, and {wanted[number].content!r} in {_CONFIG}"
                files.refuse(folder / _ADDED, came, "a number has one token", "remove the wrong one")
    known = {each.content for each in backend.get_added_tokens_decoder().values()}
    for number, added in sorted(wanted.items()):
        if added.content not in known:  # else the flags of the tokenizer.json count
            backend.add_tokens([added])
        if (found := backend.token_to_id(added.content)) != number:
            came = f"numbers the added token {added.content!r} {number}"
            rule = f"the vocabulary makes it token {found}: numbers go on without gaps"
            files.refuse(folder, came, rule, f"correct {_ADDED} or added_tokens_decoder in {_CONFIG}")
    special = [_content(stated.get(role), folder) for role in _USUAL] + _extra(stated, folder)
    for token in filter(None, special):
        number = backend.token_to_id(token)
        if number is None:
            rule, fix = "the vocabulary has no such token", f"name one that it has, or number it in {_ADDED}"
            files.refuse(folder, f"names {token!r} as a special token", rule, fix)
        flags = backend.get_added_tokens_decoder().get(number)
        if flags is None or not flags.special:
            backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])


def _check_rules(backend: Tokenizer, stated: dict[str, Any], folder: Path) -> None:
    """Refuse a rule beside a vocabulary that its own rules contradict."""
    rules: dict[str, set[bool]] = {key: set() for key in _RULES}
    for key, value in _rules(backend):
        rules[key].add(value)
    for key, found in rules.items():
        if isinstance(asked := stated.get(key), bool) and (found or {False}) != {asked}:
            came = f"{key} is {json.dumps(asked)}"
            rule = f"the rules of the tokenizer.json say {json.dumps(not asked)}, and they decide"
            files.refuse(folder / _CONFIG, came, rule, "remove the key, or change the tokenizer.json")


_RULES = ("do_lower_case", "strip_accents", "tokenize_chinese_chars", "add_prefix_space")


def _rules(backend: Tokenizer) -> Iterator[tuple[str, bool]]:
    """Yield (key of a tokenizer_config.json, value) of each normalizer and pre-tokenizer that decides it."""
    parts = [json.loads(each.__getstate__()) for each in (backend.normalizer, backend.pre_tokenizer) if each]
    while parts:
        part = parts.pop()
        parts += part.get("normalizers") or part.get("pretokenizers") or []
        kind = part["type"]
        if kind == "BertNormalizer":
            stripped = part["strip_accents"]
            yield "do_lower_case", part["lowercase"]
            yield "strip_accents", part["lowercase"] if stripped is None else stripped
            yield "tokenize_chinese_chars", part["handle_chinese_chars"]
        elif kind == "ByteLevel" and "add_prefix_space" in part:
            yield "add_prefix_space", part["add_prefix_space"]
        elif kind == "Metaspace":
            yield "add_prefix_space", part["prepend_scheme"] != "never"
        elif kind in _OF_KIND:
            yield _OF_KIND[kind], True


_OF_KIND = {"Lowercase": "do_lower_case", "StripAccents": "strip_accents", "Prepend": "add_prefix_space"}
