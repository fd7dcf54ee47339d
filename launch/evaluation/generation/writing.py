"""What a model makes of encoded prompts, batch after batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from launch.evaluation.generation.prompts import EncodedPrompt
from launch.evaluation.generation.trained_model import TrainedModel
from modeling.generation import (
    CONTINUED_TOKENS,
    DEFAULT_SAMPLING,
    Ended,
    Request,
    Sampling,
    continue_all,
    fill_masks,
)


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
