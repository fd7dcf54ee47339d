"""Have a trained model continue prompts, or fill in their masks.

python launch/generate.py runs/default-sotu-zero3_offload --prompt "My fellow citizens"
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from launch.console import arguments, ends, new_output, terminal
from launch.ranks import ending, joining, processes
from recipes.problems import Problem, ProblemsError, counted

if TYPE_CHECKING:
    from launch.evaluation.trained_model import TrainedModel
    from launch.evaluation.writing import Prompt, Settings, WrittenText
    from launch.ranks.meeting import Meeting

DTYPES = ("float32", "bfloat16", "float16")
TOP_K = 40
# Flags that a BERT takes, too.
OF_ALL_MODELS = ("model", "prompt", "file", "tokenizer", "dtype", "out", "local_rank")
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # at the end of a text that stops inside a character

EXAMPLES = """\
examples:
  python launch/generate.py runs/default-sotu-zero3_offload \\
      --prompt "My fellow citizens"
      the newest complete checkpoint of a run goes on for 80 tokens, in the
      terminal as it writes
  python launch/generate.py exported --file prompts.jsonl --samples 4 \\
      --top_p 0.9 --batch 32 --out texts.jsonl
      a directory that transformers saved; four samples of the "prompt" of
      each line, one JSON object a line
  torchrun \\
      --nproc_per_node 2 launch/generate.py runs/big/checkpoints/step-000300 \\
      --greedy --prompt The
      that checkpoint, each weight cut over two processes (tensor
      parallelism), the most likely tokens
  python launch/generate.py runs/bert-sotu-zero1 \\
      --prompt "The [MASK] of the people."
      a BERT fills in its masks with the most likely tokens, the surest first

Processes share out the weights, not the prompts: all of them work on every
text. Of a model that fits one GPU, a file is written faster by several
commands of one process, each with a part of it.

A text ends after --tokens, at the end-of-text token, or at the model's last
position, and a line says how many did which. What is drawn depends on --seed,
the prompt and the number of the sample, and not on the batch, the file or the
number of processes (to rounding). With transformers' temperature, top_k and
top_p it has transformers' distribution, and with --greedy its texts.
exit codes: 0 written, 1 failed, 2 refused before anything is loaded."""

RULES = (
    ("--prompt", "--file", "prompts come from one of them"),
    ("--greedy", "--temperature, --top_k, --top_p, --seed", "it takes the likeliest token"),
)


def build_parser() -> argparse.ArgumentParser:
    parser = arguments.command(str(__doc__).split("\n\n")[0], EXAMPLES, RULES)
    model = (
        "a run (its newest complete checkpoint), one of its checkpoints, or a GPT-2 or BERT of transformers "
        "or Megatron"
    )
    parser.add_argument("model", metavar="MODEL", help=model)
    add = parser.add_argument_group("what to continue").add_argument
    add("--prompt", action="append", metavar="TEXT", help="a prompt; repeatable")
    file = 'a prompt a line; in a file of JSON lines (.jsonl) the "prompt" of each'
    add("--file", metavar="FILE", help=file)
    vocabulary = "vocabulary of the model, where there is none next to its weights"
    add("--tokenizer", metavar="DIR", help=vocabulary)
    add = parser.add_argument_group("how").add_argument
    whole, above, share = arguments.whole(), arguments.number(0), arguments.number(0, 1)
    tokens = "at most N after each prompt (default: %(default)s)"
    add("--tokens", type=whole, default=80, metavar="N", help=tokens)
    add("--samples", type=whole, default=1, metavar="N", help="of each prompt (default: %(default)s)")
    add("--greedy", action="store_true", help="take the most likely token, and draw nothing")
    temperature = "below 1 the likely get likelier (default: %(default)s)"
    add("--temperature", type=above, default=0.8, metavar="T", help=temperature)
    top_k = f"draw from the K most likely tokens; 0: from all (default: {TOP_K} without --top_p)"
    add("--top_k", type=arguments.whole(0), metavar="K", help=top_k)
    top_p = "draw from the most likely tokens that sum up to P (default: 1, which is all)"
    add("--top_p", type=share, metavar="P", help=top_p)
    seed, batch = (
        "of what is drawn (default: %(default)s)",
        "samples written at a time (default: %(default)s)",
    )
    add("--seed", type=arguments.whole(0, 10**18 - 1), default=0, metavar="N", help=seed)
    add("--batch", type=whole, default=8, metavar="N", help=batch)
    add("--dtype", choices=DTYPES, default="float32", help="to compute in (default: %(default)s)")
    anew = "compute all earlier tokens again for each one, to see what keeping keys and values saves"
    add("--no_cache", action="store_true", help=anew)
    out = "write JSON lines instead of text: prompt, text, new, tokens, sample, ended"
    parser.add_argument("--out", metavar="FILE.jsonl", help=out)
    return parser


@dataclass(frozen=True)
class Job:
    """A checked generation job. `out`: None writes to the terminal."""

    model: TrainedModel
    prompts: Sequence[Prompt]
    settings: Settings
    dtype: str
    out: Path | None


def main() -> None:
    args = build_parser().parse_args()
    meeting = joining.meet(lambda: check_flags(args))
    job = meeting.settle(lambda: checked_job(args))
    ranks, advice = processes.world_size(), "start more processes, or take --dtype bfloat16, or lower --batch"
    if ranks == 1:
        try:
            with ending.explain_out_of_memory(advice):
                run(job, meeting)
        except ending.Failed as error:
            raise SystemExit(str(error)) from None
        return
    # A run still in training may have saved a newer checkpoint meanwhile.
    weights = Path(meeting.from_rank_0(str(job.model.weights)))
    job = replace(job, model=replace(job.model, weights=weights))
    with joining.joined(meeting, ranks, out_of_memory_advice=advice):
        run(job, meeting)


def check_flags(args: argparse.Namespace) -> None:
    """Refuse contradictory or missing flags. Raises ProblemsError."""
    problems = []
    if not (args.prompt or args.file):
        rule, fix = "prompts come from one of them", "add --prompt TEXT"
        problems.append(Problem("--prompt", "neither --prompt nor --file", rule, fix))
    if args.greedy and args.samples > 1:
        came, rule = f"--greedy with --samples {args.samples}", "all of them would be the same"
        problems.append(Problem("--samples", came, rule, "leave one of the two out"))
    if problems:
        raise ProblemsError(problems)


def checked_job(args: argparse.Namespace) -> Job:
    """Make the job from the flags; of the weights only headers are read. Raises ProblemsError."""
    from launch.evaluation import trained_model, writing

    processes.check_device()
    out = new_output.new_file("--out", args.out, (".jsonl",)) if args.out and processes.rank() == 0 else None
    given = writing.read(args.file) if args.file else writing.typed(args.prompt)
    model = trained_model.open_model(args.model, args.tokenizer)
    problems = list(unfit(args, model))
    encoded: list[Prompt] = []
    try:
        encoded = writing.encode(given, model)
    except ProblemsError as error:
        problems += error.problems
    if problems:
        raise ProblemsError(problems)
    return Job(model, encoded, settings_of(args), args.dtype, out)


def unfit(args: argparse.Namespace, model: TrainedModel) -> Iterator[Problem]:
    """Yield problems of flags useless for a BERT, and of process counts that do not divide the heads."""
    typed = {*args.given, *(name for name, value in vars(args).items() if value is True)}
    useless = [f"--{name}" for name in vars(args) if name in typed and name not in OF_ALL_MODELS]
    family, heads, ranks = model.recipe.model.family, model.recipe.model.heads, processes.world_size()
    if useless and not model.continues:
        came = f"{', '.join(useless)} with a {family.upper()}"
        yield Problem(useless[0], came, "it fills each mask with the likeliest token", "leave it out")
    if heads % ranks:
        fits = [str(count) for count in range(1, heads + 1) if heads % count == 0]
        came, rule = f"{ranks} processes for {heads} heads (model.heads)", "each gets as many whole heads"
        yield Problem("WORLD_SIZE", came, rule, f"start as many as divide them: {', '.join(fits)}")


def settings_of(args: argparse.Namespace) -> Settings:
    from launch.evaluation.writing import Settings
    from modeling.generation import Sampling

    sampling = None
    if not args.greedy:
        usual = TOP_K if args.top_p is None else None
        top_k = usual if args.top_k is None else args.top_k or None
        sampling = Sampling(args.temperature, top_k, args.top_p or 1.0)
    return Settings(args.tokens, args.samples, sampling, args.seed, args.batch, not args.no_cache)


def run(job: Job, meeting: Meeting) -> None:
    """Load the model and write the texts. Collective; only rank 0 prints."""
    from deepspeed.accelerator import get_accelerator

    from launch.console.progress import bar
    from launch.evaluation import writing

    first, model = processes.rank() == 0, load_model(job, meeting)
    model.to(get_accelerator().current_device_name())
    total = len(job.prompts) * (job.settings.samples if job.model.continues else 1)
    stream = Stream(job.model.tokenizer) if first and total == 1 and not job.out else None
    began, done = time.perf_counter(), list[writing.WrittenText]()
    with job.out.open("x", encoding="utf-8") if job.out else nullcontext() as file:
        # Texts in a terminal show the progress themselves.
        hidden = not first or stream or (job.out is None and sys.stdout.isatty())
        with nullcontext() if hidden else bar(sys.stderr, total=total, unit="text") as shown:
            heard = stream.hear if stream else lambda tokens: None
            for written in finite(writing.write(model, job.model, job.prompts, job.settings, heard)):
                done.append(replace(written, prompt="", text="", new=""))
                if first:
                    show(written, file, stream)
                if shown is not None:
                    shown.update()
    if first:
        terminal.say(summary(done, time.perf_counter() - began, job), sys.stderr)


def load_model(job: Job, meeting: Meeting) -> Any:
    """Load the model, split over all processes. Collective."""
    import torch

    from launch.weights import foreign_weights
    from modeling.families import whole_model
    from modeling.parallel.process_grid import ProcessGrid

    world, first = processes.world_size(), processes.rank() == 0
    if first and world > 1 and len(job.prompts) > 1:
        terminal.say(f"{counted(world, 'process')} share out the weights, not the prompts", sys.stderr)
    for line in job.model.said() if first else ():
        terminal.say(line, sys.stderr)
    weights = meeting.settle(lambda: foreign_weights.read(job.model.weights, job.model.recipe))
    group = ProcessGrid(world, 1, 1, processes.TIMEOUT).tensor_group if world > 1 else None
    return whole_model(job.model.recipe, weights, group, getattr(torch, job.dtype))


def finite(texts: Iterator[WrittenText]) -> Iterator[WrittenText]:
    """Yield the texts. Raises Failed where the logits of the next one are not finite."""
    try:
        yield from texts
    except FloatingPointError as error:
        fix = "give other weights, or --dtype float32, which has more room"
        raise ending.Failed(f"{error}: its weights are too large for that; {fix}") from None


class Stream:
    """A growing text in the terminal, in whole characters."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self.shown = ""

    def hear(self, tokens: Sequence[int]) -> None:
        """Show the text of all tokens so far."""
        self.show(self._tokenizer.decode(tokens).rstrip(UNFINISHED))

    def show(self, text: str) -> None:
        """Print the new part of the text. If the tokenizer changed earlier words, print nothing yet."""
        if text.startswith(self.shown):
            print(text[len(self.shown) :], end="", flush=True)
            self.shown = text


def show(written: WrittenText, file: IO[str] | None, stream: Stream | None) -> None:
    """Write one text: to the file, to the end of its stream, or under a heading with its prompt number."""
    if file is not None:
        file.write(json.dumps(written.record(), ensure_ascii=False) + "\n")
        file.flush()
    elif stream is not None:
        stream.show(written.text)
        print("" if stream.shown == written.text else f"\n{written.text}", flush=True)
    else:
        how = "" if written.ended is None else f", sample {written.sample + 1}, ended by {written.ended}"
        print(f"--- prompt {written.number + 1}{how}\n{written.text}", flush=True)


def summary(done: Sequence[WrittenText], seconds: float, job: Job) -> str:
    """Return a line with the numbers of texts and tokens, the speed, and the reasons of text ends."""
    tokens = sum(written.tokens for written in done)
    said = f"{len(done):,} texts, {tokens:,} tokens in {seconds:.2f} s: {tokens / seconds:,.0f} tokens/s"
    if not job.model.continues:
        return said
    positions = f"at the model's {job.model.recipe.positions:,} positions"
    reasons = {"length": "after --tokens", "end": "at the end-of-text token", "positions": positions}
    counts = {why: sum(written.ended == ended for written in done) for ended, why in reasons.items()}
    return f"{said}; ended " + ", ".join(f"{count:,} {why}" for why, count in counts.items() if count)


if __name__ == "__main__":
    ends.run(main)
