"""Which recipes fit nodes: one verdict, whoever asks; and what `recipe.py list --fits` says to set."""

import json
import math

import pytest

from launch import plan as command
from launch import recipe as recipes_command
from launch.machine.memory import Memory
from launch.planning import memory_fit
from launch.planning.prediction import hardware, workload
from launch.planning.prediction.forecast import Forecast
from launch.planning.resolved_plans import processes, published_plan
from recipes import catalog
from recipes.problems import ProblemsError

ROWS = [f"{table.name}/{row}" for table in catalog.tables() for row in table.rows]
V100S = Memory(16, 32e9, 1e12)
OOM = "dgx2_gpt2_data_parallel/54x1920-b2-oom"
LAPTOP = Memory(0, 0.0, 16e9)
ONE_V100 = Memory(1, 32e9, 1.5e12)
FOUR = hardware.find("4xv100-32")


def fit(name: str, memory: Memory, *settings: str) -> memory_fit.Fit:
    return memory_fit.fit(catalog.load(name, settings), hardware.of_memory(memory))


def says(name: str, memory: Memory, *settings: str) -> tuple[str, str]:
    found = fit(name, memory, *settings)
    return found.verdict, memory_fit.how(found) if found.fits else "; ".join(map(str, found.problems))


def needed(name: str, *settings: str):
    return memory_fit.memory_of_plan(published_plan(catalog.load(name, settings)))


def test_every_row_has_one_verdict_whoever_asks(monkeypatch, capsys):
    """`recipe.py list --fits`, `plan.py --fits` and the forecast, of all rows on four V100: 66 differed."""

    def output(main, *words: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["x", *words])
        code = main()
        return code, capsys.readouterr().out

    monkeypatch.setenv("COLUMNS", "500")
    table, listed = "", {}
    for line in output(recipes_command.main, "list", "--all", "--fits", "4xv100-32")[1].splitlines():
        if not line.startswith(" "):
            table = line.partition(":")[0]
        else:
            name, _, cells = line.strip().partition("  ")
            listed[f"{table}/{name.removesuffix(' ?')}"] = cells.strip()
    refused = 0
    for name in ROWS:
        found = memory_fit.fit(catalog.load(name), FOUR)
        assert (name in listed) == found.fits, name
        code, text = output(command.main, "--fits", name, "--hardware", "4xv100-32")
        assert code == (not found.fits), name
        if found.fits:
            assert listed[name].startswith(memory_fit.how(found)) and memory_fit.how(found) in text, name
        asked = ["--recipe", name, "--hardware", "4xv100-32", "--json"]
        if found.plan:
            told = json.loads(output(command.main, *asked)[1])
            degrees = [told["layout"][key] for key in ("tp", "pp", "dp")]
            assert told["verdict"] == found.verdict and math.prod(degrees) == found.world <= 4, name
        else:
            refused += 1
            with pytest.raises(ProblemsError) as error:
                output(command.main, *asked)
            assert error.value.problems == found.problems and str(found.problems[0]) in text, name
    assert 30 < refused < 60 and len(listed) > 60
    _, by_size = output(recipes_command.main, "list", "--fits", "4xv100-32")
    heading, *lines, _ = by_size.splitlines()
    assert heading.split() == ["model", "size", "such", "as", "fits"] and 15 < len(lines) < 30
    assert [line.split()[:2] for line in lines][-1] == ["GPT-2", "4.24B"]
    assert {line.split()[2] for line in lines} <= {*listed}
    assert "all 69 recipes that fit" in by_size


def test_more_nodes_are_those_that_are_asked_for():
    """Four GPUs were as many such nodes as the layout takes: 256 GPUs "fit 1 of 1 node"."""
    recipe = catalog.load("jeanzay_megatron_max_size_32gb/193b-g256")
    found = memory_fit.fit(recipe, FOUR)
    (problem,) = found.problems
    assert (found.verdict, found.gpus, str(problem.fix)) == ("refused", 4, "--nodes 64")
    assert "256 processes" in str(problem) and memory_fit.fit(recipe, FOUR, 63).verdict == "refused"
    enough = memory_fit.fit(recipe, FOUR, 64)
    assert enough.fits and enough.world == 256 and memory_fit.how(enough) == "as published"


def test_what_fits_is_what_the_planner_predicts():
    assert says("dgx2_gpt2_data_parallel/40x1536-b8", V100S) == ("fits", "as published")
    full = fit(OOM, V100S)
    assert (full.verdict, full.world, full.forecast.binding.place) == ("out of memory", 16, "GPU")
    assert full.forecast.binding.needed == pytest.approx(needed(OOM).total, rel=0.02)
    fewer = "fits", "with --set parallel.dp=2: 16 of 512 processes"
    assert says("megatron_paper_table1/8.3b-mp-dp", V100S) == fewer
    assert says("jeanzay_megatron_performance/48b-pp16-ga256-mb8", V100S)[0] == "refused"
    assert says("default/sotu", LAPTOP) == ("fits", "on 1 process")
    eight = Memory(8, 32e9, 1e12)
    assert says("default/sotu", eight) == ("fits", "on 8 processes"), "any number is as the recipe says"
    assert says("openwebtext/gpt2-124m", Memory(3, 32e9, 1e12)) == ("fits", "on 2 processes"), (
        "of 512 samples"
    )


def test_without_gpus_all_processes_share_the_hosts_memory():
    row = "dgx2_gpt2_torch_ddp/72x3072-h8-tp8"
    work = workload.of_plan(published_plan(catalog.load(row)))
    rank, without = needed(row), Forecast(work, hardware.of_memory(LAPTOP)).fullest_rank
    # 72 layers of 3072 over 8 tensor ranks with their duplicates: printed 8,348,393,472 / 8 parameters each,
    # in ZeRO-0, 18 bytes; activations and the loss come on top.
    assert rank.states == 18 * 8_348_393_472 / 8 < without.total < rank.total, (
        "no CUDA context, fewer buckets"
    )
    found = fit(row, LAPTOP).forecast
    assert found.verdict == "out of memory" and found.host == 16 * without.total
    (host,) = found.memories
    assert (host.place, host.needed, host.room) == ("host", found.host, 16e9)
    # 98.03B parameters, 20 bytes offloaded to the host
    full = fit("jeanzay_hf_deepspeed_max_size/91b-g64", V100S).forecast.binding
    assert full.place == "host" and full.needed == pytest.approx(20 * 98.03e9, rel=1e-3)


def test_a_layout_that_is_wrong_in_itself_is_not_mended():
    ramp = "batch.rampup={start: 4, increment: 4, samples: 8000}"
    verdict, why = says("openwebtext/gpt2-124m", V100S, "parallel.dp=8", "batch.micro=1", ramp)
    assert verdict == "refused" and "batch.rampup" in why, "4 ranks would carry it, and 8 are asked for"
    assert says("openwebtext/gpt2-124m", FOUR.memory, "parallel.dp=8", "batch.micro=1", ramp)[0] == "fits"
    many = Memory(64, 80e9, 2e12)
    verdict, why = says("jeanzay_megatron_performance/18b-pp8-ga64-mb4", many, "ds_config=zero3")
    assert verdict == "refused" and "zero_optimization.stage=3" in why and "pipeline" in why


@pytest.mark.parametrize(
    "memory", [Memory(4, 32e9, 1e12), Memory(6, 80e9, 1e12), Memory(0, 0.0, 64e9)], ids=str
)
def test_what_is_told_to_set_can_be_run(memory):
    told = 0
    for name in ROWS:
        recipe, (verdict, how) = catalog.load(name), says(name, memory)
        if verdict not in ("fits", "snug") or "--set" not in how:
            continue
        told += 1
        line, _, count = how.removeprefix("with ").partition(": ")
        sets = [word for word in line.split() if word != "--set"]
        fewer = published_plan(catalog.load(name, sets))
        assert fewer.layout.world == int(count.split()[0]) < processes(recipe), name
        assert fewer.layout.global_batch == recipe.batch.global_, name
        again, how = says(name, memory, *sets)
        assert again == verdict and "--set" not in how, name
    assert told > 5


def test_rows_that_ran_fit_the_gpus_they_ran_on():
    for name in ROWS:
        recipe = catalog.load(name)
        gb = recipe.hardware and recipe.hardware.gpu_memory_gb
        if gb and recipe.published and not recipe.published.oom:
            assert memory_fit.memory_of_plan(published_plan(recipe)).states <= gb * 1e9, name


def test_zero_offload_fits_a_13b_model_on_one_gpu():
    model = ["model.layers=40", "model.hidden=5120", "model.heads=32", "precision=fp16", "batch.global=8"]
    model += ["batch.micro=1", "activation_checkpointing=full"]
    offload, small = "ds_config=zero2_offload", Memory(1, 32e9, 200e9)
    verdict, how = says("default/sotu", ONE_V100, *model, offload)
    assert verdict == "snug", (
        "Ren et al., arXiv 2101.06840: 13B on one V100 of 32 GB with 1.5 TB of host memory"
    )
    assert how == "on 1 process, snug", "torch's allocator would keep more than there is"
    assert not fit("default/sotu", small, *model, offload).fits, "16 x 12.6B is 202 GB"
    assert not fit("default/sotu", ONE_V100, *model, "ds_config=zero2").fits
