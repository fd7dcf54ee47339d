"""Train recipes with one misuse each: the catalogue of causes by which a run's curve is explained.

    python -m tests.misuses --list
    python -m tests.misuses --recipe default/sotu --seed 1235 --out runs/misuses      all of them, 60 steps each
    python -m tests.misuses --recipe default/sotu --seed 1235 --out runs/misuses --only "no warm-up"
    python -m tests.misuses --recipe default/sotu --seed 1235 --out runs/misuses --into FILE

The last line trains nothing: it puts the runs of --out into FILE of the recipe's curve. A misuse is another
value of the recipe, or a replacement of code in a copy of the tree. Its run is written to OUT/NAME; the step
after which it ends is that by which a misuse is to be noticed. Those that change nothing in a recipe are left
out of its list: a GPT-2's samples have no padding, and equal numbers of tokens.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from launch.records import curves
from launch.records.directory import RunDirectory
from launch.records.metrics import read_metrics
from launch.records.reference import Series

ROOT = Path(__file__).resolve().parent.parent
STEPS = 60
FOLDERS = ("recipes", "ds_configs", "modeling", "data", "launch")
LOADER, STEP = "data/loader.py", "launch/training/engine.py"
FIELDS, MASK = "data/samples/fields.py", "modeling/attention.py"
EPOCH = "int(self._orders[seed, epoch][within])"


class Misuse(NamedTuple):
    """Settings of the recipe, and (file, right code, wrong code) in the tree.

    Attributes:
        family: of the recipes that it changes; None: every one.
    """

    name: str
    settings: tuple[str, ...] = ()
    edits: tuple[tuple[str, str, str], ...] = ()
    family: str | None = None

    def plant(self, tree: Path) -> None:
        """Copy the packages to `tree`, with the replacements."""
        for folder in FOLDERS:
            shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
        for file in ROOT.glob("*.txt"):
            shutil.copy(file, tree)
        for file, right, wrong in self.edits:
            path = tree / file
            text = path.read_text(encoding="utf-8")
            assert text.count(right) == 1, f"{file} has {right!r} {text.count(right)} times"
            path.write_text(text.replace(right, wrong), encoding="utf-8")


def rate(factor: float) -> dict[str, tuple[str, ...]]:
    """Return the settings of both recipes' rates times `factor`."""
    return {
        "gpt2": (f"optimizer.lr={1e-3 * factor:g}", f"schedule.min_lr={1e-4 * factor:g}"),
        "bert": (f"optimizer.lr={3e-3 * factor:g}", f"schedule.min_lr={1e-5 * factor:g}"),
    }


MISUSES = (
    Misuse("learning rate three times as high", ("RATE 3",)),
    Misuse("learning rate a third", ("RATE 0.3333333",)),
    Misuse("no warm-up", ("schedule.warmup_steps=0",)),
    Misuse("betas swapped", ("BETAS",)),
    Misuse("eps and weight decay swapped", ("EPS",)),
    Misuse("half of the batch", ("BATCH 0.5",)),
    Misuse("twice the batch", ("BATCH 2",)),
    Misuse("labels not shifted", edits=(
        ("data/samples/gpt.py", '"labels": windows[:, 1:]', '"labels": windows[:, :-1]'),), family="gpt2"),
    Misuse("mean of micro-batches of unequal tokens", ("batch.micro=8",), edits=(
        ("launch/training/micro_batches.py",
         "    sums = torch.stack([b[\"weights\"].sum() for b in batches])",
         "    if len(batches) * grid.dp > 1:\n"
         "        means = [b[\"weights\"] / b[\"weights\"].sum() for b in batches]\n"
         "        return [{**b, \"weights\": mean.to(device)} for b, mean in zip(batches, means)]\n"
         "    sums = torch.stack([b[\"weights\"].sum() for b in batches])"),), family="bert"),
    Misuse("dropout in evaluation", edits=(
        ("modeling/transformer.py",
         "        return F.layer_norm(x, (x.shape[-1],), weight, bias, self.eps)",
         "        x = F.layer_norm(x, (x.shape[-1],), weight, bias, self.eps)\n"
         "        return F.dropout(x, 0.1, training=not torch.is_grad_enabled())"),)),
    Misuse("causal mask off by one", edits=(
        (MASK, "    compiled = torch.compiler.is_compiling()\n    kernel",
         "    if causal:\n"
         "        mask = q.new_ones((q.shape[-2], q.shape[-2]), dtype=torch.bool).tril(1)\n"
         "        causal = False\n    compiled = torch.compiler.is_compiling()\n    kernel"),), family="gpt2"),
    Misuse("padding counted", edits=(
        ("data/samples/bert.py", "weights = (self._real & (row_weights > 0)[:, None])",
         "weights = ((self._real | True) & (row_weights > 0)[:, None])"),), family="bert"),
    Misuse("weight decay on biases and LayerNorms", edits=(
        (STEP, "groups[len(shape) <= 1]", "groups[0]"),)),
    Misuse("head not tied to the embedding", edits=(
        ("modeling/gpt2.py", "word_layer(shape, group, init, cut=cut, project=True)",
         "__import__('dataclasses').replace(\n"
         "            word_layer(shape, group, init.child('head'), cut=cut, project=True), name='head')"),),
        family="gpt2"),
    Misuse("positions off by one", edits=(
        ("modeling/gpt2.py", "weight[None, :length]", "weight.roll(1, 0)[None, :length]"),), family="gpt2"),
    Misuse("samples in their order, not shuffled", edits=((FIELDS, EPOCH, "within"),)),
    Misuse("a document repeated", edits=((FIELDS, EPOCH, f"0 if within % 8 == 0 else {EPOCH}"),)),
    Misuse("clipping off", ("optimizer.clip=0",)),
    # as DeepSpeed does from a loss scale that is 2**16 times too high, in bf16: fp16 is slow on a CPU
    Misuse("fp16 skips steps", edits=(
        (STEP, "engine.backward(loss)\n", "engine.backward(loss * (engine.global_steps >= 16))\n"),
        ("launch/training/schedule.py", "        self.completed += 1\n",
         "        self.skipped = min(16, getattr(self, 'skipped', 0) + 1)\n"
         "        self.completed += self.skipped == 16\n"),)),
    Misuse("initial weights twice as large", ("STD 2",)),
    Misuse("eps of LayerNorm", edits=(
        ("modeling/transformer.py", "self.eps = eps\n", "self.eps = {1e-5: 1e-12}.get(eps, 1e-5)\n"),)),
    Misuse("the same samples on two ranks", edits=(
        (LOADER, "    rows = np.arange(samples or layout.global_batch).reshape(",
         "    half = (samples or layout.global_batch) // 2\n"
         "    rows = (np.arange(2 * half) % half).reshape("),)),
)  # fmt: skip


def settings_of(misuse: Misuse, recipe: str) -> list[str]:
    """Return its settings with the recipe's own numbers."""
    bert = recipe.startswith("bert")
    batch = 128 if bert else 8
    betas = "0.98,0.9" if bert else "0.95,0.9"
    decay = 0.01 if bert else 0.1
    std = 0.12 if bert else 0.04
    named = {
        "BETAS": [f"optimizer.betas=[{betas}]"],
        "EPS": [f"optimizer.eps={decay}", "optimizer.weight_decay=1e-8"],
        "BATCH 0.5": [f"batch.global={batch // 2}"],
        "BATCH 2": [f"batch.global={batch * 2}"],
        "STD 2": [f"init_std={std}"],
    }
    family = "bert" if bert else "gpt2"
    settings: list[str] = []
    for each in misuse.settings:
        if each.startswith("RATE"):
            settings += rate(float(each.split()[1]))[family]
        else:
            settings += named.get(each, [each])
    return settings


def train(misuse: Misuse, recipe: str, seed: int, steps: int, out: Path) -> int:
    """Train the recipe with the misuse in a copy of the tree; return the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        misuse.plant(tree)
        of_run = ("save_every=0", "save_last=false", "check_every=0", "prompt=null", "validate_every=25")
        settings = [*settings_of(misuse, recipe), f"seed={seed}", *(f"run.{each}" for each in of_run)]
        command = [sys.executable, "launch/pretrain.py", "--recipe", recipe, "--ds_config", "zero1"]
        command += ["--steps", str(steps), "--out", str(out)]
        for each in settings:
            command += ["--set", each]
        return subprocess.run(
            command, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, check=False
        ).returncode


def read(run: Path) -> Series:
    """Read the figures of a run; those that fp16 would have skipped have a norm of 0."""
    records = read_metrics(run / "metrics.jsonl")
    figure = RunDirectory(run).recipe().model.figures[0]
    series = curves.RunFigures(figure, records, len(records.steps)).until(len(records.steps))
    series.loss[series.grad_norm == 0] = np.nan
    series.grad_norm[series.grad_norm == 0] = np.nan
    return series


def put_into(curve: Path, seed: int, runs: dict[str, Path]) -> None:
    """Put runs of misuses, by name, into the file of their recipe's curve."""
    measured = {name: read(path) for name, path in runs.items()}
    curves.write(curve, replace(curves.read(curve), misuses=measured, misused=seed))


def chosen(recipe: str, only: list[str] | None) -> list[Misuse]:
    """Return the misuses that change something in the recipe."""
    family = "bert" if recipe.startswith("bert") else "gpt2"
    of_family = [each for each in MISUSES if each.family in (None, family)]
    return [each for each in of_family if only is None or each.name in only]


def main() -> int:
    """Train each misuse that was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipe", default="default/sotu")
    parser.add_argument("--seed", type=int, default=1235)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, help="directory of the runs")
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--into", type=Path, metavar="CURVE")
    args = parser.parse_args()
    misuses = chosen(args.recipe, args.only)
    if args.list:
        print("\n".join(each.name for each in misuses))
        return 0
    runs = {each.name: args.out.resolve() / each.name.replace(" ", "-") for each in misuses}
    if args.into:
        put_into(args.into, args.seed, runs)
        return 0
    codes = [train(each, args.recipe, args.seed, args.steps, runs[each.name]) for each in misuses]
    return max(codes, default=0)


if __name__ == "__main__":
    sys.exit(main())
