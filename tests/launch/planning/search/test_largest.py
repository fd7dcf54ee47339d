"""plan.py search --largest: a model that fits, of which no wider one does, next to the printed sizes."""

from __future__ import annotations

import argparse
import re

import pytest

from ds_configs.findings import ConfigError
from launch.planning.search import candidates, largest, search_command, shapes
from launch.planning.search.candidates import WAYS, SearchQuestion
from recipes.problems import ProblemsError


def parsed(line: str) -> argparse.Namespace:
    """The flags of plan.py search --largest, as a user writes them."""
    parser = argparse.ArgumentParser()
    search_command.add_parser(parser.add_subparsers())
    return parser.parse_args(["search", "--largest", *line.split()])


def asked(line: str) -> SearchQuestion:
    return search_command.question_of(parsed(line))


def sizes(line: str) -> dict[str, int]:
    """The hidden size of the largest model of each way."""
    return {
        each.way: each.best.plan.recipe.model.hidden for each in largest.largest(asked(line)) if each.best
    }


LINES = [
    "--hardware 2080ti",
    "--hardware v100-32x4 --nodes 2",
    "--recipe wikipedia/bert-336m --hardware h200x8",
]


@pytest.mark.parametrize("line", LINES)
def test_it_fits_and_no_wider_or_deeper_one_does_under_any_layout(line):
    question = asked(f"{line} --set batch.micro=1")
    for way, best, _ in largest.largest(question):
        assert best.forecast.verdict == "fits" and best.way == way
        assert best.plan.layout.world == question.ranks and best.plan.layout.micro == 1
        model = best.plan.recipe.model
        for choice in candidates.choices(question):
            width = largest.STEP * choice.tp * (model.hidden // (largest.STEP * choice.tp) + 1)
            usual = shapes.usual_layers(width)
            for shape in ((width, usual + -usual % choice.pp), (model.hidden, model.layers + choice.pp)):
                try:
                    tried = list(candidates.of_choice(largest.shaped(question, *shape), way, choice))
                except ConfigError:  # the layout cannot be had
                    continue
                assert all(each.forecast.verdict != "fits" for each in tried), (way, choice, shape)


def test_printed_sizes_stand_next_to_what_is_found(capsys):
    """What Jean Zay ran on 16 nodes fits: 61B with Megatron-LM, 91B with ZeRO-3 and offload."""
    assert search_command.run(parsed("--hardware v100-32x4 --nodes 16")) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "printed of 64 GPUs on 16 nodes of this kind: 61B, 64x9216 (Megatron-LM); 91B, 64x11264" in shown
    assert float(shown.partition("ZeRO-1 ")[2].split()[0]) > 61
    assert float(shown.partition("ZeRO-3 offload ")[2].split()[0]) > 91
    degrees = re.findall(r" (\d+)x\d+x\d+ ", shown)
    assert len(degrees) == len(WAYS) and {*degrees} <= {"1", "2", "4"}, (
        "none across nodes, as the document rules"
    )


@pytest.mark.parametrize(("hardware", "printed"), [("v100-32x4", "2"), ("2080ti", "0.7"), ("dgx2", None)])
def test_the_documents_bound_stands_below(hardware, printed, capsys):
    assert search_command.run(parsed(f"--hardware {hardware}")) == 0
    shown = capsys.readouterr().out
    assert "memory over 16 bytes a parameter" in shown
    assert (f"they print {printed} B for this GPU" in shown) == (printed is not None)


def test_sharding_and_offload_make_room_and_recomputation_takes_none():
    line = "--hardware v100-32x8 --set parallel.tp=1 --set parallel.pp=1"
    found = sizes(line)
    order = ["ZeRO-0", "ZeRO-1", "ZeRO-2", "ZeRO-3", "ZeRO-3 offload"]
    wide = [found[name] for name in order]
    assert wide == sorted(set(wide))
    kept = sizes(f"{line} --set activation_checkpointing=none")
    assert all(kept[name] <= width for name, width in found.items()) and kept != found


def test_what_is_offloaded_can_run_out_of_host_memory(capsys):
    question = asked("--hardware 2080ti")
    away = largest.largest(question)[-1].best
    assert 0.9 < away.forecast.host / (question.node.host.memory_gb * 1e9) <= 1
    assert away.forecast.fullest_rank.total < question.node.gpu.memory_bytes / 1.3
    search_command.run(parsed("--hardware 2080ti"))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "ZeRO-3 offload all" in line]
    assert "host memory" in line


def test_where_nothing_fits_it_says_so(capsys):
    """A table of a billion tokens is larger than the GPU, however few layers there are."""
    line = "--hardware 2080ti --set sequence_length=262144 --set batch.micro=64"
    assert search_command.run(parsed(line)) == 1
    assert capsys.readouterr().out.count("none fits") == len(WAYS)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--hardware v100-32x8 --set parallel.tp=3", "a multiple of tp x pp"),
        ("--hardware v100-32x8 --set batch.micro=7", "--set batch.micro=4 or 8"),
        ("--hardware v100-32x8 --set parallel.pp=8 --set parallel.sequence=true", "positions out"),
    ],
)
def test_what_no_layout_can_have_is_refused(line, says):
    with pytest.raises(ProblemsError, match=says):
        largest.largest(asked(line))


def test_a_way_that_cannot_be_run_says_why(capsys):
    assert search_command.run(parsed("--hardware v100-32x8 --set optimizer.name=lamb")) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert " ZeRO-0 " in shown and "ZeRO-3 offload all cannot be run: " in shown and "none fits" not in shown


def test_a_precision_that_the_gpu_lacks_is_not_said(capsys):
    search_command.run(parsed("--hardware v100-32x8 --set precision=bf16 --set parallel.tp=8"))
    assert "a gpt2 in fp16" in capsys.readouterr().out


def test_a_model_has_whole_heads_and_equal_stages():
    question = asked("--hardware dgx2")
    assert question.recipe.precision == "fp16"
    for each in largest.largest(question):
        model, layout = each.best.plan.recipe.model, each.best.plan.layout
        assert model.hidden % model.heads == model.heads % layout.tp == model.layers % layout.pp == 0
        assert model.hidden // model.heads == (128 if model.hidden >= 2048 else 64)
        assert model.layers >= shapes.usual_layers(model.hidden)


def test_shapes_are_those_of_the_table():
    for shape in shapes.SIZES.values():
        assert shape.hidden % shape.heads == 0
        if shape.layers != 24 and shape.hidden != 2560:  # of equal depths the widest is met last
            assert shapes.usual_layers(shape.hidden) == shape.layers
    grown = [shapes.usual_layers(hidden) for hidden in range(128, 20_000, 128)]
    assert grown == sorted(grown) and grown[0] >= 2
