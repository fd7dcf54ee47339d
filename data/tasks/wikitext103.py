"""WikiText-103 as Megatron-LM scores it (Shoeybi et al. 2019, arXiv 1909.08053, section 5.3, appendix E.1).

The test set comes tokenized by words. It is turned back into text, cut into a model's own tokens and read in
overlapping windows; the sum of the losses is divided by the number of the *original* word-level tokens, so
that perplexities of models with other vocabularies can be compared.
"""

from __future__ import annotations

import re
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from data.tasks.rows import HubName, is_plain_text, read_rows, read_whole
from data.tasks.task_data import TaskData, encoded
from data.tasks.windows import overlapping

HUB = HubName("Salesforce/wikitext", "wikitext-103-raw-v1", "test")
BLANK = " \n"  # a blank line of the original file, which the hub has as an empty row
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


def detokenized(text: str) -> str:
    """Text of WikiText as it was before it was cut into words.

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
    """Word-level tokens of the original text, line breaks among them, as Megatron-LM counts them."""
    return len(text.strip().split(" "))


def wikitext103(
    tokenizer: PreTrainedTokenizerFast,
    length: int,
    stride: int,
    place: Path | HubName = HUB,
    column: str = "text",
    limit: int | None = None,
) -> TaskData:
    """The test set in windows of `length` tokens every `stride` tokens.

    `place`: the original file, or rows that are its lines; `limit`: windows that are kept. Raises
    ProblemsError: it cannot be read.
    """
    broken: tuple[str, ...] = ()
    if isinstance(place, Path) and is_plain_text(place):
        text = read_whole(place)
    else:
        rows = read_rows(place, column)
        text, broken = "".join(row or BLANK for row in rows.texts), rows.broken
    (tokens,) = encoded(tokenizer, [detokenized(text.strip())])
    windows = tuple(overlapping(tokens, length, stride))[:limit]
    words = original_tokens(text)
    if windows and (read := sum(window.counted for window in windows)) < len(tokens) - 1:
        words = max(1, round(words * read / (len(tokens) - 1)))  # of the part that is read
    return TaskData("wikitext103", "", str(place), windows, words, 1, broken)
