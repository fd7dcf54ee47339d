"""Text from a model in `transformers`' form: GPT-2 continues a prompt, BERT fills in its masks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedTokenizerFast
from transformers.generation.logits_process import (
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer
from transformers.initialization import no_init_weights

from modeling.families import conversion_of
from recipes.families import Window
from recipes.schema import Recipe

CONTINUED_TOKENS = 80
# "length": it has the requested length; "end": the end token came; "positions": the model has no more.
EndReason = Literal["length", "end", "positions"]


@dataclass(frozen=True)
class Sampling:
    """How the next token's distribution is narrowed, in the words of `transformers`.

    Attributes:
        temperature: logits are divided by it; above 0.
        top_k: number of tokens to draw from, the most likely ones; None: all.
        top_p: least sum of the probabilities of the tokens to draw from (Holtzman et al., arXiv 1904.09751).
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def warpers(self) -> LogitsProcessorList:
        """Return the processors of `transformers` that set all but the tokens to draw from to -inf."""
        processors = LogitsProcessorList(
            [TemperatureLogitsWarper(float(self.temperature))]
        )
        if self.top_k is not None:
            processors.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            processors.append(TopPLogitsWarper(self.top_p))
        return processors


DEFAULT_SAMPLING = Sampling(temperature=0.8, top_k=40)


@dataclass(frozen=True)
class Decoding:
    """How samples are written.

    Attributes:
        length: largest number of tokens after a prompt.
        end: the token that ends a text; None: none does.
        never: numbers that are no tokens, and never written.
        sampling: None takes the most likely token.
        seed: with a prompt and a sample's number it decides all of a text.
    """

    length: int
    end: int | None = None
    never: Sequence[int] = ()
    sampling: Sampling | None = None
    seed: int = 0


@dataclass(frozen=True)
class Continuation:
    """Tokens after a prompt, without the end token, and the reason why they end."""

    tokens: tuple[int, ...]
    ended: EndReason


def positions_of(recipe: Recipe) -> int:
    """Return the largest number of tokens to read at once.

    Those of a model by its config are surely the trained ones: RoBERTa needs two of its positions itself.
    """
    return recipe.sequence_length if recipe.model.config else recipe.positions


def in_transformers(
    recipe: Recipe,
    weights: Mapping[str, Tensor],
    dtype: torch.dtype = torch.float32,
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> Any:
    """Build the recipe's model as `transformers` has it, from canonical weights, on the CPU.

    A sparse GPT-2 is theirs with masks on its layers. `tokenizer`: a model by its config may read the numbers
    of special tokens. Memory holds the model once, and a tensor more. Raises
    ValueError for a family that `transformers` does not have.
    """
    model = recipe.model
    conversion = conversion_of(model)
    with no_init_weights():
        config = conversion.config(model, recipe.positions, tokenizer=tokenizer)
        made = conversion.model_class(model)(config)
    state: dict[str, Tensor] = {}
    for _, name, part in conversion.converted(weights, model):
        state[name] = part.to(dtype).contiguous()
    # either name may be the one that transformers ties the other to
    for copy, name in conversion.tied.items():
        state[copy] = state[name]
    made.load_state_dict(state, assign=True)
    made.tie_weights()
    made.positions = positions_of(recipe)
    made.sparse = any(window is not None for window in model.windows)
    for index, window in enumerate(model.windows):
        if window is not None:
            attention = made.transformer.h[index].attn
            attention.register_forward_pre_hook(partial(_see, window), with_kwargs=True)
    return made.eval()


def _see(
    window: Window, attention: Any, given: tuple[Tensor], named: dict[str, Any]
) -> tuple[Any, Any]:
    """Set the mask of a sparse layer, for samples without padding."""
    from modeling.sparse_attention import visible

    new = given[0].shape[1]
    kept = named["past_key_values"]
    before = 0 if kept is None else kept.get_seq_length(attention.layer_idx)
    keys = torch.arange(before + new, device=given[0].device)
    mask = visible(keys[before:, None], keys[None], window, attention.num_heads)
    return given, {**named, "attention_mask": mask[None]}


def continue_prompt(
    model: Any,
    tokenizer: PreTrainedTokenizerFast,
    prompt: str,
    seed: int,
    never: Sequence[int],
) -> str:
    """Return the prompt with a GPT-2's continuation, a function of the seed; `never`: see `Decoding`.

    The model sees only the end of a long prompt, so that positions are left for the continuation.
    """
    # A WordPiece vocabulary would add [CLS] and [SEP].
    tokens = tokenizer.encode(prompt, add_special_tokens=False) or [
        tokenizer.eos_token_id
    ]
    positions = model.positions
    seen = max(positions - CONTINUED_TOKENS, positions // 2, 1)
    how = Decoding(
        CONTINUED_TOKENS, tokenizer.eos_token_id, never, DEFAULT_SAMPLING, seed
    )
    (more,) = continued(model, tokens[-seen:], how)
    return str(tokenizer.decode([*tokens, *more.tokens]))


def fill_prompt(
    model: Any,
    tokenizer: PreTrainedTokenizerFast,
    prompt: str,
    seed: int,
    never: Sequence[int],
) -> str:
    """Return the prompt with each [MASK] filled in by a BERT; nothing is drawn, so `seed` is not used."""
    tokens = tokenizer.encode(prompt)[: model.positions]
    filled = fill_masks(model, tokens, tokenizer.mask_token_id, never)
    return str(tokenizer.decode(filled, skip_special_tokens=True))


def continued(
    model: Any,
    prompt: Sequence[int],
    how: Decoding,
    samples: int = 1,
    streamer: BaseStreamer | None = None,
) -> list[Continuation]:
    """Continue a prompt with a GPT-2, all samples at once. `streamer` hears the tokens of a lone one.

    A prompt has at least 1 token and at most as many as the model has positions. A text ends at the model's
    last position, after the token predicted there. Raises FloatingPointError for logits that are not finite.
    """
    limit = min(how.length, model.positions - len(prompt) + 1)
    processors = LogitsProcessorList([partial(_check_finite, model.dtype)])
    if how.never:
        processors.append(
            SuppressTokensLogitsProcessor([*how.never], device=model.device)
        )
    if how.sampling is not None:
        numbers = [uniform_numbers(how.seed, prompt, each) for each in range(samples)]
        processors += [*how.sampling.warpers(), Draw(numbers)]
    tokens = torch.tensor([list(prompt)] * samples, device=model.device)
    texts = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        do_sample=False,  # `Draw` leaves one token
        max_new_tokens=limit,
        eos_token_id=how.end,
        pad_token_id=0,
        logits_processor=processors,
        streamer=streamer,
    )
    cut_by: EndReason = "length" if limit == how.length else "positions"
    continuations = []
    for text in texts[:, len(prompt) :].tolist():
        if how.end in text:
            continuations.append(
                Continuation(tuple(text[: text.index(how.end)]), "end")
            )
        else:
            continuations.append(Continuation(tuple(text), cut_by))
    return continuations


def uniform_numbers(
    seed: int, prompt: Sequence[int], sample: int
) -> np.random.Generator:
    """Return the generator for one sample's tokens, a function of seed, prompt and the sample's number.

    So a text depends neither on the other samples nor on the file of its prompt.
    """
    digest = hashlib.sha256(f"{seed}:{sample}:{list(prompt)}".encode()).digest()
    return np.random.Generator(
        np.random.Philox(key=int.from_bytes(digest[:16], "little"))
    )


class Draw:
    """A processor of logits: it draws a token for every sample and leaves no other.

    Each is the first token whose cumulative probability passes its sample's number. No generator of the
    device takes part, so that a CPU and a GPU draw alike.
    """

    def __init__(self, generators: Sequence[np.random.Generator]):
        self._generators = generators

    def __call__(self, tokens: Tensor, logits: Tensor) -> Tensor:
        numbers = [[generator.random()] for generator in self._generators]
        uniform = torch.tensor(numbers, dtype=torch.float64, device=logits.device)
        sums = logits.softmax(-1).double().cumsum(-1)
        drawn = torch.searchsorted(sums, uniform * sums[:, -1:], right=True)
        return torch.full_like(logits, -torch.inf).scatter(1, drawn, 0.0)


def _check_finite(dtype: torch.dtype, tokens: Tensor, logits: Tensor) -> Tensor:
    """Return the logits. Raises FloatingPointError if one is NaN or infinite: no token follows from it."""
    if not logits.isfinite().all():
        raise FloatingPointError(f"the model's logits are not finite in {dtype}")
    return logits


@torch.no_grad()
def fill_masks(
    model: Any, tokens: Sequence[int], mask: int, never: Sequence[int] = ()
) -> list[int]:
    """Replace each `mask` in `tokens` ([CLS] ... [SEP]) by its most likely token, the surest one first.

    `never`: numbers that are no tokens. Raises FloatingPointError for logits that are not finite.
    """
    filled = torch.tensor([list(tokens)], device=model.device)
    while (masked := (filled == mask).nonzero()[:, 1]).numel():
        outcome = model(input_ids=filled)
        logits = outcome.logits if "logits" in outcome else outcome.prediction_logits
        scores = _check_finite(model.dtype, filled, logits[0, masked].float())
        scores[:, [mask, *never]] = -torch.inf
        surest = scores.softmax(-1).amax(-1).argmax()
        filled[0, masked[surest]] = scores[surest].argmax()
    return filled[0].tolist()
