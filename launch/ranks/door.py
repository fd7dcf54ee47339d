"""The door of rank 0: where the other ranks reach it, and how both sides know each other.

Rank 0 listens, and writes into torch's store where, and how it knows the others: by their account on one
machine, by a secret between machines (launch/ranks/connection.py). A rank takes nothing else from the store,
where anyone may write. One process needs no door.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import StringConstraints, TypeAdapter, ValidationError

from launch.console import terminal
from launch.ranks import connection, interfaces
from launch.ranks.connection import Connection
from launch.ranks.interfaces import LOOPBACK
from launch.ranks.processes import (
    TIMEOUT,
    agent_has_store,
    one_machine,
    port_is_taken,
    rank,
    world_size,
)
from recipes.problems import ProblemsError, some

PICKLES = (
    "torchrun's rendezvous c10d (its default on one machine) runs code that any account sends to its port: "
    "where others use this machine give it --master_port 29500, which makes it static"
)
LOOK_FOR_S = 30.0  # network file systems may show a new file late
EVERY_S = 0.1


@dataclass(frozen=True)
class Door:
    """The way to rank 0, as it stands in torch's store, where anyone may write.

    Attributes:
        name: of a Unix socket, or of a file with the secret.
        known_by: what ranks know each other by: the account, or a secret in the environment or in a file.
        port: of rank 0 on several machines.
    """

    name: Annotated[str, StringConstraints(pattern=r"^meeting\.[0-9a-f]{8}\.tmp$")]
    known_by: Literal["account", "environment", "file"]
    port: int = 0


DOOR = TypeAdapter(Door)
DOOR_NAME = "door"  # in the store


def connections_of(places: list[Path]) -> tuple[Any, dict[int, Connection]]:
    """Return torch's store, and the connections of this rank: to rank 0, or on rank 0 to all others.

    `places`: directories that may keep the secret. Raises ProblemsError.
    """
    try:
        store = _open_store()
        if rank() == 0:
            _warn_of_pickles(store)
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


def _let_others_in(store: Any, places: list[Path]) -> dict[int, Connection]:
    """Let the others in on rank 0. Raises ProblemsError: no place keeps a secret, or ranks do not come."""
    name = f"meeting.{secrets.token_hex(4)}.tmp"  # in the form of `left_by_a_crash`
    kept = list[Path]()
    token = b""
    if one_machine():
        server = connection.listen_here(name)
        door = Door(name, "account")
    else:
        server = listen()
        port = server.getsockname()[1]
        door = Door(name, "environment", port)
        token = connection.stated_secret() or b""
    if not (token or one_machine()):
        door = Door(name, "file", port)
        token = secrets.token_bytes(connection.TOKEN_BYTES)
        kept = connection.keep_secret(places, name, token)
        if not kept:
            server.close()
            raise _no_secret("keeps a file of mode 600 for rank 0", places)
    until = time.monotonic() + TIMEOUT.total_seconds()

    def over() -> bool:
        return time.monotonic() > until or store.check([_blind_name(door)])

    try:
        store.set(DOOR_NAME, DOOR.dump_json(door))
        connections = connection.admit(server, token, world_size(), over)
    finally:
        for path in kept:
            path.unlink(missing_ok=True)
    missing = [
        str(other) for other in range(1, world_size()) if other not in connections
    ]
    if missing:
        raise _met_nobody(
            f"ranks {some(missing)} of {world_size()} have not come, or do not know its secret"
        )
    return connections


def _reach_rank_0(store: Any, places: list[Path]) -> Connection:
    """Connect to rank 0, once the store says how. Raises ProblemsError.

    torchrun starts ranks anew (--max_restarts) and keeps its store, so that the door there may be that of a
    rank 0 that has ended: nobody listens behind it. A secret is missing only where somebody does.
    """
    until = time.monotonic() + TIMEOUT.total_seconds()
    told = b""
    since = time.monotonic()
    while time.monotonic() < until:
        now_told = store.get(DOOR_NAME)
        if now_told != told:
            told = now_told
            since = time.monotonic()
        # nobody listens, or another process wrote the door
        with contextlib.suppress(OSError, ValidationError):
            door = DOOR.validate_json(told)
            connected = _knock(door)
            try:
                return connection.prove(connected, rank(), _token(door, places))
            except connection.OtherSecretError:
                if time.monotonic() - since > LOOK_FOR_S:
                    store.set(_blind_name(door), "")  # rank 0 waits no longer
                    raise _unknown_secret(door, places) from None
        time.sleep(EVERY_S)
    raise _met_nobody("rank 0 lets it in nowhere")


def _knock(door: Door) -> socket.socket:
    """Connect to the socket of a door. Raises OSError."""
    if door.known_by == "account":
        return connection.connect_here(door.name)
    return socket.create_connection(
        (_address(), door.port), timeout=connection.PATIENCE_S
    )


def _token(door: Door, places: list[Path]) -> bytes | None:
    """Return the token of a door; None if this rank does not know it."""
    if door.known_by == "account":
        return b""
    if door.known_by == "environment":
        return connection.stated_secret()
    return connection.find_secret(places, door.name)


def _warn_of_pickles(store: Any) -> None:
    """Say so where torchrun's rendezvous is not static: c10d unpickles what lies in a store of its own.

    A static one keeps what agents agree on in this store.
    """
    agreed = f"{os.environ.get('TORCHELASTIC_RUN_ID')}/torchelastic/role_info/0"
    if agent_has_store() and not store.check([agreed]):
        terminal.say(PICKLES, sys.stderr)


def _blind_name(door: Door) -> str:
    return f"{door.name}: a rank does not know the secret"


def _unknown_secret(door: Door, places: list[Path]) -> ProblemsError:
    who = f"rank {rank()} on {socket.gethostname()}"
    if door.known_by == "file":
        return _no_secret(f"shows {who} the file of rank 0", places)
    return ProblemsError.of(
        connection.SECRET,
        f"{who} has another {connection.SECRET} than rank 0, or none",
        "ranks of a launch know one secret",
        "pass the same on to all ranks, as launch/cluster/ does",
    )


def _no_secret(what: str, places: list[Path]) -> ProblemsError:
    fix = (
        f"set {connection.SECRET} to random text on all ranks (openssl rand -hex 32), or MEGARECIPES_CACHE or "
        "--out to a directory that all machines share, with owners and modes of files"
    )
    return ProblemsError.of(
        connection.SECRET,
        f"none of {', '.join(map(str, places))} {what}",
        "ranks on several machines prove to each other that they are of one launch by a secret",
        fix,
    )


def _met_nobody(rule: str) -> ProblemsError:
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    return ProblemsError.of(
        "MASTER_ADDR",
        f"rank {rank()} on {socket.gethostname()} met not all other ranks at {where}",
        rule,
        "check that every machine was started, and reaches that address",
    )
