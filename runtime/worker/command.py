"""`antiphon workers start`: a model in a process of its own."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import click
from anyio.abc import Listener, SocketAttribute, SocketStream, TaskGroup

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
        raise OSError("the address is in use: give another --listen")
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
