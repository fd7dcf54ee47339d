"""`plan.py --fits`: which nodes carry a recipe, and which JSON would make it fit the others."""

import pytest

from launch import plan
from launch.planning.carrying_nodes import carriers, page
from launch.planning.prediction import hardware
from recipes import catalog

LARGE = "dgx2_gpt2_model_parallel/72x3072-h32-tp8"


def found_for(name, nodes, ds_config=None, count=1):
    recipe = catalog.load(name)
    found = carriers(recipe, ds_config, [hardware.find(node) for node in nodes], count)
    return found, str(page(recipe, name, found, count, None))


def test_nodes_that_fit_come_first_and_the_fastest_of_them_before_the_others():
    found, _ = found_for(LARGE, ["2080tix8", "v100-32x8", "v100-32x4", "a100-80x8"], "zero0")
    assert [(each.node.name, each.fit.verdict) for each in found] == [
        ("a100-80x8", "fits"),
        ("v100-32x8", "fits"),
        ("2080tix8", "out of memory"),
        ("v100-32x4", "refused"),
    ]


def test_where_the_recipes_own_json_does_not_fit_one_that_keeps_less_is_named():
    found, text = found_for(LARGE, ["2080tix8", "dgx2"])
    with_json = {each.node.name: (each.fit.fits, each.instead) for each in found}
    assert with_json == {"dgx2": (True, None), "2080tix8": (False, "zero2_offload")}
    assert "fits    1 of 2 kinds of node, 1 of each" in text
    (line,) = (line for line in text.splitlines() if "2080tix8" in line)
    assert line.split() == ["2080tix8", "29", "of", "12", "zero2_offload"]
    _, alone = found_for(LARGE, ["2080tix8"])
    assert f"plan.py --recipe {LARGE} --hardware 2080tix8 --ds_config zero2_offload" in alone


def test_a_layout_that_a_node_cannot_have_is_said_with_the_number_of_nodes():
    found, text = found_for(LARGE, ["v100-32x4"])
    assert not found[0].fit.fits
    assert "tp 8 x pp 1 on 4 GPUs" in text and "--nodes 2" in text
    found, text = found_for(LARGE, ["v100-32x4"], count=2)
    assert found[0].fit.fits and "with --set parallel.dp=1: 8 of 16 processes" in text
    assert f"plan.py --recipe {LARGE} --hardware v100-32x4 --nodes 2" in text


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--hardware", "8xv100-32"], 0),
        (["--hardware", "4xv100-32"], 1),
        (["--hardware", "4xv100-32", "--nodes", "2"], 0),
        (["--hardware", "2080tix8", "--ds_config", "zero0"], 1),
    ],
)
def test_the_exit_code_says_whether_a_node_carries_it(words, code, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["plan.py", "--fits", LARGE, *words])
    assert plan.main() == code
    assert LARGE in capsys.readouterr().out
