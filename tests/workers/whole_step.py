"""One optimizer step of our engine, next to that of `transformers` and torch's AdamW; writes the distances.

    whole_step.py OUT.json CASES.json      cases: family, ds_config, precision, settings

In fp32 a step takes real samples, of a BERT cut so that they predict unequal numbers of tokens. In bf16 it
takes one text 1 + `LIGHT` times; after the first with so little weight that a sum in bf16 would not move.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

from cases import write_found

from launch.console import terminal
from launch.machine import description
from launch.ranks import processes

terminal.quiet_libraries()
MACHINE = description.detect_machine()

import torch  # noqa: E402  (after the accelerator is chosen)
import torch.distributed as dist  # noqa: E402
from full_state import full_state  # noqa: E402

from data.corpus import build  # noqa: E402
from ds_configs.resolver import resolve  # noqa: E402
from launch.checkpoints.engine_state import EngineState  # noqa: E402
from launch.experiments.groups import temporary_groups  # noqa: E402
from launch.records.facts import RunFacts  # noqa: E402
from launch.training import engine as training  # noqa: E402
from launch.training.job import Job  # noqa: E402
from launch.training.micro_batches import training_batches  # noqa: E402
from modeling.families import conversion_of  # noqa: E402
from modeling.parallel.process_grid import ProcessGrid  # noqa: E402
from recipes import catalog  # noqa: E402

COMMON = [
    "model.layers=2", "model.hidden=32", "model.heads=2", "model.positions=40", "sequence_length=32",
    "dropout={hidden: 0, attention: 0}", "optimizer.clip=0.25", "optimizer.weight_decay=0.1",
    "optimizer.lr=0.01", "optimizer.eps=0.001", "optimizer.betas=[0.9, 0.95]", "schedule.warmup_steps=0",
]  # fmt: skip
LIGHT, WEIGHT = 24, 1 / 600  # less than half of the last of bf16's 8 bits


def perturbed(recipe) -> torch.nn.Module:
    """A model of `transformers` with nothing at its initial value, so that every part has a gradient."""
    torch.manual_seed(3)
    conversion = conversion_of(recipe.model)
    theirs = conversion.model_class(recipe.model)(conversion.config(recipe.model, recipe.positions))
    theirs.get_input_embeddings().padding_idx = None  # a random word of masking may be [PAD], and learns
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return theirs.train()


def light_batches(recipe) -> list[dict[str, torch.Tensor]]:
    draws = torch.Generator().manual_seed(processes.rank())
    text = torch.randint(0, recipe.model.vocab_size, (1, recipe.sequence_length + 1), generator=draws)
    even = torch.full((1, recipe.sequence_length), (1 + LIGHT) / recipe.sequence_length)
    batch = {"tokens": text[:, :-1], "labels": text[:, 1:]}
    return [{**batch, "weights": even * weight} for weight in (1, *[WEIGHT] * LIGHT)]


def real_batches(plan, corpus, grid) -> list[dict[str, torch.Tensor]]:
    """The micro-batches of a run's first step; a BERT's first samples end early, in each at another place."""
    batches = next(training_batches(plan, corpus, grid, None))
    for number, batch in enumerate(batches):
        if "lengths" in batch:
            batch["lengths"][0] = length = 13 + 6 * number
            batch["tokens"][0, length:] = 0
            batch["weights"][0][batch["positions"][0] >= length] = 0
            batch["positions"][0][batch["positions"][0] >= length] = 0
    return batches


def their_loss(theirs, batches: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The loss of a global batch in one pass; `transformers` shifts, masks and averages it."""
    batch = {name: torch.cat([each[name] for each in batches]) for name in batches[0]}
    tokens = batch["tokens"]
    if "lengths" not in batch:
        ids = torch.cat([tokens, batch["labels"][:, -1:]], 1)
        return {"loss": theirs(input_ids=ids, labels=ids).loss}
    labels = torch.full_like(tokens, -100)
    for row, used in enumerate(batch["weights"] > 0):
        labels[row, batch["positions"][row, used]] = batch["labels"][row, used]
    counts = {int(each["weights"].sum()) for each in batches}
    assert len(counts) > 1, "micro-batches have to predict unequal numbers"
    real = torch.arange(tokens.shape[1]) < batch["lengths"][:, None]
    given = {"input_ids": tokens, "token_type_ids": batch["token_types"], "attention_mask": real.long()}
    done = theirs(**given, labels=labels, next_sentence_label=batch["sentence_labels"])
    sentence = torch.nn.functional.cross_entropy(done.seq_relationship_logits, batch["sentence_labels"])
    return {"loss": done.loss, "mlm_loss": done.loss - sentence, "sentence_loss": sentence}


def their_step(theirs, recipe, loss: torch.Tensor) -> tuple[float, torch.optim.AdamW]:
    wanted = recipe.optimizer
    decayed = [parameter for parameter in theirs.parameters() if parameter.dim() > 1]
    plain = [parameter for parameter in theirs.parameters() if parameter.dim() < 2]
    groups = [
        {"params": decayed, "weight_decay": wanted.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=wanted.lr, betas=wanted.betas, eps=wanted.eps)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), wanted.clip)
    adam.step()
    return float(norm), adam


def apart(ours: dict[tuple[str, str], torch.Tensor], kind: str, theirs, values, recipe) -> dict[str, float]:
    """Distance of every tensor of a kind from theirs, next to the length of theirs."""
    named = {name: values(parameter).detach() for name, parameter in theirs.named_parameters()}
    expected = conversion_of(recipe.model).to_canonical(named, recipe.model)
    assert {(kind, name) for name in expected} == {key for key in ours if key[0] == kind}
    found = {}
    for name in expected:
        right = expected[name].flatten()
        mine = ours[kind, name].flatten()[: right.numel()]
        found[name] = float((mine - right).norm() / (right.norm() + 1e-12))
    return found


def compare(case: dict, out: Path) -> dict:
    """Distances between both steps: losses, the norm, each tensor of gradients, squares and weights."""
    named = "default/sotu" if case["family"] == "gpt2" else "bert/sotu"
    half, world = case["precision"] == "bf16", processes.world_size()
    accumulation, micro = (1 + LIGHT, 1) if half else (3, 2)
    batch = {"global": accumulation * micro * world, "micro": micro, "accumulation": accumulation}
    settings = [*COMMON, *case["settings"], f"precision={case['precision']}", f"batch={json.dumps(batch)}"]
    recipe = catalog.load(named, settings, tiny=True)
    plan = resolve(recipe, case["ds_config"], world, MACHINE)
    grid, theirs = ProcessGrid(1, 1, world), perturbed(recipe)
    if half:
        theirs.bfloat16().float()
    weights = conversion_of(recipe.model).to_canonical(theirs.state_dict(), recipe.model)
    given = SimpleNamespace(read=lambda recipe: weights)
    with temporary_groups():
        corpus = build(recipe, say=lambda text: None)
        batches = light_batches(recipe) if half else real_batches(plan, corpus, grid)
        kept = [dict(each) for each in batches]
        engine = training.build_engine(
            Job(RunFacts(plan, "step"), out.parent, initial_weights=given), grid, print
        )
        with training.release_at_end(engine):
            read_outcome = training.train_step(engine, batches, grid, [None] * len(batches))
            outcome, ours = read_outcome(), full_state(EngineState(engine, grid))
    of_ranks: list = [None] * world
    dist.all_gather_object(of_ranks, kept)
    if half:
        losses = their_loss(theirs, [own[0] for own in of_ranks])
        losses["loss"] = losses["loss"] * (1 + LIGHT * WEIGHT)
    else:
        losses = their_loss(theirs, [each for own in of_ranks for each in own])
    norm, adam = their_step(theirs, recipe, losses["loss"])
    assert norm > 2 * recipe.optimizer.clip, "clipping has to change the step"
    mine = {"loss": outcome.loss, **outcome.parts}
    return {
        "losses": {name: abs(mine[name] / float(value) - 1) for name, value in losses.items()},
        "norm": abs(outcome.grad_norm / norm - 1),
        # After one step these are the clipped gradient and its square, times 1 - beta.
        "gradients": apart(ours, "exp_avg", theirs, lambda p: adam.state[p]["exp_avg"], recipe),
        "squares": apart(ours, "exp_avg_sq", theirs, lambda p: adam.state[p]["exp_avg_sq"], recipe),
        "weights": apart(ours, "weight", theirs, lambda p: p, recipe),
    }


if __name__ == "__main__":
    write_found(compare)
