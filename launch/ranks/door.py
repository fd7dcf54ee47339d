"""The door of rank 0: where the other ranks reach it, and how both sides know each other.

Rank 0 listens, and writes its port and the name of a file with a secret into torch's store. The others read
the file and prove the secret (launch/ranks/connection.py). A rank takes nothing else from the store, where
anyone may write. One process needs no door.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import StringConstraints, TypeAdapter, ValidationError

from launch.ranks import connection, interfaces
from launch.ranks.connection import Connection
from launch.ranks.launch_environment import LOOPBACK
from launch.ranks.processes import (
    TIMEOUT,
    agent_has_store,
    one_machine,
    port_is_taken,
    rank,
    world_size,
)
from recipes.problems import Problem, ProblemsError, some

LOOK_FOR_S = 30.0  # network file systems may show a new file late
EVERY_S = 0.1


@dataclass(frozen=True)
class Door:
    """The way to rank 0, as it stands in torch's store, where anyone may write: a port, and a file's name."""

    port: int
    secret: Annotated[str, StringConstraints(pattern="^meeting-[0-9a-f]{16}$")]


DOOR = TypeAdapter(Door)


def connections_of(places: list[Path]) -> tuple[Any, dict[int, Connection]]:
    """Return torch's store, and the connections of this rank: to rank 0, or on rank 0 to all others.

    `places`: directories that may keep the secret. Raises ProblemsError.
    """
    try:
        store = _open_store()
        if rank() == 0:
            return store, _let_others_in(store, places)
        return store, {0: _reach_rank_0(store, places)}
    except RuntimeError as error:  # torch's
        if "EADDRINUSE" in str(error):
            raise port_is_taken(os.environ["MASTER_PORT"]) from None
        raise _met_nobody(str(error).splitlines()[0]) from None


def _address() -> str:
    """Return the address at which ranks reach rank 0: the loopback's if all are on one machine."""
    return LOOPBACK if one_machine() else os.environ["MASTER_ADDR"]


def listen(port: int = 0) -> socket.socket:
    """Listen at the address where the other ranks reach rank 0, and at no other if this machine has that one.

    Raises OSError: the port is taken.
    """
    address = _address()
    # Debian's /etc/hosts gives a machine's own name a loopback address, which others do not reach.
    reached = address == LOOPBACK or not interfaces.is_loopback(address)
    if reached:
        family, _, _, _, place = socket.getaddrinfo(
            address, port, type=socket.SOCK_STREAM
        )[0]
        try:
            return socket.create_server(place[:2], family=family, backlog=world_size())
        except OSError as error:
            # that of a service in front of this machine
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(
        ("", port), family=family, backlog=world_size(), dualstack_ipv6=both
    )


def _open_store() -> Any:
    """Open torch's store at the launcher's address: torchrun's own, or one that rank 0 serves.

    It asks nobody who he is. So no rank takes more from it than where to knock.
    """
    from torch.distributed import TCPStore

    port = int(os.environ["MASTER_PORT"])
    how: dict[str, Any] = {"timeout": TIMEOUT, "wait_for_workers": False}
    if agent_has_store():
        return TCPStore(os.environ["MASTER_ADDR"], port, world_size(), **how)
    if rank() == 0:
        try:
            how["master_listen_fd"] = listen(port).detach()
        except OSError as error:
            raise port_is_taken(str(port), error.strerror) from None
    return TCPStore(_address(), port, world_size(), is_master=rank() == 0, **how)


def _door_name() -> str:
    """Name the entry of the store, at which torchrun starts ranks anew after a death (--max_restarts)."""
    return f"door {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _blind_name() -> str:
    return f"{_door_name()}: a rank does not see the secret"


def _let_others_in(store: Any, places: list[Path]) -> dict[int, Connection]:
    """Let the others in on rank 0. Raises ProblemsError: no place keeps a secret, or ranks do not come."""
    name = f"meeting-{secrets.token_hex(8)}"
    token = secrets.token_bytes(connection.TOKEN_BYTES)
    kept = connection.keep_secret(places, name, token)
    if not kept:
        raise _no_secret("keeps a file of mode 600 for rank 0", places)
    until = time.monotonic() + TIMEOUT.total_seconds()

    def over() -> bool:
        return time.monotonic() > until or store.check([_blind_name()])

    try:
        server = listen()
        door = Door(server.getsockname()[1], name)
        store.set(_door_name(), DOOR.dump_json(door))
        connections = connection.admit(server, token, world_size(), over)
    finally:
        for path in kept:
            path.unlink(missing_ok=True)
    missing = [
        str(other) for other in range(1, world_size()) if other not in connections
    ]
    if missing:
        raise _met_nobody(
            f"ranks {some(missing)} of {world_size()} have not come, or do not see {kept[-1]}"
        )
    return connections


def _reach_rank_0(store: Any, places: list[Path]) -> Connection:
    """Connect to rank 0, once the store says how. Raises ProblemsError."""
    until = time.monotonic() + TIMEOUT.total_seconds()
    told = b""
    since = time.monotonic()
    while time.monotonic() < until:
        now_told = store.get(_door_name())
        if now_told != told:
            told = now_told
            since = time.monotonic()
        try:
            door = DOOR.validate_json(told)
            token = connection.find_secret(places, door.secret)
        except ValidationError:  # another process wrote it
            token = None
        if token is not None:
            with contextlib.suppress(OSError):
                return connection.connect(_address(), door.port, rank(), token)
        elif time.monotonic() - since > LOOK_FOR_S:
            store.set(_blind_name(), "")  # rank 0 waits no longer
            raise _no_secret(
                f"shows rank {rank()} on {socket.gethostname()} the file of rank 0",
                places,
            )
        time.sleep(EVERY_S)
    raise _met_nobody("rank 0 lets it in nowhere")


def _no_secret(what: str, places: list[Path]) -> ProblemsError:
    came = f"none of {', '.join(map(str, places))} {what}"
    rule = "ranks prove to each other that they are of one launch by a secret in a file of mode 600"
    fix = "set MEGARECIPES_CACHE or --out to a directory that all machines share, with owners of files"
    return ProblemsError([Problem("MEGARECIPES_CACHE", came, rule, fix)])


def _met_nobody(rule: str) -> ProblemsError:
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    came = f"rank {rank()} on {socket.gethostname()} met not all other ranks at {where}"
    fix = "check that every machine was started, and reaches that address"
    return ProblemsError([Problem("MASTER_ADDR", came, rule, fix)])
