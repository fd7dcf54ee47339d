"""What the planner takes from a resolved plan."""

from dataclasses import replace

import pytest
from planned import plan
from planned import work as step

from launch.machine.memory import state_widths
from launch.planning.prediction import workload
from launch.planning.prediction.constants import fitted_constants
from launch.planning.prediction.forecast import speed
from launch.planning.prediction.hardware import find
from launch.planning.prediction.rank_memory import of_stage
from launch.records.metrics import rates
from modeling import cost

GPU = find("v100-32x4").gpu


def states(made):
    """Bytes of model states while the optimizer steps, on GPU, host and NVMe."""
    work = workload.of_plan(made)
    return cost.placed_state_bytes(
        work.parameters_of(0), work.zero_stage, work.layout.dp, widths=work.widths,
        places=cost.Places(work.optimizer_at, work.weights_at),
        accumulates=work.layout.accumulation > 1, sub_group=work.sub_group,
    ).total  # fmt: skip


def test_both_offload_devices_count():
    name, share = "jeanzay_hf_deepspeed_max_size/91b-g64", 98_029_093_888 / 64
    assert states(plan(name)) == pytest.approx((0, 20 * share, 0))
    assert states(plan(name, "ds_config=zero3_offload_optimizer")) == pytest.approx(
        (2 * share, 18 * share, 0)
    )
    assert states(plan(name, "ds_config=zero_infinity")) == pytest.approx((0, 2 * share, 18 * share))
    mixed = plan(name, "ds_config=zero_infinity")
    mixed.ds["zero_optimization"]["offload_param"] = {"device": "cpu"}
    assert states(mixed) == pytest.approx((0, 4 * share, 16 * share))
    mixed.ds["zero_optimization"]["offload_optimizer"] = {"device": "none"}
    mixed.ds["zero_optimization"]["sub_group_size"] = 1e8
    assert states(mixed) == pytest.approx((14 * share + 4e8, 2 * share, 0))


def of_task(head: str, batch: int):
    """A plan of fine-tuning in one micro-batch."""
    made = plan(
        "bert/sotu", f"batch.global={batch}", f"batch.micro={batch}", "batch.accumulation=1", "precision=fp16"
    )
    model = made.recipe.model.model_copy(update=dict(task_head=head, head_classes=4, sentence_head="none"))
    return replace(made, recipe=made.recipe.model_copy(update=dict(model=model)))


def test_a_question_is_computed_as_one_sequence_for_each_choice():
    """Four choices of 8 questions are what 32 samples of another task are, but for samples per second."""
    asked, plain = (workload.of_plan(of_task(*of)) for of in (("choice", 8), ("classification", 32)))
    assert asked.tokens == plain.tokens and asked.tokens_per_step == plain.tokens_per_step
    assert asked.logits == 32 and plain.logits == 4 * 32
    node = find("v100-32x4")
    memory = [of_stage(work, 0, node.gpu, fitted_constants()) for work in (asked, plain)]
    assert memory[0].activations == memory[1].activations > 0
    speeds = [speed(work, node, 1.0) for work in (asked, plain)]
    assert [each.samples for each in speeds] == [8, 32] and speeds[0].tokens == speeds[1].tokens
    assert speeds[0].tflops == pytest.approx(speeds[1].tflops, rel=1e-3)
    assert speeds[0].exact_tflops == pytest.approx(speeds[1].exact_tflops, rel=1e-3)
    found = [rates(of_task(*of), 2.0) for of in (("choice", 8), ("classification", 32))]
    assert [each["samples_per_s"] for each in found] == [4, 16]
    assert found[0]["tokens_per_s"] == found[1]["tokens_per_s"] == asked.tokens / 2
    assert found[0]["exact_tflops"] == pytest.approx(found[1]["exact_tflops"], rel=1e-3)
    assert found[0]["tflops"] == pytest.approx(found[1]["tflops"], rel=1e-3)


def test_accumulated_gradients_are_on_the_host_under_zero2_offload():
    of = plan("default/sotu", "ds_config=zero2_offload", "precision=fp16", "batch.micro=1", "batch.global=1")
    held = workload.of_plan(of).parameters_of(0)
    assert states(of) == (2 * held, 18 * held, 0)
    layout = replace(of.layout, accumulation=4, global_batch=4)
    assert states(replace(of, layout=layout)) == (2 * held, 20 * held, 0)
    work = workload.of_plan(of)
    assert of_stage(work, 0, GPU, fitted_constants()).host == 18 * held


def test_the_jsons_half_precision_states_count():
    def widths(half="bf16", /, params=None, **ds):
        made = plan("default/sotu", f"precision={half}", "ds_config=zero2")
        params = {**made.ds["optimizer"]["params"], **(params or {})}
        changed = {**made.ds, "optimizer": {"params": params}, **ds}
        return state_widths(replace(made, ds=changed))

    low = {"enabled": True, "bf16_master_weights_and_grads": True}
    assert widths() == widths("fp16") == cost.MIXED and widths("fp32") == cost.FP32
    assert widths(bf16=low) == cost.Widths(master=2)
    assert widths("fp16", fp16={"fp16_master_weights_and_grads": True}) == cost.Widths(master=2)
    narrow = cost.Widths(master=2, moment=2)
    assert widths(bf16={**low, "bf16_optimizer_states": True}) == narrow
    assert state_widths(plan("default/sotu", "ds_config=pure_bf16")) == narrow
    assert widths(bf16=low, params={"fp32_optimizer_states": False}) == narrow
    assert widths(params={"fp32_optimizer_states": False}) == cost.MIXED, "its weights are in fp32"
    assert widths(data_types={"grad_accum_dtype": "fp32"}) == cost.Widths(gradient=4)


def test_buckets_are_those_of_the_json():
    def buffers(config, *settings):
        return step("default/sotu", f"ds_config={config}", *settings).buffers

    assert buffers("zero0") == workload.Buffers()
    assert 13e6 < buffers("zero1").reduce / 2 < 15e6, (
        "as large as the model; overlap_comm takes turns with two"
    )
    assert buffers("zero2") == buffers("zero1")
    three = buffers("zero3")
    assert three.live == 1e9 and three.reduce == buffers("zero2").reduce / 2


def test_recomputation_and_its_place_are_the_plans():
    work = step("jeanzay_megatron_deepspeed_zero/48b-tp4-mb48-0527")
    assert (work.recomputed, work.checkpoints_at, work.cuts_checkpoints) == (1, "host", True)
    chunks = step("default/sotu", "activation_checkpointing=3")
    assert (chunks.recomputed, chunks.checkpoints_at, chunks.selective) == (3, "gpu", False)
    selective = step("default/sotu", "activation_checkpointing=selective")
    assert (selective.recomputed, selective.selective) == (0, True)


def test_what_tensor_ranks_share_out_is_the_plans():
    tensor, sequence = (
        step("default/sotu", "parallel.tp=2", f"parallel.sequence={cut}") for cut in ("false", "true")
    )
    assert not tensor.sequence_parallel and sequence.sequence_parallel
    # Of ten numbers per element of the stream, four are whole on every rank, or cut as the other twelve.
    assert sequence.activations.kept / tensor.activations.kept == pytest.approx((2 + 6) / (4 + 6))


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("name", ["default/sotu", "bert/sotu"])
def test_stages_are_those_that_train(name, checkpointing):
    """Also where they are unequal, as of this vocabulary."""
    shape = "model.layers=6", "model.vocab_size=50304"
    flags = *shape, f"activation_checkpointing={checkpointing}", "parallel.pp=2", "ds_config=pipeline"
    planned = plan(name, *flags)
    work = workload.of_plan(planned)
    trained = cost.stages_of(planned.recipe, planned.padded_vocab, 2)
    assert [work.layers_of(stage) for stage in range(2)] == list(trained)
    assert trained[0] > trained[1]
    equal = replace(work, software=replace(work.software, balances_stages=False))
    assert equal.layers_of(0) == equal.layers_of(1)


def test_a_stage_holds_its_layers_and_the_micro_batches_in_flight():
    work = step("jeanzay_megatron_performance/48b-pp16-ga256-mb4-0527")
    uneven = replace(work, model=work.model.model_copy(update={"layers": 60}))
    assert sum(uneven.layers_of(stage) for stage in range(16)) == 60
    assert [uneven.layers_of(stage) for stage in (0, 11, 12, 15)] == [4, 4, 3, 3]
    assert [work.in_flight(stage) for stage in (0, 1, 15)] == [16, 15, 1], "1F1B"
    few = replace(work, layout=replace(work.layout, accumulation=4, global_batch=16))
    assert few.in_flight(0) == 4, "no more than there are"
    # Korthikanti et al. 2022, section 4.2.3: p (1 + (p - 1) / (p v)).
    assert replace(work, interleave=3).in_flight(0) == 16 * (1 + 15 / (16 * 3))


def test_a_system_with_states_of_its_own_shards_nothing():
    work = step("jeanzay_megatron_performance/48b-pp16-ga256-mb4-0527")
    theirs = workload.on_system(work, "megatron")
    assert (work.zero_stage, theirs.zero_stage, theirs.buffers) == (1, 0, workload.Buffers())
    assert workload.on_system(work, "megatron-deepspeed").zero_stage == 1
