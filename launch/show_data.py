"""Look at the data of a step: decoded samples with segments and masks, and the hash of its batch.

python launch/show_data.py --recipe bert/sotu --step 0 --samples 2
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

if not __package__:
    import _clone_first  # noqa: F401

from launch.console import arguments, ends
from recipes import catalog
from recipes.families import PLACES
from recipes.layout import Layout
from recipes.schema import Batch, Recipe

if TYPE_CHECKING:
    import numpy as np

    from data.corpus import Corpus

RANKS = (1, 2, 4)
SHORT = 128  # tokens
EXAMPLES = """\
examples:
  python launch/show_data.py --recipe bert/sotu --step 0 --samples 2
      two samples of the first step: A and B, predicted tokens as [was->now],
      padding, the sentence label
  python launch/show_data.py --hashes 5
      hashes of five steps of the default recipe, as 1, 2 and 4 data-parallel
      ranks read them
  python launch/show_data.py --text my_folder/ --recipe bert/sotu
      your own text: a file, a directory or a glob
  python launch/show_data.py --recipe bert/sotu --summary
      tokens per document of a store, lengths of samples and share of padding
  python launch/show_data.py --recipe bert/sotu --split validation --samples 3
      held-out samples

exit codes: 0 shown and equal, 1 hashes differ, 2 refused."""

RULES = (
    *arguments.TEXT_RULES,
    (
        "--summary",
        "--hashes, --samples, --step, --split",
        "it is of all documents, and training from its start",
    ),
    ("--hashes", "--samples", "hashes are of whole steps"),
    ("--hashes", "--split validation, --split test", "only training has steps"),
    ("--step", "--split validation, --split test", "only training has steps"),
)


def build_parser() -> argparse.ArgumentParser:
    parser = arguments.command(__doc__, EXAMPLES, RULES)
    arguments.add_recipe_arguments(parser, ends=False, text=True)
    add = parser.add_argument_group("what to show").add_argument
    splits = ("train", "validation", "test")
    whole = arguments.whole
    add(
        "--step",
        type=whole(0, 10**12),
        default=0,
        metavar="N",
        help="optimizer step, from 0 (default: %(default)s)",
    )
    add(
        "--samples",
        type=whole(1, 10_000),
        default=2,
        metavar="N",
        help="samples to decode (default: %(default)s)",
    )
    add("--split", choices=splits, default="train", help="default: %(default)s")
    lengths = (
        "instead of samples, tokens per document of a store, and lengths of the first N samples "
        "(default: %(const)s)"
    )
    many: dict[str, Any] = dict(type=whole(1, 10**7), default=0, metavar="N")
    add("--summary", nargs="?", const=10_000, help=lengths, **many)
    hashes = "instead of samples, hashes of N steps from --step on, as 1, 2 and 4 data-parallel ranks read them"
    add("--hashes", help=hashes, **many)
    return parser


def main() -> int:
    args = build_parser().parse_args()
    from launch.console import terminal
    from launch.ranks import ending

    terminal.quiet_libraries()
    try:
        settings = {}
        say = partial(print, file=sys.stderr)
        if args.text:
            from data.text.given_text import text_settings

            column = arguments.stated(args.set, "data.text_column")
            settings = text_settings(args.text, column, say)
        recipe = catalog.load(args.recipe, args.set, tiny=args.tiny, settings=settings)
        if args.split == "test" and not recipe.data.test_every:
            came = "--split test, but data.test_every is null: the recipe holds no test documents out"
            raise ValueError(f"{came}; --set data.test_every=20")
        from data.corpus import build

        corpus = build(recipe, say=say)
        if args.summary:
            return show_lengths(recipe, corpus, args.summary)
        shown = show_hashes if args.hashes else show_samples
        return shown(recipe, corpus, args)
    except ValueError as e:
        ending.refuse(e)


def show_samples(recipe: Recipe, corpus: Corpus, args: argparse.Namespace) -> int:
    first = recipe.sizes_in_data.samples(args.step)
    size = recipe.sizes_in_data.size(args.step)
    if args.split == "train":
        count = min(args.samples, size)
        fields = corpus.train.fresh().take(range(first, first + count), recipe.seed)
        where = f"step {args.step}, sample {{}} of {size}"
    else:
        held_out = getattr(corpus, args.split)
        count = min(args.samples, len(held_out))
        fields = held_out.take(range(count))
        where = f"{args.split} sample {{}} of {len(held_out)}"
    vocabulary = f"vocabulary of {corpus.summary['vocabulary_size']}"
    print(
        f"{corpus.summary['source']}: {recipe.sequence_length} tokens per sample, {vocabulary}"
    )
    for row in range(count):
        if PLACES in fields:
            from data.samples.documents import described

            window = fields["window"][row]
            shown = described(window, fields[PLACES][row], corpus.tokenizer)
        else:
            shown = fields.describe(row, corpus.tokenizer, recipe.model.sentence_head)
        print(f"\n--- {where.format(row)}: {shown}")
    return 0


def show_lengths(recipe: Recipe, corpus: Corpus, most: int) -> int:
    """Print lengths of the documents of stores, and of samples, and the share of padding."""
    import numpy as np

    from data import durable_files
    from data.corpus import open_origin
    from data.tokens.opened import opened_store
    from launch.console.progress import bar

    directory = durable_files.cache_directory()
    quiet = durable_files.quiet
    whole = corpus.summary.get("samples_per_epoch", most)
    length = recipe.sequence_length
    for origin in recipe.data.origins:
        source = open_origin(recipe, origin, quiet)
        opened = opened_store(
            recipe, origin, source, corpus.tokenizer, directory, quiet
        )
        if opened is None:  # a stream
            continue
        ends = np.append(0, np.cumsum(opened.store.sizes, dtype=np.int64))
        documents = np.diff(ends[np.array(opened.store.document_index)])
        lengths = described(documents[documents > 0])
        print(f"{opened.name}, all documents: tokens per document\n{lengths}\n")
    if not recipe.model.facts.masked:
        print(
            f"samples: each has {length} tokens and no padding, whatever the documents' lengths"
        )
        return 0
    samples = corpus.train.fresh()
    count = min(most, whole)
    positions = bar(sys.stderr, desc="samples", total=count)
    tokens = []
    for first in range(0, count, recipe.batch.global_):
        chosen = range(first, min(first + recipe.batch.global_, count))
        tokens += samples.take(chosen, recipe.seed)["lengths"].tolist()
        positions.update(len(chosen))
    positions.close()
    padding = 100 * (1 - sum(tokens) / (count * length))
    print(
        f"samples of {length} tokens, {padding:.1f} % of it padding: the first {count:,} of training"
    )
    print(described(tokens))
    return 0


def described(lengths: Sequence[int] | np.ndarray) -> str:
    """Describe lengths in tokens in one line."""
    import numpy as np

    if not len(lengths):
        return "  none"
    short = 100 * np.mean(np.asarray(lengths) < SHORT)
    middle = f"mean {np.mean(lengths):,.0f}, median {np.median(lengths):,.0f}"
    whole = f"{len(lengths):,}, in all {np.sum(lengths):,} tokens"
    return f"  {whole}: {middle}; {short:.1f} % below {SHORT}"


def show_hashes(recipe: Recipe, corpus: Corpus, args: argparse.Namespace) -> int:
    """Print the hashes of whole steps under several numbers of ranks; return 1 where they differ."""
    batch = recipe.batch
    layouts = [layout_of(batch, dp) for dp in RANKS if batch.unit % dp == 0]
    steps = range(args.step, args.step + args.hashes)
    columns = [step_hashes(recipe, corpus, layout, steps) for layout in layouts]
    headings = (f"{f'{layout.dp} data-parallel':<16}" for layout in layouts)
    print(f"{'step':>8}  " + "  ".join(headings), flush=True)
    different = []
    for step, *hashes in zip(steps, *columns, strict=True):
        equal = len(set(hashes)) == 1
        different += [] if equal else [str(step)]
        shown = "  ".join(digest[:16] for digest in hashes)
        print(f"{step:>8}  {shown}{'' if equal else '  DIFFERENT'}", flush=True)
    if different:
        print(
            f"the batch depends on the number of ranks in steps {', '.join(different)}",
            file=sys.stderr,
        )
    return int(bool(different))


def layout_of(batch: Batch, dp: int) -> Layout:
    """Return a layout of `dp` ranks, with smaller micro-batches for more ranks; neither changes a batch."""
    rows = batch.unit // dp
    micro = next(micro for micro in (rows // dp, 1) if micro and rows % micro == 0)
    return Layout(1, 1, dp, micro, batch.global_ // (micro * dp), batch.global_)


def step_hashes(
    recipe: Recipe, corpus: Corpus, layout: Layout, steps: range
) -> Iterator[str]:
    """Yield the hash of each step, joined from the batches of all ranks of a layout."""
    from data.loader import StepBatches, batch_digest

    ranks = [
        StepBatches(
            corpus.train,
            recipe.seed,
            layout,
            rank,
            steps.start,
            sizes=recipe.sizes_in_data,
        )
        for rank in range(layout.dp)
    ]
    try:
        for _ in steps:
            yield batch_digest([micro for rank in ranks for micro in next(rank)])
    finally:
        for rank in ranks:
            rank.close()


if __name__ == "__main__":
    ends.run(main)
