"""A fine-tuning of SST-2 by `transformers` alone, with this repository's settings: what ours is set next to.

python -m launch.evaluation.transformers_finetuning MODEL TRAIN DEV OUT.json EPOCHS BATCH LR LENGTH SEED
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

from data.durable_files import write_atomically
from launch.evaluation.finetuning_recipe import OPTIMIZER, WARMUP


def main() -> None:
    model, train, dev, out, epochs, batch, rate, length, seed = sys.argv[1:]
    began = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForSequenceClassification.from_pretrained(model, num_labels=2, dtype=torch.float32)
    splits: list[Any] = []  # lists, which serve as torch's data sets
    for path in (train, dev):
        rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
        encoded = tokenizer([row["sentence"] for row in rows], truncation=True, max_length=int(length))
        names = ("input_ids", "attention_mask", "token_type_ids")
        splits.append(
            [{**{n: encoded[n][i] for n in names}, "labels": row["label"]} for i, row in enumerate(rows)]
        )
    steps = math.ceil(float(epochs) * len(splits[0]) / int(batch))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=int(batch), learning_rate=float(rate),
            lr_scheduler_type="linear", warmup_steps=math.ceil(WARMUP * steps), seed=int(seed),
            adam_beta1=OPTIMIZER["betas"][0], adam_beta2=OPTIMIZER["betas"][1], adam_epsilon=OPTIMIZER["eps"],
            weight_decay=OPTIMIZER["weight_decay"], max_grad_norm=OPTIMIZER["clip"], report_to="none",
            save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        collator = DataCollatorWithPadding(tokenizer)
        trainer = Trainer(network, arguments, train_dataset=splits[0], data_collator=collator)
        trainer.train()
        predicted = trainer.predict(splits[1])
    right = np.argmax(predicted.predictions, -1) == predicted.label_ids
    found = {"right": right.tolist(), "seconds": time.perf_counter() - began}
    write_atomically(Path(out), json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
