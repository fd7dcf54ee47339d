"""Claims of the processes that share one preparation, on this machine or others, through a directory.

Each process keeps a file there whose number it counts up. A claim is a symbolic link to the file of its
process, which the file system makes for only one process. A process is lost when the kernel has dropped the
lock of its file, on this machine, or when its number rests. What it claimed may then be claimed again. Where
a slow process is taken for lost, work is done twice: chunks are equal to the byte and renamed when whole.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from data.durable_files import Say

BEAT = 5.0  # seconds from one count to the next
LOST_AFTER = 90.0  # seconds without a count; NFS may show a file as it was a minute ago
PAUSE = 0.5  # seconds between two looks at what others do
_PREFIX = "process-"


def kernel() -> str:
    """Return what tells this machine's running kernel from all others."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class Claims:
    """Claims of this process among all that share `directory`, given up where the context ends.

    Raises OSError where the directory cannot be made or written.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        self._kernel = kernel()
        self._name = f"{_PREFIX}{self._kernel}-{os.getpid()}-{secrets.token_hex(4)}"
        self._left = threading.Event()
        # of others: number, and when it was new
        self._counts: dict[str, tuple[bytes, float]] = {}
        directory.mkdir(parents=True, exist_ok=True)
        self._file = open(directory / self._name, "wb", buffering=0)  # noqa: SIM115 - closed at the end
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self._file, fcntl.LOCK_EX)
        threading.Thread(target=self._count, daemon=True).start()

    def __enter__(self) -> Claims:
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self._file.close()
        (self._directory / self._name).unlink(missing_ok=True)
        if not self.others():
            shutil.rmtree(self._directory, ignore_errors=True)

    def _count(self) -> None:
        number = 0
        while not self._left.wait(BEAT):
            number += 1
            # the disk is full, or the file was closed just now
            with suppress(OSError, ValueError):
                os.pwrite(self._file.fileno(), b"%d" % number, 0)
                os.fsync(self._file.fileno())

    def others(self) -> bool:
        """Say whether another process shares the directory."""
        names = [path.name for path in self._directory.glob(f"{_PREFIX}*")]
        return any(name != self._name and self._lives(name) for name in names)

    def take(self, what: str) -> bool:
        """Claim something, unless another process that is not lost has."""
        return self._taken_at(what) is not None

    @contextmanager
    def turn(self, what: str, say: Say) -> Iterator[None]:
        """Hold a claim for as long as the block runs; wait for the processes that have it."""
        waits = False
        while (link := self._taken_at(what)) is None:
            if not waits:
                say(f"another process has the {what} of this preparation: waiting")
            waits = True
            time.sleep(PAUSE)
        try:
            yield
        finally:
            link.unlink(missing_ok=True)

    def _taken_at(self, what: str) -> Path | None:
        """Return the link of this process's claim, made or found; None where another has it.

        The claim after one of a lost process has that one's name, so that of several again one gets it.
        """
        link = self._directory / f"{what}.claim"
        while True:
            try:
                link.symlink_to(self._name)
                return link
            except FileExistsError:
                with suppress(FileNotFoundError):  # given back just now
                    owner = os.readlink(link)
                    if owner == self._name:
                        return link
                    if self._lives(owner):
                        return None
                    link = self._directory / f"{what}.after.{owner}"

    def _lives(self, name: str) -> bool:
        try:
            # which has NFS ask its server
            with open(self._directory / name, "rb") as file:
                if self._kernel in name and not _is_locked(file):
                    return False
                count = file.read()
        except FileNotFoundError:
            return False
        now = time.monotonic()
        known = self._counts.get(name)
        if known is None or known[0] != count:
            self._counts[name] = (count, now)
            return True
        return now - known[1] < LOST_AFTER


def _is_locked(file: BinaryIO) -> bool:
    """Say whether a process of this machine holds the file's lock; True where it has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    return False
