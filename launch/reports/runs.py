"""One run directory, read for a report: whole, interrupted, still going on, or with files that cannot be read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from launch.machine import out_of_memory
from launch.reports.numbers import is_number
from launch.runs.directory import RunDirectory
from launch.runs.result import result_row
from recipes import catalog
from recipes.schema import Recipe

STATUS = {"ok": "measured"}  # of result.json -> as shown; the others are shown as they are
UNFINISHED, UNREADABLE, OOM = "unfinished", "unreadable", "OOM"

# Numbers of result.json that a report shows or computes with; a text or a NaN in their place is a broken file.
NUMBERS = (
    "parameters", "parameters_summed_over_tp_ranks", "steps", "skipped_steps", "train_loss", "validation_loss", "test_loss",
    "uniform_entropy", "unigram_entropy", "seconds_per_step", "data_wait_share", "samples_per_s", "tokens_per_s", "tflops",
    "exact_tflops", "peak_memory_bytes", "cached_bytes",
)  # fmt: skip
MOST_NAMED = 5  # broken lines of one file
DRAWN = ("kind", "step", "loss", "mlm_loss", "seconds")
# Fields of a step that are computed with.
STEP_FIELDS = ("loss", "seconds", "launch_step", "skipped", "peak_memory_bytes", "memory_kind")


@dataclass(frozen=True)
class Run:
    """What a run directory says. `row`: as `results.result_row` makes it; of a broken or old file what it has, and every one of NUMBERS."""

    path: Path
    label: str
    name: str  # of its recipe, table/row
    tiny: bool
    status: str  # "measured", or what became of it
    row: Mapping[str, Any]
    recipe: Recipe | None
    ds_config: Mapping[str, Any]
    launches: Sequence[Mapping[str, Any]]
    records: Sequence[Mapping[str, Any]]  # of steps and validations, cut down to DRAWN
    problems: tuple[str, ...]

    @property
    def table(self) -> str:
        return self.name.rpartition("/")[0]

    @property
    def launch(self) -> Mapping[str, Any]:
        """The newest launch; empty where environment.json says nothing."""
        return self.launches[-1] if self.launches else {}

    @property
    def started(self) -> datetime | None:
        """Of the newest launch."""
        try:
            return datetime.strptime(str(self.launch.get("started")), "%Y-%m-%dT%H:%M:%S%z")
        except ValueError:
            return None

    @property
    def deviations(self) -> list[str]:
        return [str(line) for line in self.row.get("deviations") or ()]

    @property
    def loss_key(self) -> str:
        """ "mlm_loss" of a BERT, whose other part is not per token; else "loss"."""
        return "mlm_loss" if any(record.get("mlm_loss") is not None for record in self.records) else "loss"


def newest_first(runs: Sequence[Run]) -> list[Run]:
    return sorted(runs, key=lambda run: run.started.timestamp() if run.started else 0.0, reverse=True)


def read_run(path: Path, label: str, original_of: Callable[[str], Recipe | None]) -> Run:
    """Read everything of a run that can be read; what cannot is named in `problems`.

    `original_of`: the recipe of that name as the tables have it now, for the deviations of a run that wrote none.
    """
    problems: list[str] = []
    at = RunDirectory(path)
    recipe = _recipe(at.recipe_yaml, problems)
    result = _mapping(at.result_json, problems)
    launches = [
        launch
        for launch in _mapping(at.environment_json, problems).get("launches", ())
        if isinstance(launch, Mapping)
    ]
    records, dropped = _records(at.metrics_jsonl, problems)
    launch = launches[-1] if launches else {}
    name, tiny = _name(result, launch, recipe, label, original_of)
    steps = [record["step"] for record in records if record["kind"] == "step"]
    ds_config = _mapping(at.ds_config_json, problems)
    # A resumed run keeps its old result.json until it ends again; it may go on from a checkpoint before the last step.
    going_on = not at.result_json.exists() or bool(
        result and steps and _went_on(steps[-1], result.get("steps") or 0, dropped)
    )
    oom = out_of_memory.reason(path)
    if going_on:
        ended = (OOM, oom) if oom else (UNFINISHED, None)
        row = _row_of_metrics(
            recipe, launch, records, name, tiny, original_of(name), ds_config, ended, at, problems
        )
        status = ended[0] if row or oom else UNREADABLE
    else:
        said = str(result.get("status") or UNREADABLE)
        row, status = result, STATUS.get(said, said)
        if oom and said not in ("ok", OOM):  # of a launch that wrote no result
            row, status = (
                {**result, "status": OOM, "deviations": [f"{OOM}: {oom}", *_list(result, "deviations")]},
                OOM,
            )
    # Many long runs are held at once: only what is drawn is kept of a step.
    kept = [
        {key: record[key] for key in DRAWN if key in record}
        for record in records
        if record["kind"] in ("step", "validation")
    ]
    return Run(
        path, label, name, tiny, status, _checked_numbers(row, at.result_json, problems), recipe, ds_config,
        launches, kept, tuple(problems),
    )  # fmt: skip


def _name(
    result: Mapping, launch: Mapping, recipe: Recipe | None, label: str, original_of: Callable
) -> tuple[str, bool]:
    stated = result.get("deviations")
    name = str(result.get("recipe") or launch.get("recipe") or label)
    tiny = (
        (isinstance(stated, list) and any(str(line).startswith("tiny:") for line in stated))
        or "--tiny" in (launch.get("command") or ())
        or (recipe is not None and recipe.title.endswith(" (tiny)"))
        or (name.endswith("-tiny") and original_of(name) is None)
    )
    return (name.removesuffix("-tiny") if tiny else name), tiny


def _row_of_metrics(
    recipe,
    launch,
    records,
    name,
    tiny,
    original,
    ds_config,
    ended: tuple[str, str | None],
    at: RunDirectory,
    problems: list[str],
) -> dict[str, Any]:
    """A results row from what is recorded so far; empty where recipe.yaml or environment.json do not say enough.

    `ended`: (status, its reason).
    """
    if recipe is None:
        return {}
    try:
        facts = launch["plan"]
        plan = SimpleNamespace(
            recipe=recipe, ds=ds_config, **{**facts, "layout": SimpleNamespace(**facts["layout"])}
        )
        row = result_row(
            plan, records, name=name, described=launch, original=original, tiny=tiny,
            emulated_fp16="--emulate_fp16" in launch["command"], status=ended[0], reason=ended[1],
        )  # fmt: skip
    except (KeyError, TypeError, AttributeError) as error:
        problems.append(f"{at.environment_json}: does not say how the run was made ({error!r}): restore it")
        return {}
    if ended[0] != UNFINISHED:
        return row
    said = f"unfinished: no result.json of its {row['steps']} steps yet; taken from metrics.jsonl (the run goes on, or was killed)"
    return {**row, "deviations": [said, *row["deviations"]]}


def _recipe(path: Path, problems: list[str]) -> Recipe | None:
    try:
        return catalog.load_resolved(path)
    except (ValueError, OSError) as error:
        problems.append(
            f"{path}: not the recipe of a run ({_one_line(error)}): restore it, or leave this run out"
        )
        return None


def _mapping(path: Path, problems: list[str]) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        problems.append(f"{path}: not JSON ({_one_line(error)}): restore it, or leave this run out")
        return {}
    if not isinstance(value, dict):
        problems.append(
            f"{path}: holds {type(value).__name__}, not an object: restore it, or leave this run out"
        )
        return {}
    return value


def _went_on(step: int, ended_at: Any, dropped: bool) -> bool:
    """Whether metrics.jsonl is not that of result.json. With lines dropped, fewer steps are no sign of a run that was resumed."""
    return step > ended_at if dropped and is_number(ended_at) else step != ended_at


def _records(path: Path, problems: list[str]) -> tuple[list[dict[str, Any]], bool]:
    """(the records of metrics.jsonl that can be read, whether some cannot); each of those is a problem with its line."""
    try:
        lines = (
            path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        )  # what follows the last newline is not yet written
    except OSError as error:
        problems.append(f"{path}: {_one_line(error)}")
        return [], True
    records, broken = [], []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            problem = _record_problem(record)
        except ValueError as error:
            problem = f"not a line of metrics ({_one_line(error)})"
        if problem:
            broken.append(
                f"{path}:{number}: {problem}: left out, with the other lines kept; delete that line, or restore the file"
            )
        else:
            records.append(record)
    more = len(broken) - MOST_NAMED
    problems += [*broken[:MOST_NAMED], f"{path}: {more} more lines like these"] if more > 0 else broken
    return records, bool(broken)


def _record_problem(record: Any) -> str | None:
    if (
        not isinstance(record, dict)
        or not isinstance(record.get("kind"), str)
        or not isinstance(record.get("step"), int)
    ):
        return "not a record of metrics, which has a kind and a step"
    missing = [key for key in STEP_FIELDS if key not in record] if record["kind"] == "step" else []
    if missing:
        return f"step {record['step']} has no {', '.join(missing)}"
    wrong = [
        key
        for key in ("loss", "mlm_loss", "seconds")
        if record.get(key) is not None and not is_number(record[key])
    ]
    return f"step {record['step']}: {wrong[0]}={record[wrong[0]]!r} is no number" if wrong else None


def _checked_numbers(row: Mapping[str, Any], path: Path, problems: list[str]) -> dict[str, Any]:
    checked = {**dict.fromkeys((*NUMBERS, "status")), **row}
    for key, kind in (("deviations", list), ("validation_parts", dict), ("layout", dict)):
        if not isinstance(checked.get(key, kind()), kind):
            problems.append(f"{path}: {key}={checked.pop(key)!r} is no {kind.__name__}: restore the file")
    for key in NUMBERS:
        if checked[key] is not None and not is_number(checked[key]):
            problems.append(f"{path}: {key}={checked[key]!r} is no number: restore the file")
            checked[key] = None
    return checked


def _list(result: Mapping[str, Any], key: str) -> list:
    value = result.get(key)
    return value if isinstance(value, list) else []


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
