"""`antiphon workers`: `start` runs a model in a process of its own.

`list`, `add` and `drain` are for the workers of a running server. They ask it over HTTP
(`runtime.api.routes`), with a key of the scope `admin` where the server has keys.
"""

from __future__ import annotations

import http.client
import os
import signal
import ssl
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import anyio
import click
import orjson
from anyio.abc import Listener, SocketAttribute, SocketStream, TaskGroup
from rich.console import Console
from rich.table import Table

from ..client import terminal
from ..client.session import REALTIME_PATH
from ..client.websocket import cannot_connect, reason_of
from ..link.link import TcpAddress, UnixAddress, WorkerAddress, read_address, read_token
from ..model import models
from ..model.backends.base import Backend, BackendError, Closes
from ..net.tls import Certificate, CertificateError
from ..settings.sources import loading_options
from ..telemetry.logs import Format, announce, configure
from .worker import Worker

SOCKET_MODE: Final = 0o600
"""Only the worker's own user can connect; a Unix socket has no other lock."""
END_WAIT_S: Final = 25.0
"""Sessions are cut and released in 20 s; a call that hangs in the model is given up."""
STDIN: Final = 0


@click.command("start")
@loading_options
@click.option(
    "--listen",
    required=True,
    metavar="ADDRESS",
    help="unix:PATH, a socket that only this user can open; or tcp:HOST:PORT, port 0 for a free "
    "one. A host that is not loopback needs --token-file, --tls-cert and --tls-key.",
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A secret shared with gateways, at least 16 characters; it never crosses the network.",
)
@click.option(
    "--tls-cert",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The certificate and its chain, PEM; reloaded when it changes.",
)
@click.option(
    "--tls-key", type=click.Path(path_type=Path), metavar="FILE", help="Its private key, PEM."
)
@click.option("--until-stdin-ends", is_flag=True, hidden=True)
@click.option("--no-tls", is_flag=True, hidden=True)
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text")
@click.option("-v", "--verbose", is_flag=True, help="Log each gateway that connects.")
def start_command(
    *,
    model: str,
    listen: str,
    token_file: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    until_stdin_ends: bool,
    no_tls: bool,
    log_format: str,
    verbose: bool,
    **how: Any,
) -> None:
    """Serve a model to gateways: `antiphon serve --worker-address ADDRESS`.

    The process that holds the GPU is then not the one that holds the sessions: if it dies, the
    server goes on, and takes another worker or waits for this one. Several gateways may share a
    worker; each session takes a free slot. `antiphon serve --isolate` starts its own workers.

    It says "loading MODEL", then "listening on ADDRESS" and "ready" when gateways are taken.

    \b
        antiphon workers start --model tiny --listen unix:/run/antiphon/worker-1
        antiphon serve --worker-address unix:/run/antiphon/worker-1

    \b
    Exit codes
      0  ended by a signal
      1  the address or the model is not available, or the model was lost; start it again
      2  an option is wrong
    """  # noqa: D301 - click takes a backspace to keep the lines
    format: Format = "json" if log_format == "json" else "text"  # noqa: A001
    configure(format, "info" if verbose else "warning")
    report = partial(announce, format, logger="antiphon.worker")
    if until_stdin_ends:
        threading.Thread(target=_end_with_stdin, name="stdin", daemon=True).start()
    try:
        address, token = read_address(listen), read_token(token_file) if token_file else ""
        models.check_model(model)
        certificate = _certificate(tls_cert, tls_key)
    except (ValueError, models.ModelUnknownError, CertificateError) as error:
        raise click.UsageError(str(error)) from error
    if not address.is_local and not (token and (certificate or no_tls)):
        raise click.UsageError(
            f"{address} can be reached from other machines: it needs --token-file, and --tls-cert "
            "with --tls-key"
        )
    load = partial(models.load_backend_async, model, **how)
    is_exact = how["deterministic"]
    serve = partial(
        _serve, address, token, certificate, load, model, deterministic=is_exact, report=report
    )
    try:
        lost = anyio.run(serve, backend="trio")
    except (OSError, ValueError, RuntimeError, BackendError) as error:
        why = (isinstance(error, OSError) and error.strerror) or error
        raise click.ClickException(f"cannot serve {model} at {listen}: {why}") from error
    if lost:
        raise click.ClickException(f"the model is lost: {lost}")
    report("stopped")


def _certificate(cert: Path | None, key: Path | None) -> Certificate | None:
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        raise ValueError("--tls-cert and --tls-key must be given together")
    return Certificate(cert, key)


async def _serve(
    address: WorkerAddress,
    token: str,
    certificate: Certificate | None,
    load: Callable[[], Awaitable[Backend]],
    model: str,
    *,
    deterministic: bool,
    report: Callable[..., None],
) -> str:
    """Serve until a signal; return why the model was lost, or an empty text.

    An error of the address or the model is raised.
    """
    listener, bound = await _listen(address)
    backend: Backend | None = None
    worker: Worker | None = None
    failure: Exception | None = None
    try:
        async with listener, anyio.create_task_group() as tasks:
            tasks.start_soon(_end_by_signal, tasks)
            report(f"loading {model}")
            try:
                backend = await load()
                if deterministic:
                    models.require_deterministic(model, backend.info)
            except Exception as error:
                failure = error
                tasks.cancel_scope.cancel()
            else:
                worker = Worker(backend=backend, tasks=tasks, token=token)
                if certificate is not None:
                    tasks.start_soon(certificate.watch)
                    worker.tls = lambda: certificate.context
                report(f"listening on {bound}", "ready")
                await worker.serve(listener)
    finally:
        if isinstance(address, UnixAddress):
            address.path.unlink(missing_ok=True)
        if isinstance(backend, Closes):
            await backend.aclose()
    if failure is not None:
        raise failure
    return "" if worker is None else worker.lost_because


async def _listen(address: WorkerAddress) -> tuple[Listener[SocketStream], WorkerAddress]:
    """Bind the address before the model is loaded; `OSError` if it is in use."""
    if isinstance(address, TcpAddress):
        tcp = await anyio.create_tcp_listener(local_host=address.host, local_port=address.port)
        port = tcp.extra(SocketAttribute.local_port)
        return tcp, TcpAddress(address.host, port)
    if await _is_served(address):
        raise OSError("the address is in use")
    mask = os.umask(~SOCKET_MODE & 0o777)
    try:
        return await anyio.create_unix_listener(address.path), address
    finally:
        os.umask(mask)


async def _is_served(address: UnixAddress) -> bool:
    try:
        stream = await anyio.connect_unix(address.path)
    except OSError:  # there is nothing, or a socket that a dead process left
        return False
    await stream.aclose()
    return True


async def _end_by_signal(tasks: TaskGroup) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            timer = threading.Timer(END_WAIT_S, os._exit, (1,))
            timer.daemon = True
            timer.start()
            tasks.cancel_scope.cancel()


def _end_with_stdin() -> None:
    """End at once when the process that holds the other end of stdin is gone."""
    while os.read(STDIN, 1):
        pass
    os._exit(0)


# -- list, add, drain ------------------------------------------------------------------------------

ANSWER_WAIT_S: Final = 30.0
"""A server waits 10 s for a worker's greeting; what takes longer hangs."""
ANSWER_BYTES_MAX: Final = 1 << 20
"""Sixty-four workers take 20 kB."""
POLL_S: Final = 1.0
"""A session moves in a second or some."""

Entry = dict[str, Any]


def _ask(
    url: str, key: str | None, method: str, path: str = "", body: bytes | None = None
) -> dict[str, Any]:
    """Make a request about workers to the server at a `terminal.url_option`, on one connection."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "wss" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=ANSWER_WAIT_S)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    above = parts.path.removesuffix("/").removesuffix(REALTIME_PATH)
    try:
        connection.request(method, f"{above}/api/workers{path}", body=body, headers=headers)
        answer = connection.getresponse()
        status, content = answer.status, _read(answer.read(ANSWER_BYTES_MAX))
    except (OSError, http.client.HTTPException, ValueError) as error:
        why = "what answers there is not an Antiphon server"
        why = reason_of(error) if isinstance(error, OSError) else why
        failure = cannot_connect(url, why, is_tls=isinstance(error, ssl.SSLError))
        raise click.ClickException(terminal.explain(failure)) from error
    finally:
        connection.close()
    if not 200 <= status < 300:
        text = f"the server refused: {content.get('message', 'no reason')} (HTTP {status})"
        raise click.ClickException(terminal.advise(text, status))
    return content


def _read(body: bytes) -> dict[str, Any]:
    """Parse an answer; `ValueError` if it is not a JSON object."""
    content = orjson.loads(body)
    if not isinstance(content, dict):
        raise ValueError("the answer is not a JSON object")
    return content


@click.command("list")
@terminal.url_option
@terminal.key_option
@terminal.json_option
def list_command(*, url: str, key: str | None, as_json: bool) -> None:
    """List the workers: number, place, state and slots.

    A worker is serving, draining (its sessions move), condemned (lost, or a call hangs in it) or
    loading (its replacement is loaded). Workers with the same fingerprint hold the same model.
    """
    workers = _ask(url, key, "GET")["workers"]
    if as_json:
        for worker in workers:
            terminal.echo_json(worker)
        return
    table = Table("worker", box=None)
    for name in ("where", "state", "slots", "free", "leased", "model", "age"):
        table.add_column(name, overflow="fold")  # cut off, two workers would look alike
    for worker in workers:
        age_s = worker["age_s"]
        names = ("number", "where", "state", "slots", "free", "leased", "fingerprint")
        shown = [terminal.clean(str(worker[name]), kept="") for name in names]
        table.add_row(*shown, "-" if age_s is None else f"{age_s:.0f} s")
    Console().print(table, markup=False)


@click.command("drain")
@click.argument("number", type=click.IntRange(0, 999_999_999))
@click.option("--wait", is_flag=True, help="Wait until its sessions have moved and it is closed.")
@terminal.url_option
@terminal.key_option
@terminal.json_option
def drain_command(*, number: int, wait: bool, url: str, key: str | None, as_json: bool) -> None:
    """Lease no more slots of worker NUMBER, and have its sessions move to others.

    It is closed when the last has left, and nothing takes its place. The last worker that serves
    is not drained: add another first.
    """
    worker, reported = _ask(url, key, "POST", f"/{number}/drain"), None
    while True:
        if (left := worker["leased"]) != reported:
            _show(worker, f"worker {number} is draining, {left} sessions left", as_json)
            reported = left
        if not wait:
            return
        time.sleep(POLL_S)
        found = [it for it in _ask(url, key, "GET")["workers"] if it["number"] == number]
        if not found:
            break
        worker = found[0]
    _show({"number": number, "state": "gone"}, f"worker {number} is gone", as_json)


@click.command("add")
@click.argument("address")
@terminal.url_option
@terminal.key_option
@terminal.json_option
def add_command(*, address: str, url: str, key: str | None, as_json: bool) -> None:
    """Have the server connect to the worker at ADDRESS: unix:PATH or tcp:HOST:PORT.

    The address is one as the server sees it. The worker must run, and hold the same model as the
    others. Only a server that was started with --worker-address takes more workers; after a
    restart it knows those of its settings again.
    """
    worker = _ask(url, key, "POST", body=orjson.dumps({"address": address}))
    _show(worker, f"worker {worker['number']} serves {worker['slots']} slots", as_json)


def _show(worker: Entry, text: str, as_json: bool) -> None:
    if as_json:
        terminal.echo_json(worker)
    else:
        click.echo(text)
