"""`antiphon workers list`, `add` and `drain`: the workers of a running server.

It asks the server over HTTP (`runtime.api.routes`), with a key of the scope `admin` where the
server has keys.
"""

from __future__ import annotations

import http.client
import ssl
import time
from typing import Any, Final
from urllib.parse import urlsplit

import click
import orjson
from rich.console import Console
from rich.table import Table

from ..client import terminal
from ..client.errors import CannotConnectError
from ..client.session import REALTIME_PATH
from ..client.websocket import cannot_connect, reason_of

ANSWER_WAIT_S: Final = 30.0
"""A server waits 10 s for a worker's greeting; what takes longer hangs."""
ANSWER_BYTES_MAX: Final = 1 << 20
"""Sixty-four workers take 20 kB."""
POLL_S: Final = 1.0
"""A session moves in a second or some."""

Worker = dict[str, Any]


class WorkersClient:
    """Requests to one server, one a connection; `url` is one of `terminal.url_option`."""

    def __init__(self, url: str, key: str | None) -> None:
        parts = urlsplit(url)
        self._url, self._host, self._port = url, parts.hostname or "", parts.port
        self._is_tls = parts.scheme == "wss"
        self._path = parts.path.removesuffix("/").removesuffix(REALTIME_PATH)
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    def workers(self) -> list[Worker]:
        """All workers of the server."""
        found: list[Worker] = self._request("GET", "/api/workers")["workers"]
        return found

    def drain(self, number: int) -> Worker:
        """Drain a worker."""
        return self._request("POST", f"/api/workers/{number}/drain")

    def add(self, address: str) -> Worker:
        """Add a worker."""
        return self._request("POST", "/api/workers", orjson.dumps({"address": address}))

    def _request(self, method: str, path: str, body: bytes | None = None) -> dict[str, Any]:
        kind = http.client.HTTPSConnection if self._is_tls else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=ANSWER_WAIT_S)
        try:
            connection.request(method, self._path + path, body=body, headers=self._headers)
            answer = connection.getresponse()
            status, content = answer.status, _read(answer.read(ANSWER_BYTES_MAX))
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise click.ClickException(terminal.explain(self._failure(error))) from error
        finally:
            connection.close()
        if not 200 <= status < 300:
            text = f"the server refused: {content.get('message', 'no reason')} (HTTP {status})"
            raise click.ClickException(terminal.advise(text, status))
        return content

    def _failure(self, error: Exception) -> CannotConnectError:
        is_tls = isinstance(error, ssl.SSLError)
        why = (
            reason_of(error)
            if isinstance(error, OSError)
            else "what answers there is not an Antiphon server"
        )
        return cannot_connect(self._url, why, is_tls=is_tls)


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
    workers = WorkersClient(url, key).workers()
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
    client = WorkersClient(url, key)
    worker, reported = client.drain(number), None
    while True:
        if (left := worker["leased"]) != reported:
            _show(worker, f"worker {number} is draining, {left} sessions left", as_json)
            reported = left
        if not wait:
            return
        time.sleep(POLL_S)
        found = [each for each in client.workers() if each["number"] == number]
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
    worker = WorkersClient(url, key).add(address)
    _show(worker, f"worker {worker['number']} serves {worker['slots']} slots", as_json)


def _show(worker: Worker, text: str, as_json: bool) -> None:
    if as_json:
        terminal.echo_json(worker)
    else:
        click.echo(text)
