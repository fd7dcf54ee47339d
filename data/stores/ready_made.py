"""Token stores that are there already: prepare_data's, or of another Megatron-family tool."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerFast

from data.durable_files import Damaged
from data.stores.cached import CHECKED_BYTES, OpenedStore
from data.stores.indexed import Store, bin_path, idx_path, open_store
from data.vocabularies.vocabulary import vocabulary_digest
from recipes.problems import Problem, ProblemsError, Setting, Text
from recipes.schema import Origin

REPORT = "report.json"
Sequences = Literal["documents", "sentences"]


def ready_made_store(
    kind: str, sequences: Sequences, origin: Origin, tokenizer: PreTrainedTokenizerFast
) -> OpenedStore:
    """The store that an origin names, checked.

    Args:
        kind: `data.tokenizer.kind`, which `tokenizer` comes from.
        sequences: what one sequence must hold; a GPT can train from either.

    Raises:
        ValueError: there is no sound store, its tokens are of another vocabulary, or a BERT's store has no
            sentences.
    """
    prefix = store_prefix(origin, sequences)
    try:
        store = open_store(prefix)
    except (OSError, Damaged) as error:
        raise _refused(origin, str(error), "prepare or copy the store again") from error
    facts, digest = _facts(prefix.parent / REPORT, store), vocabulary_digest(tokenizer)
    if facts.get("vocabulary_digest", digest) != digest:
        given = Setting("data.tokenizer.kind", kind)
        fix = ("set ", Setting("data.tokenizer.kind", "store"), ", which takes the one kept with it")
        raise _refused(origin, ("the store was made with another vocabulary than ", given, " gives"), fix)
    each = np.diff(store.document_index)
    if sequences == "sentences" and each.size and each.max() <= 1:
        rule = "every document of the store is one sequence, and a BERT's samples are made of sentences"
        again = "prepare it with launch/prepare_data.py --samples bert (Megatron: --split-sentences)"
        raise _refused(origin, rule, again)
    if isinstance(reported := facts.get("crc32"), dict) and "bin" in reported:
        checksum = str(reported["bin"])
    elif store.tokens_array.nbytes <= CHECKED_BYTES:
        checksum = f"{store.checksum().bin:08x}"
    else:
        checksum = f"not read: {store.tokens} tokens"
    return OpenedStore(str(origin.name), store, facts.get("text_bytes"), checksum)


def store_prefix(origin: Origin, sequences: Sequences) -> Path:
    """Path of the two files without .bin and .idx. Raises ValueError: there is none, or no single store."""
    assert origin.name is not None, "the schema demands a name"
    path = Path(origin.name).expanduser()
    if not path.is_dir():
        prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
        if not (bin_path(prefix).exists() or idx_path(prefix).exists()):
            if path.with_name(path.name + ".partial").exists():
                fix = "run its command again, which resumes the work"
                raise _refused(origin, "prepare_data has not finished there", fix)
            rule = f"no such directory, and no {bin_path(prefix).name} (seen from {Path.cwd()})"
            fix = "give what prepare_data wrote, or the path of a .bin and an .idx without the ending"
            raise _refused(origin, rule, fix)
        return prefix
    found = sorted(file.with_suffix("") for file in path.glob("*.idx"))
    preferred = [prefix for prefix in found if sequences.removesuffix("s") in prefix.name]
    if len(chosen := preferred if len(found) > 1 else found) != 1:
        names = ", ".join(prefix.name for prefix in found) or "none"
        rule = f"a directory with {len(found)} token stores ({names})"
        raise _refused(origin, rule, f"name one of them, as {path / 'NAME'}")
    return chosen[0]


def _refused(origin: Origin, rule: Text, fix: Text) -> ProblemsError:
    return ProblemsError([Problem("data.name", Setting("data.name", origin.name), rule, fix)])


def _facts(report: Path, store: Store) -> dict[str, Any]:
    """What prepare_data reported about the store, if it did. Raises ValueError: of another store."""
    try:
        facts = json.loads(report.read_text(encoding="utf-8")).get("store", {})
    except FileNotFoundError:
        return {}
    except ValueError as error:
        rule = f"not the JSON that prepare_data wrote ({error})"
        raise ValueError(f"{report}: {rule}: prepare the store again") from error
    stated = {key: facts[key] for key in ("documents", "tokens") if key in facts}
    if stated != {key: getattr(store, key) for key in stated}:
        found = f"{store.documents} documents and {store.tokens} tokens, and {report} says {stated}"
        fix = "copy the whole directory again"
        raise ValueError(f"{store.prefix} has {found}: they do not belong together; {fix}")
    return facts
