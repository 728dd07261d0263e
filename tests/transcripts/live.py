"""Plays transcripts over real sockets: the `websockets` library talks to a server of our own.

Each transcript has a server of its own, on a free port and with the scripted model, so that none
sees another; they are played many at once on one event loop. What `runtime.serve.serving` puts
together for an operator is put together here without its signals.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import attrs
import trio
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.trio.client import ClientConnection, connect

from protocol.values import events as ev
from recorder.write.files import Disk
from recorder.write.writer import Recorder
from runtime.media.decoder import MediaDecoder
from runtime.media.voices import VoiceLibrary
from runtime.model.backends.scripted import ScriptedBackend
from runtime.net import listener
from runtime.net.http import make_app
from runtime.serve.gateway import Gateway
from runtime.session.server import Server
from runtime.session.setup import SystemIdentities
from runtime.settings.settings import Settings
from tests.transcripts.media import make_voices
from tests.transcripts.reading import SENDS, WARNED_S, Mismatch, Step, Transcript, check, frame_of
from tests.transcripts.scripts import make_backend

PATIENCE_S: Final = 30.0
"""What takes longer than this has been lost; no limit in a transcript is above 1 s."""
AT_ONCE: Final = 24
"""Transcripts that are played at the same time: with more, a small machine would be late."""


class BreakingDisk(Disk):
    """A disk that can be told to fail."""

    is_broken = False

    def write(self, descriptor: int, data: memoryview) -> int:
        """Write, or fail as a full disk does."""
        if self.is_broken:
            raise OSError(28, "no space left on device")
        return super().write(descriptor, data)


@attrs.define
class Live:
    """A server on its port, for one transcript."""

    url: str
    gateway: Gateway
    disk: BreakingDisk

    @property
    def server(self) -> Server:
        """The server behind the gateway."""
        assert self.gateway.server is not None
        return self.gateway.server


@asynccontextmanager
async def serve(transcript: Transcript, folder: Path) -> AsyncIterator[Live]:
    """Run the server of a transcript, and see that it is left as it was found.

    Args:
        transcript: says what its settings are.
        folder: empty, its own.
    """
    options = dict(transcript.server)
    backend = make_backend(transcript.script, slots=options.pop("slots", None))
    is_loading, disk = options.pop("loading", False), BreakingDisk()
    voices = VoiceLibrary(make_voices(folder, options.pop("voices", ())))
    record_to = folder if options.pop("record", False) else None
    settings = Settings(host="127.0.0.1", model="scripted", record_to=record_to, **options)
    gateway = Gateway(settings)
    recorder = None if record_to is None else Recorder(disk=disk)
    listeners = await listener.bind(settings.host, 0)
    try:
        async with anyio.create_task_group() as tasks:
            app = make_app(gateway.readiness)
            serving = partial(listener.serve, listeners, on_websocket=gateway.on_websocket, app=app)
            (address,) = await tasks.start(serving)
            if not is_loading:
                gateway.server = Server(
                    settings,
                    backend,
                    tasks=tasks,
                    recorder=recorder,
                    identities=SystemIdentities(),
                    decode_media=MediaDecoder(voices).decode,
                )
            yield Live(f"ws://{address.host}:{address.port}", gateway, disk)
            await _check_left(gateway, backend)
            tasks.cancel_scope.cancel()
    finally:
        if recorder is not None:
            with trio.CancelScope(shield=True):
                await recorder.aclose()


async def _check_left(gateway: Gateway, backend: ScriptedBackend) -> None:
    """Nothing is left of the session: its slot is back (B5) or condemned (B4), no rule broken."""
    hanging = 0
    if gateway.server is not None:
        await gateway.server.wait_until_empty()
        assert not gateway.server.workers.pool.leases, "the slot is not back (B5)"
        hanging = gateway.server.workers.statistics.condemned
    assert not backend.violations, backend.violations
    assert len(backend.held_slots) == hanging, "the session was not released (B5)"


class LivePlayer:
    """One client, played step by step.

    Args:
        transcript: what is said.
        live: the server.
        sockets: closes what is left open.
    """

    def __init__(self, transcript: Transcript, live: Live, sockets: AsyncExitStack) -> None:
        self._transcript = transcript
        self._live = live
        self._sockets = sockets
        self._socket: ClientConnection | None = None
        self._occupants: list[ClientConnection] = []
        self._names: dict[str, object] = {}

    async def play(self) -> None:
        """Play it to its end.

        Raises:
            Mismatch: naming the line where the server says something else.
        """
        for step in self._transcript.steps:
            try:
                await self._play(step)
            except Mismatch as error:
                raise Mismatch(f"{self._transcript.name}:{step.line}: {error}") from None
        for socket in self._occupants:
            await socket.aclose()

    async def _play(self, step: Step) -> None:
        match step.kind:
            case "connect":
                self._socket = await self._connect(step.value.format_map(self._names))
            case "occupy":
                await self._occupy(step.value)
            case "words":
                for driver in self._live.server._drivers:
                    driver.post(ev.UserTranscribed(at_ns=driver.now_ns(), **step.value))
            case "operator":
                self._operate(step.value)
            case "refused":
                await self._be_refused(step.value)
            case "vacate":
                await self._occupants[step.value].aclose()
            case "wait_s":
                await trio.sleep(step.value)
            case _:
                await self._talk(step, await self._connected())

    async def _talk(self, step: Step, socket: ClientConnection) -> None:
        match step.kind:
            case kind if kind in SENDS:
                # A frame that is too big may be refused before all of it is sent: what was said
                # of it is received in the steps that follow.
                with suppress(ConnectionClosed):
                    await socket.send(frame_of(step, self._names))
            case "receive":
                try:
                    found = await socket.recv()
                except ConnectionClosed as closed:
                    raise Mismatch(f"a close {_farewell(closed)}, not a frame") from None
                check(step.value, json.loads(found), self._names)
            case "close":
                await self._be_closed(step.value, socket)
            case "leave":
                await socket.aclose()

    async def _be_closed(self, expected: dict[str, Any], socket: ClientConnection) -> None:
        try:
            found = await socket.recv()
        except ConnectionClosed as closed:
            if _farewell(closed) != (expected["code"], expected["reason"]):
                raise Mismatch(f"{_farewell(closed)}, not the close {expected}") from None
        else:
            raise Mismatch(f"{found[:600]!r}, not the close {expected}")

    async def _connected(self) -> ClientConnection:
        if self._socket is None:
            self._socket = await self._connect(self._transcript.connect)
        return self._socket

    async def _connect(self, path: str) -> ClientConnection:
        connecting = connect(
            self._live.url + path, max_size=None, compression=None, proxy=None, ping_interval=None
        )
        return await self._sockets.enter_async_context(connecting)

    async def _occupy(self, path: str) -> None:
        socket = await self._connect(path)
        await socket.recv()  # it has its place now, or its slot
        self._occupants.append(socket)

    async def _be_refused(self, expected: dict[str, Any]) -> None:
        try:
            await self._connected()
        except InvalidStatus as error:
            response = error.response
            found = {"status": response.status_code, "body": json.loads(response.body or b"null")}
            check(expected, found, self._names)
        else:
            raise Mismatch("the handshake was accepted")

    def _operate(self, what: str) -> None:
        match what:
            case "warn":
                self._live.server.begin_drain(WARNED_S)
            case "drain":
                self._live.server.drain()
            case "cancel":
                admission = self._live.server.admission
                admission.cancel(admission.places()[-1].ticket_id)
            case "refresh":
                self._live.server.admission.refresh()
            case "lose the log":
                self._live.disk.is_broken = True
            case "overrun the log":
                for driver in self._live.server._drivers:
                    driver.post(ev.Flooded(at_ns=driver.now_ns()))
            case _:
                raise AssertionError(f"{what} is nothing that an operator does")


def _farewell(closed: ConnectionClosed) -> tuple[int, str] | None:
    return None if closed.rcvd is None else (closed.rcvd.code, closed.rcvd.reason)


async def play(transcript: Transcript, folder: Path) -> None:
    """Play one transcript against a server of its own.

    Args:
        transcript: what is said.
        folder: empty, its own.

    Raises:
        Mismatch: the server says something else.
        AssertionError: it is slow beyond patience, or leaves something behind.
    """
    with trio.move_on_after(PATIENCE_S) as scope:
        async with serve(transcript, folder) as live, AsyncExitStack() as sockets:
            await LivePlayer(transcript, live, sockets).play()
    assert not scope.cancelled_caught, f"{transcript.name}: nothing more came in {PATIENCE_S} s"


def play_all(transcripts: Sequence[Transcript], folder: Path) -> dict[str, Exception | None]:
    """Play transcripts, many at once, and those that went wrong once more, one by one.

    Args:
        transcripts: with different names.
        folder: empty; each gets one of its own in it.

    Returns:
        What went wrong, by the transcript's name; None where nothing did.
    """
    found: dict[str, Exception | None] = {}

    async def contain(transcript: Transcript, place: trio.CapacityLimiter, name: str = "") -> None:
        own = folder / (name or transcript.name)
        own.mkdir(parents=True)
        async with place:
            try:
                await play(transcript, own)
            except Exception as error:
                found[transcript.name] = _innermost(error)
            else:
                found[transcript.name] = None

    async def run() -> None:
        place = trio.CapacityLimiter(AT_ONCE)
        async with trio.open_nursery() as tasks:
            for transcript in transcripts:
                if not _is_heavy(transcript):
                    tasks.start_soon(contain, transcript, place)
        for transcript in filter(_is_heavy, transcripts):
            await contain(transcript, place)
        for transcript in transcripts:  # on a busy machine, what races with the clock lost
            if found[transcript.name] is not None:
                await contain(transcript, place, f"{transcript.name} again")

    trio.run(run)
    return found


def _is_heavy(transcript: Transcript) -> bool:
    """A message so big that a server that is busy with others gives up reading it to its end."""
    return any(step.kind == "send_size" for step in transcript.steps)


def _innermost(error: Exception) -> Exception:
    """Take an exception that came alone out of its groups."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        (error,) = error.exceptions
    return error
