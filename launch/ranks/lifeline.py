"""Connections of all ranks to rank 0 before training, so that one rank's death ends all at once.

Else the others would wait for half an hour, or for days during the preparation of a corpus: srun, unlike
torchrun and deepspeed, does not end them. In training the process group and the watchdog notice a death.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import sys
import threading
import time
from typing import Any

from launch.console import terminal

BYE = b"."  # the last byte of a rank that ends well
CONNECT_S = 10.0
SETTLE_S = 2.0  # before a death is told: a launcher that ends all of them ends this rank meanwhile


class Lifeline:
    """This rank's connection to rank 0; on rank 0, all connections."""

    def __init__(self, store: Any, rank: int, world: int) -> None:
        """Connect through the ranks' `store`. A rank that does not reach rank 0 is not watched."""
        self._over = False
        self._connections: dict[socket.socket, str] = {}  # and whose they are
        if rank == 0:
            server = socket.create_server(("", 0), backlog=world)
            store.set("lifeline", str(server.getsockname()[1]))
            threading.Thread(target=self._watch, args=(server,), daemon=True).start()
            return
        port = int(store.get("lifeline"))
        with contextlib.suppress(OSError):
            connection = socket.create_connection((os.environ["MASTER_ADDR"], port), timeout=CONNECT_S)
            connection.settimeout(None)
            connection.sendall(f"rank {rank} on {socket.gethostname()} (pid {os.getpid()})\n".encode())
            self._connections[connection] = "rank 0"
            threading.Thread(target=self._hold, args=(connection,), daemon=True).start()

    def end(self) -> None:
        """Let ranks end without ending the others from now on."""
        self._over = True
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.sendall(BYE)

    def _hold(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            if connection.recv(1) == BYE:
                return
        time.sleep(SETTLE_S)
        if not self._over:  # rank 0 has died, and what it said last tells why
            os._exit(1)

    def _watch(self, server: socket.socket) -> None:
        selector = selectors.DefaultSelector()
        selector.register(server, selectors.EVENT_READ)
        while not self._over:
            for key, _ in selector.select(timeout=1.0):
                if key.fileobj is server:
                    with contextlib.suppress(OSError):
                        connection, _ = server.accept()
                        connection.settimeout(CONNECT_S)
                        self._connections[connection] = connection.makefile("r").readline().strip()
                        selector.register(connection, selectors.EVENT_READ)
                    continue
                connection = key.fileobj  # type: ignore[assignment]
                selector.unregister(connection)
                said = b""
                with contextlib.suppress(OSError):
                    said = connection.recv(1)
                if said != BYE:
                    self._end_all(self._connections[connection])
        # Of one that was not accepted in time it must not look as if this rank had died.
        server.setblocking(False)
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                self._connections[connection] = ""
                connection.sendall(BYE)

    def _end_all(self, who: str) -> None:
        time.sleep(SETTLE_S)
        if not self._over:
            why = "what it or its machine said last tells why; all ranks end"
            terminal.say(f"\n{who} has ended before training: {why}\n", sys.stderr)
            sys.stderr.flush()
            os._exit(1)
