"""What processes claim of a preparation, and when it is free again."""

from __future__ import annotations

import time

import pytest

from data.prepare import sharing
from data.prepare.sharing import Claims


def test_a_claim_is_of_one_process_until_that_one_leaves(tmp_path):
    with Claims(tmp_path / "claims") as first:
        with Claims(tmp_path / "claims") as second:
            assert first.others() and second.take("7") and second.take("7")
            assert not first.take("7") and first.take("8")
        assert not first.others() and first.take("7")
    assert not (tmp_path / "claims").exists()


@pytest.mark.parametrize("machine", ["this", "others"])
def test_the_claim_of_a_lost_process_goes_to_one_other(tmp_path, monkeypatch, machine):
    """Here the kernel says that a process is gone; elsewhere its number rests."""
    monkeypatch.setattr(sharing, "LOST_AFTER", 0.3)
    monkeypatch.setattr(sharing, "BEAT", 0.05)
    if machine == "others":
        monkeypatch.setattr(sharing, "kernel", lambda: str(time.monotonic_ns()))
    with Claims(tmp_path / "claims") as second, Claims(tmp_path / "claims") as third:
        lost = Claims(tmp_path / "claims")
        lost.__enter__()
        assert lost.take("7") and not second.take("7") and not third.take("7")
        time.sleep(0.5)
        assert not second.take("7"), "it still counts"
        lost._left.set()
        lost._file.close()
        deadline = time.monotonic() + 20
        while not second.take("7"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert not third.take("7") and second.take("7")


def test_one_at_a_time_has_a_turn(tmp_path):
    said = []
    with Claims(tmp_path / "claims") as first, Claims(tmp_path / "claims") as second:
        with first.turn("assembly", said.append):
            assert not second.take("assembly")
        with second.turn("assembly", said.append):
            assert not first.take("assembly")
    assert said == []


def test_of_two_that_see_the_same_loss_one_takes_its_claim(tmp_path, monkeypatch):
    """The other one takes it between the look of the first and its link."""
    with Claims(tmp_path / "claims") as first, Claims(tmp_path / "claims") as second:
        with Claims(tmp_path / "claims") as lost:
            assert lost.take("7")
        lives = Claims._lives

        def meanwhile(claims, name):
            found = lives(claims, name)
            if claims is first and not found:
                assert second.take("7")
            return found

        monkeypatch.setattr(Claims, "_lives", meanwhile)
        assert not first.take("7") and second.take("7")
