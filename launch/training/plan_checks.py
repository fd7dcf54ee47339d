"""The checks of a plan: those of a start, and others, on every machine of a launch."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from pydantic import TypeAdapter

from ds_configs import known_keys
from ds_configs.findings import read
from ds_configs.plan import Plan
from launch.console.text_table import Page
from launch.machine import checks, description, drivers
from launch.machine.checks import Check, ok, unchecked, warning
from launch.ranks import joining, processes
from launch.ranks.meeting import Meeting
from launch.training.job import Job
from recipes.problems import counted, existing, some

# of a rank: its machine's name and findings
REPORT = TypeAdapter(tuple[str, list[Check]])


def of_machine(job: Job) -> list[Check]:
    """Make the checks of a start on this machine, and those that take longer or only advise."""
    versions = description.versions().items()
    return checks.run(
        {
            "accelerator": drivers.accelerator,
            "compiler": drivers.compiler,
            "fused kernels": drivers.fused_kernels,
            "CUDA compiler": drivers.cuda_compiler,
            **checks.of_gpus(),
            **checks.quick(job.plan.recipe, job.directory),
            "versions": lambda: ok(", ".join(f"{name} {of}" for name, of in versions)),
            "tensor parallelism": partial(tensor_ranks, job.plan),
            "DeepSpeed JSON": partial(unread_sections, job.facts.ds_config),
        }
    )


def tensor_ranks(plan: Plan) -> Check:
    """Check that the tensor ranks of this launch lie on one machine."""
    here = processes.local_world_size()
    tp = plan.layout.tp
    if processes.several_machines() and here % tp:
        return warning(
            f"parallel.tp={tp} crosses machines of {counted(here, 'process')}, over a slower network",
            f"--set parallel.tp= a divisor of {here}, and more pipeline stages",
        )
    return ok(f"{tp} on one machine")


def unread_sections(config: Path | None) -> Check:
    """Name the sections of the JSON that are checked by nobody before DeepSpeed reads them."""
    sections = known_keys.unread(read(config)) if config else []
    if sections:
        return unchecked(f"{', '.join(sections)} handed to DeepSpeed as written")
    return ok("every section is known")


def of_machines(job: Job, meeting: Meeting) -> list[Check]:
    """Gather the findings of all machines on rank 0; if something failed anywhere, all end. Collective."""
    own = of_machine(job)
    if not processes.launched():
        return own
    meeting.all_or_none(partial(checks.refuse, own))
    joining.check_places(meeting)
    from launch.records import shared_directory

    shared_directory.check_all(meeting, existing(job.directory))
    report = socket.gethostname(), own if processes.local_rank() == 0 else []
    reports = meeting.to_rank_0(REPORT.dump_python(report, mode="json"))
    findings = merged([REPORT.validate_python(each) for each in reports])
    meeting.all_or_none(partial(checks.refuse, findings))
    return findings


def merged(reports: Sequence[tuple[str, list[Check]]]) -> list[Check]:
    """Merge the findings of machines, with the machines' names where findings differ.

    A check that only some machines could make is taken from those. Versions that differ are a failure.
    """
    said: dict[str, dict[Check, list[str]]] = {}
    for host, made in reports:
        for check in made:
            said.setdefault(check.key, {}).setdefault(check, []).append(host)
    told = list[Check]()
    for hosts_of in said.values():
        told += _told_apart(hosts_of)
    return told


def _told_apart(hosts_of: dict[Check, list[str]]) -> Iterator[Check]:
    able = [check for check in hosts_of if check.verdict != "not checked"]
    for check in able or hosts_of:
        if len(able) > 1:
            told = f"{some(hosts_of[check])}: {check.found}"
            check = replace(check, found=told)
            if check.key == "versions":
                fix = "make them equal on all machines"
                check = replace(check, verdict="failed", fix=fix)
        yield check


def text(made: Sequence[Check], width: int | None) -> str:
    """Write how many checks found nothing, what was not checked and why, and a line for each finding."""
    good = sum(check.verdict == "ok" for check in made)
    lines = [f"{counted(good, 'check')} ok"]
    whys: dict[str, list[str]] = {}
    for check in made:
        if check.verdict == "not checked":
            whys.setdefault(check.found, []).append(check.key)
        elif check.verdict != "ok":
            fix = f"; {check.fix}" * bool(check.fix)
            lines.append(f"! {check.verdict}: {check.key}: {check.found}{fix}")
    unseen = "; ".join(f"{', '.join(keys)} ({why})" for why, keys in whys.items())
    lines[0] += f"; not checked: {unseen}" * bool(unseen)
    page = Page(width)
    page.text(*lines, hang=2)
    return str(page)
