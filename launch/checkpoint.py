"""Look into the checkpoints of a run; go on with a run of DeepSpeed's, or hand one on to DeepSpeed.

python launch/checkpoint.py show runs/default-sotu-zero3_offload
python launch/checkpoint.py verify runs/default-sotu-zero3_offload
python launch/checkpoint.py adopt trainer/checkpoint-500 --out runs/mine
python launch/checkpoint.py export runs/default-sotu-zero3_offload --universal universal
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

if not __package__:
    import _clone_first  # noqa: F401

from launch.console import arguments, ends, terminal
from launch.ranks import ending
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
  python launch/checkpoint.py export runs/default-sotu-zero3_offload@200 \\
      --universal universal
      weights, both moments and steps for your own DeepSpeed loop or
      transformers' Trainer, under transformers' names
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
EXPORT = """\
example:
  python launch/checkpoint.py export runs/default-sotu-zero3_offload@200 \\
      --universal universal

DIR becomes a universal checkpoint of DeepSpeed (0.19.8), with the names of
GPT2LMHeadModel, or of BERT's and MegatronBert's classes: weights and both
moments of Adam in float32, its count of updates, the steps of the schedule
and the learning rate of the next step. A run of any layout can be exported.
With "checkpoint": {"load_universal": true} in the DeepSpeed JSON
  model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("DIR"))
  engine, *_ = deepspeed.initialize(model=model, ...)
  engine.load_checkpoint("DIR")
goes on from it on any number of ranks, and so does a script with Trainer:
  --config_name DIR --tokenizer_name DIR --resume_from_checkpoint DIR
Betas, weight decay, schedule, clipping, precision, batch and order of the
data are those of the JSON and of the script; DIR/export.json has the run's.
Trainer skips as many batches of its own as there were steps
(--ignore_data_skip leaves that out).

What DeepSpeed 0.19.8 loads: ZeRO 1, 2 and 3, in fp32 and bf16 (fp16, offload
and GPUs were not tried).
- ZeRO-0 loads none: it ends with KeyError: 'optimizer'.
- ZeRO-3 needs DeepSpeed's own Adam (an "optimizer" section without
  torch_adam): torch's ends at the first step with `state_steps` argument must
  contain a list of singleton tensors, since all groups are given one count.
- fp16 begins at the JSON's initial_scale_power, and not at the run's scale.
- Names are those of transformers' model itself: a module around it has
  others, and its files are not found.
The checksums are compared first, and the disk must have room: 12 bytes a
parameter. Without moments (step 0), with LAMB or shared layers it is refused;
export_hf.py takes weights alone.
exit codes: 0 exported; 1 a failing disk; 2 refused."""
ADOPT = """\
examples:
  python launch/checkpoint.py adopt trainer/checkpoint-500 --out runs/mine
      show what its files state, and a command line for the rest
  python launch/checkpoint.py adopt deepspeed_run/ --out runs/mine \\
      --text my.jsonl --data_from first --set steps=2000 \\
      --set schedule.kind=constant --set schedule.warmup_steps=0 \\
      --set schedule.min_lr=0 --weights_args n_head=12
  deepspeed --num_gpus 2 launch/pretrain.py --resume --out runs/mine \\
      --set parallel.tp=2
      then go on from it, under any layout

ZeRO 0 to 3, offloaded or not, and universal checkpoints, of transformers'
GPT-2, BERT and MegatronBert, and runs of Trainer and accelerate without
DeepSpeed; GPTs of Megatron-DeepSpeed and gpt-neox. `pretrain.py --adopt` takes
the same flags, and trains at once. No pickle is run.
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
        required=True, dest="command", metavar="{show,verify,adopt,export}"
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
    add = arguments.subcommand(
        commands,
        "export",
        "to DeepSpeed or Trainer",
        "Write a checkpoint as DeepSpeed's universal checkpoint.",
        EXPORT,
    ).add_argument
    add(
        "run",
        metavar="RUN[@STEP]",
        help="run directory, and the step of a checkpoint (default: the newest whole one)",
    )
    add(
        "--universal",
        metavar="DIR",
        required=True,
        help="directory to make; refused if there is something in it",
    )
    what = "make a run of one of DeepSpeed's"
    title = "Make a run directory of a DeepSpeed run, with its moments and step."
    adopted = arguments.subcommand(
        commands, "adopt", what, title, ADOPT, (*arguments.TEXT_RULES, *ADOPT_RULES)
    )
    adopted.add_argument(
        "directory",
        metavar="DIR",
        help="directory of save_checkpoint, of Trainer (checkpoint-N), or universal",
    )
    adopted.add_argument("--out", required=True, metavar="RUN", help="run directory")
    arguments.add_recipe_arguments(adopted, text=True)
    adopted.add_argument(
        "--ds_config",
        metavar="FILE",
        help="DeepSpeed JSON of the run (default: the recipe's own)",
    )
    arguments.add_weights_arguments(adopted.add_argument)
    arguments.add_adoption_arguments(adopted.add_argument, flag=None)
    # it trains nothing, and any layout may go on
    adopted.set_defaults(plan=True, processes=None, compile="off", resume=False)
    return parser


def export(run_at: str, out: str) -> int:
    """Export the checkpoint of RUN or RUN@STEP to the new directory `out`, and print how to go on from it.

    Raises ProblemsError or ValueError for what cannot be exported.
    """
    from launch.checkpoints import branching, run_checkpoints
    from launch.console import new_output
    from launch.console.progress import bar
    from launch.records import vocabulary
    from launch.records.directory import RunDirectory
    from launch.training.schedule import learning_rate
    from launch.weights import universal
    from modeling.formats.huggingface.conversion import check_convertible

    run, step = branching.split(run_at, "RUN")
    recipe = RunDirectory(run).recipe()
    check_convertible(recipe.model)
    checkpoint, damaged = run_checkpoints.newest_whole(run, step)
    for each in damaged:
        terminal.warn(f"{each}; step {checkpoint.step} is exported", sys.stderr)
    held = checkpoint.manifest
    place = new_output.new_directory(universal.FLAG, out).resolve()
    universal.check_exportable(held, recipe, place)
    tokenizer = vocabulary.load(run)
    rate = learning_rate(recipe, held.progress.schedule)
    size = held.bytes + universal.size_of(recipe)
    with bar(sys.stderr, total=size, unit="B", unit_scale=True) as shown:
        universal.write(
            checkpoint, recipe, tokenizer, rate, place, run=run, seen=shown.update
        )
    print(universal.describe(checkpoint, place))
    return 0


def adopt(args: argparse.Namespace) -> int:
    """Write the run directory. Raises ValueError with every problem."""
    from data.corpus import build
    from ds_configs.findings import find
    from launch.machine import description
    from launch.records import metrics, vocabulary
    from launch.records.facts import RunFacts
    from launch.training.run import checksum
    from launch.training.schedule import learning_rate
    from launch.training.start import job_of, open_run_directory, plan_of, text_of
    from launch.weights.adoption import Adoption

    adoption = Adoption.of(args.directory, args)
    named = adoption.named_recipe
    recipe = adoption.begun(args.set, text_of(args), args.steps)
    config = adoption.with_scaling(args.ds_config or recipe.ds_config)
    machine = description.detect_machine(on_paper=True)
    plan = plan_of(args, recipe, config, machine)
    plan = adoption.with_remarks(plan, args.set, learning_rate)
    facts = RunFacts(plan, named.name, original=named.recipe, ds_config=find(config))
    job = job_of(args, facts, machine)
    corpus = build(recipe, say=terminal.say)
    directory = open_run_directory(job)
    assert directory and recipe.branch
    vocabulary.keep(directory.path, corpus.tokenizer)
    metrics.begin_branch(directory.metrics_jsonl, recipe.branch)
    adoption.write(plan, job.checkpoints, checksum(corpus))
    directory.close()
    for notice in plan.notices:
        terminal.say(str(notice))
    print(
        f"{directory.path}: step {recipe.branch.step}; pretrain.py --resume --out goes on from it"
    )
    return 0


def main() -> int:
    args = build_parser().parse_args()
    terminal.quiet_libraries()
    try:
        if args.command == "adopt":
            return adopt(args)
        if args.command == "export":
            return export(args.run, args.universal)
    except ValueError as error:
        ending.refuse(error)
    from launch.checkpoints import showing  # with torch

    show: Callable[..., int] = getattr(showing, args.command)
    return show(path_of(args.run, "RUN"), args.step)


if __name__ == "__main__":
    ends.run(main)
