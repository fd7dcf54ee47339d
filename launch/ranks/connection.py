"""Connections between rank 0 and the other ranks, which no other account takes part in.

On one machine they are Unix sockets, of which the kernel tells the peer's account; the secret is empty.
Between machines every message proves the launch's secret: a token from MEGARECIPES_SECRET, or one that rank 0
draws and keeps, until all ranks have come, in a file that only its account can read. Nobody else can make a
rank believe a byte: of a stranger rank 0 reads `HELLO` and one proof at most, for `PATIENCE_S`, and then
closes. Messages can be read on the network. Nobody but the two ranks can write, change, repeat or leave out
one of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import itertools
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

TOKEN_BYTES = 32
NONCE_BYTES = 32
PROOF_BYTES = 32
HELLO = struct.Struct(f">I{NONCE_BYTES}s")  # of another rank: its number, and a nonce
HEADER = struct.Struct(f">I{PROOF_BYTES}s")  # of a message: its length and its proof
MOST_BYTES = 1 << 28  # of a message
READ_BYTES = 1 << 16
PATIENCE_S = 10.0  # for a stranger's proof, and for a connection
SEND_S = 60.0  # for a message; the system buffers those of a rank that is busy
MOST_STRANGERS = 512  # at once; of more the oldest goes
SECRETS = "meeting.*.tmp"  # names of files with a secret
OLD_S = 7200.0  # ranks meet within half an hour
PEER = struct.Struct("3i")  # linux/socket.h, ucred: process, user and group
SECRET = "MEGARECIPES_SECRET"


Kind = Literal["value", "ask", "status", "hangs", "death", "bye"]


class OtherSecretError(ConnectionAbortedError):
    """Rank 0, or who listens in its place, and this rank know different secrets."""


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
        from_rank_0 = _counted(b"from rank 0")
        to_rank_0 = _counted(b"to rank 0")
        self._sent = from_rank_0 if of_rank_0 else to_rank_0
        self._heard = to_rank_0 if of_rank_0 else from_rank_0
        self._unread = bytearray()
        self._sending = threading.Lock()

    def send(self, text: bytes) -> None:
        """Send an encoded message, from any thread. Raises OSError."""
        with self._sending:
            proof = _proof(self._key, next(self._sent), text)
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
        if not hmac.compare_digest(proof, _proof(self._key, next(self._heard), text)):
            raise ConnectionAbortedError("a message lacks the proof of the secret")
        return text


def _counted(direction: bytes) -> Iterator[bytes]:
    """Yield the direction and the number of each message, which its proof covers."""
    for number in itertools.count(1):
        yield direction + number.to_bytes(8, "big")


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
        if not hmac.compare_digest(
            self._read, _proof(self._token, b"I am another rank", told)
        ):
            raise ConnectionAbortedError("a stranger does not know the secret")
        key = _proof(self._token, b"key", told)
        return HELLO.unpack(self._hello)[0], Connection(
            self.socket, key, of_rank_0=True
        )


def admit(
    server: socket.socket, token: bytes, world: int, over: Callable[[], bool]
) -> dict[int, Connection]:
    """Let all other ranks of the launch in on rank 0, and no one else; then close the server.

    `over` says when waiting ends; fewer ranks are returned then.
    """
    with server, selectors.DefaultSelector() as selector:
        admission = _Admission(server, selector, token, world)
        while len(admission.admitted) < world - 1 and not over():
            admission.hear()
        admission.turn_all_away()
    return admission.admitted


class _Admission:
    """The ranks that rank 0 has let in, and those that have not proved the secret yet."""

    def __init__(
        self,
        server: socket.socket,
        selector: selectors.BaseSelector,
        token: bytes,
        world: int,
    ) -> None:
        server.setblocking(False)
        selector.register(server, selectors.EVENT_READ)
        self.admitted: dict[int, Connection] = {}
        self._strangers: dict[socket.socket, _Stranger] = {}  # the oldest first
        self._server = server
        self._selector = selector
        self._token = token
        self._world = world

    def hear(self) -> None:
        """Hear who calls and what strangers say, for a moment; turn away who takes too long."""
        for event, _ in self._selector.select(timeout=0.2):
            if event.fileobj is self._server:
                for connected in _accepted(self._server):
                    self._strangers[connected] = _Stranger(connected, self._token)
                    self._selector.register(connected, selectors.EVENT_READ)
                continue
            stranger = self._strangers.get(event.fileobj)  # type: ignore[call-overload]
            if stranger is not None:
                self._listen(stranger)
        now = time.monotonic()
        most = MOST_STRANGERS + self._world
        for stranger in list(self._strangers.values()):
            if stranger.until < now or len(self._strangers) > most:
                self._turn_away(stranger)

    def turn_all_away(self) -> None:
        for stranger in list(self._strangers.values()):
            self._turn_away(stranger)

    def _listen(self, stranger: _Stranger) -> None:
        """Read what a stranger sends; admit its rank once it has proved the secret."""
        try:
            proved = stranger.take()
        except BlockingIOError:
            return
        except OSError:
            self._turn_away(stranger)
            return
        if proved is None:
            return
        rank, connection = proved
        self._forget(stranger)
        if 0 < rank < self._world and rank not in self.admitted:
            self.admitted[rank] = connection

    def _turn_away(self, stranger: _Stranger) -> None:
        self._forget(stranger)
        stranger.socket.close()

    def _forget(self, stranger: _Stranger) -> None:
        del self._strangers[stranger.socket]
        self._selector.unregister(stranger.socket)


def _accepted(server: socket.socket) -> Iterator[socket.socket]:
    """Accept who waits, some at a time. What the system refuses (too many files) is tried again."""
    with contextlib.suppress(OSError):
        for _ in range(MOST_STRANGERS):
            connected, _ = server.accept()
            if is_own(connected):
                yield connected
            else:
                connected.close()


def is_own(connected: socket.socket) -> bool:
    """Check that the peer of a Unix socket is of this account; of other sockets the proof tells it."""
    if connected.family != socket.AF_UNIX:
        return True
    peer = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
    account: int = PEER.unpack(peer)[1]
    return account == os.geteuid()


def listen_here(name: str) -> socket.socket:
    """Listen at an abstract Unix socket: it is no file, and gone with its process. Raises OSError."""
    server = socket.socket(socket.AF_UNIX)
    server.bind("\0" + name)
    server.listen(socket.SOMAXCONN)
    return server


def connect_here(name: str) -> socket.socket:
    """Connect to rank 0's socket of that name on this machine. Raises OSError, also for another account's."""
    connected = socket.socket(socket.AF_UNIX)
    connected.settimeout(PATIENCE_S)
    try:
        connected.connect("\0" + name)
        if not is_own(connected):
            raise ConnectionAbortedError("who listens there is of another account")
    except OSError:
        connected.close()
        raise
    return connected


def prove(connected: socket.socket, rank: int, token: bytes | None) -> Connection:
    """Exchange proofs with rank 0; `token` None: this rank knows none. Raises OtherSecretError, OSError."""
    try:
        if token is None:
            raise OtherSecretError
        hello = HELLO.pack(rank, secrets.token_bytes(NONCE_BYTES))
        connected.sendall(hello)
        answer = _read_exactly(connected, NONCE_BYTES + PROOF_BYTES)
        told = hello + answer[:NONCE_BYTES]
        if not hmac.compare_digest(
            answer[NONCE_BYTES:], _proof(token, b"I am rank 0", told)
        ):
            raise OtherSecretError
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
            for left in place.glob(SECRETS):  # by a start that was killed
                if time.time() - left.stat().st_mtime > OLD_S:
                    left.unlink()
            descriptor = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600
            )
            with open(descriptor, "wb") as file:
                file.write(token)
                secret = _is_secret(os.fstat(descriptor))
            if secret:
                kept.append(path)
            else:  # a file system without owners and modes
                path.unlink(missing_ok=True)
    return kept


def stated_secret() -> bytes | None:
    """Return the token of the launcher's environment; None without one."""
    text = os.environ.get(SECRET)
    if text:
        return hashlib.sha256(text.encode()).digest()
    return None


def find_secret(places: Sequence[Path], name: str) -> bytes | None:
    """Read the token from the first of the places that holds it; None where none does."""
    for place in places:
        with contextlib.suppress(OSError):
            os.listdir(place)  # makes NFS ask its server
            descriptor = os.open(
                place / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            )
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
