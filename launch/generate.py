"""Have a trained model continue prompts, or fill in their masks.

python launch/generate.py runs/default-sotu-zero3_offload --prompt "My fellow citizens"
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

if not __package__:
    import _clone_first  # noqa: F401

from launch.console import arguments, ends, new_output
from launch.ranks import ending, joining, processes
from recipes.problems import Problem, ProblemsError

if TYPE_CHECKING:
    from launch.evaluation.trained_model import TrainedModel
    from launch.evaluation.writing import WritingJob

DTYPES = ("float32", "bfloat16", "float16")
TOP_K = 40
# Flags that a BERT takes, too.
OF_ALL_MODELS = (
    "model",
    "prompt",
    "file",
    "tokenizer",
    "weights_args",
    "dtype",
    "out",
    "local_rank",
)

EXAMPLES = """\
examples:
  python launch/generate.py runs/default-sotu-zero3_offload \\
      --prompt "My fellow citizens"
      the newest complete checkpoint of a run goes on for 80 tokens, in the
      terminal as it writes
  python launch/generate.py exported --file prompts.txt --samples 4 \\
      --top_p 0.9 --out texts.jsonl
      a directory that transformers saved; four samples of the prompt in each
      line, one JSON object a line
  python launch/generate.py runs/big/checkpoints/step-000300 --greedy \\
      --dtype bfloat16 --prompt The
      that checkpoint, whatever layout the run had, in half the memory, the
      most likely tokens
  python launch/generate.py runs/bert-sotu-zero1 \\
      --prompt "The [MASK] of the people."
      a BERT fills in its masks with the most likely tokens, the surest first

transformers' generate() writes, from the weights in its form, in one process.
A file is written faster by several commands, each with a part of it.

A text ends after --tokens, at the end-of-text token, or at the model's last
position. What is drawn depends on --seed, the prompt and the number of the
sample alone (to rounding).
exit codes: 0 written, 1 failed, 2 refused before anything is loaded."""

RULES = (
    ("--prompt", "--file", "prompts come from one of them"),
    (
        "--greedy",
        "--temperature, --top_k, --top_p, --seed",
        "it takes the likeliest token",
    ),
)


def build_parser() -> argparse.ArgumentParser:
    parser = arguments.command(__doc__, EXAMPLES, RULES)
    model = (
        "a run (its newest complete checkpoint), one of its checkpoints, or a GPT-2 or BERT of transformers "
        "or Megatron"
    )
    parser.add_argument("model", metavar="MODEL", help=model)
    add = parser.add_argument_group("what to continue").add_argument
    add("--prompt", action="append", metavar="TEXT", help="a prompt; repeatable")
    add("--file", metavar="FILE", help="a text file with a prompt in each line")
    add(
        "--tokenizer",
        metavar="DIR",
        help="vocabulary of the model, where there is none next to its weights",
    )
    arguments.add_weights_arguments(add)
    add = parser.add_argument_group("how").add_argument
    whole = arguments.whole()
    above = arguments.number(0)
    share = arguments.number(0, 1)
    add(
        "--tokens",
        type=whole,
        default=80,
        metavar="N",
        help="at most N after each prompt (default: %(default)s)",
    )
    add(
        "--samples",
        type=whole,
        default=1,
        metavar="N",
        help="of each prompt, written at once (default: %(default)s)",
    )
    add(
        "--greedy",
        action="store_true",
        help="take the most likely token, and draw nothing",
    )
    add(
        "--temperature",
        type=above,
        default=0.8,
        metavar="T",
        help="below 1 the likely get likelier (default: %(default)s)",
    )
    add(
        "--top_k",
        type=arguments.whole(0),
        metavar="K",
        help=f"draw from the K most likely tokens; 0: from all (default: {TOP_K} without --top_p)",
    )
    add(
        "--top_p",
        type=share,
        metavar="P",
        help="draw from the most likely tokens that sum up to P (default: 1, which is all)",
    )
    seed = arguments.whole(0, 10**18 - 1)
    add(
        "--seed",
        type=seed,
        default=0,
        metavar="N",
        help="of what is drawn (default: %(default)s)",
    )
    add(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="to compute in (default: %(default)s)",
    )
    parser.add_argument(
        "--out",
        metavar="FILE.jsonl",
        help="write JSON lines instead of text: prompt, text, new, tokens, sample, ended",
    )
    return parser


def main() -> None:
    args = build_parser().parse_args()
    meeting = joining.meet(lambda: check_flags(args))
    job = meeting.all_or_none(lambda: checked_job(args))
    from launch.evaluation.writing import run

    try:
        with ending.explain_out_of_memory("take --dtype bfloat16, or lower --samples"):
            run(job)
    except ending.Failed as error:
        raise SystemExit(str(error)) from None


def check_flags(args: argparse.Namespace) -> None:
    """Refuse contradictory or missing flags, and several processes. Raises ProblemsError."""
    problems = [*processes.several("one process writes all texts")]
    if not (args.prompt or args.file):
        problems.append(
            Problem(
                "--prompt",
                "neither --prompt nor --file",
                "prompts come from one of them",
                "add --prompt TEXT",
            )
        )
    if args.greedy and args.samples > 1:
        problems.append(
            Problem(
                "--samples",
                f"--greedy with --samples {args.samples}",
                "all of them would be the same",
                "leave one of the two out",
            )
        )
    if problems:
        raise ProblemsError(problems)


def checked_job(args: argparse.Namespace) -> WritingJob:
    """Make the job from the flags; of the weights only headers are read. Raises ValueError."""
    from data.text.vocabulary import unused_numbers
    from launch.evaluation import trained_model, writing
    from modeling.families import conversion_of
    from modeling.generation import Decoding, Sampling

    processes.check_device()
    out = new_output.new_file("--out", args.out, (".jsonl",)) if args.out else None
    given = writing.read(args.file) if args.file else writing.typed(args.prompt)
    model = trained_model.open_model(
        args.model, args.tokenizer, stated=args.weights_args
    )
    conversion_of(model.recipe.model)  # transformers has its family
    prompts = writing.encode(given, model)
    problems = [*unfit(args, model), *writing.unfit(prompts, model)]
    if problems:
        raise ProblemsError(problems)
    sampling = None
    if not args.greedy:
        usual = TOP_K if args.top_p is None else None
        top_k = usual if args.top_k is None else args.top_k or None
        sampling = Sampling(args.temperature, top_k, args.top_p or 1.0)
    never = unused_numbers(model.tokenizer, model.recipe.model.vocab_size)
    how = Decoding(
        args.tokens, model.tokenizer.eos_token_id, never, sampling, args.seed
    )
    return writing.WritingJob(model, prompts, args.samples, how, args.dtype, out)


def unfit(args: argparse.Namespace, model: TrainedModel) -> Iterator[Problem]:
    """Yield problems of flags useless for a BERT."""
    useless = []
    for name, value in vars(args).items():
        typed = name in args.given or value is True
        if typed and name not in OF_ALL_MODELS:
            useless.append(f"--{name}")
    if useless and not model.continues:
        yield Problem(
            useless[0],
            f"{', '.join(useless)} with a {model.recipe.model.facts.title}",
            "it fills each mask with the likeliest token",
            "leave it out",
        )


if __name__ == "__main__":
    ends.run(main)
