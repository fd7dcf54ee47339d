"""Score a trained model: the perplexity of a text, WikiText-103, LAMBADA, and every task of lm-eval.

python launch/score.py runs/default-sotu-zero3_offload
"""

from __future__ import annotations

import importlib.util
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if not __package__:
    import _clone_first  # noqa: F401

from launch.console import arguments, ends, new_output
from launch.console.arguments import place_problem
from launch.ranks import ending, joining, processes
from recipes.families import TRAINED
from recipes.problems import Problem, ProblemsError
from recipes.schema import Recipe, Tokenizer

if TYPE_CHECKING:
    from launch.evaluation.scoring import ScoringJob
    from launch.evaluation.trained_model import TrainedModel

LESS_MEMORY = "lower --batch, or take --precision bf16"
INSTALL = "pip install lm-eval==0.4.13"

EXAMPLES = """\
examples:
  python launch/score.py runs/default-sotu-zero3_offload
      the held-out samples of the run's own recipe: the loss that its last
      validation had
  python launch/score.py RUN --text book.txt --stride 128
      all of a text: a file, a directory or a glob of JSON lines, parquet or
      plain text
  python launch/score.py RUN --tasks lambada_openai,hellaswag,arc_easy
      tasks of lm-evaluation-harness, from the hub
  python launch/score.py RUN --tasks mine --include_path my_tasks
      a task file of your own, on local files
  python launch/score.py gpt2 --tasks wikitext103
      a directory that transformers saved; 1024 positions, a window every 32
      tokens, as Megatron-LM's paper
  python launch/score.py RUN --tasks wikitext103 --data wiki.test.raw \\
      --stride 512
      without the hub, from a local file
  python launch/score.py RUN --tasks lambada --variant openai \\
      --data lambada.jsonl
      the last word of each passage, of OpenAI's text or of the original one
  python launch/score.py RUN --tasks lambada --from_scratch
      the control: the run's shape and vocabulary with the weights that it
      began with

lm-evaluation-harness scores the model as transformers has it, in one process.
docs/scoring.md says how perplexity, wikitext103 and lambada are read. A row
that cannot be read is refused, by file and line.
Of a run the figures are also kept in RUN/scores.json, which launch/report.py
shows next to published ones.
exit codes: 0 scored, 1 failed, 2 refused before the weights were read."""

RULES = (
    ("--column", "+--text, --data", "it is a field of them"),
    ("--include_path", "+--tasks", "a task of it is named"),
)


def build_parser() -> ArgumentParser:
    parser = arguments.command(__doc__, EXAMPLES, RULES)
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a run, its checkpoints/step-NNNNNN, or a GPT-2 of transformers or Megatron",
    )
    add = parser.add_argument_group("on what").add_argument
    add(
        "--tasks",
        type=names,
        default=("perplexity",),
        metavar="NAMES",
        help="perplexity, wikitext103, lambada, or tasks of lm-eval, with commas (default: perplexity)",
    )
    text = (
        "text for perplexity instead of the recipe's held-out one: a file, a directory or a glob of JSON "
        "lines, parquet or plain text"
    )
    add("--text", metavar="PATH", help=text)
    add(
        "--variant",
        choices=("original", "openai"),
        help="of lambada: the authors' text, or OpenAI's (default: original)",
    )
    add(
        "--data",
        metavar="FILE",
        help="local text for wikitext103 or lambada instead of the hub's, of the same kinds",
    )
    add(
        "--column",
        metavar="NAME",
        help="field with the text (default: the one that is surely the text)",
    )
    add(
        "--include_path",
        metavar="DIR",
        help="directory with task files of your own, in lm-eval's form: their Python runs, so trust it",
    )
    add(
        "--window",
        type=arguments.whole(most=10**7),
        metavar="N",
        help="tokens that are read at once (default: those of a sample in its training, else its positions)",
    )
    add(
        "--stride",
        type=arguments.whole(most=10**7),
        metavar="N",
        help="tokens from one window to the next (default: wikitext103 32, else the window)",
    )
    add(
        "--limit",
        type=arguments.whole(),
        metavar="N",
        help="score only the first N documents or passages, of wikitext103 the first N lines",
    )
    add(
        "--from_scratch",
        action="store_true",
        help="take only shape and vocabulary of MODEL, and draw all weights by its seed: the control",
    )
    add = parser.add_argument_group("how to run it").add_argument
    add(
        "--batch",
        type=arguments.whole(most=10**5),
        default=8,
        metavar="N",
        help="windows of a forward pass (default: %(default)s)",
    )
    add(
        "--precision",
        choices=("fp32", "bf16", "fp16"),
        default="fp32",
        help="of weights and products (default: %(default)s); losses are of fp32",
    )
    add(
        "--tokenizer",
        metavar="DIR",
        help="directory of the model's tokenizer, where it is not next to the weights",
    )
    arguments.add_weights_arguments(add)
    add = parser.add_argument_group("where it is kept").add_argument
    add(
        "--out",
        metavar="FILE",
        help="also write the result to this .json; several results as a list",
    )
    return parser


def names(text: str) -> tuple[str, ...]:
    """Read names between commas, each once."""
    tasks = [name.strip() for name in text.split(",")]
    if not all(tasks):
        raise ArgumentTypeError(f"{text[:40]!r}: give names with commas between them")
    return tuple(dict.fromkeys(tasks))


def main() -> None:
    args = build_parser().parse_args()
    meeting = joining.meet(check_alone)
    job = meeting.all_or_none(lambda: checked(args))
    from launch.evaluation import scoring

    tasks = meeting.all_or_none(lambda: scoring.load(job))
    try:
        with ending.explain_out_of_memory(LESS_MEMORY):
            scoring.run(job, tasks)
    except ending.Failed as error:
        raise SystemExit(str(error)) from None


def check_alone() -> None:
    """Refuse several processes, and an environment without lm-eval. Raises ProblemsError."""
    rule = "one process scores, on all its GPUs if it needs them"
    problems = [*processes.several(rule)]
    if importlib.util.find_spec("lm_eval") is None:
        problems.append(
            Problem(
                "lm_eval",
                "lm-eval is not installed",
                "lm-evaluation-harness runs every task",
                INSTALL,
            )
        )
    if problems:
        raise ProblemsError(problems)


def checked(args: Namespace) -> ScoringJob:
    """Make the job from the flags; of the weights only headers are read. Raises ValueError."""
    from launch.evaluation import trained_model
    from launch.evaluation.scoring import ScoringJob

    processes.check_device()
    model = trained_model.open_model(
        args.model, args.tokenizer, refuse_bert, args.weights_args
    )
    window = args.window or model.recipe.sequence_length
    problems = [*unfit_tasks(args), *unfit_windows(args, model.recipe, window)]
    if problems:
        raise ProblemsError(problems)
    texts = {
        each: getattr(args, each) for each in ("text", "column", "limit", "variant")
    }
    texts |= {"file": args.data, "recipe": held_out_recipe(model)}
    out = new_output.new_file("--out", args.out, (".json",)) if args.out else None
    same = ("tasks", "include_path", "stride", "limit", "batch", "precision")
    plain = {name: getattr(args, name) for name in (*same, "from_scratch")}
    plain |= {"kept_in": kept_in(args, model.run), "out": out}
    return ScoringJob(args.model, model, texts=texts, window=window, **plain)


def refuse_bert(recipe: Recipe) -> None:
    if recipe.model.facts.masked:
        raise ProblemsError.of(
            "MODEL",
            f"is a {recipe.model.facts.title}",
            "these tasks are about the next token",
            "give a model that predicts it; the loss of masked tokens is that of the run's validations",
        )


def held_out_recipe(model: TrainedModel) -> Recipe:
    """Return the recipe of the model's text, with the vocabulary that the model has."""
    recipe = model.recipe
    if recipe.data.tokenizer.kind not in TRAINED:
        return recipe
    # training it on another text would change it
    place = model.vocabulary_at
    own = Tokenizer(kind="file", path=str(place)) if place else Tokenizer(kind="gpt2")
    data = recipe.data.model_copy(update={"tokenizer": own})
    return recipe.model_copy(update={"data": data})


def kept_in(args: Namespace, run: Path | None) -> Path | None:
    """Return the run to which scores are added. Raises ProblemsError if they cannot be."""
    from launch.evaluation.scores import SCORES, read_scores

    if run is None or args.from_scratch:
        return None
    read_scores(run)
    problem = place_problem(run)
    if problem and not args.out:
        raise ProblemsError.of(
            "--out",
            f"{run}: {SCORES} {problem[0]}",
            "scores are kept with their run",
            "add --out FILE.json, and only that is written",
        )
    return None if problem else run


def unfit_tasks(args: Namespace) -> Iterator[Problem]:
    """Yield every flag that the tasks do not read."""
    tasks = {*args.tasks}
    text = "give your own text with --text PATH"
    leave = "leave it out"
    windowed = args.text or "wikitext103" in tasks
    misplaced = (
        (
            "text",
            "perplexity" in tasks,
            "perplexity reads it",
            "add the task perplexity",
        ),
        ("variant", "lambada" in tasks, "only LAMBADA has variants", leave),
        (
            "data",
            len(tasks & {"wikitext103", "lambada"}) == 1,
            "it is the text of wikitext103 or lambada",
            f"name one of them, or {text}",
        ),
        ("stride", windowed, "other tasks are read once", f"{leave}, or {text}"),
    )
    for name, fits, rule, fix in misplaced:
        value = getattr(args, name)
        if value is not None and not fits:
            yield Problem(
                f"--{name}",
                f"--{name} {value} with --tasks {','.join(args.tasks)}",
                rule,
                fix,
            )
    folder = args.include_path
    if folder is not None and not Path(folder).is_dir():
        yield Problem(
            "--include_path",
            f"--include_path {folder}",
            f"no such directory (seen from {Path.cwd()})",
            "give one with task files",
        )


def unfit_windows(args: Namespace, recipe: Recipe, window: int) -> Iterator[Problem]:
    """Yield every window unfit for the model."""
    if window > recipe.positions:
        yield Problem(
            "--window",
            f"--window {window}",
            f"the model has {recipe.positions:,} positions",
            f"give {recipe.positions} or less",
        )
    if (args.stride or 0) > window:
        yield Problem(
            "--stride",
            f"--stride {args.stride} with a window of {window}",
            "tokens between two windows would be left out",
            f"give {window} or less",
        )
    held_out = "perplexity" in args.tasks and args.text is None
    if held_out and window != recipe.sequence_length:
        yield Problem(
            "--window",
            f"--window {window}",
            f"held-out samples have {recipe.sequence_length:,} tokens",
            "leave it out, or give --text PATH",
        )


if __name__ == "__main__":
    ends.run(main)
