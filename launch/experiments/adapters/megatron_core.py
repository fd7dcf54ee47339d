"""Megatron-Core's GPTModel with its pipeline schedule, DDP and optimizer, proven.

It wants `pip install megatron-core==0.16.1`, and no GPU: it is told to be on a CPU.

python launch/prove.py launch/experiments/adapters/megatron_core.py \\
    --layouts tp2 tp2-dp2 tp2-sequence
"""

import re

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from tiny_model import LENGTH, VOCABULARY, WIDTH, batch
from torch.overrides import TorchFunctionMode

__all__ = ["batch", "train"]
LAYERS = 2


class OnCpu(TorchFunctionMode):
    """Makes on the CPU what Megatron makes on a GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.cuda:
            return args[0]
        kwargs = {**(kwargs or {})}
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        made = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(made, str):
            return made.replace("torch.", "torch.cuda.")
        return made


class Norm(torch.nn.LayerNorm):
    """Megatron's own is Apex's; its gradients are summed over the tensor ranks under sequence parallelism."""

    def __init__(self, config, hidden_size, eps):
        super().__init__(hidden_size, eps)
        for each in self.parameters():
            each.sequence_parallel = config.sequence_parallel


def forward(batches, model):
    tokens = next(batches)["input_ids"]
    places = torch.arange(LENGTH).expand_as(tokens)
    later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
    output = model(tokens, places, later, labels=tokens.roll(-1, 1))

    def mean(losses):
        return losses.mean(), losses.mean().item()

    return output, mean


def train(proof):
    """Your loop. What starts with `proof.` is what the proof needs."""
    vars(torch.cuda).update(current_device=lambda: "cpu", synchronize=lambda: None)
    with OnCpu():
        train_on_cpu(proof)


def train_on_cpu(proof):
    layout = proof.layout
    bf16 = proof.precision == "bf16"
    dtype = torch.bfloat16 if bf16 else torch.float32
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(layout["tp"], layout["pp"])
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout["tp"],
        pipeline_model_parallel_size=layout["pp"],
        sequence_parallel=bool(layout["sequence"]),
        bf16=bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        use_cpu_initialization=True,
        finalize_model_grads_func=finalize_model_grads,
    )
    layer = get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = Norm
    layer.submodules.pre_mlp_layernorm = Norm
    own_layers = LAYERS // layout["pp"]
    model = GPTModel(
        config,
        TransformerBlockSubmodules([layer] * own_layers, Norm),
        VOCABULARY,
        LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
    )
    first = parallel_state.get_pipeline_model_parallel_rank() * own_layers

    def name(own):
        """The name in one process: layers are counted over stages, the head is the embedding."""
        own = re.sub(
            r"layers\.(\d+)", lambda found: f"layers.{int(found[1]) + first}", own
        )
        return own.replace("output_layer", "embedding.word_embeddings")

    proof.load(model, names=name)
    if bf16:
        model = Float16Module(config, model)
    sums = DistributedDataParallelConfig(grad_reduce_in_fp32=bf16)
    ddp = DistributedDataParallel(config, sums, model)
    optimizer = get_megatron_optimizer(
        # it clips on GPUs alone
        OptimizerConfig(lr=1e-3, weight_decay=0.1, clip_grad=0.0, bf16=bf16),
        [ddp],
    )
    proof.watch(ddp, optimizer.chained_optimizers[0])
    for rows in proof.batches():
        micro = proof.micro_batches(rows, parallel_state.get_data_parallel_rank())
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(micro),
            model=ddp,
            num_microbatches=len(micro),
            seq_length=LENGTH,
            micro_batch_size=len(micro[0]["input_ids"]),
            forward_only=False,
        )
        optimizer.step()
        loss = sum(losses) / len(micro) if losses else None
        proof.step(loss, optimizer.get_grad_norm())
