"""Requests of lm-evaluation-harness as windows of tokens of a `Scorer`; knows nothing of lm-eval itself."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from data.tasks.windows import Window, encode_texts, full_context_windows
from data.text.encoder import Encoder, end_of_document
from launch.evaluation.scorer import Scorer, WindowScore
from launch.ranks import ending

MOST_NEW_TOKENS = 256  # of a text, where its task does not say
CutText = Callable[[np.ndarray], Iterator[Window]]  # (tokens) -> windows


class Likelihoods:
    """Log-likelihoods in nats, and greedy texts. Collective.

    Attributes:
        window: most tokens read at once.
        end: the end-of-document token.
        windows, scores: all that was scored so far.
        cut: requests so far of which only the last tokens were read.
    """

    def __init__(
        self,
        scorer: Scorer,
        tokenizer: Any,
        window: int,
        rolling: CutText | None = None,
    ):
        """`rolling`: cuts whole texts; None: as lm-eval does, from an end-of-document token on."""
        self.window = window
        self.end = end_of_document(tokenizer)
        self.windows: list[Window] = []
        self.scores: list[WindowScore] = []
        self.cut = 0
        self._scorer = scorer
        self._tokenizer = tokenizer
        self._encoder = Encoder(tokenizer)
        self._rolling = rolling or self._from_the_end_token

    def encode(self, text: str) -> list[int]:
        return encode_texts(self._encoder, [text])[0].tolist()

    def of_continuations(
        self, pairs: Sequence[tuple[list[int], list[int]]]
    ) -> list[tuple[float, bool]]:
        """Return for each (context, continuation) its log-likelihood, and True if all of it is the likeliest.

        Raises Failed for a continuation that is empty or longer than the window.
        """
        windows = []
        for context, continuation in pairs:
            if not 1 <= len(continuation) <= self.window:
                text = self._tokenizer.decode([*context, *continuation])[-60:]
                came = f"the continuation at the end of {text!r} has {len(continuation)} tokens of its own"
                raise ending.Failed(
                    f"{came}: between 1 and {self.window} (--window) can be scored"
                )
            tokens = np.array([*context, *continuation])
            self.cut += len(tokens) > self.window + 1
            windows.append(Window(tokens[-self.window - 1 :], len(continuation)))
        scores = self._scored(windows)
        return [
            (-s.nll, s.right == w.counted) for s, w in zip(scores, windows, strict=True)
        ]

    def of_texts(self, texts: Sequence[str]) -> list[float]:
        """Return the log-likelihood of each whole text."""
        encoded = encode_texts(self._encoder, texts)
        of_texts = [[*self._rolling(tokens)] for tokens in encoded]
        scores = iter(self._scored([*itertools.chain(*of_texts)]))
        found = []
        for windows in of_texts:
            found.append(-math.fsum(next(scores).nll for _ in windows))
        return found

    def _from_the_end_token(self, tokens: np.ndarray) -> Iterator[Window]:
        return full_context_windows(
            np.concatenate([[self.end], tokens]), self.window, self.window
        )

    def _scored(self, windows: Sequence[Window]) -> list[WindowScore]:
        found = self._scorer.score(windows)
        self.windows += windows
        self.scores += found
        return found

    def written(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Return the likeliest text after each context, under lm-eval's `until` and `max_gen_toks`.

        Raises Failed where a text should be drawn at random.
        """
        prompts = []
        stops = []
        most = []
        for context, how in requests:
            if how.get("do_sample") and how.get("temperature", 1.0) > 0:
                raise ending.Failed(
                    "a task draws its texts (do_sample): only greedy ones are scored"
                )
            until = how.get("until") or []
            stops.append(
                [until] if isinstance(until, str) else [stop for stop in until if stop]
            )
            most.append(int(how.get("max_gen_toks", MOST_NEW_TOKENS)))
            room = max(1, self.window - most[-1])
            tokens = self.encode(context) or [self.end]
            self.cut += len(tokens) > room
            prompts.append(tokens[-room:])

        def ended(number: int, new: list[int]) -> bool:
            if len(new) >= most[number] or self.end in new[-1:]:
                return True
            text = self._tokenizer.decode(new)
            return any(stop in text for stop in stops[number])

        texts = []
        found = self._scorer.continue_greedily(prompts, self.window, ended)
        for new, ends in zip(found, stops, strict=True):
            text = self._tokenizer.decode([token for token in new if token != self.end])
            texts.append(
                re.split("|".join(map(re.escape, ends)), text)[0] if ends else text
            )
        return texts
