"""From the scores of windows to the figures of a task."""

from __future__ import annotations

import math
from collections.abc import Sequence

from data.tasks.windows import TaskData
from launch.evaluation.scoring import WindowScore

LARGEST_EXPONENT = 700.0  # of e, in float64


def figures(data: TaskData, scores: Sequence[WindowScore]) -> dict[str, float]:
    """The task's figures by name, the one that it is known by first."""
    nll = math.fsum(score.nll for score in scores)
    right, tokens = sum(score.right for score in scores), data.tokens
    per_token = {
        "loss_per_token": nll / tokens,
        "perplexity_per_token": _exponential(nll / tokens),
        "accuracy_per_token": right / tokens,
    }
    if data.task == "lambada":
        whole = sum(s.right == w.counted for s, w in zip(scores, data.windows, strict=True))
        return {
            "accuracy": whole / len(scores),
            "perplexity_of_last_word": _exponential(nll / len(scores)),
            "accuracy_of_last_token": sum(score.last_right for score in scores) / len(scores),
            **per_token,
        }
    of_text = {}
    if data.words is not None:
        of_text = {
            "perplexity_per_word": _exponential(nll / data.words),
            "tokens_per_word": tokens / data.words,
        }
    if data.bytes is not None:
        of_text["bits_per_byte"] = nll / data.bytes / math.log(2)
    first = "per_word" if data.task == "wikitext103" else "per_token"
    every = {**of_text, **per_token}
    return {"perplexity": every[f"perplexity_{first}"], **every}


def _exponential(nats: float) -> float:
    return math.exp(min(nats, LARGEST_EXPONENT))
