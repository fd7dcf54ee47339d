"""The tokenizer of a preparation: published, given, or trained on the beginning of the input."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from data.durable_files import Say
from data.prepare.cleaning import make_detector, repair
from data.prepare.inputs import Cursor, Inputs
from data.prepare.settings import Settings
from data.text.documents import end_of_document
from data.text.ready_made_vocabulary import ready_made
from data.text.records import RawRecord
from data.text.trained_vocabulary import train_bpe, train_wordpiece, wrap_tokenizer
from data.text.vocabulary import missing_roles, save_tokenizer
from data.text.vocabulary_files import read_tokenizer
from recipes.families import TRAINED
from recipes.problems import ProblemsError


def obtain(
    settings: Settings, inputs: Inputs, folder: Path, say: Say
) -> PreTrainedTokenizerFast:
    """Make the tokenizer in `folder`, unless an earlier run has; read it from there.

    Raises ValueError: it is unavailable, lacks the tokens that the samples need, or the text is too short to
    train it.
    """
    if not folder.is_dir():
        tokenizer = _make(settings, inputs, say)
        if settings.samples == "gpt":
            end_of_document(tokenizer)
        elif missing := missing_roles(tokenizer):
            fix = "give bert_uncased, bert_cased or trained_wordpiece, or name the tokens in a"
            raise ValueError(
                f"--samples bert with --tokenizer {settings.tokenizer.kind}: the vocabulary names no"
                f" {', '.join(missing)}; {fix} tokenizer_config.json next to the file"
            )
        temporary = folder.with_name(f".{folder.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        save_tokenizer(tokenizer, temporary)
        os.replace(temporary, folder)
    return read_tokenizer(folder)  # as every later reader gets it


def training_texts(settings: Settings, inputs: Inputs) -> Iterator[str]:
    """Yield the first `vocabulary_mb` MB of the input, repaired and in the wanted language as set.

    These texts are not filtered by length, deduplicated or decontaminated.
    """
    detect = make_detector() if settings.language is not None else None
    left = settings.vocabulary_mb * 1e6
    given = 0
    others = Counter[str]()  # languages of skipped documents
    for _, item in inputs.records(Cursor()):
        text = inputs.format.parse(item) if isinstance(item, RawRecord) else None
        if not isinstance(text, str) or not text:
            continue
        text = repair(text) if settings.repair else text
        language, score = detect(text) if detect else (settings.language, 1.0)
        if language != settings.language or score < settings.language_score:
            others[str(language)] += 1
            continue
        yield text
        given += 1
        left -= len(text)
        if left <= 0:
            return
    if not given:
        seen = ", ".join(
            f"{count:,} {language}" for language, count in others.most_common(3)
        )
        why = (
            f"of {others.total():,} documents none is in it with certainty: {seen}"
            if seen
            else "no text"
        )
        came = (
            f"--language {settings.language} with --tokenizer {settings.tokenizer.kind}"
        )
        raise ProblemsError.of(
            "--language",
            came,
            f"nothing to train on: {why}",
            "give the language of the text, or none to keep all",
        )


def _make(settings: Settings, inputs: Inputs, say: Say) -> PreTrainedTokenizerFast:
    kind = settings.tokenizer.kind
    if kind not in TRAINED:
        return ready_made(settings.tokenizer)
    assert settings.vocab_size, "the settings demand a size"
    say(
        f"training a vocabulary of {settings.vocab_size} tokens ({kind}) on "
        f"the first {settings.vocabulary_mb} MB of text"
    )
    train = train_wordpiece if kind == "trained_wordpiece" else train_bpe
    return wrap_tokenizer(
        kind, train(training_texts(settings, inputs), settings.vocab_size)
    )
