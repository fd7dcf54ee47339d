"""Texts to score a GPT on, as windows of tokens: WikiText-103, LAMBADA, documents.

WikiText-103 as Megatron-LM scores it (Shoeybi et al. 2019, arXiv 1909.08053, section 5.3, appendix E.1). The
test set comes tokenized by words. It is turned back into text, cut into a model's own tokens and read in
overlapping windows; the sum of the losses is divided by the number of the *original* word-level tokens, so
that perplexities of models with other vocabularies can be compared.

LAMBADA (Paperno et al. 2016): passages whose last word has to be guessed. Two forms of the test set are in
use, and their figures do not compare. "original" is the authors' file: words in lower case, cut from their
punctuation by blanks. "openai" is the text that Radford et al. (2019) made of it again, with its capitals and
quotation marks, which Megatron-LM scores, too. In both a passage counts where every token of the word is the
model's likeliest after the right ones before it (teacher forcing), which is whole-word prediction (arXiv
1909.08053, appendix E.2).
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from transformers import PreTrainedTokenizerFast

from data.samples.fields import HeldOut
from data.tasks.rows import FLAG, is_plain_text, read_rows, read_whole
from data.text.encoder import UNSPACED, Encoder, end_of_document
from data.text.hub import HubSource
from recipes.problems import Problem, ProblemsError

TaskName = Literal["wikitext103", "lambada", "perplexity"]
Variant = Literal["original", "openai"]  # of LAMBADA
WIKITEXT103 = HubSource("Salesforce/wikitext", "wikitext-103-raw-v1", "test")
LAMBADA: dict[Variant, HubSource] = {
    "original": HubSource("cimec/lambada", None, "test"),
    "openai": HubSource("EleutherAI/lambada_openai", "default", "test"),
}
BLANK = " \n"  # a blank line of the original file, which the hub has as an empty row


_ALONE = "".join(UNSPACED.values())
_WORD = re.compile(rf"[{_ALONE}]|[^\s{_ALONE}]+")


@dataclass(frozen=True, eq=False)
class Window:
    """n + 1 tokens: a model reads the first n and predicts the last n; the last `counted` of them count."""

    tokens: np.ndarray  # (n + 1,)
    counted: int

    def __post_init__(self) -> None:
        assert 1 <= self.counted < len(self.tokens), (self.counted, len(self.tokens))

    @property
    def length(self) -> int:
        """Number of tokens to read."""
        return len(self.tokens) - 1


def overlapping_windows(tokens: np.ndarray, length: int, stride: int) -> Iterator[Window]:
    """Yield windows of `length` tokens, one every `stride` tokens; every target counts once.

    The first window counts all its targets, each later one its last `stride`, the last one the rest. So a
    target after the first window is predicted from at least `length - stride` tokens. The first token is no
    target.

    Source: Megatron-LM, `tasks/zeroshot_gpt/datasets.py`, which fills the last window up with padding.
    """
    assert 1 <= stride <= length, (stride, length)
    targets = len(tokens) - 1
    if targets < 1:
        return
    yield Window(tokens[: length + 1], min(length, targets))
    for start in range(stride, targets - length + stride, stride):
        taken = tokens[start : start + length + 1]
        yield Window(taken, len(taken) - 1 - (length - stride))


def full_context_windows(tokens: np.ndarray, length: int, stride: int) -> Iterator[Window]:
    """Yield windows like `overlapping_windows`, with a last window of full `length`, for more context.

    With stride = length these are `loglikelihood_rolling`'s of lm-evaluation-harness.
    """
    found = list(overlapping_windows(tokens, length, stride))
    yield from found[:-1]
    if found:
        yield Window(tokens[max(0, len(tokens) - length - 1) :], found[-1].counted)


@dataclass(frozen=True, eq=False)
class TaskData:
    """The windows of a task, and facts about its text.

    Attributes:
        variant: which form of the task; "" where there is one.
        source: file or data set.
        windows: in the order of the text; in a cloze test each is a passage, and its last word counts.
        words, bytes: of the original text; None: the task counts none.
        examples: documents or passages.
        broken: rows that were left out, each with its reason.
        cut: examples of which the model reads only the end.
    """

    task: TaskName
    variant: str
    source: str
    windows: tuple[Window, ...]
    words: int | None
    examples: int
    broken: tuple[str, ...] = ()
    cut: int = 0
    bytes: int | None = None

    @property
    def tokens(self) -> int:
        """Number of counted targets."""
        return sum(window.counted for window in self.windows)

    @property
    def checksum(self) -> str:
        """CRC-32 of the windows, for ranks to compare."""
        total = 0
        for window in self.windows:
            total = zlib.crc32(window.counted.to_bytes(4, "little"), total)
            total = zlib.crc32(window.tokens.astype(np.int64).tobytes(), total)
        return f"{total:08x}"


def encode_texts(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[np.ndarray]:
    """Encode each text, without special tokens."""
    found = Encoder(tokenizer).encode_sentences([[text] for text in texts])
    return [each[0] if each else np.zeros(0, dtype=np.uint32) for each in found]


_REPLACED_FIRST = (
    ("s '", "s'"),
    (" @-@ ", "-"),
    (" @,@ ", ","),
    (" @.@ ", "."),
    *((f" {mark} ", f"{mark} ") for mark in ":;.!?,"),
)
_WITHIN = (  # brackets and quotes, without the blanks inside them
    (r"\(\s*([^\)]*?)\s*\)", r"(\1)"),
    (r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
    (r"{\s*([^}]*?)\s*}", r"{\1}"),
    (r"\"\s*([^\"]*?)\s*\"", r'"\1"'),
    (r"'\s*([^']*?)\s*'", r"'\1'"),
)
_REPLACED_LAST = (
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" \N{DEGREE SIGN} ", "\N{DEGREE SIGN}"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)


def detokenize(text: str) -> str:
    """Turn the word-level tokens of WikiText back into text.

    Source: `wikitext_detokenizer` of Megatron-LM, `tasks/zeroshot_gpt/detokenizer.py`, rule after rule; its
    rule for "' [0-9]" matches nothing, for its slashes, and is left out.
    """
    for old, new in _REPLACED_FIRST:
        text = text.replace(old, new)
    for pattern, new in _WITHIN:
        text = re.sub(pattern, new, text)
    for old, new in _REPLACED_LAST:
        text = text.replace(old, new)
    return text


def original_tokens(text: str) -> int:
    """Count the word-level tokens of the original text, with line breaks, as Megatron-LM does."""
    return len(text.strip().split(" "))


def wikitext103(
    tokenizer: PreTrainedTokenizerFast,
    length: int,
    stride: int,
    place: Path | HubSource = WIKITEXT103,
    column: str = "text",
    limit: int | None = None,
) -> TaskData:
    """Cut the test set into windows of `length` tokens every `stride` tokens.

    `place`: the original file, or rows with its lines; `limit`: windows to keep. Raises ProblemsError: it
    cannot be read.
    """
    if isinstance(place, Path) and is_plain_text(place):
        text = read_whole(place)
        source = str(place)
        broken = tuple[str, ...]()
    else:
        rows = read_rows(place, column)
        text = "".join(row or BLANK for row in rows.texts)
        source = rows.source
        broken = rows.broken
    (tokens,) = encode_texts(tokenizer, [detokenize(text.strip())])
    windows = tuple(overlapping_windows(tokens, length, stride))[:limit]
    words = original_tokens(text)
    if windows and (read := sum(window.counted for window in windows)) < len(tokens) - 1:
        words = max(1, round(words * read / (len(tokens) - 1)))  # of the part that is read
    return TaskData("wikitext103", "", source, windows, words, 1, broken)


def lambada(
    tokenizer: PreTrainedTokenizerFast,
    length: int,
    variant: Variant,
    place: Path | HubSource | None = None,
    column: str = "text",
    limit: int | None = None,
) -> TaskData:
    """Make each passage a window of at most `length` tokens, the last ones of a longer passage.

    The last word begins after the last blank. Its tokens are the passage's tokens beyond the tokens of the
    text before that blank. Raises ProblemsError: the file cannot be read, or is of the other variant.
    """
    rows = read_rows(place or LAMBADA[variant], column, limit)
    broken = list(rows.broken)
    passages = list[tuple[str, str]]()
    for number, text in enumerate(rows.texts, 1):
        before, _, word = text.strip().rpartition(" ")
        if before.strip() and word:
            passages.append((before, f"{before} {word}"))
        elif text.strip():
            broken.append(f"{rows.source}: passage {number} has one word: there is nothing to guess it from")
    _check_variant(variant, [whole for _, whole in passages], rows.source)
    befores = encode_texts(tokenizer, [before for before, _ in passages])
    wholes = encode_texts(tokenizer, [whole for _, whole in passages])
    windows = list[Window]()
    cut = 0
    for number, (left, tokens) in enumerate(zip(befores, wholes, strict=True), 1):
        counted = len(tokens) - len(left)
        if not left.size or not 1 <= counted <= length:
            broken.append(f"{rows.source}: passage {number}: its last word has {counted} tokens of its own")
            continue
        cut += len(tokens) > length + 1
        windows.append(Window(tokens[-length - 1 :], counted))
    return TaskData("lambada", variant, rows.source, tuple(windows), None, len(windows), tuple(broken), cut)


def _check_variant(variant: Variant, passages: Sequence[str], source: str) -> None:
    lower = all(text == text.lower() for text in passages)
    if passages and lower != (variant == "original"):
        other, found = ("original", "no capital") if lower else ("openai", "capitals")
        came = f"--variant {variant} with {source}, which has {found}"
        rule = "the original text is in lower case, and OpenAI's is not"
        raise ProblemsError([Problem(FLAG, came, rule, f"give --variant {other}, or the other file")])


def documents(
    tokenizer: PreTrainedTokenizerFast,
    length: int,
    stride: int,
    place: Path,
    column: str = "text",
    limit: int | None = None,
) -> TaskData:
    """Cut every document of a file into windows; an end-of-document token stands before its first token.

    A text file is one document. Whitespace separates words; a character of a script without blanks is one.
    With stride = length the windows equal those of `loglikelihood_rolling` of lm-evaluation-harness.
    `limit`: documents. Raises ProblemsError.
    """
    if is_plain_text(place):
        texts = [read_whole(place)]
        broken = tuple[str, ...]()
    else:
        rows = read_rows(place, column, limit)
        texts = [text for text in rows.texts if text.strip()]
        broken = rows.broken
    end = np.array([end_of_document(tokenizer)], dtype=np.uint32)
    found = encode_texts(tokenizer, texts)
    windows = list[Window]()
    for tokens in found:
        windows += full_context_windows(np.concatenate([end, tokens]), length, stride)
    words = sum(len(_WORD.findall(text)) for text in texts)
    size = sum(len(text.encode()) for text in texts)
    cut = tuple(windows)
    return TaskData("perplexity", "documents", str(place), cut, words, len(texts), broken, bytes=size)


def held_out(samples: HeldOut, source: str, limit: int | None = None) -> TaskData:
    """Make windows of a recipe's held-out samples: as in its validation, every token of a sample counts."""
    chosen = samples.take(range(len(samples))[:limit])
    windows = tuple(Window(tokens, len(tokens) - 1) for tokens in chosen["window"])
    return TaskData("perplexity", "held out", source, windows, None, len(windows))
