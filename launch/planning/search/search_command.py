"""`launch/plan.py search`: the fastest layout of a recipe on given nodes, as a ds_config and flags."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from data.durable_files import write_atomically
from ds_configs import jsonfile
from ds_configs.plan import Plan
from ds_configs.resolver import resolve
from launch.console import arguments, launch_lines, output, terminal
from launch.planning.prediction import forecast_text, hardware, workload
from launch.planning.prediction.forecast import forecast
from launch.planning.prediction.software import OURS, SYSTEMS
from launch.planning.prediction.workload import Workload
from launch.planning.search import candidates, layout_search, search_text, shapes, ways
from launch.planning.search.candidates import Question
from launch.planning.search.layout_search import Answer, Tried
from recipes import catalog
from recipes.problems import Problem, ProblemsError
from recipes.schema import Recipe

ABOUT = """\
Go through tensor x pipeline x data parallelism, ZeRO stage, offload,
micro-batch and recomputation of a recipe on all GPUs of given nodes. Print
the fastest layouts that fit, with memory, time and where it goes, and what
every other choice would cost or why it cannot be had. With --out, write the
first one as a DeepSpeed JSON."""
EXAMPLES = """\
examples:
  python launch/plan.py search --model 13b --hardware v100-32x8 --nodes 8 \\
      --out jobs/13b
      a GPT of 13 billion parameters on 64 V100; writes
      jobs/13b/ds_config.json and prints the launch line
  python launch/plan.py search --recipe openwebtext/gpt2-124m \\
      --hardware v100-32-pciex8 --set precision=fp16
      a recipe with its own batch, on one node
  python launch/plan.py search --model 175b --hardware a100-80x8 --nodes 128 \\
      --set parallel.tp=8
      a degree that stays; so do parallel.pp, parallel.dp, batch.micro,
      batch.accumulation and activation_checkpointing
  python launch/plan.py search --model 175b --hardware a100-80x8 --nodes 128 \\
      --software megatron
      what another system's interleaving and sequence parallelism would bring;
      nothing is written
  python launch/plan.py search --model 1.3b --hardware a100-40x8 \\
      --ds_config my.json --out jobs/1.3b
      your own JSON, with the winner's stage, offload, degrees and batch in it

exit codes: 0 shown and written, 1 nothing fits, 2 refused."""
OWN = "openwebtext/gpt2-124m"  # the recipe that --model changes where no other is named
# What a search decides, as overrides that leave a recipe's own undecided.
OPEN = tuple(
    f"{key}=null"
    for key in ("parallel.tp", "parallel.pp", "parallel.dp", "batch.micro", "batch.accumulation")
)
RECOMPUTATION = "activation_checkpointing"
JSON_NAME = "ds_config.json"


@dataclass(frozen=True)
class Asked:
    """What the flags say.

    Attributes:
        overrides: `--model`, `--set` and `--global-batch`, as overrides of the recipe.
    """

    name: str
    overrides: list[str]
    tiny: bool
    steps: int | None

    def load(self, overrides: Sequence[str]) -> Recipe:
        return catalog.load(self.name, overrides, tiny=self.tiny, steps=self.steps)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand `search` to the subparsers of launch/plan.py."""
    parser = commands.add_parser(
        "search", help="the fastest layout on given nodes, as a ds_config and flags", description=ABOUT,
        epilog=EXAMPLES, formatter_class=arguments.HELP, allow_abbrev=False,
    )  # fmt: skip
    arguments.add_recipe_arguments(parser)
    add = parser.add_argument_group("which model, on what").add_argument
    sizes = ", ".join(shapes.NAMES)
    model = f"a GPT-3 of that size in place of the recipe's model (default recipe: {OWN}): {sizes}"
    add("--model", choices=shapes.NAMES, metavar="SIZE", help=model)
    batch = "samples per optimizer step (default: the recipe's)"
    add("--global-batch", type=arguments.whole(1, 10**7), metavar="N", help=batch)
    base = "DeepSpeed JSON whose stage and offload are replaced (default: those of ds_configs/)"
    add("--ds_config", metavar="FILE", help=base)
    node = f"{', '.join(hardware.names())}, this, or FILE.yaml:NODE (default: the recipe's)"
    add("--hardware", metavar="NODE", help=node)
    add("--nodes", type=arguments.whole(1, 10**5), default=1, metavar="N", help="of them (default: 1)")
    systems = f"another system, for study: {', '.join(candidates.STUDIED)}"
    add("--software", choices=candidates.STUDIED, metavar="NAME", help=systems)
    add = parser.add_argument_group("what comes out").add_argument
    top = "layouts that are shown (default: %(default)s)"
    add("--top", type=arguments.whole(1, 1000), default=8, metavar="N", help=top)
    add("--out", metavar="DIR", type=Path, help=f"write {JSON_NAME} there; nothing is overwritten")
    add("--json", action="store_true", help="every number, in bytes and seconds")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0: shown, 1: nothing fits. Raises ProblemsError."""
    _check_out(args)
    asked, question = question_of(args)
    answer = layout_search.search(question)
    winner = answer.winner
    plan = None
    if winner and question.software is OURS:
        plan = resolved(asked, question, winner)
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            document = ways.config(winner.way, question.base, winner.work.layout)
            write_atomically(args.out / JSON_NAME, ways.text(document))
    if args.json:
        print(json.dumps(_as_json(answer, asked, args, plan), indent=2))
        return 0 if winner else 1
    width = terminal.columns()
    name = catalog.full_name(asked.name) + "-tiny" * asked.tiny
    name += f" --model {args.model}" if args.model else ""
    print(search_text.describe(answer, name=name, most=args.top, width=width))
    if winner and plan:
        print("\n" + "\n".join(_how(answer, asked, args, plan, width)))
    return 0 if winner else 1


def _check_out(args: argparse.Namespace) -> None:
    """Before anything is predicted: a place for the JSON, and our engine to run it."""
    if args.out and args.software:
        came, rule = f"--out with --software {args.software}", "only what this engine runs is written"
        raise ProblemsError([Problem("--out", came, rule, "leave one of the two out")])
    if args.out and output.directory("--out", args.out).exists():
        output.new_file("--out", args.out / JSON_NAME)


def question_of(args: argparse.Namespace) -> tuple[Asked, Question]:
    """What is looked for. Raises ProblemsError."""
    name = OWN if args.model and args.recipe == catalog.DEFAULT_RECIPE else args.recipe
    overrides: list[str] = list(args.set)
    node = hardware.node_for(catalog.load(name), args.hardware)
    if args.model:
        overrides = [*shapes.settings(args.model, candidates.half_precision(node)), *overrides]
    if args.global_batch:
        overrides.append(f"batch.global={args.global_batch}")
    asked = Asked(name, overrides, args.tiny, args.steps)
    recipe = asked.load([*OPEN, *overrides])
    pinned = any(text.partition("=")[0].strip() == RECOMPUTATION for text in overrides)
    base = jsonfile.read(jsonfile.find(args.ds_config)) if args.ds_config else None
    software = SYSTEMS[args.software] if args.software else OURS
    return asked, Question(recipe, node, args.nodes, pinned, base, software)


def settings(asked: Asked, winner: Tried) -> list[str]:
    """The overrides that make of the recipe what was predicted."""
    own, layout = asked.load([]), winner.work.layout
    decided: dict[str, Any] = {
        "parallel.tp": layout.tp, "parallel.pp": layout.pp, "parallel.dp": layout.dp,
        "batch.micro": layout.micro, "batch.accumulation": layout.accumulation,
        "parallel.sequence": winner.work.sequence_parallel,
        RECOMPUTATION: _recomputation(winner.work),
    }  # fmt: skip
    follow = {"parallel.dp", "batch.accumulation"}  # from the rest, where the recipe leaves them open
    sets = {text.partition("=")[0].strip(): text for text in asked.overrides}  # the last of each key holds
    for key, value in decided.items():
        sets.pop(key, None)
        stated = attrgetter(key)(own)
        if stated != value and not (stated is None and key in follow):
            sets[key] = f"{key}={str(value).lower()}"
    return list(sets.values())


def _recomputation(work: Workload) -> str | int:
    """As a recipe says it."""
    if work.selective:
        return "selective"
    return {0: "none", 1: "full"}.get(work.recomputed, work.recomputed)


def resolved(asked: Asked, question: Question, winner: Tried) -> Plan:
    """The winner as it would be launched. Raises ConfigError."""
    recipe = asked.load(settings(asked, winner))
    with tempfile.TemporaryDirectory() as folder:
        document = ways.config(winner.way, question.base, winner.work.layout)
        path = ways.written(document, Path(folder) / JSON_NAME)
        return resolve(recipe, path, question.ranks, question.node.machine)


def launch_line(answer: Answer, asked: Asked, out: Path | None) -> str | None:
    """The line that starts the winner; None: its JSON is no file yet."""
    winner, question = answer.winner, answer.question
    assert winner is not None, "nothing fits"
    file = str(out / JSON_NAME) if out else winner.way.file
    if out is None and (question.base or winner.way.offload):
        return None
    launcher = launch_lines.deepspeed(question.nodes, question.node.gpus)
    words = launch_lines.arguments(asked.name, file, settings(asked, winner))
    words += ["--tiny"] * asked.tiny + (["--steps", str(asked.steps)] if asked.steps else [])
    return f"{launcher} {launch_lines.SCRIPT} {launch_lines.quoted(words)}"


def _how(answer: Answer, asked: Asked, args: argparse.Namespace, plan: Plan, width: int | None) -> list[str]:
    """How the first layout is launched, and what its user should know."""
    winner = answer.winner
    assert winner is not None, "nothing fits"
    lines = [f"to launch layout 1: {search_text.layout_words(winner)}"]
    if line := launch_line(answer, asked, args.out):
        lines.append(terminal.command("  " + line, width))
    else:
        sets = " ".join(f"--set {text}" for text in settings(asked, winner))
        lines += [
            terminal.command("  " + sets, width),
            f"  --out DIR writes its {JSON_NAME}, and shows the line",
        ]
    if args.out:
        lines.append(terminal.wrapped(f"  wrote {args.out / JSON_NAME}", width))
    remarks = forecast(workload.of_plan(plan), answer.question.node).remarks
    told = [
        forecast_text.remark_text(each)
        for each in remarks
        if each.kind not in ("larger batch", "recomputation")
    ]
    told += [str(notice) for notice in plan.notices]
    return lines + [terminal.wrapped(f"  ! {text}", width, hang=4) for text in told]


def _as_json(answer: Answer, asked: Asked, args: argparse.Namespace, plan: Plan | None) -> dict[str, Any]:
    found = search_text.as_json(answer, args.top)
    found["recipe"] = catalog.full_name(asked.name)
    if answer.winner and plan:
        layout = answer.winner.work.layout
        found["settings"] = settings(asked, answer.winner)
        found["ds_config"] = ways.config(answer.winner.way, answer.question.base, layout)
        found["launch"] = launch_line(answer, asked, args.out)
    return found
