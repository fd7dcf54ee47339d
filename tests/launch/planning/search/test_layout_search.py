"""plan.py search: the first layout is the fastest that fits, and runs as predicted."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import shlex
from dataclasses import replace

import pytest

from ds_configs.findings import ConfigError
from ds_configs.plan import ANY_GPU
from ds_configs.resolver import resolve
from launch.planning.memory_fit import fit
from launch.planning.prediction import workload
from launch.planning.prediction.constants import fitted
from launch.planning.prediction.forecast import forecast
from launch.planning.search import candidates, layout_search, search_command, search_text, shapes, ways
from recipes import catalog
from recipes.layout import divisors
from recipes.problems import ProblemsError

# The four that a user is shown, a published row that states its layout, one whose degrees are pinned, a BERT.
CASES = {
    "13b": "--model 13b --hardware v100-32x8 --nodes 8",
    "13b, small nodes": "--model 13b --hardware v100-32x4 --nodes 16",
    "345m": "--model 345m --hardware v100-32-pciex8",
    "175b": "--model 175b --hardware a100-80x8 --nodes 128",
    "row": "--recipe dgx2_gpt2_model_parallel/72x3072-h32-tp8",
    "pinned": "--recipe megatron_paper_table1/8.3b-mp-dp --nodes 4 --set parallel.pp=2 --set batch.micro=1 "
    "--set activation_checkpointing=full --global-batch 1024",
    "bert": "--recipe wikipedia/bert-336m --hardware a100-40x8 --nodes 2",
    "offload": "--model 6.7b --hardware v100-32x4",
}
SEARCH = layout_search.search


def test_a_layout_makes_the_batch_of_a_recipe_without_its_ramp():
    ramp = "batch.rampup={start: 2, increment: 2, samples: 8}"
    recipe = catalog.load("default/sotu", [ramp])
    found = candidates.laid_out(recipe, candidates.Degrees(2, 3, 4), 5, 6, seed=7)
    assert found.parallel.degrees == {"tp": 2, "pp": 3, "dp": 4} and found.seed == 7
    batch = found.batch
    assert (batch.micro, batch.accumulation, batch.global_, batch.rampup) == (5, 6, 120, None)
    assert recipe.batch.rampup


def parsed(line: str) -> argparse.Namespace:
    """The flags of plan.py search, as a user writes them."""
    parser = argparse.ArgumentParser()
    search_command.add_parser(parser.add_subparsers())
    return parser.parse_args(["search", *shlex.split(line)])


@functools.cache
def answer(line: str) -> layout_search.SearchAnswer:
    return SEARCH(search_command.question_of(parsed(line))[1])


@pytest.mark.parametrize("case", CASES)
def test_the_written_winner_is_the_layout_that_was_predicted(case, capsys, tmp_path, monkeypatch):
    """The JSON and the flags of the launch line resolve to its layout, memory and time."""
    found, out = answer(CASES[case]), tmp_path / "out"
    monkeypatch.setattr(layout_search, "search", lambda question: found)
    assert search_command.run(parsed(f"{CASES[case]} --out {out}")) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "launch/pretrain.py" in line]
    words = shlex.split(line)
    flags = [*itertools.pairwise(words[words.index("launch/pretrain.py") + 1 :])]
    named, sets = dict(flags), [value for flag, value in flags if flag == "--set"]
    assert named["--ds_config"] == str(out / "ds_config.json")
    plan = resolve(catalog.load(named["--recipe"], sets), named["--ds_config"], found.question.ranks, ANY_GPU)
    best = found.winner
    assert plan.layout == best.work.layout and plan.layout.world == found.question.ranks
    again = forecast(workload.of_plan(plan), found.question.node)
    assert again.fullest_rank.total == best.forecast.fullest_rank.total and again.time == best.forecast.time
    assert again.verdict == best.forecast.verdict != "out of memory"


def test_no_layout_of_the_ready_made_files_is_faster():
    """Every degree, JSON, recomputation and micro-batch through the resolver and plan.py's own forecast."""
    line = "--model 760m --hardware v100-16x4 --global-batch 8 --set model.layers=10"
    found = answer(line)
    question, node = found.question, found.question.node
    seconds = {}
    files = {way.file for way in ways.WAYS if way.offload is None}
    for tp, pp, file, again, cut in itertools.product(
        divisors(4), divisors(4), files, ("none", "full"), (False, True)
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
            each = forecast(workload.of_plan(plan), node)
            if each.verdict != "out of memory" and each.time:
                seconds[tp, pp, micro, file, again, cut] = each.time.total
    predicted = {}
    for each in found.ranking:
        if each.way.offload is None:
            layout, again = each.work.layout, "full" if each.work.recomputed else "none"
            key = layout.tp, layout.pp, layout.micro, each.way.file, again, each.work.sequence_parallel
            predicted[key] = each.seconds
    assert len(seconds) > 50 and predicted == seconds
    assert found.winner is not None and found.winner.seconds == min(seconds.values())


def changed(candidate: layout_search.Candidate, **values) -> layout_search.Candidate:
    """A candidate whose forecast says something else."""
    other = replace(candidate, forecast=replace(candidate.forecast))
    vars(other.forecast).update(values)
    return other


def test_the_fastest_stands_first_and_what_is_snug_last():
    ranking = answer(CASES["13b"]).ranking
    places = [(each.forecast.verdict, each.seconds) for each in ranking]
    assert places == sorted(places) and {verdict for verdict, _ in places} == {"fits", "snug"}
    assert ranking[-1].seconds > ranking[0].seconds > min(each.seconds for each in ranking)


def test_layouts_are_marked_as_snug_and_as_waiting_for_the_host():
    line = "--model 125m --hardware h100-80x8 --global-batch 64 --set batch.micro=1"
    found, usual = answer(line), answer(CASES["13b"])
    assert found.winner.forecast.waits and not usual.winner.forecast.waits
    said = str(search_text.page(found, "x", 3))
    waiting = fitted().waiting
    assert "ZeRO-1, WAITS" in said
    assert f"WAITS: time ±{waiting.median:.0%} in the median of {waiting.rows}" in said
    assert "WAITS" not in str(search_text.page(usual, "x", 3))
    snug = replace(found, ranking=[changed(found.winner, verdict="snug")])
    assert "SNUG, WAITS" in str(search_text.page(snug, "x", 3))


def test_tensor_ranks_stay_inside_a_node_unless_more_are_asked_for():
    """Megatron-LM's rule: all-reduces of every layer would go over the network."""
    layouts = {each.work.layout for each in answer(CASES["13b, small nodes"]).ranking}
    assert {layout.tp for layout in layouts} == {1, 2, 4}
    asked = answer(CASES["13b, small nodes"] + " --set parallel.tp=8")
    assert {each.work.layout.tp for each in asked.ranking} == {8}
    # ranks 3 to 5 would lie on two nodes
    odd = answer("--model 1.3b --hardware a100-40x4 --nodes 3 --set model.heads=48 --set model.hidden=3072 "
                 "--global-batch 768")  # fmt: skip
    assert {each.work.layout.tp for each in odd.ranking} == {1, 2, 4}


def test_a_layouts_verdict_is_that_of_the_recipe_that_it_makes():
    found = answer(CASES["offload"])
    question = found.question
    best = {each.work.layout: each for each in found.ranking if each.way.name == "ZeRO-2"}
    for layout, each in list(best.items())[:5]:
        at = candidates.Degrees(layout.tp, layout.pp, layout.dp)
        again = "full" if each.work.recomputed else "none"
        recipe = candidates.laid_out(
            question.recipe, at, layout.micro, layout.accumulation, activation_checkpointing=again
        )
        cut = recipe.parallel.model_copy(update={"sequence": each.work.sequence_parallel})
        asked = fit(recipe.model_copy(update={"parallel": cut}), question.node, 1, "zero2")
        assert (asked.verdict, asked.plan.layout) == (each.forecast.verdict, layout)
    assert best


def test_nothing_is_proposed_that_the_engine_lacks():
    for each in answer(CASES["175b"]).ranking:
        work = each.work
        assert work.layout.tp > 1 or not work.sequence_parallel
        assert work.layout.pp == 1 or work.zero_stage == 1
    assert {each.work.sequence_parallel for each in answer(CASES["175b"]).ranking} == {True, False}


def test_what_is_set_stays():
    for each in answer(CASES["pinned"]).ranking:
        layout = each.work.layout
        assert (layout.pp, layout.micro, layout.global_batch, each.work.recomputed) == (2, 1, 1024, 1)
    data = answer("--model 2.7b --hardware v100-32x8 --set parallel.dp=2")
    assert {each.work.layout.dp for each in data.ranking} == {2}
    odd = answer("--model 2.7b --hardware v100-32x8 --set sequence_length=1023")
    assert not any(each.work.sequence_parallel for each in odd.ranking)
    sequence = answer("--model 2.7b --hardware v100-32x8 --set parallel.sequence=true")
    assert all(each.work.sequence_parallel and each.work.layout.tp > 1 for each in sequence.ranking)
    chunks = answer("--model 2.7b --hardware v100-32x4 --set activation_checkpointing=4")
    assert {each.work.recomputed for each in chunks.ranking} == {4}


def test_host_memory_excludes_what_is_offloaded():
    """Of 13 billion on four V100: 16 bytes of each in the host's 160 GB."""
    found = answer("--model 13b --hardware v100-32x4 --set parallel.tp=1 --set parallel.pp=1")
    full = found.nearest.forecast.binding
    assert not found.ranking and full.place == "host" and full.missing > 0
    assert "of host memory per node" in str(search_text.page(found, "x", 3))


def test_where_nothing_fits_it_says_what_is_missing(capsys):
    args = parsed("--model 175b --hardware 2080tix8")
    assert search_command.run(args) == 1
    out = capsys.readouterr().out
    assert "NOTHING FITS. Nearest: " in out and "out of memory by" in out and "to launch" not in out


def test_the_users_json_is_kept_but_for_its_stage_and_offload(tmp_path):
    base = ways.config(ways.WAYS[5])  # ZeRO-3
    base["zero_optimization"]["reduce_bucket_size"] = 3_000_000
    base["zero_optimization"]["offload_param"] = {"device": "cpu"}
    base["train_micro_batch_size_per_gpu"] = 3
    (mine := tmp_path / "mine.json").write_text(json.dumps({**base, "gradient_clipping": 1.0}))
    line = f"{CASES['345m']} --ds_config {mine}"
    assert search_command.run(parsed(f"{line} --out {tmp_path / 'out'}")) == 0
    written = json.loads((tmp_path / "out" / "ds_config.json").read_text())
    best = answer(line).winner.work
    assert written["zero_optimization"]["reduce_bucket_size"] == 3_000_000
    assert written["zero_optimization"]["stage"] == best.zero_stage < 3
    assert "offload_param" not in written["zero_optimization"] and written["gradient_clipping"] == 1.0
    assert written["train_micro_batch_size_per_gpu"] == best.layout.micro


def test_a_size_of_the_published_tables_is_searched():
    recipe, published = answer("--model 8.3B --hardware dgx2 --nodes 2").question.recipe, catalog.load
    row = published("megatron_paper_table1/8.3b-mp")
    shape = (recipe.model.layers, recipe.model.hidden, recipe.model.heads, recipe.sequence_length)
    assert shape == (row.model.layers, row.model.hidden, row.model.heads, row.sequence_length)
    bert = answer("--model 3.9b --hardware a100-40x8 --nodes 4")
    assert bert.winner and bert.question.recipe.model.family == "bert"
    sizes = shapes.rows_by_size()
    assert len(sizes) > 25 and all(label == label.lower() for label in sizes)
    for label, alike in sizes.items():
        if len(alike) == 1 and label not in shapes.NAMES:
            assert shapes.size(label).settings("fp16")


ONE = "--model 13b --hardware v100-32x8 --set parallel.tp=1 --set parallel.pp=1"
REFUSED = {
    "--model 8.4b --hardware dgx2": "did you mean 8.7b or 8.3b",
    "--model 1.2b --hardware dgx2": "a100_blog_table4/1.2b .24 x 1920., megatron_paper",
    "--model 3.9b --hardware dgx2 --recipe openwebtext/gpt2-124m": "leave --recipe out",
    "--model 13b --hardware v100-32x9": "--hardware 8xv100-32 --nodes 2",
    f"{ONE} --global-batch 7": "8 GPUs, parallel.tp=1, parallel.pp=1: .* a batch of 7",
    "--recipe default/sotu": "no --hardware",
    "--model 13b --hardware v100-32x8 --set parallel.tp=3": "parallel.tp=3: tensor ranks .* share 40 heads",
    "--model 345m --hardware v100-32-pciex8 --set batch.micro=3": "batch.micro=3: .* a batch of 256",
    "--model 345m --hardware v100-32-pciex8 --ds_config nothere.json": "no such file",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_cannot_be_searched_is_refused_with_the_reason(line):
    with pytest.raises(ProblemsError, match=REFUSED[line]):
        search_command.run(parsed(line))


def test_a_precision_that_the_gpu_lacks_is_said_with_the_one_that_it_has(capsys):
    line = "--recipe openwebtext/gpt2-124m --hardware v100-32-pciex8"
    search_command.run(parsed(line))
    assert "fp16 INSTEAD OF bf16" in capsys.readouterr().out
    search_command.run(parsed(f"{line} --set precision=fp16"))
    assert "INSTEAD" not in capsys.readouterr().out


def test_nothing_of_the_users_is_overwritten(tmp_path):
    (tmp_path / "ds_config.json").write_text("mine")
    with pytest.raises(ProblemsError, match="exists already"):
        search_command.run(parsed(f"{CASES['345m']} --out {tmp_path}"))
    assert (tmp_path / "ds_config.json").read_text() == "mine"


def test_the_page_has_the_winner_first_and_its_launch_line(capsys):
    assert search_command.run(parsed(f"{CASES['13b']} --top 2")) == 0
    out = capsys.readouterr().out
    assert "64 GPUs on 8 nodes" in out and "12.9 billion parameters" in out and "MFU" in out
    assert "--num_nodes 8 --num_gpus 8 launch/pretrain.py --ds_config ds_configs/zero2.json" in out
