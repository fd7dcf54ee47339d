"""Training a recipe under layouts, one launch for all of the same number of processes.

python -m torch.distributed.run --nproc_per_node=2 -m launch.parity.layout_runs CASES.json

(started by `run_cases`, which writes CASES.json)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ds_configs.jsonfile import ConfigError
from ds_configs.plan import Machine
from launch.console import quiet
from launch.machine import abilities, ending
from launch.machine.processes import rank, start_processes
from launch.parity.comparison import REFUSED, Outcome, read_outcome
from launch.parity.layout_cases import LayoutCase, case_plan
from recipes import catalog
from recipes.schema import Recipe

ROOT = Path(__file__).resolve().parents[2]
Start = Callable[[int, Path, Path], None]  # (processes, CASES.json, log to write)


def start_torchrun(processes: int, jobs: Path, log: Path) -> None:
    """Run the cases of a file on so many ranks, by torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command = [sys.executable, *launcher, "-m", "launch.parity.layout_runs", str(jobs)]
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
    with log.open("w") as file:
        environment = {**os.environ, "PYTHONPATH": path}
        subprocess.run(command, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False)


def run_cases(
    recipe: Recipe, cases: Sequence[LayoutCase], out: Path, start: Start = start_torchrun
) -> list[Outcome]:
    """Run every case; those of one number of processes share a launch, which takes longer than they."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "recipe.yaml").write_text(catalog.dump(recipe))
    outcomes = {}
    for processes in sorted({c.processes for c in cases}):
        group = [c for c in cases if c.processes == processes]
        jobs, log = out / f"jobs-{processes}.json", out / f"log-{processes}.txt"
        jobs.write_text(json.dumps([vars(c) for c in group]))
        names = "; ".join(c.name for c in group)
        print(f"{processes} process{'es' if processes > 1 else ''}: {names}", flush=True)
        start(processes, jobs, log)
        for case in group:
            run = out / case.folder
            outcomes[case.name] = read_outcome(case.name, case.processes, run, log, case.compiled_from)
    return [outcomes[c.name] for c in cases]


def work(jobs: Path) -> None:
    """The ranks of one launch: every case in turn, in the same process group."""
    quiet.quiet_libraries()
    out = jobs.parent
    recipe = catalog.load_resolved(out / "recipe.yaml")
    machine = abilities.detect_machine()
    with ending.clean_exit():
        start_processes()
        for case in (LayoutCase(**c) for c in json.loads(jobs.read_text())):
            run_case(recipe, case, out / case.folder, machine)


def run_case(recipe: Recipe, case: LayoutCase, directory: Path, machine: Machine) -> None:
    """Train one case: a refused one leaves its reason, a failing one ends the launch with its traceback."""
    from data.corpus import build
    from launch.machine import description
    from launch.runs import vocabulary
    from launch.runs.admission import admit
    from launch.runs.recorder import Recorder, Silence
    from launch.training.job import Job
    from launch.training.loop import train
    from modeling.parallel.process_grid import ProcessGrid

    try:
        plan = case_plan(recipe, case, machine)
    except ConfigError as e:
        if rank() == 0:
            directory.mkdir(parents=True)
            (directory / REFUSED).write_text(str(e))
        return
    job = Job(plan, case.name, directory, compiled=case.compiled_from is not None, record_gradients=True)
    corpus = build(recipe, say=lambda text: None)
    recorder = Silence()
    if rank() == 0:
        opened = admit(
            directory, plan, name=case.name, command=sys.argv, resume=False, tiny=False, emulated_fp16=False
        )
        vocabulary.keep(opened.path, corpus.tokenizer)
        recorder = Recorder(
            opened, plan, name=case.name, corpus_facts=corpus, start_step=0, described=description.describe(),
            original=recipe, tiny=False, emulated=False, progress=False,
        )  # fmt: skip
    with recorder:
        train(job, recorder, corpus, ProcessGrid(case.tp, case.pp, case.dp))
        recorder.finish("ok")


if __name__ == "__main__":
    work(Path(sys.argv[1]))
