"""What the engines take of a micro-batch of each family, and how it is weighted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from random_batch import random_batch

from data.loader import rank_rows
from ds_configs.plan import HOST, Machine
from ds_configs.resolver import resolve
from launch.training import micro_batches
from recipes import catalog
from recipes.families import FAMILIES

SIZES = dict(samples=3, length=24, predictions=4, vocabulary=90)
MACHINE = Machine(HOST, fp16=False, bf16=True, compiler=True, libaio=False)
ALONE = SimpleNamespace(dp=1)
EACH_FAMILY = pytest.mark.parametrize("family", FAMILIES)


def batch(family: str) -> micro_batches.MicroBatch:
    return random_batch(FAMILIES[family].fields, **SIZES)


@EACH_FAMILY
def test_a_random_batch_has_the_shapes_of_the_fields(family):
    fields, sizes = FAMILIES[family].fields, dict(B=3, S=24, P=4)
    for name, dimensions in {**fields.inputs, **fields.targets}.items():
        value = batch(family)[name]
        assert value.shape == tuple(sizes[dimension] for dimension in dimensions), name
        assert value.dtype == (torch.float32 if "weights" in name else torch.int64), name


@EACH_FAMILY
def test_inputs_go_to_the_first_stage_and_targets_to_the_last(family):
    given, fields = batch(family), FAMILIES[family].fields
    inputs, targets = micro_batches.for_pipeline(given, None, "cpu")
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    for names, values in ((fields.inputs, inputs), (fields.targets, targets)):
        assert all(given[name] is value for name, value in zip(names, values, strict=True))


def test_weights_are_scaled_by_the_steps_predictions_where_samples_differ_in_them():
    packed = [batch("gpt2")]
    assert micro_batches.normalise(packed, ALONE, "cpu") is packed, "the loader's weights are right already"
    uneven = [{**batch("bert"), "weights": torch.ones(3, 4) * weight} for weight in (0.0, 1.0)]
    scaled = micro_batches.normalise(uneven, ALONE, "cpu")
    sums = [float(b["weights"].sum()) for b in scaled]
    assert sums == pytest.approx([0, 2]), "their mean over micro-batches is 1"


def test_dropout_seeds_of_a_sample_are_those_of_its_number_on_whatever_rank():
    """Of all ranks and micro-batches together: each sample's of the global batch once, as in one process."""

    def dropout_seeds(dp: int, accumulation: int, step: int = 3) -> torch.Tensor:
        settings = f"parallel.dp={dp}", f"batch.accumulation={accumulation}", "dropout.hidden=0.1"
        plan = resolve(catalog.load(overrides=settings, tiny=True), "zero1", dp, MACHINE)
        of_ranks = [micro_batches.dropout_seeds_of_step(plan, rank, step, "cpu") for rank in range(dp)]
        rows = torch.cat([torch.from_numpy(rank_rows(plan.layout, rank)).flatten() for rank in range(dp)])
        return torch.cat([torch.cat(each) for each in of_ranks])[rows.argsort()]

    whole = dropout_seeds(1, 1)
    assert len({tuple(sample.flatten().tolist()) for sample in whole}) == len(whole)
    assert all(torch.equal(dropout_seeds(*shares), whole) for shares in ((1, 2), (2, 1), (2, 2), (4, 1)))
    assert not torch.equal(dropout_seeds(1, 1, step=4), whole)
