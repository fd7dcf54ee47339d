"""What the fields of one recipe owe each other, whatever the layout it is run with (that is `ds_configs.resolver`'s part).

One function per subject; each returns lines "what came: the rule: the fix", so that all problems are reported at once.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, get_args

from recipes.vocabularies import PUBLISHED_VOCABULARIES, SMALLEST_BPE, TRAINED

if TYPE_CHECKING:
    from recipes.schema import Recipe

ORIGIN_FIELDS = frozenset(
    {"source", "name", "config", "revision", "split", "text_column", "documents", "sentences", "streaming"}
)
SHORTEST_BERT_SAMPLE = 8  # [CLS] A [SEP] B [SEP] with a few tokens in each


def problems(recipe: Recipe) -> list[str]:
    """Every broken rule, as lines; empty when the recipe is consistent."""
    return [line for rule in _RULES for line in rule(recipe)]


def known_problems(incomplete: Recipe) -> list[str]:
    """Of a recipe that lacks fields: the broken rules among those that ask for none of them."""
    found: list[str] = []
    for rule in _RULES:
        with contextlib.suppress(
            AttributeError, TypeError
        ):  # a field that is not there, or whose parts are not
            found += rule(incomplete)
    return found


def _schedule(recipe: Recipe) -> list[str]:
    found = []
    schedule = recipe.schedule
    if schedule.min_lr > recipe.optimizer.lr:
        found.append(
            f"schedule.min_lr={schedule.min_lr} is above optimizer.lr={recipe.optimizer.lr}: the rate decays from lr to "
            "min_lr; set schedule.min_lr to optimizer.lr or less"
        )
    if schedule.kind != "constant" and schedule.warmup_steps >= recipe.decay_steps:
        end = "schedule.decay_steps" if schedule.decay_steps else "steps"
        found.append(
            f"schedule.warmup_steps={schedule.warmup_steps} is not below {end}={recipe.decay_steps}: the warm-up ends before "
            f"the decay does; set schedule.warmup_steps to {recipe.decay_steps - 1} or less"
        )
    return found


def _family(recipe: Recipe) -> list[str]:
    model, kind = recipe.model, recipe.data.tokenizer.kind
    found = []
    if model.family == "gpt2":
        if model.layer_norm != "pre":
            found.append(
                "model.layer_norm=post with model.family=gpt2: GPT-2 normalises before attention and MLP; set it to pre"
            )
        if model.sentence_head != "none":
            found.append(
                f"model.sentence_head={model.sentence_head} with model.family=gpt2: only a BERT has a sentence objective; set it to none"
            )
        return found
    if kind in ("trained_bpe", "gpt2"):
        found.append(
            f"data.tokenizer.kind={kind} with model.family=bert: a BERT needs a vocabulary with [CLS], [SEP], [MASK] and [PAD]; set "
            "data.tokenizer.kind to trained_wordpiece, bert_uncased, bert_cased or file"
        )
    if recipe.sequence_length < SHORTEST_BERT_SAMPLE:
        found.append(
            f"sequence_length={recipe.sequence_length} with model.family=bert: a sample is [CLS] A [SEP] B [SEP]; set it to "
            f"{SHORTEST_BERT_SAMPLE} or more"
        )
    return found


def _attention(recipe: Recipe) -> list[str]:
    model = recipe.model
    banded, window = "banded" in model.attention, model.attention_window
    found = []
    if banded and model.family != "gpt2":
        found.append(
            "model.attention with banded layers and model.family=bert: the band looks back only; set model.attention to [dense]"
        )
    if len(model.attention) > model.layers:
        found.append(
            f"model.attention has {len(model.attention)} kinds for model.layers={model.layers}: the pattern is repeated over the layers; "
            f"give {model.layers} or fewer"
        )
    if banded and window is None:
        found.append(
            "model.attention has banded layers without model.attention_window: say how many positions each one sees"
        )
    if window is not None and not banded:
        found.append(
            f"model.attention_window={window} without a banded layer: set model.attention to [dense, banded], or leave it out"
        )
    if banded and window is not None and window >= recipe.sequence_length:
        found.append(
            f"model.attention_window={window} with sequence_length={recipe.sequence_length}: such a band is the whole triangle; set "
            f"model.attention_window to {recipe.sequence_length - 1} or less, or model.attention to [dense]"
        )
    return found


def _implementation(recipe: Recipe) -> list[str]:
    model = recipe.model
    if model.implementation != "transformers":
        return []
    asked = "model.implementation=transformers"
    found = []
    if model.family != "gpt2":
        found.append(
            f"model.family={model.family} with {asked}: transformers' Trainer is run with its GPT-2; set the family to gpt2"
        )
    if "banded" in model.attention:
        found.append(
            f"model.attention={list(model.attention)} with {asked}: its GPT-2 has dense layers; set model.attention to [dense]"
        )
    for key in ("tp", "pp"):
        if (degree := getattr(recipe.parallel, key) or 1) > 1:
            found.append(
                f"parallel.{key}={degree} with {asked}: its GPT-2 is cut by ZeRO alone; set parallel.{key} to 1"
            )
    if isinstance(recipe.activation_checkpointing, int):
        found.append(
            f"activation_checkpointing={recipe.activation_checkpointing} with {asked}: it recomputes all layers or none; set full or none"
        )
    return found


def _provenance(recipe: Recipe) -> list[str]:
    """Keys named in `inferred`, `differs`, `unknown` and `published.printed` exist."""
    named = {"inferred": recipe.inferred, "differs": recipe.differs, "unknown": recipe.unknown}
    if recipe.published:
        named["published.printed"] = recipe.published.printed  # type: ignore[assignment]
    both = sorted(recipe.inferred.keys() & recipe.unknown.keys())
    return [
        f"unknown: {key}: is in inferred as well: a value has a source or none; keep one of the two"
        for key in both
    ] + [
        f"{section}: {key}: no such key of a recipe: name the key whose value it explains, e.g. batch.global"
        for section, keys in named.items()
        for key in keys
        if not _is_key(type(recipe), key)
    ]


def _is_key(model: Any, dotted: str) -> bool:
    first, _, rest = dotted.partition(".")
    fields = {field.alias or name: field.annotation for name, field in model.model_fields.items()}
    if first not in fields:
        return False
    below = [part for part in (fields[first], *get_args(fields[first])) if hasattr(part, "model_fields")]
    return not rest or any(_is_key(part, rest) for part in below)


def _vocabulary(recipe: Recipe) -> list[str]:
    size, kind = recipe.model.vocab_size, recipe.data.tokenizer.kind
    published = PUBLISHED_VOCABULARIES.get(kind)
    if published and size != published:
        return [
            f"model.vocab_size={size} with data.tokenizer.kind={kind}: the published vocabulary has {published} tokens "
            f"(padding for tensor parallelism comes on top); set model.vocab_size to {published}, or "
            "data.tokenizer.kind to another"
        ]
    if kind == "trained_bpe" and size < SMALLEST_BPE:
        return [
            f"model.vocab_size={size} with data.tokenizer.kind=trained_bpe: a byte-level vocabulary needs the 256 bytes and "
            f"one end-of-document token; set model.vocab_size to {SMALLEST_BPE} or more"
        ]
    streamed = [origin.source for origin in recipe.data.origins if origin.streamed]
    if kind in TRAINED and streamed:
        other = "bert_uncased" if recipe.model.family == "bert" else "gpt2"
        return [
            f"data.tokenizer.kind={kind} with a streamed source (data.source={streamed[0]}): a vocabulary cannot be trained on what is "
            f"read once; set data.tokenizer.kind to {other} and model.vocab_size to {PUBLISHED_VOCABULARIES[other]}, or give "
            "data.tokenizer.kind=file and a path"
        ]
    return []


def _data(recipe: Recipe) -> list[str]:
    data = recipe.data
    found = []
    defaults = {key: field.default for key, field in type(data).model_fields.items()}
    stated = sorted(key for key in ORIGIN_FIELDS if getattr(data, key, None) != defaults[key])
    if data.blend and stated:
        found.append(
            f"data.blend together with {', '.join(f'data.{key}' for key in stated)}: the parts of the blend say where documents come "
            "from; move these keys into the parts"
        )
    stores = [origin for origin in data.origins if origin.source == "store"]
    if any(origin.streaming for origin in stores):
        found.append(
            "data.streaming=true with data.source=store: the tokens are there already; leave data.streaming out"
        )
    if any(origin.streaming and origin.source == "packaged" for origin in data.origins):
        found.append(
            "data.streaming=true with data.source=packaged: the packaged corpus is prepared in seconds and never streamed; leave "
            "data.streaming out"
        )
    if any(
        origin.streaming and (origin.source, origin.documents) == ("text", "file") for origin in data.origins
    ):
        found.append(
            "data.streaming=true with data.source=text and data.documents=file: a stream holds documents out by their place in their "
            "file, and none of a file that is one document; set data.streaming to false, or data.documents to blank_line"
        )
    if stores and data.tokenizer.kind in TRAINED:
        found.append(
            f"data.tokenizer.kind={data.tokenizer.kind} with data.source=store: its tokens are numbered already; set "
            "data.tokenizer.kind to store (the vocabulary that prepare_data kept with it), gpt2, bert_uncased, bert_cased or file"
        )
    if data.tokenizer.kind == "store" and not stores:
        found.append(
            "data.tokenizer.kind=store without data.source=store: there is no store to take it from; name another kind"
        )
    if data.validation_every < 2:
        found.append(
            f"data.validation_every={data.validation_every} holds out every document: set it to 2 or more"
        )
    if data.test_every is not None and data.test_every < 2:
        found.append(
            f"data.test_every={data.test_every} leaves no document to train on: set it to 2 or more, or to null"
        )
    return found


def _checkpointing(recipe: Recipe) -> list[str]:
    chunk, layers = recipe.activation_checkpointing, recipe.model.layers
    if isinstance(chunk, int) and chunk > layers:
        return [
            f"activation_checkpointing={chunk} is above model.layers={layers}: it is the number of layers recomputed "
            f'together; set it to {layers} or less, to "full" or to "none"'
        ]
    return []


_RULES = (_schedule, _family, _attention, _implementation, _vocabulary, _data, _checkpointing, _provenance)
