"""The planner's answer: verdict, largest micro-batch, cost, remarks; and the command that prints it."""

import json
import sys
from dataclasses import replace

import pytest
from launching import ROOT, run
from planned import plan as planned_row
from planned import work

from launch.planning.memory_fit import fit
from launch.planning.prediction import forecast_text
from launch.planning.prediction.constants import fitted, fitted_constants
from launch.planning.prediction.forecast import Forecast
from launch.planning.prediction.hardware import find
from launch.planning.prediction.published_step import side_by_side
from launch.planning.prediction.rank_memory import fullest_rank
from launch.planning.prediction.workload import on_system
from recipes import catalog
from recipes.layout import batch_schedule

DGX2 = find("dgx2")
TENSOR, OWN = "dgx2_gpt2_model_parallel/72x3072-h32-tp8", "openwebtext/gpt2-124m"
COMMAND = [sys.executable, str(ROOT / "launch" / "plan.py")]


def predicted(name: str, node: str, *settings: str):
    return Forecast(work(name, *settings), find(node))


def bill_of(found, steps, *price):
    total = found.work.layout.global_batch
    return found.bill(steps, batch_schedule(total, total, 1, 1), *price)


def kinds(found):
    return {remark.kind for remark in found.remarks}


def test_the_largest_micro_batch_is_the_largest_that_fits():
    found = predicted(TENSOR, "dgx2")
    for largest, recomputed in ((found.largest.recomputed, 1), (found.largest.kept, 0)):
        step = replace(found.work, recomputed=recomputed)
        need = [
            fullest_rank(step.with_micro(size), found.node.gpu, fitted_constants()).total
            for size in (largest, largest + 1)
        ]
        assert need[0] <= found.node.gpu.memory_bytes < need[1]
    assert found.largest.as_planned == found.largest.recomputed > found.largest.kept
    assert predicted("dgx2_gpt2_data_parallel/54x1920-b2-oom", "dgx2").largest.as_planned == 0


def test_the_verdict_is_about_the_fullest_gpu_and_the_host():
    # Where Megatron of 2019 ran out of memory: its loss held every logit in 14 bytes, ours does in 4.
    assert predicted("dgx2_gpt2_data_parallel/40x1536-b24-oom", "dgx2").verdict == "snug"
    fits = predicted(TENSOR, "dgx2")
    assert fits.verdict == "fits" and fits.margin == fits.node.gpu.memory_bytes - fits.fullest_rank.total
    rank, verdicts = fits.fullest_rank, {}
    for room in (rank.least - 1, rank.least + 1, rank.total - 1, rank.total + 1):
        gpu = fits.node.gpu.model_copy(update={"memory_gib": room / 2**30})
        tight = fits.node.model_copy(update={"gpu": gpu})
        verdicts[room] = Forecast(fits.work, tight)
    found = [each.verdict for each in verdicts.values()]
    assert found == ["out of memory", "snug", "snug", "fits"], "with all that torch reserves it fits"
    (remark,) = (each for each in verdicts[rank.least + 1].remarks if each.kind == "snug")
    assert remark.values["missing"] == pytest.approx(rank.fragmentation / 1e9)
    # 20 bytes of each of 98.03B parameters over 64 ranks, 16 of them in each DGX-2 of 1.5 TB.
    host = predicted("jeanzay_hf_deepspeed_max_size/91b-g64", "dgx2")
    assert host.verdict == "fits" and host.host == pytest.approx(16 * 20 * 98.03e9 / 64, rel=1e-3)
    little = host.node.host.model_copy(update={"memory_gb": 100.0})
    small = host.node.model_copy(update={"host": little})
    assert Forecast(host.work, small).verdict == "out of memory"
    assert "host memory" in kinds(Forecast(host.work, small))


def test_the_plan_says_what_is_allocated_and_what_is_reserved():
    found = predicted(TENSOR, "dgx2")
    rank = found.fullest_rank
    assert rank.allocated < rank.reserved == rank.allocated + rank.fragmentation
    said = str(forecast_text.page(found, "x", None, 100))
    both = f"allocated {rank.allocated / 1e9:.3g} GB, reserved {rank.reserved / 1e9:.3g} GB of 34.1 GB"
    assert f"FITS: {both}; {rank.total / found.node.gpu.memory_bytes:.0%}" in said
    (line,) = (line for line in said.splitlines() if line.strip().startswith("allocated by torch"))
    assert line.split()[-1] == f"{rank.allocated / 1e9:.2f}"
    stage = forecast_text.as_json(found, None)["stages"][0]
    assert (stage["allocated"], stage["reserved"]) == (rank.allocated, rank.reserved)


def test_a_step_whose_gpu_waits_for_the_host_bears_the_error_of_such_steps():
    """The median over all rows says nothing of it: rows of that kind outside the fit were far off."""
    large, small = (predicted(OWN, "h100-80x8", f"batch.micro={micro}") for micro in (16, 1))
    usual, waiting = fitted().errors["unseen"], fitted().waiting
    assert waiting.median > 3 * usual.percentile_90 / 2
    for found, waits, error in ((large, False, usual), (small, True, waiting)):
        assert found.waits == waits and (found.time.host >= 0.1 * found.time.total) == waits
        assert forecast_text.as_json(found, None)["errors"]["time"]["median"] == error.median
        said = str(forecast_text.page(found, "x", None))
        assert f"time ±{error.median:.0%} in the median of {error.rows} published rows" in said
        assert ("waits for the host, as here" in said) == waits


def test_the_plan_says_what_its_kind_was_compared_with():
    """fp32, and software that nothing was fitted to, as ours, bore the error of all others."""
    found = predicted(OWN, "v100-32x8", "precision=fp32")
    errors = fitted().errors
    ours = predicted(OWN, "a100-80x8")
    theirs = replace(ours, work=on_system(ours.work, "megatron"))
    kinds = {"fp32 time": found, "unseen": ours, "time": theirs}
    for of_time, each in kinds.items():
        of_memory = "fp32 memory" if of_time == "fp32 time" else "memory"
        said = " ".join(str(forecast_text.page(each, "x", None)).split())
        for quantity, kind in (("time", of_time), ("memory", of_memory)):
            told = errors[kind]
            rows = f"{told.rows} published rows of {told.documents} document"
            assert f"{quantity} ±{told.median:.0%} in the median of {rows}" in said
            assert forecast_text.as_json(each, None)["errors"][quantity] == told.model_dump()
        assert (
            f"{forecast_text.ROWS_OF[of_time]}, ±{errors[of_time].percentile_90:.0%} in nine of ten" in said
        )


def test_the_plan_says_whose_software_it_predicts():
    assert "every layer recomputed, as megarecipes runs it" in str(
        forecast_text.page(predicted(TENSOR, "dgx2"), "x", None)
    )


def test_the_bill_is_the_time_of_all_steps():
    found = predicted("megatron_paper_table1/8.3b-mp-dp", "dgx2")
    bill = bill_of(found, 1000)
    assert bill.seconds == 1000 * found.time.total and bill.gpu_hours == bill.seconds * 512 / 3600
    assert bill.tokens == 1000 * 512 * 1024
    assert bill.kwh == pytest.approx((512 * 300 + 32 * 4400) * bill.seconds / 3.6e6)
    assert bill.usd is None and "no price; --usd_per_gpu_hour" in str(forecast_text.page(found, "x", bill))
    assert bill_of(found, 1000, 0.5).usd == bill.gpu_hours / 2


def test_the_bill_of_a_ramp_up_is_the_sum_of_steps_of_each_size():
    """Small steps take less time, and read fewer tokens; 20 of 512, 5 of 1,024, the others of 1,536."""
    ramp, total = "batch.rampup={start: 512, increment: 512, samples: 20480}", "batch.global=1536"
    row = "megatron_paper_table1/8.3b-mp-dp"
    found = predicted(row, "dgx2", total, "batch.accumulation=3", ramp)
    sizes = catalog.load(row, [total, "batch.accumulation=null", ramp]).sizes
    each = {}
    for times in (1, 2, 3):
        shares = [f"batch.global={512 * times}", f"batch.accumulation={times}"]
        each[times] = predicted(row, "dgx2", *shares).time.total
    bill = found.bill(100, sizes)
    expected = 20 * each[1] + 10 * each[2] + 70 * each[3]
    assert bill.seconds == pytest.approx(expected, rel=1e-12) and bill.small == 30
    assert bill.tokens == 1024 * 512 * (20 + 2 * 10 + 3 * 70)
    assert found.bill(25, sizes).seconds == pytest.approx(20 * each[1] + 5 * each[2], rel=1e-12)
    assert "100 steps (30 of the ramp-up), " in str(forecast_text.page(found, "x", bill))


def test_the_price_is_the_catalogues_with_its_date_or_the_users(tmp_path):
    found = predicted(OWN, "a100-80x8", "parallel.dp=8")
    bill = bill_of(found, 1000)
    assert bill.usd == bill.gpu_hours * bill.price.usd_per_gpu_hour > 0
    told = str(forecast_text.page(found, "x", bill))
    assert f"at ${bill.price.usd_per_gpu_hour:g} a GPU-hour ({bill.price.where})" in told
    assert bill.price.where[-10:-6].isdigit(), "a price without its date says nothing"
    assert forecast_text.as_json(found, bill)["run"]["usd"] == bill.usd


def test_the_advised_micro_batch_is_accepted_and_saves_what_is_said():
    found = predicted(OWN, "a100-80x8", "batch.micro=1", "parallel.dp=8")
    (remark,) = [remark for remark in found.remarks if remark.kind == "larger batch"]
    values = remark.values
    sets = [f"batch.{key}={values[key]}" for key in ("micro", "accumulation")]
    again = predicted(OWN, "a100-80x8", *sets, "parallel.dp=8")
    assert again.verdict == "fits" and again.work.layout.global_batch == found.work.layout.global_batch
    assert 1 - again.time.total / found.time.total == pytest.approx(values["gain"]) and values["gain"] > 0.1
    assert "larger batch" not in kinds(again)


def test_the_chunks_of_a_remark_cure_the_bubble():
    found = predicted("jeanzay_megatron_max_size_32gb/61b-g64", "v100-32x4")
    (remark,) = [remark for remark in found.remarks if remark.kind == "bubble"]
    layout = found.work.layout
    more = remark.values["chunks"]
    cured = replace(layout, accumulation=more, global_batch=layout.micro * more * layout.dp)
    again = Forecast(replace(found.work, layout=cured), found.node)
    assert found.time.bubble_share > 0.7 and again.time.bubble_share <= 0.105 and "bubble" not in kinds(again)


REMARKED = [  # row, node, settings, the remark, and whether it is made
    (TENSOR, "v100-32x4", "", "tensor across nodes", True),
    (OWN, "a100-40x4", "parallel.tp=3 parallel.dp=4", "tensor across nodes", True),  # ranks 3 to 5 lie on two
    (TENSOR, "dgx2", "", "larger batch", False),  # 15 fit, but 2 data ranks share a batch of 16
    (OWN, "a100-80x8", "batch.micro=1 parallel.dp=8", "larger batch", True),
    ("a100_blog_table4/8.7b", "a100-80x8", "", "recomputation", True),
    (OWN, "v100-32x4", "parallel.dp=2", "no precision", True),
    (OWN, "a100-80x8", "parallel.dp=16", "partly filled node", False),
    (OWN, "a100-80x8", "parallel.dp=12 batch.global=504 batch.micro=null", "partly filled node", True),
    (OWN, "2080ti", "parallel.dp=2 precision=fp16", "network unknown", True),
    ("jeanzay_hf_deepspeed_max_size/91b-g64", "v100-32x4", "ds_config=zero_infinity", "nvme unknown", True),
    ("default/sotu", "h100-80x8", "batch.micro=1", "kernel starts", True),
    ("default/sotu", "h100-80x8", "batch.micro=1", "implausible", False),
]


@pytest.mark.parametrize(("name", "node", "settings", "kind", "made"), REMARKED)
def test_remarks_are_made_where_they_apply(name, node, settings, kind, made):
    found = predicted(name, node, *settings.split())
    assert (kind in kinds(found)) == made
    assert str(forecast_text.page(found, "x", bill_of(found, 1), 80))  # every remark has its sentence
    assert (found.time is None) == (bill_of(found, 1) is None) == (kind == "no precision")


def test_what_no_gpu_reaches_is_remarked():
    found = predicted("a100_blog_table4/8.7b", "a100-40x8")
    fast = found.node.gpu.model_copy(update={"tflops": {"fp16": 312, "fp32": 19.5}, "matrix_share": 1.0,
                                             "memory_gb_s": 1e6})  # fmt: skip
    link = found.node.link.model_copy(update={"gb_s": 1e6})
    node = found.node.model_copy(update={"gpu": fast, "link": link})
    rate = fitted_constants().model_copy(update={"matrix": 1.4, "kernel_us": 0.0, "depth": 0.0})
    assert "implausible" in kinds(Forecast(found.work, node, rate)) and "implausible" not in kinds(found)


def test_mfu_counts_no_recomputation():
    found = predicted("a100_blog_table4/8.7b", "a100-40x8")
    speed = found.speed
    assert speed.mfu * 312 / speed.exact_tflops == pytest.approx(3 / 4, rel=0.02)
    kept = Forecast(replace(found.work, recomputed=0), found.node).speed
    assert kept.mfu * 312 == pytest.approx(kept.exact_tflops)
    assert speed.samples == 8 / found.time.total and speed.tokens == 1024 * speed.samples


def test_a_host_that_is_too_small_limits_the_micro_batch():
    found = predicted("jeanzay_megatron_deepspeed_zero_cpu_offload/48b-tp4-mb64", "v100-32x4")
    host = found.node.host.model_copy(update={"memory_gb": 1.05 * found.host / 1e9})
    small = found.node.model_copy(update={"host": host})
    assert Forecast(found.work, small).largest.as_planned < found.largest.as_planned


def test_bf16_on_a_v100_is_planned_as_it_would_run():
    plan = fit(catalog.load("openwebtext/gpt2-124m"), find("v100-32x8"), 2).plan
    assert (plan.precision, plan.layout.world) == ("fp16", 16), "two nodes of eight; V100 has no bf16"


def test_the_command_shows_a_row_beside_its_published_numbers():
    done = run([*COMMAND, "--recipe", "dgx2_gpt2_data_parallel/40x1536-b8"], env={"COLUMNS": "100"})
    assert done.returncode == 0
    blocks = (
        f"error  time ±{fitted().errors['unseen'].median:.0%}",
        "GB per GPU",
        "verdict",
        "seconds per step",
        "whole run",
        "as megatron-2019 ran it",
        "2.533",
    )
    assert [words for words in blocks if words not in done.stdout] == []


def test_fewer_ranks_and_idle_gpus_are_said():
    """Only as many data-parallel ranks as there are GPUs, and no printed time beside another layout's."""
    done = run([*COMMAND, "--recipe", TENSOR, "--hardware", "dgx2", "--set", "parallel.dp=1"])
    assert "! 8 GPUs of 16 stay idle" in done.stdout and "planned with" not in done.stdout
    row = "jeanzay_megatron_max_size_16gb/22b-g256"
    done = run([*COMMAND, "--recipe", row, "--nodes", "16"], env={"COLUMNS": "150"})
    sets = "--set parallel.dp=1 --set batch.accumulation=null"
    assert f"! planned with {sets}: 64 of 256 processes, for want of GPUs" in done.stdout
    assert "tp 4 x pp 16 x dp 1" in done.stdout and "ran it" not in done.stdout
    assert "as megatron ran it" in run([*COMMAND, "--recipe", row]).stdout


def test_json_has_every_number():
    name = "jeanzay_megatron_performance/48b-pp16-ga256-mb4-0527"
    done = run([*COMMAND, "--recipe", name, "--json", "--tokens", str(10**9)])
    found = json.loads(done.stdout)
    assert len(found["stages"]) == 16 and found["run"]["tokens"] >= 10**9
    assert found["seconds"]["total"] == pytest.approx(
        sum(v for k, v in found["seconds"].items() if k != "total")
    )
    assert found["verdict"] == "fits" and found["margin_bytes"] > 0


def test_published_numbers_stand_beside_their_own_step_alone():
    plan = planned_row("dgx2_gpt2_data_parallel/40x1536-b8")
    assert ("seconds per step", 2.533) in [(name, theirs) for name, _, theirs in side_by_side(plan, DGX2)]
    assert side_by_side(plan, find("a100-80x8")) == []
    (told,) = side_by_side(planned_row("a100_blog_figure2/gpt2-8.3b-a100"), find("a100-40x8"))
    assert told[::2] == ("speed over a100_blog_figure2/gpt2-8.3b-v100", 2.5) and 2 < told[1] < 3
    shrunk = run([*COMMAND, "--recipe", "dgx2_gpt2_data_parallel/40x1536-b8", "--tiny"])
    assert "2.533" not in shrunk.stdout


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--recipe", "default/sotu"], "no --hardware, and the recipe names none"),
        (["--recipe", "default/sotu", "--hardware", "a100x8"], "it may be a100-40 or a100-80"),
        (["--recipe", TENSOR, "--hardware", "v100-32x4"], "tp 8 x pp 1 on 4 GPUs"),
        (["--recipe", "default/sotu", "--hardware", "dgx2", "--set", "model.heads=7"], "heads"),
        (["--recipe", "bert/sotu", "search", "--hardware", "dgx2"], "plan.py search --recipe"),
    ],
)
def test_what_cannot_be_planned_is_refused(flags, says):
    done = run([*COMMAND, *flags], env={"COLUMNS": "400"})
    assert done.returncode == 2 and says in done.stdout and "Traceback" not in done.stdout


def test_a_forecast_loads_no_torch():
    program = """
import sys
import launch.plan
sys.argv = ["plan.py", "--recipe", "a100_blog_table4/8.7b"]
launch.plan.main()
sys.exit(" ".join({"torch", "numpy", "deepspeed", "matplotlib"} & set(sys.modules)) or 0)
"""
    done = run([sys.executable, "-c", program])
    assert done.returncode == 0, done.stdout[-500:]
