"""`launch/plan.py cluster`: a recipe on a cluster, as files for its scheduler and as a map of its ranks."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path

from data.durable_files import write_atomically
from launch.console import arguments, launch_lines, output, terminal
from launch.console.text_table import aligned
from launch.planning.clusters import dockerfile, kubernetes, map_text, slurm
from launch.planning.clusters.job import PORT, WRITTEN_BY, Job, Wishes, hostfile
from launch.planning.clusters.nodes import node_of
from launch.planning.clusters.placement import placed
from recipes import catalog, files
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
  python launch/plan.py cluster --recipe megatron_paper_table1/8.3b-mp-dp \\
      --json | jq '.ranks[100]'
      the whole map, for a program

Files that this command wrote earlier are replaced, any other is not.
exit codes: 0 shown and written, 2 refused."""
WORD = re.compile(r"[A-Za-z0-9_.,:&|*()\[\]!@/+-]+")  # of a scheduler: nothing that ends a line or a word
FILES: dict[str, Callable[[Job], str]] = {
    "hosts": hostfile,
    "job.sbatch": slurm.script,
    "pytorchjob.yaml": kubernetes.manifest,
    "Dockerfile": dockerfile.dockerfile,
    "Dockerfile.dockerignore": lambda job: dockerfile.ignored(),
}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand `cluster` to the subparsers of launch/plan.py."""
    parser = commands.add_parser(
        "cluster", help="files for a cluster's scheduler, and which rank sits where", description=ABOUT,
        epilog=EXAMPLES, formatter_class=arguments.HELP, allow_abbrev=False,
    )  # fmt: skip
    arguments.add_recipe_arguments(parser)
    config = "DeepSpeed JSON, as a path or the bare name of one in ds_configs/ (default: the recipe's own)"
    parser.add_argument("--ds_config", metavar="FILE", help=config)
    where = parser.add_argument_group("on which cluster").add_argument
    where(
        "--hardware",
        metavar="NAME",
        help="a node of launch/planning/prediction/hardware.yaml (default: the recipe's)",
    )
    where(
        "--nodes",
        type=arguments.whole(most=10**5),
        metavar="N",
        help="how many (default: as many as are needed)",
    )
    taken = "that each node has, a process on each (default: the hardware's)"
    where("--gpus-per-node", type=arguments.whole(most=1024), metavar="G", help=taken)
    hosts = "their names, in the order of ranks (default: node-0, node-1, ..., to be replaced)"
    where("--hosts", nargs="+", metavar="HOST", help=hosts)
    run_directory = "run directory, on a file system that all nodes see (default: runs/<recipe>-<ds_config>)"
    where("--run", metavar="DIR", dest="run_directory", help=run_directory)
    where("--image", default="megarecipes", help="name of the container's image (default: %(default)s)")
    slurm_flags = parser.add_argument_group("for Slurm").add_argument
    slurm_flags("--time", default="20:00:00", help="of a job, which is requeued then (default: %(default)s)")
    slurm_flags("--partition", help="as sbatch takes it")
    slurm_flags("--account", help="as sbatch takes it")
    slurm_flags("--constraint", help="as sbatch takes it (default: the hardware's, e.g. v100-32g)")
    cores = "cores of each process (default: the host's, shared out)"
    slurm_flags("--cpus-per-task", type=arguments.whole(most=4096), metavar="N", help=cores)
    shown = parser.add_argument_group("what comes out").add_argument
    shown("--all", action="store_true", help="list every rank")
    shown("--json", action="store_true", help="print the whole map as JSON, and nothing else")
    shown("--out", metavar="DIR", type=Path, help="write the files there; without it none is written")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0. Raises ProblemsError for what is refused."""
    job = job_of(args)
    texts = {name: text(job) for name, text in FILES.items()} if args.out else {}
    _check_places(args.out, texts)
    width = terminal.columns()
    if args.json:
        print(json.dumps(map_text.as_json(job), indent=1))
    else:
        print(describe(job, args.out, whole=args.all, width=width))
    if texts:
        args.out.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_atomically(args.out / name, text)
    return 0


def job_of(args: argparse.Namespace) -> Job:
    """The job that the flags ask for. Raises ProblemsError."""
    recipe = catalog.load(args.recipe, args.set, tiny=args.tiny, steps=args.steps)
    _check_words(args)
    node = node_of(recipe, args.hardware, args.gpus_per_node)
    ds_config = args.ds_config or recipe.ds_config
    placement = placed(recipe, ds_config, node, args.nodes, whole=args.gpus_per_node is not None)
    hosts = tuple(args.hosts or (f"node-{index}" for index in range(placement.nodes)))
    _check_hosts(hosts, placement.nodes)
    name = catalog.full_name(args.recipe) + ("-tiny" if args.tiny else "")
    told = launch_lines.arguments(args.recipe, ds_config, args.set)
    told += ["--tiny"] * args.tiny + (["--steps", str(args.steps)] if args.steps else [])
    name = " ".join(name.split())  # it stands in comments, which a line's end would end
    default = launch_lines.run_directory(name, placement.plan.ds_name)
    run_directory = str(files.path_of(args.run_directory, "--run")) if args.run_directory else default
    seconds = slurm.seconds(args.time)
    wishes = Wishes(seconds, args.partition, args.account, args.constraint, args.cpus_per_task)
    return Job(name, tuple(told), placement, node, run_directory, hosts, bool(args.hosts), wishes, args.image)


def describe(job: Job, out: Path | None, *, whole: bool, width: int | None) -> str:
    """Everything as text: what is placed where, and how it is launched."""
    layout, plan = job.layout, job.placement.plan
    degrees = f"{layout.tp} tensor x {layout.pp} pipeline x {layout.dp} data parallel"
    sm = f", sm_{job.node.capability}" if job.node.capability else ""
    facts = [
        ("recipe", f"{job.name}: {plan.recipe.title}"),
        ("cluster", f"{job.nodes} x {job.gpus} GPUs ({job.node.title}{sm})"),
        ("layout", f"{degrees} = {layout.world} processes ({plan.ds_name}.json)"),
        ("batch", layout.identity()),
    ]
    order = f"rank = (stage x {layout.dp} + data) x {layout.tp} + tensor; {job.gpus} ranks on each host"
    blocks = [
        aligned(facts, width=width),
        terminal.wrapped(order, width) + "\n" + map_text.describe_map(job, whole=whole, width=width),
        map_text.describe_spreads(job, width),
        "\n".join(terminal.wrapped(f"! {text}", width) for text in remarks(job)),
        "\n".join(_launch(job, out, width)),
    ]
    return "\n\n".join(block for block in blocks if block)


def remarks(job: Job) -> list[str]:
    """What the user should know before anything is paid for."""
    said = map_text.remarks(job)
    if not job.named and job.nodes > 1:
        said.append("the names of hosts stand in for yours: give --hosts, or edit the hostfile")
    if job.nodes > 1:
        said.append(
            "deepspeed takes no variables to other hosts but NCCL_*, PYTHON*, UCX_*, MV2* and MLFLOW*: write "
            "others, such as MEGARECIPES_CACHE and HF_HOME, into ~/.deepspeed_env"
        )
    if job.cores is None:
        said.append(
            "nobody knows the cores of a node here: give --cpus-per-task, or each process gets one core"
        )
    wheel = dockerfile.wheel_for(job.node.capability)
    if wheel.index:
        said.append(
            f"PyPI's torch has no kernels for sm_{job.node.capability}: install it from {wheel.index}"
        )
    if plan_notices := job.placement.plan.notices:
        said += [str(notice) for notice in plan_notices]
    return said


def _launch(job: Job, out: Path | None, width: int | None) -> list[str]:
    """How each launcher starts it."""
    at = "." if out is None else str(out)
    nodes, gpus, kept = job.nodes, job.gpus, f"--out {launch_lines.quoted([job.run_directory])}"
    deepspeed = launch_lines.deepspeed(nodes, gpus, f"{at}/hosts" if out else "hosts")
    torchrun = launch_lines.torchrun(nodes, gpus, job.hosts[0], PORT)
    each = f", on each host with its NODE_RANK, 0 to {nodes - 1}" if nodes > 1 else ""
    reach = f", on {job.hosts[0]}, which reaches the others by ssh" if nodes > 1 else ""
    lines = [
        f"# deepspeed{reach}",
        f"{deepspeed} {job.command} {kept}",
        f"# torchrun{each}",
        f"{torchrun} {job.command} {kept}",
    ]
    if out is None:
        return [_line(line, width) for line in (*lines, f"# --out DIR writes {', '.join(FILES)}")]
    built = launch_lines.quoted(["docker", "build", "-f", f"{at}/Dockerfile", "-t", job.image, "."])
    lines += [
        "# Slurm",
        launch_lines.quoted(["sbatch", f"{at}/job.sbatch"]),
        "# Kubernetes, once the image is where its nodes find it",
        built,
        launch_lines.quoted(["kubectl", "apply", "-f", f"{at}/pytorchjob.yaml"]),
    ]
    return [*(_line(line, width) for line in lines), _wrote(at, width)]


def _wrote(at: str, width: int | None) -> str:
    return terminal.wrapped(f"wrote {', '.join(FILES)} in {at}", width)


def _line(line: str, width: int | None) -> str:
    return terminal.wrapped(line, width) if line.startswith("#") else terminal.command(line, width)


def _check_words(args: argparse.Namespace) -> None:
    """What goes into files as it is written has to be one word."""
    words = [(flag, getattr(args, flag)) for flag in ("partition", "account", "constraint", "image")]
    words += [("hosts", host) for host in args.hosts or ()]
    problems = [
        Problem(f"--{flag}", f"--{flag} {word[:80]!r}", "one word, without quotes", "write it so")
        for flag, word in words
        if word is not None and not WORD.fullmatch(word)
    ]
    if problems:
        raise ProblemsError(problems)


def _check_hosts(hosts: tuple[str, ...], nodes: int) -> None:
    came = f"--hosts names {len(hosts)}, {len({*hosts})} different"
    if len({*hosts}) != nodes or len(hosts) != nodes:
        rule = f"the layout takes {nodes}, each once"
        raise ProblemsError([Problem("--hosts", came, rule, f"name {nodes}, or give --nodes {len(hosts)}")])


def _check_places(out: Path | None, texts: dict[str, str]) -> None:
    """Before anything is written: a place for every file, where nothing is but what this command wrote."""
    if out is None or not output.directory("--out", out).exists():
        return
    problems: list[Problem] = []
    for name, text in texts.items():
        own = text[: text.index(WRITTEN_BY) + len(WRITTEN_BY)]  # how each of its files begins
        try:
            output.new_file("--out", out / name, own=own.encode())
        except ProblemsError as error:
            problems += error.problems
    if problems:
        raise ProblemsError(problems)
