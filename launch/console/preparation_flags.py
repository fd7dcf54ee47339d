"""The flags of a data preparation, made of `Origin` and `Tokenizer` of `recipes.schema` and of `Settings`."""

from __future__ import annotations

import argparse
import os
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pydantic import BaseModel

from data.prepare.settings import Settings, in_flags, options
from recipes.problems import Problem, ProblemsError
from recipes.schema import Origin, Tokenizer


def add(parser: argparse.ArgumentParser) -> None:
    """All flags of launch/prepare_data.py."""
    add_source(parser.add_argument_group("what is read"))
    group = parser.add_argument_group("what is made")
    group.add_argument("--out", required=True, metavar="DIR", help="directory to make")
    group.add_argument("--tokenizer", required=True, metavar="KIND[:PATH]", help=_help(Tokenizer, "kind"))
    _add_options(group, "made")
    _add_options(parser.add_argument_group("what is left out"), "left out")
    group = parser.add_argument_group("how it runs (changes no byte of the store)")
    _add_options(group, "run")
    force = "give up the unfinished work of another command in OUT.partial, and replace an OUT that another"
    force += " command made once the new one is complete"
    group.add_argument("--force", action="store_true", help=force)
    parser.set_defaults(workers=len(os.sched_getaffinity(0)))


def add_source(group: argparse._ArgumentGroup) -> None:
    """The flags of a recipe's `data` section that say what is read, and those of `Settings`."""
    kinds = get_type_hints(Origin)
    for name, field in Origin.model_fields.items():
        if name == "name":
            group.add_argument("--name", nargs="+", default=[], metavar="PATH", help=_help(Origin, name))
        elif name != "streaming":  # a preparation reads everything once
            _add(group, name, kinds[name], field.default, _help(Origin, name))
    _add_options(group, "read")


def _add_options(group: argparse._ArgumentGroup, chosen: str) -> None:
    """The flags of one group of `Settings`."""
    kinds = get_type_hints(Settings)
    for field in options():
        shown = field.metadata["option"]
        if shown.group == chosen:
            _add(group, field.name, kinds[field.name], field.default, shown.help, shown.metavar)


def _add(
    group: argparse._ArgumentGroup, name: str, kind: Any, default: Any, help: str, metavar: str | None = None
) -> None:
    """A flag for a field of this type. The word none stands for None where that is not the default."""
    kinds = [k for k in get_args(kind) if k is not type(None)] if get_origin(kind) is UnionType else [kind]
    flag = f"--{name}"
    if default not in (None, True, False, ()) and "default:" not in help:
        help += f" (default: {default})"
    if kind is bool and default:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=True, help=help)
        group.add_argument(f"--no_{name}", dest=name, action="store_false", help=argparse.SUPPRESS)
    elif kind is bool:
        group.add_argument(flag, action="store_true", help=help)
    elif get_origin(kind) is tuple:
        group.add_argument(flag, nargs="+", default=[], metavar=metavar, help=help)
    elif get_origin(kind) is Literal:
        choices = [choice for choice in get_args(kind) if choice != "store"]  # which holds tokens, not text
        group.add_argument(flag, choices=choices, default=default, help=help)
    else:
        optional = len(kinds) < len(get_args(kind))

        def read(text: str) -> Any:
            return None if optional and text == "none" else kinds[0](text)

        # For argparse's message about what is neither.
        read.__name__ = f"{kinds[0].__name__}{' or none' if optional else ''}"
        group.add_argument(flag, type=read, default=default, metavar=metavar, help=help)


def _help(model: type[BaseModel], name: str) -> str:
    return str(model.model_fields[name].description).replace("%", "%%")


def settings_of(args: argparse.Namespace) -> Settings:
    """What the flags say.

    Raises:
        ProblemsError: flags that contradict each other, all problems at once.
    """
    problems = []
    if args.source == "packaged" and args.name:
        fix = "give --source jsonl, parquet, text, wikipedia or hub"
        problems.append(Problem("--source", "--name with --source packaged", "which has no name", fix))
    if args.source != "packaged" and not args.name:
        fix = "give paths or globs of the files (hub: names of datasets)"
        problems.append(Problem("--name", f"--source {args.source} needs --name", fix=fix))
    kind, _, path = args.tokenizer.partition(":")
    kinds = [k for k in get_args(get_type_hints(Tokenizer)["kind"]) if k != "store"]
    if kind not in (*kinds, "store") or (kind == "file" and not path):
        fix = f"give one of {', '.join(kinds)}; file as file:PATH"
        problems.append(Problem("--tokenizer", f"--tokenizer {args.tokenizer}", fix=fix))
    elif path and kind not in ("file", "bert_uncased", "bert_cased", "store"):
        came, rule = f"--tokenizer {args.tokenizer}", f"{kind} takes no path"
        problems.append(Problem("--tokenizer", came, rule, f"give {kind}, or file:{path}"))
    if problems:
        raise ProblemsError(problems)
    own = {field.name: getattr(args, field.name) for field in options()}
    own["decontaminate"] = tuple(args.decontaminate)
    shared = {name: getattr(args, name) for name in Origin.model_fields if name not in ("name", "streaming")}
    origins = tuple(Origin(name=name, **shared) for name in args.name or [None])
    return Settings(origins=origins, tokenizer=Tokenizer(kind=kind, path=path or None), **own)


def shown(error: Exception) -> str:
    """An error's text with these flags in place of the keys of a recipe."""
    if not isinstance(error, ProblemsError):
        return str(error)
    return "\n".join(problem.render(in_flags) for problem in error.problems)
