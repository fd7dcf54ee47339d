"""Prompts as they are typed or stand in a file, and as tokens that the model takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from launch.evaluation.generation.trained_model import TrainedModel
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
