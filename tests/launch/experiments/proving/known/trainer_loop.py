"""A Trainer of transformers, of this release or of one before 4.46: dp, accumulation."""

import sys
import tempfile

sys.modules["datasets"] = None  # ours needs another huggingface_hub than an old Trainer

import torch  # noqa: E402
from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from torch.utils.data import SequentialSampler  # noqa: E402
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments  # noqa: E402

ROWS, LENGTH, VOCABULARY = 8, 16, 64


def batch(step):
    """Rows of different lengths; -100 does not count."""
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
    lengths = torch.tensor([16, 5, 13, 9, 3, 11, 4, 6])
    labels = tokens.where(torch.arange(LENGTH) < lengths[:, None], -100)
    return {"input_ids": tokens, "labels": labels}


class Ordered(Trainer):
    def _get_train_sampler(self, *_):
        return SequentialSampler(self.train_dataset)


class Compared(TrainerCallback):
    def __init__(self, proof):
        self.proof = proof

    def on_train_begin(self, args, state, control, model, optimizer, **_):
        self.proof.watch(model, optimizer)

    def on_step_end(self, *_, **__):
        self.proof.step()


def train(proof):
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    dp, accumulation = proof.layout["dp"], proof.layout["accumulation"]
    steps = [*proof.batches()]
    rows = [{name: step[name][row] for name in step} for step in steps for row in range(len(step["labels"]))]
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    proof.load(model)
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=len(rows) // len(steps) // dp // accumulation,
        gradient_accumulation_steps=accumulation,
        max_steps=len(steps),
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        weight_decay=0.1,
        max_grad_norm=0.0,
        optim="adamw_torch",
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        seed=1,
    )
    Ordered(model, arguments, train_dataset=rows, callbacks=[Compared(proof)]).train()
