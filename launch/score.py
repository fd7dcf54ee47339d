"""Score a trained model: the perplexity of a text, WikiText-103, LAMBADA, and every task of lm-eval.

python launch/score.py runs/default-sotu-zero3_offload
"""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from launch.console import arguments, ends, new_output
from launch.console.arguments import place_problem
from launch.machine import description
from launch.ranks import joining, processes
from recipes.key_paths import key_of
from recipes.problems import Problem, ProblemsError

if TYPE_CHECKING:
    from launch.evaluation.scoring_plan import ScoringJob

# Sections of a recipe decided by other flags, and sections without effect on scores.
BY_FLAGS = {"precision": "--precision", "batch": "--batch"}
FOR_TRAINING = (
    "dropout",
    "activation_checkpointing",
    "optimizer",
    "schedule",
    "steps",
    "init_std",
    "ds_config",
)

LESS_MEMORY = "lower --batch, take --precision bf16, or share the model out (--set parallel.tp=2 on two GPUs)"

EXAMPLES = """\
examples:
  python launch/score.py runs/default-sotu-zero3_offload
      the held-out text of the run's own recipe: the loss that its last
      validation had
  python launch/score.py RUN --set data.source=jsonl \\
      --set data.name=other.jsonl
      the held-out part of another text; every field of the recipe's data can
      be set
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
  deepspeed --num_gpus 8 launch/score.py RUN --tasks wikitext103 \\
      --set parallel.tp=8 --precision bf16
      a model too large for one GPU, whatever layout trained it; deepspeed and
      srun start it as well

Every task but perplexity needs lm-evaluation-harness: pip install -e
.[evaluate]. Of its names wikitext103 and lambada are task files of this
project, by the protocols of the published scores.
wikitext103: the test set is turned back into text; each window counts its
last --stride tokens only; the perplexity is exp(sum of losses / original
word-level tokens); the ratio of the two counts is shown.
lambada: a passage is right where every token of its last word is the
likeliest, given the ones before; --variant original is the authors' file in
lower case, openai what Radford et al. and Megatron-LM score.
Losses are added exactly (math.fsum of float64) and padding does not depend on
the batch: layout and batch change figures by the rounding of products only,
1e-6 of a perplexity in fp32, which is the default for that.
A row that cannot be read, or a passage of one word, is left out, counted and
said.
Of a run the figures are also kept in RUN/scores.json, which launch/report.py
shows next to published ones.
exit codes: 0 scored, 1 failed, 2 refused before anything was started, 4 a
rank hung (run.hang_after)."""

TOKENIZER = "--set data.tokenizer, --set data.tokenizer.kind, --set data.tokenizer.path"
RULES = (("--tokenizer", TOKENIZER, "both decide it"),)


def build_parser() -> ArgumentParser:
    parser = arguments.command(__doc__, EXAMPLES, RULES)
    model = "a run, its checkpoints/step-NNNNNN, or a GPT-2 of transformers or Megatron"
    parser.add_argument("model", metavar="MODEL", help=model)
    add = parser.add_argument_group("on what").add_argument
    tasks = "perplexity, wikitext103, lambada, or tasks of lm-eval, with commas (default: perplexity)"
    add("--tasks", type=names(), default=("perplexity",), metavar="NAMES", help=tasks)
    text = (
        "text for perplexity instead of the recipe's held-out one: a file, a directory or a glob of JSON "
        "lines, parquet or plain text"
    )
    add("--text", metavar="PATH", help=text)
    variant = "of lambada: the authors' text, or OpenAI's (default: original)"
    add("--variant", choices=("original", "openai"), help=variant)
    data = "a local file for wikitext103 or lambada instead of the hub's: .jsonl, .parquet or text"
    add("--data", metavar="FILE", help=data)
    column = (
        "field with the text (default: text; of --text the one that is surely the text)"
    )
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
    setting = "a field of the recipe, e.g. --set parallel.tp=2 --set data.name=FILE; repeatable"
    add("--set", action="append", default=[], metavar="KEY=VALUE", help=setting)
    batch = (
        "windows of a forward pass, of each data-parallel rank (default: %(default)s)"
    )
    add("--batch", type=arguments.whole(most=10**5), default=8, metavar="N", help=batch)
    precision = (
        "of weights and products (default: %(default)s); losses are summed in float64"
    )
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


def names() -> Callable[[str], tuple[str, ...]]:
    """Make a reader of names between commas, each once."""

    def read(text: str) -> tuple[str, ...]:
        found = [name.strip() for name in text.split(",")]
        if not all(found):
            raise ArgumentTypeError(
                f"{text[:40]!r}: give names with commas between them"
            )
        return tuple(dict.fromkeys(found))

    return read


def main() -> None:
    args = build_parser().parse_args()
    meeting = joining.meet()
    job, out = meeting.settle(lambda: checked(args))
    # A run still in training may have saved a newer checkpoint meanwhile.
    weights = Path(meeting.from_rank_0(str(job.model.weights)))
    job = replace(job, model=replace(job.model, weights=weights))
    with joining.joined(meeting, job.plan.layout.tp, out_of_memory_advice=LESS_MEMORY):
        from launch.evaluation.scoring import run  # loads torch and deepspeed

        run(job, out, meeting)


def checked(args: Namespace) -> tuple[ScoringJob, Path | None]:
    """Make the job from the flags, and check rank 0's file for the result. Raises ValueError."""
    from launch.evaluation.scores import SCORES, read_scores
    from launch.evaluation.scoring_plan import ScoringWishes, checked_job

    check_settings(args)
    flags = {
        name: value
        for name, value in vars(args).items()
        if name in ScoringWishes.__dataclass_fields__
    }
    job = checked_job(
        ScoringWishes(**flags, settings=args.set),
        processes.world_size(),
        description.detect_machine(),
    )
    out = (
        new_output.new_file("--out", args.out, (".json",))
        if args.out and processes.rank() == 0
        else None
    )
    if job.model.run is not None and not args.from_scratch:
        # What cannot be added to is said before the hours of scoring.
        read_scores(job.model.run)
        if not args.out and (problem := place_problem(job.model.run)):
            came = f"{job.model.run}: {SCORES} {problem[0]}"
            rule = "scores are kept with their run"
            fix = "add --out FILE.json, and only that is written"
            raise ProblemsError.of("--out", came, rule, fix)
    return job, out


def check_settings(args: Namespace) -> None:
    """Refuse --set of keys decided by flags or weights, or used in training only. Raises ProblemsError."""
    problems = []
    for setting in args.set:
        key = key_of(setting)
        section = key.partition(".")[0]
        flag = BY_FLAGS.get(section)
        came = f"--set {setting}"
        if flag:
            problems.append(Problem(key, came, f"{flag} decides it", f"give {flag}"))
        elif section in FOR_TRAINING:
            problems.append(
                Problem(key, came, "nothing is trained here", "leave it out")
            )
        elif section == "parallel" and key != "parallel.tp":
            rule = (
                "every checkpoint is scored on one process or on tensor-parallel ranks"
            )
            problems.append(
                Problem(key, came, rule, "set parallel.tp, or leave it out")
            )
        elif section == "data" and (
            args.text is not None or "perplexity" not in args.tasks
        ):
            decides = "--tasks" if args.text is None else "--text"
            problems.append(
                Problem(
                    key,
                    came,
                    f"{decides} decides what is read",
                    "leave one of the two out",
                )
            )
        elif section == "model" and key != "model.vocab_divisible_by":
            problems.append(Problem(key, came, "the weights decide it", "leave it out"))
    if problems:
        raise ProblemsError(problems)


if __name__ == "__main__":
    ends.run(main)
