"""A port on which a recording answers: every client gets all of it, from its start.

It is the server's own listener, so that WebSockets and the check of origins behave as there, at the
recorded address. No keys, no model, no recording.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import anyio
import attrs
from anyio.abc import TaskGroup

from protocol.values import events as ev
from protocol.values.errors import CLOSE_INTERNAL_ERROR
from protocol.values.modes import OF_MODE
from recorder.format.errors import RecorderError
from recorder.read.reader import LogReader
from runtime.access.gate import Denied, Gate
from runtime.net import listener
from runtime.net.http import error_body, make_app
from runtime.net.listener import Address, WebSocketRequest
from runtime.net.websocket import WebSocket
from runtime.serve.routing import NotServedError, route
from runtime.settings.settings import Settings

from ..story.wire import Wire
from .player import Outcome, Player
from .script import Heard, Said, ScriptError, Step, steps

RATE_MAX: Final = 1 << 30
"""Messages and bytes a second: a client under test may be as fast as it can."""

Tell = Callable[..., None]
"""Called with an event's type, and its fields by name."""


@attrs.frozen(kw_only=True)
class Stage:
    """The recording, and how it is played.

    `speed`: 1 is the recording's own; 0 awaits only clients. `strict`: a difference is an error,
    and ends the server. `clients_max`: end after so many clients; None: only a signal ends it.
    """

    log: Path
    opened: ev.ConnectionOpened
    speed: float = 1.0
    strict: bool = False
    clients_max: int | None = None


class PlayServer:
    """Plays a recording to every client; counts `differences`, and sets `is_over` at the end."""

    def __init__(self, stage: Stage, gate: Gate, tell: Tell) -> None:
        self.differences = 0
        self.is_over = anyio.Event()
        self._stage = stage
        self._gate = gate
        self._tell = tell
        self._clients = 0
        self._done = 0

    async def on_websocket(self, request: WebSocketRequest) -> None:
        """Serve one client to its end."""
        opened = self._stage.opened
        try:
            admitted = self._gate.admit_websocket(
                request.headers, request.subprotocols, secure=request.is_tls
            )
            to = route(request.path, request.query, (opened.mode,), default=opened.mode)
            if to.endpoint != opened.endpoint:
                raise NotServedError(404, "not_served", f"the recording is of {opened.endpoint}")
        except NotServedError as error:
            self._tell("rejected", path=request.path, message=str(error))
            body = error_body(error.code, error.message, **error.details)
            await request.reject(error.status, body)
            return
        except Denied as denied:
            self._tell("rejected", path=request.path, message=str(denied))
            await request.reject(denied.status, denied.body, denied.headers)
            return
        websocket = await request.accept(
            subprotocol=admitted.subprotocol, frame_bytes_max=OF_MODE[opened.mode].frame_bytes_max
        )
        self._clients += 1
        await self._play(websocket, self._clients)

    async def _play(self, websocket: WebSocket, client: int) -> None:
        stage = self._stage
        self._tell("connected", client=client)
        try:
            with LogReader(stage.log) as reader:
                player = Player(
                    websocket,
                    steps(reader, Wire(stage.opened)),
                    Wire(stage.opened),
                    speed=stage.speed,
                    strict=stage.strict,
                    on_step=partial(self._stepped, client, anyio.current_time()),
                )
                outcome = await player.run()
        except* (ScriptError, RecorderError, OSError) as errors:
            self._tell("failed", client=client, message=str(errors.exceptions[0]))
            outcome = Outcome(how="broken")
            await websocket.close(CLOSE_INTERNAL_ERROR, "")
        self._end(client, outcome)

    def _stepped(self, client: int, began_s: float, step: Step, kind: str) -> None:
        at_ms = round((anyio.current_time() - began_s) * 1000, 3)
        match step:
            case Heard(kind=expected):
                self._tell("received", client=client, at_ms=at_ms, kind=kind, expected=expected)
            case Said(frame=frame):
                self._tell("sent", client=client, at_ms=at_ms, chars=len(frame))

    def _end(self, client: int, outcome: Outcome) -> None:
        self._done += 1
        self.differences += len(outcome.differences)
        self._tell("ended", client=client, **attrs.asdict(outcome))
        is_wrong = self._stage.strict and outcome.differences
        if is_wrong or self._done == self._stage.clients_max:
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
