"""What must be true of every session of a simulated server, watched as it runs.

`Rules` is the server's `Telemetry`: it sees each event with its effects, and keeps its own books of
leases, ends and waits. It shares no code with the machine, the pool or the queue. What it finds is
told with the moment and the session.

Held here: first in first out over all modes; one holder a slot; every limit, on the virtual clock;
nothing said after the end and one `session.closed` at most; B1-B10 by `referee` for sessions with
units, and for turns that the model is asked for one at a time, on the lease that is held, and is
never left with a call under way (B4). The digest of all that was seen is the run's name.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import Any, Final

import anyio
import attrs

from protocol.machine.session import Session
from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.model import DuplexConfig
from protocol.values.state import State
from tests.sessions.referee import Referee, Step
from tests.simulation.simulated_absence import Absence
from tests.simulation.simulated_moves import Moves
from tests.simulation.simulated_spelling import Spelling

Body = dict[str, Any]

TOLERANCE_NS: Final = 1_000_000
"""A limit is a timer on the session's own clock: only the order within a moment is open."""
RELEASE_WAIT_S: Final = 10.0
"""A release that takes longer condemns its slot (`runtime.session.calls`)."""
FIN_WAIT_S: Final = 10.0
"""A disk that takes longer to sync is not waited for (`runtime.session.journal`)."""
LAST_WORDS_S: Final = 10.0
"""Of a transcription or a session of OpenAI: so long what is due is finished after its time."""
VIOLATIONS_MAX: Final = 40
"""More would say the same again."""
S: Final = 1_000_000_000

_ANSWERS: Final = frozenset({"response.done", "error"})
"""What ends a turn of chat."""


@attrs.define(kw_only=True)
class Grant:
    """A slot that somebody was given, from a moment to another; by the clock of the simulation.

    Attributes:
        who: the session.
        lease: the lease's generation.
        slot: names the slot among all.
        place: in the order of asking; those that lost a slot are before all others.
        asked_ns: when.
        from_ns: when.
        until_ns: when it was given back; None where nobody could tell.
    """

    who: str
    lease: int
    slot: object
    place: tuple[bool, int]
    asked_ns: int
    from_ns: int
    until_ns: int | None = None


_RESULTS: Final = ('"input.tool_result"', '"function_call_output"')
"""What the frame of a tool's result has."""


class Rules:
    """All sessions of a server, watched.

    Args:
        slot_of: names the slot that a session was leased, among those of all workers.
        may_fail: whether a session's rebuild may fail, by its first event.

    Attributes:
        violations: what was wrong, in words.
        sessions: every session so far, by its recording's id.
        dropped: the clients of whom a unit was dropped.
        cancelled: the clients whose connection was cancelled by the server's own end.
        seen: what happened, counted, so that a simulation can show what it tried.
    """

    def __init__(
        self,
        slot_of: Callable[[ev.SlotLeased], object] = lambda event: event.slot,
        may_fail: Callable[[ev.ConnectionOpened], bool] = lambda _: False,
    ) -> None:
        self.slot_of, self.may_fail = slot_of, may_fail
        self.violations: list[str] = []
        self.sessions: dict[str, WatchedSession] = {}
        self.seen: Counter[str] = Counter()
        self.cancelled: set[str] = set()
        self.dropped: set[str] = set()
        self._hash = blake2b(digest_size=16)
        self._entered = 0
        self._grants: dict[int, Grant] = {}

    def watch(self, opened: ev.ConnectionOpened, owner: str) -> WatchedSession:
        """Begin to watch a session; `owner` is the number of its client."""
        session = WatchedSession(self, opened, owner)
        self.sessions[opened.recording_id] = session
        return session

    def report(self, text: str, *, who: str = "") -> None:
        """Take note of something that must not be."""
        if len(self.violations) < VIOLATIONS_MAX:
            self.violations.append(f"{anyio.current_time():.6f} s {who}: {text}")

    @property
    def moved(self) -> set[str]:
        """The clients whose session moved."""
        return {session.owner for session in self.sessions.values() if session.moves.moved}

    def note(self, *parts: object) -> None:
        """Take something into the run's name."""
        self._hash.update(repr(parts).encode())

    @property
    def name(self) -> str:
        """Names everything that happened: the same seed gives the same."""
        return self._hash.hexdigest()

    # -- the queue and the slots ----------------------------------------------------------------

    def entered(self) -> int:
        """Give somebody who asks for a slot a place in the order of asking."""
        self._entered += 1
        return self._entered

    def granted(self, grant: Grant) -> None:
        """Somebody was given a slot."""
        self._grants[grant.lease] = grant

    def judge_slots(self) -> None:
        """See, at the end, that nobody was overtaken and that no slot had two holders."""
        grants = [self._grants[lease] for lease in sorted(self._grants)]
        for before, after in pairwise(grants):
            if after.place < before.place and after.asked_ns < before.from_ns:
                when_s = before.from_ns / S
                text = f"was given a slot at {when_s:.6f} s before {after.who}, who asked earlier"
                self.report(f"FIFO: it {text}", who=before.who)
        by_slot: dict[object, list[Grant]] = {}
        for grant in grants:
            by_slot.setdefault(grant.slot, []).append(grant)
        for slot, held in by_slot.items():
            for before, after in pairwise(held):
                if before.until_ns is not None and after.from_ns < before.until_ns:
                    when_s = after.from_ns / S
                    text = f"slot {slot} is lent to {after.who} at {when_s:.6f} s, and held still"
                    self.report(f"{text} (B5)", who=before.who)

    def judge_ends(self) -> None:
        """See, at the end, that everything ended."""
        for session in self.sessions.values():
            if not session.is_over:
                self.report("it never ended", who=session.who)


@attrs.define
class _Limits:
    """The moments from which a session's limits count, in ns of its clock; None: not now."""

    session: int | None = None
    init: int | None = None
    idle: int | None = None
    pause: int | None = None
    rebuild: int | None = None
    rebuild_s: float = 0.0
    pause_s: float = 0.0


class WatchedSession:
    """One session; a `Watcher`."""

    def __init__(self, rules: Rules, opened: ev.ConnectionOpened, owner: str) -> None:
        self.opened, self.owner = opened, owner
        self.who = f"{opened.recording_id} (client {owner})"
        self._rules, self._limits = rules, _Limits()
        self._is_limited = bool(opened.limits.session_s) and opened.mode != "chat"
        if self._is_limited and opened.endpoint != "openai":  # whose time begins with its slot
            self._limits.session = 0
        self._began_ns = int(anyio.current_time() * S)
        self._referee = Referee() if opened.mode in {"video", "audio"} else None
        self._spelling = Spelling("realtime" if opened.mode == "transcription" else opened.endpoint)
        self._place, self._asked_ns = (True, 0), 0
        self._lease: Grant | None = None
        self._released_ns: int | None = None
        self._turn: int | None = None
        self._in_session = self._in_turn = False
        self._cleanup_fired = False
        self._place_of_result = "between units"
        self.ended_ns: int | None = None
        self.closed_s: float | None = None
        self.is_over = False
        self.events = 0
        self.reason: str | None = None
        self.recording_failed = False
        self.moves = Moves(opened, owner, self.report)
        self._absence = Absence(opened, self.report)

    def saw(self, event: ev.Event, effects: tuple[ef.Effect, ...], session: Session) -> None:
        """Judge a step."""
        self.events += 1
        sent = [json.loads(effect.frame) for effect in effects if isinstance(effect, ef.Send)]
        self._note(event, effects)
        self._judge_silence(event, effects, sent)
        self._judge_limits(event)
        self._judge_slot(event, effects)
        self._judge_turn(event, effects)
        self._judge_by_referee(event, effects)
        self._judge_move(event, effects)
        self._follow_rebuild(event, effects)
        self._follow_limits(event, effects, sent)
        self._follow_end(event, effects, session)
        self._follow_client(event, effects)

    def received(
        self, events: Sequence[ev.FrameReceived], _messages: object, session: Session
    ) -> None:
        """Judge steps without effects."""
        for event in events:
            self.saw(event, (), session)

    def over(self, reason: str | None) -> None:
        """See how it ended."""
        self.is_over, self.reason = True, reason
        self._rules.note(self.who, "over", reason, anyio.current_time())
        self._rules.seen[f"over {reason or 'broken off'}"] += 1
        if self.owner in self._rules.cancelled:  # nothing more is told of it
            return
        if reason is None:
            self.report("it was broken off")
        if self._lease is not None:
            self.report("over, and its slot is still held (B5)")
        if self._referee is not None:
            self._referee.finish()
            self._tell_referee()
        if self.ended_ns is not None:
            limits = self.opened.limits
            late_s = limits.cleanup_wait_s + RELEASE_WAIT_S + FIN_WAIT_S
            took_s = anyio.current_time() - (self._began_ns + self.ended_ns) / S
            if took_s > late_s + TOLERANCE_NS / S:
                self.report(f"over {took_s:.3f} s after its end, at most {late_s} s are allowed")

    def report(self, text: str) -> None:
        """Take note of something that must not be."""
        self._rules.report(text, who=self.who)

    def _note(self, event: ev.Event, effects: tuple[ef.Effect, ...]) -> None:
        frames = [effect.frame for effect in effects if isinstance(effect, ef.Send)]
        names = [type(effect).__name__ for effect in effects]
        now_s = anyio.current_time()
        self._rules.note(self.who, now_s, event.at_ns, type(event).__name__, names, frames)
        self._rules.seen[type(event).__name__] += 1
        self._rules.seen["DropUnit"] += names.count("DropUnit")
        if "DropUnit" in names:
            self._rules.dropped.add(self.owner)
        hang = any(isinstance(effect, ef.Release) and effect.condemn for effect in effects)
        self._rules.seen["condemned"] += hang
        is_fast = isinstance(event, ev.Rebuilt) and bool(event.batches)
        self._rules.seen["rebuilt fast"] += is_fast
        self._note_result(event, effects)

    def _note_result(self, event: ev.Event, effects: tuple[ef.Effect, ...]) -> None:
        """Count the results of tools by where they come."""
        match event:
            case ev.FrameReceived(frame=frame) if any(word in str(frame) for word in _RESULTS):
                place = self._place_of_result
                if self.ended_ns is not None:
                    place = "after the end"
                elif self._limits.rebuild is not None:
                    place = "after a lost worker"
                self._rules.seen[f"result {place}"] += 1
                if place == "after a resume":
                    self._place_of_result = "between units"
            case ev.PeerAttached():
                self._place_of_result = "after a resume"
            case ev.UnitDone():
                self._place_of_result = "amid a silent part"
            case ev.FinalizeDone():
                self._place_of_result = "between units"
        for effect in effects:
            if isinstance(effect, ef.StartUnit):
                self._place_of_result = "amid a unit"
            elif isinstance(effect, ef.Interrupt):
                self._place_of_result = "after an interrupt"

    # -- the rules ------------------------------------------------------------------------------

    def _judge_silence(
        self, event: ev.Event, effects: tuple[ef.Effect, ...], sent: list[Body]
    ) -> None:
        said = any(isinstance(effect, ef.Send | ef.Close) for effect in effects)
        is_late = isinstance(event, ev.PeerAttached) and not sent  # it is closed as the last one
        if said and not is_late and self.ended_ns is not None:
            self.report(f"{[body['type'] for body in sent]} after the end")
        kinds = [type(effect) for effect in effects]
        if ef.Close in kinds and ef.Send in kinds[kinds.index(ef.Close) :]:
            self.report("something is sent after the close")
        words = [body["type"] for body in sent]
        last = [word for word in words if word in ("session.closed", "stopped")]
        if len(last) > 1 or (last and words[-1] != last[0]):
            self.report(f"{words}: session.closed is the last word, and said once")

    def _judge_limits(self, event: ev.Event) -> None:
        """See that no limit has passed while the session still lives."""
        now_ns, limits, since = event.at_ns - TOLERANCE_NS, self.opened.limits, self._limits
        if self.ended_ns is not None:
            self._judge_cleanup(now_ns)
            return
        has_last_words = self.opened.mode == "transcription" or self.opened.endpoint == "openai"
        allowed_s = limits.session_s + LAST_WORDS_S * has_last_words
        if since.session is not None and now_ns > since.session + allowed_s * S:
            self.report(f"it lives after {allowed_s} s")
        for name, began_ns, allowed_s in (
            ("init", since.init, limits.init_wait_s),
            ("idle", since.idle, limits.idle_s),
            ("pause", since.pause, since.pause_s),
            ("rebuild", since.rebuild, since.rebuild_s),
        ):
            if self._absence.is_away and name in {"idle", "pause"}:
                continue
            if began_ns is not None and now_ns > began_ns + allowed_s * S:
                self.report(f"its {name} lasts more than {allowed_s} s")

    def _judge_cleanup(self, now_ns: int) -> None:
        assert self.ended_ns is not None
        if self._lease is None:
            return
        wait_s = self.opened.limits.cleanup_wait_s
        if self._released_ns is None and now_ns > self.ended_ns + wait_s * S:
            self.report(f"its slot is not given up {wait_s} s after its end (B4)")
        if self._released_ns is not None and now_ns > self._released_ns + RELEASE_WAIT_S * S:
            self.report(f"its slot is not back {RELEASE_WAIT_S} s after it was given up (B5)")

    def _judge_slot(self, event: ev.Event, effects: tuple[ef.Effect, ...]) -> None:
        if isinstance(event, ev.SlotLeased):
            if self._lease is not None:
                self.report("it has two slots (B5)")
            if self._is_limited and self._limits.session is None:
                self._limits.session = event.at_ns
            self._lease, self._released_ns = self._grant(event), None
            self._rules.granted(self._lease)
        if isinstance(event, ev.BackendReleased):
            if self._lease is None or event.lease != self._lease.lease:
                self.report(f"lease {event.lease} is back, which it does not hold (B5)")
            else:
                self._lease.until_ns = self._began_ns + event.at_ns
                self._lease = None
        for effect in effects:
            if isinstance(effect, ef.EnterQueue):
                self._place = (not effect.ahead, self._rules.entered())
                self._asked_ns = self._began_ns + event.at_ns
            if isinstance(effect, ef.Release):
                self._released_ns = event.at_ns

    def _grant(self, event: ev.SlotLeased) -> Grant:
        return Grant(
            who=self.who,
            lease=event.lease,
            slot=self._rules.slot_of(event),
            place=self._place,
            asked_ns=self._asked_ns,
            from_ns=self._began_ns + event.at_ns,
        )

    def _judge_turn(self, event: ev.Event, effects: tuple[ef.Effect, ...]) -> None:
        """See that turns run one at a time, on the lease that is held, to their end (B4)."""
        done = isinstance(event, ev.TurnDone) and event.result.index == self._turn
        failed = isinstance(event, ev.TurnFailed) and event.index == self._turn
        if done or failed or isinstance(event, ev.BackendLost):
            self._turn = None
        if isinstance(event, ev.TimerFired) and event.name == "cleanup":
            self._cleanup_fired = True
        for effect in effects:
            if isinstance(effect, ef.StartTurn):
                if self._turn is not None:
                    self.report(f"turn {effect.turn.index} begins amid turn {self._turn}")
                if self._lease is None or effect.lease != self._lease.lease:
                    self.report(f"turn {effect.turn.index} begins on a lease that is not held")
                self._turn = effect.turn.index
            if isinstance(effect, ef.Release) and self._turn is not None:
                hangs = effect.condemn and self._cleanup_fired
                if not hangs:
                    self.report(f"the slot is given up amid turn {self._turn} (B4)")

    def _judge_by_referee(self, event: ev.Event, effects: tuple[ef.Effect, ...]) -> None:
        if self._referee is None:
            return
        for effect in effects:
            if isinstance(effect, ef.OpenBackend):
                config: DuplexConfig = effect.opening.config
                self._referee.trace.deferred = config.deferred_finalize
        self._spelling.take_sound(self._referee.trace, event, effects)
        self._referee.observe(*self._spelling.of(event, effects))
        self._tell_referee()

    def _judge_move(self, event: ev.Event, effects: tuple[ef.Effect, ...]) -> None:
        """See that a session that moves goes on as if it had not (B11)."""
        if self.ended_ns is not None or self.opened.mode == "chat":
            return
        _, shown = self._spelling.of(event, effects)
        sent = [json.loads(effect.frame) for effect in shown if isinstance(effect, ef.Send)]
        may_fail = self.recording_failed or self._rules.may_fail(self.opened)
        is_answer = self._referee is not None and bool(Step(event, shown, sent).outcomes)
        if (
            self.opened.endpoint == "openai" and self.opened.mode == "audio"
        ):  # which is not told of a unit that listens
            is_answer = isinstance(event, ev.UnitDone)
        self.moves.follow(event, effects, is_answer=is_answer, may_fail=may_fail)
        is_late = isinstance(event, ev.TimerFired) and event.name == "rebuild"
        is_over = any(isinstance(effect, ef.Close) for effect in effects)
        if is_late and is_over and self._absence.is_asleep and not self.moves.is_rebuilding:
            self.report("it sleeps, and ends for want of a slot")

    def _tell_referee(self) -> None:
        assert self._referee is not None
        for violation in self._referee.violations:
            self.report(f"referee: {violation}")
        self._referee.violations.clear()

    # -- its books ------------------------------------------------------------------------------

    def _follow_limits(
        self, event: ev.Event, effects: tuple[ef.Effect, ...], sent: list[Body]
    ) -> None:
        since, now_ns = self._limits, event.at_ns
        kinds = {type(effect) for effect in effects}
        words = {body["type"] for body in sent}
        asked = isinstance(event, ev.FrameReceived) and not kinds.isdisjoint(
            {ef.OpenBackend, ef.DecodeMedia, ef.EnterQueue}
        )
        # An init that comes amid a move waits for the model.
        asked |= isinstance(event, ev.FrameReceived) and since.rebuild is not None and not words
        if words & {"session.queue_done", "queue_done"} and self.opened.endpoint != "chat":
            since.init = now_ns
        elif since.init is not None and (asked or "session.created" in words):
            since.init = None
        elif isinstance(event, ev.MediaRejected | ev.BackendOpenFailed) and "error" in words:
            since.init = now_ns if self._lease is not None and not self._in_session else None
        if words & {"session.created", "prepared"}:
            self._in_session, since.init = True, None
        self._follow_turn(event, kinds, words)
        for body in sent:
            if body["type"] == "paused":
                since.pause, since.pause_s = now_ns, body["timeout"]
            if body["type"] == "resumed":
                since.pause = None

    def _follow_rebuild(self, event: ev.Event, effects: tuple[ef.Effect, ...]) -> None:
        """Follow how long a session waits for another slot, and for its model."""
        since, wait_s = self._limits, float(self.opened.limits.rebuild_wait_s)
        is_chat = self.opened.mode == "chat"
        if isinstance(event, ev.SlotLeased | ev.Rebuilt) or self.ended_ns is not None:
            since.rebuild = None
        for effect in effects:
            if isinstance(effect, ef.EnterQueue):
                leaves = is_chat and effect.ahead
            else:  # a session that sleeps, or slept, waits as long as its client stays
                leaves = isinstance(effect, ef.Release) and not (is_chat or self._absence.is_asleep)
            if leaves:
                since.rebuild, since.rebuild_s = event.at_ns, wait_s
            if isinstance(effect, ef.LeaveQueue):
                since.rebuild = None
            if isinstance(effect, ef.Rebuild):
                since.rebuild, since.rebuild_s = event.at_ns, wait_s + self.moves.past_s

    def _follow_turn(self, event: ev.Event, kinds: set[type], words: set[str]) -> None:
        if self.opened.mode != "chat" or self.opened.endpoint == "chat":
            return
        since, now_ns = self._limits, event.at_ns
        if "session.closed" in words and self._in_turn and not words & _ANSWERS:
            self.report("it ended amid a turn, and nothing was said of the answer (B9)")
        if "session.created" in words:
            since.idle = now_ns
        if isinstance(event, ev.FrameReceived):
            if kinds & {ef.DecodeMedia, ef.EnterQueue}:
                self._in_turn, since.idle = True, None
            elif self._in_session and not self._in_turn and not words:
                since.idle = None  # a question that waits for the last one's slot
                self._in_turn = True
        elif self._in_turn and words & _ANSWERS:
            self._in_turn, since.idle = False, now_ns

    def _follow_client(self, event: ev.Event, effects: tuple[ef.Effect, ...]) -> None:
        """Follow whether the client is away, and see that a session that sleeps holds no slot."""
        if self.ended_ns is not None or not self.opened.resume_hash:
            return
        absence, since = self._absence, self._limits
        absence.follow(event, effects, TOLERANCE_NS)
        if isinstance(event, ev.PeerAttached):
            self._rules.seen["came back"] += 1
            since.idle = None if since.idle is None else event.at_ns
            since.pause = None if since.pause is None else event.at_ns
        if not absence.is_asleep:
            return
        self._rules.seen["asleep"] += isinstance(event, ev.TimerFired) and event.name == "detach"
        since.rebuild = None
        is_held = self._lease is not None and self._released_ns is None
        if is_held and self._referee is not None and self._referee.trace.call is None:
            self.report("it sleeps, and its slot is still held (B5)")

    def _follow_end(
        self, event: ev.Event, effects: tuple[ef.Effect, ...], session: Session
    ) -> None:
        closed = any(isinstance(effect, ef.Close) for effect in effects)
        if self.opened.resume_hash:
            closed |= session.state is State.CLOSED
        else:
            closed |= isinstance(event, ev.PeerGone | ev.SendFailed)
        if self.ended_ns is None and closed:
            self.ended_ns = event.at_ns
        self.recording_failed |= isinstance(event, ev.RecordingFailed)
