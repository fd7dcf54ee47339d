"""Flipped bits are found within one interval and named; the run ends with 5 and goes on from a sound save."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from launching import ROOT, WORKERS, run_ranks

from data.bit_sums import BLOCK, WORD, block_sums
from launch.records.facts import Corruption, StepRecord
from launch.records.metrics import read_metrics
from launch.records.result import read_result
from launch.training.early_ends import Corrupted, Diverged
from launch.training.figure_bounds import FigureBounds
from launch.training.number_watch import Details, NumberReport, NumberWatch, corruptions, interval, witnesses

PRETRAIN = ROOT / "launch/pretrain.py"
LAYOUTS = {  # name -> ds_config, tp, pp, dp
    "zero0 dp2": ("zero0", 1, 1, 2),
    "zero1 dp2": ("zero1", 1, 1, 2),
    "zero3 dp2": ("zero3", 1, 1, 2),
    "zero0 tp2": ("zero0", 2, 1, 1),
    "zero1 tp2": ("zero1", 2, 1, 1),
    "zero3 tp2": ("zero3", 2, 1, 1),
    "pipeline": ("pipeline", 1, 2, 1),
}
QUICK = [
    *((name, "fp32") for name in ("zero0 dp2", "zero1 dp2", "zero3 dp2", "zero1 tp2", "pipeline")),
    *((name, "bf16") for name in ("zero0 dp2", "zero1 dp2")),
]
BETWEEN = ["before the forward pass", "after the forward pass", "before the update", "after the update"]
WITHIN = ["within the update"]


def flips(out, cases, number, timeout=180):
    """(name, precision, moments) -> the outcome of `number` flips."""
    given = []
    for key in cases:
        name, precision, moments = key
        ds_config, tp, pp, dp = LAYOUTS[name]
        case = {
            "name": str(key),
            "ds_config": ds_config,
            "precision": precision,
            "flips": number,
            "seed": len(given),
        }
        degrees = {"parallel.tp": tp, "parallel.pp": pp, "parallel.dp": dp}
        given.append({**case, **degrees, "moments": WITHIN if moments == "within" else BETWEEN})
    (out / "cases.json").write_text(json.dumps(given))
    flipped = run_ranks(2, WORKERS / "bit_flips.py", out / "flips.json", out / "cases.json", timeout=timeout)
    assert flipped.returncode == 0, flipped.stdout[-4000:]
    found = json.loads((out / "flips.json").read_text())
    return {key: found[str(key)] for key in cases}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    cases = [(*each, "between") for each in QUICK]
    return flips(tmp_path_factory.mktemp("flips"), [*cases, ("zero0 dp2", "fp32", "within")], 8)


@pytest.mark.parametrize("case", QUICK, ids=" ".join)
def test_a_flipped_bit_between_updates_is_found_within_one_interval_and_named(found, case):
    assert [each for each in found[(*case, "between")] if not each["found"] or each["late"]] == []
    assert [each for each in found[(*case, "between")] if not each["named"]] == []


def test_the_last_sound_step_is_that_of_the_check_before(found):
    assert [each for outcomes in found.values() for each in outcomes if not each["sound"]] == []


def test_copies_tell_of_a_bit_that_flips_within_the_update(found):
    within = [each for each in found["zero0 dp2", "fp32", "within"] if each["moment"] in WITHIN]
    assert within and all(each["found"] and each["named"] for each in within)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_many_flips(tmp_path):
    """The table of docs/running.md (pytest -s)."""
    cases = [
        (name, precision, moments)
        for name in LAYOUTS
        for precision in ("fp32", "bf16")
        for moments in ("between", "within")
    ]
    rows = {}
    for (name, precision, moments), outcomes in flips(tmp_path, cases, 60, 3600).items():
        if moments == "within":
            outcomes = [each for each in outcomes if each["moment"] in WITHIN]
        for each in outcomes:
            kind = "moments" if each["kind"].startswith("exp") else each["kind"]
            row = rows.setdefault((moments, name, precision, kind), [0, 0, 0])
            row[0] += 1
            row[1] += each["found"] and not each["late"]
            row[2] += each["named"]
    for key, row in sorted(rows.items()):
        print(*key, *row)
    between = [row for (moments, *_), row in rows.items() if moments == "between"]
    assert sum(row[1] for row in between) >= 0.99 * sum(row[0] for row in between)


def settings(*keys):
    return [word for key in keys for word in ("--set", key)]


@pytest.mark.ci
def test_a_run_ends_with_5_and_goes_on_from_its_last_sound_checkpoint(tmp_path):
    """The bit flips before the save of step 10, which is thrown away; no check changes a number."""
    flags = ["--tiny", "--ds_config", "zero1", *settings("run.save_every=5")]
    watched, unwatched = settings("run.check_every=100"), settings("run.check_every=0")
    flipped, whole = tmp_path / "flipped", tmp_path / "whole"
    ended = run_ranks(2, WORKERS / "flipped_run.py", *flags, *watched, "--out", flipped)
    assert ended.returncode == 5, ended.stdout[-3000:]
    assert "rank 1 on " in ended.stdout and "weights in full precision of " in ended.stdout
    assert read_result(flipped / "result.json").status == "corrupted"
    assert [path.name for path in (flipped / "checkpoints").iterdir()] == ["step-000005"]
    resumed = run_ranks(2, PRETRAIN, *flags, *watched, "--out", flipped, "--resume")
    assert resumed.returncode == 0, resumed.stdout[-3000:]
    assert run_ranks(2, PRETRAIN, *flags, *unwatched, "--out", whole).returncode == 0
    losses = [[s.loss for s in read_metrics(out / "metrics.jsonl").steps] for out in (flipped, whole)]
    assert losses[0] == losses[1] and len(losses[0]) == 20
    assert read_result(flipped / "result.json").status == "ok"


@pytest.mark.ci
def test_no_false_alarm_with_skipped_steps_a_ramp_and_saves(tmp_path):
    config = json.loads((ROOT / "ds_configs/zero3.json").read_text())
    config["fp16"] = {"enabled": True, "initial_scale_power": 30, "loss_scale_window": 10, "hysteresis": 1}
    (tmp_path / "fp16.json").write_text(json.dumps(config))
    small = ["model.layers=1", "model.hidden=16", "model.heads=2", "sequence_length=16", "steps=150"]
    ramp = ["batch.rampup={start: 4, increment: 2, samples: 400}", "batch.micro=1", "run.save_every=20"]
    flags = ["--tiny", "--emulate_fp16", "--ds_config", tmp_path / "fp16.json", "--out", tmp_path / "run"]
    done = run_ranks(2, PRETRAIN, *flags, *settings(*small, *ramp, "run.check_every=1"))
    assert done.returncode == 0, done.stdout[-3000:]
    steps = read_metrics(tmp_path / "run/metrics.jsonl").steps
    assert len(steps) == 150 and sum(step.skipped for step in steps) > 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("elements", [1, 7, WORD * BLOCK, 3 * WORD * BLOCK + 5])
def test_every_flipped_bit_changes_the_sum_of_its_block_alone(dtype, elements):
    numbers = torch.ones(elements + 3).to(dtype)[3:]  # not at a multiple of a word
    before = block_sums(numbers)
    octets = numbers.view(torch.uint8)
    for octet in {0, len(octets) // 2, len(octets) - 1}:
        for bit in range(8):
            octets[octet] ^= 1 << bit
            differs = block_sums(numbers) != before
            octets[octet] ^= 1 << bit
            assert differs.nonzero().flatten().tolist() == [octet // (WORD * BLOCK)]


def report(changed=0, dp=0, tp=0):
    return NumberReport(changed, dp, tp)


def grid(tp, dp):
    return SimpleNamespace(tp=tp, pp=1, dp=dp)


SOUND = Details("here", [], [(("dp", "weight", "a"), 1), (("dp", "weight", "b"), 2)])
ODD = Details("there", [], [(("dp", "weight", "a"), 1), (("dp", "weight", "b"), 5)])


def named(table, details, shape):
    """What rank 0 names by what it hears."""
    heard = witnesses(table, shape)
    return corruptions({rank: details[rank] for rank in heard}, shape)


def test_the_odd_one_of_three_copies_is_named():
    table = [report(dp=1), report(dp=1), report(dp=2)]
    assert not witnesses(table[:2], grid(1, 2))
    found = named(table, [SOUND, SOUND, ODD], grid(1, 3))
    assert found == (Corruption(2, "there", "weight", ("b",), True),)


def test_of_two_copies_both_are_named_unless_one_saw_itself_change():
    found = named([report(dp=1), report(dp=2)], [SOUND, ODD], grid(1, 2))
    assert [each.rank for each in found] == [0, 1]
    changed = Details("there", [("", "weight", "b")], ODD.copies)
    found = named([report(dp=1), report(1, dp=2)], [SOUND, changed], grid(1, 2))
    assert found == (Corruption(1, "there", "weight", ("b",), False),)


def test_of_a_thousand_ranks_few_are_heard():
    """The odd ones of a group, and those who outvote them: tensor by tensor, too."""
    shape, odd = grid(4, 256), {5: ("a",), 9: ("b",)}  # in the group of every fourth rank
    table = [report(dp=rank % 4) for rank in range(1024)]
    details = [SOUND] * 1024
    for rank, names in odd.items():
        table[rank] = report(dp=100 + rank)
        copies = [(key, value + (key[2] in names)) for key, value in SOUND.copies]
        details[rank] = Details(f"node{rank}", [], copies)
    assert witnesses(table, shape) == {5, 9, 1, 13, 17}
    found = named(table, details, shape)
    assert found == tuple(Corruption(r, f"node{r}", "weight", names, True) for r, names in odd.items())
    table[700] = report(changed=1)
    assert witnesses(table, shape) == {700}, "which explains all that differs"


@pytest.mark.parametrize(
    ("sums", "exchange", "chosen"),
    [(0.001, 0.0001, (1, True)), (0.0015, 0.0095, (10, True)), (0.02, 0.009, (13, False))],
)
def test_the_interval_keeps_checks_under_half_a_percent(sums, exchange, chosen):
    assert interval(1.0, sums, exchange) == chosen


def outcome(step, loss, norm=1.0):
    return StepRecord(step, loss, skipped=False, grad_norm=norm)


def test_a_figure_far_above_is_said_once_and_warm_up_never():
    said = []
    bounds = FigureBounds(SimpleNamespace(recorder=SimpleNamespace(warn=said.append)))
    for step in range(1, 200):
        bounds.after_step(outcome(step, 3 + 7 * 0.98**step + 0.1 * (step % 5), 4 * 0.97**step + 0.5))
    assert said == []
    for step in range(200, 210):
        bounds.after_step(outcome(step, 30.0, 800.0))
    assert len(said) == 1 and said[0].startswith("the loss of step 200 is 30, far above the usual 3.")


def test_a_last_loss_far_above_the_first_is_no_end():
    run = SimpleNamespace(recorder=SimpleNamespace(warn=print), recipe=SimpleNamespace(steps=20), done=20)
    bounds = FigureBounds(run)
    for step in range(20):
        bounds.after_step(outcome(step, 9.0))
    bounds.end(None)
    for step in range(20, 30):
        bounds.after_step(outcome(step, 1.3e36))
    bounds.end(KeyboardInterrupt())
    run.recipe.steps = 30
    bounds.end(None)  # after a stop
    run.done = 30
    with pytest.raises(Diverged, match=r"was 9 at first and is 1\.3e\+36"):
        bounds.end(None)


def test_numbers_are_checked_once_more_where_the_loss_is_lost(monkeypatch):
    looked = []
    monkeypatch.setattr(NumberWatch, "__init__", lambda watch, run: vars(watch).update(_run=run))
    monkeypatch.setattr(NumberWatch, "check", lambda watch, step, again: looked.append((step, again)))
    watch = NumberWatch(SimpleNamespace(done=4))
    for error in (None, KeyboardInterrupt(), Diverged("up")):
        watch.end(error)
    assert looked == [(5, True)]


def test_the_message_names_rank_machine_and_tensors():
    found = Corruption(3, "node7", "exp_avg", ("a", "b", "c", "d"), False)
    told = str(Corrupted((found,), 10, 20))
    assert "steps 10 to 20: rank 3 on node7: optimizer state exp_avg of a, b, c, ...\n" in told
