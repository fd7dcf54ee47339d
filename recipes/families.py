"""Facts of the families of models, and patterns of their attention; needs no torch.

Shapes of a micro-batch: B samples of S tokens; a masked family predicts P tokens of a sample; a task has N
examples, B, or B / C for choices among C samples. Token ids, lengths and positions are int64, weights
float32. The loss of a micro-batch is the sum of cross-entropies times weights.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

GPT2_VOCABULARY = 50257  # Radford et al. 2019, section 2.2
# of the published bert-base-uncased and bert-large-uncased
BERT_UNCASED_VOCABULARY = 30522
BERT_CASED_VOCABULARY = 28996
PUBLISHED_VOCABULARIES = {
    "gpt2": GPT2_VOCABULARY,
    "bert_uncased": BERT_UNCASED_VOCABULARY,
    "bert_cased": BERT_CASED_VOCABULARY,
}
# (B, S) place of each token in its document; in a micro-batch of documents with borders
PLACES = "places"
# kinds of vocabulary learnt from the text
TRAINED = ("trained_bpe", "trained_wordpiece")
SMALLEST_BPE = 257  # the 256 bytes, and the end-of-document token
AttentionKind = Literal["dense", "banded", "fixed"]


@dataclass(frozen=True)
class MicroBatchFields:
    """Names of a micro-batch's tensors, in the model's order -> their dimensions."""

    inputs: Mapping[str, str]  # of the first pipeline stage
    targets: Mapping[str, str]  # of the loss, on the last one

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, in the plain model's order."""
        return tuple(self.sizes)

    @property
    def sizes(self) -> Mapping[str, str]:
        """Dimensions of all tensors."""
        return {**self.inputs, **self.targets}

    @property
    def padded(self) -> bool:
        """True if a sample may end before its S-th token, at its entry of `lengths`."""
        return "lengths" in self.inputs

    @property
    def uneven(self) -> bool:
        """True if samples predict different numbers of tokens, up to P."""
        return "P" in self.targets["weights"]


class Refused(NamedTuple):
    """Values of a key without meaning for a family."""

    key: str
    values: tuple[str, ...]
    why: str
    fix: str


@dataclass(frozen=True)
class LossFigure:
    """A loss, or a share of right answers: its key in the records, its name and its unit."""

    key: str
    name: str
    unit: str

    def __str__(self) -> str:
        return f"{self.name} ({self.unit})"

    def of(self, record: Any) -> float | None:
        """Return its value in a step, a validation or a result; None: not finite, or not there."""
        return values_of(record).get(self.key)


@dataclass(frozen=True)
class FamilyFacts:
    """Facts of one family; the defaults suit models of the next token.

    Attributes:
        name: `model.family` of its recipes.
        title: common name.
        fields: tensors of a micro-batch in pretraining.
        masked: it predicts masked tokens of whole samples and can have heads for sentences and tasks, as a
            BERT; else the next token at every position.
        prompt: an example that every vocabulary can encode.
        length: usual tokens of a sample.
        shortest: tokens of the shortest sample.
        trained, published: kinds of vocabulary that are usual for it.
        refused: values without meaning for it.
        settings: keys, besides the shape, that turn a recipe of another family into one of this family.
        placements: values of `model.layer_norm`, if it has several.
    """

    name: str
    title: str
    fields: MicroBatchFields
    masked: bool = False
    prompt: str = "The"
    length: int = 1024
    shortest: int = 1
    trained: str = "trained_bpe"
    published: str = "gpt2"
    refused: tuple[Refused, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    placements: tuple[str, ...] = ()


GPT2 = FamilyFacts(
    name="gpt2",
    title="GPT-2",
    fields=MicroBatchFields(
        inputs={"tokens": "BS"}, targets={"labels": "BS", "weights": "BS"}
    ),
    refused=(
        Refused(
            "model.layer_norm",
            ("post",),
            "GPT-2 normalises before attention and MLP",
            "set it to pre",
        ),
        Refused(
            "model.sentence_head",
            ("nsp", "sop"),
            "only a BERT has a sentence objective",
            "set it to none",
        ),
    ),
    settings={"model.layer_norm": "pre", "model.sentence_head": "none"},
)
_OWN_SAMPLES = "a BERT's samples are made of segments, not cut out of joined documents"
BERT = FamilyFacts(
    name="bert",
    title="BERT",
    fields=MicroBatchFields(
        inputs={"tokens": "BS", "token_types": "BS", "lengths": "B", "positions": "BP"},
        targets={
            "labels": "BP",
            "weights": "BP",
            "sentence_labels": "B",
            "sentence_weights": "B",
        },
    ),
    masked=True,
    prompt="The [MASK].",
    length=512,
    shortest=8,  # [CLS] A [SEP] B [SEP] with a few tokens in each
    trained="trained_wordpiece",
    published="bert_uncased",
    refused=(
        Refused(
            "data.tokenizer.kind",
            ("trained_bpe", "gpt2"),
            "a BERT needs a vocabulary with [CLS], [SEP], [MASK] and [PAD]",
            "set data.tokenizer.kind to trained_wordpiece, bert_uncased, bert_cased or file",
        ),
        Refused("data.attend", ("document",), _OWN_SAMPLES, "set it to window"),
        Refused("data.positions", ("document",), _OWN_SAMPLES, "set it to window"),
    ),
    settings={
        "model.implementation": "megarecipes",
        "model.attention": ("dense",),
        "model.attention_window": None,
        "model.attention_columns": None,
        "model.attention_patterns": 1,
        "data.attend": "window",
        "data.positions": "window",
    },
    placements=("pre", "post"),
)


# Any model of transformers, by its config.
CAUSAL_LM = replace(GPT2, name="causal_lm", title="causal LM")
MASKED_LM = replace(BERT, name="masked_lm", title="masked LM", placements=())
OF_CONFIG = ("causal_lm", "masked_lm")
FAMILIES: dict[str, FamilyFacts] = {
    family.name: family for family in (GPT2, BERT, CAUSAL_LM, MASKED_LM)
}


def fields_of(names: Collection[str]) -> MicroBatchFields:
    """Return the fields with exactly these names, `PLACES` aside; equal names have equal fields."""
    own = {*names} - {PLACES}
    every = (family.fields for family in FAMILIES.values())
    return next(fields for fields in every if {*fields.names} == own)


MINIMISED = "loss"  # key of the loss whose gradient trains the model


def values_of(record: Any) -> dict[str, float | None]:
    """Return what a step, a validation or a result has of losses and accuracies, by key."""
    return {MINIMISED: record.loss, **(record.parts or {})}


MASKED_LOSS = LossFigure("mlm_loss", "masked-token loss", "nats per masked token")


def _with_sentences(objective: str) -> tuple[LossFigure, ...]:
    return (
        MASKED_LOSS,
        LossFigure("sentence_loss", f"{objective} loss", "nats per sample"),
        LossFigure("sentence_accuracy", f"{objective} accuracy", "share of samples"),
        LossFigure(MINIMISED, "total loss", "nats"),
    )


# Figures of a model. The first one is a mean over predicted tokens or examples, with which the losses of
# uniform and unigram models compare.
TOKEN_FIGURES = (LossFigure(MINIMISED, "loss", "nats per token"),)
# by model.sentence_head
MASKED_FIGURES = {
    "none": (MASKED_LOSS,),
    "nsp": _with_sentences("next-sentence"),
    "sop": _with_sentences("sentence-order"),
}
TASK_FIGURES = (
    LossFigure(MINIMISED, "loss", "nats per example"),
    LossFigure("accuracy", "accuracy", "share of examples"),
)


def parts_of(figures: Collection[LossFigure]) -> tuple[str, ...]:
    """Return the keys of the figures that a model returns next to its loss, in its order."""
    return tuple(each.key for each in figures if each.key != MINIMISED)


class Fixed(NamedTuple):
    """The fixed pattern (Child et al. 2019, arXiv 1904.10509, section 4.3), as DeepSpeed has had it.

    A position sees its own window up to itself, and in every window before it the same few positions, the
    global columns: the last `columns` of the window for the first head, those before them for the next, and
    after `patterns` heads the last ones again.
    """

    window: int
    columns: int
    patterns: int = 1
    # number of the first head at hand, on a tensor rank that has others than the first
    first: int = 0


Window = int | Fixed | None  # a band's positions, a fixed pattern, or None: dense
