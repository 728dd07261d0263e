"""A TCP proxy that cuts connections at a byte, as bad networks do, and balances over servers."""

from __future__ import annotations

import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

import attrs

PIECE_BYTES: Final = 4096
FOR_EVER: Final = 1 << 62


@attrs.define
class Cutter:
    """The proxy's plan: it cuts each connection in turn after so many bytes, both ways together.

    Attributes:
        cuts: the bytes of each connection; those after the last one are not cut.
        port: where it listens.
        connections: how many came.
    """

    cuts: list[int]
    port: int = 0
    connections: int = 0

    def next_cut(self) -> int:
        """The bytes that the next connection may carry."""
        number, self.connections = self.connections, self.connections + 1
        return self.cuts[number] if number < len(self.cuts) else FOR_EVER


class _Link:
    """One connection through the proxy."""

    def __init__(self, client: socket.socket, server: socket.socket, bytes_left: int) -> None:
        self._ends = (client, server)
        self._left = bytes_left
        self._lock = threading.Lock()

    def run(self) -> None:
        client, server = self._ends
        back = threading.Thread(target=self._carry, args=(server, client), daemon=True)
        back.start()
        self._carry(client, server)
        back.join()
        for end in self._ends:
            end.close()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(PIECE_BYTES):
                with self._lock:
                    allowed, self._left = data[: self._left], max(0, self._left - len(data))
                sink.sendall(allowed)
                if len(allowed) < len(data):
                    self._cut()
                    return
            sink.shutdown(socket.SHUT_WR)

    def _cut(self) -> None:
        """Reset both ends: what is on its way is lost."""
        for end in self._ends:
            with suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.shutdown(socket.SHUT_RDWR)


def _connect(addresses: deque[tuple[str, int]]) -> socket.socket:
    """Connect to the next server that takes connections."""
    for _ in range(len(addresses)):
        addresses.rotate(-1)
        with suppress(OSError):
            return socket.create_connection(addresses[0])
    raise OSError("no server takes connections")


@contextmanager
def cutting(*addresses: tuple[str, int], cuts: list[int]) -> Iterator[Cutter]:
    """Run a proxy to the addresses of servers, each in turn."""
    cutter = Cutter(cuts)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        cutter.port = listener.getsockname()[1]

        servers = deque(addresses)

        def serve() -> None:
            with suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    try:
                        server = _connect(servers)
                    except OSError:
                        client.close()
                        continue
                    link = _Link(client, server, cutter.next_cut())
                    threading.Thread(target=link.run, daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        try:
            yield cutter
        finally:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
