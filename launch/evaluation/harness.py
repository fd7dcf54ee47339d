"""Tasks of lm-evaluation-harness on a model of ours.

Needs lm-eval (the extra `evaluate`). Every rank builds the same requests, so that lm-eval sees one process.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from launch.evaluation.likelihoods import Likelihoods
from launch.evaluation.protocols import FACTS, TASKS, TaskText
from recipes.problems import Problem, ProblemsError, some

OWN = Path(__file__).parent / "tasks"  # task files of this project
SOURCE = f"lm-eval {lm_eval.__version__}"
WITHOUT_NETWORK = (
    "check the network; or set HF_HOME to a cache that holds the data; or give --include_path DIR with a "
    "task file of your own on local files (dataset_path: json, dataset_kwargs: {data_files: ...})"
)
BOOTSTRAPS = 100  # for standard errors without a formula


@dataclass(frozen=True)
class HarnessTask:
    """One requested name with the tasks behind it, loaded. `text`: facts on the data of our own tasks."""

    name: str
    loaded: Mapping[str, Any]
    text: TaskText | None


class Adapter(TemplateLM):
    """lm-eval's model interface over `Likelihoods`."""

    def __init__(self, likelihoods: Likelihoods):
        super().__init__()
        self.likelihoods = likelihoods
        self.max_length = likelihoods.window

    @property
    def eot_token_id(self) -> int:
        return self.likelihoods.end

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        return self.likelihoods.encode(string)

    def loglikelihood(
        self, requests: Any, disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: Any, **_: Any
    ) -> list[tuple[float, bool]]:
        return self.likelihoods.of_continuations(
            [(before, after) for _texts, before, after in requests]
        )

    def loglikelihood_rolling(
        self, requests: Any, disable_tqdm: bool = True
    ) -> list[float]:
        return self.likelihoods.of_texts([request.args[0] for request in requests])

    def generate_until(self, requests: Any, disable_tqdm: bool = True) -> list[str]:
        return self.likelihoods.written([request.args for request in requests])


def load(
    names: Sequence[str], own: Mapping[str, Any], include_path: str | None
) -> list[HarnessTask]:
    """Load tasks by their names, with their data. `own`: what our own tasks read (`protocols`).

    Raises ProblemsError: a name is unknown, or data cannot be read.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    managers = {}
    problems = []
    for name in names:
        manager = managers[name] = _manager(
            name in TASKS, frozenset(own.items()), include_path
        )
        if name not in manager.all_tasks:
            near = difflib.get_close_matches(name, [*manager.all_tasks, *TASKS], 3)
            fix = (
                f"did you mean {some(near)}?"
                if near
                else "`lm_eval ls tasks` lists them"
            )
            problems.append(Problem("--tasks", name, f"{SOURCE} has no such task", fix))
    if problems:
        raise ProblemsError(problems)
    return [_loaded(name, manager) for name, manager in managers.items()]


@cache
def _manager(
    is_own: bool, own: frozenset[tuple[str, Any]], include_path: str | None
) -> TaskManager:
    """Index the task files of this project, or lm-eval's and those of the user."""
    if is_own:
        return TaskManager(include_path=OWN, include_defaults=False, metadata=dict(own))
    return TaskManager(include_path=include_path)


def _loaded(name: str, manager: TaskManager) -> HarnessTask:
    try:
        loaded = manager.load([name])
    except ProblemsError:
        raise
    # datasets, huggingface_hub, httpx and fsspec each raise their own
    except Exception as error:
        first = (str(error).splitlines() or [""])[0][:200]
        rule = f"its data cannot be read: {type(error).__name__}: {first}"
        raise ProblemsError.of("--tasks", name, rule, WITHOUT_NETWORK) from error
    text = (
        next(iter(loaded["tasks"].values())).dataset[FACTS] if name in TASKS else None
    )
    return HarnessTask(name, loaded, text)


def measure(
    task: HarnessTask, likelihoods: Likelihoods, limit: int | None
) -> Iterator[tuple[str, dict[str, float], int]]:
    """Score a task; yield its name, figures and number of documents. Collective.

    A group that has figures of its own is one result, another one a result of each of its tasks.
    """
    # lm-eval would fork ranks for its standard errors
    os.environ["DISABLE_MULTIPROC"] = "1"
    found: Any = evaluate(
        Adapter(likelihoods),
        task.loaded,
        limit=limit,
        log_samples=False,
        bootstrap_iters=BOOTSTRAPS,
    )
    results = found["results"] | found.get("groups", {})
    figures = {name: _figures(values) for name, values in results.items()}
    names = [task.name] if figures.get(task.name) else list(task.loaded["tasks"])
    sizes = {name: each["effective"] for name, each in found["n-samples"].items()}
    whole = sum(sizes.values())
    for name in names:
        yield name, figures[name], sizes.get(name, whole)


def _figures(values: Mapping[str, Any]) -> dict[str, float]:
    """Name each figure by its metric, and by its filter where there is one."""
    figures = {}
    for key, value in values.items():
        metric, comma, way = key.partition(",")
        if comma and isinstance(value, (int, float)):
            figures[metric if way == "none" else f"{metric} ({way})"] = float(value)
    return figures
