"""Sessions that lost their server, read from their logs to go on where they were.

The log is stepped to its end, so the machine is where it was. What the old server had begun is in
the effects: timers that are set, a place in the queue, media in the decoder. They are performed
again. Its model is lost with its worker (`BackendLost`, or `LeaseRevoked` where no call was in
progress), its client with the connection (`PeerGone`), so the session moves to a new slot as one
that lost both. Nothing is new to the machine, and no second log is needed: this one is cut after
its last whole block, and goes on.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import anyio
import attrs

from protocol.machine.session import Session
from protocol.machine.unit_loop import Phase
from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.errors import CLOSE_NORMAL, CLOSE_RESTART
from protocol.values.limits import NS_PER_S
from protocol.values.state import State
from recorder.format.errors import LogDamaged
from recorder.format.mapping import EVENT_KINDS, SCHEMA, Hashes, event_of
from recorder.format.records import Fields, Record, Value
from recorder.format.steps import step_records
from recorder.keep.store import Store
from recorder.read.ending import RESTARTED, end_of
from recorder.read.reader import read
from recorder.write.logfile import LogFile
from recorder.write.writer import Recorder

from ..telemetry.watching import Watcher
from .again import Places
from .ended import Ended
from .journal import Journal
from .peer import NO_TOKEN, Tokens

_logger = logging.getLogger("antiphon.session")
_TX: Final = "tx"
BEGIN_S: Final = 5.0
"""One that cannot ask for a slot by then keeps the others from theirs no longer."""
LOOK_S: Final = 0.01


class Begins(Protocol):
    """What steps a session that was taken up; `is_idle`: all that it lost is stepped."""

    @property
    def is_idle(self) -> bool:
        """As above."""
        ...


class Outstanding:
    """What a session's effects began and no event has ended yet.

    Attributes:
        lease: the slot that it holds; None: none.
        close: code and reason with which its connection is closed.
    """

    def __init__(self) -> None:
        self.lease: int | None = None
        self.close = (CLOSE_NORMAL, "")
        self._timers = dict[str, ef.SetTimer]()
        self._decodes = dict[int, ef.DecodeMedia]()
        self._place: list[ef.Effect] = []
        self._release: ef.Release | None = None

    @property
    def is_releasing(self) -> bool:
        """Whether the slot is on its way back."""
        return self._release is not None

    @property
    def goes_first(self) -> bool:
        """Whether it goes on with a conversation: it holds a slot, or asked for one ahead."""
        asked = (effect for effect in self._place if isinstance(effect, ef.EnterQueue))
        return self.lease is not None or any(effect.ahead for effect in asked)

    def effects(self) -> Iterator[ef.Effect]:
        """What is to be performed again, in order."""
        if self._release is not None:
            yield self._release
        yield from self._place
        yield from self._decodes.values()
        yield from self._timers.values()

    def forget_decodes(self) -> None:
        """Decode nothing more: the session is over."""
        self._decodes.clear()

    def happened(self, event: ev.Event) -> None:
        """Take an event."""
        match event:
            case ev.SlotLeased():
                self._place, self.lease = [], event.lease
            case ev.TicketLeft() | ev.TicketCancelled() | ev.AdmissionRefused() | ev.Admitted():
                self._place = []
            case ev.MediaDecoded() | ev.MediaRejected():
                self._decodes.pop(event.media, None)
            case ev.BackendReleased():
                self.lease = self._release = None
            case ev.TimerFired():
                timer = self._timers.get(event.name)
                if timer is not None and timer.generation == event.generation:
                    del self._timers[event.name]

    def begun(self, effect: ef.Effect) -> None:
        """Take an effect."""
        match effect:
            case ef.Admit() | ef.EnterQueue() | ef.LeaveQueue():
                self._place.append(effect)
            case ef.DecodeMedia():
                self._decodes[effect.media] = effect
            case ef.CancelDecode():
                self._decodes.pop(effect.media, None)
            case ef.Release():
                self._release = effect
            case ef.SetTimer():
                self._timers[effect.name] = effect
            case ef.CancelTimer():
                self._timers.pop(effect.name, None)
            case ef.Close():
                self.close = (effect.code, effect.reason)


@attrs.frozen
class Begun:
    """The beginning of a fork; its log has the effects, which are to be performed."""

    event: ev.Forked
    effects: tuple[ef.Effect, ...]


@attrs.define(eq=False, kw_only=True)
class TakenUp:
    """A session read from its log.

    Attributes:
        opened, session: its first event, and its machine.
        owner: the name of its key; empty without one.
        at_ns: the last time in the log.
        away_ns: how long nothing was written to it, by the wall clock.
        next_seq, marks: of the log.
        token_hashes: of its client's tokens, the last first.
        places: of its frames.
        rest: records of the last step that are not in the log.
        outstanding: what is to be done again.
        file: the log, cut after its last whole block; None for a session that is over.
        first_frame: the first that is its client's; those before it are copies.
        begun: of a fork, whose client is here and which lost nothing; None for others.
    """

    path: Path
    opened: ev.ConnectionOpened
    session: Session
    owner: str
    away_ns: int
    at_ns: int = 0
    next_seq: int = 0
    marks: int = 0
    token_hashes: list[str] = attrs.Factory(list)
    places: Places = attrs.Factory(Places)
    rest: deque[tuple[str, Fields]] = attrs.Factory(deque)
    outstanding: Outstanding = attrs.Factory(Outstanding)
    file: LogFile | None = None
    first_frame: int = 0
    begun: Begun | None = None
    is_over: bool = False
    _hashes: Hashes = attrs.Factory(Hashes)

    def losses(self, now_ns: int) -> Iterator[ev.Event]:
        """What the session lost with its server; a worker only where a call was in progress.

        Else a session that no one comes back to would end with the third server, as one that kills
        its workers does.
        """
        session, lease = self.session, self.outstanding.lease
        if self.begun is not None:
            return
        if session.connection == "connected":
            yield ev.PeerGone(at_ns=now_ns, code=CLOSE_RESTART)
        if lease is None or self.outstanding.is_releasing:
            return
        is_idle = session.phase is Phase.IDLE and session.state is not State.CLOSED
        if is_idle and self.opened.limits.rebuild_wait_s > 0:
            yield ev.LeaseRevoked(at_ns=now_ns, lease=lease)
        else:
            yield ev.BackendLost(at_ns=now_ns, lease=lease)

    def ended(self, resume_s: int, now_ns: int) -> Ended:
        """What its client may hear of it after its end; `now_ns` on the server's clock."""
        return Ended.of(
            self.session,
            owner=self.owner,
            tokens=Tokens(self.token_hashes),
            path=self.path,
            first_frame=self.first_frame,
            close=self.outstanding.close,
            resume_s=resume_s,
            ended_ns=now_ns - self.away_ns,
        )

    @property
    def known_tokens(self) -> Tokens | None:
        """The tokens of its client; None for a client that has got none yet."""
        return Tokens(self.token_hashes) if self.begun is None else None

    def journal(self) -> dict[str, Any]:
        """Where its journal goes on."""
        next_seq = self.next_seq
        return {"next_seq": next_seq, "marks": self.marks, "places": self.places}

    def go_on(self, journal: Journal, at_ns: int, watcher: Watcher | None) -> Iterator[ef.Effect]:
        """Write what its log lacks, which is nothing of a fork; return what is to be performed."""
        if self.begun is None:
            journal.go_on(self.at_ns, tuple(self.rest), at_ns, RESTARTED)
            return self.outstanding.effects()
        if watcher is not None:
            watcher.saw(self.begun.event, self.begun.effects, self.session)
        return iter(self.begun.effects)

    def stepped(self, event: ev.Event, effects: tuple[ef.Effect, ...]) -> None:
        """Take a step of the machine."""
        self._follow_tokens(event)
        if isinstance(event, ev.Forked):
            self.outstanding = Outstanding()  # the rest was its parent's
            self.first_frame = self.session.counts["frames_sent"]
        self.outstanding.happened(event)
        for effect in effects:
            self.outstanding.begun(effect)
        self.rest.extend(step_records(self.session, event, effects, self._hashes))

    def take(self, record: Record) -> None:
        """Take the next record of the log; `LogDamaged` if it is not what the machine says."""
        self.at_ns, self.next_seq = record.at_ns, record.seq + 1
        if record.kind == "mark":
            self.marks += 1
        elif record.kind == "fin":
            self.is_over = True
        elif record.kind in EVENT_KINDS:
            if self.rest:
                raise LogDamaged(f"record {record.seq}: effects are missing before it")
            event = event_of(record.fields, record.at_ns)
            self.stepped(event, self.session.step(event))
        else:
            self._compare(record)

    def _compare(self, record: Record) -> None:
        kind, fields = self.rest.popleft() if self.rest else ("", {})
        is_same = kind == record.kind and fields.get("type") == record.fields.get("type")
        if not is_same or (kind in (_TX, "state") and fields != record.fields):
            raise LogDamaged(f"record {record.seq} is not what its session does")
        if kind == _TX:
            self.places.note(record.fields, record.seq)

    def _follow_tokens(self, event: ev.Event) -> None:
        """Follow what `Tokens` does: those before the last stay right until the client is heard."""
        match event:
            case ev.Forked():
                self.token_hashes = [event.resume_hash] if event.resume_hash else []
            case ev.PeerAttached():
                self.token_hashes = [event.resume_hash, *self.token_hashes[:2]]
            case ev.FrameReceived():
                del self.token_hashes[1:]


async def begin_in_turn(found: Sequence[TakenUp], begin: Callable[[TakenUp], Begins]) -> int:
    """Begin the sessions that are not over; returns their number.

    Conversations have asked for a slot before any begins that waited for its first one: it would
    take the slot of a conversation.
    """
    left = [taken for taken in found if taken.file is not None]
    begun = [begin(taken) for taken in left if taken.outstanding.goes_first]
    with anyio.move_on_after(BEGIN_S):
        while not all(it.is_idle for it in begun):  # noqa: ASYNC110 - once, before any client
            await anyio.sleep(LOOK_S)
    for taken in left:
        if not taken.outstanding.goes_first:
            begin(taken)
    return len(left)


def read_session(path: Path, away_ns: int, fingerprint: Mapping[str, Value]) -> TakenUp | None:
    """Step a log to its end; None if its session cannot be resumed.

    Raises:
        LogDamaged: it is damaged, or its session does something else now; or the model or the
            log's schema is another.
        Unreadable, LocalProtocolError: it has no head, or is of a newer version.
    """
    records = read(path)
    head, first = next(records), next(records, None)
    opened = None if first is None else event_of(first.fields, first.at_ns)
    if first is None or not isinstance(opened, ev.ConnectionOpened):
        return None
    if not opened.resume_hash and head.fields.get("parent") is None:
        return None
    if head.fields["schema"] != SCHEMA:
        raise LogDamaged("it has the schema of another version")
    if head.fields["fingerprint"] != dict(fingerprint):
        raise LogDamaged("its model was another one")
    session, effects = Session.open(opened)
    owner = _text(_fields(head.fields.get("config")).get("owner"))
    taken = TakenUp(path=path, opened=opened, session=session, owner=owner, away_ns=away_ns)
    taken.token_hashes = [opened.resume_hash]
    taken.next_seq = first.seq + 1
    taken.stepped(opened, effects)
    for record in records:
        taken.take(record)
    taken.opened = session.opened
    is_begun = taken.token_hashes[:1] != [NO_TOKEN]  # else it is a fork that was not written whole
    return taken if session.is_resumable and is_begun else None


def _fields(value: Value) -> Mapping[str, Value]:
    return value if isinstance(value, dict) else {}


def _text(value: Value) -> str:
    return value if isinstance(value, str) else ""


def take_up(
    folder: Path,
    recorder: Recorder,
    *,
    fingerprint: Mapping[str, Value],
    resume_s: int,
    sessions_max: int,
) -> list[TakenUp]:
    """Read the sessions of a folder that a client may come back to, the last used first.

    A log that has a writer is left alone, also by the next server on this folder; so is one that
    cannot be gone on with, which the server's log says. Of those that are over, clients hear the
    end. `OSError`: the folder cannot be read.
    """
    found = list[TakenUp]()
    for info in Store(folder).logs():
        away_ns = max(0, time.time_ns() - info.modified_ns)
        if away_ns > resume_s * NS_PER_S or len(found) == sessions_max:
            break
        try:
            taken = _take_up_one(recorder, info.path, away_ns, fingerprint)
        except BlockingIOError:
            continue  # another server writes it
        except Exception as error:  # whatever is in a log, it must not keep a server from starting
            text = "recording %s cannot be gone on with: %s: %s"
            _logger.warning(text, info.recording_id, type(error).__name__, error)
            continue
        if taken is not None:
            found.append(taken)
    return found


def _take_up_one(
    recorder: Recorder, path: Path, away_ns: int, fingerprint: Mapping[str, Value]
) -> TakenUp | None:
    file = recorder.reopen(path)
    try:
        taken = read_session(path, away_ns, fingerprint)
        if taken is not None and not taken.is_over:
            end = end_of(path)
            if end.next_seq != taken.next_seq:
                raise LogDamaged(f"it ends with record {end.next_seq - 1}")
            file.go_on(end)
            if taken.session.state is State.CLOSED:
                taken.outstanding.forget_decodes()
            taken.file = file
            return taken
    except BaseException:
        file.close()
        raise
    file.close()
    return taken
