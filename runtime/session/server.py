"""The server without its sockets: sessions on one model, one queue, one recorder.

`handle` runs one session over one WebSocket. `drain` ends all sessions cleanly;
`runtime.serve.serving` then waits for them. An error in one session does not reach another.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, Final

import anyio
import anyio.lowlevel
import anyio.to_thread
import attrs
from anyio.abc import TaskGroup

from protocol.machine.session import Session
from protocol.values import events as ev
from protocol.values.errors import REFUSALS, ErrorCode
from protocol.values.limits import MODES, Mode
from protocol.values.messages import EndReason, ResumeRequest
from recorder.format.format import Fields, RecorderError
from recorder.storage.store import Store
from recorder.write.log import SessionLog
from recorder.write.writer import Recorder

from ..model.backends.base import Backend, DeviceLost
from ..net.connection import Connection, WebSocket
from ..net.limits import LargeMessageLimiter
from ..settings.settings import MIB, Settings
from ..slots.admission import Admission, Refused
from ..slots.workers import PoolCounts, Workers
from ..telemetry.logs import bound_session
from ..telemetry.watching import SessionStatus, Telemetry
from . import journal
from .crash_recovery import RecoveredSession, recover_sessions
from .driver import DecodeMedia, Driver, clock_ns
from .forking import ForkQueue, ForkRefused, unsupported, write_fork
from .journal import MarkRefused, OnFailed, OpenLog
from .model_calls import ModelCalls
from .peer import EndedSession, EndedSessions
from .setup import Identities, Identity, SessionSpec, first_event, log_head
from .speech_input import ENERGY_ONLY, SpeechInput

REFRESH_S: Final = 3.0
"""Between two estimates; a session tells its client at most every 3 s."""
ABSENCES_S: Final = 0.05
"""From the first client that leaves until absences are bounded, for all that left since."""

EARLY_SUM_BYTES_MAX: Final = 128 * MIB
"""Opening messages kept while clients wait for a slot: fifty with 30 s of reference audio; half of
the budget of large messages."""
EARLY_BYTES_UNCOUNTED: Final = 64 * 1024
"""An opening message without voices is always kept: a queue of a thousand takes 64 MB."""
RECOVER_S: Final = 5.0
"""A recovered session that cannot ask for a slot by then keeps the others from theirs no longer."""
UNBEGUN_S: Final = 10.0
"""A client whose first message was lost with its connection comes back sooner."""
LOOK_S: Final = 0.01
"""Between two looks at whether they have asked."""

_logger = logging.getLogger("antiphon.server")
_CANNOT: Final = "this server does not rebuild sessions"
NO_SESSION: Final = "there is no such session, or this is not its token"
AHEAD: Final = "last_seq is ahead of the session"


class Server:
    """All sessions of one process.

    Args:
        backend: the loaded model, or the workers that serve it.
        tasks: the nursery of model calls, and of sessions that outlive their connections; it must
            outlive every session.
        recorder: writes the logs; None records nothing.
        telemetry: sees every session; None for none.
        has_key: whether there is still a key of this name.
        speech_input: hears users in addition to the model.
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
        speech_input: SpeechInput = ENERGY_ONLY,
    ) -> None:
        self._settings = settings
        self.workers = backend if isinstance(backend, Workers) else Workers((backend,))
        self.tasks = tasks
        self._logs = SessionLogs(settings, recorder, self.workers)
        self._identities = identities
        self._decode_media = decode_media
        self._telemetry = telemetry
        self._has_key = has_key
        self._speech_input = speech_input
        self._pool = self.workers.pool
        self.admission = Admission(
            self._pool,
            clock_ns=clock_ns,
            new_ticket_id=identities.ticket_id,
            queue_max=settings.queue_max,
            limit_s=settings.limit_s,
            more_to_come=lambda: self.workers.more_to_come,
        )
        self._drivers: dict[Driver, None] = {}
        self._all_ended = anyio.Event()
        self._absent = anyio.Event()
        self._limiter = LargeMessageLimiter()
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
        """The running sessions, oldest first.

        `kv_tokens` gives tokens in the model's cache, by recording id.
        """
        return tuple(driver.status(kv_tokens(driver.recording_id)) for driver in self._drivers)

    def running(self, recording_id: str) -> Driver | None:
        """The running session of this name."""
        return next((it for it in self._drivers if it.recording_id == recording_id), None)

    def find(self, recording_id: str) -> Driver | EndedSession | None:
        """The session of this name: it runs, or ended while its client may have been away."""
        return self.running(recording_id) or self._ended.get(recording_id, clock_ns())

    def cancel_answers(self, party: str) -> int:
        """End the answers of `/ws/chat` that a party waits for; returns how many it has."""
        found = [it for it in self._drivers if it.is_request and it.party == party]
        for driver in found:
            driver.post(ev.AnswerCancelled(at_ns=driver.now_ns()))
        return len(found)

    async def mark(self, recording_id: str, fields: Fields) -> tuple[int, int]:
        """Write a mark into a running session's log; raises `MarkRefused` as `Driver.mark` does."""
        if (driver := self.running(recording_id)) is None:
            raise MarkRefused("over")
        return await driver.mark(fields)

    @property
    def readiness(self) -> str:
        """`ready`, `full`, `loading`, `draining`, or `condemned`: no worker is left or coming."""
        if self.admission.is_draining:
            return "draining"
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
        self, websocket: WebSocket, spec: SessionSpec, on_left: Callable[[], None] = lambda: None
    ) -> EndReason | None:
        """Run one session to its end; return its reason, or None where it was broken off.

        Only cancellation is raised, and `ForkRefused` before a session begins. Else the WebSocket,
        open and accepted, is closed; `on_left` is called then, though the session may go on.
        """
        driver = await self._make_driver(self._identities.draw(), spec)
        if spec.first:  # before its slot can come
            driver.post(ev.FrameReceived(at_ns=driver.now_ns(), frame=spec.first))
        number, connection = self._connect(websocket, driver)
        visit = partial(self._visit, driver, number, connection, on_left)
        await self._host(driver, visit, connection)
        if driver.session is None:
            return None
        reason = driver.session.end_reason
        has_left = driver.session.is_forking and reason not in {None, "backend_error"}
        if reason == "refused" or has_left:
            await self._logs.forget(driver.session, is_fork=spec.parent is not None)
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
                self._all_ended.set()

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
            if driver.is_resumable:  # else it is over
                self._absent.set()

    def _keep_ended(self, driver: Driver) -> None:
        """Let a client that was away hear how its session ended."""
        session, folder = driver.session, self._settings.record_to
        if session is None or not session.is_resumable or folder is None or driver.is_suspended:
            return
        ended = EndedSession.of(
            session,
            owner=driver.owner,
            party=driver.party,
            tokens=driver.tokens,
            frame_index=driver.frame_index,
            path=Store(folder).path(driver.recording_id),
            first_frame=driver.first_frame,
            close=driver.close,
            resume_s=self._settings.resume_s,
            ended_ns=clock_ns(),
        )
        self._ended.add(ended)

    async def resume(
        self, websocket: WebSocket, recording_id: str, mode: Mode, owner: str, asked: ResumeRequest
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
        if isinstance(it, EndedSession):
            try:
                with bound_session(recording_id):
                    await self._ended.send_rest(it, websocket, asked, self._settings.stall_s)
            except* (RecorderError, OSError):  # removed since, or its recording failed
                self._ended.discard(recording_id)
            return ""
        token = self._identities.token()
        number, connection = self._connect(websocket, it)
        with bound_session(recording_id):
            it.resume(connection, used=asked.token, token=token, after=asked.last_seq)
            await self._visit(it, number, connection, lambda: None)
        return ""

    async def _make_driver(self, identity: Identity, spec: SessionSpec) -> Driver:
        settings, is_recorded = self._settings, self._logs.is_recording
        can_resume = spec.resumable and is_recorded and settings.detach_s > 0
        token = self._identities.token() if can_resume else ""
        info = self.workers.info
        opened = first_event(settings, info, identity, spec, token=token, is_recorded=is_recorded)
        if spec.parent is None:
            log = self._logs.of_new(opened, spec.owner)
            return self._driver(opened, log, spec, token=token)
        self._refuse_where_full(spec)  # before all the work for it
        fork = await self._logs.fork(spec, opened)
        log = self._logs.of_recovered(fork)
        return self._driver(fork.opened, log, spec, token=token, recovered=fork)

    def _refuse_where_full(self, spec: SessionSpec) -> None:
        try:
            self.admission.refuse_where_full(spec.party)
            refused = spec.refusal
        except Refused as full:
            refused = full.code
        if refused is not None:
            raise ForkRefused(refused, REFUSALS[refused])

    def _driver(
        self,
        opened: ev.ConnectionOpened,
        open_log: OpenLog | None,
        spec: SessionSpec,
        *,
        token: str = "",
        recovered: RecoveredSession | None = None,
    ) -> Driver:
        settings, info, sight = self._settings, self.workers.info, self._telemetry
        exactly = settings.rebuild == "exact"
        return Driver(
            opened,
            open_log=open_log,
            make_calls=lambda inbox: ModelCalls(
                workers=self.workers,
                admission=self.admission,
                inbox=inbox,
                tasks=self.tasks,
                rebuilds_exactly=exactly or (settings.rebuild == "auto" and info.deterministic),
                admit=self._refuse_chat,
                owner=spec.owner,
                party=spec.party,
                refusal=spec.refusal,
            ),
            decode_media=self._decode_media,
            limiter=self._limiter,
            has_room=self._has_room,
            owner=spec.owner,
            party=spec.party,
            token=token,
            watcher=None if sight is None else sight.watch(opened, spec.owner),
            recovered=recovered,
            speech_input=self._speech_input,
        )

    # -- sessions without a slot, or without a client -------------------------------------------

    def _has_room(self, frame_bytes: int) -> bool:
        """Whether a frame that comes early may be kept with the others."""
        if frame_bytes <= EARLY_BYTES_UNCOUNTED:
            return True
        sessions = (driver.session for driver in self._drivers)
        kept = sum(session.early_bytes or 0 for session in sessions if session is not None)
        return kept + frame_bytes <= EARLY_SUM_BYTES_MAX

    def _refuse_chat(self) -> ErrorCode | None:
        """Why a new chat, already among the drivers, has no room; None if it has."""
        if self.admission.is_draining:
            return ErrorCode.SERVICE_UNAVAILABLE
        if len(self._drivers) <= self._settings.chats_max:
            return None
        connected = sum(it.is_open_chat and it.away_ns is None for it in self._drivers)
        return ErrorCode.QUEUE_FULL if connected > self._settings.chats_max else None

    def _bound_absences(self) -> None:
        """Keep no more sessions without a connection than may be kept, and fewer with a slot.

        Those of the party that has most go first, the longest away of them: one client's absences
        do not end another's. While clients wait for a slot, a party keeps one. Of those that were
        never set up it keeps the last, while no one waits, for its first message may be lost.
        """
        away = self._without_client()
        unbegun = sorted((it for it in away if not it.has_begun), key=lambda it: -it.away_s)
        last = {} if self.admission.queue_length else {it.party: it for it in unbegun}
        for driver in unbegun:
            if last.get(driver.party) is not driver or driver.away_s > UNBEGUN_S:
                driver.stop_waiting()
        for driver in _heaviest(away, len(away) - self._settings.detached_max):
            driver.stop_waiting()
        keeping = [driver for driver in away if driver.keeps_slot]
        for driver in _heaviest(keeping, self.admission.queue_length, left_min=1):
            driver.give_up_slot()

    def end_revoked(self) -> None:
        """End sessions that wait for a client whose key was removed."""
        for driver in self._without_client():
            if not self._has_key(driver.owner):
                driver.stop_waiting()

    def _without_client(self) -> list[Driver]:
        return [it for it in self._drivers if it.away_ns is not None and it.is_resumable]

    # -- the life of the server -----------------------------------------------------------------

    async def recover(self) -> int:
        """Go on with the sessions that a server before this one left; returns their number.

        Conversations have asked for a slot before any begins that waited for its first one: it
        would take the slot of a conversation. Clients of sessions that are over get the rest.
        `OSError`: the folder cannot be read.
        """
        found = await self._logs.left()
        for recovered in found:
            if recovered.file is None:
                self._ended.add(recovered.ended(self._settings.resume_s, clock_ns()))
        left = [recovered for recovered in found if recovered.file is not None]
        begun = [self._host_again(it) for it in left if it.outstanding.goes_first]
        with anyio.move_on_after(RECOVER_S):
            while not all(it.is_idle for it in begun):  # noqa: ASYNC110 - once, before any client
                await anyio.sleep(LOOK_S)
        for recovered in left:
            if not recovered.outstanding.goes_first:
                self._host_again(recovered)
        self.end_revoked()
        return len(left)

    def _host_again(self, recovered: RecoveredSession) -> Driver:
        log = self._logs.of_recovered(recovered)
        spec = SessionSpec(mode=recovered.opened.mode, owner=recovered.owner)
        driver = self._driver(recovered.opened, log, spec, recovered=recovered)
        self._drivers[driver] = None
        self.tasks.start_soon(self._host, driver)
        return driver

    def _suspend(self) -> None:
        """Leave the sessions that can be resumed to the next server."""
        if self._settings.resumable:
            for driver in self._drivers:
                driver.suspend()

    async def refresh(self) -> None:
        """Bound absences, and send new estimates to waiting sessions; runs until cancelled.

        Thousands may leave at once: all sessions are looked through once for all of them.
        """
        while True:
            with anyio.move_on_after(REFRESH_S):
                while True:
                    await self._absent.wait()
                    await anyio.sleep(ABSENCES_S)
                    self._absent = anyio.Event()
                    self.end_revoked()
                    self._bound_absences()
            self._bound_absences()
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
            self._all_ended = anyio.Event()
            await self._all_ended.wait()


def _heaviest(away: list[Driver], count: int, *, left_min: int = 0) -> Iterator[Driver]:
    """Choose sessions of the parties with most of them, each party's longest away first.

    A party keeps `left_min` of them.
    """
    of_party = dict[str, list[Driver]]()
    for driver in sorted(away, key=lambda it: it.away_s):
        of_party.setdefault(driver.party, []).append(driver)
    for _ in range(min(count, len(away))):
        most = max(of_party.values(), key=len)
        if len(most) <= left_min:
            return
        yield most.pop()


# -- the logs of its sessions ---------------------------------------------------------------------


class SessionLogs:
    """Makes and finds logs; `recorder` writes them, None records nothing."""

    def __init__(self, settings: Settings, recorder: Recorder | None, workers: Workers) -> None:
        self._settings = settings
        self._folder = settings.record_to
        self.recorder = recorder if self._folder is not None else None
        self._workers = workers
        self._forks = ForkQueue(settings.fork_mb * MIB)

    @property
    def is_recording(self) -> bool:
        """Whether sessions are recorded."""
        return self.recorder is not None

    def of_new(self, opened: ev.ConnectionOpened, owner: str) -> OpenLog | None:
        """How the log of a new session is opened; None where it is not recorded."""
        return None if self.recorder is None else partial(self._open, opened, owner)

    def _open(self, opened: ev.ConnectionOpened, owner: str, on_failure: OnFailed) -> SessionLog:
        assert self.recorder is not None
        fields = log_head(self._settings, self._workers.info, opened, owner)
        path = self._store.path(opened.recording_id)
        return self.recorder.open(path, fields, at_ns=0, on_failure=on_failure)

    def of_recovered(self, recovered: RecoveredSession) -> OpenLog:
        """How the log of a session goes on."""
        assert self.recorder is not None
        assert recovered.file is not None
        return partial(self.recorder.go_on, recovered.file, recovered.next_seq)

    async def fork(self, spec: SessionSpec, opened: ev.ConnectionOpened) -> RecoveredSession:
        """Write the log of a fork, whose client would have begun a session by `opened`.

        `ForkRefused`: it is not possible, by the recording, the request or the server.
        """
        assert spec.parent is not None
        if self.recorder is None or not opened.limits.rebuild_wait_s:
            raise ForkRefused(ErrorCode.UNSUPPORTED, _CANNOT)
        head = log_head(self._settings, self._workers.info, opened, spec.owner)
        file = self.recorder.file(self._store.path(opened.recording_id))
        write = partial(write_fork, spec.parent, opened, head, self._workers.info, file)
        try:
            async with self._forks.turn(spec.party):
                fork = await journal.in_thread(write)
                self._forks.copied(spec.party, file.path.stat().st_size)
        except FileNotFoundError:
            raise unsupported("it was removed") from None
        except OSError as error:
            text = f"the fork cannot be recorded: {error.strerror}"
            raise ForkRefused(ErrorCode.SERVICE_UNAVAILABLE, text) from error
        try:
            await anyio.lowlevel.checkpoint_if_cancelled()  # a thread is waited for even then
        except BaseException:
            with suppress(OSError):
                file.remove()
            raise
        fork.owner = spec.owner
        return fork

    async def left(self) -> list[RecoveredSession]:
        """The sessions that a server before this one left; `OSError`: its folder is gone."""
        if self._folder is None or self.recorder is None:
            return []
        look = partial(
            recover_sessions,
            self._folder,
            self.recorder,
            fingerprint=self._workers.info.fingerprint,
            resume_s=self._settings.resume_s,
            sessions_max=self._settings.detached_max,
        )
        return await journal.in_thread(look)

    async def forget(self, session: Session, *, is_fork: bool) -> None:
        """Remove the log of a refused session, unless its client had sent content before.

        And of a fork that was never set up: it is only a copy.
        """
        counts = session.counts
        has_content = not is_fork and (counts["appends"] or counts.get("turns"))
        if self.recorder is None or has_content or self._settings.record_refused:
            return
        path = self._store.path(session.opened.recording_id)
        with suppress(OSError):  # it failed, or retention removed it first
            await anyio.to_thread.run_sync(path.unlink)

    @property
    def _store(self) -> Store:
        assert self._folder is not None
        return Store(self._folder)
