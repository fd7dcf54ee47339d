"""Check a machine and a launch before anything starts: one line per check, with the fix.

python launch/doctor.py --recipe bert/sotu --ds_config zero2
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from pydantic import TypeAdapter

from ds_configs import known_keys
from ds_configs.findings import find, read
from ds_configs.plan import Plan
from ds_configs.resolver import resolve
from launch.console import arguments, ends, terminal
from launch.machine import checks, description, doctor_checks
from launch.machine.checks import (
    Check,
    Function,
    Verdict,
    failed,
    ok,
    unchecked,
    warning,
)
from launch.machine.memory import Memory, this_machine
from launch.planning import memory_fit
from launch.planning.prediction.forecast_text import memory_error
from launch.ranks import interfaces, joining, launch_environment, processes
from launch.records import shared_directory
from recipes import catalog
from recipes.files import path_of
from recipes.problems import ProblemsError, amount, counted, existing, take_file_handles
from recipes.schema import Recipe

SNUG = 0.08  # of the host's memory: a margin within the error of predictions
ORDER: tuple[Verdict, ...] = ("ok", "warning", "failed", "not checked")
# of a rank: its machine's name and findings
REPORT = TypeAdapter(tuple[str, list[Check]])

EXAMPLES = """\
examples:
  python launch/doctor.py
      this machine, and the default recipe on it
  python launch/doctor.py --recipe bert/sotu --ds_config zero2 \\
      --set batch.micro=4 --out /scratch/run
      one launch: its batch, its memory, the disk for its checkpoints
  python launch/doctor.py --recipe megatron_paper_table1/8.3b-mp-dp \\
      --hostfile hosts
      a launch on several machines, as far as it can be seen from this one
  torchrun --nnodes 2 --nproc_per_node 8 … launch/doctor.py --recipe … \\
      --out /shared/run
      on the machines themselves: they meet, and compare what they find
  python launch/doctor.py --json | jq \\
      -r '.checks[] | select(.verdict == "failed") | .fix'
      for programs

ok: as it should be; warning: may break a run, or costs speed or results;
failed: will break it; not checked: the reason stands there. Nothing is
started, and nothing written but a file that is removed again.
exit codes: 0 nothing failed, 1 something did, 2 refused: no such recipe,
configuration or hostfile."""


def build_parser() -> argparse.ArgumentParser:
    parser = arguments.command(__doc__, EXAMPLES)
    arguments.add_recipe_arguments(parser)
    add = parser.add_argument_group("how to run it").add_argument
    config = "DeepSpeed JSON, as a path or the bare name of one in ds_configs/ (default: the recipe's own)"
    add("--ds_config", metavar="FILE", help=config)
    add(
        "--hostfile",
        metavar="FILE",
        help='machines of the launch, as deepspeed reads them: "name slots=8"',
    )
    add(
        "--out",
        metavar="DIR",
        help="run directory (default: runs/<recipe>-<ds_config>)",
    )
    add("--json", action="store_true", help="print JSON, for programs")
    return parser


Hosts = Mapping[str, int]  # a hostfile: slots of each machine


def main() -> int:
    args = build_parser().parse_args()
    terminal.quiet_libraries()
    launcher = checks.run({"launcher": check_launcher})
    recipe = catalog.load(args.recipe, args.set, tiny=args.tiny, steps=args.steps)
    config = find(args.ds_config or recipe.ds_config)
    hosts = doctor_checks.read_hosts(args.hostfile) if args.hostfile else {}
    name = catalog.full_name(args.recipe) + ("-tiny" if args.tiny else "")
    directory = (
        path_of(args.out, "--out")
        if args.out
        else arguments.run_directory(name, config.stem)
    )
    with contextlib.redirect_stdout(sys.stderr):  # what libraries print is no JSON
        found = [*launcher, *checks.run(table(recipe, config, hosts, directory))]
        if processes.world_size() > 1:
            found = gather_checks(found, directory)
    if processes.rank() != 0:
        return 0
    if args.json:
        facts = {
            "recipe": name,
            "ds_config": str(config),
            "checks": [*map(asdict, found)],
        }
        print(json.dumps(facts, indent=2))
    else:
        print(text(found, terminal.columns()))
    return int(any(check.verdict == "failed" for check in found))


def check_launcher() -> Check:
    """Check the launcher's variables; if they contradict each other, drop them and go on alone."""
    try:
        processes.check_launch(start=False)
    except ProblemsError:
        for name in processes.VARIABLES:
            os.environ.pop(name, None)
        raise
    return ok(counted(processes.world_size(), "process"))


def table(
    recipe: Recipe, config: Path, hosts: Hosts, directory: Path
) -> dict[str, Function]:
    """Return the checks of a start, and those that no start makes, in the order of their lines."""
    memory = this_machine()
    world = processes_of(recipe, hosts, memory)
    plan = None
    try:
        plan = resolve(recipe, config, world, description.detect_machine())
        configured = configuration(plan, config)
    except ProblemsError as refused:
        configured = checks.refused(refused.problems)
    ranks = ranks_here(plan, memory, hosts) if plan else memory.gpus or 1
    several = len(hosts) > 1 or (not hosts and processes.several_machines())
    functions: dict[str, Function] = {
        "accelerator": doctor_checks.accelerator,
        "compiler": doctor_checks.compiler,
        "fused kernels": doctor_checks.fused_kernels,
        "CUDA compiler": doctor_checks.cuda_compiler,
        **checks.quick(recipe, directory, ranks),
        "packages": partial(checks.packages, recipe),
        "versions": lambda: ok(
            ", ".join(f"{name} {of}" for name, of in description.versions().items())
        ),
        "open files": partial(open_files, plan.layout.world if plan else world or 1),
        "host name": partial(host_name, several),
        "port": partial(
            port, os.environ.get("MASTER_PORT", str(launch_environment.DEFAULT_PORT))
        ),
        "configuration": lambda: configured,
        "data": partial(data, recipe),
        "run directory": partial(run_directory, directory),
    }
    if hosts:
        functions["hostfile"] = partial(doctor_checks.other_machines, hosts)
    if plan is not None:
        functions["layout"] = partial(layout, plan, memory, hosts)
        functions["memory"] = partial(fits, plan, memory, ranks)
        functions["DeepSpeed"] = partial(deepspeed_accepts, plan, config)
    return functions


def processes_of(recipe: Recipe, hosts: Hosts, memory: Memory) -> int | None:
    """Count processes by launcher, hostfile or GPUs here; None: as many as the layout needs."""
    if processes.launched():
        return processes.world_size()
    if recipe.parallel.dp is not None:
        return None
    return (sum(hosts.values()) or memory.gpus) or None


def ranks_here(plan: Plan, memory: Memory, hosts: Hosts) -> int:
    """Count the plan's processes on this machine."""
    world = plan.layout.world
    if processes.launched():
        return min(world, processes.local_world_size())
    if hosts:
        return min(world, doctor_checks.slots_here(hosts) or max(hosts.values()))
    return min(world, memory.gpus or world)


def configuration(plan: Plan, config: Path) -> list[Check]:
    """Report the resolved configuration, its differences from the recipe, and what nothing here checks."""
    found = [
        ok(
            f"{plan.ds_name}: ZeRO-{plan.zero_stage}, offload {plan.offload}, {plan.precision}"
        )
    ]
    for notice in plan.notices:
        found.append(
            unchecked(str(notice))
            if notice.key == "unchecked"
            else warning(str(notice))
        )
    sections = known_keys.unread(read(config))
    if sections:
        found.append(
            unchecked(f"{', '.join(sections)}: handed to DeepSpeed as written")
        )
    return found


def layout(plan: Plan, memory: Memory, hosts: Hosts) -> Check:
    """Check that every process has a GPU, and tensor ranks lie on one machine."""
    shape = plan.layout
    world = shape.world
    degrees = (
        f"tp {shape.tp} x pp {shape.pp} x dp {shape.dp} = {counted(world, 'process')}"
    )
    smaller = "make it smaller (--set parallel.dp=, parallel.tp=, …)"
    if not hosts and not processes.launched() and memory.gpus and world > memory.gpus:
        came = f"{degrees}, each with a GPU of its own; this machine has {memory.gpus}"
        return failed(came, f"name the machines with --hostfile, or {smaller}")
    slots = sum(hosts.values())
    if hosts and world > slots:
        came = f"{degrees}, and the hostfile has {counted(slots, 'slot')}: one for each"
        return failed(came, f"name more machines there, or {smaller}")
    if any(count % shape.tp for count in hosts.values()):
        least = min(hosts.values())
        came = f"{degrees}: tensor parallelism crosses machines of {least} slots, over a slower network"
        return warning(
            came, f"--set parallel.tp= a divisor of {least}, and more pipeline stages"
        )
    return ok(f"{degrees}; {shape.identity()}")


def fits(plan: Plan, memory: Memory, ranks: int) -> Check:
    """Check the planner's memory of this machine's `ranks` against its memory."""
    found = memory_fit.on_machine(plan, memory, ranks)
    said = [
        f"{amount(each.needed)} of {amount(each.room)} of the {each.place}"
        for each in found.memories
        if each.needed
    ]
    came = f"takes {', '.join(said)}, as predicted, {memory_error(plan.precision)}"
    more = "shard or offload more (--ds_config zero3, zero3_offload), or more processes"
    fix = f"{more}; launch/plan.py says how"
    if found.verdict == "out of memory":
        return failed(came, fix)
    snug = found.verdict == "snug" or found.host > (1 - SNUG) * memory.host_bytes
    return warning(f"{came}: snug", fix) if snug else ok(came)


def open_files(world: int) -> Check:
    """Check the hard limit of open files; a run raises the soft limit up to it by itself."""
    needed = checks.files_needed(world)
    take_file_handles(needed)
    return ok(f"{needed:,} are needed, and allowed")


def host_name(several: bool) -> Check:
    """Check that the other machines reach this one by its name, if there are `several`."""
    if several:
        interfaces.check_own_address(os.environ)
    return ok(socket.gethostname())


def port(number: str) -> Check:
    """Check that the processes can meet at this port."""
    processes.check_port(number)
    return ok(f"{number}, where the processes meet")


def run_directory(directory: Path) -> Check:
    """Check by a file that the run directory is writable or can be made."""
    arguments.directory("--out", directory)
    return ok(
        f"{directory} " + ("is writable" if directory.exists() else "can be made")
    )


def deepspeed_accepts(plan: Plan, config: Path) -> Check:
    """Check that DeepSpeed itself accepts the resolved JSON."""
    from launch.training import job

    job.check_by_deepspeed(plan, str(config))
    return ok("reads the resolved JSON without complaint")


def data(recipe: Recipe) -> Check:
    """Check for the recipe's text, without reading it."""
    from data.corpus import check_sources

    try:
        check_sources(recipe)
    except ProblemsError:
        raise
    except ValueError as refused:
        return failed(str(refused))
    return ok(f"{recipe.data.source}: as far as can be told without reading it")


def gather_checks(own: list[Check], directory: Path) -> list[Check]:
    """Gather the checks of all machines on rank 0. Collective."""
    place = existing(directory)
    meeting = joining.meet(out=str(directory.absolute()))
    seen = shared_directory.seen_here(meeting, place)

    def shared() -> Check:
        shared_directory.check(seen, place)
        return ok(f"seen: what rank 0 writes in {place}")

    found = [*own, *checks.run({"shared files": shared})]
    report = socket.gethostname(), found if processes.local_rank() == 0 else []
    reports = meeting.to_rank_0(REPORT.dump_python(report, mode="json"))
    meeting.end()
    return merge_checks([REPORT.validate_python(each) for each in reports])


def merge_checks(reports: Sequence[tuple[str, list[Check]]]) -> list[Check]:
    """Merge the checks of all machines, with the machines' names where their findings differ.

    A check that only some machines could make is taken from those. Versions that differ are a failure.
    """
    reports = [(host, found) for host, found in reports if found]
    said: dict[str, dict[Check, list[str]]] = {}
    for host, found in reports:
        for check in found:
            said.setdefault(check.key, {}).setdefault(check, []).append(host)
    every = []
    for key, hosts_of in said.items():
        able = {
            check: at
            for check, at in hosts_of.items()
            if check.verdict != "not checked"
        } or hosts_of
        for check, at in able.items():
            if len(able) > 1 and len(at) < len(reports):
                check = replace(check, found=f"{', '.join(at)}: {check.found}")
                if key == "versions":
                    check = replace(
                        check, verdict="failed", fix="make them equal on all machines"
                    )
            every.append(check)
    return every


def text(found: Sequence[Check], width: int | None) -> str:
    """Write a line per check, with its fix below it, and the number of each verdict."""
    verdicts = max(len(check.verdict) for check in found) + 2
    column = verdicts + max(len(check.key) for check in found) + 2
    lines = []
    for check in found:
        label = f"{check.verdict:<{verdicts}}{check.key}"
        lines.append(
            terminal.wrapped(f"{label:<{column}}{check.found}", width, hang=column)
        )
        if check.fix:
            lines.append(
                terminal.wrapped(f"{'':<{column}}fix: {check.fix}", width, hang=5)
            )
    counts = Counter(check.verdict for check in found)
    said = ", ".join(
        f"{counts[verdict]} {verdict}" for verdict in ORDER if counts[verdict]
    )
    return "\n".join([*lines, "", f"{counted(len(found), 'check')}: {said}"])


if __name__ == "__main__":
    ends.run(main)
