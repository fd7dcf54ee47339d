"""Published scores, which a score stands next to. The one place that holds them."""

from __future__ import annotations

from dataclasses import dataclass

from data.tasks.task_data import TaskName

MEGATRON = "Shoeybi et al. 2019, arXiv 1909.08053, table 5"
# In the words of appendix E.2; Megatron-LM's README calls it a detokenized, processed version.
MEGATRON_LAMBADA = f'{MEGATRON}, on "raw, unprocessed" text'


@dataclass(frozen=True)
class PublishedScore:
    """A figure as printed.

    Attributes:
        figure: its name in `figures`.
        value: a share of 1 where it is printed in percent.
    """

    model: str
    task: TaskName
    figure: str
    value: float
    printed: str
    source: str = MEGATRON


def _megatron(model: str, perplexity: str, accuracy: str) -> tuple[PublishedScore, ...]:
    """WikiText-103 perplexity, and LAMBADA accuracy in percent."""
    return (
        PublishedScore(model, "wikitext103", "perplexity", float(perplexity), perplexity),
        PublishedScore(
            model, "lambada", "accuracy", round(float(accuracy) / 100, 6), f"{accuracy} %", MEGATRON_LAMBADA
        ),
    )


PUBLISHED: tuple[PublishedScore, ...] = (
    *_megatron("GPT-2 355M (Megatron-LM)", "19.31", "45.18"),
    *_megatron("GPT-2 2.5B (Megatron-LM)", "12.76", "61.73"),
    *_megatron("GPT-2 8.3B (Megatron-LM)", "10.81", "66.51"),
    *_megatron("best before it", "15.79", "63.24"),
)


def published_next_to(task: str) -> tuple[PublishedScore, ...]:
    """Those of the same task."""
    return tuple(each for each in PUBLISHED if each.task == task)
