"""What can be said of a recipe although some of its fields are missing or wrong, so that all its problems come at once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from recipes.key_paths import children
from recipes.problems import nearest, some

_DS_CONFIGS = (
    Path(__file__).resolve().parents[1] / "ds_configs"
)  # a folder of data here; that package imports this one

Problem = tuple[tuple[str, ...], str]  # key, message


def incomplete(
    model: type[BaseModel],
    values: Mapping[str, Any],
    wrong: set[tuple[str | int, ...]],
    path: tuple[str, ...] = (),
) -> Any:
    """A `model` without the fields at `wrong` and without required ones that `values` lacks: to read them raises AttributeError.

    Values are taken as they are in the file, lists of models included.
    """
    built = model.model_construct(_fields_set=set())
    below = children(model)
    for name, field in model.model_fields.items():
        key = field.alias or name
        value = values.get(key, ...)
        if (*path, key) in wrong:
            built.__dict__.pop(name, None)
        elif value is not ...:
            inner = below[key]
            built.__dict__[name] = (
                incomplete(inner, value, wrong, (*path, key))
                if inner and isinstance(value, Mapping)
                else value
            )
            built.model_fields_set.add(name)
    return built


def row_problems(values: Mapping[str, Any], columns: Sequence[str]) -> list[Problem]:
    """Of a row of a table: what needs a few of its fields only, and no layout but the one it states."""
    return [*_ds_config(values.get("ds_config")), *_batch(values), *_cells(values.get("published"), columns)]


def _ds_config(name: Any) -> Iterator[Problem]:
    """A bare name that is no file of ds_configs/; a path may be of another machine, and is looked for when it is used."""
    if not isinstance(name, str) or Path(name).name != name or Path(name).is_file():
        return
    known = sorted(path.stem for path in _DS_CONFIGS.glob("*.json"))
    if name.removesuffix(".json") not in known:
        near = nearest(name, known)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there is: {some(known)}"
        yield ("ds_config",), f"ds_config={name}: no such file in ds_configs/: {hint}"


def _batch(values: Mapping[str, Any]) -> Iterator[Problem]:
    """micro x accumulation x dp = global, where all four are stated."""
    batch, parallel = (
        {} if not isinstance(values.get(key), Mapping) else values[key] for key in ("batch", "parallel")
    )
    micro, accumulation, whole, dp = (
        batch.get("micro"),
        batch.get("accumulation"),
        batch.get("global"),
        parallel.get("dp"),
    )
    stated = (micro, accumulation, whole, dp)
    if not all(type(number) is int and number > 0 for number in stated) or micro * accumulation * dp == whole:
        return
    fixes = [f"batch.global to {micro * accumulation * dp}"]
    fixes += [f"batch.accumulation to {whole // (micro * dp)}"] if whole % (micro * dp) == 0 else []
    fixes += [f"batch.micro to {whole // (accumulation * dp)}"] if whole % (accumulation * dp) == 0 else []
    fixes += (
        [f"parallel.dp to {whole // (micro * accumulation)}"] if whole % (micro * accumulation) == 0 else []
    )
    yield (
        ("batch",),
        (
            f"batch.micro={micro} x batch.accumulation={accumulation} x parallel.dp={dp} = {micro * accumulation * dp} is not "
            f"batch.global={whole}: micro x accumulation x dp = global; set {' or '.join(fixes)}"
        ),
    )


def _cells(published: Any, columns: Sequence[str]) -> Iterator[Problem]:
    row = published.get("row") if isinstance(published, Mapping) else None
    if not columns or not isinstance(row, str) or (count := row.count("|") + 1) == len(columns):
        return
    cells = itertools.zip_longest(columns, (cell.strip() for cell in row.split("|")), fillvalue="?")
    yield (
        ("published", "row"),
        (
            f"published.row has {count} cells for {len(columns)} columns ({', '.join(f'{name}: {cell}' for name, cell in cells)}): one cell "
            "for each heading, separated by |, blank where the source prints none; add the missing or join the surplus ones"
        ),
    )
