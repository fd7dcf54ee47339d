"""Read and encode prompts, and write texts with a trained model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launch.evaluation.trained_model import TrainedModel
from modeling.generation import EndReason, Request, Sampling, continue_all, fill_masks
from recipes import files
from recipes.families import FAMILIES
from recipes.problems import MOST, Problem, ProblemsError

JSON_LINES = ".jsonl"
FIELD = "prompt"


@dataclass(frozen=True)
class Prompt:
    """One prompt. `where`: its flag, or file and line; `tokens`: once encoded, a BERT's with [CLS], [SEP]."""

    text: str
    where: str
    tokens: tuple[int, ...] = ()


def typed(texts: Sequence[str]) -> list[Prompt]:
    """Take the prompts of --prompt. Raises ProblemsError for one that is not Unicode."""
    prompts = [Prompt(text, f"--prompt {text[:40]!r}") for text in texts]
    halves = re.compile("[\ud800-\udfff]")  # of surrogate pairs: bytes that are no UTF-8
    wrong = [prompt.where for prompt in prompts if halves.search(prompt.text)]
    if wrong:
        raise ProblemsError(
            Problem("--prompt", "is not UTF-8", "a prompt is text", "", each) for each in wrong
        )
    return prompts


def read(file: str) -> list[Prompt]:
    """Read the prompts of a file, without blank ones: its lines, or the "prompt" of each JSON line.

    Raises FileError with the problems of the file and of all lines.
    """
    path, found, problems = files.path_of(file, "--file"), list[Prompt](), list[Problem]()
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
        came = f"its {FIELD} is {files.named_kind(text)}" if text is not None else f'has no "{FIELD}"'
        files.refuse(path, came, f'a line is {{"{FIELD}": "text"}}, and may have more', "", number)
    return text


def encode(prompts: Sequence[Prompt], model: TrainedModel) -> list[Prompt]:
    """Encode all prompts. Raises ProblemsError with every prompt unfit for the model."""
    # Masked models need [CLS] and [SEP]; verbose would warn about lengths that are refused here anyway.
    how: dict[str, Any] = dict(add_special_tokens=not model.continues, verbose=False)
    encoded = [replace(each, tokens=tuple(model.tokenizer.encode(each.text, **how))) for each in prompts]
    if problems := [problem for prompt in encoded for problem in _unfit(prompt, model)]:
        raise ProblemsError(_first(problems, prompts[0].where.partition(":")[0]))
    return encoded


def _unfit(prompt: Prompt, model: TrainedModel) -> Iterator[Problem]:
    positions, family, tokens = model.recipe.positions, model.recipe.model.family, prompt.tokens
    if not prompt.text.strip() or not tokens:
        fix = f"give some text, such as {FAMILIES[family].prompt!r}"
        yield Problem("--prompt", "is empty", "there is nothing to go on with", fix, where=prompt.where)
    elif len(tokens) > positions:
        came, rule = f"has {len(tokens):,} tokens", f"the model has {positions:,} positions (model.positions)"
        yield Problem("--prompt", came, rule, "shorten it", where=prompt.where)
    elif not model.continues and model.tokenizer.mask_token_id not in tokens:
        mask = model.tokenizer.mask_token
        rule, fix = "a BERT fills in masks, and writes nothing else", f"write {mask} for a missing token"
        yield Problem("--prompt", f"has no {mask}", rule, fix, where=prompt.where)


def _first(problems: list[Problem], where: str) -> list[Problem]:
    """Return the first problems, and the number of the others."""
    more = len(problems) - MOST
    left = [Problem("--file", f"{more:,} more lines are wrong", where=where)] if more > 0 else []
    return [*problems[:MOST], *left]


@dataclass(frozen=True)
class Settings:
    """Settings of the generation. `tokens`: largest number after each prompt; `batch`: samples at a time.

    `sampling`: None takes the most likely token.
    """

    tokens: int
    samples: int
    sampling: Sampling | None
    seed: int
    batch: int
    cached: bool


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
        return own if self.ended is None else {**own, "sample": self.sample, "ended": self.ended}


def write(
    model: Any,
    trained: TrainedModel,
    prompts: Sequence[Prompt],
    settings: Settings,
    heard: Callable[[Sequence[int]], None],
) -> Iterator[WrittenText]:
    """Generate all samples of all prompts in order. Collective over the model's tensor group.

    `heard` receives all tokens of the growing text, with its prompt, if there is only one sample.
    """
    if not trained.continues:
        yield from _fill(model, trained, prompts)
        return
    order = [(number, sample) for number in range(len(prompts)) for sample in range(settings.samples)]
    tokenizer = trained.tokenizer
    for first in range(0, len(order), settings.batch):
        places = order[first : first + settings.batch]
        so_far = [*prompts[places[0][0]].tokens]

        def hear(request: int, token: int, so_far: list[int] = so_far) -> None:
            so_far.append(token)
            if len(order) == 1:
                heard(so_far)

        requests = [Request(prompts[number].tokens, sample) for number, sample in places]
        made = continue_all(
            model, requests, settings.tokens, sampling=settings.sampling, seed=settings.seed,
            end=tokenizer.eos_token_id, cached=settings.cached, heard=hear,
        )  # fmt: skip
        for (number, sample), more in zip(places, made, strict=True):
            prompt = prompts[number]
            text = str(tokenizer.decode([*prompt.tokens, *more.tokens]))
            new = str(tokenizer.decode([*more.tokens]))
            yield WrittenText(number, sample, prompt.text, text, new, len(more.tokens), more.ended)


def _fill(model: Any, trained: TrainedModel, prompts: Sequence[Prompt]) -> Iterator[WrittenText]:
    tokenizer, mask = trained.tokenizer, trained.tokenizer.mask_token_id
    for number, prompt in enumerate(prompts):
        tokens = fill_masks(model, prompt.tokens, mask=mask)
        new = [token for token, before in zip(tokens, prompt.tokens, strict=True) if before == mask]
        text, words = tokenizer.decode(tokens, skip_special_tokens=True), tokenizer.convert_ids_to_tokens(new)
        assert isinstance(text, str)
        yield WrittenText(number, 0, prompt.text, text, " ".join(words), len(new), None)
