"""The recipe's tokenizer: trained, published (GPT-2's, the two of BERT), from a file, or kept with a store.

A GPT's document ends with its end-of-document token (`<|endoftext|>`), a BERT's with [SEP].
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from data.durable_files import Say
from data.text.documents import Source, end_of_document
from data.text.trained_vocabulary import BERT_ROLES, CONFIG, trained_tokenizer
from recipes.families import TRAINED
from recipes.problems import Key, ProblemsError, Setting
from recipes.schema import Recipe

LOOKED_AT = 1 << 17  # characters of a source to look for unknown tokens in


def build_vocabulary(
    recipe: Recipe, sources: Sequence[Source], directory: Path, say: Say
) -> PreTrainedTokenizerFast:
    """Make or load the recipe's tokenizer; the cache keeps a trained one.

    Args:
        sources: of the parts of a blend, in order; read only to train a vocabulary.
        directory: where trained vocabularies are kept.

    Raises ValueError: the vocabulary is unavailable, has not `model.vocab_size` tokens, or lacks what the
    family needs.
    """
    settings = recipe.data.tokenizer
    if settings.kind in TRAINED:
        tokenizer = trained_tokenizer(recipe, sources, directory, say)
    else:
        from data.text.ready_made_vocabulary import ready_made

        tokenizer = ready_made(settings, recipe.data.origins)
    size = vocabulary_size(tokenizer)
    stated = recipe.model.vocab_size
    what = f"the {settings.kind} vocabulary{f' of {settings.path}' if settings.path else ''}"
    if size < stated and recipe.model.config:
        say(f"{what} has {size} tokens: of the model's {stated} rows the others pad")
    elif size != stated:
        came = (Setting("model.vocab_size", stated), f", but {what} has {size} tokens")
        right = ("set ", Setting("model.vocab_size", size))
        raise ProblemsError.of("model.vocab_size", came, fix=right)
    if recipe.model.facts.masked:
        missing = missing_roles(tokenizer)
        if missing:
            rule = (
                f"it needs tokens for {', '.join(missing)}, which {what} does not have"
            )
            kinds = " to bert_uncased, bert_cased or trained_wordpiece, or name the tokens in a "
            fix = (
                "set ",
                Key("data.tokenizer.kind"),
                f"{kinds}tokenizer_config.json next to the file",
            )
            raise ProblemsError.of(
                "data.tokenizer.kind",
                Setting("model.family", recipe.model.family),
                rule,
                fix,
            )
    else:
        end_of_document(tokenizer)
    tokenizer.model_max_length = recipe.positions
    return tokenizer


def missing_roles(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """List the special tokens of a BERT that the vocabulary does not name."""
    return [role for role in BERT_ROLES if getattr(tokenizer, role) is None]


def vocabulary_size(tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the rows of an embedding: the largest token id plus one, since ids may leave gaps."""
    return max(tokenizer.get_vocab().values()) + 1


def unknown_token(tokenizer: PreTrainedTokenizerFast) -> int | None:
    """Return the token of what the vocabulary lacks; None: there is none, as where it has every byte."""
    unknown = tokenizer.unk_token_id
    if unknown == tokenizer.eos_token_id:
        return None  # GPT-2 knows every byte, and names its end token
    return unknown  # type: ignore[no-any-return]  # transformers sets it as Any


def unknown_share(tokenizer: PreTrainedTokenizerFast, source: Source) -> float:
    """Return the share of unknown tokens in the beginning of a source.

    Raises ProblemsError: the vocabulary would lose characters of it.
    """
    from data.text.encoder import Encoder, group_items

    documents = source.documents()
    groups = group_items(documents, lambda each: len(each.text), LOOKED_AT)
    encode = Encoder(tokenizer)
    encoded = [ids for _, ids in encode(next(groups, []))]
    tokens = np.concatenate([np.empty(0, np.uint32), *encoded])
    unknown = unknown_token(tokenizer)
    return np.count_nonzero(tokens == unknown) / max(tokens.size, 1)


def unused_numbers(tokenizer: PreTrainedTokenizerFast, rows: int = 0) -> list[int]:
    """List the numbers below `vocabulary_size`, or below a model's `rows`, that no token has."""
    numbers = range(max(rows, vocabulary_size(tokenizer)))
    return sorted({*numbers} - {*tokenizer.get_vocab().values()})


def vocabulary_digest(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return the SHA-256 of the tokenizer: of its vocabulary and all rules.

    Lengths to which its last use cut or filled up texts do not count.
    """
    backend = tokenizer.backend_tokenizer
    if backend.truncation or backend.padding:
        backend = Tokenizer.from_str(backend.to_str())
        backend.no_truncation()
        backend.no_padding()
    return hashlib.sha256(backend.to_str().encode()).hexdigest()


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
        **tokenizer.special_tokens_map,
    )
    (folder / CONFIG).write_text(
        json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
