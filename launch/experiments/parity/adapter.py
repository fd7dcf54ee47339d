"""Our own recipes, proven: the loop is launch/training/loop.py's, and a callback compares its steps.

launch/compare_layouts.py starts it. `proof.given` is JSON: the recipe's file, and a LayoutCase.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor

from data.corpus import build
from launch.checkpoints.names import MOMENTS, WEIGHT, Kind
from launch.checkpoints.stored import TensorPlacement
from launch.experiments.parity.layout_cases import RUN, LayoutCase, case_plan
from launch.experiments.proving.proof import Proof
from launch.experiments.proving.reading import Reading, Tensors
from launch.machine import description
from launch.ranks.processes import TIMEOUT
from launch.records import vocabulary
from launch.records.admission import admit
from launch.records.directory import RunDirectory
from launch.records.facts import Ending, Entropies, RunFacts, SilentRecorder, StepRecord
from launch.records.metrics import read_metrics
from launch.records.recorder import Recorder
from launch.training import loop
from launch.training.job import Job
from launch.training.run import Start, TrainingRun
from modeling.cost.parameter_count import is_hidden_matrix
from modeling.initialization import canonical_name
from modeling.parallel.process_grid import ProcessGrid
from recipes import catalog
from recipes.schema import Recipe

AFTER_LAYERS = ("final_norm", "head", "decoder_bias")


class OwnReading(Reading):
    """Reads an engine's state as checkpoints hold it: by pieces, each number on one rank."""

    def __init__(self, run: TrainingRun) -> None:
        super().__init__({})
        self._run = run
        # by name: the slice in which a piece lies, its first element there, and how many it has
        self._pieces = dict[str, tuple[TensorPlacement, int, int]]()

    def weights(self) -> Tensors:
        return self._read((WEIGHT,))[WEIGHT]

    def moments(self) -> dict[str, Tensors]:
        self._moments = self._read(MOMENTS)
        return self._moments

    def shares(self, moment: str, name: str) -> tuple[float, float]:
        optimizer = self._run.recipe.optimizer
        kept = optimizer.betas[0]
        dims = len(self._pieces[name][0].shape)
        if optimizer.name == "muon" and is_hidden_matrix(name, dims):
            kept = float(optimizer.of_muon["momentum"])
        return kept, 1 - kept

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's piece of a whole tensor."""
        place, first, count = self._pieces[name]
        if count == whole.numel():
            return whole
        return place.slice_of(whole).flatten()[first : first + count]

    def _read(self, kinds: tuple[Kind, ...]) -> dict[str, Tensors]:
        state = self._run.state
        read: dict[str, Tensors] = {}
        for kind in kinds:
            read[kind] = {}
        for partition in state.partitions:
            for fragment in state.owned(partition):
                place = TensorPlacement.of(fragment.parameter)
                # padding of the vocabulary stands at the end
                count = min(fragment.elements, _real(place) - fragment.first)
                if count < 1:
                    continue
                self._pieces[place.name] = place, fragment.first, count
                for kind in state.held(partition, kinds):
                    piece = state.read(partition, fragment, kind)[:count].clone()
                    if count == math.prod(place.shape):
                        piece = piece.view(place.shape)
                    read[kind][place.name] = piece
        state.close()
        order = [canonical_name(each) for each in self._run.engine.module.parameters()]
        order.sort(key=lambda name: name.startswith(AFTER_LAYERS))
        for of, tensors in read.items():
            read[of] = {name: tensors[name] for name in order if name in tensors}
        return read


def _real(place: TensorPlacement) -> int:
    """Count the elements of a slice without padding."""
    elements = math.prod(place.shape)
    if place.cut is None:
        return elements
    dim, start, length = place.cut
    entries = place.shape[dim]
    return elements // entries * max(0, min(length, entries - start))


class Comparison:
    """Compares each step of a run of ours."""

    def __init__(self, proof: Proof, run: TrainingRun) -> None:
        self._proof = proof
        reading = OwnReading(run)
        proof.round_weights(run.engine.module.parameters())
        proof.watch(run.engine, reading=reading, shard=reading.part)

    def after_step(self, record: StepRecord) -> None:
        self._proof.step(record.loss, record.grad_norm)

    def end(self, error: BaseException | None) -> None: ...


def train(proof: Proof) -> None:
    """Train a recipe under a layout."""
    given = json.loads(proof.given)
    proof.layout.asked.update(proof.layout.words)  # the case says it all
    recipe = catalog.load_resolved(Path(given["recipe"]))
    run = RunDirectory(proof.out / RUN)
    run_case(recipe, LayoutCase(**given["case"]), proof)
    if proof.rank == 0:
        for record in read_metrics(run.metrics_jsonl).validations:
            if record.loss is not None:
                proof.validation(record.step, record.loss)


def run_case(recipe: Recipe, case: LayoutCase, proof: Proof) -> None:
    """Train in a run directory below `proof.out`."""
    directory = proof.out / RUN
    directory.mkdir(exist_ok=True)
    plan = case_plan(recipe, case, description.detect_machine())
    facts = RunFacts(plan, case.name, original=recipe)
    compiled = case.compiled_from is not None
    callbacks = (partial(Comparison, proof),)
    job = Job(facts, directory, compiled=compiled, callbacks=callbacks)
    corpus = build(recipe, say=lambda text: None)
    recorder = SilentRecorder()
    if proof.rank == 0:
        entropies = Entropies(corpus.uniform_entropy, corpus.unigram_entropy)
        facts = replace(
            facts,
            machine=description.describe(),
            data=corpus.summary,
            entropies=entropies,
        )
        opened = admit(directory, facts, sys.argv)
        vocabulary.keep(opened.path, corpus.tokenizer)
        recorder = Recorder(opened, facts)
    with recorder:
        grid = ProcessGrid(case.tp, case.pp, case.dp, TIMEOUT)
        loop.train(Start(job, recorder, corpus, grid))
        recorder.finish(Ending())
