"""Branches: runs that go on from another run's checkpoint under a changed recipe."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.checkpoints import inspection, reading, run_checkpoints
from launch.records.recorded_run import RecordedRun
from modeling.parallel.process_grid import ProcessGrid
from recipes import files
from recipes.consistency import schedule_problems
from recipes.families import TRAINED
from recipes.key_paths import BRANCHED, DECISIVE, OTHER_TEXT, READ_ANEW, changes, key_of
from recipes.problems import Problem, ProblemsError, RecipeError
from recipes.schema import Branch, Change, Recipe, Tokenizer

FLAG = "--branch"
KEPT = "a branch keeps the model, its vocabulary and the kind of its optimizer"


@dataclass(frozen=True)
class BranchPoint:
    """A checkpoint of a run, from which a branch goes on."""

    run: RecordedRun
    step: int

    @classmethod
    def of(cls, given: str) -> BranchPoint:
        """Find the checkpoint of RUN or RUN@STEP; without a step, the newest. Raises ProblemsError."""
        path, step = split(given)
        run = RecordedRun.read(path, FLAG)
        found, damaged = run_checkpoints.newest_whole(path, step)
        if damaged:
            files.refuse(
                damaged[0].directory,
                "is damaged",
                damaged[0].why,
                f"{FLAG} {path}@{found.step} goes on from the one before",
            )
        other = inspection.other_recipe(found.manifest, run.recipe)
        if other:
            files.refuse(found.directory, other, fix="restore it")
        return cls(run, found.step)

    def recipe(
        self, overrides: Sequence[str], settings: Mapping[str, Any], steps: int | None
    ) -> Recipe:
        """Return the recipe of a branch: the run's, `settings` and `overrides` over it, and its `branch`.

        Where `overrides` give a cool-down and not its end, that is the last step. Raises ProblemsError with
        every problem.
        """
        there = self.run.recipe
        said = {*map(key_of, overrides)}
        if said & {"schedule", "schedule.wsd_decay_steps"}:
            settings = {**settings, "schedule.decay_steps": None}
            if steps:
                overrides = [*overrides, f"steps={steps}"]
        kept = there.data.tokenizer
        other_text = any(key in OTHER_TEXT for key in {*settings, *said})
        if kept.kind in TRAINED and other_text:
            # other text trains another
            kept = Tokenizer(kind="file", path=str(self.run.path / "tokenizer"))
        there = with_tokenizer(there, kept)
        settings = {**settings, "data.tokenizer": kept.model_dump()}
        now, wrong = self._changed(overrides, settings, steps)
        problems = [*wrong]
        if now is None:
            sound = [text for text in overrides if self._changed([text], settings)[0]]
            now = self._changed(sound, settings, steps)[0] or there
        # where data is set as a whole
        if not any("tokenizer" in text for text in overrides):
            now = with_tokenizer(now, kept)
        allowed = changes(there, now, BRANCHED, stated=True)
        read = there.sizes.samples(self.step)
        data_from = there.branch.data_from if there.branch else 0
        more = there.branch.more_updates if there.branch else 0
        if changes(there, now, READ_ANEW):
            data_from = read
        problems += self._misfits(there, now, anew=data_from == read)
        changed = tuple(
            Change(key=key, was=was, now=is_now) for key, was, is_now in allowed
        )
        branch = Branch(
            run=str(self.run.path),
            step=self.step,
            changed=changed,
            stretches=there.sizes.until(self.step),
            data_from=data_from,
            more_updates=more,
        )
        now = now.model_copy(update={"branch": branch})
        where = f"{FLAG} {self.run.path}@{self.step}"
        if not wrong or now.steps <= self.step:
            problems += schedule_problems(now, where, cut=steps is not None)
        if problems:
            raise ProblemsError(problems)
        return now

    def _changed(
        self,
        overrides: Sequence[str],
        settings: Mapping[str, Any],
        steps: int | None = None,
    ) -> tuple[Recipe | None, tuple[Problem, ...]]:
        """Return the run's recipe with changes, or None and all that is wrong with them."""
        named = self.run.named
        try:
            return named.changed(overrides, False, steps, settings, trained=False), ()
        except RecipeError as error:
            return None, error.problems

    def _misfits(self, there: Recipe, now: Recipe, anew: bool) -> Iterator[Problem]:
        """Yield a problem for each changed key that a branch keeps, and for sizes that do not fit."""
        for key, was, is_now in changes(there, now, DECISIVE, stated=True):
            if key not in BRANCHED:
                where = f"{FLAG} {self.run.path}"
                yield Problem(
                    key,
                    f"{key}={is_now}, and the run has {was}",
                    KEPT,
                    "leave it out",
                    where,
                )
        where = f"{FLAG} {self.run.path}@{self.step}"
        key = "model.positions"
        if now.positions < there.positions:
            left = f"{now.positions} of {there.positions} positions"
            yield Problem(
                key,
                f"sequence_length={now.sequence_length} leaves {left}",
                "a branch keeps them, or has more",
                f"add --set {key}={there.positions}",
                where,
            )
        of_theirs = now.model.implementation == "transformers"
        if now.positions > there.positions and of_theirs:
            yield Problem(
                key,
                f"{now.positions} positions, and the run has {there.positions}",
                "transformers' own table keeps its size",
                "add --set model.implementation=megarecipes",
                where,
            )
        streamed = any(origin.streamed for origin in now.data.origins)
        if streamed and not anew and now.batch.global_ != there.batch.global_:
            yield Problem(
                "batch.global",
                f"batch.global={now.batch.global_}, and the run has {there.batch.global_}",
                "a stream is shared out by it",
                f"leave it out, or read the stream from its beginning with --set seed={there.seed + 1}",
                where,
            )


def split(given: str, flag: str = FLAG) -> tuple[Path, int | None]:
    """Return the absolute directory and the step of RUN or RUN@STEP, which `flag` gives.

    A step of None: no step is given.
    """
    named = re.fullmatch(r"(.+)@([0-9]{1,9})", given, re.DOTALL)
    if named is None or os.path.isdir(given):
        return absolute(given, flag), None
    return absolute(named[1], flag), int(named[2])


def absolute(path: str, flag: str = FLAG) -> Path:
    return Path(os.path.abspath(files.path_of(path, flag)))


def with_tokenizer(recipe: Recipe, tokenizer: Tokenizer) -> Recipe:
    data = recipe.data.model_copy(update={"tokenizer": tokenizer})
    return recipe.model_copy(update={"data": data})


def choose(
    recipe: Recipe, grid: ProcessGrid, corpus: str
) -> run_checkpoints.CheckpointChoice:
    """Choose the checkpoint that a branch goes on from, if its files are sound. Collective.

    `corpus`: checksum of the training tokens. Raises ValueError on every rank: it is damaged, or was trained
    on other tokens than those that are to go on.
    """
    branch = recipe.branch
    assert branch is not None
    directory = run_checkpoints.directory_of(
        Path(branch.run) / "checkpoints", branch.step
    )
    own = run_checkpoints.read(directory) if grid.rank == 0 else None
    found = reading.inspect(own, grid)
    assert found is not None
    if isinstance(found, run_checkpoints.DamagedCheckpoint):
        came = f"{directory}, which the branch goes on from, is damaged: {found.why}"
        raise ValueError(f"{FLAG}: {came}; restore it")
    trained_on = found.manifest.corpus
    goes_on = recipe.sizes_in_data.samples(branch.step)
    if goes_on and trained_on != corpus:
        raise ValueError(
            f"{FLAG}: {directory} was trained on tokens with CRC-32 {trained_on}, and the recipe's data now "
            f"have {corpus}: restore its files, or read other text with --text or --set data.name"
        )
    return run_checkpoints.CheckpointChoice(found)
