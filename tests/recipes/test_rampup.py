"""A batch that is ramped up: the samples of each step, and what is refused."""

import itertools

import pytest

from ds_configs.findings import ConfigError
from ds_configs.plan import HOST, Machine
from ds_configs.resolver import resolve
from launch.records.plan_text import Surroundings, describe_plan
from recipes import catalog
from recipes.key_paths import KEPT_BY_RESUME, changes
from recipes.layout import batch_schedule
from recipes.problems import RecipeError

MACHINE = Machine(HOST, fp16=False, bf16=True, compiler=True, libaio=False)
RAMPS = [(8, 4, 2, 40), (1024, 16, 8, 300_000), (2048, 192, 16, 9_765_625), (64, 8, 8, 10), (3, 1, 1, 2)]


def ramped(start=4, increment=2, samples=40, name=catalog.DEFAULT_RECIPE, more=(), **how):
    ramp = f"batch.rampup={{start: {start}, increment: {increment}, samples: {samples}}}"
    return catalog.load(name, [ramp, *more], **how)


@pytest.mark.parametrize("ramp", RAMPS)
def test_the_batch_grows_as_megatrons(ramp):
    """Whose rule is: after c samples, start + int(c / (samples / increments)) increments; then all."""
    full, start, increment, samples = ramp
    sizes, read = batch_schedule(*ramp), 0
    for step in range(3000):
        grown = read * ((full - start) // increment) // samples
        expected = start + grown * increment if read <= samples else full
        assert (sizes.samples(step), sizes.size(step)) == (read, expected), step
        read += expected
    assert sizes.size(10**9) == full


def test_a_batch_without_a_ramp_is_always_full():
    sizes = catalog.load().sizes
    assert [sizes.size(step) for step in (0, 1, 10**9)] == [8] * 3 and sizes.samples(7) == 56


@pytest.mark.parametrize(
    ("ramp", "message"),
    [
        ({"start": 8}, "batch.rampup.start=8 with batch.rampup.increment=2: start and one or more increments "
         "are batch.global=8; set batch.rampup.start below batch.global"),
        ({"start": 2, "increment": 4}, "are batch.global=8; set batch.rampup.increment to 2"),
        ({"increment": 0}, "batch.rampup.increment"),
        ({"more": ["batch.rampup.end=3"]}, "batch.rampup.end"),
        ({"name": "jeanzay_hf_deepspeed_max_size/91b-g64"}, "with transformers' Trainer: it takes as many"),
    ],
)  # fmt: skip
def test_a_wrong_ramp_is_refused_with_the_fix(ramp, message):
    with pytest.raises(RecipeError) as refused:
        ramped(**ramp)
    assert message in " ".join(str(refused.value).split())


def test_every_step_has_whole_micro_batches_or_the_layout_is_refused():
    """The micro-batch that is left open suits all steps, and what is proposed is accepted."""
    ways = itertools.product((1, 2, 3, 4), (1, 2), (None, 1, 2, 4), ((4, 2), (4, 4), (8, 8), (6, 3)))
    for dp, pp, micro, (start, increment) in ways:
        more = [f"batch.global={start + 2 * increment}", f"parallel.pp={pp}"]
        recipe = ramped(start, increment, more=[*more, f"batch.micro={micro or 'null'}"])
        try:
            layout = resolve(recipe, "pipeline" if pp > 1 else "zero1", dp * pp, MACHINE, {}).layout
        except ConfigError as refused:
            fixes = str(refused).split("or batch.micro to ")
            if len(fixes) > 1:
                fixed = ramped(start, increment, more=[*more, f"batch.micro={fixes[1].strip()}"])
                resolve(fixed, "pipeline" if pp > 1 else "zero1", dp * pp, MACHINE, {})
            else:
                assert start % dp or increment % dp or "batch.global=" in str(refused)
            continue
        assert start % (layout.micro * dp) == increment % (layout.micro * dp) == 0
        assert micro or start >= layout.micro * dp * pp or layout.micro == 1, "a full pipeline from the start"


def test_a_tiny_ramp_is_a_ramp():
    recipe = ramped(tiny=False)
    small = catalog.load(catalog.DEFAULT_RECIPE, tiny=True)
    assert small.batch.rampup is None and recipe.batch.rampup
    from recipes.tiny import tiny

    for row in (recipe, ramped(4, 4, more=["batch.micro=4", "parallel.dp=1"])):
        shrunk = tiny(row)
        assert catalog.dump(tiny(shrunk)) == catalog.dump(shrunk), "shrinking twice changes nothing more"
        sizes = [shrunk.sizes.size(step) for step in range(7)]
        assert sizes == [shrunk.batch.global_ // 2] * 5 + [shrunk.batch.global_] * 2
        resolve(shrunk, "zero1", None, MACHINE, {})


def test_the_plan_counts_what_is_read():
    """Steps of 4, 4, 4, 4, 4, 6, 6, 6, 6 and 8 samples of 256 tokens."""
    text = describe_plan(
        resolve(ramped(more=["schedule.counts=samples"]), "zero1", 1, MACHINE, {}), "x", Surroundings("a CPU")
    )
    assert "2 micro x 4 accumulation x 1 dp = 8 global from step 10 on, 4 at first, by 2 more" in text
    assert f"300 steps, {(5 * 4 + 4 * 6 + 291 * 8) * 256:,} tokens" in " ".join(text.split())
    assert "cosine by samples, 20 warm-up steps" in text


def test_another_ramp_is_another_training():
    """So that no run goes on with it."""
    one, other = ramped(), ramped(samples=41)
    assert len({catalog.digest(each) for each in (one, other, catalog.load())}) == 3
    assert [change[0] for change in changes(one, other, KEPT_BY_RESUME)] == ["batch.rampup.samples"]


def test_another_batch_goes_on_after_the_samples_that_are_read():
    before = batch_schedule(8, 2, 2, 30)
    step = 7  # in mid-ramp
    same = batch_schedule(8, 2, 2, 30, before.until(step), step)
    assert [same.samples(n) for n in range(30)] == [before.samples(n) for n in range(30)]
    other = batch_schedule(16, 16, 1, 1, before.until(step), step)
    assert other.samples(step) == before.samples(step) and other.size(step) == 16
    assert [other.size(n) for n in range(step)] == [before.size(n) for n in range(step)]
    moved = other.counted_from(before.samples(step))
    assert (moved.samples(step), moved.size(step), moved.samples(step + 2)) == (0, 16, 32)
