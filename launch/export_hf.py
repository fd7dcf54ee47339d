"""Export a run's weights and vocabulary to a directory that `transformers` loads.

python launch/export_hf.py runs/default-sotu-zero3_offload --out exported
"""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from typing import TYPE_CHECKING

from launch.console import arguments, ends, output, quiet
from launch.machine import ending
from recipes.family_words import WORDS
from recipes.schema import Recipe

if TYPE_CHECKING:
    from launch.training.export import Export

EXAMPLES = """\
examples:
  python launch/export_hf.py runs/default-sotu-zero3_offload --out exported
      the newest complete checkpoint, float32, whatever layout the run had: tensor, pipeline, ZeRO, all
  python launch/export_hf.py runs/default-sotu-zero3_offload --out exported-200 --step 200 --dtype bfloat16
      an older checkpoint, in half the size

one process is enough, and no GPU. A GPT-2 becomes a GPT2LMHeadModel; a BERT a BertForPreTraining (post-LN) or
MegatronBertForPreTraining (pre-LN), or their ForMaskedLM without a sentence head; a model with banded layers
(model.attention) is none of these, and refused. The export is loaded again with transformers and its logits
are compared with those of our own model before it appears under its name; `pretrain.py --init_from exported`
starts another run from it.
exit codes: 0 exported and checked, 1 the logits differ, 2 refused."""


def build_parser() -> ArgumentParser:
    parser = arguments.command(str(__doc__).split("\n\n")[0], EXAMPLES)
    add = parser.add_argument
    add("run", metavar="RUN", help="run directory, as pretrain.py printed it")
    add("--out", metavar="DIR", required=True, help="directory to make; refused if there is something in it")
    step = "the checkpoint after N optimizer steps (default: the newest complete one)"
    add("--step", type=arguments.whole(0), metavar="N", help=step)
    dtype = "of the exported weights (default: %(default)s, as the run keeps them whatever it computes in)"
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help=dtype)
    return parser


def main() -> None:
    args = build_parser().parse_args()
    quiet.quiet_libraries()
    from transformers.utils import logging

    from launch.training.export import ExportMismatch

    logging.disable_progress_bar()
    try:
        done, recipe = export(args.run, args.out, step=args.step, dtype=args.dtype)
    except ValueError as e:
        ending.refuse(e)
    except ExportMismatch as e:
        ending.refuse(e, code=1)
    print(describe(done, recipe))


def export(
    run: str | Path, out: str | Path, *, step: int | None = None, dtype: str = "float32"
) -> tuple[Export, Recipe]:
    """Export one checkpoint of `run` to the new directory `out`; what was written, and the run's recipe.

    Raises:
        ValueError: no run, no such complete checkpoint, a model that `transformers` does not have, files
            that are damaged, or `out` is not empty.
        ExportMismatch: `transformers` computes other logits than our model from the same weights.
    """
    from launch.runs import vocabulary
    from launch.training import export as exporting

    run = Path(run)
    recipe = exporting.recipe_of(run)
    checkpoint = exporting.choose_checkpoint(run, recipe, step)
    place = output.new_directory("--out", out)
    place = place.resolve() if place.is_symlink() else place  # an export takes its place whole
    return exporting.export(checkpoint, recipe, vocabulary.load(run), place, dtype, run=run), recipe


def describe(done: Export, recipe: Recipe) -> str:
    """What was exported and a few lines of Python that use it."""
    from modeling.families import family_of

    rounding = f"; rounding to {done.dtype} changed them by {done.rounding:.1e}" if done.rounding else ""
    usage = family_of(recipe.model).conversion.usage
    prompt = recipe.run.prompt or WORDS[recipe.model.family].prompt
    lines = "\n  ".join(usage.format(directory=done.directory, prompt=repr(prompt)).splitlines())
    return f"""{done.checkpoint} -> {done.directory}: {done.dtype}, step {done.step}
logits of transformers and of our model differ by at most {done.difference:.1e}{rounding}

use it
  {lines}"""


if __name__ == "__main__":
    ends.run(main)
