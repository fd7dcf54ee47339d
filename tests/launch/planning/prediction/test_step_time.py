"""A step's time by cause: laws that hold whatever the constants are."""

from dataclasses import replace

import pytest
from planned import work

from launch.planning.prediction import workload
from launch.planning.prediction.constants import fitted_constants
from launch.planning.prediction.forecast import speed
from launch.planning.prediction.hardware import find
from launch.planning.prediction.step_time import (
    COLLECTIVE_KERNELS,
    END_KERNELS,
    FAR_LATENCY,
    STEP_KERNELS,
    NodeRates,
    StageTimes,
    step_time,
)
from modeling.cost.products import OF_LARGEST_MATRIX, OF_MUON, Product

DGX2, JEAN_ZAY, A100 = find("dgx2"), find("v100-32x4"), find("a100-80x8")
PIPELINE = "jeanzay_megatron_performance/48b-pp16-ga256-mb4-0527"
TENSOR = "dgx2_gpt2_model_parallel/72x3072-h32-tp8"


def seconds(step: workload.Workload, node=DGX2):
    return step_time(step, node, fitted_constants())


def laid(step: workload.Workload, **degrees: int) -> workload.Workload:
    values = {n: getattr(step.layout, n) for n in ("tp", "pp", "dp", "micro", "accumulation")} | degrees
    total = values["micro"] * values["accumulation"] * values["dp"]
    return replace(step, layout=type(step.layout)(**values, global_batch=total))


def test_the_causes_make_the_total():
    time = seconds(work(PIPELINE), JEAN_ZAY)
    assert time.total == pytest.approx(sum(time.split.values())) and set(time.split) >= {"bubble", "tensor"}


def test_the_bubble_is_that_of_narayanan_et_al():
    """(p - 1) / m of the ideal time, 1 / v of it with v chunks (arXiv 2104.04473, section 2.2)."""
    step = work(PIPELINE)
    # Without logits every stage is as slow as any other.
    even = replace(step, padded_vocab=step.layout.tp * 2, predictions=None)
    time = seconds(even, JEAN_ZAY)
    ideal = time.matrix + time.elementwise + time.tensor + time.boundary
    assert time.bubble / ideal == pytest.approx(15 / 256, rel=0.01)
    chunked = seconds(replace(even, interleave=4), JEAN_ZAY)
    assert chunked.bubble == pytest.approx(time.bubble / 4, rel=0.2), "boundaries are crossed more often"
    assert time.bubble_share == pytest.approx(15 / (256 + 15), rel=0.01)
    assert seconds(laid(step, pp=1), JEAN_ZAY).bubble == 0


def test_computing_never_beats_the_gpus_peak():
    machine = NodeRates(A100, fitted_constants(), 8)
    for product in (Product(8192, 8192, 8192), Product(128, 128, 64, 96), Product(1, 50304, 768)):
        assert product.operations / machine.product_seconds(product, "bf16") < 312e12
    large, small = (
        product.operations / machine.product_seconds(product, "bf16")
        for product in (Product(8192, 8192, 8192), Product(512, 512, 512))
    )
    assert large > 2 * small, "small matrices do not fill the GPU"
    step = work(TENSOR)
    assert speed(step, DGX2, seconds(step).total).mfu < 0.6


def test_an_all_reduce_moves_twice_what_a_gather_does():
    machine = NodeRates(DGX2, fitted_constants(), 16)
    size = 1e9
    rate = 150e9 * fitted_constants().link
    assert machine.collective_seconds(size, 8, 1) == pytest.approx(2 * 7 / 8 * size / rate, rel=0.01)
    assert machine.collective_seconds(size, 8, 1, passes=1) == pytest.approx(7 / 8 * size / rate, rel=0.01)
    assert machine.collective_seconds(size, 1, 1) == 0


def test_groups_that_cross_nodes_share_the_network():
    machine = NodeRates(A100, fitted_constants(), 64)
    whole = 200e9 * fitted_constants().network
    inside = A100.link.gb_s * 1e9 * fitted_constants().link
    assert machine.ring_rate(8, 1) == inside, "tensor parallelism of a node"
    assert machine.ring_rate(64, 1) == whole, "one group has the whole network of a node"
    assert machine.ring_rate(8, 8) == whole / 8, "a rank of a node in each of eight groups"
    assert machine.ring_rate(16, 4) == whole / 4
    assert NodeRates(JEAN_ZAY, fitted_constants(), 64).network == 8e9, "measured there"


def test_tensor_parallelism_across_nodes_is_slow():
    step = laid(work(TENSOR), tp=8, dp=1)
    assert seconds(step, JEAN_ZAY).tensor > 10 * seconds(step, DGX2).tensor


def test_more_accumulation_is_proportionally_more_work():
    once, four = (seconds(laid(work(TENSOR), accumulation=n)) for n in (1, 4))
    assert four.matrix == pytest.approx(4 * once.matrix) and four.tensor == pytest.approx(4 * once.tensor)
    assert four.data == pytest.approx(once.data) and four.update == once.update


def test_recomputation_costs_a_forward_pass():
    step = work(TENSOR)
    none, full = (seconds(replace(step, recomputed=n)) for n in (0, 1))
    assert full.matrix / none.matrix == pytest.approx(4 / 3, rel=0.03)
    assert full.tensor == pytest.approx(1.5 * none.tensor)
    selective = seconds(replace(step, recomputed=0, selective=True))
    assert none.matrix < selective.matrix < full.matrix


def test_zero_communicates_as_its_stage_says():
    step = replace(
        laid(work("sber_path_to_13b/08-gpt3-xl-checkpointing"), accumulation=4), overlaps_gradients=False
    )
    zero, one, two, three = (seconds(replace(step, zero_stage=n)).data for n in range(4))
    assert one == pytest.approx(zero, rel=0.02), "a scatter and a gather in the place of an all-reduce"
    assert two > 2 * one, "gradients are reduced for every micro-batch"
    assert three == pytest.approx(4 * 1.5 * zero, rel=0.05), "three passes for every micro-batch"
    assert seconds(replace(step, zero_stage=0, overlaps_gradients=True)).data < 0.1 * zero


def test_offload_pays_for_pcie_and_the_hosts_memory():
    step = work("jeanzay_hf_deepspeed_max_size/91b-g64")
    kept = replace(step, optimizer_at="gpu", weights_at="gpu")
    away, here = seconds(step, JEAN_ZAY), seconds(kept, JEAN_ZAY)
    assert here.offload == 0 < away.offload and away.update > 2 * here.update
    held = step.parameters_of(0) / 64
    assert away.offload == pytest.approx((2 * held * 2 + 2 * 2 * held) / 12e9)


@pytest.mark.parametrize("degrees", [{}, {"dp": 2}, {"tp": 2}, {"dp": 64}], ids=str)
def test_muon_shares_its_products_by_whole_matrices(degrees):
    """And moves a rank's share of them to their owners and back."""
    step = laid(work("default/sotu", "ds_config=zero1", "precision=bf16"), **{"dp": 1, **degrees})
    ranks, hidden, layers = step.layout.world, step.model.hidden, step.model.layers
    machine = NodeRates(A100, fitted_constants(), ranks)
    count = max(OF_MUON * layers / ranks, OF_LARGEST_MATRIX)
    computed = count * machine.product_seconds(Product(hidden, hidden, hidden), "bf16")
    moved = machine.collective_seconds(2 * 12 * hidden**2 * layers / ranks, ranks, 1)
    added = seconds(replace(step, muon=True), A100).update - seconds(step, A100).update
    assert added == pytest.approx(computed + moved)


def test_banded_layers_cost_their_band():
    sparse = work("sber_path_to_13b/07-gpt3-large-sparse")
    dense = replace(
        sparse, model=sparse.model.model_copy(update={"attention": ("dense",), "attention_window": None})
    )
    assert seconds(sparse).matrix < seconds(dense).matrix


def test_causal_kernels_skip_what_is_masked_and_others_do_not():
    step = work("dgx2_bert_data_parallel/24x1024-b14")
    long = replace(step, sequence_length=8192, predictions=77)
    causal = replace(long, model=long.model.model_copy(update={"family": "gpt2"}))
    plain = replace(long.software, keeps_scores=True)
    both, whole = (seconds(replace(causal, software=s)).matrix for s in (long.software, plain))
    assert both < 0.75 * whole and seconds(long).matrix > 1.3 * both


def test_small_layers_wait_for_the_host():
    step = work("default/sotu", "ds_config=zero1", "precision=fp16")
    slow, fast = (
        step_time(step, DGX2, fitted_constants().model_copy(update={"kernel_us": us})) for us in (80.0, 60.0)
    )
    kernels = 12 * 3 * 6 + END_KERNELS + STEP_KERNELS
    assert slow.matrix == fast.matrix and slow.elementwise == fast.elementwise
    assert slow.host - fast.host == pytest.approx(kernels * 20e-6, rel=0.01)
    computed = slow.matrix + slow.elementwise + slow.host
    assert computed == pytest.approx(kernels * 80e-6), "the GPU works while the host starts kernels"


def test_a_busy_gpu_waits_for_the_host_between_steps_alone():
    step = laid(work(TENSOR), accumulation=4)
    assert seconds(step).host == pytest.approx(STEP_KERNELS * fitted_constants().kernel_us * 1e-6)


def test_tensor_ranks_and_stages_of_a_small_model_start_collectives_too():
    step = work("default/sotu", "ds_config=zero0", "precision=fp16")
    step = replace(step, model=step.model.model_copy(update={"layers": 8, "hidden": 128}))
    kernel = fitted_constants().kernel_us * 1e-6

    def passes(**degrees: int) -> float:
        small = laid(step, **{"tp": 1, "pp": 1, "dp": 1, "micro": 1, "accumulation": 1} | degrees)
        time = StageTimes(small, NodeRates(DGX2, fitted_constants(), 2)).of_stage(degrees.get("pp", 1) - 1)
        return time.matrix + time.elementwise + time.tensor + time.host

    alone = 8 * 3 * 12 + END_KERNELS
    assert passes() == pytest.approx(alone * kernel)
    assert passes(tp=2) == pytest.approx((alone + 8 * 4 * COLLECTIVE_KERNELS) * kernel)
    here = laid(step, pp=2).layers_of(1)
    half = here * 3 * 12 + END_KERNELS + 4 * COLLECTIVE_KERNELS  # of the last stage, and four transfers
    assert passes(pp=2) == pytest.approx(half * kernel)


def test_offloaded_checkpoints_and_states_cross_pcie():
    step = work("jeanzay_megatron_deepspeed_zero_cpu_offload/48b-tp4-mb64")
    here = seconds(replace(step, checkpoints_at="gpu"), JEAN_ZAY).offload
    moved = 2 * step.activations.stream * 60 / 4
    assert seconds(step, JEAN_ZAY).offload - here == pytest.approx(moved / 12e9, rel=0.1)
    two = work("openwebtext/gpt2-124m", "ds_config=zero2_offload", "precision=fp16", "parallel.dp=1")
    m, share = two.layout.accumulation, two.parameters_of(0)
    assert m > 1 and seconds(two).offload == pytest.approx(2 * m * 2 * share / 3e9)


def test_ranks_of_a_node_share_its_host_and_its_nvme():
    step = work("jeanzay_hf_deepspeed_max_size/91b-g64", "ds_config=zero_infinity")
    held = step.parameters_of(0) / 64
    half = DGX2.model_copy(update={"gpus": 8})
    sixteen, eight = (seconds(step, node) for node in (DGX2, half))
    assert sixteen.update == pytest.approx(2 * eight.update) == pytest.approx(30 * held * 16 / 256e9)
    swapped = sixteen.offload - eight.offload
    assert swapped == pytest.approx((32 * held + 2 * 2 * held) * 8 / 25.6e9)


def test_overlapped_traffic_hides_under_the_passes():
    step = laid(work(TENSOR), dp=64, accumulation=1)
    plain, core = (
        replace(step, zero_stage=1, software=workload.SYSTEMS[n]) for n in ("megatron", "megatron-core")
    )
    shown, hidden = (seconds(each).data for each in (plain, core))
    assert shown > 0.1 and hidden < 0.3 * shown


def test_a_group_that_straddles_nodes_is_no_group_of_one():
    machine = NodeRates(A100, fitted_constants(), 24)
    assert machine.inside(8, 1) and machine.inside(2, 4) and not machine.inside(3, 1)
    assert NodeRates(A100, fitted_constants(), 6).inside(3, 1), "one node holds them all"
    assert machine.ring_rate(3, 1) <= 200e9 * fitted_constants().network < machine.ring_rate(4, 1)


def test_without_a_switch_a_pair_has_the_lines_between_them():
    machine = NodeRates(JEAN_ZAY, fitted_constants(), 4)
    assert machine.ring_rate(2, 1) == pytest.approx(machine.ring_rate(4, 1) / 3)
    assert NodeRates(DGX2, fitted_constants(), 16).ring_rate(2, 1) == NodeRates(
        DGX2, fitted_constants(), 16
    ).ring_rate(16, 1)


def test_a_hop_between_nodes_is_shared_by_the_nodes_ranks():
    machine = NodeRates(A100, fitted_constants(), 64)
    near, far = machine.hop_seconds(1e8, 1), machine.hop_seconds(1e8, 8)
    assert far - FAR_LATENCY == pytest.approx(1e8 / (200e9 * fitted_constants().network / 8)) and near < far
    cut = work(PIPELINE)
    whole = replace(cut, software=replace(cut.software, cuts_boundaries=False))
    assert seconds(whole, JEAN_ZAY).boundary > 3 * seconds(cut, JEAN_ZAY).boundary
