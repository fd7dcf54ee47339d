"""plan.py largest: a model that fits, of which no larger one does, next to the documents' rule."""

from __future__ import annotations

import argparse
import math

import pytest

from launch.planning.prediction import workload
from launch.planning.prediction.forecast import forecast
from launch.planning.search import candidates, largest_command, shapes
from launch.planning.search.ways import WAYS


def parsed(line: str) -> argparse.Namespace:
    """The flags of plan.py largest, as a user writes them."""
    parser = argparse.ArgumentParser()
    largest_command.add_parser(parser.add_subparsers())
    return parser.parse_args(["largest", *line.split()])


def verdict(
    question: candidates.Question, model: largest_command.LargestModel, layers: int, hidden: int
) -> str:
    plan = largest_command.plan_of(question, model.configuration, layers, hidden)
    return forecast(workload.of_plan(plan), question.node).verdict


@pytest.mark.parametrize(
    "line", ["--hardware 2080ti", "--hardware v100-32x4 --micro 4 --nodes 3", "--hardware dgx2 --family bert"]
)
def test_it_fits_and_the_next_larger_one_does_not(line):
    args = parsed(line)
    question = largest_command.question_of(args, *args.nodes)
    for model in largest_command.largest(question):
        layers, hidden = model.forecast.work.model.layers, model.forecast.work.model.hidden
        assert verdict(question, model, layers, hidden) == model.forecast.verdict == "fits"
        assert verdict(question, model, layers + model.configuration.pp, hidden) != "fits"
        wider = hidden + largest_command.STEP * model.configuration.tp
        assert verdict(question, model, fewest(wider, model.configuration.pp), wider) != "fits"


def fewest(hidden: int, pp: int) -> int:
    return math.ceil(shapes.usual_layers(hidden) / pp) * pp


def test_pipelines_stand_beside_the_printed_maximal_sizes(capsys):
    """What Jean Zay ran fits; 50B on 128 GPUs of 16 GB, which barely fitted, is the largest found."""
    assert largest_command.run(parsed("--hardware v100-16x4 --nodes 4 8 16 32 64")) == 0
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines() if " 4 x " in line]
    rows = [[cell.strip() for cell in cells if cell.strip()] for cells in lines]
    assert [row[0] for row in rows] == ["16", "32", "64", "128", "256"]
    assert [row[-1] for row in rows] == [
        "7.5B, 36x4096", "–", "30B, 48x7168", "50B, 64x8192", "78B, 64x10240",
    ]  # fmt: skip
    assert rows[3][2] == "51.97 B, 64x8192"
    for row in (rows[0], *rows[2:]):
        assert float(row[2].split()[0]) > float(row[-1].split("B")[0])


def test_sharding_offload_and_recomputation_make_room():
    """On the GPUs of one node, all of them in turn; recomputation never takes room away."""
    question = largest_command.question_of(parsed("--hardware v100-32x8"))
    found = {}
    for model in largest_command.largest(question):
        way, tp, recomputed, _ = model.configuration
        found[way.name, tp, recomputed] = model.parameters
    order = ["ZeRO-0", "ZeRO-1", "ZeRO-2", "ZeRO-3", "ZeRO-3 offload"]
    sizes = [found[name, 1, True] for name in order]
    assert sizes == sorted(set(sizes))
    for (name, tp, recomputed), size in found.items():
        assert not recomputed or size >= found[name, tp, False]
    assert found["ZeRO-1", 8, True] > 2 * found["ZeRO-1", 1, True]


@pytest.mark.parametrize(("hardware", "printed"), [("v100-32x4", 2.0e9), ("2080ti", 0.7e9)])
def test_the_documents_bound_stands_next_to_ours(hardware, printed, capsys):
    """Theirs is memory over 16 bytes; ours under ZeRO-0 is smaller by gradients in fp32 and activations."""
    question = largest_command.question_of(parsed(f"--hardware {hardware}"))
    assert question.node.gpu.memory_bytes / 16 == pytest.approx(printed, rel=0.07)
    plain = largest_command.largest(question)[1]
    assert plain.configuration == (WAYS[0], 1, True, 1) and 0.6 * printed < plain.parameters < printed
    assert largest_command.run(parsed(f"--hardware {hardware}")) == 0
    assert f"they print {printed / 1e9:g} billion" in capsys.readouterr().out


def test_what_is_offloaded_can_run_out_of_host_memory():
    question = largest_command.question_of(parsed("--hardware 2080ti"))
    away = next(model for model in largest_command.largest(question) if model.configuration.way == WAYS[-1])
    assert away.limit.startswith("host memory") and 0.9 < away.host_share <= 1
    assert away.forecast.fullest_rank.total < question.node.gpu.memory_bytes / 1.3


def test_shapes_are_those_of_the_table():
    for shape in shapes.SIZES.values():
        assert shape.hidden % shape.heads == 0
        if shape.layers != 24 and shape.hidden != 2560:  # of equal depths the widest is met last
            assert shapes.usual_layers(shape.hidden) == shape.layers
    grown = [shapes.usual_layers(hidden) for hidden in range(128, 20_000, 128)]
    assert grown == sorted(grown) and grown[0] >= 2
