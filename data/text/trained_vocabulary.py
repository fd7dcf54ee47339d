"""Training of vocabularies on a recipe's own training documents, kept in the cache.

trained_bpe: byte-level BPE as in GPT-2 (Radford et al. 2019, section 2.2): any text can be encoded and no
    token means "unknown".
trained_wordpiece: lower-cased WordPiece as in BERT (Devlin et al. 2018, section 3): pieces that continue a
    word begin with ##, and a word with a character outside the vocabulary is [UNK].
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from data import durable_files
from data.durable_files import DamagedFile, Say
from data.text.documents import Source
from data.text.held_out import part_of
from recipes.families import SMALLEST_BPE
from recipes.problems import Key, ProblemsError, Setting
from recipes.schema import Recipe

END_OF_DOCUMENT = "<|endoftext|>"
BERT_SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # ids 0 to 4
BERT_ROLES = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
CONFIG = "tokenizer_config.json"  # of a directory with a tokenizer: names the tokens of roles
# Characters; merges hardly change beyond, and training keeps every distinct word.
TRAINING_TEXT_LIMIT = 256 << 20
# Different characters in a WordPiece vocabulary; BERT's own has about 1000.
FEWEST_CHARACTERS = 48
MOST_CHARACTERS = 1000
MOST_TRIES = 8  # trainings to find the size that a text gives
_FILE_MAGIC = "megarecipes-vocabulary-2"


def trained_tokenizer(
    recipe: Recipe, sources: Sequence[Source], directory: Path, say: Say
) -> PreTrainedTokenizerFast:
    """Train a vocabulary on the sources' training documents, or take it from the cache.

    Every source gives the same share of `TRAINING_TEXT_LIMIT`. Raises ValueError: the text is too short to
    yield that many tokens.
    """
    size = recipe.model.vocab_size
    data = recipe.data
    finite = bool(sources) and all(source.finite for source in sources)
    assert finite, "the schema refuses to train a vocabulary on a stream"
    bert = data.tokenizer.kind == "trained_wordpiece"
    fingerprints = [source.fingerprint() for source in sources]
    splits = (data.validation_every, data.test_every)
    decided_by = [
        _FILE_MAGIC,
        tokenizers.__version__,
        fingerprints,
        *splits,
        size,
        TRAINING_TEXT_LIMIT,
    ]
    digest = hashlib.sha256(json.dumps(decided_by).encode()).hexdigest()[:20]
    path = directory / f"{'wordpiece' if bert else 'bpe'}-{size}-{digest}.vocabulary"
    what = f"vocabulary of {size} tokens"

    def write() -> None:
        started = time.perf_counter()
        named = ", ".join(source.name for source in sources)
        say(
            f"{what}: training a {'WordPiece' if bert else 'byte-level BPE'} on {named}"
        )
        tokenizer = (train_wordpiece if bert else train_bpe)(
            _texts(recipe, sources), size
        )
        content = tokenizer.to_str().encode()
        with durable_files.replacing(path) as file:
            file.write(
                f"{_FILE_MAGIC} {hashlib.sha256(content).hexdigest()}\n".encode()
                + content
            )
        say(f"{what}: trained in {time.perf_counter() - started:.1f} s, kept in {path}")

    def read() -> Tokenizer:
        head, _, content = path.read_bytes().partition(b"\n")
        if (
            head.decode("ascii", "replace")
            != f"{_FILE_MAGIC} {hashlib.sha256(content).hexdigest()}"
        ):
            raise DamagedFile(f"{path} does not match its checksum")
        return Tokenizer.from_str(content.decode())

    return wrap_tokenizer(
        data.tokenizer.kind, durable_files.cached([path], read, write, what, say)
    )


def wrap_tokenizer(kind: str, backend: Tokenizer) -> PreTrainedTokenizerFast:
    """Make a tokenizer of `transformers` from the result of `train_bpe` or `train_wordpiece`."""
    if kind == "trained_wordpiece":
        return wordpiece_tokenizer(backend.get_vocab(), lowercase=True)
    ends = dict(bos_token=END_OF_DOCUMENT, eos_token=END_OF_DOCUMENT)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **ends)


def _texts(recipe: Recipe, sources: Sequence[Source]) -> Iterator[str]:
    """Yield the training documents of source after source, each up to its share of the limit."""
    data = recipe.data
    splits = (data.validation_every, data.test_every)
    limit = TRAINING_TEXT_LIMIT // len(sources)
    for source in sources:
        every = source.documents()
        texts = (d.text for d in every if part_of(d.index, *splits) == "train")
        yield from _limit_text(texts, limit)


def _limit_text(texts: Iterable[str], characters: int) -> Iterator[str]:
    seen = 0
    for text in texts:
        yield text
        seen += len(text)
        if seen >= characters:
            return


def train_bpe(texts: Iterable[str], size: int) -> Tokenizer:
    """Train a byte-level BPE of exactly `size` tokens. Raises ValueError: the text is too short for that.

    Equal texts give an equal vocabulary.
    """
    assert size >= SMALLEST_BPE, "the schema refuses smaller ones"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    begin: dict[str, Any] = dict(
        special_tokens=[END_OF_DOCUMENT], initial_alphabet=letters
    )
    trainer = trainers.BpeTrainer(vocab_size=size, show_progress=False, **begin)
    from data.text.encoder import use_all_cores

    use_all_cores()
    tokenizer.train_from_iterator(_limit_text(texts, TRAINING_TEXT_LIMIT), trainer)
    _check_size(tokenizer.get_vocab_size(), size)
    return tokenizer


def train_wordpiece(texts: Iterable[str], size: int) -> Tokenizer:
    """Train BERT's uncased WordPiece of exactly `size` tokens. Equal texts give an equal vocabulary.

    The texts are held in memory while training (at most `TRAINING_TEXT_LIMIT` characters). [PAD] [UNK] [CLS]
    [SEP] [MASK] are tokens 0 to 4, then come the most frequent characters, at most an eighth of the
    vocabulary. Where that yields too few tokens, characters that are words by themselves, as Chinese ones,
    do not count. Raises ValueError: the text is too short to yield that many tokens, or the vocabulary too
    small for its characters.
    """
    held = list(_limit_text(texts, TRAINING_TEXT_LIMIT))
    template = wordpiece_backend(
        {token: i for i, token in enumerate(BERT_SPECIAL_TOKENS)}, lowercase=True
    )
    counts = _characters(held, template)
    from data.text.encoder import use_all_cores

    use_all_cores()
    vocabulary = _wordpiece(held, template, counts, size)
    if len(vocabulary) != size:
        reached = len(vocabulary)
        # a smaller vocabulary has fewer characters, and yields fewer tokens
        for _ in range(MOST_TRIES):
            smaller = len(_wordpiece(held, template, counts, reached))
            if smaller == reached:
                break
            reached = smaller
        _check_size(reached, size)
    return wordpiece_backend(vocabulary, lowercase=True)


def _wordpiece(
    held: Sequence[str], template: Tokenizer, counts: Counter[str], size: int
) -> dict[str, int]:
    """Train a WordPiece of at most `size` tokens. Raises ProblemsError: it cannot hold its characters."""
    most = min(max(FEWEST_CHARACTERS, size // 8), MOST_CHARACTERS)
    by_frequency = sorted(counts, key=lambda c: (-counts[c], c))
    vocabulary = _with_letters(held, template, by_frequency[:most], size)
    if len(vocabulary) < size and len(by_frequency) > most:
        words = [c for c in by_frequency if not _continues(template, c)]
        parts = [c for c in by_frequency if _continues(template, c)][:most]
        room = size - len(BERT_SPECIAL_TOKENS) - 2 * len(parts)
        vocabulary = _with_letters(
            held, template, [*parts, *words[: max(room, 0)]], size
        )
    return vocabulary


def _continues(template: Tokenizer, character: str) -> bool:
    """Check whether a character may continue a word."""
    text = template.normalizer.normalize_str(f"a{character}")
    return len(template.pre_tokenizer.pre_tokenize_str(text)) == 1


def _with_letters(
    held: Sequence[str], template: Tokenizer, letters: Sequence[str], size: int
) -> dict[str, int]:
    """Train a WordPiece of at most `size` tokens that begins with these letters, by code point."""
    letters = sorted(letters)
    continuing = [f"##{c}" for c in letters if _continues(template, c)]
    first = [*BERT_SPECIAL_TOKENS, *letters, *continuing]
    if len(first) > size:
        rule = f"a WordPiece vocabulary of this text begins with {len(first)} special tokens and characters"
        fix = ("set ", Key("model.vocab_size"), f" to {len(first)} or more")
        raise ProblemsError.of(
            "model.vocab_size", Setting("model.vocab_size", size), rule, fix
        )
    # The trainer numbers ##-characters in the order of a randomly seeded hash table, breaks ties of merges by
    # these numbers, and cuts an alphabet at random among equally frequent characters. As "special tokens"
    # they keep the places given here.
    begin: dict[str, Any] = dict(
        special_tokens=first, initial_alphabet=letters, limit_alphabet=len(letters)
    )
    trainer = trainers.WordPieceTrainer(vocab_size=size, show_progress=False, **begin)
    raw = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    raw.normalizer = template.normalizer
    raw.pre_tokenizer = template.pre_tokenizer
    raw.train_from_iterator(held, trainer)
    vocabulary: dict[str, int] = raw.get_vocab(with_added_tokens=False)
    return vocabulary


def _characters(texts: Sequence[str], template: Tokenizer) -> Counter[str]:
    """Count the characters of the normalised texts, without blanks."""
    counts: Counter[str] = Counter()
    for character, times in Counter(chain.from_iterable(texts)).items():
        for kept in template.normalizer.normalize_str(character):
            if not kept.isspace():
                counts[kept] += times
    return counts


def wordpiece_tokenizer(
    vocabulary: dict[str, int], *, lowercase: bool
) -> PreTrainedTokenizerFast:
    """Make BERT's tokenizer of a vocabulary; equal vocabularies give tokenizers of an equal digest."""
    how: dict[str, Any] = dict(zip(BERT_ROLES, BERT_SPECIAL_TOKENS, strict=True))
    how["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=wordpiece_backend(vocabulary, lowercase), **how
    )


def wordpiece_backend(
    vocabulary: dict[str, int],
    lowercase: bool,
    strip_accents: bool | None = None,
    chinese: bool = True,
) -> Tokenizer:
    """Make BERT's rules with a vocabulary. `strip_accents` None: where it is lower-cased."""
    by_number = dict(sorted(vocabulary.items(), key=lambda item: item[1]))
    backend = Tokenizer(models.WordPiece(by_number, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(
        handle_chinese_chars=chinese, strip_accents=strip_accents, lowercase=lowercase
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    backend.add_special_tokens(list(BERT_SPECIAL_TOKENS))
    backend.post_processor = bert_template("[CLS]", "[SEP]", vocabulary)
    return backend


def bert_template(
    cls: str, sep: str, numbers: dict[str, int]
) -> processors.TemplateProcessing:
    """Make the rule that puts special tokens, by their numbers, around one text and between two."""
    single = f"{cls}:0 $A:0 {sep}:0"
    pair = f"{single} $B:1 {sep}:1"
    special = [(cls, numbers[cls]), (sep, numbers[sep])]
    return processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=special
    )


def _check_size(reached: int, size: int) -> None:
    if reached != size:
        rule = f"the training text yields a vocabulary of only {reached} tokens"
        smaller = Setting("model.vocab_size", reached)
        fix = ("set ", smaller, " or less, or give more text")
        raise ProblemsError.of(
            "model.vocab_size", Setting("model.vocab_size", size), rule, fix
        )
