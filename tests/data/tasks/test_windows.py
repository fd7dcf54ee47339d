"""Every target counts once, from as much text as the window allows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.tasks.windows import full_context_windows, overlapping_windows


@given(st.integers(0, 60), st.integers(1, 12), st.data())
def test_every_target_counts_once_and_in_order(count, length, data):
    stride = data.draw(st.integers(1, length))
    tokens = np.arange(count)
    for cut in (overlapping_windows, full_context_windows):
        windows = list(cut(tokens, length, stride))
        counted = [int(t) for w in windows for t in w.tokens[len(w.tokens) - w.counted :]]
        assert counted == list(range(1, count))
        assert all(w.length <= length for w in windows)
        assert all(w.length - w.counted >= length - stride for w in windows[1:])


@pytest.mark.parametrize(("count", "length", "stride"), [(101, 16, 4), (98, 16, 4), (97, 16, 16), (9, 16, 4)])
def test_windows_are_those_of_megatron(count, length, stride):
    """`_LMDataset` of tasks/zeroshot_gpt/datasets.py, in a few lines, without empty windows."""
    tokens, expected = list(range(count)), []
    sequences = max(-(-max(count - 1 - stride, 0) // stride) + 1, 1)
    for index in range(sequences):
        taken = tokens[index * stride : index * stride + length + 1]
        mask = np.array([1] * len(taken) + [0] * (length + 1 - len(taken)))[1:]
        if stride != length and index != 0:
            mask[:-stride] *= 0
        if targets := [t for t, m in zip(taken[1:], mask, strict=False) if m]:
            expected.append((taken, targets))
    found = [
        (w.tokens.tolist(), w.tokens[len(w.tokens) - w.counted :].tolist())
        for w in overlapping_windows(np.arange(count), length, stride)
    ]
    assert found == expected


def test_windows_of_full_context_are_those_of_lm_eval():
    """`get_rolling_token_windows` with context_len=1, made disjoint, of 10 tokens after a prefix."""
    prefix, tokens, length = 99, list(range(10)), 4
    windows = list(full_context_windows(np.array([prefix, *tokens]), length, length))
    inputs = [w.tokens[:-1].tolist() for w in windows]
    assert inputs == [[99, 0, 1, 2], [3, 4, 5, 6], [5, 6, 7, 8]]
    assert [w.counted for w in windows] == [4, 4, 2]
