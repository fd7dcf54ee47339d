"""A validation on an engine that is not there."""

from types import SimpleNamespace

import pytest
import torch
from random_batch import random_batch

from launch.training.engine import validate
from recipes.families import GPT2


def test_a_validation_drops_nothing_and_leaves_the_engine_training():
    dropout = torch.nn.Dropout(0.5)
    module = SimpleNamespace(loss_parts=())
    engine = SimpleNamespace(eval=dropout.eval, train=dropout.train, device="cpu", module=module)
    batches = [random_batch(GPT2.fields, samples=2, length=8, predictions=1, vocabulary=9) for _ in range(4)]

    def forward(engine, batch):
        return (dropout(batch["weights"]).sum(),)

    found = validate(engine, [batches[:2], batches[2:]], SimpleNamespace(dp=1), forward)
    assert found.loss == pytest.approx(1.0) and found.parts == {} and dropout.training
