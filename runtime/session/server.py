"""The server without its sockets: sessions on one model, one queue, one recorder.

`handle` runs one session over one WebSocket. `drain` ends all sessions cleanly;
`runtime.serve.serving` then waits for them. An error in one session does not reach another.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from typing import Any, Final

import anyio
import anyio.to_thread
import attrs
from anyio.abc import TaskGroup

from protocol.machine.session import Session
from protocol.values import events as ev
from protocol.values.behaviour import NEWEST
from protocol.values.digest import session_id_of
from protocol.values.errors import ErrorCode
from protocol.values.limits import (
    CALL_WAIT_S,
    REBUILD_UNITS_MAX,
    REBUILD_WAIT_S,
    TURN_WAIT_S,
)
from protocol.values.messages import EndReason
from protocol.values.modes import MODES, OF_MODE, Mode
from recorder.format.errors import LogFailed
from recorder.format.mapping import SCHEMA
from recorder.format.records import Fields
from recorder.keep.store import Store
from recorder.write.log import SessionLog
from recorder.write.writer import Recorder

from ..model.backends.base import Backend, DeviceLost
from ..net.connection import Connection
from ..net.websocket import WebSocket
from ..settings.bounds import MIB
from ..settings.settings import Settings
from ..slots.admission import Admission
from ..slots.pool import PoolCounts
from ..slots.workers import Workers
from ..telemetry.logs import bound_session
from ..telemetry.watching import SessionStatus, Telemetry, Watcher
from .calls import Calls
from .decodes import DecodeMedia
from .driver import Driver
from .identity import Identities, Identity
from .journal import MarkRefused
from .lane import Lane

REFRESH_S: Final = 3.0
"""Seconds between two estimates; a session tells its client at most every 3 s."""
EARLY_SUM_BYTES_MAX: Final = 128 * MIB
"""Opening messages kept while clients wait for a slot: fifty with 30 s of reference audio; half of
the budget of large messages."""
EARLY_BYTES_UNCOUNTED: Final = 64 * 1024
"""An opening message without voices is always kept: a queue of a thousand takes 64 MB."""

_logger = logging.getLogger("antiphon.server")
VERSION: Final = version("antiphon")
"""Looked up once: it reads files."""


def now_ns() -> int:
    """The event loop's clock in nanoseconds: real time, or a test's virtual time."""
    return int(anyio.current_time() * 1e9)


@attrs.frozen(kw_only=True)
class _Arrival:
    mode: Mode
    endpoint: ev.Endpoint
    label: str
    quiet: bool
    owner: str
    must_record: bool
    refusal: ErrorCode | None


class Server:
    """All sessions of one process.

    Args:
        backend: the loaded model, or the workers that serve it.
        tasks: the nursery of model calls; it must outlive every session.
        recorder: writes the logs; None records nothing.
        telemetry: sees every session; None for none.
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
    ) -> None:
        self._settings = settings
        self.workers = backend if isinstance(backend, Workers) else Workers((backend,))
        self._tasks = tasks
        self._recorder = recorder if settings.record_to is not None else None
        self._identities = identities
        self._decode_media = decode_media
        self._telemetry = telemetry
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
        self._lane = Lane()

    @property
    def sessions(self) -> int:
        """The number of running sessions, those in the queue included."""
        return len(self._drivers)

    @property
    def slots(self) -> PoolCounts:
        """The slots by state."""
        return self._pool.counts

    def roster(self, kv_tokens: Callable[[str], int]) -> tuple[SessionStatus, ...]:
        """The running sessions, oldest first; `kv_tokens` as in `Driver.status`."""
        return tuple(driver.status(kv_tokens) for driver in self._drivers)

    def owner_of(self, recording_id: str) -> str | None:
        """The name of a running session's key; None where no such session runs."""
        found = (driver for driver in self._drivers if driver.recording_id == recording_id)
        return next((driver.owner for driver in found), None)

    async def mark(self, recording_id: str, fields: Fields) -> tuple[int, int]:
        """Write a mark into a running session's log; raises `MarkRefused` as `Driver.mark` does."""
        for driver in self._drivers:
            if driver.recording_id == recording_id:
                return await driver.mark(fields)
        raise MarkRefused("over")

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
        mode: Mode,
        *,
        endpoint: ev.Endpoint = "realtime",
        label: str = "",
        quiet: bool = False,
        owner: str = "",
        must_record: bool = False,
        refusal: ErrorCode | None = None,
    ) -> EndReason | None:
        """Run one session to its end; return its reason, or None where it was broken off.

        Only cancellation is raised.

        Args:
            websocket: open, accepted; it is closed in every case.
            label: the client's name for the session.
            quiet: with a slot free, nothing is sent about the queue.
            owner: the name of the session's key; empty where the server has no keys.
            must_record: the client cannot opt out of the recording.
            refusal: the code with which it is refused a slot; None: it may have one.
        """
        identity = self._identities.draw()
        arrival = _Arrival(
            mode=mode,
            endpoint=endpoint,
            label=label,
            quiet=quiet,
            owner=owner,
            must_record=must_record,
            refusal=refusal,
        )
        driver = self._make_driver(identity, arrival)
        connection = Connection(
            websocket,
            on_frame=driver.frame_received,
            on_gone=lambda: driver.post(ev.PeerGone(at_ns=driver.now_ns())),
            on_send_failed=lambda: driver.post(ev.SendFailed(at_ns=driver.now_ns())),
            stall_s=self._settings.stall_s,
        )
        self._drivers[driver] = None
        try:
            with bound_session(identity.recording_id):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(connection.run)
                    await driver.run(connection)
        except Exception:
            _logger.exception("session %s broke", identity.recording_id)
        finally:
            del self._drivers[driver]
            if not self._drivers:
                self._nobody_left.set()
        if driver.session is None:
            return None
        if driver.session.end_reason == "refused" and not self._settings.record_refused:
            await self._forget(driver.session, identity.recording_id)
        return driver.session.end_reason

    async def _forget(self, session: Session, recording_id: str) -> None:
        """Remove the log of a refused session, unless its client had sent content before."""
        folder, counts = self._settings.record_to, session.counts
        if self._recorder is None or folder is None or counts["appends"] or counts.get("turns"):
            return
        with suppress(OSError):  # it failed, or retention removed it first
            await anyio.to_thread.run_sync(Store(folder).path(recording_id).unlink)

    def _has_room(self, frame_bytes: int) -> bool:
        """Whether a frame that comes early may be kept with the others."""
        if frame_bytes <= EARLY_BYTES_UNCOUNTED:
            return True
        sessions = (driver.session for driver in self._drivers)
        kept = sum(session.early_bytes or 0 for session in sessions if session is not None)
        return kept + frame_bytes <= EARLY_SUM_BYTES_MAX

    def _has_place(self) -> ErrorCode | None:
        """Whether a new chat, already among the drivers, has room."""
        if self.admission.state != "open":
            return ErrorCode.SERVICE_UNAVAILABLE
        chats_max = self._settings.chats_max
        if len(self._drivers) <= chats_max:
            return None
        is_full = sum(driver.is_chat for driver in self._drivers) > chats_max
        return ErrorCode.QUEUE_FULL if is_full else None

    def _make_driver(self, identity: Identity, arrival: _Arrival) -> Driver:
        settings, info = self._settings, self.workers.info
        is_recorded = self._recorder is not None
        watcher: Watcher | None = None
        opened = ev.ConnectionOpened(
            recording_id=identity.recording_id,
            created_ms=identity.created_ms,
            mode=arrival.mode,
            seed=identity.seed,
            limits=ev.SessionLimits(
                session_s=settings.limit_s(arrival.mode),
                init_wait_s=settings.init_wait_s,
                cleanup_wait_s=settings.cleanup_wait_s,
                context_tokens=info.context_limit,
                sliding_windows=info.sliding_windows,
                can_rollback=info.can_rollback,
                close_on_recording_failure=settings.on_recording_failure == "close",
                idle_s=settings.idle_s,
                pause_s=settings.pause_s,
                call_wait_s=TURN_WAIT_S if arrival.mode == "chat" else CALL_WAIT_S,
                **self._rebuild_limits(arrival.mode),
                **self._transcription_limits(arrival.mode),
            ),
            recording="on" if is_recorded else "off",
            endpoint=arrival.endpoint,
            label=arrival.label,
            behaviour=NEWEST,
            quiet=arrival.quiet,
            must_record=(settings.record_always or arrival.must_record) and is_recorded,
            recording_notice=settings.recording_notice or "",
        )
        if self._telemetry is not None:
            watcher = self._telemetry.watch(opened, arrival.owner)
        return Driver(
            opened,
            open_log=None
            if self._recorder is None
            else partial(self._open_log, opened, arrival.owner),
            admission=self.admission,
            make_calls=lambda inbox: Calls(
                workers=self.workers,
                admission=self.admission,
                inbox=inbox,
                tasks=self._tasks,
                rebuilds_exactly=settings.rebuild == "exact"
                or (settings.rebuild == "auto" and info.deterministic),
            ),
            decode_media=self._decode_media,
            clock_ns=now_ns,
            lane=self._lane,
            admit=self._has_place,
            has_room=self._has_room,
            owner=arrival.owner,
            refusal=arrival.refusal,
            watcher=watcher,
        )

    def _rebuild_limits(self, mode: Mode) -> Mapping[str, Any]:
        """The limits of a session that outlives its worker; none if it ends with it."""
        info = self.workers.info
        is_unit = OF_MODE[mode].work == "unit"
        if self._settings.on_worker_loss == "close" or (is_unit and not info.can_rebuild):
            return {}
        return {
            "rebuild_wait_s": REBUILD_WAIT_S,
            "rebuild_units": REBUILD_UNITS_MAX,
            "can_repeat": info.deterministic,
        }

    def _transcription_limits(self, mode: Mode) -> Mapping[str, Any]:
        """The limits of a transcription; none for another mode."""
        if mode != "transcription":
            return {}
        names = (self.workers.info.name, *self._settings.served_model_names)
        return {
            "models": tuple(dict.fromkeys(names)),
            "sound_bytes": self._settings.transcription_buffer_mb * MIB,
        }

    def _open_log(
        self, opened: ev.ConnectionOpened, owner: str, on_failure: Callable[[LogFailed], None]
    ) -> SessionLog:
        assert self._recorder is not None
        assert self._settings.record_to is not None
        info = self.workers.info
        fields: Fields = {
            "recording_id": opened.recording_id,
            "session_id": session_id_of(opened.recording_id),
            "schema": SCHEMA,
            "software": {"antiphon": VERSION},
            "config": {
                "model": self._settings.model,
                "mode": opened.mode,
                "durability": self._settings.durability,
                "deterministic": info.deterministic,
                **({"owner": owner} if owner else {}),
            },
            "fingerprint": dict(info.fingerprint),
            "seed": opened.seed,
            "wall_ms": opened.created_ms,
            "parent": None,
        }
        path = Store(self._settings.record_to).path(opened.recording_id)
        return self._recorder.open(path, fields, at_ns=0, on_failure=on_failure)

    # -- the life of the server -----------------------------------------------------------------

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
        for driver in self._drivers:
            driver.post(ev.DrainBegan(at_ns=driver.now_ns(), wait_s=wait_s))

    def drain(self) -> None:
        """Stop admitting, and end every session with `server_shutdown`."""
        self.admission.drain()
        for driver in self._drivers:
            driver.post(ev.Draining(at_ns=driver.now_ns()))

    async def wait_until_empty(self) -> None:
        """Wait until no session is left; late ones are refused and leave."""
        while self._drivers:
            self._nobody_left = anyio.Event()
            await self._nobody_left.wait()
