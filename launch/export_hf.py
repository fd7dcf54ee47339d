"""Export a run's weights and vocabulary to a directory that `transformers` loads.

python launch/export_hf.py runs/default-sotu-zero3_offload --out exported
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if not __package__:
    import _clone_first  # noqa: F401

from launch.console import arguments, ends, new_output, terminal
from launch.ranks import ending
from recipes.problems import amount, some
from recipes.schema import Recipe

if TYPE_CHECKING:
    from launch.weights.export import Export

EXAMPLES = """\
examples:
  python launch/export_hf.py runs/default-sotu-zero3_offload --out exported
      the newest complete checkpoint, float32, whatever layout the run had:
      tensor, pipeline, ZeRO, all
  python launch/export_hf.py runs/default-sotu-zero3_offload \\
      --out exported-200 --step 200 --dtype bfloat16
      an older checkpoint, in half the size
  HF_TOKEN=... python launch/export_hf.py runs/default-sotu-zero3_offload \\
      --out exported --push USER/NAME
      and push the export to the hub

one process is enough, and no GPU. A GPT-2 becomes a GPT2LMHeadModel; a BERT a
BertForPreTraining (post-LN) or MegatronBertForPreTraining (pre-LN), or their
ForMaskedLM without a sentence head; a model with banded layers
(model.attention) is none of these, and refused. First the checkpoint's
checksums are compared, then tensor after tensor is converted: memory holds a
few times the largest. Where a model fits into memory, the export is loaded
again with transformers and its logits are compared with those of our own
model before it appears under its name; a larger one is read again tensor by
tensor, and that is said. More than 5 GB are written in shards.
`pretrain.py --init_from` takes an export, or the run directory itself.
--push makes a private repository before the export, so that the hub refuses
first what it refuses. An empty repository that is there is taken as it is;
files in one are never overwritten.
exit codes: 0 exported and checked, 1 the logits or the written tensors
differ, or the hub did not take the export, 2 refused."""


def build_parser() -> ArgumentParser:
    parser = arguments.command(__doc__, EXAMPLES)
    add = parser.add_argument
    add("run", metavar="RUN", help="run directory, as pretrain.py printed it")
    add(
        "--out",
        metavar="DIR",
        required=True,
        help="directory to make; refused if there is something in it",
    )
    add(
        "--step",
        type=arguments.whole(0),
        metavar="N",
        help="the checkpoint after N optimizer steps (default: the newest complete one)",
    )
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="of the exported weights (default: %(default)s, as the run keeps them whatever it computes in)",
    )
    add(
        "--compare_logits",
        action="store_true",
        help="compare logits even where memory seems too small for it",
    )
    add(
        "--push",
        metavar="USER/NAME",
        help="push the export to this repository of the hub: a new one, which is private, or an empty one",
    )
    return parser


def main() -> None:
    args = build_parser().parse_args()
    terminal.quiet_libraries()
    from transformers.utils import logging

    from launch.weights.export import ExportMismatch

    logging.disable_progress_bar()
    try:
        how = dict(step=args.step, dtype=args.dtype, compare_logits=args.compare_logits)
        done, recipe = export(args.run, args.out, push=args.push, **how)
    except ValueError as e:
        ending.refuse(e)
    except (ExportMismatch, ending.Failed) as e:
        ending.refuse(e, code=1)
    print(describe(done, recipe))


def export(
    run: str | Path,
    out: str | Path,
    *,
    step: int | None = None,
    dtype: str = "float32",
    compare_logits: bool = False,
    push: str | None = None,
) -> tuple[Export, Recipe]:
    """Export one checkpoint of `run` to the new directory `out`; return its facts and the run's recipe.

    `push`: USER/NAME of a repository of the hub that takes the export, too.

    Raises:
        ValueError: no run, no such complete checkpoint, a model that `transformers` does not have, files
            that are damaged, or `out` is not empty.
        ExportMismatch: `transformers` computes other logits than our model from the same weights, or other
            numbers were written.
        Failed: the export is whole, and the hub did not take it.
    """
    from launch.checkpoints import run_checkpoints
    from launch.console.progress import bar
    from launch.records import vocabulary
    from launch.records.directory import RunDirectory
    from launch.weights import export as exporting
    from launch.weights import hub_repository
    from modeling.formats.huggingface.conversion import check_convertible

    run = Path(run)
    recipe = RunDirectory(run).recipe()
    check_convertible(recipe.model)
    checkpoint, damaged = run_checkpoints.newest_whole(run, step)
    for each in damaged:
        terminal.warn(f"{each}; step {checkpoint.step} is exported", sys.stderr)
    place = new_output.new_directory("--out", out)
    # an export takes its place whole
    place = place.resolve() if place.is_symlink() else place
    tokenizer = vocabulary.load(run)
    repository = hub_repository.opened(push) if push else None
    with bar(
        sys.stderr,
        total=checkpoint.manifest.bytes,
        unit="B",
        unit_scale=True,
        desc="checksums",
    ) as shown:
        done = exporting.export(
            checkpoint, recipe, tokenizer, place, dtype, run=run, compare_logits=compare_logits,
            seen=shown.update,
        )  # fmt: skip
    if repository:
        repository.push(place)
        done = replace(done, pushed=repository.address)
    return done, recipe


def describe(done: Export, recipe: Recipe) -> str:
    """Describe the export, with a few lines of Python to use it."""
    from modeling.families import conversion_of

    if done.difference is None:
        checked = (
            "each tensor was read again and is the checkpoint's; what transformers computes with them was "
            f"not compared with our model: that takes {amount(done.needed)} of memory, and "
            f"{amount(done.free)} are free (--compare_logits compares anyway)"
        )
    else:
        rounding = (
            f"; rounding to {done.dtype} changed them by {done.rounding:.1e}"
            if done.rounding
            else ""
        )
        ours = "the run's" if recipe.model.config else "our"
        most = f"{done.difference:.1e}{rounding}"
        checked = f"logits of transformers and of {ours} model differ by at most {most}"
    if recipe.task is not None:
        checked = "each tensor was read again and is the checkpoint's; only transformers has heads of tasks"
    if done.left_out:
        added = some(done.left_out)
        checked += f"\nthe tokenizer adds no {added} to a text: training did not"
    files = f" in {done.files} files" if done.files > 1 else ""
    usage = conversion_of(recipe.model).usage
    prompt = recipe.run.prompt or recipe.model.facts.prompt
    lines = "\n  ".join(
        usage.format(directory=done.directory, prompt=repr(prompt)).splitlines()
    )
    pushed = f"; pushed to {done.pushed}" if done.pushed else ""
    return f"""use it
  {lines}

{checked}
{done.checkpoint} -> {done.directory}: {done.dtype}{files}, step {done.step}{pushed}"""


if __name__ == "__main__":
    ends.run(main)
