"""Stages of a pipeline are cut so that the slowest one takes least."""

import pytest

from modeling.cost.operation_count import balanced_stages, equal_stages, head_in_layers, stages_of
from recipes import catalog


def test_a_slow_output_layer_takes_layers_from_the_last_stage():
    assert balanced_stages(6, 2, 1.78) == [4, 2]
    assert balanced_stages(12, 4, 2.6) == [4, 4, 3, 1]
    assert balanced_stages(2, 2, 50) == [1, 1], "every stage has a layer"


def test_a_fast_one_leaves_stages_equal():
    for layers, pp in (6, 2), (7, 3), (64, 16), (96, 8):
        assert balanced_stages(layers, pp, 0.0) == equal_stages(layers, pp)
    assert balanced_stages(64, 16, 0.51) == [4] * 16, "another stage of 5 would take longer than 4.51"
    assert balanced_stages(12, 4, 1.0) == [3] * 4, "as long as with 2 in the last stage"


def test_the_output_layer_is_counted_in_layers():
    default = catalog.load(catalog.DEFAULT_RECIPE)
    layer = 24 * 256 * 384**2 + 4 * 256**2 * 384
    head = head_in_layers(default.model, 256, 8192, None, recomputed=False)
    assert head == pytest.approx(2 * 256 * 384 * 8192 / layer)
    assert head_in_layers(default.model, 256, 8192, None, recomputed=True) == pytest.approx(0.75 * head)
    assert stages_of(default, 8192, 2) == (4, 2)
    bert = catalog.load("bert/sotu")
    assert stages_of(bert, 4096, 1) == (bert.model.layers,)


def test_published_pipelines_have_the_stages_of_their_source():
    """Equally many layers in each; their output layers take less than one."""
    for name in catalog.titles():
        recipe = catalog.load(name)
        layers, pp = recipe.model.layers, recipe.parallel.pp or 1
        if recipe.published and pp > 1:
            assert list(stages_of(recipe, recipe.model.vocab_size, pp)) == equal_stages(layers, pp), name
