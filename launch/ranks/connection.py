"""Connections between rank 0 and the other ranks, on which every message proves the launch's secret.

The secret is a token that rank 0 draws for this launch. It lies for a moment in a file that rank 0's account
alone can read, in a directory that all ranks see. Nobody else can make a rank believe a byte: of a stranger
rank 0 reads `HELLO` and one proof at most, for `PATIENCE_S`, and then closes. Messages can be read on the
network, and nobody but the two ranks can write, change, repeat or leave out one of them.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import selectors
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

TOKEN_BYTES = NONCE_BYTES = PROOF_BYTES = 32
HELLO = struct.Struct(f">I{NONCE_BYTES}s")  # of another rank: its number, and a nonce
HEADER = struct.Struct(f">I{PROOF_BYTES}s")  # of a message: its length and its proof
MOST_BYTES = 1 << 28  # of a message
READ_BYTES = 1 << 16
PATIENCE_S = 10.0  # for a stranger's proof, and for a connection
SEND_S = 60.0  # for a message; the system buffers those of a rank that is busy
MOST_STRANGERS = 512  # at once; of more the oldest goes


Kind = Literal["value", "ask", "status", "hangs", "death", "bye"]


@dataclass(frozen=True)
class Message:
    """A message between rank 0 and another rank.

    Attributes:
        kind: "value" of an exchange; "ask" for a "status"; "hangs": keep your stacks and end; "death" of
            another rank: end; "bye": this rank ends in order.
        key: names the exchange.
    """

    kind: Kind
    key: str = ""
    value: Any = None

    def encoded(self) -> bytes:
        return json.dumps(vars(self)).encode()


MESSAGE = TypeAdapter(Message)


class Connection:
    """A connection after both sides have proved the secret. Its socket waits `SEND_S` at most."""

    def __init__(self, connected: socket.socket, key: bytes, of_rank_0: bool) -> None:
        connected.settimeout(SEND_S)
        self.socket = connected
        self._key = key
        self._sent = _Counted(b"from rank 0" if of_rank_0 else b"to rank 0")
        self._heard = _Counted(b"to rank 0" if of_rank_0 else b"from rank 0")
        self._unread = bytearray()
        self._sending = threading.Lock()

    def send(self, text: bytes) -> None:
        """Send an encoded message, from any thread. Raises OSError."""
        with self._sending:
            proof = _proof(self._key, self._sent.next(), text)
            self.socket.sendall(HEADER.pack(len(text), proof) + text)

    def take(self) -> list[Message]:
        """Read what has come and return the messages that are whole; wait for some bytes.

        Raises OSError at the end of the connection, and for a byte that the other rank has not sent.
        """
        came = self.socket.recv(READ_BYTES)
        if not came:
            raise ConnectionResetError("the connection has ended")
        self._unread += came
        messages = []
        while (text := self._next_text()) is not None:
            messages.append(_checked(text))
        return messages

    def _next_text(self) -> bytes | None:
        if len(self._unread) < HEADER.size:
            return None
        length, proof = HEADER.unpack_from(self._unread)
        if length > MOST_BYTES:
            raise ConnectionAbortedError("a message is too long")
        end = HEADER.size + length
        if len(self._unread) < end:
            return None
        text = bytes(self._unread[HEADER.size : end])
        del self._unread[:end]
        if not hmac.compare_digest(proof, _proof(self._key, self._heard.next(), text)):
            raise ConnectionAbortedError("a message lacks the proof of the secret")
        return text


class _Counted:
    """The direction and the number of a message, which its proof covers."""

    def __init__(self, direction: bytes) -> None:
        self._direction = direction
        self._count = 0

    def next(self) -> bytes:
        self._count += 1
        return self._direction + self._count.to_bytes(8, "big")


class _Stranger:
    """A connection to rank 0 that has not proved the secret yet."""

    def __init__(self, connected: socket.socket, token: bytes) -> None:
        connected.setblocking(False)
        self.socket = connected
        self.until = time.monotonic() + PATIENCE_S
        self._token = token
        self._hello = b""
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._read = b""

    def take(self) -> tuple[int, Connection] | None:
        """Read on; return the rank and its connection once it has proved itself. Raises OSError."""
        wanted = PROOF_BYTES if self._hello else HELLO.size
        came = self.socket.recv(wanted - len(self._read))
        if not came:
            raise ConnectionResetError("a stranger has left")
        self._read += came
        if len(self._read) < wanted:
            return None
        if not self._hello:
            self._hello = self._read
            self._read = b""
            told = self._hello + self._nonce
            self.socket.sendall(self._nonce + _proof(self._token, b"I am rank 0", told))
            return None
        told = self._hello + self._nonce
        if not hmac.compare_digest(self._read, _proof(self._token, b"I am another rank", told)):
            raise ConnectionAbortedError("a stranger does not know the secret")
        key = _proof(self._token, b"key", told)
        return HELLO.unpack(self._hello)[0], Connection(self.socket, key, of_rank_0=True)


def admit(server: socket.socket, token: bytes, world: int, over: Callable[[], bool]) -> dict[int, Connection]:
    """Let all other ranks of the launch in on rank 0, and no one else; then close the server.

    `over` says when waiting ends; fewer ranks are returned then.
    """
    admitted: dict[int, Connection] = {}
    strangers: dict[socket.socket, _Stranger] = {}  # the oldest first
    with server, selectors.DefaultSelector() as selector:
        server.setblocking(False)
        selector.register(server, selectors.EVENT_READ)

        def turn_away(stranger: _Stranger) -> None:
            del strangers[stranger.socket]
            selector.unregister(stranger.socket)
            stranger.socket.close()

        while len(admitted) < world - 1 and not over():
            for event, _ in selector.select(timeout=0.2):
                if event.fileobj is server:
                    for connected in _accepted(server):
                        strangers[connected] = _Stranger(connected, token)
                        selector.register(connected, selectors.EVENT_READ)
                    continue
                stranger = strangers.get(event.fileobj)  # type: ignore[call-overload]
                if stranger is None:
                    continue
                try:
                    proved = stranger.take()
                except BlockingIOError:
                    continue
                except OSError:
                    turn_away(stranger)
                    continue
                if proved is None:
                    continue
                rank, connection = proved
                del strangers[stranger.socket]
                selector.unregister(stranger.socket)
                if 0 < rank < world and rank not in admitted:
                    admitted[rank] = connection
            now = time.monotonic()
            for stranger in list(strangers.values()):
                if stranger.until < now or len(strangers) > MOST_STRANGERS + world:
                    turn_away(stranger)
        for stranger in list(strangers.values()):
            turn_away(stranger)
    return admitted


def _accepted(server: socket.socket) -> Iterator[socket.socket]:
    """Accept who waits, some at a time. What the system refuses (too many files) is tried again."""
    with contextlib.suppress(OSError):
        for _ in range(MOST_STRANGERS):
            connected, _ = server.accept()
            yield connected


def connect(address: str, port: int, rank: int, token: bytes) -> Connection:
    """Connect to rank 0. Raises OSError, also where another process than rank 0 listens."""
    connected = socket.create_connection((address, port), timeout=PATIENCE_S)
    try:
        hello = HELLO.pack(rank, secrets.token_bytes(NONCE_BYTES))
        connected.sendall(hello)
        answer = _read_exactly(connected, NONCE_BYTES + PROOF_BYTES)
        told = hello + answer[:NONCE_BYTES]
        if not hmac.compare_digest(answer[NONCE_BYTES:], _proof(token, b"I am rank 0", told)):
            raise ConnectionAbortedError("who listens there does not know the secret")
        connected.sendall(_proof(token, b"I am another rank", told))
    except OSError:
        connected.close()
        raise
    return Connection(connected, _proof(token, b"key", told), of_rank_0=False)


def keep_secret(places: Sequence[Path], name: str, token: bytes) -> list[Path]:
    """Write the token for the other ranks into each of the places that takes and keeps a secret.

    Return the files; they are to be removed once all ranks have come.
    """
    kept = []
    for place in places:
        path = place / name
        with contextlib.suppress(OSError):
            place.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with open(descriptor, "wb") as file:
                file.write(token)
                secret = _is_secret(os.fstat(descriptor))
            if secret:
                kept.append(path)
            else:  # a file system without owners and modes
                path.unlink(missing_ok=True)
    return kept


def find_secret(places: Sequence[Path], name: str) -> bytes | None:
    """Read the token from the first of the places that holds it; None where none does."""
    for place in places:
        with contextlib.suppress(OSError):
            os.listdir(place)  # makes NFS ask its server
            descriptor = os.open(place / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(descriptor, "rb") as file:
                token = file.read(TOKEN_BYTES)
                if _is_secret(os.fstat(descriptor)) and len(token) == TOKEN_BYTES:
                    return token
    return None


def _is_secret(status: os.stat_result) -> bool:
    """Check that a file belongs to this account, and is readable for no other."""
    others = status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not others


def _proof(key: bytes, what: bytes, text: bytes) -> bytes:
    return hmac.digest(key, what + text, "sha256")


def _checked(text: bytes) -> Message:
    try:
        return MESSAGE.validate_python(json.loads(text))
    except ValueError as error:  # another version of this file on the other machine
        raise ConnectionAbortedError("a message has another form") from error


def _read_exactly(connected: socket.socket, count: int) -> bytes:
    """Read so many bytes within `PATIENCE_S`. Raises OSError."""
    until = time.monotonic() + PATIENCE_S
    read = b""
    while len(read) < count:
        came = connected.recv(count - len(read))
        if not came or time.monotonic() > until:
            raise ConnectionAbortedError("the connection has ended")
        read += came
    return read
