"""Steps of our engine with Muon, next to a plain loop with torch.optim.Muon and AdamW in one process.

    muon.py OUT.json CASES.json      cases: ds_config, tp, settings, at_once

Writes of each case the distances of losses, norms, weights and momenta after `STEPS` steps.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

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
from launch.checkpoints.manifest import MOMENTS, WEIGHT  # noqa: E402
from launch.experiments.groups import temporary_groups  # noqa: E402
from launch.planning.prediction import workload  # noqa: E402
from launch.records.facts import RunFacts  # noqa: E402
from launch.training import engine as training  # noqa: E402
from launch.training.job import Job  # noqa: E402
from launch.training.micro_batches import (  # noqa: E402
    for_plain,
    normalise,
    training_batches,  # noqa: E402
)
from modeling import cost  # noqa: E402
from modeling.families import family_of, model_shape  # noqa: E402
from modeling.initialization import Init, canonical_name  # noqa: E402
from modeling.parallel.process_grid import ProcessGrid  # noqa: E402
from recipes import catalog  # noqa: E402

STEPS = 3
SETTINGS = [
    "optimizer={name: muon, lr: 0.02, adam_lr: 0.004, momentum: 0.9, betas: [0.8, 0.9], eps: 1.0e-4, "
    "weight_decay: 0.1, clip: 0.5}",
    "schedule={kind: constant}", "precision=fp32", "model.layers=2", "batch={global: 4, accumulation: 2}",
]  # fmt: skip


class Plain:
    """The model in one process, and the step that torch makes of it: the definition of what is right."""

    def __init__(self, recipe, padded_vocab: int):
        self.recipe = recipe
        init = Init(recipe.seed, recipe.init_std, recipe.model.layers)
        shape = model_shape(recipe, padded_vocab)
        self.model = family_of(recipe.model).plain(shape, group=None, init=init).train()
        wanted = recipe.optimizer
        names = [(canonical_name(each), each) for each in self.model.parameters()]
        inner = ("qkv.weight", "projection.weight", "expand.weight", "contract.weight")
        self.matrices = {n: p for n, p in names if n.startswith("layers.") and n.endswith(inner)}
        assert len(self.matrices) == 4 * recipe.model.layers
        others = [each for name, each in names if name not in self.matrices]
        groups = [
            {"params": [p for p in others if p.dim() > 1], "weight_decay": wanted.weight_decay},
            {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(groups, lr=wanted.adam_lr, betas=wanted.betas, eps=wanted.eps)
        # Queries, keys and values are three matrices, of all heads.
        self.parts = {}
        for name, matrix in self.matrices.items():
            parts = self.by_part(matrix) if name.endswith("qkv.weight") else [matrix.detach().clone()]
            self.parts[name] = [torch.nn.Parameter(part) for part in parts]
        self.muon = torch.optim.Muon(
            itertools.chain(*self.parts.values()),
            lr=wanted.lr,
            momentum=wanted.momentum,
            weight_decay=wanted.weight_decay,
            adjust_lr_fn=wanted.adjust_lr or "match_rms_adamw",
        )

    def by_part(self, qkv):
        heads, hidden = self.recipe.model.heads, self.recipe.model.hidden
        return [*qkv.detach().view(heads, 3, -1, hidden).transpose(0, 1).reshape(3, hidden, hidden).clone()]

    def whole(self, parts):
        if len(parts) == 1:
            return parts[0].detach()
        heads, hidden = self.recipe.model.heads, self.recipe.model.hidden
        return torch.stack([*parts]).detach().view(3, heads, -1, hidden).transpose(0, 1).reshape(-1, hidden)

    def step(self, batches) -> tuple[float, float]:
        """Return the loss and the norm of the gradient."""
        self.model.zero_grad()
        losses = []
        for batch in normalise(batches, SimpleNamespace(dp=1), "cpu"):
            given, named = for_plain(batch, "cpu")
            result = self.model(*given, **named)
            loss = result[0] if isinstance(result, tuple) else result
            (loss / len(batches)).backward()
            losses.append(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.optimizer.clip)
        assert norm > 2 * self.recipe.optimizer.clip, "clipping has to change the step"
        for name, matrix in self.matrices.items():
            grads = self.by_part(matrix.grad) if len(self.parts[name]) > 1 else [matrix.grad]
            for part, grad in zip(self.parts[name], grads, strict=True):
                part.grad = grad
        self.adam.step()
        # It orthogonalises in bf16 whatever the gradient is; a run in fp32 does so in fp32.
        with mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.float):
            self.muon.step()
        with torch.no_grad():
            for name, matrix in self.matrices.items():
                matrix.copy_(self.whole(self.parts[name]))
        return float(torch.stack(losses).mean()), float(norm)

    def state(self):
        found = {}
        for parameter in self.model.parameters():
            name = canonical_name(parameter)
            found[WEIGHT, name] = parameter.detach()
            if name in self.matrices:
                parts = [self.muon.state[part]["momentum_buffer"] for part in self.parts[name]]
                found[MOMENTS[0], name] = self.whole(parts)
            else:
                for kind in MOMENTS:
                    found[kind, name] = self.adam.state[parameter][kind]
        return found


def moment_bytes(engine) -> int:
    """The bytes of all moments on this rank."""
    found = 0
    for state in engine.basic_optimizer.state.values():
        found += sum(state[kind].nbytes for kind in MOMENTS if kind in state)
    return found


def planned_bytes(plan) -> float:
    """What the planner counts of them."""
    work = workload.of_plan(plan)
    widths = work.widths_of(0)
    share = work.parameters_of(0) / (work.layout.dp if work.zero_stage else 1)
    return widths.moments * widths.moment * share


def compare(case: dict, out: Path) -> dict:
    world = processes.world_size()
    tp = case.get("tp", 1)
    at_once = case.get("at_once", cost.MUON_AT_ONCE)
    settings = [*SETTINGS, f"parallel.tp={tp}", *case.get("settings", ())]
    recipe = catalog.load(case.get("recipe", catalog.DEFAULT_RECIPE), settings, tiny=True)
    plan = resolve(recipe, case["ds_config"], world, MACHINE)
    grid = ProcessGrid(tp, 1, plan.layout.dp)
    losses, norms = [], []
    with temporary_groups(), mock.patch.object(cost, "MUON_AT_ONCE", at_once):
        corpus = build(recipe, say=lambda text: None)
        plain = Plain(recipe, recipe.model.embedding_rows(1))
        engine = training.build_engine(Job(RunFacts(plan, "muon"), out.parent), grid, print)
        given = training_batches(plan, corpus, grid, None)
        with training.release_at_end(engine):
            for _ in range(STEPS):
                batches = next(given)
                of_ranks: list = [None] * world
                dist.all_gather_object(of_ranks, [dict(each) for each in batches])
                outcome = training.train_step(engine, batches, grid, [None] * len(batches))()
                loss, norm = plain.step([*itertools.chain(*of_ranks[::tp])])
                losses.append(abs(outcome.loss - loss))
                norms.append(abs(outcome.grad_norm / norm - 1))
            ours, theirs = full_state(EngineState(engine, grid)), plain.state()
            held = moment_bytes(engine)
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    far = {kind: {} for kind, _ in theirs}
    for (kind, name), right in theirs.items():
        right = right[: len(ours[kind, name])]
        far[kind][name] = float((ours[kind, name] - right).norm() / (right.norm() + 1e-12))
    bytes_ = {"held": held, "planned": planned_bytes(plan)}
    return {"losses": max(losses), "norms": max(norms), "moments": bytes_, **far}


if __name__ == "__main__":
    write_found(compare)
