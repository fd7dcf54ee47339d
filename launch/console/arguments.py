"""Flags that choose a recipe and a DeepSpeed configuration, shared by the commands."""

from __future__ import annotations

import argparse

from recipes import catalog


def command(description: str, examples: str) -> argparse.ArgumentParser:
    """A parser whose --help teaches: what the command does, then examples."""
    parser = argparse.ArgumentParser(
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    # The deepspeed launcher passes --local_rank=N; the environment says the same.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    return parser


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to train")
    group.add_argument("--recipe", default=catalog.DEFAULT_RECIPE, metavar="TABLE/ROW", help="a row of recipes/ or of your own "
                       "YAML file, as file.yaml:row (default: %(default)s)")  # fmt: skip
    group.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one field of the recipe, e.g. "
                       "--set batch.micro=4 --set optimizer.lr=3e-4; repeatable")  # fmt: skip
    group.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="end after N optimizer steps; the learning-rate schedule stays the recipe's",
    )
    group.add_argument(
        "--tiny",
        action="store_true",
        help="shrink the recipe to what two CPU cores carry, keeping its code path",
    )


def list_recipes() -> str:
    entries = catalog.names()
    width = max(len(e.name) for e in entries)
    return "\n".join(f"{e.name:<{width}}  {e.title}" for e in entries)
