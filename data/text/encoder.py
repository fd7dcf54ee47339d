"""Text to sentences and tokens, in batches. Worker processes import it: neither transformers nor torch."""

from __future__ import annotations

import itertools
import json
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import numpy as np
import sentencex
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from data.text.documents import end_of_document
from recipes.problems import ProblemsError, Setting, some

LANGUAGE = "en"
Ends = Literal["split", "lines"]  # how to find the ends of sentences
# Scripts without blanks between words, as ranges of characters, by the characters of a short word: Thai, Lao,
# Tibetan, Burmese, Khmer, Tai, Balinese, Javanese; Chinese, Yi, kana, bopomofo.
UNSPACED = {
    4: "\u0e00-\u109f\u1780-\u17ff\u1950-\u1aaf\u1b00-\u1b7f\ua980-\ua9ff\uaa60-\uaadf",
    2: "\u2e80-\u2fdf\u3005-\u3007\u3040-\u312f\u31a0-\u31ff\u3400-\ua4cf\uf900-\ufaff"
    "\uff66-\uff9f\U0001b000-\U0001b16f\U00020000-\U0003347f",
}
# Characters; a longer one over several lines is a list or a table, which sentencex takes for a sentence.
LONG_SENTENCE = 1000


def sentences_of(text: str, how: Ends) -> list[str]:
    """Cut a text into sentences, without empty ones; joined, they differ from it in whitespace alone.

    split: by sentencex's rules for English; lines: every line is a sentence.
    """
    if how == "lines":
        pieces = text.split("\n")
    else:
        assert how == "split", how
        pieces = []
        for sentence in sentencex.segment(LANGUAGE, text):
            if len(sentence) > LONG_SENTENCE:
                pieces += sentence.split("\n")
            else:
                pieces.append(sentence)
    sentences = []
    for piece in pieces:
        stripped = piece.strip()
        # A sentence stands on one line, for files of one sentence per line.
        if "\n" in stripped:
            stripped = " ".join(stripped.split())
        if stripped:
            sentences.append(stripped)
    return sentences


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


BATCH_CHARACTERS = 1 << 22  # enough for all cores
_UINT32 = "I"
assert array(_UINT32).itemsize == 4


class HasText(Protocol):
    """A document, to an encoder."""

    @property
    def text(self) -> str: ...


T = TypeVar("T")
D = TypeVar("D", bound=HasText)


def group_items(
    items: Iterable[T], size: Callable[[T], int], least: int
) -> Iterator[list[T]]:
    """Group items in order, in lists of a total size of at least `least`; the last list may be smaller."""
    group: list[T] = []
    held = 0
    for item in items:
        group.append(item)
        held += size(item)
        if held >= least:
            yield group
            group = []
            held = 0
    if group:
        yield group


def use_all_cores() -> None:
    """Let `tokenizers` use its threads; a user's own setting stays.

    Unset, the library turns its threads off at the first fork of the process and warns at each one.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")


def _alphabet(backend: Tokenizer) -> set[str] | None:
    """Return the characters of a vocabulary that would lose others; None: it loses none.

    Such a one has neither every byte nor a token for what it does not know.
    """
    rules = json.loads(backend.to_str())["model"]
    known = backend.get_vocab(with_added_tokens=False).keys()
    if rules.get("unk_token") in known:
        return None
    if rules.get("unk_id") is not None:
        return None
    if rules.get("byte_fallback"):
        return None
    if known >= {*ByteLevel.alphabet()}:
        return None
    return {token for token in known if len(token) == 1}


class Encoder:
    """Encoder of documents, on all cores; a special token spelled out in a text is text. Picklable.

    Raises ProblemsError as it encodes: the vocabulary would lose characters of a text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        batch_characters: int = BATCH_CHARACTERS,
    ):
        self._end = end_of_document(tokenizer)
        self._batch_characters = batch_characters
        self._load(tokenizer.backend_tokenizer.to_str())
        self._alphabet = _alphabet(self._backend)

    def _load(self, backend: str) -> None:
        self._backend = Tokenizer.from_str(backend)
        # A document that spells out "<|endoftext|>" must not end itself, nor "[MASK]" mask a token.
        self._backend.encode_special_tokens = True
        # Saved tokenizers can carry the lengths of their last use.
        self._backend.no_truncation()
        self._backend.no_padding()
        # The BPE remembers 10,000 words: with 100,000 one process is 10 % faster, two on a cache 15 % slower.

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_backend": self._backend.to_str()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        # the library's own pickling forgets encode_special_tokens
        self._load(state["_backend"])

    def __call__(self, documents: Iterable[D]) -> Iterator[tuple[D, np.ndarray]]:
        """Yield (document, its uint32 tokens with the end-of-document token) in order."""
        for batch in group_items(
            documents, lambda document: len(document.text), self._batch_characters
        ):
            tokens = self._tokens([document.text for document in batch], [self._end])
            yield from zip(batch, tokens, strict=True)

    def encode_sentences(
        self, documents: Sequence[Sequence[str]]
    ) -> list[list[np.ndarray]]:
        """Encode each sentence of documents as (tokens,) uint32, without special tokens.

        Sentences without tokens (blank ones, control characters) are left out, so that a document's list can
        get shorter, or empty.
        """
        texts = [sentence for document in documents for sentence in document]
        batches = group_items(texts, len, self._batch_characters)
        tokens = itertools.chain.from_iterable(
            self._tokens(batch, []) for batch in batches
        )
        encoded = []
        for document in documents:
            of_sentences = itertools.islice(tokens, len(document))
            encoded.append([ids for ids in of_sentences if ids.size])
        return encoded

    def _tokens(self, texts: list[str], end: list[int]) -> Iterator[np.ndarray]:
        """Return (tokens,) uint32 of each text, followed by `end`, as views of one array."""
        use_all_cores()
        if self._alphabet is not None:
            for text in texts:
                self._check_spelling(text, self._alphabet)
        flat = array(_UINT32)
        bounds = [0]
        for encoding in self._backend.encode_batch_fast(
            texts, add_special_tokens=False
        ):
            flat.fromlist(encoding.ids)  # half the time of np.array
            flat.extend(end)
            bounds.append(len(flat))
        whole = np.asarray(flat)
        return (whole[a:b] for a, b in zip(bounds, bounds[1:], strict=False))

    def _check_spelling(self, text: str, alphabet: set[str]) -> None:
        """Check that the alphabet has all that the rules leave of a text."""
        normalizer = self._backend.normalizer
        splitter = self._backend.pre_tokenizer
        if normalizer:
            text = normalizer.normalize_str(text)
        characters = {*text}
        if splitter:
            characters.clear()
            for piece, _ in splitter.pre_tokenize_str(text):
                characters.update(piece)
        lost = sorted(characters - alphabet)
        if lost:
            shown = some([*map(repr, lost)], 8)
            came = f"the vocabulary would lose {shown}"
            rule = "it has neither every byte nor a token for what it does not know"
            fix = (
                "give another one, or set ",
                Setting("data.tokenizer.kind", "trained_bpe"),
            )
            raise ProblemsError.of("data.tokenizer.path", came, rule, fix)


class SentenceEncoder:
    """Encoder of documents as (document, uint32 tokens of each sentence without special ones), in order."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        how: Literal["split", "lines"],
        least: int = BATCH_CHARACTERS,
    ):
        self._encoder = Encoder(tokenizer)
        self._how = how
        self._least = least

    def __call__(self, documents: Iterable[D]) -> Iterator[tuple[D, list[np.ndarray]]]:
        for batch in group_items(
            documents, lambda document: len(document.text), self._least
        ):
            texts = [sentences_of(document.text, self._how) for document in batch]
            yield from zip(batch, self._encoder.encode_sentences(texts), strict=True)
