"""Kinds of mistakes told from small tensors: what linear algebra says of a gradient and of an update."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from launch.experiments.proving.layout import layout_of
from launch.experiments.proving.mistakes import Figures, Mistake, Shares, of_gradient, of_update
from launch.experiments.proving.pieces import Pieces
from launch.experiments.proving.task import key, tensors_of
from launch.experiments.proving.text import sentence

NAME = "norm.weight"
generator = torch.Generator().manual_seed(0)
G0, G1, REST, BEFORE, AFTER = torch.randn(5, 12, generator=generator)
G = 0.7 * G0 + 0.3 * G1  # shares of 7 and 3 of 10 tokens


class Found:
    """The files of a proof with one tensor that differs."""

    def __init__(self, folder: Path):
        self.folder = folder
        for name, gradient in (("reference", G), ("share-0", G0), ("share-1", G1)):
            (folder / name).mkdir()
            save_file({f"gradient/{NAME}": gradient}, tensors_of(folder / name, 1))

    def pieces(self, kind: str, step: int, own: dict[int, torch.Tensor], cut: bool = False) -> Pieces:
        """Return the tensor as ranks have it; `cut`: each has half of its elements. Two ranks."""
        for rank in range(2):
            stored = {}
            if rank in own:
                numbers = torch.arange(12).chunk(2)[rank] if cut else torch.arange(12)
                stored = {
                    key(step, kind, NAME): own[rank],
                    f"{key(step, kind, NAME)}/elements": numbers.clone(),
                }
            save_file(stored, self.folder / f"rank-{rank}.safetensors")
        return Pieces(self.folder, self.folder / "reference", step, kind, NAME, [0, 1])

    def gradient(
        self,
        own: dict[int, torch.Tensor],
        clipped: tuple[float, float] = (1.0, 1.0),
        layout: str = "dp2",
        random: bool = False,
        figures: Figures = Figures(),  # noqa: B008
        cut: bool = False,
    ) -> Mistake:
        runs = [self.folder / "share-0", self.folder / "share-1"]
        shares = Shares({2: dict(zip(runs, clipped, strict=True))}, random)
        return of_gradient(self.pieces("gradient", 1, own, cut), layout_of(layout), shares, figures)

    def update(self, own: dict[int, torch.Tensor]) -> Mistake:
        for step, weight in ((0, BEFORE), (1, AFTER)):
            save_file(
                {f"weight/{NAME}": weight, f"gradient/{NAME}": G}, tensors_of(self.folder / "reference", step)
            )
        return of_update(self.pieces("weight", 1, own), False)


@pytest.fixture
def found(tmp_path: Path) -> Found:
    return Found(tmp_path)


def both(tensor: torch.Tensor) -> dict[int, torch.Tensor]:
    return {0: tensor, 1: tensor.clone()}


def test_a_gradient_is_taken_apart_into_shares_of_the_batch(found):
    doubled = found.gradient(both(2 * G))
    assert (doubled.kind, doubled.degrees) == ("factor", ["dp"])
    assert "2 times as large, as data parallel degree" in sentence(doubled)
    assert found.gradient(both(0.8 * G), figures=Figures(norms={1: 0.25})).kind == "norm"
    missing = found.gradient(both(0.7 * G0))
    assert missing.kind == "missing" and "1.00, 0.00 times" in sentence(missing)
    assert found.gradient(both(0.5 * G0 + 0.5 * G1)).kind == "means"
    assert found.gradient(both(0.7 * G0 + 0.6 * G1)).kind == "counts"
    # shares stored after clipping, by norms 2 and 3 times the largest
    assert found.gradient(both(0.5 * G0 + 0.5 * G1), clipped=(2.0, 3.0)).kind == "clipped"
    assert found.gradient(both(0.4 * G0 + 0.6 * G1), clipped=(2.0, 3.0)).kind == "means"


def test_what_the_batch_does_not_explain(found):
    assert found.gradient(both(G + REST)).kind == "other"
    assert found.gradient(both(G + REST), figures=Figures([1])).kind == "forward"
    assert found.gradient({0: G + REST, 1: G - G1}, random=True).kind == "random"


def test_ranks_that_have_the_same_elements(found):
    summands = found.gradient({0: G + REST, 1: -REST}, layout="tp2")
    assert (summands.kind, [*summands.ranks]) == ("not summed", [0, 1])
    assert summands.factor == pytest.approx(1)
    scaled = found.gradient({0: 0.9 * G, 1: 1.2 * G}, layout="tp2")
    assert scaled.kind == "scales" and scaled.counts == pytest.approx([0.9, 1.2])
    assert found.gradient({0: G + REST, 1: G - G0}, layout="tp2").kind == "replica"


def test_one_rank_has_another_gradient(found):
    assert found.gradient({1: G + REST}, layout="tp2").kind == "replica"
    assert found.gradient({1: 3 * G[6:]}, layout="tp2", cut=True).kind == "piece"


def test_an_update_is_taken_apart_into_the_right_one_and_the_weight(found):
    step = AFTER - BEFORE
    twice = found.update(both(BEFORE + 2 * step))
    assert twice.kind == "rate" and twice.factor == pytest.approx(2)
    assert found.update(both(BEFORE)).kind == "still"
    decayed = found.update({1: AFTER - 0.01 * BEFORE})
    assert decayed.kind == "decay" and decayed.factor == pytest.approx(-0.01, rel=0.05)
    assert found.update(both(AFTER + REST)).kind == "update"
    assert found.update({0: AFTER, 1: AFTER + REST}).kind == "replica"


def test_before_any_step_moments_are_not_loaded_and_weights_not_as_given(found):
    save_file({f"exp_avg/{NAME}": G, f"weight/{NAME}": AFTER}, tensors_of(found.folder / "reference", 1))
    moment = found.pieces("exp_avg", 1, both(0 * G))
    assert of_update(moment, True).kind == "history"
    assert of_update(found.pieces("weight", 1, both(BEFORE)), True).kind == "initial"
