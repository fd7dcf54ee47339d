"""LAMBADA (Paperno et al. 2016): passages whose last word has to be guessed.

Two forms of the test set are in use, and their figures do not compare. "original" is the authors' file: words
in lower case, cut from their punctuation by blanks. "openai" is the text that Radford et al. (2019) made of
it again, with its capitals and quotation marks, which Megatron-LM scores, too. In both a passage counts where
every token of the word is the model's likeliest after the right ones before it (teacher forcing), which is
whole-word prediction (arXiv 1909.08053, appendix E.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from transformers import PreTrainedTokenizerFast

from data.tasks.rows import FLAG, HubName, read_rows
from data.tasks.task_data import TaskData, encoded
from data.tasks.windows import Window
from recipes.problems import Problem, ProblemsError

Variant = Literal["original", "openai"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)
HUB: dict[Variant, HubName] = {
    "original": HubName("cimec/lambada", None, "test"),
    "openai": HubName("EleutherAI/lambada_openai", "default", "test"),
}


def lambada(
    tokenizer: PreTrainedTokenizerFast,
    length: int,
    variant: Variant,
    place: Path | HubName | None = None,
    column: str = "text",
    limit: int | None = None,
) -> TaskData:
    """Passages as windows of at most `length` tokens; of a longer passage the last ones.

    The word is what follows the last blank; its tokens are those that the whole passage has beyond what
    stands before that blank. Raises ProblemsError: the file cannot be read, or is of the other variant.
    """
    rows = read_rows(place or HUB[variant], column, limit)
    broken, passages = list(rows.broken), list[tuple[str, str]]()
    for number, text in enumerate(rows.texts, 1):
        before, _, word = text.strip().rpartition(" ")
        if before.strip() and word:
            passages.append((before, f"{before} {word}"))
        elif text.strip():
            broken.append(f"{rows.source}: passage {number} has one word: there is nothing to guess it from")
    _check_variant(variant, [whole for _, whole in passages], rows.source)
    befores = encoded(tokenizer, [before for before, _ in passages])
    wholes = encoded(tokenizer, [whole for _, whole in passages])
    windows, cut = list[Window](), 0
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
