"""The provenance report: documents kept and dropped by each step, as JSON and as tables."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tabulate import tabulate

from data.prepare.chunk_file import BROKEN, Tally
from data.text.records import FoundFile
from recipes.problems import counted

_TITLES = {
    "sentences": "sentence split",
    "tokenize": "tokenize, length",
    "signatures": "MinHash signatures",
}


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, hexadecimal."""
    digest = hashlib.sha256()  # hashlib.file_digest is missing in Python 3.10
    with open(path, "rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def describe_inputs(files: Sequence[FoundFile], threads: int) -> list[dict[str, Any]]:
    """Return name, size and SHA-256 of each file; of streams only the name."""

    def describe(file: FoundFile) -> dict[str, Any]:
        if not file.version:
            return {"name": str(file.path), "identified_by": "name"}
        facts = {
            "name": str(file.path.resolve()),
            "bytes": file.size,
            "modified_ns": file.version[3],
        }
        return {**facts, "identified_by": "sha256", "sha256": file_digest(file.path)}

    with ThreadPoolExecutor(threads) as pool:  # hashing leaves the interpreter's lock
        return list(pool.map(describe, files))


def describe_outputs(directory: Path) -> dict[str, dict[str, Any]]:
    """Return size and SHA-256 of every file in `directory`, by its relative path."""
    outputs = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            outputs[str(path.relative_to(directory))] = {
                "bytes": path.stat().st_size,
                "sha256": file_digest(path),
            }
    return outputs


def broken_summary(tally: Tally) -> dict[str, Any]:
    """Count broken records by reason, with their shares of all records and of all bytes."""
    step = tally.step("read")
    total = step.documents_in
    reasons = {}
    broken = 0
    broken_bytes = 0
    for reason, (records, size) in sorted(step.dropped.items()):
        if reason.startswith(BROKEN):
            reasons[reason.removeprefix(BROKEN)] = {
                "records": records,
                "bytes": size,
                "share": _share(records, total),
            }
            broken += records
            broken_bytes += size
    return {
        "records": broken,
        "share": _share(broken, total),
        "share_of_bytes": _share(broken_bytes, step.bytes_in),
        "reasons": reasons,
    }


def as_text(report: dict[str, Any]) -> str:
    """Write the report as tables, for a reader."""
    parts = (_head, _steps, _dropped, _store, _files)
    return "\n\n".join("\n".join(part(report)) for part in parts) + "\n"


def _head(report: dict[str, Any]) -> list[str]:
    run = report["run"]
    store = report["store"]
    wall = f"{run['wall_seconds']:,.1f} s with {counted(run['workers'], 'worker')}, "
    wall += f"{run['mb_per_second']:.2f} MB/s, peak memory {run['peak_mb']:,} MB"
    if run["chunks_found"]:
        wall += f" (continued: {run['chunks_found']} of {counted(run['chunks'], 'chunk')} were there)"
    return [
        f"prepared {counted(store['documents'], 'document')}, {counted(store['tokens'], 'token')}",
        wall,
        *(f"WARNING: {warning}" for warning in report["warnings"]),
    ]


def _steps(report: dict[str, Any]) -> list[str]:
    rows = [
        (
            "step",
            "documents in",
            "out",
            "MB in",
            "out",
            "changed",
            "dropped",
            "seconds",
            "MB/s per core",
        )
    ]
    for name, step in report["steps"].items():
        dropped = sum(count for count, _ in step["dropped"].values())
        changed = f"{step['changed']:,}" if name == "repair" else ""
        seconds = f"{step['seconds']:,.1f}" if step["seconds"] else ""
        speed = str(report["mb_per_second_and_core"].get(name, ""))
        lost = f"{dropped:,}" if dropped else ""
        rows.append(
            (
                _TITLES.get(name, name),
                f"{step['documents_in']:,}",
                f"{step['documents_out']:,}",
                f"{step['bytes_in'] / 1e6:,.2f}",
                f"{step['bytes_out'] / 1e6:,.2f}",
                changed,
                lost,
                seconds,
                speed,
            )
        )
    return _table(rows)


def _dropped(report: dict[str, Any]) -> list[str]:
    records = report["steps"]["read"]["documents_in"]
    rows = []
    for step in report["steps"].values():
        for reason, (count, size) in sorted(step["dropped"].items()):
            share = f"{_share(count, records):.4%}"
            rows.append((reason, f"{count:,}", f"{size / 1e6:,.2f}", share))
    header = ("dropped because", "documents", "MB", "share of records")
    return _table([header, *rows]) if rows else ["nothing was dropped"]


def _store(report: dict[str, Any]) -> list[str]:
    store = report["store"]
    tokenizer = report["tokenizer"]
    dedup = report["deduplication"]
    sizes = ", ".join(
        f"{store[name]:,} {name}" for name in ("documents", "sequences", "tokens")
    )
    lines = [
        f"store       {store['prefix']}.bin, .idx: "
        f"{store['samples']}, {sizes} from {store['text_bytes'] / 1e6:,.2f} MB",
        f"            CRC-32 of .idx {store['crc32']['idx']}, of .bin {store['crc32']['bin']}",
        f"tokenizer   {tokenizer['kind']}, {tokenizer['vocab_size']:,} tokens, SHA-256 {tokenizer['digest']}",
        f"            {_share(store['unknown_tokens'], store['tokens']):.2%} of the tokens are unknown",
    ]
    if tokenizer["trained_on"]:
        lines.append(f"            trained on {tokenizer['trained_on']}")
    if dedup:
        chance = f"meet with probability {dedup['probability_at_threshold']:.4f}"
        grams = f"of {dedup['shingle']} words (characters of scripts without blanks)"
        bands = f"{dedup['bands']} bands of {dedup['rows']} rows: pairs at Jaccard {dedup['threshold']} {grams}"
        lines.append(
            f"duplicates  {bands} {chance}; {dedup['pairs_compared']:,} pairs compared"
        )
    evaluation = report["decontamination"]
    if evaluation:
        few = f"{evaluation['texts_too_short']:,} have fewer than {evaluation['ngram']} words"
        lines.append(
            f"evaluation  {evaluation['texts']:,} texts; {few} and are not looked for"
        )
        lines += [
            f"            {file['name']} SHA-256 {file['sha256']}"
            for file in evaluation["files"]
        ]
    return lines


def _files(report: dict[str, Any]) -> list[str]:
    inputs = [("input", "bytes", "SHA-256, or else")]
    for file in report["manifest"]["inputs"]:
        identity = file.get("sha256", file["identified_by"])
        inputs.append((file["name"], f"{file.get('bytes', 0):,}", identity))
    outputs = [("output", "bytes", "SHA-256")]
    for name, file in report["outputs"].items():
        outputs.append((name, f"{file['bytes']:,}", file["sha256"]))
    files = [*_table(inputs), "", *_table(outputs), "", "arguments"]
    arguments = [
        f"  {key}: {value}" for key, value in report["manifest"]["arguments"].items()
    ]
    versions = ", ".join(f"{k} {v}" for k, v in report["manifest"]["versions"].items())
    return [*files, *arguments, "", f"versions  {versions}"]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows as lines; the first row is the header, the first column is aligned to the left."""
    sides = ("left", *["right"] * (len(rows[0]) - 1))
    table = tabulate(rows[1:], rows[0], "plain", disable_numparse=True, colalign=sides)
    return [line.rstrip() for line in table.splitlines()]


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
