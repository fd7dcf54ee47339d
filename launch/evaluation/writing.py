"""Read and encode prompts, and write texts with a trained model."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from transformers.generation.streamers import TextStreamer

from launch.console import terminal
from launch.console.progress import bar
from launch.evaluation.trained_model import TrainedModel
from launch.ranks import ending
from modeling.generation import Decoding, EndReason, continued, fill_masks, positions_of
from recipes import files
from recipes.problems import MOST, Problem, counted, visible


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
    """Read the prompts of a text file, one in each line, without blank ones. Raises FileError."""
    path = files.path_of(file, "--file")
    if path.suffix in (".json", ".jsonl"):
        files.refuse(
            path,
            "has an ending of JSON",
            "a file of prompts is plain text, one in each line",
            f"jq -r .prompt {path} > prompts.txt",
        )
    prompts = list[Prompt]()
    for number, line in enumerate(files.read_text(path).split("\n"), 1):
        if line.strip():
            prompts.append(Prompt(line.rstrip("\r"), f"{path}:{number}"))
    if not prompts:
        files.refuse(path, "holds no prompt", "it has a prompt in each line")
    return prompts


def encode(prompts: Sequence[Prompt], model: TrainedModel) -> list[Prompt]:
    # Masked models need [CLS] and [SEP]; verbose would warn about lengths that are refused anyway.
    how: dict[str, Any] = dict(add_special_tokens=not model.continues, verbose=False)
    return [
        replace(each, tokens=tuple(model.tokenizer.encode(each.text, **how)))
        for each in prompts
    ]


def unfit(prompts: Sequence[Prompt], model: TrainedModel) -> list[Problem]:
    """List the first problems of prompts that are unfit for the model."""
    problems = chain.from_iterable(_unfit(prompt, model) for prompt in prompts)
    return list(islice(problems, MOST))


def _unfit(prompt: Prompt, model: TrainedModel) -> Iterator[Problem]:
    positions = positions_of(model.recipe)
    facts = model.recipe.model.facts
    tokens = prompt.tokens
    if not prompt.text.strip() or not tokens:
        yield Problem(
            "--prompt",
            "is empty",
            "there is nothing to go on with",
            f"give some text, such as {facts.prompt!r}",
            where=prompt.where,
        )
    elif len(tokens) > positions:
        yield Problem(
            "--prompt",
            f"has {len(tokens):,} tokens",
            f"the model has {positions:,} positions (model.positions)",
            "shorten it",
            where=prompt.where,
        )
    elif not model.continues and model.tokenizer.mask_token_id not in tokens:
        mask = model.tokenizer.mask_token
        yield Problem(
            "--prompt",
            f"has no {mask}",
            f"a {facts.title} fills in masks, and writes nothing else",
            f"write {mask} for a missing token",
            where=prompt.where,
        )


@dataclass(frozen=True)
class WritingJob:
    """A checked job: `samples` texts after each prompt, in the terminal where `out` is None."""

    model: TrainedModel
    prompts: Sequence[Prompt]
    samples: int
    how: Decoding
    dtype: str
    out: Path | None


@dataclass(frozen=True)
class WrittenText:
    """One generated sample of one prompt, as a record of --out.

    Attributes:
        text: the prompt with its continuation, or with its masks filled in.
        new: the continuation alone, or the tokens for the masks.
        tokens: their number.
        ended: reason for the end of the text; None for filled masks.
    """

    prompt: str
    text: str
    new: str
    tokens: int
    sample: int = 0
    ended: EndReason | None = None


def write(
    model: Any, job: WritingJob, streamer: TextStreamer | None = None
) -> Iterator[WrittenText]:
    """Generate all samples of all prompts in order.

    Raises Failed where the logits of the next text are not finite.
    """
    made = _continued if job.model.continues else _filled
    try:
        for prompt in job.prompts:
            yield from made(model, job, prompt, streamer)
    except FloatingPointError as error:
        fix = "give other weights, or --dtype float32, which has more room"
        raise ending.Failed(
            f"{error}: its weights are too large for that; {fix}"
        ) from None


def _continued(
    model: Any, job: WritingJob, prompt: Prompt, streamer: TextStreamer | None
) -> Iterator[WrittenText]:
    decode = job.model.tokenizer.decode
    made = continued(model, prompt.tokens, job.how, job.samples, streamer)
    for sample, more in enumerate(made):
        text = str(decode([*prompt.tokens, *more.tokens]))
        new = str(decode([*more.tokens]))
        yield WrittenText(prompt.text, text, new, len(more.tokens), sample, more.ended)


def _filled(
    model: Any, job: WritingJob, prompt: Prompt, streamer: TextStreamer | None
) -> Iterator[WrittenText]:
    tokenizer = job.model.tokenizer
    mask = tokenizer.mask_token_id
    tokens = fill_masks(model, prompt.tokens, mask, job.how.never)
    pairs = zip(tokens, prompt.tokens, strict=True)
    new = [token for token, before in pairs if before == mask]
    text = str(tokenizer.decode(tokens, skip_special_tokens=True))
    words = " ".join(tokenizer.convert_ids_to_tokens(new))
    yield WrittenText(prompt.text, text, words, len(new))


class ScreenStream(TextStreamer):
    """A growing text in the terminal, word by word, where it cannot act on it."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        print(visible(text), end="\n" * stream_end, flush=True)


def run(job: WritingJob) -> None:
    """Load the model and write the texts."""
    model = job.model.loaded(getattr(torch, job.dtype))
    total = len(job.prompts) * job.samples
    is_single = total == 1 and job.out is None
    stream = None
    if is_single and job.model.continues:
        stream = ScreenStream(job.model.tokenizer, skip_special_tokens=True)
    count = 0
    began = time.perf_counter()
    # Texts in a terminal show the progress themselves.
    hidden = job.out is None and (stream is not None or sys.stdout.isatty())
    texts = write(model, job, stream)
    if not hidden:
        texts = bar(sys.stderr, iterable=texts, total=total, unit="text")
    with job.out.open("x", encoding="utf-8") if job.out else nullcontext() as file:
        for written in texts:
            count += written.tokens
            if file is not None:
                record = asdict(written)
                if written.ended is None:
                    del record["ended"]
                print(json.dumps(record, ensure_ascii=False), file=file, flush=True)
            elif stream is None:
                show(written, headed=not is_single)
    seconds = time.perf_counter() - began
    said = f"{counted(total, 'text')}, {count:,} tokens in {seconds:.2f} s: {count / seconds:,.0f} tokens/s"
    kept = f"; written to {job.out}" if job.out else ""
    terminal.say(said + kept, sys.stderr)


def show(written: WrittenText, *, headed: bool) -> None:
    """Print one text, under a heading with its prompt and the reason for its end if it is `headed`."""
    if headed:
        which = f", sample {written.sample + 1}, ended by {written.ended}"
        prompt = visible(written.prompt[:40])
        print(f"--- {prompt}{which * (written.ended is not None)}")
    print(visible(written.text), flush=True)
