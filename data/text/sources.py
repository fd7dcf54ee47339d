"""The sources of a recipe's `data` section: the packaged corpus, files, the hub."""

from __future__ import annotations

from typing import TYPE_CHECKING

from data.durable_files import Say, quiet
from data.text.documents import SkippedRecords, Source
from data.text.packaged import PackagedSource
from recipes.schema import Origin

if TYPE_CHECKING:
    from data.text.hub import HubSource


def open_source(
    origin: Origin, say: Say | None = None, skipped: SkippedRecords | None = None
) -> Source:
    """Open the source of an origin; `say` gets a line per retry after a network error.

    `skipped`: collects the broken records; None: they stop a reader. Raises ValueError: files or packages
    are missing.
    """
    if origin.source == "packaged":
        return PackagedSource()
    if origin.source == "hub":
        return hub_source(origin, say, skipped)
    from data.text.local_files import FileSource

    assert origin.source != "store", "a store holds tokens, not documents"
    return FileSource(origin, skipped=skipped, say=say or quiet)


def hub_source(
    origin: Origin, say: Say | None = None, skipped: SkippedRecords | None = None
) -> HubSource:
    """Make the hub's dataset of an origin."""
    from data.text.hub import HubSource

    assert origin.name is not None, "the schema demands a name"
    named = (
        origin.name,
        origin.config,
        origin.split,
        origin.text_column,
        origin.revision,
    )
    return HubSource(*named, say=say, skipped=skipped)
