"""Memory of a rank, by category: its parts against arithmetic, its sum against what was published."""

from dataclasses import replace

import pytest
from planned import work

from launch.planning.prediction import rank_memory, workload
from launch.planning.prediction.constants import fitted_constants
from launch.planning.prediction.hardware import find

V100 = find("dgx2").gpu
NAME = "jeanzay_megatron_performance/48b-pp16-ga256-mb4-0527"


def stage(step: workload.Workload, number: int = 0) -> rank_memory.RankMemory:
    return rank_memory.of_stage(step, number, V100, fitted_constants())


def test_the_categories_make_the_total():
    rank = stage(work(NAME))
    states, passes = ("weights", "gradients", "optimizer"), ("activations", "working", "logits")
    named = {*states, *passes, "buffers", "fragmentation", "context"}
    assert rank.total == pytest.approx(sum(getattr(rank, name) for name in named))
    assert set(rank.on_gpu) == named
    assert rank.states == rank.weights + rank.gradients + rank.optimizer


def test_zero_shares_out_what_its_stage_says():
    """Between the backward pass and the step: gradients in half precision, states over all ranks."""
    gpt = "sber_path_to_13b/08-gpt3-xl-checkpointing"
    for number, expected in ((0, (2, 4, 12)), (1, (2, 2, 12 / 16)), (2, (2, 2 / 16, 12 / 16))):
        step = work(gpt, f"ds_config=zero{number}")
        rank, held = stage(step), step.parameters_of(0)
        assert rank.moment == "backward pass"
        found = (rank.weights / held, rank.gradients / held, rank.optimizer / held)
        assert found == pytest.approx(expected), number
    three = stage(work(gpt, "ds_config=zero3"))
    assert three.weights == 2 * held / 16 and three.buffers > 2 * 1e9, (
        "gathered parameters, 1e9 at most, are in buffers"
    )


def test_muon_has_a_moment_less_and_the_numbers_of_a_round():
    square, matrices = 2048**2, 24 * 12 * 2048**2

    def on(dp: int, zero: int = 1) -> workload.Workload:
        step = work("sber_path_to_13b/08-gpt3-xl-checkpointing", f"ds_config=zero{zero}")
        layout = replace(step.layout, dp=dp, global_batch=dp * step.layout.micro * step.layout.accumulation)
        return replace(step, layout=layout, muon=True)

    assert rank_memory.muon_bytes(on(16), 0) == 2 * (18 * square + 2 * 2**26), "in several rounds"
    assert rank_memory.muon_bytes(on(64), 0) == 2 * (18 * square + 2 * 2 * matrices / 64), "in one"
    assert rank_memory.muon_bytes(on(64, zero=0), 0) == rank_memory.muon_bytes(on(16), 0)
    alone = on(1)
    assert rank_memory.muon_bytes(alone, 0) == 2 * 18 * square
    updated, adam = stage(alone), stage(replace(alone, muon=False))
    assert updated.moment == adam.moment == "optimizer step" and updated.working == 2 * 18 * square
    assert adam.optimizer - updated.optimizer == pytest.approx(4 * matrices)


def test_stages_hold_activations_of_the_micro_batches_in_flight():
    step = work(NAME)
    first, second, last = (stage(step, number) for number in (0, 1, 15))
    stream = step.activations.stream
    assert second.activations == 15 * 4 * stream, "15 micro-batches of 4 layers, the input of each"
    assert first.activations == 16 * (4 + 1) * stream, "and the embedding's output"
    assert first.total > second.total and last.moment == "optimizer step"
    assert rank_memory.fullest_rank(step, V100, fitted_constants()) == first


def test_recomputation_keeps_inputs_and_works_on_one_chunk():
    step = work("dgx2_gpt2_model_parallel/72x3072-h32-tp8", "batch.micro=32", "batch.global=64")
    none, every, chunks = (stage(replace(step, recomputed=n)) for n in (0, 1, 8))
    layer = step.activations
    assert none.activations - none.logits == pytest.approx(72 * layer.kept + 3 * layer.stream - none.logits)
    assert every.activations == (72 + 3) * layer.stream
    assert chunks.activations == (9 + 3) * layer.stream
    assert chunks.working == pytest.approx(8 * layer.kept + layer.transient)
    away = stage(replace(step, checkpoints_at="host", cuts_checkpoints=True))
    assert away.host == pytest.approx(72 / 8 * layer.stream), "the inputs of layers, cut over tensor ranks"
    assert away.activations == 3 * layer.stream, "what stands before and after the layers stays"


def test_logits_are_those_of_the_predicted_positions():
    bert = work("dgx2_bert_data_parallel/24x1024-b14")
    ours, theirs = bert, workload.on_system(bert, "megatron-2019")
    assert ours.logits == 14 * 77 * bert.padded_vocab
    assert theirs.logits == 14 * 512 * bert.padded_vocab
    assert work("dgx2_gpt2_model_parallel/72x3072-h32-tp8").logits == 8 * 1024 * 51200 / 8


def test_memory_grows_with_the_micro_batch_and_falls_with_every_degree():
    step = work("dgx2_gpt2_model_parallel/64x2304-h24-tp4")
    totals = [
        rank_memory.fullest_rank(step.with_micro(n), V100, fitted_constants()).total for n in (1, 2, 4, 8, 64)
    ]
    assert totals == sorted(totals) and totals[-1] > 1.5 * totals[0]
    layout = step.layout
    for tp, pp in ((8, 1), (4, 2), (8, 2)):
        other = replace(step, layout=replace(layout, tp=tp, pp=pp))
        assert rank_memory.fullest_rank(other, V100, fitted_constants()).total < stage(step).total
    assert stage(replace(step, sequence_parallel=True)).total < stage(step).total


def test_the_fullest_stage_may_be_the_last():
    step = work(NAME)
    as_equals = replace(step.software, balances_stages=False)
    wide = replace(step, padded_vocab=40 * step.padded_vocab, software=as_equals)
    stages = rank_memory.of_stages(wide, V100, fitted_constants())
    assert (
        rank_memory.fullest_rank(wide, V100, fitted_constants())
        == stages[-1]
        == max(stages, key=lambda r: r.total)
    )


def test_a_chunk_is_no_longer_than_its_stage():
    step = work(NAME)
    assert stage(replace(step, recomputed=100)).working == stage(replace(step, recomputed=4)).working


def test_selective_recomputation_works_on_one_layers_scores():
    step = replace(work(NAME), recomputed=0, software=workload.SYSTEMS["megatron"], zero_stage=0)
    kept, selective = stage(step), stage(replace(step, selective=True))
    scores = step.activations.kept_scores
    assert kept.activations - selective.activations == pytest.approx(16 * 4 * scores)
    assert selective.working - kept.working == pytest.approx(scores)


def test_sharded_weights_are_gathered_layer_by_layer_without_deepspeeds_buffers():
    step = replace(work("sber_path_to_13b/08-gpt3-xl-checkpointing"), software=workload.SYSTEMS["fsdp"])
    sharded = replace(step, zero_stage=3, buffers=workload.Buffers())
    assert stage(sharded).buffers == 2 * 2 * (12 * 2048**2 + 13 * 2048), "two layers in half precision"
    assert stage(sharded).weights == 4 * step.parameters_of(0) / 16


def test_a_pipelines_last_stage_holds_its_output_too():
    step = work(NAME, "batch.accumulation=1", "batch.global=4")
    last = replace(step, padded_vocab=40 * step.padded_vocab)
    assert stage(last, 15).logits == 6 * last.logits
    alone = work("dgx2_gpt2_data_parallel/24x1024-g8-b32")
    assert stage(alone).logits == 4 * alone.logits


def test_without_gpus_memory_counts_once_it_is_written():
    step = work("default/sotu")
    bucket = replace(step, buffers=replace(step.buffers, reduce=5e8))
    rank, there = stage(step), rank_memory.resident(step, stage(step))
    assert there.host == there.fragmentation == 0 and there.optimizer == rank.optimizer + rank.host > 0
    assert 0 < there.context < rank.context
    assert rank_memory.resident(bucket, stage(bucket)).buffers < 0.1 * stage(bucket).buffers


def test_what_is_cached_is_no_more_than_the_gpu_has():
    rank = stage(workload.on_system(work("dgx2_gpt2_data_parallel/40x1536-b24-oom"), "megatron-2019"))
    assert (
        rank.total > V100.memory_bytes and rank.cached(V100.memory_bytes) == V100.memory_bytes - rank.context
    )
    assert rank.cached(1e12) == rank.reserved == rank.total - rank.context
    assert rank.reserved == pytest.approx((1 + fitted_constants().fragmentation) * rank.allocated)
    assert rank.least == rank.total - rank.fragmentation
