"""`--hardware this`: the machine's own rates take the place of shares that were fitted on GPUs."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from launching import run
from measured_machine import TWO_CORES

from ds_configs.plan import HOST, Machine
from ds_configs.resolver import resolve
from launch.machine import measuring, rates
from launch.machine.rates import Rates
from launch.planning.prediction import hardware, workload
from launch.planning.prediction.forecast import forecast
from modeling.cost import products
from recipes import catalog
from recipes.problems import ProblemsError


def plan(ds_config="zero0", ranks=1, *changes):
    machine = Machine(HOST, fp16=False, bf16=True, compiler=True, libaio=False)
    return resolve(catalog.load("default/sotu", changes), ds_config, ranks, machine)


def predict(found: Rates, ds_config="zero0", ranks=1, *changes):
    work = workload.of_plan(plan(ds_config, ranks, *changes))
    return forecast(work, hardware.node_of_rates(found).share_among(ranks))


def test_products_of_a_layer_take_what_they_were_measured_to_take():
    found = predict(TWO_CORES)
    work = found.work
    layer = products.layer_products(work.model, work.tokens)
    head = products.head_products(work.model, work.layout.micro, work.sequence_length, work.padded_vocab)
    square = products.attention_products(work.model, work.tokens, work.sequence_length)
    weights = 3 * (work.model.layers * sum(p.operations for p in layer) + sum(p.operations for p in head))
    causal = 0.5 * 3.5 * work.model.layers * sum(p.operations for p in square)
    assert found.time.matrix == pytest.approx(weights / 1.0e12 + causal / 0.05e12)


def test_what_stands_between_products_takes_what_it_was_measured_to_take():
    slower = replace(TWO_CORES, layer_gb_s=TWO_CORES.layer_gb_s / 2)
    assert predict(slower).time.elementwise == pytest.approx(2 * predict(TWO_CORES).time.elementwise)
    # The optimizer streams through memory as a copy does.
    assert predict(slower).time.update == predict(TWO_CORES).time.update


def test_ranks_share_the_cores():
    one, two = predict(TWO_CORES), predict(TWO_CORES, "zero1", 2)
    assert two.time.matrix == pytest.approx(one.time.matrix)
    assert two.node.gpu.memory_bytes == one.node.gpu.memory_bytes / 2
    assert two.speed.mfu < one.speed.mfu < 1


def test_the_link_is_as_fast_as_its_collective_was():
    tensor = ("parallel.tp=2",)
    slower = replace(TWO_CORES, link_gb_s=TWO_CORES.link_gb_s / 2)
    fast, slow = (predict(each, "zero0", 2, *tensor).time.tensor for each in (TWO_CORES, slower))
    assert slow == pytest.approx(2 * fast, rel=0.05)


def test_what_is_offloaded_lies_in_the_memory_of_the_process():
    kept, offloaded = predict(TWO_CORES, "zero3", 2), predict(TWO_CORES, "zero3_offload", 2)
    assert offloaded.host == 0 and offloaded.fullest_rank.host == 0
    assert offloaded.fullest_rank.optimizer > kept.fullest_rank.optimizer


def test_a_bucket_holds_no_more_than_a_rank_has_parameters():
    found = predict(TWO_CORES, "zero2", 2)
    assert found.work.buffers.reduce <= found.work.parameters_of(0) + 1


def test_a_known_gpu_keeps_its_published_peak():
    board = replace(
        TWO_CORES, accelerator="NVIDIA H200", accelerators=1, tflops={"fp32": 50.0, "bf16": 700.0},
        layer_tflops={},
        memory_bytes=150e9,
    )  # fmt: skip
    node = hardware.node_of_rates(board)
    assert node.gpu.tflops["bf16"] == hardware.find("h200x8").gpu.tflops["bf16"] > 700
    assert not node.is_cpu and not node.measured and node.gpu.matrix_share < 1
    assert node.kernel_seconds == pytest.approx(3e-6)


@pytest.mark.parametrize(("named", "count", "node"), [
    ("NVIDIA H200", 1, "h200x8"), ("NVIDIA A100-SXM4-40GB", 4, "a100-40x4"),
    ("NVIDIA A100-SXM4-40GB", 8, "a100-40x8"), ("NVIDIA H200", 9, None), ("Abacus 9", 1, None),
])  # fmt: skip
def test_a_gpu_is_recognised_by_the_name_that_torch_gives_it(named, count, node):
    found = hardware.catalogue_node(named, count)
    assert (found and found.name) == node


def test_it_is_measured_once_and_again_where_asked(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(rates, "cached", lambda: TWO_CORES if asked else None)
    monkeypatch.setattr(measuring, "measured", lambda: asked.append(1) or TWO_CORES)
    with pytest.raises(ProblemsError, match="not measured"):
        hardware.this_node(measure=False)
    assert (
        hardware.this_node() == hardware.this_node() == hardware.node_of_rates(TWO_CORES) and len(asked) == 1
    )
    assert capsys.readouterr().err.count("measuring this machine, once") == 1
    assert hardware.this_node(remeasure=True) == hardware.node_of_rates(TWO_CORES) and len(asked) == 2


def test_a_measured_machine_is_planned_for_without_torch(monkeypatch, tmp_path):
    program = f"""
import json, sys
from launch.machine import rates
rates.place().parent.mkdir(parents=True)
rates.place().write_text(json.dumps({{"rates": {vars(TWO_CORES)!r}}}))
sys.argv = ["plan.py", "--recipe", "default/sotu", "--hardware", "this"]
from launch import plan
assert plan.main() == 0
sys.exit("torch was loaded" if "torch" in sys.modules else 0)
"""
    done = run([sys.executable, "-c", program], env={"MEGARECIPES_CACHE": str(tmp_path / "c")}, timeout=60)
    assert done.returncode == 0 and "this machine" in done.stdout, done.stdout
