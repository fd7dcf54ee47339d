"""transformers' Trainer, proven: a callback hands over what is trained, and each step.

python launch/prove.py launch/experiments/adapters/trainer.py \\
    --layouts dp2 dp2-zero1 dp2-zero3 dp2-fsdp dp2-accumulation2
"""

import tempfile

from accelerate.state import DistributedType
from tiny_model import batch, deepspeed_json, llama
from transformers import Trainer, TrainerCallback, TrainingArguments

__all__ = ["batch", "train"]


class Steps(TrainerCallback):
    """Says what is trained, and what each step gave."""

    def __init__(self, proof):
        self.proof = proof

    def on_train_begin(self, args, state, control, **given):
        self.proof.watch(given["model"], given["optimizer"])

    def on_log(self, args, state, control, **given):
        logs = given["logs"]
        if "loss" in logs:
            self.proof.step(logs["loss"], logs["grad_norm"])


def train(proof):
    """Your script. What starts with `proof.` is what the proof needs."""
    config = deepspeed_json(proof)
    del config["optimizer"]  # Trainer's own, which decays no norms
    dataset = []
    for rows in proof.batches():
        dataset += [{"input_ids": row, "labels": row} for row in rows["input_ids"]]
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        per_device_train_batch_size=8 // proof.layout.shares,
        gradient_accumulation_steps=proof.layout["accumulation"],
        num_train_epochs=1,
        train_sampling_strategy="sequential",
        learning_rate=1e-3,
        weight_decay=0.1,
        lr_scheduler_type="constant",
        bf16=proof.precision == "bf16",
        deepspeed=config if "zero" in proof.layout.words else None,
        fsdp=bool(proof.layout["fsdp"]),
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )
    if proof.layout["fsdp"]:  # of itself accelerate takes it for a GPU's
        arguments.distributed_state.distributed_type = DistributedType.MULTI_GPU
    model = llama()
    proof.load(model)
    Trainer(model, arguments, train_dataset=dataset, callbacks=[Steps(proof)]).train()
