"""The subcommand `launch/recipe.py curve`: the reference curve of a recipe, made of runs of it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from launch.console import arguments
from launch.console.new_output import new_file
from launch.records.curves import Curve, RunFigures, facts_of, write
from launch.records.directory import RunDirectory
from launch.records.metrics import read_metrics
from launch.records.result import read_result
from launch.reports.runs import find
from recipes.problems import Problem, ProblemsError, counted

LEAST_SEEDS = 3
ABOUT = """\
Make the reference curve of a recipe of your own runs of it: at least three,
whole, from random weights, under different seeds. With --set curve=FILE, or
`curve: FILE` in the recipe, later runs of it are judged by them at every
validation."""


def add_parser(commands: Any) -> None:
    """Add the subcommand `curve` to the subparsers of launch/recipe.py."""
    about = "what your own runs of a recipe came to, to judge later ones by"
    parser = arguments.subcommand(commands, "curve", about, ABOUT)
    add = parser.add_argument
    add(
        "runs",
        nargs="+",
        metavar="RUN",
        help="a run directory, a glob of them, or a folder with runs somewhere below it",
    )
    add("--out", required=True, metavar="FILE", help="a new .json file")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the curve and return the exit code. Raises ProblemsError with every problem."""
    out = new_file("--out", args.out, (".json",))
    curve: Curve | None = None
    problems = list[Problem]()
    for path in find(args.runs):
        try:
            curve = with_run(curve, path)
        except ValueError as why:
            problems.append(
                Problem(
                    str(path),
                    str(why),
                    fix="leave it out, or train it again",
                    where=str(path),
                )
            )
    seeds = len(curve.runs) if curve else 0
    if seeds < LEAST_SEEDS:
        problems.append(
            Problem(
                "seed",
                f"a curve of {counted(seeds, 'seed')}",
                f"a band is of {LEAST_SEEDS} or more",
                "train with --set seed=N, too",
            )
        )
    if problems or curve is None:
        raise ProblemsError(problems)
    write(out, curve)
    print(f"{out}: curve of {curve.curve_of}, {counted(seeds, 'seed')}")
    return 0


def with_run(curve: Curve | None, path: Path) -> Curve:
    """Add a run to a curve, or begin one. Raises ValueError: it is not whole, or not of the recipe."""
    at = RunDirectory(path)
    recipe = at.recipe()
    launches = at.launches()
    result = read_result(at.result_json)
    records = read_metrics(at.metrics_jsonl)
    made = len(records.steps)
    if not launches:
        raise ValueError(f"{at.environment_json} names no launch")
    if result.status != "ok" or made < recipe.steps:
        raise ValueError(f"{made:,} of {recipe.steps:,} steps, {result.status}")
    newest = launches[-1]
    curve = curve or Curve(newest.row, facts_of(recipe), result.entropies, [], {})
    given = any(launch.initial_weights for launch in launches)
    why_not = curve.why_not(recipe, result.entropies, given)
    runs = curve.repeats if recipe.seed in curve.runs else curve.runs
    if recipe.seed in runs:
        why_not = f"seed={recipe.seed} is that of two other runs"
    if {len(each.loss) for each in curve.runs.values()} - {recipe.steps}:
        why_not = f"steps={recipe.steps} is not the number of the other runs"
    if why_not:
        raise ValueError(why_not)
    figures = RunFigures(recipe.model.figures[0], records, recipe.steps)
    runs[recipe.seed] = figures.until(recipe.steps)
    by = {key: newest.machine.get(key) for key in ("versions", "git")}
    by |= {"hardware": result.hardware, "precision": result.precision}
    if by not in curve.made_by:
        curve.made_by.append(by)
    if result.skipped_steps:
        print(f"{path}: {counted(result.skipped_steps, 'skipped step')}")
    return curve
