"""Cost arithmetic against published numbers, and against what torch counts on transformers' models."""

import subprocess
import sys

import pytest
import torch

from modeling import cost
from modeling.sparse_attention import visible
from recipes import catalog
from recipes.families import Fixed
from recipes.schema import Model


def gpt2(layers: int, hidden: int, heads: int = 16, vocab_size: int = 50257) -> Model:
    return Model(layers=layers, hidden=hidden, heads=heads, vocab_size=vocab_size)


# "Adventures with BERT and GPT2" (DGX-2), sequence 1024: the printed size is the sum over the tensor-parallel
# ranks, the vocabulary padded to a multiple of 128 tp. 54x1920 is printed beside tp 2 with the size it has at
# tp 1.
@pytest.mark.parametrize(
    ("layers", "hidden", "tp", "padded_vocab", "printed"),
    [
        (24, 1024, 1, 50304, 354871296),
        (40, 1536, 1, 50304, 1212103680),
        (54, 1920, 1, 50304, 2488688640),
        (64, 2304, 4, 50688, 4207675392),
        (72, 3072, 8, 51200, 8348393472),
    ],
)
def test_dgx2_model_sizes(layers, hidden, tp, padded_vocab, printed):
    assert tp * cost.parameters_per_rank(gpt2(layers, hidden), 1024, padded_vocab, tp) == printed


def bert(layers: int, hidden: int, heads: int = 16, vocab_size: int = 30522, **more) -> Model:
    return Model(
        family="bert",
        **{
            **dict(layers=layers, hidden=hidden, heads=heads, vocab_size=vocab_size, sentence_head="nsp"),
            **more,
        },
    )


# "Adventures with BERT and GPT2" (DGX-2), BERT, sequence 512: the nine distinct sizes that it prints, each
# the sum over the tensor-parallel ranks, with the uncased vocabulary (30522) padded to a multiple of 128 tp.
DGX2_BERT = [
    (24, 1024, 16, 1, 30592, 336297858),
    (40, 1536, 16, 1, 30592, 1185801090),
    (24, 1024, 16, 2, 30720, 339208196),
    (40, 1536, 16, 2, 30720, 1191886852),
    (54, 1920, 20, 2, 30720, 2466520324),
    (54, 1920, 20, 4, 30720, 2484514568),
    (64, 2304, 24, 4, 30720, 4199522312),
    (64, 2304, 24, 8, 30720, 4250339344),
    (72, 3072, 32, 8, 30720, 8424118288),
]


@pytest.mark.parametrize("layer_norm", ["post", "pre"])
@pytest.mark.parametrize(("layers", "hidden", "heads", "tp", "padded_vocab", "printed"), DGX2_BERT)
def test_dgx2_bert_sizes(layers, hidden, heads, tp, padded_vocab, printed, layer_norm):
    model = bert(layers, hidden, heads, layer_norm=layer_norm)
    assert tp * cost.parameters_per_rank(model, 512, padded_vocab, tp) == printed
    # Two such stages hold what one does, and a second copy of the tied embedding.
    stages = [
        cost.parameters_per_rank(
            model, 512, padded_vocab, tp, layers=layers // 2, first=first, last=not first
        )
        for first in (True, False)
    ]
    assert tp * sum(stages) == printed + padded_vocab * hidden


def test_bert_stages_hold_what_they_compute():
    def stage(first: bool, last: bool, **more) -> int:
        return cost.parameters_per_rank(
            bert(24, 1024, **more), 512, 30720, 4, layers=6, first=first, last=last
        )

    h = 1024
    layers = 6 * (3 * h * h + 7 * h // 4 + 6 * h)
    head = h * h + h + 2 * h + 30720 // 4  # dense, LayerNorm, decoder bias
    sentence = h * h + h + 2 * h + 2  # pooler, two classes
    assert stage(False, False) == layers
    for layer_norm, on_first, on_last in (("post", 2 * h, 0), ("pre", 0, 2 * h)):
        assert stage(True, False, layer_norm=layer_norm) == layers + (30720 // 4 + 512 + 2) * h + on_first
        assert (
            stage(False, True, layer_norm=layer_norm) == layers + 30720 // 4 * h + head + sentence + on_last
        )
        assert (
            stage(False, True, layer_norm=layer_norm, sentence_head="none")
            == layers + 30720 // 4 * h + head + on_last
        )


# "GPT2 Experiments" (Jean Zay): logs of the public runs, tp 4, vocabulary 50688: first, middle and last
# pipeline stage.
@pytest.mark.parametrize(
    ("layers", "hidden", "printed"),
    [
        (10, 6144, (1217086464, 1132938240, 1210807296)),
        (4, 9216, (1145723904, 1019501568, 1136305152)),
        (1, 16384, (1029828608, 805433344, 1013084160)),
    ],
)
def test_jean_zay_parameters_per_rank(layers, hidden, printed):
    def stage(first: bool, last: bool) -> int:
        return cost.parameters_per_rank(
            gpt2(64, hidden, 32), 1024, 50688, 4, layers=layers, first=first, last=last
        )

    assert (stage(True, False), stage(False, False), stage(False, True)) == printed


def test_closed_form_is_gpt2_small():
    # GPT-2 "117M" as released: 124,439,808 parameters (transformers' `gpt2` checkpoint).
    assert cost.parameters(gpt2(12, 768, 12), 1024) == 124_439_808


def test_a_vocabulary_that_the_ranks_cannot_share_is_our_bug():
    with pytest.raises(AssertionError, match="50257"):
        cost.parameters_per_rank(gpt2(12, 768, 12), 1024, tp=2)


# "GPT2 Experiments", Megatron performance table: size label in 10^9, global batch, GPUs, seconds, printed
# TFLOPS.
@pytest.mark.parametrize(
    ("billions", "global_batch", "gpus", "seconds", "printed"),
    [
        (18, 256, 16, 90.5, 26.1),
        (36, 512, 32, 82, 57.5),
        (48, 1024, 64, 129, 48.7),
        (48, 1536, 64, 328, 28.7),
    ],
)
def test_published_formula_gives_the_printed_tflops(billions, global_batch, gpus, seconds, printed):
    tflops = cost.published_tflops(billions * 1e9, 1024, global_batch, seconds, gpus, checkpointing=True)
    assert tflops == pytest.approx(printed, abs=0.1)  # the source truncates or rounds to one decimal


def test_published_formula_without_checkpointing_counts_three_passes():
    with_it, without = (cost.published_tflops(1e9, 1024, 8, 1.0, 1, checkpointing=c) for c in (True, False))
    assert without / with_it == pytest.approx(3 / 4)


def test_exact_count_is_narayanan_with_checkpointing():
    layers, hidden, length, vocab, batch = 40, 6144, 1024, 50688, 512
    theirs = (
        96
        * batch
        * length
        * layers
        * hidden**2
        * (1 + length / (6 * hidden) + vocab / (16 * layers * hidden))
    )
    ours = cost.exact_flops_per_step(
        gpt2(layers, hidden, 32), length, batch, padded_vocab=vocab, checkpointing=True
    )
    assert ours == pytest.approx(theirs, rel=1e-12)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_counts_are_what_torch_counts_on_transformers_gpt2(checkpointing):
    import torch
    from torch.utils.checkpoint import set_checkpoint_early_stop
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import GPT2Config, GPT2LMHeadModel

    shape, length, batch = gpt2(3, 32, 4, vocab_size=80), 16, 2
    # Eager attention: torch's counter does not know the fused kernel of the CPU.
    config = GPT2Config(
        vocab_size=80,
        n_positions=length,
        n_embd=32,
        n_layer=3,
        n_head=4,
        attn_implementation="eager",
        use_cache=False,
    )
    model = GPT2LMHeadModel(config).train()
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    tokens = torch.zeros(batch, length, dtype=torch.long)
    # Early stop would skip the last product of every recomputed layer; DeepSpeed's checkpointing recomputes
    # all of it.
    with set_checkpoint_early_stop(False), FlopCounterMode(display=False) as counter:
        model(tokens).logits.sum().backward()
    assert sum(p.numel() for p in model.parameters()) == cost.parameters(shape, length)
    assert counter.get_total_flops() == cost.exact_flops_per_step(
        shape, length, batch, checkpointing=checkpointing
    )


@pytest.mark.parametrize("layer_norm", ["post", "pre"])
@pytest.mark.parametrize("sentence_head", ["nsp", "none"])
def test_bert_counts_are_those_of_transformers(layer_norm, sentence_head):
    import torch
    import transformers
    from torch.utils.flop_counter import FlopCounterMode

    shape, length, batch = (
        bert(3, 32, 4, vocab_size=80, layer_norm=layer_norm, sentence_head=sentence_head),
        16,
        2,
    )
    name = ("Bert" if layer_norm == "post" else "MegatronBert") + (
        "ForMaskedLM" if sentence_head == "none" else "ForPreTraining"
    )
    config = (transformers.BertConfig if layer_norm == "post" else transformers.MegatronBertConfig)(
        vocab_size=80, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=length, attn_implementation="eager",
    )  # fmt: skip
    model = getattr(transformers, name)(config).train()
    assert sum(p.numel() for p in model.parameters()) == cost.parameters(shape, length)

    with FlopCounterMode(display=False) as counter:
        output = model(torch.zeros(batch, length, dtype=torch.long))
        sum(x.sum() for x in output.to_tuple()).backward()
    assert counter.get_total_flops() == cost.exact_flops_per_step(shape, length, batch)


def test_a_bert_decodes_only_what_it_predicts():
    shape = bert(3, 32, 4, vocab_size=80)
    every, some, none = (cost.exact_flops_per_step(shape, 16, 2, predictions=p) for p in (16, 5, 0))
    assert every == cost.exact_flops_per_step(shape, 16, 2)
    # samples, passes, operations per multiply-add, dense and logits
    per_prediction = 2 * 3 * 2 * 32 * (32 + 80)
    assert (every - some, some - none) == (11 * per_prediction, 5 * per_prediction)
    gpt = gpt2(3, 32, 4, vocab_size=80)
    assert cost.exact_flops_per_step(gpt, 16, 2, predictions=5) == cost.exact_flops_per_step(gpt, 16, 2), (
        "a GPT predicts every token"
    )


@pytest.mark.parametrize(("length", "window"), [(1, 1), (7, 1), (7, 3), (7, 7), (7, 9), (64, 16)])
def test_pairs_of_a_band(length, window):
    assert cost.pairs(length, window) == sum(
        max(0, i - window + 1) <= j <= i for i in range(length) for j in range(length)
    )


@pytest.mark.parametrize(("length", "pattern"), [(1, Fixed(3, 1)), (24, Fixed(8, 2, 4)), (30, Fixed(8, 3))])
def test_pairs_of_a_fixed_pattern(length, pattern):
    position = torch.arange(length)
    for seen in visible(position[:, None], position[None], pattern, heads=4):
        assert cost.pairs(length, pattern) == int(seen.sum())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_banded_layer_counts_its_band(checkpointing):
    """Two of three layers count the pairs of the band; all else is the dense model's."""
    dense = gpt2(3, 32, 4, vocab_size=80)
    banded = Model.model_validate(
        {**dense.model_dump(), "attention": ("banded", "dense"), "attention_window": 5}
    )
    count, less = (
        cost.exact_flops_per_step(model, 16, 2, checkpointing=checkpointing) for model in (dense, banded)
    )
    pairs = sum(1 for i in range(16) for j in range(16) if i - 5 < j <= i)
    passes, samples = 4 if checkpointing else 3, 2
    # layers, products, operations per multiply-add
    assert count - less == passes * samples * 2 * 2 * 2 * (16 * 16 - pairs) * 32
    assert cost.parameters(dense, 16) == cost.parameters(banded, 16)


@pytest.mark.parametrize("chunk", ["none", "full"])
def test_a_recipe_is_counted_with_its_predictions_and_its_recomputation(chunk):
    recipe = catalog.load("wikipedia/bert-336m", [f"activation_checkpointing={chunk}"])
    shape, how = (recipe.model, recipe.sequence_length, 3), {"padded_vocab": 30592}
    count = cost.exact_flops_per_step(
        *shape, **how, predictions=recipe.predictions, checkpointing=chunk == "full"
    )
    assert cost.operations_of(recipe, 3, 30592) == count
    assert recipe.predictions < recipe.sequence_length
    assert cost.tflops(recipe, 30592, 3, 2.0, 5)[1] == pytest.approx(count / 1e13)


def test_exact_tflops_is_per_gpu():
    assert cost.exact_tflops(6e12, seconds=2.0, gpus=3) == 1.0


# Rajbhandari et al., arXiv 1910.02054, figure 1: 7.5 billion parameters, 64 data-parallel ranks, mixed
# precision.
@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_model_states_of_zero(stage, gigabytes):
    assert sum(cost.sharded_bytes(7.5e9, stage, dp=64)) / 1e9 == pytest.approx(gigabytes, abs=0.05)


def test_model_states_in_fp32():
    # ZeRO steps a copy of the weights, in fp32 as well: 4 + 4 + 12 where plain data parallelism has 4 + 4 +
    # 8.
    assert sum(cost.sharded_bytes(1, 0, dp=8, widths=cost.FP32)) == 16
    assert sum(cost.sharded_bytes(1, 1, dp=8, widths=cost.FP32)) == 8 + 12 / 8
    assert sum(cost.sharded_bytes(1, 2, dp=8, widths=cost.FP32)) == 4 + 16 / 8
    assert sum(cost.sharded_bytes(1, 3, dp=8, widths=cost.FP32)) == 20 / 8


def placed(*sizes, optimizer="gpu", weights="gpu", **how):
    """Bytes of all kinds of model states, on GPU, host and NVMe."""
    return cost.placed_state_bytes(*sizes, places=cost.Places(optimizer, weights), **how).total


def test_half_precision_states_of_the_optimizer_are_half_as_wide():
    # DeepSpeed 0.19.8, base_optimizer.py: bf16 weights in the optimizer, with moments in fp32, and in bf16
    # as well.
    assert sum(cost.sharded_bytes(1, 2, 8, cost.Widths(master=2))) == 2 + (2 + 10) / 8
    assert sum(cost.sharded_bytes(1, 2, 8, cost.Widths(master=2, moment=2))) == 2 + (2 + 6) / 8
    assert sum(cost.sharded_bytes(1, 1, 8, cost.Widths(gradient=4))) == 6 + 12 / 8
    low = cost.Widths(master=2, moment=2)
    assert placed(1, 2, 1, widths=low).gpu == 2 + 2 + 6
    assert placed(1, 3, 1, widths=low).gpu == 2 + 2 + 6 + 2
    assert placed(1, 2, 1, widths=low, optimizer="host") == (2, 6 + 2 + 2, 0)
    # The documents' 6 bytes: a weight and two moments; DeepSpeed has a gradient and another weight besides.
    assert low.saved == 6 and cost.MIXED.saved == 12


# Bytes per parameter of a whole model on one rank, while it steps. Those of DeepSpeed 0.19.8 are what its
# tensors hold in a run of eight square layers, less its staging buffers; launch/deepspeed_fixes/zero0.py for
# stage 0.
@pytest.mark.parametrize(
    ("stage", "mixed", "away", "gpu", "host", "nvme"),
    [
        (0, True, {}, 18, 0, 0),
        (0, False, {}, 16, 0, 0),
        (1, True, {}, 18, 0, 0),
        (2, True, {}, 18, 0, 0),
        (2, False, {}, 20, 0, 0),
        (3, True, {}, 20, 0, 0),
        (3, False, {}, 24, 0, 0),
        (2, True, {"optimizer": "host"}, 2, 18, 0),
        (2, True, {"optimizer": "host", "accumulates": True}, 2, 20, 0),
        (2, False, {"optimizer": "host"}, 4, 20, 0),
        (1, True, {"optimizer": "host"}, 4, 18, 0),
        (3, True, {"optimizer": "host"}, 2, 18, 0),
        (3, True, {"optimizer": "host", "accumulates": True}, 2, 18, 0),
        (3, True, {"optimizer": "host", "weights": "host"}, 0, 20, 0),
        (3, False, {"optimizer": "host", "weights": "host"}, 0, 24, 0),
        (3, True, {"weights": "host"}, 18, 2, 0),
        (3, True, {"optimizer": "nvme"}, 2, 2, 16),
        (3, True, {"optimizer": "nvme", "weights": "host"}, 0, 4, 16),
        (3, True, {"optimizer": "host", "weights": "nvme"}, 0, 18, 2),
        (3, True, {"optimizer": "nvme", "weights": "nvme"}, 0, 2, 18),
    ],
)
def test_model_states_lie_where_the_offload_puts_them(stage, mixed, away, gpu, host, nvme):
    assert placed(1, stage, 1, widths=cost.MIXED if mixed else cost.FP32, **away) == (gpu, host, nvme)


def test_model_states_of_a_step_are_sharded():
    def gpu(stage: int, dp: int, parameters: float = 1, **more) -> float:
        return placed(parameters, stage, dp, **more).gpu

    assert [gpu(stage, 8) for stage in (0, 1, 2, 3)] == [18, 4 + 12 / 8, 2 + 16 / 8, 20 / 8]
    assert gpu(1, 8, widths=cost.FP32) == 8 + 12 / 8
    assert gpu(3, 4, 40.0, sub_group=5.0) == 10 * 16 + 5 * 4, (
        "stage 3 has fp32 gradients of one sub-group at a time"
    )
    assert placed(1, 2, 8, optimizer="host") == (2, 18 / 8, 0)
    assert placed(1, 3, 8, optimizer="host") == (2 / 8, 18 / 8, 0)


def test_zero_offload_trains_13_billion_parameters_on_one_v100():
    # Ren et al., arXiv 2101.06840, table 2: 13B on one 32 GB V100 with 1.5 TB of host memory, where plain
    # data parallelism has 1.4B.
    states = placed(13e9, 2, 1, optimizer="host")
    assert states.gpu <= 32e9 and 16 * 13e9 <= states.host <= 1.5e12
    assert placed(1.4e9, 0, 1).gpu <= 32e9 < placed(13e9, 0, 1).gpu


def test_planning_imports_neither_torch_nor_deepspeed():
    code = "import sys, modeling.cost; sys.exit(' '.join({'torch', 'deepspeed'} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
