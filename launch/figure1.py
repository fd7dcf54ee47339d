"""Train a BERT with both placements of LayerNorm and plot their losses: figure 1 of the Megatron-BERT documents, at a small scale.

python launch/figure1.py --out runs/figure1
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # replace launch/, which would shadow packages
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from data.durable_files import write_atomically
from launch.console import arguments
from launch.machine import ending
from recipes import catalog

EXAMPLES = """\
examples:
  python launch/figure1.py --out runs/figure1
      the recipe bert/figure1: a deep, narrow BERT on the packaged corpus; the original (post-LN) and the rearranged (pre-LN) placement
  python launch/figure1.py --out runs/figure1-tiny --tiny
      both in seconds: shows that the command works, and nothing about the placements
  python launch/figure1.py --out runs/figure1-lr --set optimizer.lr=3e-4
      the same at another learning rate
  python launch/figure1.py --out runs/figure1 --resume
      goes on where an interrupted one stopped

The two runs differ in model.layer_norm alone: same parameters, same initial weights of everything but LayerNorm, same batches.
Writes figure1.png and figure1.json into --out, beside the two run directories. A run that diverges is a result and is drawn.
exit codes: 0 both ran (diverged ones included), 1 one failed, 2 refused."""

PLACEMENTS = {"post": "original (a): post-LN", "pre": "rearranged (b): pre-LN"}
DIVERGED = 3  # exit code of pretrain.py


def main() -> None:
    args = build_parser().parse_args()
    out = Path(args.out)
    try:
        recipe = catalog.load(args.recipe, args.set, tiny=args.tiny, steps=args.steps)
        if recipe.model.family != "bert":
            raise ValueError(
                f"--recipe {args.recipe} is a {recipe.model.family}: only a BERT has both placements; give bert/figure1 or another"
            )
    except ValueError as e:
        ending.refuse(e)
    if not args.resume and out.exists() and any(out.iterdir()):
        ending.refuse(
            f"--out {out} is not empty, and runs are never overwritten or mixed: name a new directory, or add --resume"
        )
    codes = {}
    for placement in PLACEMENTS:
        codes[placement] = run(args, placement, out / placement)
        if codes[placement] == 0 and summarise(out / placement)["status"] == "interrupted":
            print(f"stopped on request; the same command with --resume goes on with {out}")
            return
    failed = [placement for placement, code in codes.items() if code not in (0, DIVERGED)]
    if failed:
        print(f"{', '.join(str(out / p) for p in failed)} did not finish: see above", file=sys.stderr)
        raise SystemExit(2 if all(codes[p] == 2 for p in failed) else 1)
    summary = {placement: summarise(out / placement) for placement in PLACEMENTS}
    write_atomically(out / "figure1.json", json.dumps(summary, indent=2) + "\n")
    plot(
        {PLACEMENTS[p]: out / p / "metrics.jsonl" for p in PLACEMENTS},
        summary["pre"],
        out / "figure1.png",
        recipe.title,
    )
    print("\n" + table(summary))
    print(f"\n{out}: figure1.png, figure1.json, and the run directories {', '.join(PLACEMENTS)}")


def build_parser():
    parser = arguments.command(__doc__.split("\n\n")[0], EXAMPLES)
    arguments.add_recipe_arguments(parser)
    parser.set_defaults(recipe="bert/figure1")
    parser.add_argument("--ds_config", metavar="FILE", help="DeepSpeed JSON (default: the recipe's own)")
    parser.add_argument("--out", metavar="DIR", required=True, help="directory for both runs and the figure")
    parser.add_argument("--resume", action="store_true", help="go on with the runs that are there")
    return parser


def run(args, placement: str, directory: Path) -> int:
    """One training, in a process of its own; its exit code."""
    command = [
        sys.executable,
        str(Path(__file__).with_name("pretrain.py")),
        "--recipe",
        args.recipe,
        "--out",
        str(directory),
        "--resume",
    ]
    command += [f"--set={s}" for s in (*args.set, f"model.layer_norm={placement}")]
    command += ["--tiny"] if args.tiny else []
    command += ["--steps", str(args.steps)] if args.steps else []
    command += ["--ds_config", args.ds_config] if args.ds_config else []
    print(f"\n=== {PLACEMENTS[placement]}\n", flush=True)
    process = subprocess.Popen(command)
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:  # the training gets it too: it finishes its step, saves and ends
            continue


def summarise(directory: Path) -> dict:
    """What the table shows of one run."""
    row = json.loads((directory / "result.json").read_text())
    return {
        "status": row["status"],
        "steps": row["steps"],
        "parameters": row["parameters"],
        "train_mlm_loss": row["train_parts"].get("mlm_loss"),
        "validation_mlm_loss": row["validation_parts"].get("mlm_loss"),
        "validation_sentence_loss": row["validation_parts"].get("sentence_loss"),
        "unigram_entropy": row["unigram_entropy"],
        "seconds_per_step": row["seconds_per_step"],
        "deviations": row["deviations"],
    }


def table(summary: dict[str, dict]) -> str:
    columns = (
        "status",
        "steps",
        "train_mlm_loss",
        "validation_mlm_loss",
        "validation_sentence_loss",
        "seconds_per_step",
    )
    lines = [f"{'placement':<24}" + "".join(f"{name:>26}" for name in columns)]
    for placement, row in summary.items():
        cells = (
            "not measured"
            if row[c] is None
            else f"{row[c]:.4f}"
            if isinstance(row[c], float)
            else str(row[c])
            for c in columns
        )
        lines.append(f"{PLACEMENTS[placement]:<24}" + "".join(f"{cell:>26}" for cell in cells))
    return "\n".join(
        [
            *lines,
            f"unigram entropy of the validation predictions: {summary['pre']['unigram_entropy']:.4f} nats",
        ]
    )


def plot(runs: dict[str, Path], reference: dict, out_png: Path, title: str) -> None:
    """Masked-token loss of each run: every step faint, its moving average on top, validation as points."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from launch.runs.directory import read_metrics
    from launch.runs.loss_plot import curve, moving_average

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for (label, path), color in zip(runs.items(), ("tab:red", "tab:blue"), strict=True):
        records = read_metrics(path)
        _draw(
            axes,
            curve(records, "step", "mlm_loss"),
            curve(records, "validation", "mlm_loss"),
            label,
            color,
            moving_average,
        )
    axes.axhline(
        reference["unigram_entropy"], linestyle=":", color="gray", linewidth=1, label="unigram entropy"
    )
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats per masked token)")
    axes.set_title(title)
    axes.grid(alpha=0.2)
    axes.legend()
    figure.savefig(out_png, dpi=120)


def _draw(
    axes,
    train: Sequence[tuple[int, float]],
    held_out: Sequence[tuple[int, float]],
    label: str,
    color: str,
    smooth,
) -> None:
    steps, losses = zip(*train, strict=True) if train else ((), ())  # a run can diverge in its first step
    axes.plot(steps, losses, linewidth=0.5, alpha=0.35, color=color)
    axes.plot(
        steps,
        smooth(losses),
        linewidth=1.8,
        color=color,
        label=label if train else f"{label}: diverged at once",
    )
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o", markersize=4, color=color)


if __name__ == "__main__":
    main()
