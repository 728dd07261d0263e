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
from rich.table import Table

from ..client import terminal
from ..client.session import REALTIME_PATH
from ..client.websocket import cannot_connect, reason_of
from ..net.process import stdout_console

ANSWER_WAIT_S: Final = 30.0
"""A server waits 10 s for a worker's greeting; what takes longer hangs."""
ANSWER_BYTES_MAX: Final = 1 << 20
"""Sixty-four workers take 20 kB."""
POLL_S: Final = 1.0
"""A session moves in a second or some."""

Worker = dict[str, Any]


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

    \b
    Exit codes:
      0  done
      1  the server could not be reached, or refused
      2  an option that cannot be used
      130  interrupted
    """  # noqa: D301 - click takes a backspace to keep the lines
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
    stdout_console().print(table, markup=False)


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

    \b
    Exit codes:
      0  done
      1  the server could not be reached, or refused
      2  an option that cannot be used
      130  interrupted
    """  # noqa: D301 - click takes a backspace to keep the lines
    worker, reported = _ask(url, key, "POST", f"/{number}/drain"), None
    while True:
        if (left := worker["leased"]) != reported:
            _show(worker, f"worker {number} is draining; sessions left: {left}", as_json)
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

    \b
    Exit codes:
      0  done
      1  the server could not be reached, or refused
      2  an option that cannot be used
      130  interrupted
    """  # noqa: D301 - click takes a backspace to keep the lines
    worker = _ask(url, key, "POST", body=orjson.dumps({"address": address}))
    _show(worker, f"worker {worker['number']} serves; slots: {worker['slots']}", as_json)


def _show(worker: Worker, text: str, as_json: bool) -> None:
    if as_json:
        terminal.echo_json(worker)
    else:
        click.echo(text)
