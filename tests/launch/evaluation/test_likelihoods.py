"""Requests of lm-eval that cannot be answered are refused, and long ones are counted; without a model."""

from __future__ import annotations

import pytest
from scored import PASSAGES, tokenizer_of

from launch.evaluation.likelihoods import Likelihoods
from launch.evaluation.scorer import WindowScore
from launch.ranks.ending import Failed

TOKENIZER = tokenizer_of(PASSAGES, 400)


class Fixed:
    """A scorer that finds every target right at a loss of its number of tokens; it writes "a b c"."""

    def score(self, windows):
        self.windows = list(windows)
        return [WindowScore(float(window.length), window.counted, True) for window in windows]

    def continue_greedily(self, prompts, window, ended):
        self.prompts = prompts
        texts = []
        for number in range(len(prompts)):
            new: list[int] = []
            for token in TOKENIZER.encode("a b c a b c"):
                if ended(number, new):
                    break
                new.append(token)
            texts.append(new)
        return texts


@pytest.fixture
def asked():
    return Likelihoods(Fixed(), TOKENIZER, 8)


def test_of_a_long_context_the_end_is_read(asked):
    tokens = list(range(3, 15))
    assert asked.of_continuations([(tokens, [1, 2]), ([3], [4])]) == [(-8.0, True), (-1.0, True)]
    first, second = asked._scorer.windows
    assert first.tokens.tolist() == [*tokens, 1, 2][-9:] and first.counted == 2
    assert second.tokens.tolist() == [3, 4] and asked.cut == 1
    assert len(asked.windows) == len(asked.scores) == 2


@pytest.mark.parametrize("continuation", [[], list(range(9))])
def test_a_continuation_that_cannot_be_scored_whole_is_refused(asked, continuation):
    with pytest.raises(
        Failed, match=rf"has {len(continuation)} tokens of its own: between 1 and 8 \(--window\)"
    ):
        asked.of_continuations([([5, 6], [7]), ([5], continuation)])
    assert not asked.windows


def test_a_whole_text_begins_after_an_end_of_document_token(asked):
    tokens = asked.encode(PASSAGES[0])
    assert len(tokens) > 9
    (found,) = asked.of_texts([PASSAGES[0]])
    assert found == -sum(window.length for window in asked.windows)
    assert asked.windows[0].tokens.tolist() == [TOKENIZER.eos_token_id, *tokens[:8]]
    assert sum(window.counted for window in asked.windows) == len(tokens)
    assert asked.of_texts([""]) == [0.0]


def test_texts_end_before_their_stops_and_leave_room_for_themselves(asked):
    long = " ".join(PASSAGES)
    how = [
        dict(until=["c", "zz"], max_gen_toks=6), dict(until=" b", max_gen_toks=4), dict(max_gen_toks=2),
        dict(until=[], max_gen_toks=99, do_sample=True, temperature=0.0),
    ]  # fmt: skip
    found = asked.written([(long, each) for each in how[:3]] + [("", how[3])])
    two = TOKENIZER.decode(TOKENIZER.encode("a b c")[:2])
    assert found == ["a b ", "a", two, "a b c a b c"]
    assert [len(prompt) for prompt in asked._scorer.prompts] == [2, 4, 6, 1]
    assert asked._scorer.prompts[0] == asked.encode(long)[-2:]
    assert asked._scorer.prompts[3] == [TOKENIZER.eos_token_id] and asked.cut == 3


def test_a_text_that_is_drawn_is_refused(asked):
    with pytest.raises(Failed, match="do_sample"):
        asked.written([("a", dict(do_sample=True, temperature=0.7))])
