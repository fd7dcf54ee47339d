"""The directories of a preparation.

It works in OUT.partial/. The complete result becomes OUT by one rename.

OUT.partial/manifest.json   the command, the input files and the versions of its chunks
OUT.partial/tokenizer/      chunks/      index/      result/
.OUT.processes/             who works on it, and on which chunks
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from data import durable_files
from data.durable_files import Say
from data.prepare.sharing import Claims
from recipes import files
from recipes.key_paths import differences

REPORT = "report.json"
MOST_MANIFEST = 1 << 30  # bytes; it names every input file


class Workspace:
    """The directories of a preparation of `out`."""

    def __init__(self, out: Path):
        if not out.name or "\0" in out.name:
            raise ValueError(
                f"--out {str(out)!r}: no name of a directory that can be made: name one"
            )
        self.out = out
        self.partial = out.with_name(out.name + ".partial")
        self.manifest = self.partial / "manifest.json"
        self.tokenizer = self.partial / "tokenizer"
        self.chunks, self.index, self.result = (
            self.partial / name for name in ("chunks", "index", "result")
        )

    def shared(self) -> Claims:
        """Share the work on OUT with other processes.

        Their directory is next to OUT and OUT.partial, since these are moved and removed. Raises ValueError:
        nothing can be written there.
        """
        path = self.out.with_name(f".{self.out.name}.processes")
        try:
            return Claims(path)
        except OSError as error:
            raise ValueError(
                f"--out {self.out}: nothing can be written to {path.parent} ({error.strerror})"
                ": name another --out"
            ) from error

    def already_complete(self, manifest: dict[str, Any], force: bool, say: Say) -> bool:
        """Tell whether OUT is the result of this very command.

        With `force` another result stays until the new one replaces it. Raises ValueError: OUT is something
        else.
        """
        if not self.out.exists() or (self.out.is_dir() and not any(self.out.iterdir())):
            return False
        try:
            before = files.read_json_object(self.out / REPORT, MOST_MANIFEST)[
                "manifest"
            ]
        except (OSError, ValueError, KeyError):
            raise ValueError(
                f"--out {self.out} exists and was not made by prepare_data"
                ": name another directory"
            ) from None
        changed = _changed(before, manifest)
        if not changed:
            return True
        if force:
            say(
                f"{self.out} holds another preparation; "
                "it stays until the new one is complete, and is then replaced (--force)"
            )
            return False
        raise ValueError(
            f"--out {self.out} holds the result of another command, which differs in\n{changed}\n"
            "name another --out, or replace it with --force"
        )

    def begin(
        self, manifest: dict[str, Any], force: bool, others: bool, say: Say
    ) -> bool:
        """Make OUT.partial, or take it up; return whether there is work to resume.

        `others`: other processes prepare this OUT. Raises ValueError: it belongs to another command.
        """
        if others and self.manifest.exists():
            differing = self._changed(manifest)
            if differing:
                raise ValueError(
                    f"--out {self.out}: other processes prepare it by another command, which differs in"
                    f"\n{differing}\nwait for them, or name another --out"
                )
            return True
        if self.partial.exists():
            changed = self._changes(manifest)
            if changed == "":
                # Half-written files of a killed process.
                for leftover in filter(Path.is_file, self.partial.rglob("*.tmp")):
                    leftover.unlink(missing_ok=True)
                return True
            if changed and not force:
                raise ValueError(
                    f"{self.partial} is the unfinished work of another command, which differs in\n{changed}\n"
                    "run that command to finish it, name another --out, or give it up with --force"
                )
            if changed:
                say(
                    f"{self.partial}: the unfinished work of another command is given up (--force)"
                )
            shutil.rmtree(self.partial)
        self.chunks.mkdir(parents=True)
        durable_files.write_json(self.manifest, manifest)
        return False

    def _changes(self, manifest: dict[str, Any]) -> str | None:
        """Describe how the work in OUT.partial differs from a manifest; None where there is none to lose."""
        made = self.tokenizer.is_dir() or any(self.chunks.rglob("*.chunk"))
        if not made or not self.manifest.exists():
            return None
        try:
            return self._changed(manifest)
        except files.FileError as error:
            return f"  {error}"

    def _changed(self, manifest: dict[str, Any]) -> str:
        return _changed(files.read_json_object(self.manifest, MOST_MANIFEST), manifest)

    def new_result(self) -> Path:
        """Make an empty directory for the result."""
        shutil.rmtree(self.result, ignore_errors=True)
        self.result.mkdir()
        return self.result

    def publish(self) -> None:
        """Rename the result to OUT, and remove the work."""
        for directory, _, names in os.walk(self.result):
            for name in names:
                durable_files.sync(Path(directory) / name)
            durable_files.sync_names(Path(directory))
        old = self.out.with_name(f"{self.out.name}.replaced")
        if self.out.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.replace(self.out, old)
        os.replace(self.result, self.out)
        shutil.rmtree(old, ignore_errors=True)
        durable_files.sync_names(self.out.parent)
        shutil.rmtree(self.partial, ignore_errors=True)

    def clear(self, manifest: dict[str, Any]) -> None:
        """Remove OUT.partial, unless it is unfinished work of another command."""
        if not self._changes(manifest):
            shutil.rmtree(self.partial, ignore_errors=True)


def _changed(before: Any, now: Any) -> str:
    """List the differing keys in lines "key: before, now"."""
    changed = differences(before, json.loads(json.dumps(now)))[:20]
    return "\n".join(
        f"  {key}: {json.dumps(old)} there, {json.dumps(new)} here"
        for key, old, new in changed
    )
