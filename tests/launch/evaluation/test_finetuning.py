"""Fine-tuning: one process' losses and predictions under every layout, and the losses of transformers."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest
import torch
import transformers
from launching import WORKERS, run_ranks
from numpy.testing import assert_allclose
from tasked import choices, questions, save_bert, sentences, write_lines

from data.loader import StepBatches
from data.tasks.corpus import build
from ds_configs.plan import HOST, Machine
from launch.evaluation.finetuning_recipe import Wishes, recipe_of
from launch.evaluation.pretrained import encoder_in
from launch.training.engine import parameter_groups
from launch.training.schedule import learning_rate
from launch.weights.initial_weights import InitialWeights
from recipes.layout import Layout

MACHINE = Machine(HOST, fp16=False, bf16=True, compiler=True, libaio=False)
NO_DROPOUT = ["dropout.hidden=0", "dropout.attention=0"]
STEPS = 6
ONE = "one process"
SHORT = {"squad1": ["task.doc_stride=8", "task.max_query=6"]}
LAYOUTS = {
    "tp2": ("zero1", ["parallel.tp=2"]),
    "sequence tp2": ("zero1", ["parallel.tp=2", "parallel.sequence=true"]),
    "pp2": ("pipeline", ["parallel.pp=2"]),
    "dp2": ("zero0", []),
    "zero3": ("zero3", []),
    "zero2 offload": ("zero2_offload", []),
    "zero3 offload": ("zero3_offload", []),
}
BF16 = "bf16"  # on one process: another precision, not another layout
HEADS = {"rte": 0.1, "sst2": 0.0, "squad1": 0.1, "race": 0.1}  # task: hidden dropout
RECORDS = {
    "rte": partial(sentences, two=True), "sst2": sentences, "squad1": questions, "race": choices,
}  # fmt: skip

COMPARED = [
    *(("rte", name) for name in LAYOUTS),
    *((task, name) for task in ("squad1", "race") for name in ("tp2", "pp2")),
]


def case(folder, task, name, ds_config, settings):
    dropout = [f"dropout.hidden={HEADS[task]}", "dropout.attention=0"]
    files = {split: str(folder / f"{task}-{split}.jsonl") for split in ("train", "dev")}
    return dict(
        name=f"{task}-{name}", task=task, init=str(folder / "bert"), files=files,
        settings=[*settings, *dropout, *SHORT.get(task, [])], ds_config=ds_config, steps=STEPS,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A BERT, and the files of two tasks; 21 examples fill no batch."""
    folder = tmp_path_factory.mktemp("finetuning")
    save_bert(folder / "bert")
    for task in HEADS:
        write_lines(folder / f"{task}-train.jsonl", RECORDS[task](40))
        write_lines(folder / f"{task}-dev.jsonl", RECORDS[task](21, seed=1))
    return folder


@pytest.fixture(scope="module")
def trained(folder):
    """The directory of every case's report and predictions."""
    one = [*((task, ONE) for task in HEADS), ("rte", BF16)]
    layouts = {**LAYOUTS, ONE: ("zero1", []), BF16: ("bf16", [])}
    for ranks, chosen in ((1, one), (2, COMPARED)):
        cases = [case(folder, task, name, *layouts[name]) for task, name in chosen]
        (folder / f"{ranks}.json").write_text(json.dumps(cases))
        done = run_ranks(ranks, WORKERS / "finetuning.py", folder, folder / f"{ranks}.json", timeout=280)
        assert done.returncode == 0, done.stdout[-5000:]
    return folder


def reported(trained, task, name):
    directory = trained / f"{task}-{name}"
    logits = np.load(directory / "predictions" / "dev" / "logits.npy")
    return json.loads((directory / "reported.json").read_text()), logits


@pytest.mark.long
@pytest.mark.parametrize(("task", "name"), COMPARED)
def test_layouts_agree(trained, task, name):
    (report, logits), (reference, expected) = (reported(trained, task, each) for each in (name, ONE))
    assert_allclose(report["losses"], reference["losses"], rtol=2e-5)
    assert_allclose(report["validations"], reference["validations"], rtol=2e-5)
    assert_allclose(logits, expected, atol=1e-4)
    assert report["scores"] == reference["scores"]


@pytest.mark.long
def test_bf16_agrees_to_its_rounding(trained):
    (report, logits), (reference, expected) = (reported(trained, "rte", each) for each in (BF16, ONE))
    assert report["losses"] != reference["losses"]
    assert_allclose(report["losses"], reference["losses"], rtol=2e-2)
    assert_allclose(report["validations"][-1][0], reference["validations"][-1][0], rtol=2e-2)
    assert_allclose(logits, expected, atol=5e-2)


@pytest.mark.long
def test_predictions_are_a_table_in_the_order_of_the_examples(trained):
    """Their accuracy is that of the validation, which is a mean over micro-batches."""
    report, logits = reported(trained, "rte", ONE)
    lines = (trained / f"rte-{ONE}" / "predictions" / "dev" / "RTE.tsv").read_text().splitlines()
    assert lines[0] == "index\tprediction" and len(lines) == 22
    names = ["entailment", "not_entailment"]
    assert lines[1:] == [f"{index}\t{names[guess]}" for index, guess in enumerate(logits.argmax(-1))]
    labels = [record["label"] for record in sentences(21, seed=1, two=True)]
    accuracy = float(np.mean([names.index(line.split("\t")[1]) for line in lines[1:]] == np.array(labels)))
    assert report["scores"]["dev"]["accuracy"] == pytest.approx(accuracy)
    assert report["validations"][-1][1] == pytest.approx(accuracy, abs=1e-6)


@pytest.mark.long
def test_losses_are_those_of_transformers_step_by_step(trained):
    """The same weights, batches, AdamW and schedule around BertForSequenceClassification, without dropout."""
    files = {split: str(trained / f"sst2-{split}.jsonl") for split in ("train", "dev")}
    wishes = Wishes("sst2", files, settings=NO_DROPOUT, batch=8, lr=1e-3, sequence_length=32)
    init = trained / "bert"
    given = InitialWeights(str(init))
    of = (wishes, *encoder_in(given), MACHINE)
    corpus = build(recipe_of(*of), say=lambda text: None)
    recipe = recipe_of(*of, examples=len(corpus.train))
    assert (recipe.sequence_length, recipe.positions) == (32, 64), "all positions are kept"
    model = transformers.BertForSequenceClassification.from_pretrained(init, num_labels=2).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    draw_as_ours(model, recipe)
    optimizer = torch.optim.AdamW(
        parameter_groups(model, recipe.optimizer.weight_decay),
        betas=recipe.optimizer.betas,
        eps=recipe.optimizer.eps,
    )
    batches = StepBatches(corpus.train, recipe.seed, Layout(1, 1, 1, 8, 1, 8), 0)
    losses = []
    for step in range(STEPS):
        (batch,) = next(batches)
        mask = (torch.arange(32) < batch["lengths"][:, None]).long()
        loss = model(batch["tokens"], mask, batch["token_types"], labels=batch["labels"]).loss
        losses.append(loss.item())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.optimizer.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, step)
        optimizer.step()
        optimizer.zero_grad()
    report, _ = reported(trained, "sst2", ONE)
    assert_allclose(report["losses"], losses, rtol=1e-5)
    assert len(set(losses)) == STEPS


def draw_as_ours(model, recipe):
    """The classifier, which the weights lack: drawn from the seed and its name."""
    from modeling.initialization import Init

    init = Init(recipe.seed, recipe.init_std, recipe.model.layers).child("head").child("classifier")
    with torch.no_grad():
        model.classifier.weight.copy_(init.normal("weight", tuple(model.classifier.weight.shape), init.std))
        model.classifier.bias.zero_()
