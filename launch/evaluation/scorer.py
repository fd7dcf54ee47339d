"""Likelihoods of tokens, and greedy continuations, by a GPT on one process or under tensor parallelism.

A window's loss is the negative log-likelihood of each of its targets. A vocabulary split over tensor-parallel
ranks stays split. Logits start at the first target that counts. The padding of a window depends only on its
own length and targets, and every batch is full. Layout and batch therefore change figures only by rounding.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from data.tasks.windows import Window
from ds_configs.plan import Plan
from launch.console.progress import bar
from launch.ranks import ending, processes
from launch.ranks.processes import gathered
from launch.ranks.watchdog import Phase, Watchdog
from launch.training.build_model import build_module
from launch.weights.foreign_weights import read
from modeling.initialization import DTYPES
from modeling.layer_list import Stack
from modeling.parallel.cross_entropy import likeliest_tokens, token_scores
from modeling.parallel.process_grid import Group, ProcessGrid
from modeling.unpadding import round_up
from recipes.problems import ProblemsError

LENGTH_MULTIPLE = 32  # padding of windows and of their logits
# steps between barriers of data-parallel ranks, which reveal a hanging rank
MEETING = 16


@dataclass(frozen=True)
class WindowScore:
    """Score of a window: summed loss in nats, number of correct targets, and whether the last is correct."""

    nll: float
    right: int
    last_right: bool


class ScoringStep(NamedTuple):
    """Windows scored together by all ranks."""

    windows: Sequence[int]  # indices, rank after rank, filled up with the last window
    length: int  # of the padded windows
    scored: int  # number of last positions with logits


def load_model(plan: Plan, grid: ProcessGrid, weights: str | None) -> Stack:
    """Build this rank's part of the model from a directory of weights; None draws them. Collective."""
    from deepspeed.accelerator import get_accelerator

    given = None if weights is None else read(weights, plan.recipe)
    model = build_module(plan, grid, given)
    assert isinstance(model, Stack), "a plan without pipeline stages"
    model.loss = _scores
    return model.to(
        get_accelerator().current_device_name(), DTYPES[plan.precision]
    ).eval()


def _scores(logits: Tensor, labels: Tensor, weights: Tensor, group: Group) -> Tensor:
    """Return (2, B, scored): losses in nats, and 1 where the label is the likeliest token."""
    losses, likeliest = token_scores(logits, labels, group)
    return torch.stack([losses, likeliest.to(losses.dtype)])


@dataclass
class Scorer:
    """A model that scores windows of tokens and continues prompts. Its methods are collective.

    Attributes:
        model: of `load_model`.
        watchdog: is told of each step.
        title: of the progress bar.
        border: the token that begins a document, for a model with borders; None: it has none.
    """

    model: Stack
    plan: Plan
    grid: ProcessGrid
    watchdog: Watchdog
    title: str = ""
    border: int | None = None

    @torch.no_grad()
    def score(self, windows: Sequence[Window]) -> list[WindowScore]:
        """Score every window; return all scores on every rank.

        Raises ProblemsError if ranks have different windows, and Failed if losses are not finite.
        """
        self._compare(windows)
        micro = self.plan.layout.micro
        rank = self.grid.at.dp
        own: dict[int, WindowScore] = {}
        shown: Any = nullcontext()
        if processes.rank() == 0:
            shown = bar(sys.stderr, total=len(windows), unit="window", desc=self.title)
        with shown as progress:
            for number, step in enumerate(
                steps_of(windows, micro * self.grid.dp, self.plan), 1
            ):
                self.watchdog.enter(Phase.DATA, number)
                indices = step.windows[rank * micro : (rank + 1) * micro]
                tensors = _tensors([windows[i] for i in indices], step)
                self.watchdog.enter(Phase.COMPUTING)
                self.model.last_positions = step.scored
                places = self._places(tensors[0])
                moved = [each.to(self._device) for each in tensors]
                scores = self.model(*moved, places=places).cpu()
                self.watchdog.enter(Phase.COMPUTED)
                if number % MEETING == 0:
                    dist.barrier(self.grid.control_group)
                for i, row in zip(indices, scores.unbind(1), strict=True):
                    own[i] = _window_score(windows[i], row, step)
                if progress is not None:
                    progress.update(len(set(step.windows)))
        return self._finite(self._everyones(own, dict[int, WindowScore]))

    def _compare(self, windows: Sequence[Window]) -> None:
        total = 0
        for window in windows:
            total = zlib.crc32(window.counted.to_bytes(4, "little"), total)
            total = zlib.crc32(window.tokens.astype("int64").tobytes(), total)
        forms = len(set(gathered(total, self.grid.control_group)))
        if forms > 1:
            came = f"ranks read {forms} different forms of the text"
            rule = "all of them score the same windows"
            fix = "make the machines' files and libraries equal"
            raise ProblemsError.of("--data", came, rule, fix)

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _places(self, tokens: Tensor) -> Any:
        """Return the row of the documents in windows (B, length), or None without borders."""
        if self.border is None:
            return None
        from data.samples.documents import places_in_documents
        from modeling.documents import row_of_documents

        places = torch.from_numpy(places_in_documents(tokens.numpy(), self.border))
        return row_of_documents(places, self._device)

    def _everyones(self, own: dict[int, Any], form: Any) -> list[Any]:
        """Return the values of all ranks in the order of their numbers."""
        found: dict[int, Any] = {}
        for each in gathered(own, self.grid.control_group, form):
            found |= each
        # a rank that has already left must not count as hanging
        self.watchdog.enter(Phase.SAVING)
        dist.barrier(self.grid.control_group)
        return [found[number] for number in range(len(found))]

    def _finite(self, scores: list[WindowScore]) -> list[WindowScore]:
        odd = sum(not math.isfinite(each.nll) for each in scores)
        if odd:
            fix = (
                ""
                if self.plan.precision == "fp32"
                else "; --precision fp32 has more room"
            )
            came = f"{odd} of {len(scores)} windows have a loss that is no number in {self.plan.precision}"
            raise ending.Failed(f"{came}{fix}")
        return scores

    @torch.no_grad()
    def continue_greedily(
        self,
        prompts: Sequence[Sequence[int]],
        window: int,
        ended: Callable[[int, list[int]], bool],
    ) -> list[list[int]]:
        """Return the likeliest tokens after each prompt, on every rank.

        Each token is computed from the last `window` tokens. `ended(number of the prompt, its new tokens)`
        returns True for a finished text.
        """
        own: dict[int, list[int]] = {}
        numbers = range(self.grid.at.dp, len(prompts), self.grid.dp)
        alike = sorted(numbers, key=lambda number: len(prompts[number]))
        micro = self.plan.layout.micro
        for at in range(0, len(alike), micro):
            new: dict[int, list[int]] = {
                number: [] for number in alike[at : at + micro]
            }
            own |= new
            while going := [
                number for number, tokens in new.items() if not ended(number, tokens)
            ]:
                self.watchdog.enter(Phase.COMPUTING)
                texts = [[*prompts[number], *new[number]][-window:] for number in going]
                for number, token in zip(going, self._next_tokens(texts), strict=True):
                    new[number].append(token)
                new = {number: new[number] for number in going}
        return self._everyones(own, dict[int, list[int]])

    def _next_tokens(self, texts: Sequence[list[int]]) -> list[int]:
        lengths = [len(text) for text in texts]
        length = min(
            self.plan.recipe.positions, round_up(max(lengths), LENGTH_MULTIPLE)
        )
        tokens = torch.zeros((len(texts), length), dtype=torch.int64)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = torch.tensor(text)
        first = min(lengths) - 1  # position with logits
        self.model.last_positions = length - first
        logits = self.model(tokens.to(self._device), places=self._places(tokens))
        last = torch.tensor(lengths, device=logits.device) - 1 - first
        rows = torch.arange(len(texts), device=logits.device)
        chosen = likeliest_tokens(logits[rows, last][:, None], self.model.group)
        return chosen.flatten().tolist()


def steps_of(
    windows: Sequence[Window], together: int, plan: Plan
) -> Iterator[ScoringStep]:
    """Group windows of the same padded length and logits, the longest first, `together` at a time."""
    multiple = math.lcm(LENGTH_MULTIPLE, plan.layout.tp)
    alike: dict[tuple[int, int], list[int]] = {}
    for index, window in enumerate(windows):
        length = min(plan.recipe.positions, round_up(window.length, multiple))
        needed = length - (window.length - window.counted)
        alike.setdefault(
            (length, min(length, round_up(needed, LENGTH_MULTIPLE))), []
        ).append(index)
    for (length, scored), indices in sorted(alike.items(), reverse=True):
        for at in range(0, len(indices), together):
            part = indices[at : at + together]
            yield ScoringStep(
                [*part, *[part[-1]] * (together - len(part))], length, scored
            )


def _tensors(
    windows: Sequence[Window], step: ScoringStep
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens (B, length), and labels and weights (B, scored)."""
    tokens = torch.zeros((len(windows), step.length), dtype=torch.int64)
    labels = torch.zeros_like(tokens)
    for row, window in enumerate(windows):
        taken = torch.from_numpy(window.tokens.astype("int64"))
        tokens[row, : window.length] = taken[:-1]
        labels[row, : window.length] = taken[1:]
    labels = labels[:, -step.scored :]
    return tokens, labels, torch.ones(labels.shape)


def _window_score(window: Window, scores: Tensor, step: ScoringStep) -> WindowScore:
    """Sum the scores (2, scored) of a window over the targets that count."""
    last = window.length - (step.length - step.scored)
    losses, right = scores[:, last - window.counted : last].double().tolist()
    return WindowScore(math.fsum(losses), int(sum(right)), bool(right[-1]))
