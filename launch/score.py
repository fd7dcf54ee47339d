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

lm-evaluation-harness scores the model as transformers has it, in one process;
layers that the first GPU has no room for go to the next ones, and then to the
host. Of the names of tasks perplexity, wikitext103 and lambada are task files
of this project, the last two by the protocols of the published scores.
perplexity: without --text the samples that the run's validation read, and so
its loss to rounding (of a run in fp32 1e-6, of one in bf16, which validates
in bf16, a few 1e-5); with --text whole documents, each behind an
end-of-document token.
wikitext103: the test set is turned back into text; each window counts its
last --stride tokens only; the perplexity is exp(sum of losses / original
word-level tokens); the ratio of the two counts is shown.
lambada: a passage is right where every token of its last word is the
likeliest, given the ones before; --variant original is the authors' file in
lower case, openai what Radford et al. and Megatron-LM score.
A row that cannot be read, or a passage of one word, is left out, counted and
said.
Of a run the figures are also kept in RUN/scores.json, which launch/report.py
shows next to published ones.
exit codes: 0 scored, 1 failed, 2 refused before the weights were read."""


def build_parser() -> ArgumentParser:
    parser = arguments.command(__doc__, EXAMPLES)
    model = "a run, its checkpoints/step-NNNNNN, or a GPT-2 of transformers or Megatron"
    parser.add_argument("model", metavar="MODEL", help=model)
    add = parser.add_argument_group("on what").add_argument
    tasks = "perplexity, wikitext103, lambada, or tasks of lm-eval, with commas (default: perplexity)"
    add("--tasks", type=names, default=("perplexity",), metavar="NAMES", help=tasks)
    text = (
        "text for perplexity instead of the recipe's held-out one: a file, a directory or a glob of JSON "
        "lines, parquet or plain text"
    )
    add("--text", metavar="PATH", help=text)
    variant = "of lambada: the authors' text, or OpenAI's (default: original)"
    add("--variant", choices=("original", "openai"), help=variant)
    data = (
        "local text for wikitext103 or lambada instead of the hub's, of the same kinds"
    )
    add("--data", metavar="FILE", help=data)
    column = "field with the text (default: the one that is surely the text)"
    add("--column", metavar="NAME", help=column)
    include = "directory with task files of your own, in lm-eval's form: their Python runs, so trust it"
    add("--include_path", metavar="DIR", help=include)
    window = "tokens that are read at once (default: those of a sample in its training, else its positions)"
    add("--window", type=arguments.whole(most=10**7), metavar="N", help=window)
    stride = (
        "tokens from one window to the next (default: wikitext103 32, else the window)"
    )
    add("--stride", type=arguments.whole(most=10**7), metavar="N", help=stride)
    limit = (
        "score only the first N documents or passages, of wikitext103 the first N lines"
    )
    add("--limit", type=arguments.whole(), metavar="N", help=limit)
    scratch = "take only shape and vocabulary of MODEL, and draw all weights by its seed: the control"
    add("--from_scratch", action="store_true", help=scratch)
    add = parser.add_argument_group("how to run it").add_argument
    batch = "windows of a forward pass (default: %(default)s)"
    add("--batch", type=arguments.whole(most=10**5), default=8, metavar="N", help=batch)
    precision = "of weights and products (default: %(default)s); losses are of fp32"
    add("--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help=precision)
    tokenizer = (
        "directory of the model's tokenizer, where it is not next to the weights"
    )
    add("--tokenizer", metavar="DIR", help=tokenizer)
    arguments.add_weights_arguments(add)
    add = parser.add_argument_group("where it is kept").add_argument
    out = "also write the result to this .json; several results as a list"
    add("--out", metavar="FILE", help=out)
    return parser


def names(text: str) -> tuple[str, ...]:
    """Read names between commas, each once."""
    found = [name.strip() for name in text.split(",")]
    if not all(found):
        raise ArgumentTypeError(f"{text[:40]!r}: give names with commas between them")
    return tuple(dict.fromkeys(found))


def main() -> None:
    args = build_parser().parse_args()
    meeting = joining.meet(check_alone)
    job = meeting.settle(lambda: checked(args))
    from launch.evaluation import scoring

    tasks = meeting.settle(lambda: scoring.load(job))
    try:
        with ending.explain_out_of_memory(LESS_MEMORY):
            scoring.run(job, tasks)
    except ending.Failed as error:
        raise SystemExit(str(error)) from None


def check_alone() -> None:
    """Refuse several processes, and an environment without lm-eval. Raises ProblemsError."""
    ranks = processes.world_size()
    problems = []
    if ranks > 1:
        rule = "one process scores, on all its GPUs if it needs them"
        fix = "start it with python, or set WORLD_SIZE to 1"
        problems.append(Problem("WORLD_SIZE", f"{ranks} processes", rule, fix))
    if importlib.util.find_spec("lm_eval") is None:
        rule = "lm-evaluation-harness runs every task"
        problems.append(Problem("lm_eval", "lm-eval is not installed", rule, INSTALL))
    if problems:
        raise ProblemsError(problems)


def checked(args: Namespace) -> ScoringJob:
    """Make the job from the flags; of the weights only headers are read. Raises ValueError."""
    from launch.evaluation import trained_model
    from launch.evaluation.protocols import PERPLEXITY, PUBLISHED
    from launch.evaluation.scoring import ScoringJob

    processes.check_device()
    model = trained_model.open_model(
        args.model, args.tokenizer, refuse_bert, args.weights_args
    )
    window = args.window or model.recipe.sequence_length
    problems = [*unfit_tasks(args), *unfit_windows(args, model.recipe, window)]
    if problems:
        raise ProblemsError(problems)
    recipe = held_out_recipe(model)
    column = dict(column=args.column, limit=args.limit)
    published = dict(column, file=args.data, variant=args.variant)
    texts = dict.fromkeys(PUBLISHED, published)
    texts[PERPLEXITY] = dict(column, text=args.text, recipe=recipe)
    out = new_output.new_file("--out", args.out, (".json",)) if args.out else None
    check_place(args, model.run)
    plain = {
        name: getattr(args, name)
        for name in (
            "tasks",
            "include_path",
            "stride",
            "limit",
            "batch",
            "precision",
            "from_scratch",
        )
    }
    return ScoringJob(args.model, model, texts=texts, window=window, out=out, **plain)


def refuse_bert(recipe: Recipe) -> None:
    if recipe.model.facts.masked:
        came = f"is a {recipe.model.family.upper()}"
        rule = "these tasks are about the next token"
        raise ProblemsError.of("MODEL", came, rule, "give a GPT-2")


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


def check_place(args: Namespace, run: Path | None) -> None:
    """Refuse a run whose scores cannot be added to, before the hours of scoring. Raises ProblemsError."""
    from launch.evaluation.scores import SCORES, read_scores

    if run is None or args.from_scratch:
        return
    read_scores(run)
    if not args.out and (problem := place_problem(run)):
        came = f"{run}: {SCORES} {problem[0]}"
        rule = "scores are kept with their run"
        fix = "add --out FILE.json, and only that is written"
        raise ProblemsError.of("--out", came, rule, fix)


def unfit_tasks(args: Namespace) -> Iterator[Problem]:
    """Yield every flag that the tasks do not read."""
    from launch.evaluation.protocols import PERPLEXITY, PUBLISHED, TASKS

    tasks = {*args.tasks}
    text = "give your own text with --text PATH"
    leave = "leave it out"
    misplaced = (
        ("text", PERPLEXITY in tasks, "perplexity reads it", "add the task perplexity"),
        ("variant", "lambada" in tasks, "only LAMBADA has variants", leave),
        (
            "data",
            len(tasks & {*PUBLISHED}) == 1,
            f"it is the text of {' or '.join(PUBLISHED)}",
            f"name one of them, or {text}",
        ),
        ("column", args.text or args.data, "it is a field of --text or --data", leave),
        (
            "stride",
            args.text or "wikitext103" in tasks,
            "other tasks and held-out samples are read once",
            f"{leave}, or {text}",
        ),
        (
            "include_path",
            tasks - {*TASKS},
            "none of them is of its files",
            "name a task of it",
        ),
    )
    for name, fits, rule, fix in misplaced:
        value = getattr(args, name)
        if value is not None and not fits:
            came = f"--{name} {value} with --tasks {','.join(args.tasks)}"
            yield Problem(f"--{name}", came, rule, fix)
    folder = args.include_path
    if folder is not None and not Path(folder).is_dir():
        came = f"--include_path {folder}"
        rule = f"no such directory (seen from {Path.cwd()})"
        yield Problem("--include_path", came, rule, "give one with task files")


def unfit_windows(args: Namespace, recipe: Recipe, window: int) -> Iterator[Problem]:
    """Yield every window unfit for the model."""
    if window > recipe.positions:
        rule = f"the model has {recipe.positions:,} positions"
        fix = f"give {recipe.positions} or less"
        yield Problem("--window", f"--window {window}", rule, fix)
    if (args.stride or 0) > window:
        came = f"--stride {args.stride} with a window of {window}"
        rule = "tokens between two windows would be left out"
        yield Problem("--stride", came, rule, f"give {window} or less")
    held_out = "perplexity" in args.tasks and args.text is None
    if held_out and window != recipe.sequence_length:
        rule = f"held-out samples have {recipe.sequence_length:,} tokens"
        fix = "leave it out, or give --text PATH"
        yield Problem("--window", f"--window {window}", rule, fix)


if __name__ == "__main__":
    ends.run(main)
