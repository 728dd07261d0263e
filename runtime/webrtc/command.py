"""`antiphon door`: calls of browsers by WebRTC, for one gateway."""

from __future__ import annotations

import asyncio
import logging
import signal
from functools import partial
from ipaddress import IPv4Address
from urllib.parse import urlsplit

import click

from ..client.terminal import url_option
from ..link.address import UnixAddress, WorkerAddress, read_address
from ..telemetry.logs import announce, configure
from .arrivals import CallLoop
from .door import Door
from .offer import LINE_BYTES_MAX


@click.command("door")
@url_option
@click.option(
    "--listen",
    default="tcp:127.0.0.1:8007",
    show_default=True,
    metavar="ADDRESS",
    help="Where the server brings offers (`antiphon serve --webrtc-door`): unix:PATH or "
    "tcp:HOST:PORT, of this machine only.",
)
@click.option(
    "--address",
    default="",
    metavar="IP",
    help="The address that clients are told, where a NAT is before this machine.",
)
@click.option(
    "--ports",
    type=(click.IntRange(1024, 65_535), click.IntRange(1024, 65_535)),
    default=(40_000, 40_999),
    show_default=True,
    metavar="FIRST LAST",
    help="UDP ports for calls, which a firewall must let pass; a call takes one for "
    "each address of this machine.",
)
@click.option(
    "--calls-max",
    type=click.IntRange(1, 1_000),
    default=32,
    show_default=True,
    help="Concurrent calls.",
)
def door_command(
    *, url: str, listen: str, address: str, ports: tuple[int, int], calls_max: int
) -> None:
    """Let browsers talk to a server by WebRTC.

    Sound goes by UDP, compressed, and survives a bad network better than a WebSocket. Each call is
    a session of OpenAI's Realtime API on the server, with the client's own key.

    \b
        antiphon serve --webrtc-door tcp:127.0.0.1:8007
        antiphon door --url 127.0.0.1:8006

    \b
    Exit codes
      0  ended by a signal
      1  the address is not available
      2  an option is wrong
    """  # noqa: D301 - click takes a backspace to keep the lines
    try:
        at = read_address(listen)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if not at.is_local:
        text = f"{at} can be reached from other machines: name one of this machine"
        raise click.UsageError(text)
    try:
        IPv4Address(address or "0.0.0.0")
    except ValueError as error:
        raise click.UsageError(f"--address {address}: give an IPv4 address") from error
    first, last = ports
    if first > last:
        raise click.UsageError(f"--ports {first} {last}: the first is above the last")
    configure("text", "info")
    logging.getLogger("aioice").setLevel(logging.WARNING)
    server = urlsplit(url)
    door = Door(f"{server.scheme}://{server.netloc}", address=address, calls_max=calls_max)
    make_loop = partial(CallLoop, range(first, last + 1))
    try:
        with asyncio.Runner(loop_factory=make_loop) as runner:
            runner.run(_serve(door, at))
    except OSError as error:
        raise click.ClickException(f"cannot listen on {at}: {error.strerror or error}") from error


async def _serve(door: Door, at: WorkerAddress) -> None:
    if isinstance(at, UnixAddress):
        at.path.unlink(missing_ok=True)
        server = await asyncio.start_unix_server(door.serve, at.path, limit=LINE_BYTES_MAX)
        at.path.chmod(0o600)
    else:
        server = await asyncio.start_server(door.serve, at.host, at.port, limit=LINE_BYTES_MAX)
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with server:
        announce("text", f"listening on {at}", logger="antiphon.door")
        announce("text", "ready", logger="antiphon.door")
        await ended.wait()
    await door.aclose()
