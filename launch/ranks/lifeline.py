"""Connections of all ranks to rank 0, so that one rank's death ends all at once.

Else the others would wait for half an hour, or for days during the preparation of a corpus: srun, unlike
torchrun and deepspeed, does not end them. A rank that waits for a GPU in training is not told by NCCL either;
gloo tells, and that rank ends by itself.
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

BYE, LEAVE = b".", b"!"  # the last byte of a rank that ends well; rank 0's word over the death of another one
CONNECT_S = 10.0
SETTLE_S = 5.0  # before a death is told: this rank may notice it, or a launcher end it, meanwhile
TOLD = "what it or its machine said last tells why; all ranks end"


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
            threading.Thread(target=self._hold, args=(connection, rank), daemon=True).start()

    def end(self) -> None:
        """Let ranks end without ending the others from now on."""
        self._over = True
        self._send(BYE)

    def _send(self, word: bytes) -> None:
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.sendall(word)

    def _hold(self, connection: socket.socket, rank: int) -> None:
        said = b""
        with contextlib.suppress(OSError):
            said = connection.recv(1)
        if said == LEAVE:
            os._exit(1)
        if said != BYE:
            self._end(f"rank 0 at {os.environ['MASTER_ADDR']}", tell=rank == 1)

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
                    self._end(self._connections[connection])
        # Of one that was not accepted in time it must not look as if this rank had died.
        server.setblocking(False)
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                self._connections[connection] = ""
                connection.sendall(BYE)

    def _end(self, who: str, tell: bool = True) -> None:
        """End this rank after the death of another one, and `tell` of that."""
        time.sleep(SETTLE_S)
        if not self._over:
            if tell:
                terminal.say(f"\n{who} has ended: {TOLD}\n", sys.stderr)
                sys.stderr.flush()
            self._send(LEAVE)
            os._exit(1)
