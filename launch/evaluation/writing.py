"""Prompts as they are typed or stand in a file, as tokens, and what a model makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from launch.evaluation.trained_model import TrainedModel
from modeling.generation import (
    CONTINUED_TOKENS,
    DEFAULT_SAMPLING,
    Ended,
    Request,
    Sampling,
    continue_all,
    fill_masks,
)
from recipes import files
from recipes.families import FAMILIES
from recipes.problems import MOST, Problem, ProblemsError

JSON_LINES = ".jsonl"
FIELD = "prompt"


@dataclass(frozen=True)
class Prompt:
    """One prompt. `where`: the flag, or file and line, that it comes from."""

    text: str
    where: str


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt that the model takes. `tokens`: of a BERT with [CLS] and [SEP]."""

    text: str
    tokens: tuple[int, ...]


def typed(texts: Sequence[str]) -> list[Prompt]:
    return [Prompt(text, f"--prompt {text[:40]!r}") for text in texts]


def read(file: str) -> list[Prompt]:
    """The prompts of a file: its lines, or of JSON lines the "prompt" of each; blank ones are left out.

    Raises FileError: what is wrong with the file, or with any of its lines.
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
        form = (
            f'lines of JSON, {{"{FIELD}": "text"}}' if path.suffix == JSON_LINES else "a prompt in each line"
        )
        files.refuse(path, "holds no prompt", f"it has {form}")
    return found


def _field(line: str, path: Path, number: int) -> str:
    record = files.parse_json(line, path, number)
    text = record.get(FIELD) if isinstance(record, dict) else None
    if not isinstance(text, str):
        came = f"its {FIELD} is {files.named_kind(text)}" if text is not None else f'has no "{FIELD}"'
        files.refuse(path, came, f'a line is {{"{FIELD}": "text"}}, and may have more', "", number)
    return text


def encode(prompts: Sequence[Prompt], model: TrainedModel) -> list[EncodedPrompt]:
    """All prompts as tokens. Raises ProblemsError with those that the model cannot take."""
    encoded = [(prompt, _tokens(prompt.text, model)) for prompt in prompts]
    problems = [
        problem for prompt, tokens in encoded for problem in _unfit(prompt, tokens, model)
    ]  # of all of them, not of the first
    if problems:
        raise ProblemsError(_first(problems, prompts[0].where.partition(":")[0]))
    return [EncodedPrompt(prompt.text, tokens) for prompt, tokens in encoded if tokens is not None]


def _tokens(text: str, model: TrainedModel) -> tuple[int, ...] | None:
    """None: the text is no Unicode, which no vocabulary takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return None
    tokenizer: PreTrainedTokenizerFast = model.tokenizer
    # What fills in masks was trained between [CLS] and [SEP]; verbose says what is refused here anyway.
    return tuple(tokenizer.encode(text, add_special_tokens=not model.continues, verbose=False))


def _unfit(prompt: Prompt, tokens: tuple[int, ...] | None, model: TrainedModel) -> Iterator[Problem]:
    positions, family = model.recipe.positions, model.recipe.model.family
    if tokens is None:
        yield Problem("--prompt", "is not UTF-8", "a prompt is text", where=prompt.where)
    elif not prompt.text.strip() or not tokens:
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
    """The first of them, and how many more there are."""
    more = len(problems) - MOST
    left = [Problem("--file", f"{more:,} more lines are wrong", where=where)] if more > 0 else []
    return [*problems[:MOST], *left]


@dataclass(frozen=True)
class Settings:
    """How texts are written.

    Attributes:
        tokens: the most after each prompt.
        samples: of each prompt.
        sampling: None takes the most likely token.
        batch: samples that are written at a time.
        cached: keep keys and values of earlier tokens.
    """

    tokens: int = CONTINUED_TOKENS
    samples: int = 1
    sampling: Sampling | None = DEFAULT_SAMPLING
    seed: int = 0
    batch: int = 8
    cached: bool = True


@dataclass(frozen=True)
class Written:
    """One sample of one prompt.

    Attributes:
        number: of the prompt, from 0 on.
        text: the prompt and what follows it, or the prompt with its masks filled in.
        new: what follows it alone, or what the masks became, one after the other.
        tokens: how many of them the model chose.
        ended: why it goes no further; None: masks are filled in, which end by themselves.
    """

    number: int
    sample: int
    prompt: str
    text: str
    new: str
    tokens: int
    ended: Ended | None

    def record(self) -> dict[str, Any]:
        """As it is written in a file of JSON lines."""
        own = dict(prompt=self.prompt, text=self.text, new=self.new, tokens=self.tokens)
        return own if self.ended is None else {**own, "sample": self.sample, "ended": self.ended}


Heard = Callable[[Sequence[int]], None]  # all tokens of a text so far, its prompt's too


def write(
    model: Any,
    trained: TrainedModel,
    prompts: Sequence[EncodedPrompt],
    settings: Settings,
    heard: Heard = lambda tokens: None,
) -> Iterator[Written]:
    """All samples of all prompts in order. Collective over the model's tensor group.

    `heard`: the text of a lone sample as it grows.
    """
    if not trained.continues:
        yield from _filled(model, trained, prompts)
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
            yield Written(number, sample, prompt.text, text, new, len(more.tokens), more.ended)


def _filled(model: Any, trained: TrainedModel, prompts: Sequence[EncodedPrompt]) -> Iterator[Written]:
    tokenizer, mask = trained.tokenizer, trained.tokenizer.mask_token_id
    for number, prompt in enumerate(prompts):
        tokens = fill_masks(model, prompt.tokens, mask=mask)
        new = [token for token, before in zip(tokens, prompt.tokens, strict=True) if before == mask]
        text, words = tokenizer.decode(tokens, skip_special_tokens=True), tokenizer.convert_ids_to_tokens(new)
        assert isinstance(text, str)
        yield Written(number, 0, prompt.text, text, " ".join(words), len(new), None)
