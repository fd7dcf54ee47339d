"""Muon: its arithmetic, and whole steps of two ranks, against torch.optim.Muon and AdamW in one process."""

from __future__ import annotations

import json
from unittest import mock

import pytest
import torch
from launching import WORKERS, run_ranks
from torch.optim import _muon as theirs
from torch.utils.flop_counter import FlopCounterMode

from launch.deepspeed_fixes import muon
from modeling.cost import products

SHAPES = ((48, 48), (48, 192), (192, 48), (7, 5))


def by_torch(matrix: torch.Tensor) -> torch.Tensor:
    coefficients = (theirs.DEFAULT_A, theirs.DEFAULT_B, theirs.DEFAULT_C)
    return theirs._zeropower_via_newtonschulz(matrix, coefficients, theirs.DEFAULT_NS_STEPS, theirs.EPS)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_matrix_is_orthogonalised_as_by_torch(shape):
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    assert torch.equal(muon.orthogonalise(gradient.bfloat16()), by_torch(gradient))
    decades = torch.logspace(0, -4, max(shape))
    uneven = decades[:, None] * gradient if shape[0] > shape[1] else gradient * decades
    for matrix in (gradient, uneven):
        with mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.double):
            right = by_torch(matrix)
        assert (muon.orthogonalise(matrix) - right).norm() < 1e-5 * right.norm()
    sizes = torch.linalg.svdvals(muon.orthogonalise(gradient))
    assert sizes.min() > 0.6 and sizes.max() < 1.3, "it orthogonalises"
    assert not muon.orthogonalise(torch.zeros(shape)).any()


@pytest.mark.parametrize("rule", ["match_rms_adamw", "original"])
def test_the_rate_is_adjusted_as_by_torch(rule):
    for shape in SHAPES:
        assert muon.adjusted(rule, *shape) == pytest.approx(theirs._adjust_lr(1.0, rule, shape), rel=1e-12)


def test_the_work_is_divided():
    costs = [9, 9, 3, 3, 1, 9, 9, 3, 3, 1]
    owners = muon.share_out(costs, 4)
    loads = [
        sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(4)
    ]
    assert max(loads) <= 13 and sum(loads) == sum(costs)
    assert muon.share_out([], 2) == []


def test_rounds_load_no_rank_too_much():
    loads = torch.tensor([[4, 4, 0, 1, 9], [0, 0, 5, 5, 0]])
    assert muon.in_rounds(loads, 8) == [[0, 1, 2], [3], [4]], "the last is too much alone"
    assert muon.in_rounds(loads, 20) == [[0, 1, 2, 3, 4]]
    assert muon.in_rounds(loads, 0) == [[0], [1], [2], [3], [4]], "of one rank"


CASES = {
    "dp2 zero0": {"ds_config": "zero0"},
    "dp2 zero2": {"ds_config": "zero2"},
    "dp2 zero3": {"ds_config": "zero3"},
    "tp2 zero1, original": {"ds_config": "zero1", "tp": 2, "settings": ["optimizer.adjust_lr=original"]},
    "bert tp2 zero1": {"ds_config": "zero1", "tp": 2, "recipe": "bert/sotu"},
    "dp2 zero1 in rounds": {"ds_config": "zero1", "at_once": 2**14},
    "dp2 zero0 in rounds": {"ds_config": "zero0", "at_once": 2**14},
}


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """Distances from torch's steps by case; one launch of two ranks makes all."""
    out = tmp_path_factory.mktemp("muon")
    (out / "cases.json").write_text(json.dumps([*CASES.values()]))
    launched = run_ranks(2, WORKERS / "muon.py", out / "steps.json", out / "cases.json")
    assert launched.returncode == 0, launched.stdout[-4000:]
    return dict(zip(CASES, json.loads((out / "steps.json").read_text()), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_whole_steps_are_torchs_under_every_layout(steps, case):
    """Of three clipped steps: losses, norms, weights and moments."""
    far = steps[case]
    assert far["losses"] < 2e-6 and far["norms"] < 1e-5
    for kind in ("weight", "exp_avg", "exp_avg_sq"):
        assert {name: value for name, value in far[kind].items() if value > 2e-5} == {}, kind


@pytest.mark.parametrize("case", CASES)
def test_the_planner_counts_the_moments_that_are_held(steps, case):
    """One of a matrix, two of all else; buffers are padded by little."""
    moments = steps[case]["moments"]
    assert moments["planned"] == pytest.approx(moments["held"], rel=0.01)


def test_the_planner_counts_the_products_that_are_made():
    hidden = 48
    matrices = [(hidden, hidden)] * 4 + [(4 * hidden, hidden), (hidden, 4 * hidden)]
    made = []
    for shape in matrices:
        with FlopCounterMode(display=False) as counter:
            muon.orthogonalise(torch.ones(shape, dtype=torch.bfloat16))
        made.append(counter.get_total_flops())
    assert sum(made) == products.OF_MUON * products.Product(hidden, hidden, hidden).operations
    assert max(made) == products.OF_LARGEST_MATRIX * products.Product(hidden, hidden, hidden).operations
