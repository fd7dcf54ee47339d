"""Blends: samples of several sources, mixed by weight.

Every block of 1000 positions has the same number of samples of each part, by the largest remainder of its
weight, in an order decided by (seed, block). So a position's place in its part follows without a walk through
earlier positions.

A stream in a blend is one lane, and every rank reads it: its rows in a step change from step to step, so no
rank could keep to its own files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from data.samples.fields import Fields, HeldOut, Parts, TrainingSamples, shuffled
from recipes.problems import Key, ProblemsError

_ADDED_UP = frozenset({
    "documents", "train_documents", "held_out_documents", "test_documents",
    "train_tokens", "held_out_tokens", "test_tokens", "unigram_tokens",
    "text_bytes", "documents_read_for_validation", "samples_per_epoch",
})  # fmt: skip
BLOCK = 1000  # positions; a part has at least one of them


def largest_remainder(weights: Sequence[float], total: int) -> np.ndarray:
    """Divide `total` by weight: (parts,) int64, rounded down, plus one for the largest remainders."""
    exact = np.asarray(weights, np.float64) / np.sum(weights) * total
    counts = np.asarray(exact, np.int64)
    lost = np.argsort(counts - exact, kind="stable")
    counts[lost[: total - counts.sum()]] += 1
    return counts


class BlendedSamples:
    """Samples of several parts, each in its own order; an exhausted part begins anew."""

    def __init__(
        self, parts: Sequence[TrainingSamples], weights: Sequence[float], seed: int
    ):
        """Mix the parts.

        Args:
            seed: decides the part of each position; the seed of `take` decides the parts' samples.

        Raises ValueError: a weight is too small to give a sample per block.
        """
        assert len(parts) == len(weights) > 0
        self._parts = list(parts)
        self._weights = list(weights)
        self._seed = seed
        self.random_access = all(part.random_access for part in parts)
        self._counts = largest_remainder(weights, BLOCK)
        if (self._counts == 0).any():
            smallest = int(np.argmin(weights))
            came = (
                Key("data.blend"),
                f": part {smallest + 1} has weight {weights[smallest]} of {sum(weights)}",
            )
            rule = f"that is less than one sample in {BLOCK}"
            raise ProblemsError.of(
                "data.blend", came, rule, "give it more weight or leave it out"
            )

    def take(self, positions: Sequence[int], seed: int) -> Fields:
        part_of, local = self.places(np.asarray(positions, np.int64))
        mine = []
        rows = []
        for number, part in enumerate(self._parts):
            own = np.flatnonzero(part_of == number)
            if own.size:
                # so that parts of one size are not in one order
                own_seed = seed + (number << 32)
                rows.append(part.take(local[own].tolist(), own_seed))
                mine.append(own)
        return type(rows[0]).concatenate(rows).rows(np.argsort(np.concatenate(mine)))

    def places(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Map positions (n,) to numbers of parts (n,) and positions in these parts (n,)."""
        part_of = np.empty_like(positions)
        local = np.empty_like(positions)
        blocks, within = np.divmod(positions, BLOCK)
        for block in np.unique(blocks).tolist():
            here = blocks == block
            order = self._order(block)
            # Number of earlier samples of the same part in the block.
            ranks = np.empty(BLOCK, np.int64)
            ranks[np.argsort(order, kind="stable")] = np.concatenate(
                [np.arange(n) for n in self._counts]
            )
            part_of[here] = order[within[here]]
            local[here] = block * self._counts[part_of[here]] + ranks[within[here]]
        return part_of, local

    def _order(self, block: int) -> np.ndarray:
        """Return the part's number at each position of a block, (BLOCK,)."""
        return shuffled(
            np.repeat(np.arange(len(self._parts)), self._counts), self._seed, block
        )

    def state(self, position: int) -> dict[str, Any]:
        parts = zip(self._parts, self._before(position), strict=True)
        return {"position": position, "parts": [part.state(n) for part, n in parts]}

    def _before(self, position: int) -> list[int]:
        """Count each part's samples before a position."""
        block, within = divmod(position, BLOCK)
        inside = np.bincount(self._order(block)[:within], minlength=len(self._parts))
        return [*map(int, block * self._counts + inside)]

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a `state`. Raises ProblemsError: it is of a blend with other parts."""
        states = state["parts"] if isinstance(state.get("parts"), list) else []
        places = [
            part.get("position") if isinstance(part, dict) else None for part in states
        ]
        before = self._before(state["position"])
        if places != before:
            came = (
                f"the checkpoint read a blend of {len(states)} parts, at {str(places)[:100]}, and ",
                Key("data.blend"),
                f" has {len(self._parts)}, at {before}",
            )
            raise ProblemsError.of("data.blend", came, fix="resume with the same blend")
        for part, saved in zip(self._parts, states, strict=True):
            part.restore(saved)

    def fresh(self) -> BlendedSamples:
        return BlendedSamples(
            [part.fresh() for part in self._parts], self._weights, self._seed
        )


def blended_held_out(parts: Sequence[HeldOut]) -> HeldOut:
    """Join the held-out samples of all parts, one part after another."""
    return HeldOut(type(parts[0].fields).concatenate([part.fields for part in parts]))


def blended(parts: Sequence[Parts], weights: Sequence[float], seed: int) -> Parts:
    """Blend the splits of several sources by weight."""
    tests = [part.test for part in parts if part.test]
    test = blended_held_out(tests) if tests else None
    return Parts(
        BlendedSamples([part.train for part in parts], weights, seed),
        blended_held_out([part.validation for part in parts]),
        test,
        _blended_counts([part.train_counts for part in parts], weights),
        _blended_summary([part.summary for part in parts], weights),
    )


def _blended_counts(
    counts: Sequence[np.ndarray], weights: Sequence[float]
) -> np.ndarray:
    """Weight the parts' token counts (V,) as the blend does, without changing their total."""
    sums = [max(1, int(count.sum())) for count in counts]
    parts = zip(np.asarray(weights) / np.sum(weights), counts, sums, strict=True)
    blended = sum(share * count / total for share, count, total in parts)
    # numpy says Any of a product of any types
    return sum(sums) * blended  # type: ignore[no-any-return]


def _blended_summary(
    summaries: Sequence[dict[str, Any]], weights: Sequence[float]
) -> dict[str, Any]:
    """Join the summaries of the parts: sums of their common entries, all checksums, and the parts."""
    sums = {}
    for key in summaries[0]:
        values = [part[key] for part in summaries if key in part]
        if key in _ADDED_UP and len(values) == len(summaries):
            sums[key] = sum(values)
    parts = [
        {"weight": weight, **part}
        for part, weight in zip(summaries, weights, strict=True)
    ]
    return {
        "source": " + ".join(
            f"{part['source']} ({part['weight']:g})" for part in parts
        ),
        **sums,
        "train_tokens_crc32": ",".join(
            str(part["train_tokens_crc32"]) for part in parts
        ),
        "parts": parts,
    }
