"""Look at the data of a step: decoded samples with segments and masks, and the hash of its batch.

python launch/show_data.py --recipe bert/sotu --step 0 --samples 2
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":  # replace launch/, which would shadow packages
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from launch.console import arguments
from recipes import catalog
from recipes.schema import Recipe

RANKS = (1, 2, 4)
EXAMPLES = """\
examples:
  python launch/show_data.py --recipe bert/sotu --step 0 --samples 2
      two samples of the first step: A and B, predicted tokens as [was->now], padding, the label of the sentence objective
  python launch/show_data.py --hashes 5
      hashes of five steps of the default recipe, as 1, 2 and 4 data-parallel ranks read them; exit code 1 when they differ
  python launch/show_data.py --recipe bert/sotu --split validation --samples 3
      held-out samples

exit codes: 0 shown and equal, 1 hashes differ, 2 refused."""


class Layout(NamedTuple):
    micro: int
    accumulation: int
    dp: int
    global_batch: int


def build_parser():
    parser = arguments.command(__doc__.split("\n\n")[0], EXAMPLES)
    arguments.add_recipe_arguments(parser)
    group = parser.add_argument_group("what to show")
    group.add_argument(
        "--step", type=int, default=0, metavar="N", help="optimizer step, from 0 (default: %(default)s)"
    )
    group.add_argument(
        "--samples", type=int, default=2, metavar="N", help="samples that are decoded (default: %(default)s)"
    )
    group.add_argument(
        "--split", choices=("train", "validation", "test"), default="train", help="default: %(default)s"
    )
    group.add_argument("--hashes", type=int, default=0, metavar="N", help="instead of samples, hashes of N steps from --step on, as "
                       "1, 2 and 4 data-parallel ranks read them")  # fmt: skip
    group.add_argument("--workers", type=int, default=1, metavar="N", help="threads per rank that read ahead for --hashes "
                       "(default: %(default)s)")  # fmt: skip
    return parser


def main() -> int:
    args = build_parser().parse_args()
    from launch.console import quiet
    from launch.machine import ending

    quiet.quiet_libraries()
    try:
        recipe = catalog.load(args.recipe, args.set, tiny=args.tiny, steps=args.steps)
        check(args, recipe)
        from data.corpus import build

        corpus = build(recipe, say=lambda line: print(line, file=sys.stderr))
        return show_hashes(recipe, corpus, args) if args.hashes else show_samples(recipe, corpus, args)
    except ValueError as e:
        ending.refuse(e)


def check(args, recipe: Recipe) -> None:
    """Raises ValueError with what the flags ask for and cannot have."""
    for flag in ("step", "samples", "hashes", "workers"):
        if getattr(args, flag) < 0:
            raise ValueError(f"--{flag} {getattr(args, flag)} is below 0: give a number of {flag}, from 0 on")
    if not args.samples and not args.hashes:
        raise ValueError("--samples 0 shows nothing: give 1 or more, or --hashes")
    if args.hashes and args.split != "train":
        raise ValueError(
            f"--hashes with --split {args.split}: only training has steps; leave one of the two out"
        )
    if args.split == "test" and not recipe.data.test_every:
        raise ValueError(
            "--split test, but data.test_every is null: the recipe holds no test documents out; --set data.test_every=20"
        )


def show_samples(recipe: Recipe, corpus, args) -> int:
    if args.split == "train":
        first = args.step * recipe.batch.global_
        positions = range(first, first + min(args.samples, recipe.batch.global_))
        fields: dict[str, Any] = corpus.train.fresh().take(positions, recipe.seed)
        names = [f"step {args.step}, sample {row} of {recipe.batch.global_}" for row in range(len(positions))]
    else:
        held_out = getattr(corpus, args.split)
        count = min(args.samples, len(held_out))
        fields, names = (
            held_out.take(range(count)),
            [f"{args.split} sample {row} of {len(held_out)}" for row in range(count)],
        )
    print(
        f"{corpus.summary['source']}: {recipe.sequence_length} tokens per sample, vocabulary of {corpus.summary['vocabulary_size']}"
    )
    for row, name in enumerate(names):
        print(f"\n--- {name}: {fields.describe(row, corpus.tokenizer, recipe.model.sentence_head)}")
    return 0


def show_hashes(recipe: Recipe, corpus, args) -> int:
    """Hashes of whole steps, each put together of what the ranks of a layout read on their own."""
    layouts = [layout_of(recipe.batch.global_, dp) for dp in RANKS if recipe.batch.global_ % dp == 0]
    columns = [
        step_hashes(recipe, corpus, layout, args.step, args.hashes, args.workers) for layout in layouts
    ]
    print(f"{'step':>8}  " + "  ".join(f"{f'{layout.dp} data-parallel':<16}" for layout in layouts))
    different = []
    for row, hashes in enumerate(zip(*columns, strict=True)):
        step = args.step + row
        if len(set(hashes)) > 1:
            different.append(step)
        print(
            f"{step:>8}  "
            + "  ".join(found[:16] for found in hashes)
            + ("  DIFFERENT" if step in different else "")
        )
    if different:
        print(
            f"the batch depends on the number of ranks in steps {', '.join(map(str, different))}",
            file=sys.stderr,
        )
    return int(bool(different))


def layout_of(global_batch: int, dp: int) -> Layout:
    """The more ranks, the smaller the micro-batches: what has to make no difference."""
    rows = global_batch // dp
    micro = next(micro for micro in (rows // dp, 1) if micro and rows % micro == 0)
    return Layout(micro, rows // micro, dp, global_batch)


def step_hashes(recipe: Recipe, corpus, layout: Layout, first: int, steps: int, workers: int) -> list[str]:
    from data.loader import StepBatches, batch_digest

    ranks = [
        StepBatches(corpus.train, recipe.seed, layout, rank, first, workers=workers)
        for rank in range(layout.dp)
    ]
    try:
        return [
            batch_digest([micro_batch for rank in ranks for micro_batch in next(rank)]) for _ in range(steps)
        ]
    finally:
        for rank in ranks:
            rank.close()


if __name__ == "__main__":
    sys.exit(main())
