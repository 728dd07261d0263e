"""The processes of the capacity bench: a gateway with workers over TCP and TLS, and a worker.

The worker's model computes nothing and speaks in every unit, as that of the gateway bench does; so
what is measured is the gateway's own work, at its most. Each process says its port, and then what
it has used so far whenever it is asked (`tests.bench.gateway.meter`); a worker also says how many
bytes came to it and left it, without those of TLS.
"""

from __future__ import annotations

import ssl
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import attrs
from anyio.abc import ByteStream, SocketAttribute

from runtime.net.listener import Address
from runtime.net.tls import Certificate
from runtime.serve.serving import run
from runtime.worker.worker import Worker
from tests.bench.gateway.meter import Meter
from tests.bench.gateway.servers import _UNBOUND as UNBOUND
from tests.bench.gateway.servers import HOST, _load


class LinkMeter(Meter):
    """A meter that also says what crossed the worker's links, in bytes."""

    def __init__(self) -> None:
        super().__init__(has_stages=False)
        self.came_bytes = self.left_bytes = 0

    def read(self) -> dict[str, Any]:
        """Say what was used so far, and what crossed."""
        return {**super().read(), "came_bytes": self.came_bytes, "left_bytes": self.left_bytes}


class Counted(ByteStream):
    """A stream whose bytes are counted."""

    def __init__(self, stream: ByteStream, meter: LinkMeter) -> None:
        self._stream = stream
        self._meter = meter

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Receive, and count."""
        data = await self._stream.receive(max_bytes)
        self._meter.came_bytes += len(data)
        return data

    async def send(self, item: bytes) -> None:
        """Send, and count."""
        await self._stream.send(item)
        self._meter.left_bytes += len(item)

    async def send_eof(self) -> None:
        """End the stream."""
        await self._stream.send_eof()

    async def aclose(self) -> None:
        """Close the stream."""
        await self._stream.aclose()

    @property
    def extra_attributes(self) -> Mapping[Any, Any]:
        """Those of the stream."""
        return self._stream.extra_attributes


async def serve_worker(secrets: Path) -> None:
    """Be a worker, until the standard input ends."""
    meter, certificate = LinkMeter(), Certificate(secrets / "tls.crt", secrets / "tls.key")
    token = (secrets / "token").read_text().strip()
    listener = await anyio.create_tcp_listener(local_host=HOST)

    def tls() -> ssl.SSLContext:
        return certificate.context

    async with anyio.create_task_group() as tasks:
        worker = Worker(backend=_load(), tasks=tasks, token=token, tls=tls)

        async def meet(stream: ByteStream) -> None:
            await worker._serve_connection(Counted(stream, meter))

        meter.start(listener.extra(SocketAttribute.local_port))
        await listener.serve(meet, tasks)


async def serve_gateway(folder: Path, secrets: Path, ports: list[str]) -> None:
    """Be a gateway of workers at these ports, or without any of a model of its own."""
    meter, bound = Meter(has_stages=False), list[Address]()
    settings = attrs.evolve(
        UNBOUND,
        record_to=folder,
        worker_addresses=tuple(f"tcp:{HOST}:{port}" for port in ports),
        worker_token_file=secrets / "token",
        worker_ca=secrets / "ca.crt",
    )
    await run(
        settings, load=_load, on_bound=bound.extend, on_ready=lambda: meter.start(bound[0].port)
    )


def main(role: str, secrets: str, *rest: str) -> None:
    """Serve as a worker, or as a gateway with a folder for logs and the ports of workers."""
    if role == "worker":
        anyio.run(serve_worker, Path(secrets), backend="trio")
    else:
        folder, *ports = rest
        anyio.run(serve_gateway, Path(folder), Path(secrets), ports, backend="trio")


if __name__ == "__main__":
    main(*sys.argv[1:])
