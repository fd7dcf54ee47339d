"""Flips single bits of a training's numbers, one at a time, and writes which of them the watch finds.

    bit_flips.py OUT.json CASES.json      cases: name, ds_config, flips, moments, seed, and of the
                                          recipe precision, parallel.tp, parallel.pp, parallel.dp

Each flip hits a random bit of a random kind of numbers on a random rank, in a random step, at one of the
moments; afterwards state and watch are put back. OUT.json has a list for each case.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace

from launch.console import terminal
from launch.machine import description
from launch.ranks import ending, processes

terminal.quiet_libraries()
MACHINE = description.detect_machine(emulated_fp16=True)

import torch  # noqa: E402  (after the accelerator is chosen)

from data.corpus import build  # noqa: E402
from ds_configs.resolver import resolve  # noqa: E402
from launch.checkpoints.engine_state import EngineState  # noqa: E402
from launch.experiments.groups import temporary_groups  # noqa: E402
from launch.records.facts import RunFacts, StepRecord  # noqa: E402
from launch.training.early_ends import Corrupted, Diverged  # noqa: E402
from launch.training.engine import build_engine, release_at_end, train_step  # noqa: E402
from launch.training.job import Job  # noqa: E402
from launch.training.micro_batches import dropout_seeds_of_step, training_batches  # noqa: E402
from launch.training.number_watch import NumberWatch  # noqa: E402
from modeling.initialization import canonical_name  # noqa: E402
from modeling.parallel.process_grid import ProcessGrid  # noqa: E402
from recipes import catalog  # noqa: E402

EVERY = 2  # steps from one check to the next
BEFORE = 2  # steps of a training before its numbers are flipped
WIDTHS = {"tokens": 8, "labels": 8}  # lowest bits of the batch that leave an index in the vocabulary


class Trials:
    """One training whose numbers are flipped again and again."""

    def __init__(self, case: dict, out: Path) -> None:
        settings = [
            "model.layers=2", "model.hidden=32", "model.heads=2", "sequence_length=16", "batch.global=4",
            f"run.check_every={EVERY}", "run.save_every=0", "run.save_last=false", "steps=1000000",
            *(f"{key}={case[key]}" for key in ("precision", "parallel.tp", "parallel.pp", "parallel.dp")),
        ]  # fmt: skip
        recipe = catalog.load(catalog.DEFAULT_RECIPE, settings, tiny=True)
        self.plan = resolve(recipe, case["ds_config"], processes.world_size(), MACHINE)
        self.grid = ProcessGrid(self.plan.layout.tp, self.plan.layout.pp, self.plan.layout.dp)
        self.engine = build_engine(Job(RunFacts(self.plan, "flips"), out), self.grid, print)
        corpus = build(recipe, say=print)
        self.batches = training_batches(self.plan, corpus, self.grid, None)
        self.state = EngineState(self.engine, self.grid)
        self.take_step = self.engine._take_model_step
        self.step = 0
        self.flip_at = "never", (lambda: None)
        self.engine.module.register_forward_hook(lambda *_: self.reach("after the forward pass"))
        optimizer = self.engine.basic_optimizer
        inner = optimizer.step

        def within(*how: object, **more: object) -> object:
            self.reach("within the update")
            return inner(*how, **more)

        optimizer.step = within
        self.watch_anew()
        for _ in range(BEFORE):
            self.make_step()

    def watch_anew(self) -> None:
        self.engine._take_model_step = self.take_step
        self.checked = self.step
        run = SimpleNamespace(
            state=self.state, batches=self.batches, grid=self.grid, recipe=self.plan.recipe, done=self.step,
            recorder=SimpleNamespace(say=print),
        )  # fmt: skip
        self.watch = NumberWatch(run)
        before = self.engine._take_model_step

        def take_step(*how: object) -> None:
            self.reach("before the update")
            before(*how)

        self.engine._take_model_step = take_step

    def reach(self, moment: str) -> None:
        """Flip the bit, if this is its moment."""
        wanted, flip = self.flip_at
        if wanted == moment:
            self.flip_at = "never", flip
            flip()

    def make_step(self) -> None:
        self.step += 1
        batches = next(self.batches)
        dropout_seeds = dropout_seeds_of_step(self.plan, self.grid.at.dp, self.step, self.engine.device)
        self.reach("before the forward pass")
        read = train_step(self.engine, batches, self.grid, dropout_seeds)
        self.reach("after the update")
        try:
            read()
        except Diverged:  # then a run checks at once
            self.watch.check(self.step, again=True)
            self.checked = self.step
        self.watch.after_step(StepRecord(self.step, 1.0, False))
        if self.step % EVERY == 0:
            self.checked = self.step

    def tensors(self) -> dict[str, list]:
        """This rank's (kind, tensor, names by element); "batch" is made anew in every step."""
        found: dict[str, list] = {}
        for buffer in self.state.buffers():
            if buffer.copied != "tp":
                found.setdefault(buffer.kind, []).append(buffer)
        return found

    def trial(self, draws: random.Random, moments: list[str]) -> dict:
        """Flip one bit in one of the next steps; tell whether it is found, when, and named rightly."""
        kinds = sorted({*self.tensors(), "batch"})
        kind, moment = draws.choice(kinds), draws.choice(moments)
        rank, place, bit = draws.randrange(processes.world_size()), draws.random(), draws.random()
        if kind == "batch" and moment not in ("before the forward pass", "after the forward pass"):
            moment = "before the forward pass"
        for _ in range(draws.randrange(EVERY)):
            self.make_step()
        held = [tensor.detach() for buffer in self.state.buffers() for tensor in buffer.tensors]
        kept = [(tensor, tensor.clone()) for tensor in held]
        hit: list[str] = []

        def flip() -> None:
            if processes.rank() == rank:
                hit.append(self.flip(kind, place, bit, draws))

        self.flip_at = moment, flip
        flipped, found, named, sound = self.step + 1, None, False, True
        try:
            for _ in range(EVERY + 1):
                self.make_step()
        except Corrupted as end:
            found = self.step
            sound = end.sound == self.checked
            first = end.found[0]
            own = not hit or first.kind == "batch" or hit[0] in first.tensors
            named = first.kind == kind and own and (first.among_copies or first.rank == rank)
        named = all(processes.gathered(named, self.grid.control_group))
        self.flip_at = "never", flip
        for tensor, numbers in kept:
            tensor.copy_(numbers)
        self.watch_anew()
        late = found is not None and found - flipped > EVERY
        found = {"found": found is not None, "late": late, "named": named, "sound": sound}
        return {"kind": kind, "moment": moment, **found}

    def flip(self, kind: str, place: float, bit: float, draws: random.Random) -> str:
        """Flip a bit of this rank's numbers of a kind; return the tensor's name."""
        if kind == "batch":
            micro = self.batches.last[0]
            name = [*micro][int(place * len(micro))]
            tensor, bits = micro[name], 8 * micro[name].element_size()
            width = bits if self.flip_at[0] == "after the forward pass" else WIDTHS.get(name, bits)
            element, number = int(place * 997) % tensor.numel(), int(bit * width)
        else:
            buffers = [each for each in self.tensors()[kind] if all(t.numel() for t in each.tensors)]
            buffer = buffers[int(place * len(buffers))]
            fragment = buffer.fragments[int(place * 7919) % len(buffer.fragments)]
            name = canonical_name(fragment.parameter)
            at = fragment.offset + int(place * 104729 % 1 * fragment.elements)
            for tensor in buffer.tensors:
                if at < tensor.numel():
                    break
                at -= tensor.numel()
            tensor, element = tensor.detach(), at
            number = int(bit * 8 * tensor.element_size())
        octets = tensor.view(-1).view(torch.uint8).numpy()  # behind autograd's back
        octets[element * tensor.element_size() + number // 8] ^= 1 << number % 8
        return name


def run(case: dict, out: Path) -> list[dict]:
    draws = random.Random(case["seed"])
    with temporary_groups():
        trials = Trials(case, out.parent)
        with release_at_end(trials.engine):
            found = [trials.trial(draws, case["moments"]) for _ in range(case["flips"])]
            trials.batches.close()
    return found


if __name__ == "__main__":
    with ending.clean_exit():
        processes.start_processes()
        cases = json.loads(Path(sys.argv[2]).read_text())
        outcome = {case["name"]: run(case, Path(sys.argv[1])) for case in cases}
        if processes.rank() == 0:
            Path(sys.argv[1]).write_text(json.dumps(outcome))
