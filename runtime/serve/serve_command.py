"""`antiphon serve`: settings from flags, variables and a file, then `runtime.serve.serving`.

`settings` declares each setting, `config` merges the sources. Errors in them are reported before
anything starts.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio
import click

from ..access.origins import is_loopback
from ..net.listener import Address
from ..settings.settings import Settings
from ..settings.sources import (
    CONFIG_VARIABLE,
    ConfigError,
    Effective,
    SettingsCommand,
    given,
    read,
    settings_options,
    to_toml,
)
from ..telemetry.logs import configure
from .checks import check, warnings

if TYPE_CHECKING:
    from ..api.views import LoadViewer

EXIT_WAIT_S: Final = 25.0
"""By then cut-off sessions and the last spans are done (`CUT_OFF_S`, `LAST_WAIT_S`); a call that
hangs in the model is given up."""
EVERY_ADDRESS: Final = frozenset({"0.0.0.0", "::"})
"""Hosts that listen on every address; not every browser can open them by that name."""
CUT_OFF: Final = 128
"""Shells add it to the number of the signal that killed a process."""


@click.command("serve", cls=SettingsCommand)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help=f"TOML file of settings, a key for each [default: what {CONFIG_VARIABLE} names, if any].",
)
@click.option(
    "--print-config",
    is_flag=True,
    help="Print the settings as such a file, each with where it came from, and end.",
)
@settings_options
@click.option("--no-record", is_flag=True, help="Record nothing, whatever --record says.")
@click.option("-v", "--verbose", is_flag=True, help="Log what every session does.")
@click.pass_context
def serve_command(
    ctx: click.Context,
    /,
    *,
    config: Path | None,
    print_config: bool,
    no_record: bool,
    verbose: bool,
    **_settings: object,
) -> None:
    """Serve a model over WebSockets at /v1/realtime?mode=video|audio|chat.

    \b
    Clients of the older protocols connect to
      /ws/duplex/{session_id}   full duplex; ids that begin with adx_ or audio_duplex have no video
      /ws/chat                  one question a connection

    It says "loading MODEL", then "listening on URL" and "ready" when sessions are taken. The same
    port takes HTTP (/health, /ready), also while the model loads. Sessions and turns that find no
    free slot wait in one queue. After Ctrl-C or SIGTERM new sessions are refused and running ones
    have --drain-s to finish; a second signal ends them at once, cleanly, and a third cuts them off.

    \b
    Exit codes
      0  ended; running sessions had their time
      1  the port, the model, or another requirement is not available; the GPU was lost; or a call
         hung in the model
      2  a setting is wrong; nothing was started
      129, 130, 143  cut off by the third signal: SIGHUP, SIGINT or SIGTERM

    Every setting is also a key of a TOML file (--config) and a variable, ANTIPHON_ and its name in
    capitals: defaults < file < variables < flags. An address that is not loopback needs --keys or
    --insecure. docs/operations.md says more.
    """  # noqa: D301 - click takes a backspace to keep the lines
    flags = given(ctx)
    if no_record:
        flags["record_to"] = None
    if verbose:
        flags.setdefault("log_level", "info")
    effective = _read(flags, config)
    if print_config:
        click.echo(to_toml(effective), nl=False)
    _check(effective.settings)
    if not print_config:
        _serve(effective.settings, ctx.obj)


def _read(flags: dict[str, object], config: Path | None) -> Effective:
    try:
        return read(flags=flags, environ=os.environ, config=config)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error


def _check(settings: Settings) -> None:
    try:
        check(settings)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    for warning in warnings(settings):
        click.echo(f"Warning: {warning}", err=True)


def _serve(settings: Settings, load_viewer: LoadViewer | None) -> None:
    from .serving import CannotServeError, run

    configure(settings.log_format, settings.log_level)
    bound: list[Address] = []

    def loading(addresses: tuple[Address, ...]) -> None:
        bound.extend(addresses)
        names = settings.worker_addresses or (settings.model, *settings.workers)
        _say(f"loading {', '.join(names)}")

    def ready() -> None:
        scheme = "ws" if settings.tls_cert is None else "wss"
        listening = [f"listening on {_url(scheme, address)}" for address in bound]
        _say(*listening, "ready", *_whereabouts(settings, bound))

    try:
        serve = partial(
            run,
            settings,
            load_viewer=load_viewer,
            on_bound=loading,
            on_ready=ready,
            on_stopping=_exit_soon,
        )
        cut_by = anyio.run(serve, backend="trio")
    except CannotServeError as error:
        raise click.ClickException(str(error)) from error
    click.echo("stopped")
    if cut_by is not None:
        sys.exit(CUT_OFF + cut_by)


def _exit_soon(cut_by: signal.Signals | None) -> None:
    """Exit in `EXIT_WAIT_S`, even if a thread hangs in the model."""
    code = 1 if cut_by is None else CUT_OFF + cut_by
    timer = threading.Timer(EXIT_WAIT_S, os._exit, (code,))
    timer.daemon = True
    timer.start()


def _whereabouts(settings: Settings, bound: Sequence[Address]) -> tuple[str, ...]:
    """The console, other pages, the status, the folder of recordings, and who can reach it."""
    from ..api.pages import ADDRESS

    scheme = "http" if settings.tls_cert is None else "https"
    own = bound[0]
    host = "localhost" if own.host in EVERY_ADDRESS else _host(own)
    root = f"{scheme}://{host}:{own.port}"
    address = "/" if settings.static is None else ADDRESS
    pages = [f"talk to it at {root}{address}"] if settings.pages else []
    pages += [] if settings.static is None else [f"pages at {root}/ ({settings.static})"]
    folder = settings.record_to
    recordings = "nothing is recorded" if folder is None else f"recordings in {folder.absolute()}"
    who = (
        "this machine only"
        if all(is_loopback(address.host) for address in bound)
        else f"every machine that reaches {', '.join(map(_host, bound))}"
    )
    keyed = "no key is asked for" if settings.keys is None else f"with a key of {settings.keys}"
    return *pages, f"status at {root}/status", recordings, f"open to {who}, {keyed}"


def _url(scheme: str, address: Address) -> str:
    return f"{scheme}://{_host(address)}:{address.port}/v1/realtime"


def _host(address: Address) -> str:
    return f"[{address.host}]" if ":" in address.host else address.host


def _say(*lines: str) -> None:
    for line in lines:
        click.echo(line)
    sys.stdout.flush()
