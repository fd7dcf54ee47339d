"""Read and encode prompts, and write texts with a trained model."""

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
    EndReason,
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
    """One prompt. `where`: its flag, or its file and line."""

    text: str
    where: str


@dataclass(frozen=True)
class EncodedPrompt:
    """A valid prompt as tokens; for a BERT with [CLS] and [SEP]."""

    text: str
    tokens: tuple[int, ...]


def typed(texts: Sequence[str]) -> list[Prompt]:
    return [Prompt(text, f"--prompt {text[:40]!r}") for text in texts]


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


def encode(prompts: Sequence[Prompt], model: TrainedModel) -> list[EncodedPrompt]:
    """Encode all prompts. Raises ProblemsError with every prompt unfit for the model."""
    encoded = [(prompt, _tokens(prompt.text, model)) for prompt in prompts]
    if problems := [each for prompt, tokens in encoded for each in _unfit(prompt, tokens, model)]:
        raise ProblemsError(_first(problems, prompts[0].where.partition(":")[0]))
    return [EncodedPrompt(prompt.text, tokens) for prompt, tokens in encoded if tokens is not None]


def _tokens(text: str, model: TrainedModel) -> tuple[int, ...] | None:
    """Return the tokens of a text; None if it is not valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return None
    tokenizer: PreTrainedTokenizerFast = model.tokenizer
    # Masked models need [CLS] and [SEP]; verbose would warn about lengths that are refused here anyway.
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
    """Return the first problems, and the number of the others."""
    more = len(problems) - MOST
    left = [Problem("--file", f"{more:,} more lines are wrong", where=where)] if more > 0 else []
    return [*problems[:MOST], *left]


@dataclass(frozen=True)
class Settings:
    """Settings of the generation.

    Attributes:
        tokens: largest number after each prompt.
        sampling: None takes the most likely token.
        batch: samples at a time.
    """

    tokens: int = CONTINUED_TOKENS
    samples: int = 1
    sampling: Sampling | None = DEFAULT_SAMPLING
    seed: int = 0
    batch: int = 8
    cached: bool = True


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


Heard = Callable[[Sequence[int]], None]  # receives all tokens of a text so far, with its prompt


def write(
    model: Any,
    trained: TrainedModel,
    prompts: Sequence[EncodedPrompt],
    settings: Settings,
    heard: Heard = lambda tokens: None,
) -> Iterator[WrittenText]:
    """Generate all samples of all prompts in order. Collective over the model's tensor group.

    `heard` receives the growing text if there is only one sample.
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


def _fill(model: Any, trained: TrainedModel, prompts: Sequence[EncodedPrompt]) -> Iterator[WrittenText]:
    tokenizer, mask = trained.tokenizer, trained.tokenizer.mask_token_id
    for number, prompt in enumerate(prompts):
        tokens = fill_masks(model, prompt.tokens, mask=mask)
        new = [token for token, before in zip(tokens, prompt.tokens, strict=True) if before == mask]
        text, words = tokenizer.decode(tokens, skip_special_tokens=True), tokenizer.convert_ids_to_tokens(new)
        assert isinstance(text, str)
        yield WrittenText(number, 0, prompt.text, text, " ".join(words), len(new), None)
