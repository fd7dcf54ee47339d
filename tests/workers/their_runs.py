"""Trains models of `transformers`, by Trainer or by a loop, and saves after six steps.

their_runs.py OUT CASES.json    cases: name, model (gpt2, bert, megatron-bert), ds (a DeepSpeed JSON; null:
                                without DeepSpeed), loop (by deepspeed.initialize) or accelerate (its
                                save_state), client (the loop's own optimizer), decay (of all parameters),
                                settings of the recipe whose batches are read, in its order

Leaves OUT/NAME/losses.json, of twelve steps, and what Trainer or DeepSpeed saved.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from launch.console import terminal
from launch.machine import description
from launch.ranks import ending, processes

terminal.quiet_libraries()
MACHINE = description.detect_machine(emulated_fp16=True)

import deepspeed  # noqa: E402  (after the accelerator is chosen)
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import transformers  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from transformers import Trainer, TrainingArguments, default_data_collator  # noqa: E402
from transformers.trainer_pt_utils import get_parameter_names  # noqa: E402

from data.corpus import build  # noqa: E402
from data.loader import StepBatches  # noqa: E402
from ds_configs.resolver import resolve  # noqa: E402
from launch.training.transformers_trainer import isolate_accelerate  # noqa: E402
from modeling.families import conversion_of  # noqa: E402
from recipes import catalog  # noqa: E402

STEPS, SAVED = 12, 6
RECIPES = {"gpt2": "default/sotu", "bert": "bert/sotu", "megatron-bert": "bert/sotu"}
PLACED = {"bert": "post", "megatron-bert": "pre"}


def recipe_of(case):
    model = case["model"]
    settings = ["precision=fp32", "batch.global=12", *case.get("settings", ())]
    if model in PLACED:
        settings += [f"model.layer_norm={PLACED[model]}", "model.sentence_head=none"]
    return catalog.load(RECIPES[model], settings, tiny=True, steps=STEPS)


def samples_of(recipe):
    """The samples of all steps, in the order in which ours reads them."""
    corpus = build(recipe, say=lambda line: None)
    layout = resolve(recipe, "zero1", 1, MACHINE).layout
    batches = StepBatches(corpus.train, recipe.seed, layout, 0)
    steps = [next(batches) for _ in range(recipe.steps)]
    batches.close()
    return corpus.tokenizer, [
        {name: values[row] for name, values in micro.items()}
        for step in steps for micro in step for row in range(len(micro["tokens"]))
    ]  # fmt: skip


def model_of(recipe):
    config = conversion_of(recipe.model).config(recipe.model, recipe.positions)
    torch.manual_seed(11)
    return getattr(transformers, conversion_of(recipe.model).class_name(recipe.model))(config)


class Losses(Trainer):
    """Trainer as it is, whose losses are kept."""

    losses: list

    def compute_loss(self, model, inputs, *args, **how):
        loss = super().compute_loss(model, inputs, *args, **how)
        self.losses.append(loss.detach().float())
        return loss


def by_trainer(case, recipe, tokenizer, samples, out):
    ds, micro, accumulation = (
        case["ds"],
        case["micro"],
        recipe.batch.global_ // case["micro"] // processes.world_size(),
    )
    rows = [
        {"input_ids": one["tokens"], "labels": one["labels"], "shift_labels": one["labels"]}
        for one in samples
    ]
    arguments = TrainingArguments(
        output_dir=str(out), deepspeed=ds, use_cpu=True, max_steps=STEPS, save_steps=SAVED,
        per_device_train_batch_size=micro, gradient_accumulation_steps=accumulation, learning_rate=2e-3,
        warmup_steps=2, lr_scheduler_type="cosine", weight_decay=0.1, adam_beta2=0.95, max_grad_norm=0.5,
        train_sampling_strategy="sequential", remove_unused_columns=False, report_to=[], disable_tqdm=True,
        bf16="bf16" in case.get("half", ds or {}), fp16="fp16" in (ds or {}), seed=11, logging_steps=1,
    )  # fmt: skip
    how = {"data_collator": default_data_collator, "processing_class": tokenizer}
    trainer = Losses(model_of(recipe), arguments, train_dataset=rows, **how)
    trainer.losses = []
    trainer.train()
    losses = torch.stack(trainer.losses)
    dist.all_reduce(losses)
    return (losses.view(STEPS, accumulation).sum(1) / processes.world_size()).tolist()


def labels_of(batch):
    """(B, S) labels, -100 where nothing is predicted."""
    labels = torch.full_like(batch["tokens"], -100)
    for row in range(len(labels)):
        kept = batch["weights"][row] > 0
        labels[row, batch["positions"][row][kept]] = batch["labels"][row][kept]
    return labels


class Lamb(torch.optim.Optimizer):
    """A LAMB of one's own, with moments and settings by Adam's names."""

    def __init__(self, params, lr, betas, eps=1e-8, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                held = self.state[p]
                if not held:
                    held.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                held["step"] += 1
                (b1, b2), m, v = group["betas"], held["exp_avg"], held["exp_avg_sq"]
                m.lerp_(p.grad, 1 - b1)
                v.mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                way = m / (v.sqrt() + group["eps"]) + group["weight_decay"] * p
                p.sub_(group["lr"] * p.norm() / way.norm().clamp_min(1e-12) * way)


CLIENTS = {"lamb": Lamb, "radam": torch.optim.RAdam, "nadam": torch.optim.NAdam, "adamw": torch.optim.AdamW}


def grouped(model, case):
    """Matrices and vectors apart, unless all are decayed alike."""
    decayed = set(get_parameter_names(model, [torch.nn.LayerNorm], ["bias"]))
    named = list(model.named_parameters())
    if "decay" in case:
        return [{"params": [p for _, p in named], "weight_decay": case["decay"]}]
    return [
        {"params": [p for n, p in named if n in decayed], "weight_decay": 0.1},
        {"params": [p for n, p in named if n not in decayed], "weight_decay": 0.0},
    ]


class Accelerated:
    """A model under accelerate without DeepSpeed, with the calls of DeepSpeed's engine."""

    def __init__(self, model, optimizer, accumulation):
        self.accelerator, self.accumulation, self.made = Accelerator(cpu=True), accumulation, 0
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def __call__(self, **given):
        return self.model(**given)

    def backward(self, loss):
        self.accelerator.backward(loss / self.accumulation)

    def step(self):
        self.made += 1
        if self.made % self.accumulation == 0:
            self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def save_checkpoint(self, out):
        self.accelerator.save_state(out)

    def destroy(self):
        self.accelerator.free_memory()


def engine_of(case, model, accumulation):
    groups = grouped(model, case)
    client = None
    if "client" in case:
        client = CLIENTS[case["client"]](groups, lr=1e-3, betas=(0.9, 0.95))
    if case.get("accelerate"):
        return Accelerated(model, client, accumulation)
    config = {**case["ds"], "train_micro_batch_size_per_gpu": case["micro"], "train_batch_size": 12}
    return deepspeed.initialize(model=model, config=config, optimizer=client, model_parameters=groups)[0]


def by_loop(case, recipe, tokenizer, samples, out):
    model = model_of(recipe)
    ranks, micro, losses = processes.world_size(), case["micro"], []
    count = 12 // ranks // micro
    engine = engine_of(case, model, count)
    for step in range(STEPS):
        whole = {name: torch.stack([one[name] for one in samples[12 * step : 12 * step + 12]])
                 for name in samples[0]}  # fmt: skip
        labels = labels_of(whole) if "positions" in whole else whole["labels"]
        predicted, total = int((labels != -100).sum()), torch.zeros(())
        for number in range(count):
            at = (number * ranks + processes.rank()) * micro
            part = slice(at, at + micro)
            given = {"input_ids": whole["tokens"][part]}
            if "lengths" in whole:
                places = torch.arange(labels.shape[1])
                given["attention_mask"] = (places < whole["lengths"][part, None]).long()
                given["token_type_ids"] = whole["token_types"][part]
            logits = engine(**given).logits.float()
            loss = F.cross_entropy(logits.flatten(0, 1), labels[part].flatten(), reduction="sum") / predicted
            total += loss.detach()
            engine.backward(loss * count * ranks)
            engine.step()
        dist.all_reduce(total)
        losses.append(float(total))
        if step + 1 == SAVED:
            engine.save_checkpoint(str(out))
            if case.get("config", True) and processes.rank() == 0:
                model.config.save_pretrained(out)
                tokenizer.save_pretrained(out)
    engine.destroy()
    return losses


def train(case, out):
    recipe = recipe_of(case)
    tokenizer, samples = samples_of(recipe)
    out.mkdir(exist_ok=True)
    with isolate_accelerate():
        losses = (by_loop if case.get("loop") or case.get("accelerate") else by_trainer)(
            case, recipe, tokenizer, samples, out
        )
    dist.barrier()
    if processes.rank() == 0:
        (out / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    with ending.clean_exit():
        processes.start_processes()
        for one in json.loads(Path(sys.argv[2]).read_text()):
            train(one, Path(sys.argv[1]) / one["name"])
