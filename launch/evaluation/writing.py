"""Read and encode prompts, and write texts with a trained model."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch
from transformers.generation.streamers import BaseStreamer

from data.text.vocabulary import unused_numbers
from launch.console import terminal
from launch.console.progress import bar
from launch.evaluation.trained_model import TrainedModel
from launch.ranks import ending
from launch.weights import foreign_weights
from modeling.generation import (
    Decoding,
    EndReason,
    Request,
    Sampling,
    continue_all,
    fill_masks,
    in_transformers,
)
from recipes import files
from recipes.families import FAMILIES
from recipes.problems import MOST, Problem

JSON_LINES = ".jsonl"
FIELD = "prompt"


@dataclass(frozen=True)
class Prompt:
    """One prompt. `where`: its flag, or file and line; `tokens`: once encoded, a BERT's with [CLS], [SEP]."""

    text: str
    where: str
    tokens: tuple[int, ...] = ()


def typed(texts: Sequence[str]) -> list[Prompt]:
    """Take the prompts of --prompt."""
    return [Prompt(text, f"--prompt {text[:40]!r}") for text in texts]


def read(file: str) -> list[Prompt]:
    """Read the prompts of a file, without blank ones: its lines, or the "prompt" of each JSON line.

    Raises FileError with the problems of the file and of all lines.
    """
    path = files.path_of(file, "--file")
    found = list[Prompt]()
    problems = list[Problem]()
    for number, content in files.lines_of(path, files.MOST_TEXT):
        try:
            line = files.decode(content, path, number).rstrip("\r\n")
            if line.strip():
                text = _field(line, path, number) if path.suffix == JSON_LINES else line
                found.append(Prompt(text, f"{path}:{number}"))
        except files.FileError as error:
            problems += error.problems
    if problems:
        raise files.FileError(_first(problems, str(path)))
    if not found:
        form = f'lines of JSON, {{"{FIELD}": "text"}}'
        form = form if path.suffix == JSON_LINES else "a prompt in each line"
        files.refuse(path, "holds no prompt", f"it has {form}")
    return found


def _field(line: str, path: Path, number: int) -> str:
    record = files.parse_json(line, path, number)
    text = record.get(FIELD) if isinstance(record, dict) else None
    if not isinstance(text, str):
        came = (
            f"its {FIELD} is {files.named_kind(text)}"
            if text is not None
            else f'has no "{FIELD}"'
        )
        files.refuse(
            path,
            came,
            f'a line is {{"{FIELD}": "text"}}, and may have more',
            "",
            number,
        )
    return text


def encode(prompts: Sequence[Prompt], model: TrainedModel) -> list[Prompt]:
    # Masked models need [CLS] and [SEP]; verbose would warn about lengths that are refused anyway.
    how: dict[str, Any] = dict(add_special_tokens=not model.continues, verbose=False)
    return [
        replace(each, tokens=tuple(model.tokenizer.encode(each.text, **how)))
        for each in prompts
    ]


def unfit(prompts: Sequence[Prompt], model: TrainedModel) -> list[Problem]:
    """List the problems of all prompts that are unfit for the model."""
    problems = [problem for prompt in prompts for problem in _unfit(prompt, model)]
    return _first(problems, prompts[0].where.partition(":")[0])


def _unfit(prompt: Prompt, model: TrainedModel) -> Iterator[Problem]:
    positions = model.recipe.positions
    family = model.recipe.model.family
    tokens = prompt.tokens
    if not prompt.text.strip() or not tokens:
        fix = f"give some text, such as {FAMILIES[family].prompt!r}"
        yield Problem(
            "--prompt",
            "is empty",
            "there is nothing to go on with",
            fix,
            where=prompt.where,
        )
    elif len(tokens) > positions:
        came = f"has {len(tokens):,} tokens"
        rule = f"the model has {positions:,} positions (model.positions)"
        yield Problem("--prompt", came, rule, "shorten it", where=prompt.where)
    elif not model.continues and model.tokenizer.mask_token_id not in tokens:
        mask = model.tokenizer.mask_token
        rule = "a BERT fills in masks, and writes nothing else"
        fix = f"write {mask} for a missing token"
        yield Problem("--prompt", f"has no {mask}", rule, fix, where=prompt.where)


def _first(problems: list[Problem], where: str) -> list[Problem]:
    """Return the first problems, and the number of the others."""
    more = len(problems) - MOST
    left = (
        [Problem("--file", f"{more:,} more lines are wrong", where=where)]
        if more > 0
        else []
    )
    return [*problems[:MOST], *left]


@dataclass(frozen=True)
class WritingJob:
    """A checked generation job.

    Attributes:
        tokens: largest number after each prompt.
        sampling: None takes the most likely token.
        batch: samples at a time.
        out: None writes to the terminal.
    """

    model: TrainedModel
    prompts: Sequence[Prompt]
    tokens: int
    samples: int
    sampling: Sampling | None
    seed: int
    batch: int
    cached: bool
    dtype: str
    out: Path | None


@dataclass(frozen=True)
class WrittenText:
    """One generated sample of one prompt.

    Attributes:
        number: of the prompt, from 0 on.
        text: the prompt with its continuation, or with its masks filled in.
        new: the continuation alone, or the tokens for the masks.
        ended: reason for the end of the text; None for filled masks.
    """

    number: int
    sample: int
    prompt: str
    text: str
    new: str
    tokens: int
    ended: EndReason | None

    def record(self) -> dict[str, Any]:
        """Return the record for a file of JSON lines."""
        own = dict(prompt=self.prompt, text=self.text, new=self.new, tokens=self.tokens)
        return (
            own
            if self.ended is None
            else {**own, "sample": self.sample, "ended": self.ended}
        )


def write(
    model: Any, job: WritingJob, streamer: BaseStreamer | None = None
) -> Iterator[WrittenText]:
    """Generate all samples of all prompts in order; `streamer` hears the tokens of a lone one.

    Raises Failed where the logits of the next text are not finite.
    """
    never = unused_numbers(job.model.tokenizer)
    try:
        if job.model.continues:
            yield from _continued(model, job, never, streamer)
        else:
            yield from _filled(model, job, never)
    except FloatingPointError as error:
        fix = "give other weights, or --dtype float32, which has more room"
        raise ending.Failed(
            f"{error}: its weights are too large for that; {fix}"
        ) from None


def _continued(
    model: Any, job: WritingJob, never: Sequence[int], streamer: BaseStreamer | None
) -> Iterator[WrittenText]:
    tokenizer = job.model.tokenizer
    how = Decoding(
        job.tokens, tokenizer.eos_token_id, never, job.sampling, job.seed, job.cached
    )
    order = list(itertools.product(range(len(job.prompts)), range(job.samples)))
    for first in range(0, len(order), job.batch):
        places = order[first : first + job.batch]
        requests = [
            Request(job.prompts[number].tokens, sample) for number, sample in places
        ]
        made = continue_all(model, requests, how, streamer)
        for (number, sample), more in zip(places, made, strict=True):
            prompt = job.prompts[number]
            text = str(tokenizer.decode([*prompt.tokens, *more.tokens]))
            new = str(tokenizer.decode([*more.tokens]))
            yield WrittenText(
                number, sample, prompt.text, text, new, len(more.tokens), more.ended
            )


def _filled(model: Any, job: WritingJob, never: Sequence[int]) -> Iterator[WrittenText]:
    tokenizer = job.model.tokenizer
    mask = tokenizer.mask_token_id
    for number, prompt in enumerate(job.prompts):
        tokens = fill_masks(model, prompt.tokens, mask, never)
        new = [
            token
            for token, before in zip(tokens, prompt.tokens, strict=True)
            if before == mask
        ]
        text = str(tokenizer.decode(tokens, skip_special_tokens=True))
        words = " ".join(tokenizer.convert_ids_to_tokens(new))
        yield WrittenText(number, 0, prompt.text, text, words, len(new), None)


def run(job: WritingJob) -> None:
    """Load the model and write the texts."""
    from deepspeed.accelerator import get_accelerator

    for line in job.model.said():
        terminal.say(line, sys.stderr)
    weights = foreign_weights.read(job.model.weights, job.model.recipe)
    model = in_transformers(job.model.recipe, weights, getattr(torch, job.dtype))
    model.to(get_accelerator().current_device_name())
    total = len(job.prompts) * (job.samples if job.model.continues else 1)
    stream = ScreenStream(job.model.tokenizer) if total == 1 and not job.out else None
    began = time.perf_counter()
    done = list[WrittenText]()
    with job.out.open("x", encoding="utf-8") if job.out else nullcontext() as file:
        # Texts in a terminal show the progress themselves.
        hidden = stream or (job.out is None and sys.stdout.isatty())
        with (
            nullcontext()
            if hidden
            else bar(sys.stderr, total=total, unit="text") as shown
        ):
            for written in write(model, job, stream):
                done.append(replace(written, prompt="", text="", new=""))
                show(written, file, stream)
                if shown is not None:
                    shown.update()
    terminal.say(summary(done, time.perf_counter() - began, job), sys.stderr)


class ScreenStream(BaseStreamer):
    """A growing text in the terminal, in whole characters. `transformers` puts in its tokens."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self.shown = ""

    def put(self, value: torch.Tensor) -> None:
        """Show the text so far, but for the beginning of a character at its end; first comes the prompt."""
        tokens = value.flatten().tolist()
        if self._tokens and tokens == [self._tokenizer.eos_token_id]:
            return
        self._tokens += tokens
        self.show(
            self._tokenizer.decode(self._tokens).rstrip("\N{REPLACEMENT CHARACTER}")
        )

    def end(self) -> None:
        """Do nothing: `show` of the whole text ends it."""

    def show(self, text: str) -> None:
        """Print the new part of the text. If the tokenizer changed earlier words, print nothing yet."""
        if text.startswith(self.shown):
            print(terminal.visible(text[len(self.shown) :]), end="", flush=True)
            self.shown = text


def show(
    written: WrittenText, file: IO[str] | None, stream: ScreenStream | None
) -> None:
    """Write one text: to the file, to the end of its stream, or under a heading with its prompt number."""
    if file is not None:
        file.write(json.dumps(written.record(), ensure_ascii=False) + "\n")
        file.flush()
    elif stream is not None:
        stream.show(written.text)
        rest = (
            ""
            if stream.shown == written.text
            else f"\n{terminal.visible(written.text)}"
        )
        print(rest, flush=True)
    else:
        how = (
            ""
            if written.ended is None
            else f", sample {written.sample + 1}, ended by {written.ended}"
        )
        print(
            f"--- prompt {written.number + 1}{how}\n{terminal.visible(written.text)}",
            flush=True,
        )


def summary(done: Sequence[WrittenText], seconds: float, job: WritingJob) -> str:
    """Return a line with the numbers of texts and tokens, the speed, and the reasons of text ends."""
    tokens = sum(written.tokens for written in done)
    said = f"{len(done):,} texts, {tokens:,} tokens in {seconds:.2f} s: {tokens / seconds:,.0f} tokens/s"
    if not job.model.continues:
        return said
    positions = f"at the model's {job.model.recipe.positions:,} positions"
    reasons = {
        "length": "after --tokens",
        "end": "at the end-of-text token",
        "positions": positions,
    }
    ends = []
    for ended, why in reasons.items():
        count = sum(written.ended == ended for written in done)
        if count:
            ends.append(f"{count:,} {why}")
    return f"{said}; ended {', '.join(ends)}"
