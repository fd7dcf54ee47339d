"""Goes on from universal checkpoints in loops without any code of ours: DeepSpeed's engine, and Trainer.

universal_runs.py JOBS.json     a list; of each job: export (of `checkpoint.py export`), run (that it is of),
                                out (losses by step, or what was refused), stage, precision, adam ("torch",
                                "fused", "trainer's"), trainer (or a loop of one's own)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from launch.console import terminal
from launch.machine import description
from launch.ranks import ending, processes

terminal.quiet_libraries()
description.detect_machine(emulated_fp16=False)

import deepspeed  # noqa: E402  (after the accelerator is chosen)
import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import transformers  # noqa: E402
from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from accelerate.utils import DummyOptim  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from torch.utils.data import SequentialSampler  # noqa: E402
from transformers.integrations.deepspeed import unset_hf_deepspeed_config  # noqa: E402

from data.corpus import build  # noqa: E402
from data.loader import micro_batch  # noqa: E402
from recipes import catalog  # noqa: E402
from recipes.schema import Recipe  # noqa: E402

BATCH, ACCUMULATION, FIRST, LAST = 8, 2, 6, 12


def rate(recipe: Recipe):
    """The share of the largest learning rate, as transformers' linear schedule has it."""
    warmup, end = recipe.schedule.warmup_steps, recipe.schedule.decay_steps
    return lambda step: step / warmup if step < warmup else max(0.0, (end - step) / (end - warmup))


def config_of(recipe: Recipe, job: dict) -> dict:
    """A DeepSpeed JSON as people write it."""
    chosen = recipe.optimizer
    params = {
        "lr": chosen.lr,
        "betas": [*chosen.betas],
        "eps": chosen.eps,
        "weight_decay": chosen.weight_decay,
    }
    if job["adam"] == "torch":
        params["torch_adam"] = True
    config = {
        "train_batch_size": BATCH,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": chosen.clip,
        "optimizer": {"type": "AdamW", "params": params},
        "zero_optimization": {"stage": job["stage"]},
        "bf16": {"enabled": job["precision"] == "bf16"},
        "checkpoint": {"load_universal": True},
    }
    return config


def samples_of(recipe: Recipe) -> dict[str, torch.Tensor]:
    """All samples of the run in their order."""
    fields = build(recipe, say=lambda text: None).train.take(range(BATCH * LAST), recipe.seed)
    return micro_batch(fields, np.ones(BATCH * LAST))


def loss_of(model, rows: dict[str, torch.Tensor], step_rows: dict[str, torch.Tensor]) -> torch.Tensor:
    """The part of `rows` in the step's mean loss, times the number of parts."""
    parts = len(step_rows["tokens"]) / len(rows["tokens"])
    if "lengths" not in rows:  # GPT-2
        logits = model(input_ids=rows["tokens"], use_cache=False).logits
        return cross_entropy(logits.flatten(0, 1).float(), rows["labels"].flatten())
    mask = torch.arange(rows["tokens"].shape[1]) < rows["lengths"][:, None]
    done = model(rows["tokens"], attention_mask=mask.long(), token_type_ids=rows["token_types"])
    logits = done.logits if "logits" in done else done.prediction_logits
    chosen = logits.gather(1, rows["positions"][..., None].expand(-1, -1, logits.shape[-1])).float()
    predicted = rows["weights"] > 0
    tokens = cross_entropy(chosen[predicted], rows["labels"][predicted], reduction="sum")
    loss = parts * tokens / (step_rows["weights"] > 0).sum()
    if "seq_relationship_logits" in done:
        loss = loss + cross_entropy(done.seq_relationship_logits.float(), rows["sentence_labels"])
    return loss


def mean(losses: list[float]) -> float:
    """Over micro-batches and ranks."""
    total = torch.tensor(losses, dtype=torch.float64).mean()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def model_of(export: str):
    config = transformers.AutoConfig.from_pretrained(export)
    (name,) = config.architectures
    torch.manual_seed(5)  # other weights than the run's
    return getattr(transformers, name)(config).float()


def groups_of(model, recipe: Recipe) -> list[dict]:
    every = [*model.parameters()]
    return [
        {"params": [p for p in every if p.dim() > 1], "weight_decay": recipe.optimizer.weight_decay},
        {"params": [p for p in every if p.dim() <= 1], "weight_decay": 0.0},
    ]


def own_loop(recipe: Recipe, job: dict) -> dict[int, float]:
    model = model_of(job["export"])
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=groups_of(model, recipe), config=config_of(recipe, job),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, rate(recipe)),
    )  # fmt: skip
    path, _ = engine.load_checkpoint(job["export"])
    assert path and engine.global_steps == FIRST and engine.global_samples == FIRST * BATCH
    samples, losses = samples_of(recipe), {}
    micro = BATCH // ACCUMULATION // dist.get_world_size()
    for step in range(FIRST, LAST):
        rows = {name: values[step * BATCH : (step + 1) * BATCH] for name, values in samples.items()}
        parts = []
        for number in range(ACCUMULATION):
            first = (number * dist.get_world_size() + dist.get_rank()) * micro
            own = {name: values[first : first + micro] for name, values in rows.items()}
            loss = loss_of(engine, own, rows)
            parts.append(float(loss))
            engine.backward(loss)
            engine.step()
        losses[step + 1] = mean(parts)
    engine.destroy()
    return losses


class Rows(torch.utils.data.Dataset):
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples["tokens"])

    def __getitem__(self, row):
        return {"input_ids": self.samples["tokens"][row], "labels": self.samples["labels"][row]}


class InOrder(transformers.Trainer):
    def _get_train_sampler(self, *_):
        return SequentialSampler(self.train_dataset)

    def create_optimizer(self, model=None):
        """With an optimizer in the JSON, Trainer decays biases and LayerNorms too."""
        if isinstance(self.optimizer, DummyOptim):
            self.optimizer.params = groups_of(self.model, self.recipe)
            return self.optimizer
        return super().create_optimizer(model)


def by_trainer(recipe: Recipe, job: dict) -> dict[int, float]:
    """As a script with --resume_from_checkpoint; labels are shifted already, so the loss is ours."""
    config = config_of(recipe, job)
    if job["adam"] == "trainer's":
        del config["optimizer"]
        config["zero_allow_untested_optimizer"] = True
    parts = []

    def loss_of_outputs(outputs, labels, num_items_in_batch=None):
        loss = cross_entropy(outputs.logits.flatten(0, 1).float(), labels.flatten())
        parts.append(float(loss))
        return loss / ACCUMULATION / dist.get_world_size()  # Trainer multiplies it by the ranks

    chosen = recipe.optimizer
    arguments = transformers.TrainingArguments(
        output_dir=str(Path(job["out"]).with_suffix(".trainer")), deepspeed=config, use_cpu=True,
        max_steps=LAST, per_device_train_batch_size=BATCH // ACCUMULATION // dist.get_world_size(),
        gradient_accumulation_steps=ACCUMULATION, learning_rate=chosen.lr, adam_beta1=chosen.betas[0],
        adam_beta2=chosen.betas[1], adam_epsilon=chosen.eps, weight_decay=chosen.weight_decay,
        optim="adamw_torch", max_grad_norm=chosen.clip, bf16=job["precision"] == "bf16",
        lr_scheduler_type="linear", warmup_steps=recipe.schedule.warmup_steps, logging_strategy="no",
        save_strategy="steps", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = InOrder(
        model_of(job["export"]), arguments, train_dataset=Rows(samples_of(recipe)),
        compute_loss_func=loss_of_outputs,
    )  # fmt: skip
    trainer.recipe = recipe
    try:
        trainer.train(resume_from_checkpoint=job["export"])
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        unset_hf_deepspeed_config()
    assert len(parts) == ACCUMULATION * (LAST - FIRST)
    return {
        FIRST + 1 + n: mean(parts[n * ACCUMULATION : (n + 1) * ACCUMULATION]) for n in range(LAST - FIRST)
    }


def main(jobs: Path) -> None:
    processes.start_processes()
    torch.set_num_threads(1)
    for job in json.loads(jobs.read_text()):
        recipe = catalog.load_resolved(Path(job["run"]) / "recipe.yaml")
        try:
            found = by_trainer(recipe, job) if job["trainer"] else own_loop(recipe, job)
        except (KeyError, RuntimeError) as error:  # what DeepSpeed cannot load
            found = {"refused": f"{type(error).__name__}: {error}"}
        if processes.rank() == 0:
            Path(job["out"]).write_text(json.dumps(found))


if __name__ == "__main__":
    with ending.clean_exit():
        main(Path(sys.argv[1]))
