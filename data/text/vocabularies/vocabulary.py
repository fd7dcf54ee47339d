"""Vocabularies: the recipe's tokenizer, and text to tokens.

A GPT's document ends with its end-of-document token (`<|endoftext|>`); a BERT's with [SEP], which its samples
put between segments anyway.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from data.cache import Say
from data.text.sources.documents import Source
from data.text.vocabularies.encoder import end_of_document
from data.text.vocabularies.published import BERT_ROLES, ready_made, store_tokenizer
from data.text.vocabularies.trained import trained_tokenizer
from recipes.problems import Key, Problem, ProblemsError, Setting
from recipes.schema import Recipe
from recipes.vocabularies import TRAINED


def build_vocabulary(
    recipe: Recipe, source: Source | Sequence[Source], directory: Path, say: Say
) -> PreTrainedTokenizerFast:
    """The recipe's tokenizer; a trained one comes from the cache or goes there.

    Args:
        source: one, or the parts of a blend, which a vocabulary is trained on in turn; read for the trained
            kinds only.
        directory: where trained vocabularies are kept.

    Raises:
        ValueError: the vocabulary is unavailable, has not `model.vocab_size` tokens, or lacks what the family
            needs.
    """
    settings, origins = recipe.data.tokenizer, recipe.data.origins
    if settings.kind == "store":
        named = [origin.name for origin in origins if origin.source == "store" and origin.name]
        tokenizer = store_tokenizer(named)
    elif settings.kind not in TRAINED:
        tokenizer = ready_made(settings)
    else:
        sources = source if isinstance(source, Sequence) else (source,)
        tokenizer = trained_tokenizer(recipe, sources, directory, say)
    size, stated = vocabulary_size(tokenizer), recipe.model.vocab_size
    what = f"the {settings.kind} vocabulary{f' of {settings.path}' if settings.path else ''}"
    if size != stated:
        came = (Setting("model.vocab_size", stated), f", but {what} has {size} tokens")
        right = ("set ", Setting("model.vocab_size", size))
        raise ProblemsError([Problem("model.vocab_size", came, fix=right)])
    if recipe.model.family == "bert":
        if missing := missing_roles(tokenizer):
            rule = f"it needs tokens for {', '.join(missing)}, which {what} does not have"
            kinds = " to bert_uncased, bert_cased or trained_wordpiece, or name the tokens in a "
            fix = ("set ", Key("data.tokenizer.kind"), f"{kinds}tokenizer_config.json next to the file")
            raise ProblemsError([Problem("data.tokenizer.kind", Setting("model.family", "bert"), rule, fix)])
    else:
        end_of_document(tokenizer)
    tokenizer.model_max_length = recipe.positions
    return tokenizer


def missing_roles(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Special tokens that a BERT needs and the vocabulary does not name."""
    return [role for role in BERT_ROLES if getattr(tokenizer, role) is None]


def vocabulary_size(tokenizer: PreTrainedTokenizerFast) -> int:
    """Rows that an embedding needs: the largest token id and one, since ids may leave gaps."""
    return max(tokenizer.get_vocab().values()) + 1


def vocabulary_digest(tokenizer: PreTrainedTokenizerFast) -> str:
    """SHA-256 over everything that decides how text becomes tokens."""
    return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
