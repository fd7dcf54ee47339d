"""plan.py search: the fastest layout that fits, of all that the engine can run, and its launch line."""

from __future__ import annotations

import argparse
import functools
import itertools
import re
import shlex
from dataclasses import replace

import pytest

from ds_configs.findings import ConfigError
from ds_configs.plan import ANY_GPU
from ds_configs.resolver import resolve
from launch.planning.memory_fit import fit
from launch.planning.prediction import workload
from launch.planning.prediction.constants import fitted
from launch.planning.prediction.forecast import Forecast
from launch.planning.search import candidates, search_command, search_text
from launch.planning.search.candidates import WAYS, Candidate, SearchQuestion
from recipes import catalog
from recipes.layout import Layout, divisors
from recipes.problems import ProblemsError

# The four that a user is shown, a published row that states its layout, one whose degrees are pinned, a BERT.
CASES = {
    "13b": "--model 13b --hardware v100-32x8 --nodes 8",
    "13b, small nodes": "--model 13b --hardware v100-32x4 --nodes 16",
    "345m": "--model 345m --hardware v100-32-pciex8",
    "175b": "--model 175b --hardware a100-80x8 --nodes 128",
    "row": "--recipe dgx2_gpt2_model_parallel/72x3072-h32-tp8",
    "pinned": "--recipe megatron_paper_table1/8.3b-mp-dp --nodes 4 --set parallel.pp=2 --set batch.micro=1 "
    "--set activation_checkpointing=full --set batch.global=1024",
    "bert": "--recipe wikipedia/bert-336m --hardware a100-40x8 --nodes 2",
    "offload": "--model 6.7b --hardware v100-32x4",
    "offload in a pipeline": "--model 6.7b --hardware v100-32x4 --set parallel.pp=2",
    "ramp": "--model 350m --hardware v100-32x4 --set batch.accumulation=4 "
    "--set 'batch.rampup={start: 64, increment: 64, samples: 1024}'",
}


def parsed(line: str) -> argparse.Namespace:
    """The flags of plan.py search, as a user writes them."""
    parser = argparse.ArgumentParser()
    search_command.add_parser(parser.add_subparsers())
    return parser.parse_args(["search", *shlex.split(line)])


def asked(line: str) -> SearchQuestion:
    return search_command.question_of(parsed(line))


@functools.cache
def ranking(line: str) -> list[Candidate]:
    return candidates.search(asked(line))


def fitting(line: str) -> list[Candidate]:
    return [each for each in ranking(line) if each.fits]


def layouts(line: str) -> list[Layout]:
    return [each.plan.layout for each in fitting(line)]


def page(line: str, found: list[Candidate]) -> str:
    return str(search_text.page(asked(line), found, "x", 3))


@pytest.mark.parametrize("case", CASES)
def test_the_launch_line_trains_the_layout_that_was_predicted(case, capsys, monkeypatch):
    """Its JSON and its flags resolve to the first layout, with its memory and time."""
    question, found = asked(CASES[case]), ranking(CASES[case])
    monkeypatch.setattr(candidates, "search", lambda question: found)
    assert search_command.run(parsed(CASES[case])) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "launch/pretrain.py" in line]
    words = shlex.split(line)
    flags = [*itertools.pairwise(words[words.index("launch/pretrain.py") + 1 :])]
    named, sets = dict(flags), [value for flag, value in flags if flag == "--set"]
    plan = resolve(catalog.load(named["--recipe"], sets), named["--ds_config"], question.ranks, ANY_GPU)
    best = found[0]
    assert plan.layout == best.plan.layout and plan.layout.world == question.ranks
    again = Forecast(workload.of_plan(plan), question.node)
    assert again.fullest_rank.total == best.forecast.fullest_rank.total and again.time == best.forecast.time
    assert again.verdict == best.forecast.verdict != "out of memory"
    assert best.way == "ZeRO-1 offload" or case != "offload in a pipeline"


def test_no_layout_of_the_ready_made_files_is_faster():
    """Every degree, JSON, recomputation and micro-batch through the resolver and plan.py's own forecast."""
    line = "--model 760m --hardware v100-16x4 --set batch.global=8 --set model.layers=10"
    question, node = asked(line), asked(line).node
    seconds = {}
    for tp, pp, file, again, cut in itertools.product(
        divisors(4), divisors(4), WAYS.values(), ("none", "full"), (False, True)
    ):
        for micro in divisors(8):
            sets = {"tp": tp, "pp": pp, "sequence": cut}
            changed = {
                "parallel": question.recipe.parallel.model_copy(update=sets),
                "batch": question.recipe.batch.model_copy(update={"micro": micro}),
                "activation_checkpointing": again,
            }
            try:
                plan = resolve(question.recipe.model_copy(update=changed), file, 4, ANY_GPU)
            except ConfigError:
                continue
            each = Forecast(workload.of_plan(plan), node)
            if each.verdict != "out of memory" and each.time:
                seconds[tp, pp, micro, file, again, cut] = each.time.total
    predicted = {}
    for each in fitting(line):
        layout, recipe = each.plan.layout, each.plan.recipe
        again, cut = recipe.activation_checkpointing, recipe.parallel.sequence
        predicted[layout.tp, layout.pp, layout.micro, WAYS[each.way], again, cut] = each.seconds
    assert len(seconds) > 50 and predicted == seconds
    assert ranking(line)[0].seconds == min(seconds.values())


def changed(candidate: Candidate, **values) -> Candidate:
    """A candidate whose forecast says something else."""
    other = replace(candidate, forecast=replace(candidate.forecast))
    vars(other.forecast).update(values)
    return other


def test_the_fastest_stands_first_and_what_is_snug_or_too_large_last():
    found = ranking(CASES["13b"])
    order = ["fits", "snug", "out of memory"]
    verdicts = [order.index(each.forecast.verdict) for each in found]
    assert verdicts == sorted(verdicts) and {*verdicts} == {0, 1, 2}
    for verdict in ("fits", "snug"):
        times = [each.seconds for each in found if each.forecast.verdict == verdict]
        assert times == sorted(times)
    full = [each.forecast.binding.share for each in found if not each.fits]
    assert full == sorted(full)
    assert found[0].seconds > min(each.seconds for each in fitting(CASES["13b"])), "snug ones would be faster"


def test_layouts_are_marked_as_snug_and_as_waiting_for_the_host():
    line = "--model 125m --hardware h100-80x8 --set batch.global=64 --set batch.micro=1"
    found, usual = ranking(line), ranking(CASES["13b"])
    assert found[0].forecast.waits and not usual[0].forecast.waits
    said = page(line, found)
    waiting = fitted().waiting
    assert "ZeRO-1, WAITS" in said
    assert f"WAITS: time ±{waiting.median:.0%} in the median of {waiting.rows}" in said
    assert "WAITS" not in page(CASES["13b"], usual)
    assert "SNUG, WAITS" in page(line, [changed(found[0], verdict="snug")])


def test_tensor_ranks_stay_inside_a_node_unless_more_are_asked_for():
    """Megatron-LM's rule: all-reduces of every layer would go over the network."""
    assert {layout.tp for layout in layouts(CASES["13b, small nodes"])} == {1, 2, 4}
    assert {layout.tp for layout in layouts(CASES["13b, small nodes"] + " --set parallel.tp=8")} == {8}
    # ranks 3 to 5 would lie on two nodes
    odd = layouts("--model 1.3b --hardware a100-40x4 --nodes 3 --set model.heads=48 --set model.hidden=3072 "
                  "--set batch.global=768")  # fmt: skip
    assert {layout.tp for layout in odd} == {1, 2, 4}


def test_a_layouts_verdict_is_that_of_the_recipe_that_it_makes():
    found = [each for each in fitting(CASES["offload"]) if each.way == "ZeRO-2"]
    for each in found[:5]:
        again = fit(each.plan.recipe, asked(CASES["offload"]).node, 1, "zero2")
        assert (again.verdict, again.plan.layout) == (each.forecast.verdict, each.plan.layout)
    assert found


def test_nothing_is_proposed_that_the_engine_lacks():
    for each in fitting(CASES["175b"]):
        plan = each.plan
        assert plan.layout.tp > 1 or not plan.recipe.parallel.sequence
        assert plan.layout.pp == 1 or plan.zero_stage == 1
    assert {each.plan.recipe.parallel.sequence for each in fitting(CASES["175b"])} == {True, False}


def test_what_is_set_stays():
    for each in fitting(CASES["pinned"]):
        layout = each.plan.layout
        assert (layout.pp, layout.micro, layout.global_batch) == (2, 1, 1024)
        assert each.plan.recipe.activation_checkpointing == "full"
    usual = "--model 2.7b --hardware v100-32x8"
    assert {layout.dp for layout in layouts(f"{usual} --set parallel.dp=2")} == {2}
    assert {layout.accumulation for layout in layouts(f"{usual} --set batch.accumulation=32")} == {32}
    odd = fitting(f"{usual} --set sequence_length=1023")
    assert not any(each.plan.recipe.parallel.sequence for each in odd)
    for each in fitting(f"{usual} --set parallel.sequence=true"):
        assert each.plan.recipe.parallel.sequence and each.plan.layout.tp > 1
    chunks = fitting("--model 2.7b --hardware v100-32x4 --set activation_checkpointing=4")
    assert {each.forecast.work.recomputed for each in chunks} == {4}


def test_host_memory_excludes_what_is_offloaded():
    """Of 13 billion on four V100: 16 bytes of each in the host's 160 GB."""
    line = "--model 13b --hardware v100-32x4 --set parallel.tp=1 --set parallel.pp=1"
    full = ranking(line)[0].forecast.binding
    assert not fitting(line) and full.place == "host" and full.missing > 0
    assert "of host memory per node" in page(line, ranking(line))


def test_where_nothing_fits_it_says_what_is_missing(capsys):
    args = parsed("--model 175b --hardware 2080tix8")
    assert search_command.run(args) == 1
    out = capsys.readouterr().out
    assert "NOTHING FITS. Nearest: " in out and "out of memory by" in out and "to launch" not in out


ONE = "--model 13b --hardware v100-32x8 --set parallel.tp=1 --set parallel.pp=1"
REFUSED = {
    "--model 13b --hardware v100-32x9": "--hardware 8xv100-32 --nodes 2",
    f"{ONE} --set batch.global=7": "batch.global=7 is not divisible by dp=8",
    "--recipe default/sotu": "no --hardware",
    "--model 13b --hardware v100-32x8 --set parallel.tp=3": "set parallel.tp to 1, 2, 4, 5, 8",
    "--model 13b --hardware v100-32x8 --set parallel.pp=3": "a multiple of tp x pp",
    "--model 13b --hardware v100-32x8 --set parallel.pp=64": "a multiple of tp x pp",
    "--model 345m --hardware v100-32-pciex8 --set batch.micro=3": "--set batch.micro=2 or 4",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_cannot_be_searched_is_refused_with_the_resolvers_reason(line):
    """The refusal with the fewest reasons: none that pinning something else would bring."""
    with pytest.raises(ProblemsError, match=REFUSED[line]) as refused:
        search_command.run(parsed(line))
    assert len(refused.value.problems) <= 2


def test_a_precision_that_the_gpu_lacks_is_said_with_the_one_that_it_has(capsys):
    line = "--recipe openwebtext/gpt2-124m --hardware v100-32-pciex8"
    search_command.run(parsed(line))
    assert "fp16 INSTEAD OF bf16" in capsys.readouterr().out
    search_command.run(parsed(f"{line} --set precision=fp16"))
    assert "INSTEAD" not in capsys.readouterr().out


def test_the_page_has_the_winner_first_and_its_launch_line(capsys):
    assert search_command.run(parsed(f"{CASES['13b']} --top 2")) == 0
    out = capsys.readouterr().out
    assert "64 GPUs on 8 nodes" in out and "12.9 billion parameters" in out and "MFU" in out
    assert "--num_nodes 8 --num_gpus 8 launch/pretrain.py --ds_config ds_configs/zero2.json" in out
    rows = re.findall(r"^ +(\d+) +(\w+) .*%  (.*)$", out, re.MULTILINE)
    second = ("2", "4x1x16", "ZeRO-1, sequence parallel")
    assert rows[1:] == [second] != rows[:1], "micro-batches of the first layout have no row of their own"
