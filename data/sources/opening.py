"""From the `data` section of a recipe to the source that it names."""

from __future__ import annotations

from data.cache import Say
from data.sources.documents import Source
from data.sources.files import FileSource, PackagedSource
from data.sources.hub import HubSource
from recipes.schema import Origin


def open_source(origin: Origin, say: Say | None = None) -> Source:
    """The source that a recipe's `data` section, or a part of its blend, names.

    Args:
        say: gets a line per retry of a network error; by default standard error does.

    Raises:
        ValueError: files or packages are missing.
    """
    if origin.source == "packaged":
        return PackagedSource()
    if origin.source == "hub":
        return hub_source(origin, say)
    assert origin.source != "store", "a store holds tokens, not documents"
    return FileSource(origin)


def hub_source(origin: Origin, say: Say | None = None) -> HubSource:
    """The dataset of the hub that an origin names."""
    assert origin.name is not None, "the schema demands a name"
    return HubSource(origin.name, origin.config, origin.split, origin.text_column, origin.revision, say=say)
