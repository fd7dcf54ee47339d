"""`plan.py --fits`: which nodes carry a recipe, and with which JSON."""

import pytest

from launch.planning.prediction import hardware
from launch.planning.prediction.carrying_nodes import carriers, page
from recipes import catalog

LARGE = "dgx2_gpt2_model_parallel/72x3072-h32-tp8"


def found_for(name, nodes, ds_config=None, sets=()):
    recipe = catalog.load(name, sets)
    return recipe, carriers(recipe, ds_config, [hardware.find(node) for node in nodes], None)


def test_nodes_that_fit_come_first_and_the_fastest_of_them_before_the_others():
    _, found = found_for(LARGE, ["2080tix8", "v100-32x8", "a100-80x8"], "zero0")
    assert [(each.node.name, each.fits) for each in found] == [
        ("a100-80x8", True),
        ("v100-32x8", True),
        ("2080tix8", False),
    ]


def test_where_the_recipes_own_json_does_not_fit_one_that_keeps_less_is_tried():
    recipe, found = found_for(LARGE, ["2080tix8", "dgx2"])
    with_json = {each.node.name: each.ds_config for each in found}
    assert with_json == {"dgx2": recipe.ds_config, "2080tix8": "zero2_offload"}
    assert all(each.fits for each in found)


def test_a_layout_that_a_node_cannot_have_is_said_with_its_reason():
    recipe, found = found_for("openwebtext/gpt2-124m", ["3x3090", "2x3090"])
    assert [each.fits for each in found] == [True, False]
    text = str(page(recipe, "openwebtext/gpt2-124m", found, None))
    assert "fits    1 of 2 nodes" in text
    assert "3xrtx-3090" in text.partition("refused")[2], text
    assert "plan.py --recipe openwebtext/gpt2-124m --hardware 2xrtx-3090" in text


def test_what_a_gpu_or_a_host_lacks_is_said(capsys):
    recipe, found = found_for(LARGE, ["2080tix8"], "zero0")
    text = str(page(recipe, LARGE, found, 100))
    assert "out of memory" in text and "29 of 12" in text and "zero0" in text


@pytest.mark.parametrize(
    ("words", "code"),
    [(["--hardware", "4xv100-32"], 0), (["--hardware", "2080tix8", "--ds_config", "zero0"], 1)],
)
def test_the_exit_code_says_whether_a_node_carries_it(words, code, monkeypatch, capsys):
    from launch import plan

    monkeypatch.setattr("sys.argv", ["plan.py", "--fits", LARGE, *words])
    assert plan.main() == code
    assert LARGE in capsys.readouterr().out
