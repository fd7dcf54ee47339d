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
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from pydantic import TypeAdapter

from ds_configs import jsonfile, known_keys
from ds_configs.plan import Plan
from ds_configs.resolver import resolve
from launch.console import arguments, ends, output, quiet, terminal
from launch.machine import abilities, checks, description, doctor_checks, hosts, start_checks
from launch.machine.checks import Check, Function, Verdict, failed, ok, unchecked, warning
from launch.machine.hosts import Hosts
from launch.machine.memory import Memory, this_machine
from launch.planning import memory_fit
from launch.planning.prediction.forecast_text import error
from launch.ranks import interfaces, joining, launch_environment, processes
from launch.records import shared_directory
from recipes import catalog
from recipes.files import path_of
from recipes.problems import ProblemsError, counted
from recipes.schema import Recipe

SNUG = 0.08  # of the host's memory: a margin within the error of predictions
ORDER: tuple[Verdict, ...] = ("ok", "warning", "failed", "not checked")

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
      on the machines themselves: they meet, and compare file system, clocks
      and versions
  python launch/doctor.py --json | jq \\
      -r '.checks[] | select(.verdict == "failed") | .fix'
      for programs

ok: as it should be; warning: may break a run, or costs speed or results;
failed: will break it; not checked: the reason stands there. Nothing is
started, and nothing written but a file that is removed again.
exit codes: 0 nothing failed, 1 something did, 2 refused: no such recipe,
configuration or hostfile."""


def build_parser() -> argparse.ArgumentParser:
    parser = arguments.command(str(__doc__).split("\n\n")[0], EXAMPLES)
    arguments.add_recipe_arguments(parser)
    add = parser.add_argument_group("how to run it").add_argument
    config = "DeepSpeed JSON, as a path or the bare name of one in ds_configs/ (default: the recipe's own)"
    add("--ds_config", metavar="FILE", help=config)
    add("--hostfile", metavar="FILE", help='machines of the launch, as deepspeed reads them: "name slots=8"')
    add("--out", metavar="DIR", help="run directory (default: runs/<recipe>-<ds_config>)")
    add("--json", action="store_true", help="print JSON, for programs")
    return parser


def main() -> int:
    args = build_parser().parse_args()
    environ = dict(os.environ)  # before libraries add theirs
    quiet.quiet_libraries()
    launcher = checks.run({"launcher": check_launcher})
    recipe = catalog.load(args.recipe, args.set, tiny=args.tiny, steps=args.steps)
    config = jsonfile.find(args.ds_config or recipe.ds_config)
    listed = hosts.read_hosts(args.hostfile) if args.hostfile else None
    name = catalog.full_name(args.recipe) + ("-tiny" if args.tiny else "")
    directory = path_of(args.out, "--out") if args.out else output.run_directory(name, config.stem)
    with contextlib.redirect_stdout(sys.stderr):  # what libraries print is no JSON
        found = [*launcher, *checks.run(table(recipe, config, listed, directory, environ))]
        if processes.world_size() > 1:
            found = gather_checks(found, directory)
    if processes.rank() != 0:
        return 0
    if args.json:
        facts = {"recipe": name, "ds_config": str(config), "checks": [*map(asdict, found)]}
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
    recipe: Recipe, config: Path, listed: Hosts | None, directory: Path, environ: Mapping[str, str]
) -> dict[str, Function]:
    """Return the checks of this process alone, in the order of their lines. `listed`: the hostfile."""
    machine, memory, plan = abilities.detect_machine(), this_machine(), None
    world = processes_of(recipe, listed, memory)
    try:
        plan = resolve(recipe, config, world, machine)
        configured = configuration(plan)
    except ProblemsError as error:
        configured = checks.refused(error.problems)
    ranks = ranks_here(plan, memory, listed) if plan else memory.gpus or 1
    several = len(listed.slots) > 1 if listed else processes.several_machines()
    functions: dict[str, Function] = {
        "packages": partial(start_checks.packages, recipe),
        "accelerator": doctor_checks.accelerator,
        "GPU kernels": start_checks.kernels,
        "precision": partial(doctor_checks.precision, machine),
        "compiler": doctor_checks.compiler,
        "fused kernels": doctor_checks.fused_kernels,
        "CUDA compiler": doctor_checks.cuda_compiler,
        "libaio": partial(doctor_checks.libaio, machine),
        "shared memory": partial(start_checks.shared_memory, ranks),
        "open files": partial(doctor_checks.open_files, plan.layout.world if plan else world or 1),
        "variables": start_checks.variables,
        "host name": partial(host_name, several),
        "port": partial(port, os.environ.get("MASTER_PORT", str(launch_environment.DEFAULT_PORT))),
    }
    if listed is not None:
        functions["hostfile"] = partial(hosts.hostfile, listed, memory.gpus)
        if several:
            functions["hosts"] = partial(hosts.reachable, listed)
            functions["environment"] = partial(hosts.environment, environ)
    functions["configuration"] = lambda: configured
    if plan is not None:
        functions |= {
            "layout": partial(layout, plan, memory, listed),
            "batch": partial(ok, plan.layout.identity()),
            "memory": partial(fits, plan, memory, ranks),
            "ops": partial(doctor_checks.ops, plan.ds),
            "DeepSpeed": partial(deepspeed_accepts, plan, config),
            "rest of the JSON": partial(rest, plan, config),
        }
    return functions | {
        "data": partial(data, recipe),
        "run directory": partial(doctor_checks.writable, directory),
        "disk": partial(start_checks.space, directory, *start_checks.checkpoint_bytes(recipe)),
        "file system": partial(doctor_checks.file_system, directory, several),
    }


def processes_of(recipe: Recipe, listed: Hosts | None, memory: Memory) -> int | None:
    """Count processes by launcher, hostfile or GPUs here; None: as many as the layout needs."""
    if processes.launched():
        return processes.world_size()
    if recipe.parallel.dp is not None:
        return None
    return (listed.total if listed else memory.gpus) or None


def ranks_here(plan: Plan, memory: Memory, listed: Hosts | None) -> int:
    """Count the plan's processes on this machine."""
    world = plan.layout.world
    if processes.launched():
        return min(world, processes.local_world_size())
    if listed is not None and listed.slots:
        return min(world, listed.here or max(listed.slots.values()))
    return min(world, memory.gpus or world)


def configuration(plan: Plan) -> list[Check]:
    """Report the resolved configuration, and each difference between plan and recipe."""
    said = f"{plan.ds_name}: ZeRO-{plan.zero_stage}, offload {plan.offload}, {plan.precision}"
    return [ok(said), *(warning(str(each)) for each in plan.notices if each.key != "unchecked")]


def layout(plan: Plan, memory: Memory, listed: Hosts | None) -> Check:
    """Check that every process has a GPU, and tensor ranks lie on one machine."""
    shape, world = plan.layout, plan.layout.world
    degrees = f"tp {shape.tp} x pp {shape.pp} x dp {shape.dp} = {counted(world, 'process')}"
    smaller = "make it smaller (--set parallel.dp=, parallel.tp=, …)"
    if listed is None and not processes.launched() and memory.gpus and world > memory.gpus:
        came = f"{degrees}, each with a GPU of its own; this machine has {memory.gpus}"
        return failed(came, f"name the machines with --hostfile, or {smaller}")
    if listed is not None and listed.slots and world > listed.total:
        came = f"{degrees}, and the hostfile has {counted(listed.total, 'slot')}: one for each"
        return failed(came, f"name more machines there, or {smaller}")
    slots = set(listed.slots.values()) if listed else set()
    if slots and shape.tp > 1 and any(count % shape.tp for count in slots):
        came = f"{degrees}: tensor parallelism crosses machines of {min(slots)} slots, over a slower network"
        return warning(came, f"--set parallel.tp= a divisor of {min(slots)}, and more pipeline stages")
    return ok(degrees)


def fits(plan: Plan, memory: Memory, ranks: int) -> Check:
    """Check the planner's memory of this machine's `ranks` against its memory."""
    rank = memory_fit.memory_of_plan(plan, gpus=memory.gpus > 0)
    host = rank.host * ranks if memory.gpus else (rank.total + rank.host) * ranks
    rooms = [(host, memory.host_bytes, "of the host")]
    if memory.gpus:
        rooms.insert(0, (rank.total, memory.gpu_bytes, "of a GPU"))
    said = [f"{needed / 1e9:.3g} of {room / 1e9:.3g} GB {place}" for needed, room, place in rooms if needed]
    came = f"takes {', '.join(said)}, as predicted, {error('memory')}"
    share = max(needed / room for needed, room, _ in rooms)
    more = "shard or offload more (--ds_config zero3, zero3_offload), or more processes"
    fix = f"{more}; launch/plan.py says how"
    if host > memory.host_bytes or (memory.gpus and rank.least > memory.gpu_bytes):
        return failed(came, fix)
    snug = share > 1 or host > (1 - SNUG) * memory.host_bytes
    return warning(f"{came}: snug", fix) if snug else ok(came)


def host_name(several: bool) -> Check:
    """Check that the other machines reach this one by its name, if there are `several`."""
    if several:
        interfaces.check_own_address(os.environ)
    return ok(socket.gethostname())


def port(number: str) -> Check:
    """Check that the processes can meet at this port."""
    processes.check_port(number)
    return ok(f"{number}, where the processes meet")


def deepspeed_accepts(plan: Plan, config: Path) -> Check:
    """Check that DeepSpeed itself accepts the resolved JSON."""
    from launch.training import deepspeed_judgement

    deepspeed_judgement.check(plan, str(config))
    return ok("reads the resolved JSON without complaint")


def rest(plan: Plan, config: Path) -> Check:
    """List the unchecked parts of the JSON."""
    said = [str(notice) for notice in plan.notices if notice.key == "unchecked"]
    if sections := known_keys.unread(jsonfile.read(config)):
        said.insert(0, f"{', '.join(sections)}: handed to DeepSpeed as written")
    return unchecked("; ".join(said)) if said else ok("every key is checked")


def data(recipe: Recipe) -> Check:
    """Check for the recipe's text, without reading it."""
    from data.corpus import check_sources

    try:
        check_sources(recipe)
    except ProblemsError:
        raise
    except ValueError as error:
        return failed(str(error))
    return ok(f"{recipe.data.source}: as far as can be told without reading it")


@dataclass(frozen=True)
class RankReport:
    """A rank's report to rank 0.

    Attributes:
        sees: it sees rank 0's file in the run directory.
        ahead: seconds of its clock ahead of rank 0's.
        checks: findings of a machine's first rank; [] of other ranks.
    """

    host: str
    sees: bool
    ahead: float
    versions: dict[str, str | None]
    checks: list[Check]


RANK_REPORT = TypeAdapter(RankReport)


def gather_checks(own: list[Check], directory: Path) -> list[Check]:
    """Gather the checks of all machines on rank 0, and compare the ranks. Collective."""
    path = str(directory.absolute())
    place = start_checks.existing(directory)
    meeting = joining.meet(out=path)
    ahead = time.time() - meeting.from_rank_0(time.time())
    first = processes.rank() == 0
    with shared_directory.token(place) if first else contextlib.nullcontext("") as name:
        there, token, theirs = meeting.from_rank_0((str(place), name, path))
        sees = first or (path == theirs and shared_directory.wait_for(Path(there), token))
        mine = own if processes.local_rank() == 0 else []
        told = RankReport(socket.gethostname(), sees, ahead, description.versions(), mine)
        every = meeting.to_rank_0(RANK_REPORT.dump_python(told, mode="json"))
    meeting.end()
    ranks = [RANK_REPORT.validate_python(each) for each in every]
    merged = merge_checks([(rank.host, rank.checks) for rank in ranks if rank.checks])
    return [*merged, *compare_ranks(ranks, path)]


def compare_ranks(ranks: Sequence[RankReport], path: str) -> list[Check]:
    """Compare the ranks of a launch; `path`: the run directory."""
    versions = {rank.host: rank.versions for rank in ranks}
    met = f"{len(ranks)} have met, on {counted(len(versions), 'machine')}: {', '.join(versions)}"
    found = {"ranks": ok(met), "shared files": ok(f"all see in {path} what rank 0 writes there")}
    if blind := sorted({rank.host for rank in ranks if not rank.sees}):
        came = f"{', '.join(blind)} does not see in {path} what rank 0 writes there"
        fix = "name a directory on a file system that all machines share with --out, by its absolute path"
        found["shared files"] = failed(came, fix)
    if len(versions) > 1:
        farthest = max(ranks, key=lambda rank: abs(rank.ahead))
        whose = f"the clock of {farthest.host}, of all the farthest,"
        found["clock"] = doctor_checks.clock(whose, farthest.ahead)
        differ = [name for name in ranks[0].versions if len({of[name] for of in versions.values()}) > 1]
        said = (
            f"{host}: {', '.join(f'{name} {of[name]}' for name in differ)}" for host, of in versions.items()
        )
        fix = "pip install -r requirements.txt on each of them"
        found["same versions"] = failed("; ".join(said), fix) if differ else ok("on all machines")
    return [replace(check, key=key) for key, check in found.items()]


def merge_checks(told: Sequence[tuple[str, list[Check]]]) -> list[Check]:
    """Merge the checks of all machines, with the machines' names where their findings differ.

    A check that only some machines could make is taken from those.
    """
    said: dict[str, dict[Check, list[str]]] = {}
    for host, found in told:
        for check in found:
            said.setdefault(check.key, {}).setdefault(check, []).append(host)
    every = []
    for checks_of in said.values():
        able = {check: at for check, at in checks_of.items() if check.verdict != "not checked"} or checks_of
        for check, at in able.items():
            everywhere = len(able) == 1 or len(at) == len(told)
            every.append(check if everywhere else replace(check, found=f"{', '.join(at)}: {check.found}"))
    return every


def text(found: Sequence[Check], width: int | None) -> str:
    """Write a line per check, with its fix below it, and the number of each verdict."""
    verdicts = max(len(check.verdict) for check in found) + 2
    column = verdicts + max(len(check.key) for check in found) + 2
    lines = []
    for check in found:
        label = f"{check.verdict:<{verdicts}}{check.key}"
        lines.append(terminal.wrapped(f"{label:<{column}}{check.found}", width, hang=column))
        if check.fix:
            lines.append(terminal.wrapped(f"{'':<{column}}fix: {check.fix}", width, hang=5))
    counts = Counter(check.verdict for check in found)
    said = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ORDER if counts[verdict])
    return "\n".join([*lines, "", f"{counted(len(found), 'check')}: {said}"])


if __name__ == "__main__":
    ends.run(main)
