"""Training systems: their memory and time besides the arithmetic common to all.

Ours is read off `modeling/`; the others' properties off their public code of the time, as the comments say.
They let published rows be predicted as their authors ran them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from modeling.cost import Widths


@dataclass(frozen=True)
class Passes:
    """Memory traffic of a layer's forward pass between its matrix products.

    Attributes:
        whole: of w b S h, done in full by every tensor rank: norms, bias, dropout and the residual sums.
        cut: of w b S h, of which a tensor rank does 1/t: copies of queries, keys, values and context, and
            GELU with its bias, on 4 h.
        scores: of w a b S^2 / t, where a system keeps its scores: scale, mask, softmax, dropout.
        kernels: started by the host.
    """

    whole: float
    cut: float
    scores: float
    kernels: int


# One kernel for bias, dropout and residual sum, one for bias and GELU, one for scale, mask and softmax.
FUSED = Passes(whole=10, cut=22, scores=4, kernels=24)
# A kernel for each; GELU in its tanh form is eight of them over 4 h.
UNFUSED = Passes(whole=19, cut=100, scores=10.5, kernels=45)


@dataclass(frozen=True)
class Software:
    """A training system.

    Attributes:
        keeps_scores: attention keeps its S x S scores for the backward pass.
        gelu_copies: tensors of 4 h that the GELU's backward pass needs besides its input.
        logit_bytes: bytes per logit at the fullest moment of the loss.
        dropout_bytes: of a dropout of the residual stream while it is computed, per element.
        states: bytes per number of the model states where DeepSpeed does not place them; None: DeepSpeed's.
        step_gradients: bytes per parameter of gradients during the optimizer's step, where `states` is given.
        update_kernels: started for each parameter tensor of a rank's share, from gradients to new weights; 1:
            as good as none. DeepSpeed's: to the bucket, the norm and its sum, three to find an overflow.
        update_bytes: moved by the optimizer's step per parameter, in mixed precision.
        predicts_everywhere: a BERT's logits are computed at all positions, not only at the masked ones.
        overlaps_gradients: gradients are averaged over data-parallel ranks while the backward pass runs.
        overlaps_weights: so are the weights that ZeRO-1 and -2 gather, while the forward pass runs.
        cuts_boundaries: tensor ranks send 1/t each of what goes to the next pipeline stage.
        has_interleaving: its pipeline can give a rank several chunks of layers.
        balances_stages: a last stage whose output layer takes longer than a layer has fewer layers.
        has_sequence_parallelism: it can cut the residual stream over tensor ranks.
    """

    name: str
    passes: Passes
    keeps_scores: bool = False
    gelu_copies: int = 0
    logit_bytes: float = 14
    dropout_bytes: float = 1
    states: Widths | None = None
    step_gradients: float = 0.0
    update_kernels: int = 1
    # Norm, unscaling, master weight and two moments read and written, weight written.
    update_bytes: float = 42
    predicts_everywhere: bool = True
    overlaps_gradients: bool = False
    overlaps_weights: bool = False
    cuts_boundaries: bool = False
    has_interleaving: bool = False
    balances_stages: bool = False
    has_sequence_parallelism: bool = False


# nanoGPT and others like it: fp32 weights under autocast, whose casts of weights and norms are
# kernels of their own (52 a layer in both passes, a third of them forward, counted as by
# `benchmark.py kernels`; about 26 compiled), and AdamW by torch.
_nanogpt_like = partial(
    Software,
    logit_bytes=16,
    states=Widths(weight=4, gradient=4, master=0, moment=4),
    step_gradients=4,
    overlaps_gradients=True,
)
_ALL = (
    # modeling/transformer.py: torch's scaled_dot_product_attention, F.gelu, sums and dropout one by one:
    # with dropout 34 kernels a layer in both passes, a third of them forward, as two and three layers
    # differ in what `benchmark.py kernels` counts; dropout_bytes where no compiler makes it one kernel;
    # the loss holds the logits, their gradient where it is compiled, and blocks in fp32: 4.0 bytes per
    # logit, as torch's profiler measured on a CPU in bf16 and in fp32, compiled.
    Software(
        "megarecipes",
        Passes(whole=18, cut=24, scores=0, kernels=12),
        logit_bytes=4,
        predicts_everywhere=False,
        cuts_boundaries=True,
        dropout_bytes=9,
        has_sequence_parallelism=True,
        balances_stages=True,
    ),
    # transformers' GPT-2 with SDPA under DeepSpeed: 51 kernels a layer in both passes, as `benchmark.py
    # kernels` counts; its GELU is eight of the forward ones, its loss shifts a copy of the logits.
    Software(
        "transformers",
        Passes(whole=18, cut=100, scores=0, kernels=17),
        gelu_copies=6,
        logit_bytes=16,
        update_kernels=6,
        predicts_everywhere=False,
    ),
    # Megatron-LM of 2019 and 2020. apex's FP16_Optimizer: fp16 weights and gradients, fp32 masters,
    # gradients and moments; data parallelism flattens the fp16 gradients, 2 more. mpu/cross_entropy.py
    # holds the logits in half and in fp32, a copy, and their exponentials. Of the tanh GELU autograd
    # keeps six tensors besides the input; gradients are averaged after the backward pass. Its Adam takes
    # nine kernels for each tensor, besides those that copy, unscale, clip and copy back.
    Software(
        "megatron-2019",
        UNFUSED,
        keeps_scores=True,
        gelu_copies=6,
        states=Widths(),
        step_gradients=8,
        update_kernels=25,
        update_bytes=110,
    ),
    # Megatron-LM of 2020 and 2021: fused kernels, a pipeline with interleaving and cut boundaries; its
    # loss takes exponentials in place. Averaging flattens the fp16 gradients, 2 more, while those in fp32
    # of the last step remain (its logs: use_contiguous_buffers_in_ddp False). For each tensor it flattens
    # the gradient, copies it back, and casts it.
    Software(
        "megatron",
        FUSED,
        keeps_scores=True,
        logit_bytes=10,
        states=Widths(),
        step_gradients=8,
        update_kernels=3,
        cuts_boundaries=True,
        has_interleaving=True,
        has_sequence_parallelism=True,
    ),
    # The same under DeepSpeed: its layers and loss, DeepSpeed's states and pipeline. The latter's
    # fused_optimizer.py of 2021 casts, sums and reads each gradient to find an overflow, and each norm.
    Software(
        "megatron-deepspeed",
        FUSED,
        keeps_scores=True,
        logit_bytes=10,
        update_kernels=8,
        overlaps_gradients=True,
        cuts_boundaries=True,
    ),
    # Megatron-Core: flash attention, a distributed optimizer with overlapped traffic.
    Software(
        "megatron-core",
        FUSED,
        logit_bytes=10,
        overlaps_gradients=True,
        overlaps_weights=True,
        cuts_boundaries=True,
        has_interleaving=True,
        has_sequence_parallelism=True,
    ),
    # torch's FSDP as llm-foundry runs it: fp32 shards, gathered in half precision, flash attention, and a
    # fused cross-entropy that writes the gradient of half-precision logits over them.
    Software(
        "fsdp",
        FUSED,
        logit_bytes=4,
        states=Widths(weight=4, gradient=4, master=0, moment=4),
        step_gradients=4,
        overlaps_gradients=True,
    ),
    _nanogpt_like("nanogpt", Passes(whole=18, cut=24, scores=4, kernels=9)),
    _nanogpt_like("nanogpt-eager", Passes(whole=30, cut=34, scores=10.5, kernels=17)),
    # transformers' GPT-2 of 2021 under DeepSpeed: eager attention that keeps its scores.
    Software(
        "transformers-2021",
        UNFUSED,
        keeps_scores=True,
        gelu_copies=6,
        logit_bytes=16,
        update_kernels=8,
    ),
)
SYSTEMS = {system.name: system for system in _ALL}
OURS = SYSTEMS["megarecipes"]
