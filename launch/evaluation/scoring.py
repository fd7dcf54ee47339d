"""Score a model on tasks by lm-eval's own model, print the scores, and keep them with the run."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lm_eval
import torch
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from data.samples.documents import places_in_documents
from data.text.documents import end_of_document
from data.text.vocabulary import unused_numbers
from launch.console import terminal
from launch.evaluation.protocols import FACTS, TASKS, TaskText
from launch.evaluation.scores import Score, describe, keep, to_json
from launch.evaluation.trained_model import TrainedModel
from launch.machine import description
from launch.ranks import ending
from modeling import cost
from modeling.initialization import DTYPES
from recipes.problems import Problem, ProblemsError, counted, nearest, some

OWN = Path(__file__).parent / "tasks"  # task files of this project
SOURCE = f"lm-eval {lm_eval.__version__}"
STRIDE = 32  # tokens; of WikiText-103 (arXiv 1909.08053, appendix E.1)
SEED = 1234  # lm-eval's, of texts that a task draws
BOOTSTRAPS = 100  # for standard errors without a formula
LARGEST_EXPONENT = 700.0  # of e, in float64
WITHOUT_NETWORK = (
    "check the network; or set HF_HOME to a cache that holds the data; or give --include_path DIR with a "
    "task file of your own on local files (dataset_path: json, dataset_kwargs: {data_files: ...})"
)


@dataclass(frozen=True)
class ScoringJob:
    """A checked scoring job.

    Attributes:
        given: directory of the model as the user typed it.
        texts: what our own tasks read: arguments of their functions in `protocols`.
        window: tokens read at once.
        stride: tokens from one window to the next; None: the task's default.
        limit: largest number of documents.
        from_scratch: draw the weights by the recipe's seed.
        kept_in: the run whose scores these are; None: no run's, or another user's.
    """

    given: str
    model: TrainedModel
    tasks: Sequence[str]
    texts: dict[str, Any]
    include_path: str | None
    window: int
    stride: int | None
    limit: int | None
    batch: int
    precision: str
    from_scratch: bool
    kept_in: Path | None
    out: Path | None

    def stride_of(self, task: str) -> int | None:
        """Return the tokens from one window to the next; None for a task of questions."""
        usual = {"perplexity": self.window, "wikitext103": min(STRIDE, self.window)}
        return (self.stride or usual[task]) if task in usual else None


@dataclass(frozen=True)
class LoadedTask:
    """One requested name with the tasks behind it. `text`: facts on the data."""

    name: str
    loaded: Mapping[str, Any]
    text: TaskText


def load(job: ScoringJob) -> list[LoadedTask]:
    """Load the tasks with their data.

    Raises ValueError: a name is unknown, or data cannot be read.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    own = TaskManager(include_path=OWN, include_defaults=False, metadata=job.texts)
    others = [name for name in job.tasks if name not in TASKS]
    theirs = own
    if others:  # which indexes some thousand task files
        theirs = TaskManager(include_path=job.include_path)
    problems = []
    for name in others:
        if name not in theirs.all_tasks:
            near = some(nearest(name, [*theirs.all_tasks, *TASKS]))
            fix = f"did you mean {near}?" if near else "`lm_eval ls tasks` lists them"
            problems.append(Problem("--tasks", name, f"{SOURCE} has no such task", fix))
    if problems:
        raise ProblemsError(problems)
    return [_loaded(name, theirs if name in others else own) for name in job.tasks]


def _loaded(name: str, manager: TaskManager) -> LoadedTask:
    if name in TASKS:
        loaded = manager.load([name])
        (task,) = loaded["tasks"].values()
        return LoadedTask(name, loaded, task.dataset[FACTS])
    try:
        return LoadedTask(name, manager.load([name]), TaskText("", SOURCE))
    # datasets, huggingface_hub, httpx and fsspec each raise their own
    except Exception as error:
        first = (str(error).splitlines() or [""])[0][:200]
        raise ProblemsError.of(
            "--tasks",
            name,
            f"its data cannot be read: {type(error).__name__}: {first}",
            WITHOUT_NETWORK,
        ) from error


@dataclass
class Seen:
    """What a model has scored: windows, targets, texts of which only the end was read, and nats."""

    windows: int = 0
    tokens: int = 0
    cut: int = 0
    log_likelihood: float = 0.0


class ScoredModel(HFLM):  # type: ignore[misc]  # lm-eval has no types
    """lm-eval's model of `transformers` on a run's weights, which reads texts as its training did.

    Attributes:
        task: name of the task, which decides how texts are cut into windows.
        seen: of the task so far.
    """

    def __init__(self, job: ScoringJob):
        tokenizer = job.model.tokenizer
        tokenizer.split_special_tokens = True  # spelled out in a text they are text
        model = job.model.loaded(DTYPES[job.precision], drawn=job.from_scratch)
        self._job = job
        self._never = unused_numbers(tokenizer)
        self._kept = 0  # last positions that need logits; 0: all
        self.task = ""
        self.seen = Seen()
        if self._never:
            model.generation_config.suppress_tokens = self._never
        # samples of a sparse model have no padding
        batch = 1 if model.sparse else job.batch
        super().__init__(
            model,
            backend="causal",
            tokenizer=tokenizer,
            max_length=job.window,
            softmax_dtype=torch.float32,
            batch_size=batch,
            add_bos_token=False,
            prefix_token_id=end_of_document(tokenizer),
        )

    def loglikelihood_rolling(
        self, requests: Any, disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of each text, or of tokens of which the first is no target."""
        sums = [0.0] * len(requests)
        first: list[Any] = []
        later: list[Any] = []
        for number, request in enumerate(requests):
            for before, after in self._windows(request.args[0]):
                group = later if len(before) > 1 else first
                group.append((number, before, after))
        # apart, as later windows need the logits of their last positions only
        for group in filter(None, (first, later)):
            windows = [(None, before, after) for _number, before, after in group]
            answers = self._loglikelihood_tokens(windows, disable_tqdm)
            for (number, *_window), (likelihood, _right) in zip(
                group, answers, strict=True
            ):
                sums[number] += likelihood
        return sums

    def _windows(self, text: str | list[int]) -> Iterator[tuple[list[int], list[int]]]:
        begins = self.task == "wikitext103"
        start = [] if begins else [self.prefix_token_id]
        tokens = [*start, *self.tok_encode(text)] if isinstance(text, str) else text
        length = self.max_length
        stride = self._job.stride_of(self.task) or length
        return windows_of(tokens, length, stride, last_whole=not begins)

    def _loglikelihood_tokens(
        self, requests: Any, disable_tqdm: bool = False, **more: Any
    ) -> list[tuple[float, bool]]:
        """Return (log-likelihood, True if the likeliest) of each request, and count it.

        Raises Failed for a continuation without tokens, or longer than the window, or without a finite loss.
        """
        lengths = []
        contexts = []
        for _texts, before, after in requests:
            if not 1 <= len(after) <= self.max_length:
                text = self.tok_decode([*before, *after])[-60:]
                came = f"the continuation at the end of {text!r} has {len(after)} tokens of its own"
                rule = f"between 1 and {self.max_length} (--window) can be scored"
                raise ending.Failed(f"{came}: {rule}")
            length = len(before) + len(after)
            self.seen.windows += 1
            self.seen.tokens += len(after)
            self.seen.cut += length > self.max_length + 1
            lengths.append(min(length, self.max_length + 1))
            contexts.append(lengths[-1] - len(after))
        self._kept = max(lengths) - min(contexts)
        answers: list[tuple[float, bool]] = super()._loglikelihood_tokens(
            requests, disable_tqdm, **more
        )
        total = math.fsum(likelihood for likelihood, _right in answers)
        if not math.isfinite(total):
            precision = self._job.precision
            fix = "" if precision == "fp32" else "; --precision fp32 has more room"
            raise ending.Failed(f"a loss is no number in {precision}{fix}")
        self.seen.log_likelihood += total
        return answers

    @torch.no_grad()
    def _model_call(self, inps: Tensor, **_: Any) -> Tensor:
        seen = {}
        if self._job.model.recipe.data.borders:
            seen = self._within_documents(inps)
        kept = dict(use_cache=False, logits_to_keep=self._kept)
        logits: Tensor = self.model(inps, **kept, **seen).logits
        logits[..., self._never] = -math.inf
        return logits

    def _within_documents(self, tokens: Tensor) -> dict[str, Tensor]:
        """Return positions and mask of windows (B, S) with the borders of the training."""
        data = self._job.model.recipe.data
        places = torch.from_numpy(
            places_in_documents(tokens.cpu().numpy(), self.prefix_token_id)
        )
        document = (places == 0).cumsum(1)
        seen = document[:, :, None] == document[:, None]
        if data.attend == "window":
            seen = torch.ones_like(seen)
        if data.positions == "window":
            places = torch.arange(places.shape[1]).expand_as(places)
        masks = {"position_ids": places, "attention_mask": seen.tril()[:, None]}
        return {name: each.to(tokens.device) for name, each in masks.items()}


def windows_of(
    tokens: list[int], length: int, stride: int, *, last_whole: bool
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield (context, targets) of windows of `length` tokens; every token but the first is a target once.

    The first window counts all its targets, each later one its last `stride`, the last one the rest. That one
    is as long as the others if `last_whole`, or else begins a stride after the one before, as those of
    Megatron-LM (`tasks/zeroshot_gpt/datasets.py`).
    """
    first, *targets = tokens
    overlap = length - stride
    for window in get_rolling_token_windows(targets, first, length, overlap + 1):
        before, after = make_disjoint_window(window)
        if not last_whole:
            before = before[-(overlap + 1) :]
        yield before, after


def measure(
    task: LoadedTask, model: ScoredModel, limit: int | None
) -> Iterator[tuple[str, dict[str, float], int]]:
    """Score a task; yield its name, figures and number of documents.

    A group that has figures of its own is one result, another one a result of each of its tasks.
    """
    # lm-eval would fork this process for its standard errors
    os.environ["DISABLE_MULTIPROC"] = "1"
    torch.manual_seed(SEED)
    how = dict(limit=limit, log_samples=False, bootstrap_iters=BOOTSTRAPS)
    try:
        outcome: Any = evaluate(model, task.loaded, **how)
    except AssertionError as error:
        raise ending.Failed(f"{task.name}: {error}") from error
    results = outcome["results"] | outcome.get("groups", {})
    figures = {name: _figures(values) for name, values in results.items()}
    names = [task.name] if figures.get(task.name) else list(task.loaded["tasks"])
    sizes = {name: each["effective"] for name, each in outcome["n-samples"].items()}
    whole = sum(sizes.values())
    for name in names:
        yield name, figures[name], sizes.get(name, whole)


def _figures(values: Mapping[str, Any]) -> dict[str, float]:
    """Name each figure by its metric, and by its filter where there is one."""
    figures = {}
    for key, value in values.items():
        metric, comma, way = key.partition(",")
        if comma and isinstance(value, (int, float)):
            figures[metric if way == "none" else f"{metric} ({way})"] = float(value)
    return figures


def figures_of(
    name: str, values: Mapping[str, float], seen: Seen, text: TaskText
) -> dict[str, float]:
    """Return the figures of a task, its main figure first.

    `found`: lm-eval's; those of a whole text are per token that counts, and per word and byte of the original.
    """
    if name not in TASKS:
        return dict(values)
    if name == "lambada":
        right = values["acc"]
        return {"accuracy": right, "perplexity_of_last_word": values["perplexity"]}
    nll = -seen.log_likelihood
    loss = nll / seen.tokens
    figures = {"perplexity": exponential(loss)}
    if text.words:
        figures["perplexity_per_word"] = exponential(nll / text.words)
        figures["tokens_per_word"] = seen.tokens / text.words
    if text.bytes:
        figures["bits_per_byte"] = nll / text.bytes / math.log(2)
    if name == "wikitext103":
        figures["perplexity"] = figures["perplexity_per_word"]
    return figures | {"loss_per_token": loss, "perplexity_per_token": exponential(loss)}


def exponential(nats: float) -> float:
    return math.exp(min(nats, LARGEST_EXPONENT))


def run(job: ScoringJob, tasks: Sequence[LoadedTask]) -> None:
    """Load the model, score it on every task, and write the scores."""
    model = ScoredModel(job)
    made: list[Score] = []
    for task in tasks:
        for score in _scores(job, task, model):
            made.append(score)
            print(describe(score, terminal.columns()))
            if job.kept_in:
                terminal.say(f"kept in {keep(job.kept_in, score)}", sys.stderr)
    if job.out:
        job.out.write_text(to_json(made))


def _scores(job: ScoringJob, task: LoadedTask, model: ScoredModel) -> Iterator[Score]:
    """Score the model on one task; yield a score, or one of each task of a group."""
    began = time.perf_counter()
    model.task = task.name
    model.seen = seen = Seen()
    recipe = job.model.recipe
    text = task.text
    devices = {parameter.device for parameter in model.model.parameters()}
    for name, figures, examples in measure(task, model, job.limit):
        yield Score(
            model=job.given,
            parameters=cost.parameters(recipe.model, recipe.positions),
            step=None if job.from_scratch else job.model.step,
            task=name,
            variant=text.variant,
            source=text.source,
            figures=figures_of(task.name, figures, seen, text),
            examples=examples,
            windows=seen.windows,
            tokens=seen.tokens,
            words=text.words,
            limited=job.limit is not None,
            cut=seen.cut,
            window=job.window,
            stride=job.stride_of(task.name),
            batch=model.batch_size,
            precision=job.precision,
            layout=counted(len(devices), "device"),
            hardware=description.summary(description.describe()),
            seconds=time.perf_counter() - began,
            from_scratch=job.from_scratch,
        )
