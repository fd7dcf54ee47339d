"""Cost arithmetic against published numbers, and against what torch counts on transformers' GPT-2."""

import subprocess
import sys

import pytest

from modeling import cost
from recipes.schema import Model


def gpt2(layers: int, hidden: int, heads: int = 16, vocab_size: int = 50257) -> Model:
    return Model(layers=layers, hidden=hidden, heads=heads, vocab_size=vocab_size)


# "Adventures with BERT and GPT2" (DGX-2), sequence 1024: the printed size is the sum over the tensor-parallel ranks,
# the vocabulary padded to a multiple of 128 tp. 54x1920 is printed beside tp 2 with the size it has at tp 1.
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


# "GPT2 Experiments" (Jean Zay): logs of the public runs, tp 4, vocabulary 50688: first, middle and last pipeline stage.
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
        return cost.parameters_per_rank(gpt2(64, hidden, 32), 1024, 50688, 4, layers=layers, first=first, last=last)

    assert (stage(True, False), stage(False, False), stage(False, True)) == printed


def test_closed_form_is_gpt2_small():
    # GPT-2 "117M" as released: 124,439,808 parameters (transformers' `gpt2` checkpoint).
    assert cost.parameters(gpt2(12, 768, 12), 1024) == 124_439_808


def test_a_vocabulary_that_the_ranks_cannot_share_is_our_bug():
    with pytest.raises(AssertionError, match="50257"):
        cost.parameters_per_rank(gpt2(12, 768, 12), 1024, tp=2)


# "GPT2 Experiments", Megatron performance table: size label in 10^9, global batch, GPUs, seconds, printed TFLOPS.
@pytest.mark.parametrize(
    ("billions", "global_batch", "gpus", "seconds", "printed"),
    [(18, 256, 16, 90.5, 26.1), (36, 512, 32, 82, 57.5), (48, 1024, 64, 129, 48.7), (48, 1536, 64, 328, 28.7)],
)
def test_published_formula_gives_the_printed_tflops(billions, global_batch, gpus, seconds, printed):
    tflops = cost.published_tflops(billions * 1e9, 1024, global_batch, seconds, gpus, checkpointing=True)
    assert tflops == pytest.approx(printed, abs=0.1)  # the source truncates or rounds to one decimal


def test_published_formula_without_checkpointing_counts_three_passes():
    with_it, without = (cost.published_tflops(1e9, 1024, 8, 1.0, 1, checkpointing=c) for c in (True, False))
    assert without / with_it == pytest.approx(3 / 4)


def test_exact_count_is_narayanan_with_checkpointing():
    layers, hidden, length, vocab, batch = 40, 6144, 1024, 50688, 512
    theirs = 96 * batch * length * layers * hidden**2 * (1 + length / (6 * hidden) + vocab / (16 * layers * hidden))
    ours = cost.exact_flops_per_step(gpt2(layers, hidden, 32), length, batch, padded_vocab=vocab, checkpointing=True)
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
        vocab_size=80, n_positions=length, n_embd=32, n_layer=3, n_head=4, attn_implementation="eager", use_cache=False
    )
    model = GPT2LMHeadModel(config).train()
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    tokens = torch.zeros(batch, length, dtype=torch.long)
    # Early stop would skip the last product of every recomputed layer; DeepSpeed's checkpointing recomputes all of it.
    with set_checkpoint_early_stop(False), FlopCounterMode(display=False) as counter:
        model(tokens).logits.sum().backward()
    assert sum(p.numel() for p in model.parameters()) == cost.parameters(shape, length)
    assert counter.get_total_flops() == cost.exact_flops_per_step(shape, length, batch, checkpointing=checkpointing)


def test_exact_tflops_is_per_gpu():
    assert cost.exact_tflops(6e12, seconds=2.0, gpus=3) == 1.0


# Rajbhandari et al., arXiv 1910.02054, figure 1: 7.5 billion parameters, 64 data-parallel ranks, mixed precision.
@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_model_states_of_zero(stage, gigabytes):
    assert cost.model_state_bytes(7.5e9, stage, dp=64) / 1e9 == pytest.approx(gigabytes, abs=0.05)


def test_model_states_in_fp32():
    assert cost.model_state_bytes(1, 0, dp=8, mixed_precision=False) == 16
    assert cost.model_state_bytes(1, 1, dp=8, mixed_precision=False) == 9
    assert cost.model_state_bytes(1, 3, dp=8, mixed_precision=False) == 2


def test_planning_imports_neither_torch_nor_deepspeed():
    code = "import sys, modeling.cost; sys.exit(' '.join({'torch', 'deepspeed'} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
