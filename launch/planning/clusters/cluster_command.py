"""The subcommand `launch/plan.py cluster`: files for a cluster's scheduler, and a map of ranks."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from data.durable_files import write_atomically
from launch.console import arguments, launch_lines, new_output, output, terminal
from launch.planning.clusters import cluster_text, files
from launch.planning.clusters.job import Job, node_of, parse_clock, place_on_nodes
from recipes import catalog
from recipes.files import path_of
from recipes.problems import Problem, ProblemsError

ABOUT = """\
Show which rank of a recipe sits on which host, on which GPU, at which place
of the grid, and how each launcher starts it. With --out, write a hostfile, a
batch script for Slurm, a PyTorchJob for Kubernetes and a Dockerfile. A layout
that does not fill the nodes is refused."""
EXAMPLES = """\
examples:
  python launch/plan.py cluster \\
      --recipe jeanzay_megatron_deepspeed_3d/48b-pp16-ga256-mb4 \\
      --out jobs/48b
      the row on the nodes that it was measured on; then: sbatch
      jobs/48b/job.sbatch
  python launch/plan.py cluster --recipe openwebtext/gpt2-124m \\
      --hardware a100-80x8 --nodes 2 --hosts a b
      other nodes, and hosts by their names
  python launch/plan.py cluster --recipe openwebtext/gpt2-124m \\
      --hardware a100-80x8 --image me/a:1 --out job
      then: docker build -f job/Dockerfile -t me/a:1 . and kubectl apply -f
      job/pytorchjob.yaml
  python launch/plan.py cluster --recipe megatron_paper_table1/8.3b-mp-dp --all
      where each of its 512 ranks sits

Files that this command wrote earlier for the same recipe and --run are
replaced, any other is not.
exit codes: 0 shown and written, 2 refused."""
WORD = re.compile(r"[A-Za-z0-9_.,:&|*()\[\]!@/+-]+")  # of a scheduler: nothing that ends a line or a word

OF_FILES = ("--time", "--partition", "--account", "--constraint", "--cpus-per-task", "--image")
RULES = tuple((flag, "+--out", "it stands in the files alone") for flag in OF_FILES)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand `cluster` to the subparsers of launch/plan.py."""
    line = "files for a cluster's scheduler, and which rank sits where"
    parser = arguments.subcommand(commands, "cluster", line, ABOUT, EXAMPLES, RULES)
    arguments.add_recipe_arguments(parser)
    config = "DeepSpeed JSON, as a path or the bare name of one in ds_configs/ (default: the recipe's own)"
    parser.add_argument("--ds_config", metavar="FILE", help=config)
    where = parser.add_argument_group("on which cluster").add_argument
    node = "a node of launch/planning/prediction/hardware.yaml (default: the recipe's)"
    where("--hardware", metavar="NAME", help=node)
    number = "how many (default: as many as are needed)"
    where("--nodes", type=arguments.whole(most=10**5), metavar="N", help=number)
    taken = "that each node has, a process on each (default: the hardware's)"
    where("--gpus-per-node", type=arguments.whole(most=1024), metavar="G", help=taken)
    hosts = "their names, in the order of ranks (default: node-0, node-1, ..., to be replaced)"
    where("--hosts", nargs="+", metavar="HOST", help=hosts)
    run_directory = "run directory, on a file system that all nodes see (default: runs/<recipe>-<ds_config>)"
    where("--run", metavar="DIR", dest="run_directory", help=run_directory)
    where("--image", default="megarecipes", help="name of the container's image (default: %(default)s)")
    slurm = parser.add_argument_group("for Slurm").add_argument
    slurm("--time", default="20:00:00", help="of a job, which is requeued then (default: %(default)s)")
    slurm("--partition", help="as sbatch takes it")
    slurm("--account", help="as sbatch takes it")
    slurm("--constraint", help="as sbatch takes it (default: the hardware's, e.g. v100-32g)")
    cores = "cores of each process (default: the host's, shared out)"
    slurm("--cpus-per-task", type=arguments.whole(most=4096), metavar="N", help=cores)
    shown = parser.add_argument_group("what comes out").add_argument
    shown("--all", action="store_true", help="list every rank")
    shown("--out", metavar="DIR", help="write the files there; without it none is written")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the map of ranks, write the files, and return exit code 0. Raises ProblemsError."""
    job, args.out = job_of(args), args.out and path_of(args.out, "--out")
    texts = {name: files.text(job, name) for name in files.NAMES} if args.out else {}
    if args.out and output.directory("--out", args.out).exists():
        # Of other people's, and of another job's, none is replaced.
        beginnings = {
            name: text[: text.index("\n", text.index(files.WRITTEN_BY))] for name, text in texts.items()
        }
        new_output.own_files("--out", args.out, beginnings, "the same job's")
    print(cluster_text.page(job, args.out, whole=args.all, width=terminal.columns()))
    for name, text in texts.items():
        args.out.mkdir(parents=True, exist_ok=True)
        write_atomically(args.out / name, text)
    return 0


def job_of(args: argparse.Namespace) -> Job:
    """Make the job from the flags. Raises ProblemsError."""
    recipe = catalog.load(args.recipe, args.set, tiny=args.tiny, steps=args.steps)
    _check_words(args)
    node = node_of(recipe, args.hardware, args.gpus_per_node)
    ds_config = args.ds_config or recipe.ds_config
    placement = place_on_nodes(recipe, ds_config, node, args.nodes, whole=args.gpus_per_node is not None)
    hosts = tuple(args.hosts or (f"node-{index}" for index in range(placement.nodes)))
    if len({*hosts}) != placement.nodes or len(hosts) != placement.nodes:
        came = f"--hosts names {len(hosts)}, {len({*hosts})} different"
        fix = f"name {placement.nodes}, or give --nodes {len(hosts)}"
        rule = f"the layout takes {placement.nodes}, each once"
        raise ProblemsError([Problem("--hosts", came, rule, fix)])
    name = catalog.full_name(args.recipe) + "-tiny" * args.tiny
    name = " ".join(name.split())  # it stands in comments, which a line's end would end
    usual = output.run_directory(name, placement.plan.ds_name)
    return Job(
        name,
        tuple(launch_lines.arguments(args.recipe, ds_config, args.set, tiny=args.tiny, steps=args.steps)),
        placement.plan,
        node,
        placement.nodes,
        placement.gpus,
        run_directory=str(_run_directory(args.run_directory) if args.run_directory else usual),
        hosts=hosts,
        has_host_names=bool(args.hosts),
        seconds=parse_clock(args.time),
        partition=args.partition,
        account=args.account,
        constraint=args.constraint or node.constraint,
        cores=args.cpus_per_task or (node.cores // node.gpus if node.cores else None),
        image=args.image,
    )


def _run_directory(text: str) -> Path:
    path = path_of(text, "--run")
    if ".." in path.parts or not path.name:
        rule = "a run has a directory of its own, in Kubernetes on the job's volume, which .. would leave"
        raise ProblemsError([Problem("--run", f"--run {text[:100]}", rule, "name it: runs/x or /scratch/x")])
    return path


def _check_words(args: argparse.Namespace) -> None:
    """Refuse values of several words: files take them as they are written."""
    words = [(flag, getattr(args, flag)) for flag in ("partition", "account", "constraint", "image")]
    words += [("hosts", host) for host in args.hosts or ()]
    problems = [
        Problem(f"--{flag}", f"--{flag} {word[:80]!r}", "one word, without quotes", "write it so")
        for flag, word in words
        if word is not None and not WORD.fullmatch(word)
    ]
    if problems:
        raise ProblemsError(problems)
