"""Masked language modelling: the choice of predicted tokens and of their replacements.

Whole words, in n-grams of 1 to max_ngram words with probability proportional to 1/n (ALBERT, arXiv
1909.11942, section 4.1; Megatron-LM), until a share of the tokens is chosen. Of the chosen tokens 80 % become
[MASK], 10 % a random token and 10 % stay (BERT, Devlin et al. 2018, section 3.1). Of scripts that set no
blanks between words, every token is a word: WordPiece would make one word of a whole clause of Thai.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerFast

from data.text.encoder import UNSPACED
from data.text.vocabulary import vocabulary_size
from recipes.problems import Key, ProblemsError, Setting
from recipes.schema import Masking

# shares of the chosen tokens; the rest stays
MASKED = 0.8
RANDOM = 0.1
_CONTINUATION = "##"  # begins a WordPiece that is not the first of its word
_CONTINUES = re.compile(f"{_CONTINUATION}(?![{''.join(UNSPACED.values())}])").match


@dataclass(frozen=True)
class BertVocabulary:
    """Facts about a BERT's tokens."""

    cls: int
    sep: int
    mask: int
    pad: int
    continuation: np.ndarray  # (V,) bool: continues the word of the token before it
    ordinary: np.ndarray  # (N,) int64: tokens that stand for text

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast) -> BertVocabulary:
        """Take the facts from a tokenizer; `build_vocabulary` refuses one that lacks a special token."""
        ids = {
            name: getattr(tokenizer, f"{name}_token_id")
            for name in ("cls", "sep", "mask", "pad")
        }
        assert None not in ids.values(), ids
        size = vocabulary_size(tokenizer)  # ids may leave gaps, whose tokens are None
        tokens = tokenizer.convert_ids_to_tokens(list(range(size)))
        special = set(tokenizer.all_special_ids)
        known = {i: token for i, token in enumerate(tokens) if token is not None}
        continuation = np.zeros(size, bool)
        continuation[[i for i, token in known.items() if _CONTINUES(token)]] = True
        ordinary = np.array([i for i in known if i not in special], np.int64)
        return cls(**ids, continuation=continuation, ordinary=ordinary)


def check_whole_words(vocabulary: BertVocabulary, masking: Masking) -> None:
    """Check that the vocabulary marks word beginnings, if masking needs them. Raises ProblemsError."""
    if masking.whole_words and not vocabulary.continuation.any():
        rule = f"no token of the vocabulary begins with {_CONTINUATION}, by which words are known"
        fix = (
            "set ",
            Key("data.masking.whole_words"),
            " to false, or use a WordPiece vocabulary",
        )
        came = Setting("data.masking.whole_words", "true")
        raise ProblemsError.of("data.masking.whole_words", came, rule, fix)


def choose(
    rng: np.random.Generator,
    borders: np.ndarray,
    usable: np.ndarray,
    budget: int,
    max_ngram: int,
) -> list[tuple[int, int]]:
    """Choose the words to predict.

    N-grams lie at random places where they fit: lengths keep their distribution, whatever has been chosen
    already. An n-gram over the budget is shortened; a single word over it is passed over.

    Args:
        borders: (W + 1,) ascending: word w is the tokens from borders[w] up to, not with, borders[w + 1].
        usable: (W,) bool: words to choose from. An n-gram never contains another word.
        budget: tokens.

    Returns:
        n-grams as (first word, words), in the order of choice; at most `budget` tokens.
    """
    words = np.flatnonzero(usable)
    weights = 1.0 / np.arange(1, max_ngram + 1)
    chances = np.cumsum(weights) / weights.sum()
    order = rng.permutation(words).tolist()
    lengths = (chances.searchsorted(rng.random(min(budget, len(order)))) + 1).tolist()
    taken = bytearray((~usable).tobytes())  # 1: chosen or not usable
    ends = borders.tolist()
    spans: list[tuple[int, int]] = []
    # where n-grams no longer fit, single words fill the budget
    for wanted in (lengths, [1] * budget):
        numbers = iter(wanted)
        number = next(numbers, 0)
        for word in order:
            if not budget or not number:
                break
            end = word + number
            if end > len(taken) or taken.find(1, word, end) >= 0:
                continue
            while end > word and ends[end] - ends[word] > budget:
                end -= 1
            if end == word:
                continue
            taken[word:end] = b"\1" * (end - word)
            budget -= ends[end] - ends[word]
            spans.append((word, end - word))
            number = next(numbers, 0)
    return spans


def mask(
    rng: np.random.Generator,
    tokens: np.ndarray,
    special: list[int],
    vocabulary: BertVocabulary,
    masking: Masking,
    most: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Choose tokens to predict, and replace them in place.

    Args:
        tokens: (L,) int64, changed.
        special: places of special tokens, ascending, the first one 0 and the last one L - 1. They are never
            chosen, and words and n-grams do not go over them.
        most: predictions at most.

    Returns:
        (K,) int64 places of the predictions, ascending, and (K,) int64 the original tokens there.
    """
    begins = (
        ~vocabulary.continuation[tokens]
        if masking.whole_words
        else np.ones(len(tokens), bool)
    )
    begins[special] = True
    # a segment may begin inside a word
    begins[[place + 1 for place in special[:-1]]] = True
    borders = np.append(np.flatnonzero(begins), len(tokens))
    usable = np.ones(len(borders) - 1, bool)
    usable[borders.searchsorted(special)] = False
    budget = min(most, max(1, round(masking.probability * len(tokens))))
    chosen = choose(rng, borders, usable, budget, masking.max_ngram)
    words = bytearray(len(usable))
    for word, number in chosen:
        words[word : word + number] = b"\1" * number
    places = np.flatnonzero(np.repeat(np.frombuffer(words, bool), np.diff(borders)))
    if not len(places):
        # Every word of a short sample is over the budget; without a prediction the sample would be wasted.
        places = np.array([rng.choice(np.setdiff1d(np.arange(len(tokens)), special))])
    labels = tokens[places]
    draws = rng.random(len(places))
    others = vocabulary.ordinary[
        rng.integers(len(vocabulary.ordinary), size=len(places))
    ]
    changed = np.where(draws < MASKED + RANDOM, others, labels)
    tokens[places] = np.where(draws < MASKED, vocabulary.mask, changed)
    return places, labels
