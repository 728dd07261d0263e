"""The server without its sockets: sessions on one model, one queue, one recorder.

`handle` runs one session over one WebSocket. `drain` ends all sessions cleanly;
`runtime.serve.serving` then waits for them. An error in one session does not reach another.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final

import anyio
import anyio.to_thread
import attrs
from anyio.abc import TaskGroup

from protocol.values import events as ev
from protocol.values.errors import REFUSALS, ErrorCode
from protocol.values.messages import EndReason
from protocol.values.modes import MODES, Mode
from protocol.values.resuming import ComeBack
from recorder.format.errors import RecorderError
from recorder.format.records import Fields
from recorder.keep.store import Store
from recorder.write.writer import Recorder

from ..model.backends.base import Backend, DeviceLost
from ..net.connection import Connection
from ..net.websocket import WebSocket
from ..settings.settings import Settings
from ..slots.admission import Admission, Refused
from ..slots.pool import PoolCounts
from ..slots.workers import Workers
from ..telemetry.logs import bound_session
from ..telemetry.watching import SessionStatus, Telemetry
from .beginning import Arrival, first_event
from .calls import Calls
from .decodes import DecodeMedia
from .driver import Driver
from .ears import EARS, Ears
from .ended import Ended, EndedSessions
from .forking import ForkRefused
from .identity import Identities, Identity
from .journal import MarkRefused, OpenLog
from .lane import Lane
from .room import Room
from .session_logs import SessionLogs
from .status import status_of
from .taking_up import TakenUp, begin_in_turn

REFRESH_S: Final = 3.0
"""Between two estimates; a session tells its client at most every 3 s."""

_logger = logging.getLogger("antiphon.server")
NO_SESSION: Final = "there is no such session, or this is not its token"
AHEAD: Final = "last_seq is ahead of the session"


def now_ns() -> int:
    """The event loop's clock in nanoseconds: real time, or a test's virtual time."""
    return int(anyio.current_time() * 1e9)


class Server:
    """All sessions of one process.

    Args:
        backend: the loaded model, or the workers that serve it.
        tasks: the nursery of model calls, and of sessions that outlive their connections; it must
            outlive every session.
        recorder: writes the logs; None records nothing.
        telemetry: sees every session; None for none.
        has_key: whether there is still a key of this name.
        ears: hear users in addition to the model.
    """

    def __init__(
        self,
        settings: Settings,
        backend: Backend | Workers,
        *,
        tasks: TaskGroup,
        recorder: Recorder | None,
        identities: Identities,
        decode_media: DecodeMedia,
        telemetry: Telemetry | None = None,
        has_key: Callable[[str], bool] = lambda _: True,
        ears: Ears = EARS,
    ) -> None:
        self._settings = settings
        self.workers = backend if isinstance(backend, Workers) else Workers((backend,))
        self.tasks = tasks
        self._logs = SessionLogs(settings, recorder, self.workers)
        self._identities = identities
        self._decode_media = decode_media
        self._telemetry = telemetry
        self._has_key = has_key
        self._ears = ears
        self._pool = self.workers.pool
        self.admission = Admission(
            self._pool,
            clock_ns=now_ns,
            new_ticket_id=identities.ticket_id,
            queue_max=settings.queue_max,
            limit_s=settings.limit_s,
            more_to_come=lambda: self.workers.more_to_come,
        )
        self._drivers: dict[Driver, None] = {}
        self._nobody_left = anyio.Event()
        self.room = Room(self._drivers, self.admission, settings, has_key)
        self._lane = Lane()
        self._ended = EndedSessions(settings.resume_s)

    @property
    def sessions(self) -> int:
        """The number of running sessions, those in the queue included."""
        return len(self._drivers)

    @property
    def slots(self) -> PoolCounts:
        """The slots by state."""
        return self._pool.counts

    def roster(self, kv_tokens: Callable[[str], int]) -> tuple[SessionStatus, ...]:
        """The running sessions, oldest first; `kv_tokens` as in `status_of`."""
        return tuple(status_of(driver, kv_tokens) for driver in self._drivers)

    def running(self, recording_id: str) -> Driver | None:
        """The running session of this name."""
        return next((it for it in self._drivers if it.recording_id == recording_id), None)

    def find(self, recording_id: str) -> Driver | Ended | None:
        """The session of this name: it runs, or ended while its client may have been away."""
        return self.running(recording_id) or self._ended.get(recording_id, now_ns())

    async def mark(self, recording_id: str, fields: Fields) -> tuple[int, int]:
        """Write a mark into a running session's log; raises `MarkRefused` as `Driver.mark` does."""
        if (driver := self.running(recording_id)) is None:
            raise MarkRefused("over")
        return await driver.mark(fields)

    @property
    def readiness(self) -> str:
        """`ready`, `full`, `loading`, `draining`, or `condemned`: no worker is left or coming."""
        if self.admission.state != "open":
            return self.admission.state
        counts = self._pool.counts
        if counts.condemned == counts.slots and not self.workers.more_to_come:
            return "condemned"
        waiting = self.admission.queue_length
        return "full" if counts.free == 0 and waiting >= self._settings.queue_max else "ready"

    @property
    def speech(self) -> str:
        """`on`, or `off` where the model gives only text: it has no voice, or has lost it."""
        return "on" if self.workers.info.speaks else "off"

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The modes of the model."""
        return tuple(mode for mode in MODES if mode in self.workers.info.modes)

    async def handle(
        self,
        websocket: WebSocket,
        arrival: Arrival,
        on_left: Callable[[], None] = lambda: None,
    ) -> EndReason | None:
        """Run one session to its end; return its reason, or None where it was broken off.

        Only cancellation is raised, and `ForkRefused` before a session begins. Else the WebSocket,
        open and accepted, is closed; `on_left` is called then, though the session may go on.
        """
        driver = await self._make_driver(self._identities.draw(), arrival)
        number, connection = self._connect(websocket, driver)
        visit = partial(self._visit, driver, number, connection, on_left)
        await self._host(driver, visit, connection)
        if driver.session is None:
            return None
        reason = driver.session.end_reason
        has_left = driver.session.is_forking and reason not in {None, "backend_error"}
        if reason == "refused" or has_left:
            await self._logs.forget(driver.session, is_fork=arrival.parent is not None)
        return reason

    async def _host(
        self,
        driver: Driver,
        visit: Callable[[], Coroutine[Any, Any, None]] | None = None,
        connection: Connection | None = None,
    ) -> None:
        """Run a session to its end, `visit` with it: its first connection, if it has one."""
        self._drivers[driver] = None
        try:
            with bound_session(driver.recording_id):
                async with anyio.create_task_group() as tasks:
                    if visit is not None:
                        tasks.start_soon(visit)
                    await driver.run(connection)
        except Exception:
            _logger.exception("session %s broke", driver.recording_id)
        finally:
            driver.peer.hang_up()
            del self._drivers[driver]
            self._keep_ended(driver)
            if not self._drivers:
                self._nobody_left.set()

    def _connect(self, websocket: WebSocket, driver: Driver) -> tuple[int, Connection]:
        """Make the client's next connection, and number it."""
        number = driver.peer.next_number()
        connection = Connection(
            websocket,
            on_frames=partial(driver.frames_received, number),
            on_gone=partial(driver.peer_gone, number),
            on_send_failed=partial(driver.send_failed, number),
            stall_s=self._settings.stall_s,
        )
        return number, connection

    async def _visit(
        self, driver: Driver, number: int, connection: Connection, on_left: Callable[[], None]
    ) -> None:
        """Run a client's connection; an error of the only one that a session can have ends it."""
        try:
            await connection.run()
        except Exception:
            if number == 0 and not driver.is_resumable:
                raise
            _logger.exception("a connection of session %s broke", driver.recording_id)
            driver.send_failed(number)
        finally:
            on_left()
            self.room.end_revoked()
            self.room.let_the_oldest_end()

    def _keep_ended(self, driver: Driver) -> None:
        """Let a client that was away hear how its session ended."""
        session, folder = driver.session, self._settings.record_to
        if session is None or not session.is_resumable or folder is None or driver.is_suspended:
            return
        path = Store(folder).path(driver.recording_id)
        ended = partial(Ended.of, session, owner=driver.owner, close=driver.close, path=path)
        ended = partial(ended, first_frame=driver.first_frame)
        resume_s = self._settings.resume_s
        self._ended.add(ended(tokens=driver.peer.tokens, resume_s=resume_s, ended_ns=now_ns()))

    async def come_back(
        self, websocket: WebSocket, recording_id: str, mode: Mode, owner: str, asked: ComeBack
    ) -> str:
        """Go on with a session on another connection, until that is closed.

        Returns:
            Why the client cannot come back, for the client; empty if it did. It is the same for no
            session and for a wrong token.
        """
        it = self.find(recording_id)
        is_it = it is not None and (it.owner, it.mode) == (owner, mode) and self._has_key(owner)
        if it is None or not is_it or not it.tokens.is_right(asked.token):
            return NO_SESSION
        asked = attrs.evolve(asked, last_seq=max(asked.last_seq, it.first_frame - 1))
        if asked.last_seq >= it.frames_sent:
            return AHEAD
        if isinstance(it, Ended):
            try:
                with bound_session(recording_id):
                    await it.tell(websocket, asked, self._settings.stall_s)
            except* (RecorderError, OSError):  # removed since, or its recording failed
                self._ended.discard(recording_id)
            return ""
        token = self._identities.token()
        number, connection = self._connect(websocket, it)
        with bound_session(recording_id):
            it.come_back(connection, used=asked.token, token=token, after=asked.last_seq)
            await self._visit(it, number, connection, lambda: None)
        return ""

    async def _make_driver(self, identity: Identity, arrival: Arrival) -> Driver:
        settings, is_recorded = self._settings, self._logs.is_recording
        can_resume = arrival.resumable and is_recorded and settings.detach_s > 0
        token = self._identities.token() if can_resume else ""
        info = self.workers.info
        opened = first_event(
            settings, info, identity, arrival, token=token, is_recorded=is_recorded
        )
        if arrival.parent is None:
            log = self._logs.of_new(opened, arrival.owner)
            return self._driver(opened, log, arrival.owner, token=token, refusal=arrival.refusal)
        self._refuse_where_full(arrival)  # before all the work for it
        taken = await self._logs.fork(arrival, opened)
        log = self._logs.of_taken(taken)
        return self._driver(taken.opened, log, arrival.owner, token=token, taken=taken)

    def _refuse_where_full(self, arrival: Arrival) -> None:
        try:
            self.admission.refuse_where_full()
            refused = arrival.refusal
        except Refused as full:
            refused = full.code
        if refused is not None:
            raise ForkRefused(refused, REFUSALS[refused])

    def _driver(
        self,
        opened: ev.ConnectionOpened,
        open_log: OpenLog | None,
        owner: str,
        *,
        token: str = "",
        refusal: ErrorCode | None = None,
        taken: TakenUp | None = None,
    ) -> Driver:
        settings, info, sight = self._settings, self.workers.info, self._telemetry
        watcher = None if sight is None else sight.watch(opened, owner)
        return Driver(
            opened,
            open_log=open_log,
            admission=self.admission,
            make_calls=lambda inbox: Calls(
                workers=self.workers,
                admission=self.admission,
                inbox=inbox,
                tasks=self.tasks,
                rebuilds_exactly=settings.rebuild == "exact"
                or (settings.rebuild == "auto" and info.deterministic),
            ),
            decode_media=self._decode_media,
            clock_ns=now_ns,
            lane=self._lane,
            admit=self.room.for_chat,
            has_room=self.room.for_frame,
            owner=owner,
            token=token,
            refusal=refusal,
            watcher=watcher,
            taken=taken,
            ears=self._ears,
        )

    # -- the life of the server -----------------------------------------------------------------

    async def take_up(self) -> int:
        """Go on with the sessions that a server before this one left; returns their number.

        Clients of those that are over hear how they ended. `OSError`: the folder cannot be read.
        """
        found = await self._logs.left()
        for taken in found:
            if taken.file is None:
                self._ended.add(taken.ended(self._settings.resume_s, now_ns()))
        sessions = await begin_in_turn(found, self._host_again)
        self.room.end_revoked()
        return sessions

    def _host_again(self, taken: TakenUp) -> Driver:
        log = self._logs.of_taken(taken)
        driver = self._driver(taken.opened, log, taken.owner, taken=taken)
        self._drivers[driver] = None
        self.tasks.start_soon(self._host, driver)
        return driver

    def _suspend(self) -> None:
        """Leave the sessions that can be resumed to the next server."""
        if self._settings.resumable:
            for driver in self._drivers:
                driver.suspend()

    async def refresh_estimates(self) -> None:
        """Send new estimates to waiting sessions; runs until cancelled."""
        while True:
            await anyio.sleep(REFRESH_S)
            self.admission.refresh()

    async def replace_workers(
        self, on_hopeless: Callable[[DeviceLost], None] = lambda _: None
    ) -> None:
        """Replace condemned workers until cancelled; `on_hopeless`: this process can have none."""
        await self.workers.run(self.admission.review, on_hopeless)

    def begin_drain(self, wait_s: int) -> None:
        """Stop admitting; calls may finish, idle sessions end; clients are told the time left."""
        self.admission.drain()
        self._suspend()
        for driver in self._drivers:
            driver.post(ev.DrainBegan(at_ns=driver.now_ns(), wait_s=wait_s))

    def drain(self) -> None:
        """Stop admitting, and end every session with `server_shutdown`."""
        self.admission.drain()
        self._suspend()
        for driver in self._drivers:
            driver.post(ev.Draining(at_ns=driver.now_ns()))

    async def wait_until_empty(self) -> None:
        """Wait until no session is left; late ones are refused and leave."""
        while self._drivers:
            self._nobody_left = anyio.Event()
            await self._nobody_left.wait()
