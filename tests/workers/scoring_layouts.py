"""Scores one model under several layouts, in one launch.

scoring_layouts.py JOBS.json     run, texts (.jsonl), long (.txt), out, and cases

A case has a name, settings, a batch and a precision.

Leaves the score of every window and request of each case in `out`, by the case's name.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

from launch.console import terminal
from launch.machine import description
from launch.ranks import ending, processes

terminal.quiet_libraries()
MACHINE = description.detect_machine()

# After the accelerator is chosen.
from data.tasks.windows import overlapping_windows  # noqa: E402
from launch.evaluation.likelihoods import Likelihoods  # noqa: E402
from launch.evaluation.scorer import Scorer, load_model, steps_of  # noqa: E402
from launch.evaluation.scoring import figures_of, own_text  # noqa: E402
from launch.evaluation.scoring_plan import ScoringWishes, checked_job  # noqa: E402
from launch.experiments.parity.groups import temporary_groups  # noqa: E402
from launch.ranks.watchdog import Watchdog  # noqa: E402
from modeling.parallel.process_grid import ProcessGrid  # noqa: E402

WINDOW = 64


def score_case(run: str, texts: str, long: str, case: dict) -> dict:
    how = {"batch": 2, **{name: value for name, value in case.items() if name != "name"}}
    world = processes.world_size()
    asked = {"perplexity": dict(text=texts, stride=24), "overlapping": dict(text=long, stride=24)}
    jobs = {
        name: checked_job(ScoringWishes(run, **task, **how), world, MACHINE) for name, task in asked.items()
    }
    job = jobs["perplexity"]
    plan = job.plan
    grid = ProcessGrid(plan.layout.tp, plan.layout.pp, plan.layout.dp)
    model = load_model(plan, grid, str(job.model.weights))
    scorer = Scorer(model, plan, grid, Watchdog(None, 0))
    found = {}
    for name, each in jobs.items():
        text = own_text(each, print)
        scores = scorer.score(text.windows)
        found[name] = dict(
            figures=figures_of(text.windows, scores, text.facts.words, text.bytes),
            nll=[s.nll for s in scores],
            right=[s.right for s in scores],
            cut=[step.scored < step.length for step in steps_of(text.windows, 1, plan)],
        )
    return {**found, "requests": requests(scorer, job.model.tokenizer, texts)}


def requests(scorer: Scorer, tokenizer: object, texts: str) -> dict:
    """What lm-eval's three kinds of requests get."""
    passages = [json.loads(line)["text"].rsplit(" ", 2) for line in Path(texts).read_text().splitlines()]
    asked = Likelihoods(scorer, tokenizer, WINDOW)
    wholes = [asked.encode(" ".join(parts)) for parts in passages]
    befores = [asked.encode(parts[0]) for parts in passages]
    pairs = [(b, whole[len(b) :]) for b, whole in zip(befores, wholes, strict=True)]
    told = asked.of_continuations(pairs)
    whole_texts = [" ".join(parts) for parts in passages]
    rolling = asked.of_texts(whole_texts)
    cut = partial(overlapping_windows, length=16, stride=5)
    overlapping = Likelihoods(scorer, tokenizer, 16, cut).of_texts(whole_texts)
    contexts = [parts[0] for parts in passages]
    how = [dict(max_gen_toks=9), dict(max_gen_toks=9, until=["e", "a"]), dict(max_gen_toks=60, until="the")]
    written = asked.written([(context, how[i % 3]) for i, context in enumerate(contexts)])
    return dict(
        likelihoods=[each[0] for each in told], right=[each[1] for each in told],
        rolling=rolling, overlapping=overlapping, written=written,
        seen=[len(asked.windows), len(asked.scores), asked.cut],
    )  # fmt: skip


if __name__ == "__main__":
    with ending.clean_exit():
        processes.start_processes()
        jobs = json.loads(Path(sys.argv[1]).read_text())
        for case in jobs["cases"]:
            with temporary_groups():
                found = score_case(jobs["run"], jobs["texts"], jobs["long"], case)
            if processes.rank() == 0:
                (Path(jobs["out"]) / f"{case['name']}.json").write_text(json.dumps(found))
