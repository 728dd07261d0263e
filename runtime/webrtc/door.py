"""The door (`antiphon door`): takes offers from a gateway, and carries a call for each.

A gateway connects by TCP, sends one line of JSON, and gets one:

| from | fields |
|---|---|
| gateway | `sdp`: the offer; `target`: path and query of the session; `headers`: of its handshake; `session`: its settings, or null; `is_live`: of `live`; `party`: whose call it is |
| door | `sdp`: the answer, and `call`: its id; or `status`, `code` and `message`: why there is none |

The gateway has judged the client's key, and judges it again as the session's WebSocket comes.
"""  # noqa: E501 - a table

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from http import HTTPStatus
from ipaddress import IPv4Address
from typing import Any, Final
from urllib.parse import urlsplit

import click
import orjson
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus, WebSocketException

from ..client.terminal import url_option
from ..link.link import UnixAddress, WorkerAddress, read_address
from ..telemetry.logs import announce, configure
from .call import BUSY, BeginRefusedError, Call, CallLoop
from .offer import LINE_BYTES_MAX, OfferError, read_offer

LINE_WAIT_S: Final = 10.0
BEGIN_S: Final = 16.0
"""For all of a call's beginning: the gateway waits a little longer."""
FRAME_BYTES_MAX: Final = 16 << 20
_LOG: Final = logging.getLogger("antiphon.door")


def own_address() -> str:
    """The address of this host towards others; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as found:
        try:
            found.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(found.getsockname()[0])


class Door:
    """Carries at most `calls_max` calls to one gateway, half of them of one client.

    Args:
        gateway: `ws://HOST:PORT` or `wss://HOST`.
        address: what clients are told in the place of this host's own, or empty.
    """

    def __init__(self, gateway: str, *, address: str, calls_max: int) -> None:
        self._gateway = gateway
        self._address = address
        self._calls_max = calls_max
        self._calls = set[asyncio.Task[None]]()
        self._parties = Counter[str]()
        """Whose calls there are, or begin."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one offer; for `asyncio.start_server` with a limit of `LINE_BYTES_MAX`."""
        try:
            line = await asyncio.wait_for(reader.readline(), LINE_WAIT_S)
            async with asyncio.timeout(BEGIN_S):
                answer = await self._answer(orjson.loads(line))
        except (ValueError, KeyError, TypeError):
            answer = _refusal(HTTPStatus.BAD_REQUEST, "invalid_offer", "no offer came")
        except (TimeoutError, OSError, WebSocketException) as error:
            _LOG.warning("a call could not begin: %r", error)
            text = "the call could not begin, try again later"
            answer = _refusal(HTTPStatus.SERVICE_UNAVAILABLE, "service_unavailable", text)
        writer.write(orjson.dumps(answer) + b"\n")
        try:
            await writer.drain()
            writer.close()
            await writer.wait_closed()
        except ConnectionError:
            _LOG.info("a gateway left before its answer")

    async def aclose(self) -> None:
        """End all calls."""
        calls = [*self._calls]
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    async def _answer(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        party = str(asked["party"])
        of_one = self._parties[party] >= max(1, self._calls_max // 2)
        if of_one or self._parties.total() >= self._calls_max:
            text = f"{'you have' if of_one else 'all clients have'} too many calls, try again later"
            return _refusal(HTTPStatus.SERVICE_UNAVAILABLE, "too_many_calls", text)
        with ExitStack() as place:
            self._parties[party] += 1
            place.callback(self._leave, party)
            return await self._begin(asked, place)

    def _leave(self, party: str) -> None:
        self._parties[party] -= 1
        self._parties += Counter()  # without those that have none

    async def _begin(self, asked: Mapping[str, Any], place: ExitStack) -> dict[str, Any]:
        """Begin a call, which takes the place with it."""
        try:
            offer = read_offer(str(asked["sdp"]).encode(), own_address())
        except OfferError as error:
            return _refusal(HTTPStatus.BAD_REQUEST, "invalid_offer", str(error))
        try:
            session = await connect(
                f"{self._gateway}/{asked['target'].removeprefix('/')}",
                additional_headers=dict(asked["headers"]),
                max_size=FRAME_BYTES_MAX,
                max_queue=64,
                proxy=None,
                compression=None,
            )
        except InvalidStatus as refused:
            status = HTTPStatus(refused.response.status_code)
            return _refusal(status, "refused", f"the gateway refused the session: {status.phrase}")
        except (OSError, WebSocketException) as error:
            _LOG.warning("the gateway %s cannot be reached: %s", self._gateway, error)
            text = "the door cannot reach its gateway"
            return _refusal(HTTPStatus.BAD_GATEWAY, "service_unavailable", text)
        call = Call(offer, session, asked["session"], is_live=bool(asked["is_live"]))
        try:
            await call.begin()
            sdp = await call.answer()
        except OfferError as error:
            await call.aclose()
            return _refusal(HTTPStatus.BAD_REQUEST, "invalid_offer", str(error))
        except BeginRefusedError as error:
            await call.aclose()
            is_busy = error.code in BUSY
            status = HTTPStatus.SERVICE_UNAVAILABLE if is_busy else HTTPStatus.BAD_REQUEST
            return _refusal(status, error.code, str(error))
        except BaseException:
            await call.aclose()
            raise
        task = asyncio.create_task(self._carry(call, place.pop_all()))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return {"sdp": self._shown(sdp), "call": call.id}

    async def _carry(self, call: Call, place: ExitStack) -> None:
        _LOG.info("call %s begins", call.id)
        try:
            with place:
                why = await call.run()
        except Exception:
            _LOG.exception("call %s broke", call.id)
        else:
            _LOG.info("call %s ended: %s", call.id, why)

    def _shown(self, sdp: str) -> str:
        """Name the address by which clients reach this host."""
        if not self._address:
            return sdp
        lines = list[str]()
        for line in sdp.splitlines():
            words = line.split(" ")
            if line.startswith("a=candidate:") and len(words) > 4:
                if ":" in words[4]:
                    continue  # the other family's
                words[4] = self._address
            elif line.startswith("c=IN IP4 "):
                words[2] = self._address
            lines.append(" ".join(words))
        return "\r\n".join(lines) + "\r\n"


def _refusal(status: HTTPStatus, code: str, message: str) -> dict[str, Any]:
    return {"status": int(status), "code": code, "message": message}


# -- the command -----------------------------------------------------------------------------------


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
        why = f"{error.strerror or error}; give another --listen"
        raise click.ClickException(f"cannot listen on {at}: {why}") from error


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
