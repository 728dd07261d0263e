"""The command `antiphon dev play`: a server that answers as a recorded one did."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import click
import orjson

from protocol.values.events import ConnectionOpened
from recorder.read.reader import LogReader
from runtime.access.gate import open_gate
from runtime.net.listener import Address
from runtime.settings.settings import Settings

from ..shared.commands import reading
from ..shared.recordings import RecordingType
from ..story.wire import Wire
from .script import ScriptError, address_of, read_opening, steps
from .server import PlayServer, Stage, Tell, serve

SHOWN_MAX: Final = 5
"""Differences of a client shown to people; JSON has all of them."""
TEXTS: Final = {
    "listening": "listening on {url}",
    "rejected": "rejected {path}: {message}",
    "connected": "client {client} connected",
    "failed": "client {client} failed: {message}",
    "ended": "client {client} {how}: {sent} frames sent, {received} received",
}
"""Texts for people, by event; single frames are only in JSON."""
DIFFERENCE: Final = "  frame {index} was {got}, the recorded one {expected}"


@click.command("play")
@click.argument("log", type=RecordingType())
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen at.")
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    default=0,
    help="The port; a free one by default.",
)
@click.option(
    "--origin", "origins", multiple=True, help="A web origin whose pages may connect too."
)
@click.option(
    "--speed",
    type=click.FloatRange(min=0),
    default=1.0,
    show_default=True,
    help="Times the recording's; 0: as fast as the client's frames come.",
)
@click.option("--strict", is_flag=True, help="A client that does otherwise is an error.")
@click.option("--clients", "clients_max", type=click.IntRange(1), help="End after so many clients.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON objects, one a line.")
def play_command(
    *,
    log: Path,
    host: str,
    port: int,
    origins: tuple[str, ...],
    speed: float,
    strict: bool,
    clients_max: int | None,
    as_json: bool,
) -> None:
    """Answer clients as the server of the recorded session LOG answered its own.

    For authors of clients: no model runs, and each run is the same. Each client gets the recorded
    frames, byte for byte, each after as many frames of its own as in the recording and not before
    its time; a late client is answered later. Its frames are compared only by kind: an init, an
    append, a close. The end is that of the recording.

    Clients connect to the recorded one's address, because the protocol is the recording's; several
    at once are served each from the start. There are no keys: every client gets the log's sound and
    text.

    \b
    Examples:
      antiphon dev play sessions/rec-000002.session.zst --port 8006
      antiphon dev play sessions/rec-000002.session.zst --speed 0 --strict --clients 1 --json

    \b
    Exit codes:
      0  ended by a signal, or after --clients
      1  --strict: a client did otherwise than the recorded one; or the port cannot be had
      2  the log cannot be read, or is damaged
    """  # noqa: D301 - click takes a backspace to keep the lines
    stage = Stage(
        log=log,
        opened=_check(log),
        speed=speed,
        strict=strict,
        clients_max=clients_max,
    )
    tell = _tell_json if as_json else _tell_text
    try:
        settings = Settings(host=host, port=port, origins=origins)
        open_gate(settings)
    except ValueError as error:
        raise click.UsageError(f"--origin: {error}") from error
    differences = anyio.run(_run, stage, settings, tell, backend="trio")
    if strict and differences:
        raise click.ClickException("a client did otherwise than the recorded one")


def _check(log: Path) -> ConnectionOpened:
    """Read the log to its end once, so that no client meets an error in it."""
    with reading(log, ScriptError):
        opened = read_opening(log)
        with LogReader(log) as reader:
            for _ in steps(reader, Wire(opened)):
                pass
    return opened


async def _run(stage: Stage, settings: Settings, tell: Tell) -> int:
    server = PlayServer(stage, open_gate(settings), tell)
    try:
        await serve(server, settings, partial(_say_bound, tell, address_of(stage.opened)))
    except OSError as error:
        address = f"{settings.host} port {settings.port}"
        text = f"cannot listen on {address}: {error.strerror or error}"
        raise click.ClickException(text) from error
    return server.differences


def _say_bound(tell: Tell, path: str, addresses: tuple[Address, ...]) -> None:
    for address in addresses:
        host = f"[{address.host}]" if ":" in address.host else address.host
        tell("listening", url=f"ws://{host}:{address.port}{path}")


def _tell_json(event: str, **fields: object) -> None:
    click.echo(orjson.dumps({"type": event, **fields}))
    sys.stdout.flush()


def _tell_text(event: str, **fields: Any) -> None:
    if event in TEXTS:
        click.echo(TEXTS[event].format(**fields))
        for difference in fields.get("differences", ())[:SHOWN_MAX]:
            click.echo(DIFFERENCE.format(**difference))
        sys.stdout.flush()
