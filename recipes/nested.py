"""Nested mappings by dotted key: their leaves, and in which leaves two of them differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """("a.b", value) for every leaf of nested mappings; lists and empty mappings are leaves."""
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from flatten(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, tree


def differences(old: Any, new: Any) -> list[tuple[str, Any, Any]]:
    """(dotted key, old value, new value) of the leaves that differ; "absent" where one side lacks the key."""
    before, after = dict(flatten(old)), dict(flatten(new))
    pairs = [(key, before.get(key, "absent"), after.get(key, "absent")) for key in {**before, **after}]
    return [pair for pair in pairs if pair[1] != pair[2]]
