"""`antiphon serve`: settings from flags, variables and a file, then `runtime.serve.serving`.

`settings` declares each setting and merges the sources. Each value was checked when it was read;
here settings are checked against each other and against the disk, before anything starts. All
problems are reported at once, each with its remedy.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

import anyio
import attrs
import click

from recorder.storage.remote import RemoteStore, StoreError

from ..access.keys import KeyFileError, read_key_file
from ..access.origins import is_loopback, read_origins
from ..link.link import read_address, read_token
from ..media.voices import NAME_RULE, is_voice_name
from ..model.models import MOONSHINE, ModelUnknownError, check_model, has_moonshine
from ..net.listener import Address
from ..settings import sources
from ..settings.extras import install
from ..settings.settings import NO_TRANSCRIBER, Settings, shown
from ..telemetry.logs import announce, configure
from .placement import offer
from .relay import read_gateway

if TYPE_CHECKING:
    from ..api.views import LoadViewer


_logger: Final = logging.getLogger("antiphon.serve")

# -- checks of the settings ------------------------------------------------------------------------


_OF_WORKERS: Final = ("isolate", "workers", "slots", "device", "dtype", "quantize")
"""Settings of a model, which a server with workers elsewhere does not load."""
NOTICE_CHARS_MAX: Final = 2_000
"""A page of text: longer than clients read before speaking; each session's log holds it."""


def check(settings: Settings) -> None:
    """Raise `ConfigError` if settings do not fit together, or name a missing file."""
    checks = (_access, _tls, _models, _workers, _placements, _voices, _static, _notice, _store)
    problems = [text for found in (*checks, _gateways) for text in found(settings)]
    if 0 < settings.pong_wait_s <= settings.ping_s:
        problems.append(
            f"pong_wait_s: {settings.pong_wait_s} is no longer than ping_s, {settings.ping_s}: "
            "clients would be dropped before they are asked"
        )
    if problems:
        raise sources.ConfigError("\n".join(problems))


def warnings(settings: Settings) -> tuple[str, ...]:
    """Warnings about valid but risky settings."""
    for text in settings.gateways:
        scheme, host, _ = read_gateway(text)
        if scheme == "http" and not is_loopback(host):
            return (f"gateways: keys and sessions cross the network to {text} in the clear",)
    if is_loopback(settings.host):
        return ()
    if settings.keys is None:
        return (f"{settings.host}: there are no keys; every client there may use this server",)
    if settings.tls_cert is None:
        text = "keys and sessions cross the network in the clear; use --tls-cert, or a proxy"
        return (f"{settings.host}: {text} with TLS",)
    return ()


def _access(settings: Settings) -> Iterator[str]:
    if settings.keys is None and not settings.insecure and not is_loopback(settings.host):
        yield (
            f"host: {settings.host} is not a loopback address, and there are no keys. Make one "
            "with `antiphon keys add NAME --file FILE` and give --keys FILE; or give --insecure, "
            "which lets every client that reaches this address use the server"
        )
    if settings.keys is not None:
        yield from _tried("keys", partial(read_key_file, settings.keys), KeyFileError)
    has_keys = settings.keys is not None
    read = partial(read_origins, settings.origins, has_keys=has_keys, host=settings.host)
    yield from _tried("origins", read)


def _tls(settings: Settings) -> Iterator[str]:
    if settings.tls_cert is not None and settings.tls_key is None:
        yield "tls_cert: a certificate needs its private key, tls_key"
    if settings.tls_key is not None and settings.tls_cert is None:
        yield "tls_key: a private key needs its certificate, tls_cert"
    yield from _file("tls_cert", settings.tls_cert)
    yield from _file("tls_key", settings.tls_key)


def _workers(settings: Settings) -> Iterator[str]:
    """Check the addresses of workers, and what their network asks for."""
    file = settings.worker_token_file
    yield from _file("worker_ca", settings.worker_ca)
    if file is not None:
        yield from _tried("worker_token_file", partial(read_token, file))
    if not settings.worker_addresses:
        return
    for text in settings.worker_addresses:
        try:
            address = read_address(text)
        except ValueError as error:
            yield f"worker_addresses: {error}"
        else:
            if file is None and not address.is_local:
                yield f"worker_addresses: {address} is not on this machine: give worker_token_file"
    for name in _OF_WORKERS:
        if getattr(settings, name):
            yield f"{name}: give it to `antiphon workers start`: worker_addresses are addresses"


def _placements(settings: Settings) -> Iterator[str]:
    least, most, name = settings.workers_wanted, settings.workers_max, settings.placement
    if most is not None and most < least:
        yield f"workers_max: {most} is less than workers_wanted, {least}"
    if name == "auto":
        for other in ("workers_wanted", "workers_max"):
            if getattr(settings, other) != getattr(Settings(), other):
                yield f"{other}: it is for a placement that starts workers, such as ray"
        return
    for other in ("isolate", "workers", "worker_addresses"):
        if getattr(settings, other):
            yield f"{other}: leave it out, or placement {name}, which has workers of its own"
    try:
        yield from offer(name).problems(settings)
    except ValueError as error:
        yield f"placement: {error}"


def _gateways(settings: Settings) -> Iterator[str]:
    yield from _file("gateway_ca", settings.gateway_ca)
    for text in settings.gateways:
        yield from _tried("gateways", partial(read_gateway, text))


def _models(settings: Settings) -> Iterator[str]:
    named = settings.transcriber
    if named is not None and named != NO_TRANSCRIBER:
        yield from _tried("transcriber", partial(check_model, named), ModelUnknownError)
    if settings.worker_addresses or settings.placement != "auto":
        return
    for name, model in (("model", settings.model), *(("workers", it) for it in settings.workers)):
        yield from _tried(name, partial(check_model, model), ModelUnknownError)


def _voices(settings: Settings) -> Iterator[str]:
    folder, name = settings.voices, settings.default_voice
    if folder is not None and not folder.is_dir():
        yield f"voices: there is no folder {folder}"
    if name is None:
        return
    if folder is None:
        yield "default_voice: it is the name of a voice in voices, and there is no such folder"
    elif not is_voice_name(name):
        yield f"default_voice: {shown(name)} is not a name: {NAME_RULE}"


def _static(settings: Settings) -> Iterator[str]:
    folder = settings.static
    if folder is None:
        return
    if not folder.is_dir():
        yield f"static: there is no folder {folder}"
    for name in ("keys", "tls_key", "record_to"):
        path: Path | None = getattr(settings, name)
        if path is not None and path.resolve().is_relative_to(folder.resolve()):
            yield f"static: {folder} holds {name}, {path}: every client could read it there"


def _notice(settings: Settings) -> Iterator[str]:
    text = settings.recording_notice or ""
    if len(text) > NOTICE_CHARS_MAX:
        yield f"recording_notice: {len(text)} characters, at most {NOTICE_CHARS_MAX}"


def _store(settings: Settings) -> Iterator[str]:
    url, folder = settings.store, settings.record_to
    if url is None:
        return
    if folder is None:
        yield "store: nothing is recorded; leave out --no-record"
        return
    yield from _tried("store", partial(RemoteStore.open, url), StoreError)
    place = urlsplit(url)
    if place.scheme == "file" and Path(unquote(place.path)).resolve() == folder.resolve():
        yield f"store: {url} is the folder of the recordings itself, record_to"


def _file(name: str, path: Path | None) -> Iterator[str]:
    """Check that a setting's file can be read."""
    if path is not None and not (path.is_file() and os.access(path, os.R_OK)):
        yield f"{name}: there is no file {path} that can be read"


def _tried(
    name: str, read: Callable[[], object], wrong: type[Exception] = ValueError
) -> Iterator[str]:
    """Read a setting, and say why it is wrong."""
    try:
        read()
    except wrong as error:
        yield f"{name}: {error}"


# -- the command -----------------------------------------------------------------------------------


EXIT_WAIT_S: Final = 25.0
"""By then cut-off sessions and the last spans are done (`CUT_OFF_S`, `LAST_WAIT_S`); a call that
hangs in the model is given up."""
EVERY_ADDRESS: Final = frozenset({"0.0.0.0", "::"})
"""Hosts that listen on every address; not every browser can open them by that name."""
CUT_OFF: Final = 128
"""Shells add it to the number of the signal that killed a process."""


@click.command("serve", cls=sources.SettingsCommand)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help=f"TOML file of settings [default: the file that {sources.CONFIG_VARIABLE} names, if any].",
)
@click.option(
    "--print-config",
    is_flag=True,
    help="Print the settings as such a file, each with its source, and exit.",
)
@sources.settings_options
@click.option("--no-record", is_flag=True, help="Record nothing; overrides --record.")
@click.option("-v", "--verbose", is_flag=True, help="Log each session (--log-level info).")
@click.option("--open", "opens", is_flag=True, help="Open the console in a browser.")
@click.pass_context
def serve_command(
    ctx: click.Context,
    /,
    *,
    config: Path | None,
    print_config: bool,
    no_record: bool,
    verbose: bool,
    opens: bool,
    **_settings: object,
) -> None:
    """Serve a model over WebSockets at /v1/realtime?mode=video|audio|chat.

    \b
    Clients of the older protocols connect to
      /ws/duplex/{session_id}   full duplex; ids that begin with adx_ or audio_duplex have no video
      /ws/half_duplex/{id}      the half-duplex page of MiniCPM-o's demo
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

    --help shows the options that most servers need, --help-all every one.

    Every setting is also a key of a TOML file (--config) and a variable, ANTIPHON_ and its name in
    capitals: defaults < file < variables < flags. An address that is not loopback needs --keys or
    --insecure. docs/operations.md says more.
    """  # noqa: D301 - click takes a backspace to keep the lines
    flags = sources.given(ctx)
    if no_record:
        flags["record_to"] = None
    if verbose:
        flags.setdefault("log_level", "info")
    try:
        wrong = ctx.meta.get(sources.WRONG_FLAGS, ())
        effective = sources.read(flags=flags, environ=os.environ, config=config, wrong=wrong)
        if print_config:
            click.echo(sources.to_toml(effective), nl=False)
        check(effective.settings)
    except sources.ConfigError as error:
        raise click.UsageError(str(error)) from error
    settings = effective.settings
    configure(settings.log_format, settings.log_level)
    for warning in warnings(settings):
        if settings.log_format == "json":
            _logger.warning("%s", warning)
        else:
            click.echo(f"Warning: {warning}", err=True)
    if opens and not settings.pages:
        raise click.UsageError("--open needs pages, which --no-pages turns off")
    if not print_config:
        _serve(_with_words(settings, opens=opens), ctx.obj, opens=opens)


def _with_words(settings: Settings, *, opens: bool) -> Settings:
    """Have the user's words transcribed if the console is opened and moonshine is installed."""
    if settings.transcriber == NO_TRANSCRIBER:
        return attrs.evolve(settings, transcriber=None)
    if not opens or settings.transcriber is not None:
        return settings
    if not has_moonshine():
        click.echo(f"your words are not transcribed; to have that: {install('words')}", err=True)
        return settings
    return attrs.evolve(settings, transcriber=MOONSHINE)


def _serve(settings: Settings, load_viewer: LoadViewer | None, *, opens: bool) -> None:
    from .serving import CannotServeError, run

    notify = partial(announce, settings.log_format)
    bound: list[Address] = []

    def loading(addresses: tuple[Address, ...]) -> None:
        bound.extend(addresses)
        names = settings.worker_addresses or (settings.model, *settings.workers)
        notify(f"loading {', '.join(names)}")

    def ready() -> None:
        scheme = "ws" if settings.tls_cert is None else "wss"
        listening = [f"listening on {scheme}://{_host(it)}:{it.port}/v1/realtime" for it in bound]
        notify(*listening, "ready", *_whereabouts(settings, bound))
        if opens:
            threading.Thread(target=_open, args=(_console(settings, bound),), daemon=True).start()

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
    notify("stopped")
    if cut_by is not None:
        sys.exit(CUT_OFF + cut_by)


def _exit_soon(cut_by: signal.Signals | None) -> None:
    """Exit in `EXIT_WAIT_S`, even if a thread hangs in the model."""
    code = 1 if cut_by is None else CUT_OFF + cut_by
    timer = threading.Timer(EXIT_WAIT_S, os._exit, (code,))
    timer.daemon = True
    timer.start()


def _open(page: str) -> None:
    if not webbrowser.open(page):
        click.echo("no browser was found: open the address yourself", err=True)


def _root(settings: Settings, bound: Sequence[Address]) -> str:
    scheme = "http" if settings.tls_cert is None else "https"
    own = bound[0]
    host = "localhost" if own.host in EVERY_ADDRESS else _host(own)
    return f"{scheme}://{host}:{own.port}"


def _console(settings: Settings, bound: Sequence[Address]) -> str:
    from ..api.pages import ADDRESS

    return _root(settings, bound) + ("/" if settings.static is None else ADDRESS)


def _whereabouts(settings: Settings, bound: Sequence[Address]) -> tuple[str, ...]:
    """The console, other pages, the status, the folder of recordings, and who can reach it."""
    root = _root(settings, bound)
    pages = [f"talk to it at {_console(settings, bound)}"] if settings.pages else []
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


def _host(address: Address) -> str:
    return f"[{address.host}]" if ":" in address.host else address.host
