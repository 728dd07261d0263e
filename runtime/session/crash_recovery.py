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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from protocol.machine.core import Phase
from protocol.machine.session import Session
from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.errors import CLOSE_NORMAL, CLOSE_RESTART
from protocol.values.limits import NS_PER_S
from protocol.values.state import State
from recorder.format.format import Fields, LogDamaged, Record, Value
from recorder.format.mapping import SCHEMA, Hashes, LoggedStep, event_of, step_records, steps
from recorder.read.reader import RESTARTED, end_of, read
from recorder.storage.store import Store
from recorder.write.files import has_failed
from recorder.write.logfile import LogFile
from recorder.write.writer import Recorder

from ..telemetry.watching import Watcher
from .journal import FrameIndex, Journal
from .peer import NO_TOKEN, EndedSession, Tokens

_logger = logging.getLogger("antiphon.session")
_TX: Final = "tx"


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
class ForkStart:
    """The beginning of a fork; its log has the effects, which are to be performed."""

    event: ev.Forked
    effects: tuple[ef.Effect, ...]


@attrs.define(eq=False, kw_only=True)
class RecoveredSession:
    """A session read from its log.

    Attributes:
        opened, session: its first event, and its machine.
        owner: the name of its key; empty without one.
        at_ns: the last time in the log.
        away_ns: how long nothing was written to it, by the wall clock.
        next_seq, marks: of the log.
        token_hashes: of its client's tokens, the last first.
        frame_index: of its frames.
        rest: records of the last step that are not in the log.
        outstanding: what is to be done again.
        file: the log, cut after its last whole block; None for a session that is over.
        first_frame: the first that is its client's; those before it are copies.
        fork: of a fork, whose client is here and which lost nothing; None for others.
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
    frame_index: FrameIndex = attrs.Factory(FrameIndex)
    rest: deque[tuple[str, Fields]] = attrs.Factory(deque)
    outstanding: Outstanding = attrs.Factory(Outstanding)
    file: LogFile | None = None
    first_frame: int = 0
    fork: ForkStart | None = None
    is_over: bool = False
    _hashes: Hashes = attrs.Factory(Hashes)

    def losses(self, now_ns: int) -> Iterator[ev.Event]:
        """What the session lost with its server; a worker only where a call was in progress.

        Else a session that no one comes back to would end with the third server, as one that kills
        its workers does.
        """
        session, lease = self.session, self.outstanding.lease
        if self.fork is not None:
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

    def ended(self, resume_s: int, now_ns: int) -> EndedSession:
        """What its client may hear of it after its end; `now_ns` on the server's clock."""
        return EndedSession.of(
            self.session,
            owner=self.owner,
            party=self.owner,
            tokens=Tokens(self.token_hashes),
            path=self.path,
            frame_index=self.frame_index,
            first_frame=self.first_frame,
            close=self.outstanding.close,
            resume_s=resume_s,
            ended_ns=now_ns - self.away_ns,
        )

    @property
    def known_tokens(self) -> Tokens | None:
        """The tokens of its client; None for a client that has got none yet."""
        return Tokens(self.token_hashes) if self.fork is None else None

    @property
    def log_so_far(self) -> dict[str, Any]:
        """Where its journal goes on."""
        return {"next_seq": self.next_seq, "marks": self.marks, "frame_index": self.frame_index}

    def go_on(self, journal: Journal, at_ns: int, watcher: Watcher | None) -> Iterator[ef.Effect]:
        """Write what its log lacks, which is nothing of a fork; return what is to be performed."""
        if self.fork is None:
            journal.go_on(self.at_ns, tuple(self.rest), at_ns, RESTARTED)
            return self.outstanding.effects()
        if watcher is not None:
            watcher.saw(self.fork.event, self.fork.effects, self.session)
        return iter(self.fork.effects)

    def stepped(self, event: ev.Event, effects: tuple[ef.Effect, ...]) -> None:
        """Take a step of the machine."""
        self._follow_tokens(event)
        if isinstance(event, ev.Forked):
            self.outstanding = Outstanding()  # what was begun before was its parent's
            self.first_frame = self.session.counts["frames_sent"]
        self.outstanding.happened(event)
        for effect in effects:
            self.outstanding.begun(effect)
        self.rest.extend(step_records(self.session, event, effects, self._hashes))

    def take(self, record: Record, step: LoggedStep | None) -> None:
        """Take the next record of the log; `LogDamaged` if it is not what the machine says."""
        self.at_ns, self.next_seq = record.at_ns, record.seq + 1
        if record.kind == "mark":
            self.marks += 1
        elif record.kind == "fin":
            self.is_over = True
        elif step is not None:
            if self.rest:
                raise LogDamaged(f"record {record.seq}: effects are missing before it")
            self.stepped(step.event, step.effects)
        else:
            self._compare(record)

    def _compare(self, record: Record) -> None:
        kind, fields = self.rest.popleft() if self.rest else ("", {})
        is_same = kind == record.kind and fields.get("type") == record.fields.get("type")
        if not is_same or (kind in (_TX, "state") and fields != record.fields):
            raise LogDamaged(f"record {record.seq} is not what its session produces")
        if kind == _TX:
            self.frame_index.note(record.fields, record.seq)

    def _follow_tokens(self, event: ev.Event) -> None:
        """Follow what `Tokens` does: those before the last stay right until the client is heard."""
        match event:
            case ev.Forked():
                self.token_hashes = [event.resume_hash] if event.resume_hash else []
            case ev.PeerAttached():
                self.token_hashes = [event.resume_hash, *self.token_hashes[:2]]
            case ev.FrameReceived():
                del self.token_hashes[1:]


def read_session(
    path: Path, away_ns: int, fingerprint: Mapping[str, Value]
) -> RecoveredSession | None:
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
        raise LogDamaged("its schema is of another version")
    if head.fields["fingerprint"] != dict(fingerprint):
        raise LogDamaged("it was recorded with another model")
    session, effects = Session.open(opened)
    config = head.fields.get("config")
    owner = config.get("owner") if isinstance(config, dict) else None
    owner = owner if isinstance(owner, str) else ""
    recovered = RecoveredSession(
        path=path, opened=opened, session=session, owner=owner, away_ns=away_ns
    )
    recovered.token_hashes = [opened.resume_hash]
    recovered.next_seq = first.seq + 1
    recovered.stepped(opened, effects)
    for record, step in steps(records, session=session):
        recovered.take(record, step)
    recovered.opened = session.opened
    is_whole = recovered.token_hashes[:1] != [NO_TOKEN]  # else a fork was not written to its end
    return recovered if session.is_resumable and is_whole else None


def recover_sessions(
    folder: Path,
    recorder: Recorder,
    *,
    fingerprint: Mapping[str, Value],
    resume_s: int,
    sessions_max: int,
) -> list[RecoveredSession]:
    """Read the sessions of a folder that a client may come back to, the last used first.

    A log that has a writer is left alone, also by the next server on this folder; so is one that
    failed, whose session went on without it or ended; and one that cannot be resumed, which
    the server's log says. Of those that are over, clients hear the
    end. `OSError`: the folder cannot be read.
    """
    found = list[RecoveredSession]()
    for info in Store(folder).logs():
        away_ns = max(0, time.time_ns() - info.modified_ns)
        if away_ns > resume_s * NS_PER_S or len(found) == sessions_max:
            break
        try:
            if has_failed(info.path):
                continue
            recovered = _recover(recorder, info.path, away_ns, fingerprint)
        except BlockingIOError:
            continue  # another server writes it
        except Exception as error:  # whatever is in a log, it must not keep a server from starting
            text = "recording %s cannot be resumed: %s: %s"
            _logger.warning(text, info.recording_id, type(error).__name__, error)
            continue
        if recovered is not None:
            found.append(recovered)
    return found


def _recover(
    recorder: Recorder, path: Path, away_ns: int, fingerprint: Mapping[str, Value]
) -> RecoveredSession | None:
    file = recorder.reopen(path)
    try:
        recovered = read_session(path, away_ns, fingerprint)
        if recovered is not None and not recovered.is_over:
            end = end_of(path)
            if end.next_seq != recovered.next_seq:
                raise LogDamaged(f"it ends with record {end.next_seq - 1}")
            file.go_on(end)
            if recovered.session.state is State.CLOSED:
                recovered.outstanding.forget_decodes()
            recovered.file = file
            return recovered
    except BaseException:
        file.close()
        raise
    file.close()
    return recovered
