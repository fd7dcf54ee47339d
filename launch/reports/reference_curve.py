"""The subcommand `launch/recipe.py curve`: the reference curve of a recipe, of runs of it."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.console import arguments, terminal
from launch.records.curves import BEGINNING, CHECKSUMS, Curve, Points, write
from launch.records.directory import RunDirectory
from launch.records.metrics import missing
from recipes.key_paths import CURVE, changes
from recipes.problems import Problem, ProblemsError, counted

if TYPE_CHECKING:
    from launch.reports.runs import ReportedRun

LEAST_SEEDS = 3
ABOUT = """\
Make the reference curve of a recipe of your own runs of it: at least three,
whole, from random weights, which differ in nothing but the seed that decides
a number. Later runs are judged by it at every validation, with --set
curve=FILE or `curve: FILE` in the recipe. A text or a vocabulary that has
changed since the runs is refused."""


def add_parser(commands: Any) -> None:
    """Add the subcommand `curve` to the subparsers of launch/recipe.py."""
    parser = arguments.subcommand(
        commands, "curve", "a reference curve of your own runs", ABOUT
    )
    add = parser.add_argument
    runs = "a run directory, a glob of them, or a folder with runs somewhere below it"
    add("runs", nargs="+", metavar="RUN", help=runs)
    add("--out", required=True, metavar="FILE", help="the curve, a new .json file")
    add("--replace", action="store_true", help="replace the curve in --out")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the curve and return the exit code. Raises ProblemsError with every problem."""
    from launch.console.new_output import new_file
    from launch.reports.runs import find, labels, read_run

    own = BEGINNING.encode() if args.replace else b""
    out = new_file("--out", args.out, (".json",), own)
    paths = find(args.runs)
    runs = []
    for path, label in zip(paths, labels(paths), strict=True):
        runs.append(read_run(path, label, lambda name: None))
    problems = list[Problem]()
    for each in runs:
        problems += unusable(each)
    problems = problems or [*disagreements(runs)]
    if problems:
        raise ProblemsError(problems)
    curve = curve_of(runs)
    write(out, curve)
    for seed, points in curve.runs.items():
        skipped = points.loss.count(None)
        if skipped:
            terminal.say(
                f"seed {seed}: {counted(skipped, 'skipped step')} of {curve.steps:,}"
            )
    seeds = f"{counted(len(curve.runs), 'seed')}, {counted(curve.steps, 'step')}"
    terminal.say(f"{out}: curve of {curve.curve_of}, {seeds}")
    return 0


def unusable(run: ReportedRun) -> Iterator[Problem]:
    """Yield why a run is not to be part of a curve."""
    name = str(run.path)
    yield from (Problem(name, problem) for problem in run.problems)
    recipe = run.recipe
    if recipe is None or run.problems:
        return
    lacking = missing(run.records.steps, recipe.steps, 0)
    skipped = [step.loss for step in run.records.steps if not step.skipped]
    given = [each.initial_weights for each in RunDirectory(run.path).launches()]
    wrong = {
        f"is {run.result.status}": run.result.status != "ok",
        f"has no record of {counted(len(lacking), 'step')}": lacking,
        "has a loss that is not finite": None in skipped,
        "has no validation": not run.validation,
        "began with given weights": any(given),
        "is a branch of another run": recipe.branch is not None,
        "is a fine-tuning": recipe.task is not None,
    }
    rule = "a curve is of whole pretrainings from random weights"
    for came, true in wrong.items():
        if true:
            yield Problem(name, came, rule, "leave it out, or run it again", name)


def disagreements(runs: Sequence[ReportedRun]) -> Iterator[Problem]:
    """Yield in what runs are not of one recipe, which of them have one seed, and that they are too few."""
    first = runs[0].recipe
    assert first
    by_seed = dict[int, Path]()
    for each in runs:
        recipe = each.recipe
        assert recipe
        name = str(each.path)
        apart = changes(first, recipe, CURVE)
        if recipe.steps != first.steps:
            apart.append(("steps", first.steps, recipe.steps))
        for key, was, now in apart:
            came = f"{key}={now} is not the {was} of {runs[0].path}"
            yield Problem(key, came, "a curve is of one recipe", "leave it out", name)
        other = by_seed.setdefault(recipe.seed, each.path)
        if other != each.path:
            came = f"seed={recipe.seed} is that of {other}"
            yield Problem("seed", came, "its curve is the same", "leave one out", name)
    if len(by_seed) < LEAST_SEEDS:
        came = counted(len(by_seed), "seed")
        rule = f"a band is of {LEAST_SEEDS} or more"
        fix = f"train with --set seed={1 + max(by_seed)} and further ones"
        yield Problem("seed", came, rule, fix)


def curve_of(runs: Sequence[ReportedRun]) -> Curve:
    """Make the curve of sound runs of one recipe. Raises ProblemsError: their text has changed since."""
    from data.corpus import build

    by_seed = dict[int, Points]()
    made: dict[str, set[str]] = {}
    text = dict[str, str]()
    problems = []
    for each in runs:
        recipe = each.recipe
        launch = each.launch
        assert recipe and launch
        corpus = build(recipe, say=terminal.say)
        text = {key: corpus.summary[key] for key in CHECKSUMS}
        before = each.result.entropies.unigram or math.nan
        if not math.isclose(before, corpus.unigram_entropy, rel_tol=1e-9):
            came = f"unigram entropy {before:.6f}, now {corpus.unigram_entropy:.6f}"
            rule = "text or vocabulary has changed since the run"
            problems.append(Problem("data", came, rule, "restore it", str(each.path)))
        by_seed[recipe.seed] = Points.of(
            each.records, recipe.model.figures[0], recipe.steps
        )
        for key, value in facts_of(each).items():
            made.setdefault(key, set()).add(value)
    if problems:
        raise ProblemsError(problems)
    listed = {key: sorted(values) for key, values in made.items()}
    recipe = runs[0].recipe
    assert recipe
    by_seed = dict(sorted(by_seed.items()))
    return Curve(runs[0].name, recipe, text, listed, by_seed)


def facts_of(run: ReportedRun) -> dict[str, str]:
    """Return what a run was made with, in words."""
    assert run.launch
    machine = run.launch.machine
    versions = [f"{name} {version}" for name, version in machine["versions"].items()]
    return {
        "hardware": str(run.result.hardware),
        "precision": str(run.result.precision),
        "versions": ", ".join(versions),
        "commit": machine["git"]["commit"],
    }
