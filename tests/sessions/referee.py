"""An independent judge of a session: it watches events and effects and knows the rules B1-B11.

It shares no code with the machine: it re-chunks audio by itself, counts calls by itself, and reads
what was sent as a client would. It works on a live session and on a recorded one alike.

Each rule is a method `rule_*`; `RULES` lists them, so that a test can take one away and see that
nothing else catches what it catches.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

import attrs
import pybase64

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.errors import ADMISSION_ERRORS, CLOSE_NORMAL, ErrorCode
from protocol.values.limits import UNIT_FAILURES_MAX, UNITS_PENDING_MAX
from protocol.values.model import UNIT_BYTES, Unit

Body = dict[str, Any]
OUTCOMES: Final = {"listen", "text", "audio", "response.listen", "response.output_audio.delta"}
ENDINGS: Final = (ef.Close,)
CALLS: Final = (ef.OpenBackend, ef.StartUnit, ef.StartFinalize, ef.Rollback, ef.Rebuild)
LEFT_OUT: Final = ("a video frame was left out: ", "video frames were left out: ")
"""An append whose error begins so has lost pictures, and keeps its sound."""


@attrs.define
class Trace:
    """What has happened so far, before the step that is being judged.

    Attributes:
        state: derived from what was sent alone.
        call: the model call under way, as `(name, index)`.
        audio: what appends have brought.
        forced_bytes: everything before this position must listen.
        taken: ordinals of units that were started or dropped.
        withheld: the running unit was interrupted.
        frozen: no unit may start any more: a finalize or rollback failed.
        deferred: finalize comes after the send; the test says which it has asked for.
        lost: the unit that ran when its worker was lost: it starts again, and has no other unit
            before it.
        moving: the slot was lost, and the model is not back.
        may_wait: units that may wait, since the session moved.
        owed: an outcome was held for a finalize that was lost.
        numbered: the client asked for a session that can be resumed.
        detached: it is away, and may come back.
        grace: the timer that takes the slot of a client that is away.
        sends: frames sent so far.
        received: messages of the client so far.
        tells_listens: the client is told of a unit that listens.
        tells_end: it is told of the session's end, and why.
    """

    state: str = "QUEUED"
    created: bool = False
    closed_sent: bool = False
    call: tuple[str, int] | None = None
    lease: int = 0
    leases: int = 0
    releases: int = 0
    waits: bool = True
    audio: bytes = b""
    forced_bytes: int = 0
    taken: set[int] = attrs.Factory(set)
    started: int = 0
    outcomes: set[int] = attrs.Factory(set)
    withheld: bool = False
    failures: int = 0
    frozen: bool = False
    deferred: bool = True
    can_rollback: bool = True
    cleanup_fired: bool = False
    ordinal: int = 0
    limits: Any = None
    recorded: bool = False
    lost: Unit | None = None
    running: Unit | None = None
    again: set[int] = attrs.Factory(set)
    moving: bool = False
    may_wait: int = UNITS_PENDING_MAX
    revoked: bool = False
    numbered: bool = False
    detached: bool = False
    grace: int | None = None
    sends: int = 0
    received: int = 0
    tells_listens: bool = True
    tells_end: bool = True


@attrs.define
class Step:
    """One step: what came in, what went out, and what was sent, parsed."""

    event: ev.Event
    effects: Sequence[ef.Effect]
    sent: list[Body]

    def of(self, kind: type[Any]) -> list[Any]:
        """The effects of one class."""
        return [effect for effect in self.effects if isinstance(effect, kind)]

    @property
    def outcomes(self) -> list[Body]:
        """What was sent of a unit's outcome."""
        return [body for body in self.sent if body.get("kind", body["type"]) in OUTCOMES]

    @property
    def errors(self) -> list[str]:
        """The codes of the errors that were sent."""
        return [body["error"]["code"] for body in self.sent if body["type"] == "error"]

    @property
    def is_refused(self) -> bool:
        """An error was sent that costs a message more than its pictures."""
        told = [body["error"].get("message", "") for body in self.sent if body["type"] == "error"]
        return not all(text.startswith(LEFT_OUT) for text in told)

    @property
    def completed(self) -> tuple[str, int] | None:
        """The model call whose end this event tells."""
        event = self.event
        match event:
            case ev.UnitDone():
                return ("unit", event.result.index)
            case ev.UnitFailed():
                return ("unit", event.index)
            case ev.FinalizeDone():
                return ("finalize", event.finalized.index)
            case ev.FinalizeFailed():
                return ("finalize", event.index)
            case ev.RollbackDone() | ev.RollbackFailed():
                return ("rollback", event.index)
            case ev.BackendOpened() | ev.BackendOpenFailed():
                return ("open", event.lease)
            case ev.Rebuilt() | ev.RebuildFailed():
                return ("rebuild", event.lease)
        return None


class Referee:
    """Watches one session and keeps what it did wrong.

    Args:
        without: names of rules to leave out, for testing the referee itself.
    """

    def __init__(self, without: Iterable[str] = ()) -> None:
        self.violations: list[str] = []
        self.trace = Trace()
        self._rules = [rule for name, rule in RULES.items() if name not in set(without)]

    def observe(self, event: ev.Event, effects: Sequence[ef.Effect]) -> None:
        """Judge one step, then remember it."""
        sent = [json.loads(effect.frame) for effect in effects if isinstance(effect, ef.Send)]
        step = Step(event, effects, sent)
        self._take_event(step)
        for rule in self._rules:
            problem = rule(self.trace, step)
            if problem:
                self.violations.append(f"{rule.__name__.removeprefix('rule_')}: {problem}")
        self._take_effects(step)

    def finish(self) -> None:
        """Judge what must be true at the end (B5)."""
        if self.trace.leases != self.trace.releases:
            self.violations.append("b5: a slot did not come back")

    def _take_event(self, step: Step) -> None:
        """Take in what an event changes before the effects are judged."""
        trace, event = self.trace, step.event
        due = trace.call is not None and step.completed == trace.call
        if due:
            trace.call = None
            failed = ev.FinalizeFailed | ev.RollbackFailed | ev.RebuildFailed
            trace.frozen |= isinstance(event, failed)
            if isinstance(event, ev.Rebuilt | ev.BackendOpened):
                trace.moving = False
        if isinstance(event, ev.BackendLost) and event.lease == trace.lease:
            self._lose(trace)
        if isinstance(event, ev.LeaseRevoked) and event.lease == trace.lease:
            trace.revoked = trace.recorded
            trace.may_wait = max(trace.limits.rebuild_units, UNITS_PENDING_MAX)
        if isinstance(event, ev.ConnectionOpened):
            trace.can_rollback = event.limits.can_rollback
            trace.limits, trace.recorded = event.limits, event.recording == "on"
            trace.numbered = bool(event.resume_hash)
        if isinstance(event, ev.RecordingFailed):
            trace.recorded = False
        if isinstance(event, ev.SlotLeased):
            trace.moving = trace.moving and trace.created
            trace.leases, trace.lease = trace.leases + 1, event.lease
        if isinstance(event, ev.TimerFired) and event.name == "cleanup":
            trace.cleanup_fired = True
        if isinstance(event, ev.PeerAttached):
            trace.detached = False
        trace.received += isinstance(event, ev.FrameReceived) and trace.state != "CLOSED"
        taken = trace.state == "ACTIVE" and not step.is_refused and not step.of(ef.Close)
        if isinstance(event, ev.FrameReceived) and taken:
            self._take_append(event.frame)

    @staticmethod
    def _lose(trace: Trace) -> None:
        """Take in the loss of the worker, with the call that was under way."""
        assert trace.limits is not None
        if trace.call is not None and trace.call[0] == "unit":
            trace.lost = trace.running
        trace.call = None
        if trace.recorded and trace.limits.rebuild_wait_s:
            trace.moving = True
            trace.may_wait = max(trace.limits.rebuild_units, UNITS_PENDING_MAX)
        else:
            trace.frozen = True

    def _take_append(self, frame: str | bytes | None) -> None:
        body = _json(frame)
        if body.get("type") not in ("input.append", "input_audio_buffer.append"):
            return
        fields = body.get("input", body)
        self.trace.audio += pybase64.b64decode(fields["audio"])
        if fields.get("force_listen"):
            units = -(-len(self.trace.audio) // UNIT_BYTES)
            self.trace.forced_bytes = units * UNIT_BYTES

    def _take_effects(self, step: Step) -> None:
        trace = self.trace
        is_over = _is_over(trace, step)
        leaves = isinstance(step.event, ev.PeerGone | ev.SendFailed) and not is_over
        trace.detached = trace.detached or (leaves and trace.state != "CLOSED")
        trace.state = _state_after(trace.state, step, is_over=is_over)
        trace.sends += len(step.sent)
        trace.created |= any(body["type"] == "session.created" for body in step.sent)
        trace.closed_sent |= any(body["type"] == "session.closed" for body in step.sent)
        trace.releases += len(step.of(ef.Release))
        if isinstance(step.event, ev.UnitFailed) and step.of(ef.Rollback):
            trace.failures += 1
        for effect in step.effects:
            match effect:
                case ef.OpenBackend():
                    trace.call = ("open", effect.lease)
                case ef.Rebuild():
                    trace.call = ("rebuild", effect.lease)
                case ef.Release() if trace.state != "CLOSED" and trace.created:
                    trace.moving, trace.revoked = True, False
                    trace.may_wait = max(trace.limits.rebuild_units, UNITS_PENDING_MAX)
                case ef.StartUnit() if trace.lost is not None:
                    trace.call = ("unit", effect.unit.index)
                    trace.again.add(effect.unit.index)
                    trace.lost, trace.running, trace.withheld = None, effect.unit, False
                case ef.StartUnit():
                    trace.call = ("unit", effect.unit.index)
                    trace.ordinal = _next_ordinal(trace)
                    trace.taken.add(trace.ordinal)
                    trace.running = effect.unit
                    trace.started, trace.withheld = trace.started + 1, False
                case ef.SetTimer(name="detach"):
                    trace.grace = effect.generation
                case ef.DropUnit():
                    trace.taken.add(effect.ordinal)
                case ef.Interrupt():
                    trace.withheld = True
                case ef.StartFinalize():
                    trace.call = ("finalize", effect.index)
                    trace.failures = 0
                case ef.Rollback():
                    trace.call = ("rollback", effect.index)
                case _:
                    pass
        waiting = len(trace.audio) // UNIT_BYTES - len(trace.taken)
        if waiting <= UNITS_PENDING_MAX and not (trace.moving or trace.revoked):
            trace.may_wait = UNITS_PENDING_MAX


def _json(frame: str | bytes | None) -> Body:
    try:
        body = json.loads(frame or "")
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def _next_ordinal(trace: Trace) -> int:
    return next(n for n in range(len(trace.taken) + 1) if n not in trace.taken)


def _is_over(trace: Trace, step: Step) -> bool:
    """Whether a session is over without a word: its client is gone, and nobody may come back."""
    event, can_return = step.event, trace.numbered and trace.recorded
    match event:
        case ev.PeerGone() | ev.SendFailed():
            is_final = isinstance(event, ev.PeerGone) and event.code == CLOSE_NORMAL
            return not can_return or trace.detached or is_final
        case ev.TimerFired(name="detach", generation=generation) if generation == trace.grace:
            may_sleep = trace.state == "ACTIVE" and trace.limits.rebuild_wait_s
            return trace.detached and not may_sleep
    return trace.detached and trace.numbered and not trace.recorded


def _state_after(state: str, step: Step, *, is_over: bool) -> str:
    """Say where a session stands, from what it sent alone (000, State Machine)."""
    for body in step.sent:
        state = {"session.queue_done": "CONNECTED", "session.created": "ACTIVE"}.get(
            body["type"], state
        )
    return "CLOSED" if step.of(ef.Close) or is_over else state


# -- the rules: each returns what is wrong, or None ------------------------------------------------


def rule_silence(trace: Trace, step: Step) -> str | None:
    """Nothing is sent once CLOSED, one `session.closed` at most, and that one last."""
    types = [body["type"] for body in step.sent]
    if isinstance(step.event, ev.PeerAttached):
        return f"{types} to a client that came back" if types else None
    if trace.state == "CLOSED" and (types or step.of(ef.Close)):
        return f"{types} after the end"
    if "session.closed" in types and types[-1] != "session.closed":
        return "something follows session.closed"
    if types.count("session.closed") > 1 or (trace.closed_sent and "session.closed" in types):
        return "session.closed twice"
    return None


def rule_farewell(trace: Trace, step: Step) -> str | None:
    """`session.closed` precedes our close exactly where there was a `session.created`."""
    said = any(body["type"] == "session.closed" for body in step.sent)
    comes_late = isinstance(step.event, ev.PeerAttached) and trace.state == "CLOSED"
    is_due = trace.created and trace.tells_end
    if step.of(ef.Close) and not comes_late and said is not is_due:
        return f"closed with session.closed={said}, created={trace.created}"
    return None


def rule_numbers(trace: Trace, step: Step) -> str | None:
    """Frames are numbered without a gap, and say how much of the client has come."""
    for number, (send, body) in enumerate(zip(step.of(ef.Send), step.sent, strict=True)):
        told, wanted = (body.get("seq"), body.get("ack")), (None, None)
        if trace.numbered:
            wanted = (trace.sends + number, trace.received)
            if send.ordinal != wanted[0]:
                return f"frame {send.ordinal} in place of {wanted[0]}"
        if told != wanted:
            return f"seq and ack are {told} in place of {wanted}"
    return None


def rule_return(trace: Trace, step: Step) -> str | None:
    """Who comes back is greeted first, once, and gets the frames from its last one on."""
    attached = step.of(ef.Attach)
    if not isinstance(step.event, ev.PeerAttached | ev.ConnectionOpened):
        return "a greeting out of place" if attached else None
    if not (isinstance(step.event, ev.PeerAttached) or trace.numbered):
        return "a greeting that was not asked for" if attached else None
    if len(attached) != 1 or not isinstance(step.effects[0], ef.Attach | ef.CancelTimer):
        return f"{len(attached)} greetings"
    if isinstance(step.event, ev.PeerAttached) and attached[0].after != step.event.after:
        return "frames from another one on"
    return None if attached[0].before == trace.sends else "frames up to another one"


def rule_codes(trace: Trace, step: Step) -> str | None:
    """Every error has a documented code; admission's, and only those, close with 1013."""
    unknown = set(step.errors) - {code.value for code in ErrorCode}
    if unknown:
        return f"undocumented codes {unknown}"
    refused = any(code in ADMISSION_ERRORS for code in step.errors)
    closed_1013 = any(close.code == 1013 for close in step.of(ef.Close))
    return None if refused is closed_1013 else f"{step.errors} and 1013={closed_1013}"


def rule_b1(trace: Trace, step: Step) -> str | None:
    """No prefill before the last unit is finalized or undone, and never two calls at once."""
    calls = [effect for effect in step.effects if isinstance(effect, CALLS)]
    if calls and (trace.call is not None or len(calls) > 1):
        return f"{calls} while {trace.call} is under way"
    if step.of(ef.StartUnit) and trace.frozen:
        return "a unit on a broken state"
    if step.of(ef.StartUnit) and isinstance(step.event, ev.UnitDone | ev.UnitFailed):
        return "a unit starts where one has just ended"
    return None


def rule_b2(trace: Trace, step: Step) -> str | None:
    """Deferred, finalize follows the send in the same step; not deferred, the send waits for it."""
    finalizes = step.of(ef.StartFinalize)
    if not finalizes:
        return None
    if not trace.deferred:
        return "sent before its finalize" if step.outcomes else None
    if not step.outcomes and not trace.tells_listens:
        return None
    order = [type(effect) for effect in step.effects]
    if not step.outcomes or order.index(ef.StartFinalize) < order.index(ef.Send):
        return "finalize does not follow the send"
    return None


def rule_b3(trace: Trace, step: Step) -> str | None:
    """A failed unit is undone and told, until there have been too many."""
    event = step.event
    due = isinstance(event, ev.UnitFailed) and trace.call is None and trace.state == "ACTIVE"
    if not (due and isinstance(event, ev.UnitFailed) and event.index == trace.started - 1):
        return None
    if step.of(ef.Close):
        allowed = event.context_full or not trace.can_rollback
        allowed = allowed or trace.failures + 1 >= UNIT_FAILURES_MAX
        return None if allowed else "one failure ended the session"
    told = step.errors == ["inference_error"]
    if not step.of(ef.Rollback) and not told:
        return None  # stale: it was not in flight
    return None if told and step.of(ef.Rollback) else "a failure neither undone nor told"


def rule_b4(trace: Trace, step: Step) -> str | None:
    """The slot is not given back while a call is under way, unless it hangs."""
    for release in step.of(ef.Release):
        if trace.call is not None and not (release.condemn and trace.cleanup_fired):
            return f"released while {trace.call} is under way"
    return None


def rule_b5(trace: Trace, step: Step) -> str | None:
    """A slot goes back once."""
    if trace.releases + len(step.of(ef.Release)) > trace.leases:
        return "released more than was leased"
    return None


def rule_b6(trace: Trace, step: Step) -> str | None:
    """`force_listen` cuts what runs at once and forces all up to its own unit."""
    for start in step.of(ef.StartUnit):
        again = trace.lost is not None and trace.lost.index == start.unit.index
        begin = (trace.ordinal if again else _next_ordinal(trace)) * UNIT_BYTES
        if begin < trace.forced_bytes and not start.unit.force_listen:
            return f"unit {start.unit.index} is not forced"
    forced = isinstance(step.event, ev.FrameReceived) and '"force_listen": true' in str(
        step.event.frame
    )
    if forced and trace.state == "ACTIVE" and not step.is_refused and not trace.withheld:
        running = trace.call is not None and trace.call[0] == "unit"
        if running and not step.of(ef.Interrupt):
            return "what runs is not cut"
    speaks = any(
        body.get("kind", body["type"]) not in ("listen", "response.listen")
        for body in step.outcomes
    )
    if trace.withheld and isinstance(step.event, ev.UnitDone) and speaks:
        return "an interrupted unit speaks"
    return None


def rule_b7(trace: Trace, step: Step) -> str | None:
    """Five units wait at most; the oldest goes; and units are exact seconds of the input."""
    taken = set(trace.taken)
    for effect in step.effects:
        is_start = isinstance(effect, ef.StartUnit)
        if isinstance(effect, ef.DropUnit) or (is_start and trace.lost is None):
            oldest = next(n for n in range(len(taken) + 1) if n not in taken)
            if isinstance(effect, ef.DropUnit) and effect.ordinal != oldest:
                return f"second {effect.ordinal} dropped, {oldest} is older"
            taken.add(oldest)
            if isinstance(effect, ef.StartUnit) and not _is_second(trace, effect.unit, oldest):
                return f"unit {effect.unit.index} is not second {oldest} of the input"
    waiting = len(trace.audio) // UNIT_BYTES - len(taken)
    return f"{waiting} units wait" if waiting > trace.may_wait else None


def _is_second(trace: Trace, unit: Unit, ordinal: int) -> bool:
    begin = ordinal * UNIT_BYTES
    return unit.pcm == trace.audio[begin : begin + UNIT_BYTES] and len(unit.pcm) == UNIT_BYTES


def rule_b9(trace: Trace, step: Step) -> str | None:
    """Indices count up, and a unit has one outcome: when it is done, or finalized."""
    for start in step.of(ef.StartUnit):
        if trace.lost is None and start.unit.index != trace.started:
            return f"unit {start.unit.index} after {trace.started} started"
    listens = sum(
        body.get("kind", body["type"]) in ("listen", "response.listen") for body in step.outcomes
    )
    if step.outcomes and listens not in (0, len(step.outcomes)):
        return "listen and speech at once"
    kinds = [body.get("kind", body["type"]) for body in step.outcomes]
    if len(kinds) > len(set(kinds)):
        return "two outcomes of a unit"
    told = bool(step.outcomes)
    if told and not isinstance(step.event, ev.UnitDone | ev.FinalizeDone | ev.Rebuilt):
        return f"an outcome at {type(step.event).__name__}"
    if step.of(ef.StartFinalize) and trace.deferred and not told and trace.tells_listens:
        return "a unit without an outcome"
    return None


def rule_b10(trace: Trace, step: Step) -> str | None:
    """A unit that does not fit ends the session, with that reason."""
    event = step.event
    full = isinstance(event, ev.UnitFailed) and event.context_full
    if full and step.completed is not None and step.sent and trace.tells_end:
        reasons = [body.get("reason") for body in step.sent]
        return None if "context_full" in reasons else f"{reasons}"
    return None


def rule_b11(trace: Trace, step: Step) -> str | None:
    """A session that lost its worker has its past before it goes on, and says nothing meanwhile."""
    for rebuild in step.of(ef.Rebuild):
        if rebuild.lease != trace.lease or not isinstance(step.event, ev.SlotLeased):
            return "a rebuild on another lease than its own"
        if not trace.recorded:
            return "a rebuild without a log"
    if trace.moving and step.of(ef.StartUnit):
        return "a unit before the model is back"
    queue = {"session.queued", "session.queue_update", "session.queue_done"}
    if trace.moving and queue & {body["type"] for body in step.sent}:
        return "the client hears of the queue again"
    for start in step.of(ef.StartUnit):
        lost = trace.lost
        if lost is None:
            continue
        forced = attrs.evolve(lost, force_listen=start.unit.force_listen)
        if start.unit != forced or (lost.force_listen and not start.unit.force_listen):
            return f"unit {start.unit.index} in place of {lost.index}, which was lost"
        if trace.withheld and not start.unit.force_listen:
            return "a unit that was being cut may speak"
        if lost.index in trace.again:
            return f"unit {lost.index} a third time"
    return None


RULES: Final = {
    name.removeprefix("rule_"): rule
    for name, rule in list(globals().items())
    if name.startswith("rule_")
}
