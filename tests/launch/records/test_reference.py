"""The judgement of runs: what is noticed, from which step, and what is not."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from launch.records import curves
from launch.records.reference import Reference, Series
from recipes.catalog import CURVES

STEPS, SEEDS, EVERY = 60, 10, 20


def run_of(seed: int, shift: float = 0.0, since: int = 0, noise: float = 0.1, norm: float = 1.0) -> Series:
    """Make a run whose losses have the noise of its seed, and lie `shift` higher from a step on."""
    draws = np.random.default_rng(seed).normal(0, noise, (2, STEPS))
    later = shift * (np.arange(1, STEPS + 1) >= since)
    losses = 6 - 0.02 * np.arange(STEPS) + draws[0] + later
    held_out = {
        step: 6 - 0.02 * step + draws[0, step - 1] / 4 + later[step - 1] for step in range(EVERY, 61, EVERY)
    }
    norms = np.exp(draws[1]) * norm
    return Series(losses, norms, {0: 6.0 + 0.01 * (seed % 7), **held_out})


@pytest.fixture
def reference() -> Reference:
    runs = {seed: run_of(seed) for seed in range(SEEDS)}
    repeat = replace(runs[0], loss=runs[0].loss + 1e-3)
    misuses = {
        "too slow": run_of(1, 0.3),
        "too fast": run_of(1, -0.3),
        "norms doubled": run_of(1, norm=2.0),
        "a late jump": run_of(1, 0.3, since=40),
    }
    return Reference(runs, misuses, {0: repeat}, 1)


@pytest.mark.parametrize("seed", [0, 5, 77, 78, 79])
def test_sound_runs_are_as_expected(reference, seed):
    judged = reference.judge(run_of(seed), seed)
    assert judged.since is None and judged.causes == () and judged.compared == "validation loss"
    assert (seed < SEEDS) == (judged.difference == pytest.approx(0, abs=1e-12))
    at_the_end = [run.validation[STEPS] for run in reference.runs.values()]
    assert judged.spread == pytest.approx((max(at_the_end) - min(at_the_end)) / 2)


def test_a_run_of_a_known_seed_is_held_to_what_repeats_differ_by(reference):
    shifted = replace(run_of(3), loss=run_of(3).loss + 0.01 * (np.arange(1, STEPS + 1) >= 31))
    judged = reference.judge(shifted, 3)
    assert (judged.since, judged.figure) == (37, "training loss"), "0.006 = 2e-3 + 4 x 1e-3 within ten steps"
    assert judged.apart == pytest.approx(0.01)
    assert reference.judge(shifted, 99).since is None, "as one of another seed"
    without = replace(reference, repeats={})
    assert without.judge(shifted, 3).since is None, "nothing says what rounding does"


def test_a_run_of_another_seed_is_held_to_the_seeds(reference):
    assert reference.judge(run_of(77, 0.05), 77).since is None
    judged = reference.judge(run_of(77, 0.5, since=31), 77)
    assert 31 < judged.since <= 41 and judged.figure == "training loss" and 0.4 < judged.apart < 0.6


def test_a_skipped_step_makes_a_run_one_of_another_seed(reference):
    run = run_of(3)
    skipped = replace(run, loss=np.where(np.arange(STEPS) == 5, np.nan, run.loss + 0.01))
    assert reference.judge(replace(run, loss=run.loss + 0.01), 3).since is not None
    assert reference.judge(skipped, 3).since is None


def test_a_norm_is_apart_by_a_factor(reference):
    judged = reference.judge(run_of(4, norm=2.0), 4)
    assert (judged.since, judged.figure, judged.apart) == (1, "gradient norm", pytest.approx(2))
    assert judged.causes[0] == "norms doubled"


@pytest.mark.parametrize("name", ["too slow", "too fast", "a late jump"])
@pytest.mark.parametrize("seed", [4, 77])
def test_the_misuse_that_is_most_like_the_run_is_named_first(reference, name, seed):
    how = {"too slow": (0.4, 0), "too fast": (-0.4, 0), "a late jump": (0.4, 40)}[name]
    assert reference.judge(run_of(seed, *how), seed).causes[0] == name


def test_a_step_without_validations_compares_the_training_loss(reference):
    run = run_of(3)
    known = {**{step: run.validation[step] for step in (0, 20)}, 30: 5.0}
    judged = reference.judge(Series(run.loss[:30] + 0.004, run.grad_norm[:30], known), 3)
    assert judged.compared == "training loss" and judged.difference == pytest.approx(0.004)
    assert "(training loss +0.004; seeds" in str(judged)


def test_a_run_is_judged_before_its_first_step(reference):
    none = np.zeros(0)
    known = {0: run_of(3).validation[0]}
    assert reference.judge(Series(none, none, known), 3).since is None
    judged = reference.judge(Series(none, none, {0: 6.5}), 3)
    assert (judged.step, judged.since, judged.figure) == (0, 0, "validation loss") and math.isfinite(
        judged.apart
    )


@pytest.mark.parametrize("path", sorted(CURVES.glob("*.json")), ids=lambda path: path.stem)
def test_no_run_of_a_curve_that_ships_is_outside_of_the_others(path):
    reference = curves.read(path).reference
    for seed, run in reference.runs.items():
        others = {other: series for other, series in reference.runs.items() if other != seed}
        judged = replace(reference, runs=others, repeats={}).judge(run, seed)
        assert judged.since is None, f"{seed}: {judged}"
    for seed, run in reference.repeats.items():
        assert reference.judge(run, seed).since is None


def test_misuses_are_noticed_in_the_run_that_they_were_measured_in():
    reference = curves.read(CURVES / "default-sotu.json").reference
    judged = {name: reference.judge(run, reference.misused) for name, run in reference.misuses.items()}
    unnoticed = {name for name in judged if judged[name].since is None}
    assert len(judged) == 20 and unnoticed == {"weight decay on biases and LayerNorms"}
    for name, each in judged.items():
        assert name in unnoticed or (each.causes[0] == name and each.since <= 50), f"{name}: {each}"
