"""Look into the checkpoints of a run, or make a run of one of DeepSpeed's.

python launch/checkpoint.py show runs/default-sotu-zero3_offload
python launch/checkpoint.py verify runs/default-sotu-zero3_offload
python launch/checkpoint.py adopt trainer/checkpoint-500 --out runs/mine
"""

from __future__ import annotations

import argparse

from launch.console import arguments, ends, quiet, terminal
from recipes.files import path_of

EXAMPLES = """\
examples:
  python launch/checkpoint.py show runs/default-sotu-zero3_offload
      every checkpoint of the run: step, size, the layout that saved it,
      whether its files are there
  python launch/checkpoint.py show runs/default-sotu-zero3_offload --step 200
      one of them, with its tensors
  python launch/checkpoint.py verify runs/default-sotu-zero3_offload
      read every byte: checksums, tensors and shapes of the recipe's model,
      NaN and infinity
  python launch/checkpoint.py adopt trainer/checkpoint-500 --out runs/mine \\
      --text my.jsonl --data_from first
      make a run of a DeepSpeed run, for any layout to go on with; says what
      the files leave open

RUN is a run directory, its checkpoints/, or one step-NNNNNN of them. No GPU
is needed, and the memory of one tensor. Any layout reads any checkpoint:
`pretrain.py --resume` goes on from it, `--init_from` takes its weights, and
`export_hf.py` writes them for transformers.
exit codes: 0 shown, or whole; 1 damaged; 2 refused."""
SHOW = "exit codes: 0 shown, 2 refused."
VERIFY = """\
exit codes: 0 all whole; 1 damaged: each file is named, with the tensors it
holds; 2 refused."""
ADOPT = """\
examples:
  python launch/checkpoint.py adopt trainer/checkpoint-500 --out runs/mine
      show what its files state, and a command line for the rest
  python launch/checkpoint.py adopt deepspeed_run/ --out runs/mine \\
      --text my.jsonl --data_from first --set steps=2000 \\
      --set schedule.kind=constant --weights_args n_head=12
  torchrun --nproc_per_node 2 launch/pretrain.py --resume --out runs/mine \\
      --set parallel.tp=2
      then go on from it, under any layout

ZeRO 0 to 3, offloaded or not, and universal checkpoints, of transformers'
GPT-2, BERT and MegatronBert. `pretrain.py --adopt` takes the same flags, and
trains at once. No pickle is run.
exit codes: 0 adopted, 2 refused."""
ADOPT_RULES = (("--out", "--tiny", "an adopted run has its own model and batch"),)
COMMANDS = (
    ("show", "what there is", "Show a run's checkpoints, or what is in one.", SHOW),
    (
        "verify",
        "whether it is whole",
        "Read checkpoints and say what is damaged.",
        VERIFY,
    ),
)


def build_parser() -> argparse.ArgumentParser:
    parser = arguments.command(str(__doc__).split("\n\n")[0], EXAMPLES)
    commands = parser.add_subparsers(
        required=True, dest="command", metavar="{show,verify,adopt}"
    )
    for name, what, description, epilog in COMMANDS:
        add = arguments.subcommand(
            commands, name, what, description, epilog
        ).add_argument
        add(
            "run",
            metavar="RUN",
            help="run directory, its checkpoints/, or one step-NNNNNN of them",
        )
        add(
            "--step",
            type=arguments.whole(0),
            metavar="N",
            help="the checkpoint after N optimizer steps",
        )
    what = "make a run of one of DeepSpeed's"
    title = "Make a run directory of a DeepSpeed run, with its moments and step."
    adopted = arguments.subcommand(
        commands, "adopt", what, title, ADOPT, (*arguments.TEXT_RULES, *ADOPT_RULES)
    )
    says = "directory of save_checkpoint, of Trainer (checkpoint-N), or universal"
    adopted.add_argument("directory", metavar="DIR", help=says)
    adopted.add_argument("--out", required=True, metavar="RUN", help="run directory")
    arguments.add_recipe_arguments(adopted, text=True)
    config = "DeepSpeed JSON of the run (default: the recipe's own)"
    adopted.add_argument("--ds_config", metavar="FILE", help=config)
    arguments.add_weights_arguments(adopted.add_argument)
    arguments.add_adoption_arguments(adopted.add_argument, flag=None)
    return parser


def adopt(args: argparse.Namespace) -> int:
    """Write the run directory. Raises ValueError with every problem."""
    from data.corpus import build
    from data.text.given_text import text_settings
    from ds_configs.jsonfile import find
    from launch.machine import abilities
    from launch.records import metrics, vocabulary
    from launch.training.job import Job, plan_job
    from launch.training.run import checksum
    from launch.training.schedule import learning_rate
    from launch.training.start import Training, open_run_directory
    from launch.weights.adoption import Adoption
    from recipes import catalog

    named = args.recipe if "recipe" in args.given else None
    how = {"stated": args.weights_args, "named": named, "data_from": args.data_from}
    adopts = Adoption(args.directory, **how)
    column = arguments.stated(args.set, "data.text_column")
    laid = text_settings(args.text, column) if args.text else {}
    recipe = adopts.begun(args.set, laid, args.steps)
    machine = abilities.detect_machine(on_paper=True)
    plan = plan_job(
        recipe, args.ds_config, machine, compiled=False, initial_weights=None, elsewhere=True
    )  # fmt: skip
    adopted = adopts.noted(plan, args.set, learning_rate)
    name = catalog.full_name(adopts.recipe_name)
    given = find(args.ds_config or recipe.ds_config)
    job = Job(
        adopted, name, path_of(args.out, "--out"), adopt=adopts.write, ds_config=given
    )
    original = catalog.load(adopts.recipe_name)
    training = Training(job, original, False, False, lambda meeting: corpus)
    corpus = build(recipe, say=terminal.say)
    directory = open_run_directory(training)
    assert directory is not None
    assert recipe.branch is not None
    vocabulary.keep(directory.path, corpus.tokenizer)
    metrics.begin_branch(directory.metrics_jsonl, recipe.branch)
    adopts.write(adopted, job.checkpoints, checksum(corpus))
    directory.close()
    for notice in adopted.notices:
        terminal.say(str(notice))
    print(
        f"{directory.path}: step {recipe.branch.step}; pretrain.py --resume --out goes on from it"
    )
    return 0


def main() -> int:
    args = build_parser().parse_args()
    quiet.quiet_libraries()
    if args.command == "adopt":
        return adopt(args)
    from launch.checkpoints import showing  # with torch

    return getattr(showing, args.command)(path_of(args.run, "RUN"), args.step)


if __name__ == "__main__":
    ends.run(main)
