"""A trial of a config's model, small and before training, for what would silently be other than said."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch.nn import functional as F

from data.text.ready_made_vocabulary import ready_made
from ds_configs.findings import Notice
from modeling.formats.huggingface import auto_model
from recipes.problems import Problem, ProblemsError, some
from recipes.schema import Recipe
from recipes.transformers_config import KEY, shrunk

MOST_LAYERS = 4
HEADS = 2
VOCABULARY = 40
LENGTH = 12  # tokens of a sample
LONGEST = 4096  # positions that are tried
STD = 0.3  # of its weights, so that what a position sees changes what it says
# numbers of a config that are told, but for those of tasks
_TOLD = re.compile("(?!.*(class|qa|summary)).*(drop|init)")


def check(recipe: Recipe) -> Notice:
    """Try the model, and return a remark on it. Raises ProblemsError with all that is other than said."""
    numbers = ""
    try:
        config, small = _made(recipe)
        for key, value in config.items():
            if type(value) is float and value and _TOLD.match(key):
                numbers += f", {key}={value:g}"
        with torch.random.fork_rng(devices=()):
            faults = [*_seen(small, recipe), *_trained(small, recipe)]
    except ProblemsError:  # of the vocabulary
        raise
    except Exception as error:  # of transformers, of any type
        said = " ".join(str(error).split())[:200]
        faults = [f"transformers runs no small model of it ({said})"]
    if "layerdrop" in numbers:
        faults.append("each rank would leave out other layers (layerdrop)")
    if faults:
        fix = f"correct {KEY}, or give another one"
        problems = [Problem(KEY, f"{KEY}: {fault}", fix=fix) for fault in faults]
        raise ProblemsError(problems)
    kind = f"{small.config.model_type} of transformers {transformers.__version__}"
    own = "its initial weights and dropout, and the vocabulary's special tokens"
    said = f"{KEY}: {kind}, with {own}{numbers}"
    return Notice("model", said, differs=False)


def _made(recipe: Recipe) -> tuple[dict[str, Any], Any]:
    """Return all keys of the config, and a small model of it."""
    model = recipe.model
    settings = recipe.data.tokenizer
    tokens: dict[str, int | None] = {}
    # the others pad with token 0, if at all
    if settings.kind in ("file", "store"):
        tokenizer = ready_made(settings, recipe.data.origins)
        tokens = auto_model.special_tokens(model, tokenizer)
    layers = min(MOST_LAYERS, model.layers)
    hidden = HEADS * model.hidden // model.heads
    sizes = dict(layers=layers, hidden=hidden, heads=HEADS, vocab_size=VOCABULARY)
    config = auto_model.config_of(model, tokens).to_dict()
    few = {
        key: number and min(number, VOCABULARY - 1) for key, number in tokens.items()
    }
    changed = {**sizes, "config": shrunk(config, sizes)}
    little = model.model_copy(update=changed)
    return config, auto_model.drawn(little, auto_model.config_of(little, few), 0)


def _tokens(small: Any, length: int) -> torch.Tensor:
    """Return two samples without padding, whose tokens all differ from those before and after them."""
    pad = small.config.pad_token_id or 0
    rows = torch.arange(2)[:, None] + torch.arange(length)
    return (1 + rows % (VOCABULARY - 1) + pad) % VOCABULARY


def _differ(own: torch.Tensor, others: torch.Tensor) -> bool:
    return not torch.allclose(own, others, atol=1e-3)


@torch.no_grad()
def _seen(small: Any, recipe: Recipe) -> Iterator[str]:
    """Name the tokens that positions see, and should not, or the other way round."""
    masked = recipe.model.facts.masked
    small.eval()
    torch.manual_seed(0)  # one config has one answer
    for parameter in small.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=STD)
    pad = small.config.pad_token_id or 0
    tokens = _tokens(small, LENGTH)
    other = tokens.clone()
    other[:, -1] = other[:, 0]
    logits = small(tokens).logits
    if _differ(small(other).logits[:, :-1], logits[:, :-1]) != masked:
        which = "no position sees" if masked else "positions see"
        yield f"{which} later tokens, and it would train as a {recipe.model.facts.title}"
    if _differ(small(tokens[:1]).logits, logits[:1]):
        yield "a sample changes what it says of another"
    mask = F.pad(torch.ones_like(tokens), (0, 4))
    longer = F.pad(tokens, (0, 4), value=pad)
    padded = small(longer, attention_mask=mask).logits
    if _differ(padded[:, :LENGTH], logits):
        yield "its positions see padding"
    length = recipe.sequence_length
    try:
        small(_tokens(small, min(length, LONGEST))[:1])
    except (IndexError, RuntimeError):
        yield f"sequence_length={length} is above its positions (RoBERTa's begin after its pad_token_id)"


def _trained(small: Any, recipe: Recipe) -> Iterator[str]:
    """Name each part of the loss, the weights and the state that training here would lose."""
    small.train()
    tokens = _tokens(small, LENGTH)
    losses = []
    for _ in range(2):
        torch.manual_seed(0)
        outcome = small(tokens, labels=tokens)
        losses.append(outcome.loss)
    shift = 0 if recipe.model.facts.masked else 1
    predicted = outcome.logits[:, : LENGTH - shift].flatten(0, 1)
    own = F.cross_entropy(predicted, tokens[:, shift:].flatten())
    if _differ(*losses):
        yield "torch's generator does not decide its dropout, and no resume could repeat it"
    elif _differ(own, losses[-1]):
        yield "its loss has terms beside the cross-entropy (output_router_logits), which would be left out"
    own.backward()
    named = dict(small.named_parameters(remove_duplicate=False))
    still = [name for name in named if named[name].grad is None]
    if still:
        yield f"nothing trains {some(still, 3)}, and weight decay would shrink them"
    kept = [name for name in small.state_dict() if name not in named]
    if kept:
        yield f"checkpoints here would lose its {some(kept, 3)}, which are no parameters"
    if recipe.checkpoint_interval:
        small.gradient_checkpointing_enable()
