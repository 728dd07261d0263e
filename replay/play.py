"""A server that answers as one did in a recording, for authors of clients: `antiphon dev play`.

- Where the recording received a frame, the client's next one is awaited: the n-th frame is sent
  after as many of the client's as in the recording.
- No frame is sent before its time, divided by the speed. A late client sets the clock back: it is
  answered after the recorded time, not at once. At speed 0 only the client is awaited.
- A frame of another kind than the recorded one is a difference: reported, and answered anyway.
  Fields are not compared: no two clients send the same sound.
- The end is the recording's: its close, or a dropped connection. Where the client left, it has
  `LEAVE_WAIT_S` to leave.
- The port is the server's own listener, so that WebSockets and the check of origins behave as
  there, at the recorded address. Every client gets all of the recording, from its start. No keys,
  no model, no recording.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import quote

import anyio
import attrs
import click
import orjson
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from protocol.values import events as ev
from protocol.values.errors import CLOSE_INTERNAL_ERROR
from protocol.values.frames import Shortened
from protocol.values.limits import NS_PER_S, OF_MODE
from recorder.format.format import Record, RecorderError
from recorder.read.reader import LogReader
from recorder.read.scan import Damage
from runtime.access.gate import AccessControl, Denied, open_gate
from runtime.net import listener
from runtime.net.connection import WebSocket, WebSocketClosed
from runtime.net.http import LIVE_PATH, error_body, make_app
from runtime.net.listener import Address, WebSocketRequest
from runtime.serve import routing
from runtime.settings.settings import Settings

from .shared.commands import reading
from .shared.recordings import RecordingType
from .story.reading import event_in
from .story.wire import Wire


class ScriptError(Exception):
    """A log cannot be played; the message says why, in one line."""


@attrs.frozen(kw_only=True)
class Received:
    """A frame of the client's, of a kind of `wire.Wire.kind`."""

    at_ns: int
    kind: str


@attrs.frozen(kw_only=True)
class Sent:
    """A frame of the server's, verbatim."""

    at_ns: int
    frame: str


@attrs.frozen(kw_only=True)
class Ended:
    """The connection's end: `closed` by the server, `left` by the client, or `broken`.

    A broken one was dropped by the server, or killed with it.
    """

    at_ns: int
    how: Literal["closed", "left", "broken"]
    code: int = 1000
    reason: str = ""


ScriptStep = Received | Sent | Ended


def read_opening(log: Path) -> ev.ConnectionOpened:
    """The first event of a recording; `ScriptError` if it is lost.

    `RecorderError`: the log cannot be read; `OSError`: there is no such file.
    """
    with LogReader(log) as reader:
        for item in reader:
            if isinstance(item, Record) and item.kind == "event":
                event = event_in(item)
                if isinstance(event, ev.ConnectionOpened):
                    return event
                break
    raise ScriptError("the session's first event is lost")


def address_of(opened: ev.ConnectionOpened) -> str:
    """The address of such a client: path and query."""
    match opened.endpoint:
        case "realtime":
            return f"{routing.REALTIME_PATH}?mode={opened.mode}"
        case "duplex":
            return routing.DUPLEX_PATH + quote(opened.label, safe="")
        case "chat":
            return routing.CHAT_PATH
        case "live":
            return LIVE_PATH
        case "openai":
            return f"{routing.REALTIME_PATH}?model={quote(opened.label, safe='')}"
        case "omni":
            model = f"&model={quote(opened.label, safe='')}" if opened.label else ""
            return f"{routing.REALTIME_PATH}?duplex=1&mode={opened.mode}{model}"


def steps(items: Iterable[Record | Damage], wire: Wire) -> Iterator[ScriptStep]:
    """The steps of a log's items, the end last; raises `ScriptError` for a damaged log."""
    at_ns = 0
    for item in items:
        if isinstance(item, Damage):
            raise ScriptError(f"the log is {item}")
        at_ns = max(at_ns, item.at_ns)
        step = _step(item, wire)
        if step is not None:
            yield step
        if isinstance(step, Ended):
            return
    yield Ended(at_ns=at_ns, how="broken")


def _step(record: Record, wire: Wire) -> ScriptStep | None:
    fields, at_ns = record.fields, record.at_ns
    frame = fields.get("frame")
    match record.kind, fields.get("type"):
        case "rx", _:
            kind = wire.kind(frame if isinstance(frame, str | bytes) else None)
            return Received(at_ns=at_ns, kind=kind)
        case "tx", _ if isinstance(frame, str):
            return Sent(at_ns=at_ns, frame=frame)
        case "effect", "Close":
            code, reason = fields.get("code"), fields.get("reason")
            if isinstance(code, int) and isinstance(reason, str):
                return Ended(at_ns=at_ns, how="closed", code=code, reason=reason)
        case "event", "PeerGone":
            return Ended(at_ns=at_ns, how="left")
        case "event", "SendFailed":
            return Ended(at_ns=at_ns, how="broken")
    return None


# -- one client -----------------------------------------------------------------------------------


KINDS_WAITING_MAX: Final = 64
"""Frames of a client that is ahead; more wait in its socket."""
LEAVE_WAIT_S: Final = 10.0
"""For a client to leave; longer, it waits for a frame that will not come."""
POLICY_VIOLATION: Final = 1008
"""The close code for a client with a difference, under --strict (RFC 6455, 7.4.1)."""


@attrs.frozen(kw_only=True)
class WrongFrame:
    """A difference of a client's frame, from 0: the kinds of frames, or None for none."""

    index: int
    expected: str | None
    got: str | None


class _WrongFrameError(Exception):
    """A difference ends it."""


@attrs.define(kw_only=True)
class PlayResult:
    """The result of a client, with its awaited frames in `received`.

    `how` is `closed` or `broken` as the recording ended; `left` by the client, at any time;
    `differed` where a difference is an error.
    """

    how: Literal["closed", "left", "broken", "differed"] = "left"
    sent: int = 0
    received: int = 0
    differences: list[WrongFrame] = attrs.field(factory=list)


@attrs.define(eq=False)
class Player:
    """Plays a recording to one client.

    Args:
        websocket: open; it is closed in every case.
        steps: the next is read when it is due, which takes a millisecond or two.
        speed: 1 is the recording's own; 0 awaits only the client.
        strict: end with the first difference.
        on_step: called after each step, with the kind of the client's frame.
    """

    _websocket: WebSocket
    _steps: Iterator[ScriptStep]
    _wire: Wire
    _speed: float = 1.0
    _strict: bool = False
    _on_step: Callable[[ScriptStep, str], None] = lambda _step, _kind: None
    _began_s: float = attrs.field(default=0.0, init=False)
    _outcome: PlayResult = attrs.field(factory=PlayResult, init=False)

    async def run(self) -> PlayResult:
        """Play it to its end, or the client's."""
        sending, kinds = anyio.create_memory_object_stream[str](KINDS_WAITING_MAX)
        try:
            async with anyio.create_task_group() as tasks, kinds:
                tasks.start_soon(self._read, sending)
                await self._play(kinds)
                tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await self._websocket.abort()
        return self._outcome

    async def _read(self, kinds: MemoryObjectSendStream[str]) -> None:
        """Pass on the kind of each of the client's frames, until it leaves."""
        async with kinds:
            try:
                while True:
                    frame = await self._websocket.receive()
                    shown = None if isinstance(frame, Shortened) else frame
                    await kinds.send(self._wire.kind(shown))
            except (WebSocketClosed, anyio.BrokenResourceError):
                pass

    async def _play(self, kinds: MemoryObjectReceiveStream[str]) -> None:
        self._began_s = anyio.current_time()
        try:
            while True:
                step = next(self._steps)
                kind = ""
                match step:
                    case Received():
                        kind = await self._receive(step, kinds)
                    case Sent(frame=frame):
                        await anyio.sleep_until(self._due_s(step.at_ns))
                        await self._websocket.send(frame)
                        self._outcome.sent += 1
                    case Ended():
                        await self._end(step, kinds)
                self._on_step(step, kind)
                if isinstance(step, Ended):
                    return
        except (WebSocketClosed, anyio.EndOfStream):
            self._outcome.how = "left"
        except _WrongFrameError as error:
            self._outcome.how = "differed"
            await self._websocket.close(POLICY_VIOLATION, str(error))

    async def _receive(self, step: Received, kinds: MemoryObjectReceiveStream[str]) -> str:
        """Await a frame of the client's; a late one sets the clock back."""
        try:
            kind = await kinds.receive()
        except anyio.EndOfStream:
            self._differ(step.kind, None)
            raise
        self._outcome.received += 1
        if kind != step.kind:
            self._differ(step.kind, kind)
        if self._speed:
            self._began_s += max(0.0, anyio.current_time() - self._due_s(step.at_ns))
        return kind

    def _differ(self, expected: str | None, got: str | None) -> None:
        index = self._outcome.received - (got is not None)
        self._outcome.differences.append(WrongFrame(index=index, expected=expected, got=got))
        if self._strict and got is not None:
            raise _WrongFrameError(f"frame {index} is {got}, recorded was {expected or 'nothing'}")

    def _due_s(self, at_ns: int) -> float:
        """When a step is due, on the event loop's clock."""
        return self._began_s + at_ns / NS_PER_S / self._speed if self._speed else -inf

    async def _end(self, step: Ended, kinds: MemoryObjectReceiveStream[str]) -> None:
        self._outcome.how = step.how
        if step.how == "left":
            with anyio.move_on_after(LEAVE_WAIT_S):
                async for kind in kinds:
                    self._outcome.received += 1
                    self._differ(None, kind)
            await self._websocket.close(step.code, step.reason)
            return
        await anyio.sleep_until(self._due_s(step.at_ns))
        if step.how == "closed":
            await self._websocket.close(step.code, step.reason)


# -- the server -----------------------------------------------------------------------------------


RATE_MAX: Final = 1 << 30
"""Messages and bytes a second: a client under test may be as fast as it can."""

Notify = Callable[..., None]
"""Called with an event's type, and its fields by name."""


@attrs.frozen(kw_only=True)
class PlayOptions:
    """The recording, and how it is played.

    `speed`: 1 is the recording's own; 0 awaits only clients. `strict`: a difference is an error,
    and ends the server. `clients_max`: end after so many clients; None: only a signal ends it.
    """

    log: Path
    opened: ev.ConnectionOpened
    speed: float = 1.0
    strict: bool = False
    clients_max: int | None = None


@attrs.define(eq=False)
class PlayServer:
    """Plays a recording to every client; counts `differences`, and sets `is_over` at the end."""

    _options: PlayOptions
    _gate: AccessControl
    _notify: Notify
    differences: int = attrs.field(default=0, init=False)
    is_over: anyio.Event = attrs.field(factory=anyio.Event, init=False)
    _clients: int = attrs.field(default=0, init=False)
    _done: int = attrs.field(default=0, init=False)

    async def on_websocket(self, request: WebSocketRequest) -> None:
        """Serve one client to its end."""
        opened = self._options.opened
        try:
            admitted = self._gate.admit_websocket(
                request.headers, request.subprotocols, secure=request.is_tls
            )
            to = routing.route(request.path, request.query, (opened.mode,), default=opened.mode)
            if to.endpoint != opened.endpoint:
                raise routing.NotServedError(
                    404, "not_served", f"the recording is of {opened.endpoint}"
                )
        except routing.NotServedError as error:
            self._notify("rejected", path=request.path, message=str(error))
            body = error_body(error.code, error.message, **error.details)
            await request.reject(error.status, body)
            return
        except Denied as denied:
            self._notify("rejected", path=request.path, message=str(denied))
            await request.reject(denied.status, denied.body, denied.headers)
            return
        websocket = await request.accept(
            subprotocol=admitted.subprotocol, frame_bytes_max=OF_MODE[opened.mode].frame_bytes_max
        )
        self._clients += 1
        await self._play(websocket, self._clients)

    async def _play(self, websocket: WebSocket, client: int) -> None:
        options = self._options
        self._notify("connected", client=client)
        try:
            with LogReader(options.log) as reader:
                player = Player(
                    websocket,
                    steps(reader, Wire(options.opened)),
                    Wire(options.opened),
                    speed=options.speed,
                    strict=options.strict,
                    on_step=partial(self._stepped, client, anyio.current_time()),
                )
                outcome = await player.run()
        except* (ScriptError, RecorderError, OSError) as errors:
            self._notify("failed", client=client, message=str(errors.exceptions[0]))
            outcome = PlayResult(how="broken")
            await websocket.close(CLOSE_INTERNAL_ERROR, "")
        self._end(client, outcome)

    def _stepped(self, client: int, began_s: float, step: ScriptStep, kind: str) -> None:
        at_ms = round((anyio.current_time() - began_s) * 1000, 3)
        match step:
            case Received(kind=expected):
                self._notify("received", client=client, at_ms=at_ms, kind=kind, expected=expected)
            case Sent(frame=frame):
                self._notify("sent", client=client, at_ms=at_ms, chars=len(frame))

    def _end(self, client: int, outcome: PlayResult) -> None:
        self._done += 1
        self.differences += len(outcome.differences)
        self._notify("ended", client=client, **attrs.asdict(outcome))
        is_wrong = self._options.strict and outcome.differences
        if is_wrong or self._done == self._options.clients_max:
            self.is_over.set()


async def serve(
    server: PlayServer, settings: Settings, on_bound: Callable[[tuple[Address, ...]], None]
) -> None:
    """Serve to the end, or a signal; port 0 is a free one. `OSError`: the port is not available."""
    settings = attrs.evolve(settings, messages_per_s_max=RATE_MAX, bytes_per_s_max=RATE_MAX)
    listeners = await listener.bind(settings.host, settings.port)
    async with anyio.create_task_group() as tasks:
        listen = partial(
            listener.serve,
            listeners,
            on_websocket=server.on_websocket,
            app=make_app(lambda: "ready"),
            settings=settings,
        )
        on_bound(await tasks.start(listen))
        tasks.start_soon(_end_by_signal, tasks)
        await server.is_over.wait()
        tasks.cancel_scope.cancel()


async def _end_by_signal(tasks: TaskGroup) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            tasks.cancel_scope.cancel()


# -- the command ----------------------------------------------------------------------------------


SHOWN_MAX: Final = 5
"""Differences of a client shown to people; JSON has all of them."""
TEXTS: Final = {
    "listening": "listening on {url}",
    "rejected": "rejected {path}: {message}",
    "connected": "client {client} connected",
    "failed": "client {client} failed: {message}",
    "ended": "client {client} {how}; frames sent {sent}, received {received}",
}
"""Texts for people, by event; single frames are only in JSON."""
DIFFERENCE: Final = "  frame {index} was {got}, the recorded one {expected}"


@click.command("play")
@click.argument("log", type=RecordingType())
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65_535), default=0, help="The port [default: a free one]."
)
@click.option(
    "--origin", "origins", multiple=True, help="A further web origin whose pages may connect."
)
@click.option(
    "--speed",
    type=click.FloatRange(min=0),
    default=1.0,
    show_default=True,
    help="Speed, in times the recording's; 0: as fast as the client's frames arrive.",
)
@click.option("--strict", is_flag=True, help="Exit with an error if a client deviates.")
@click.option(
    "--clients", "clients_max", type=click.IntRange(1), help="Exit after this many clients."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON objects, one a line.")
def play_command(
    *, log: Path, host: str, port: int, origins: tuple[str, ...], as_json: bool, **how: Any
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
      1  --strict: a client deviated from the recorded one; or the port cannot be had
      2  the log cannot be read, or is damaged
    """  # noqa: D301 - click takes a backspace to keep the lines
    options = PlayOptions(log=log, opened=_check(log), **how)
    notify = _notify_json if as_json else _notify_text
    try:
        settings = Settings(host=host, port=port, origins=origins)
        open_gate(settings)
    except ValueError as error:
        raise click.UsageError(f"--origin: {error}") from error
    differences = anyio.run(_run, options, settings, notify, backend="trio")
    if options.strict and differences:
        raise click.ClickException("a client deviated from the recorded one")


def _check(log: Path) -> ev.ConnectionOpened:
    """Read the log to its end once, so that no client meets an error in it."""
    with reading(log, ScriptError):
        opened = read_opening(log)
        with LogReader(log) as reader:
            for _ in steps(reader, Wire(opened)):
                pass
    return opened


async def _run(options: PlayOptions, settings: Settings, notify: Notify) -> int:
    server = PlayServer(options, open_gate(settings), notify)
    try:
        await serve(server, settings, partial(_notify_bound, notify, address_of(options.opened)))
    except OSError as error:
        address = f"{settings.host} port {settings.port}"
        why = f"{error.strerror or error}; give another --port or --host"
        text = f"cannot listen on {address}: {why}"
        raise click.ClickException(text) from error
    return server.differences


def _notify_bound(notify: Notify, path: str, addresses: tuple[Address, ...]) -> None:
    for address in addresses:
        host = f"[{address.host}]" if ":" in address.host else address.host
        notify("listening", url=f"ws://{host}:{address.port}{path}")


def _notify_json(event: str, **fields: object) -> None:
    click.echo(orjson.dumps({"type": event, **fields}))
    sys.stdout.flush()


def _notify_text(event: str, **fields: Any) -> None:
    if event in TEXTS:
        click.echo(TEXTS[event].format(**fields))
        for difference in fields.get("differences", ())[:SHOWN_MAX]:
            click.echo(DIFFERENCE.format(**difference))
        sys.stdout.flush()
