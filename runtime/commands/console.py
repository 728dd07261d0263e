"""`antiphon console`: serve a model, and open the page on which one talks to it.

The server is a process of its own, and is stopped with the command.
"""

from __future__ import annotations

import signal
import webbrowser
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import anyio
import click

from ..client.terminal import UnusableError
from ..client.websocket import background
from ..settings.settings import RECORDINGS
from .server_process import model_option, served

PORT: Final = 8006
"""The default of `antiphon serve`: the address stays the same."""


@click.command("console")
@model_option
@click.option("--port", type=click.IntRange(0, 65535), default=PORT, show_default=True)
@click.option(
    "--record",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=RECORDINGS,
    show_default=True,
    help="Folder of the recordings; it is made where it is missing.",
)
@click.option("--no-browser", is_flag=True, help="Only print the address.")
def console_command(*, model: str, port: int, folder: Path, no_browser: bool) -> None:
    """Serve a model and open the console, the page on which you talk to it, until Ctrl-C.

    The server listens on this machine only, and asks for no key. `antiphon serve` has all settings,
    and shows the same page at its address.

    \b
    Examples:
      antiphon console
      antiphon console --port 0 --no-browser

    \b
    Exit codes:
      0  stopped
      1  the server did not start: it says why
      2  a folder that cannot be used
    """  # noqa: D301 - click takes a backspace to keep the lines
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UnusableError(f"--record: {folder}: {error.strerror}") from error
    anyio.run(_serve, model, port, folder, not no_browser, backend="trio")
    click.echo("stopped")


async def _serve(model: str, port: int, folder: Path, opens: bool) -> None:
    """Serve until a signal comes."""
    async with background() as tasks:
        tasks.start_soon(_watch_signals, tasks.cancel_scope)
        click.echo(f"loading the {model} model")
        async with served(model, folder, "--port", str(port)) as url:
            page = f"http://{urlsplit(url).netloc}/"
            click.echo(f"the console is at {page}  (Ctrl-C stops the server)")
            if opens and not await anyio.to_thread.run_sync(webbrowser.open, page):
                click.echo("there is no browser to open it in: open the address in yours", err=True)
            await anyio.sleep_forever()


async def _watch_signals(everything: anyio.CancelScope) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            everything.cancel()
