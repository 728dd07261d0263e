"""Run a fork: the recording's events on its own clock, through a new session and a model.

    recorded events --> client, changed --> Session --> journal --> the fork's own log
    calls of the model, timers <--answers at their recorded times--+

Time. The clock is the recording's, and nothing waits or is measured here: events come at their
recorded times, and a call takes as long as the same call did.
- External events (frames, disconnects, the queue, decoded media, a shutdown) come at their recorded
  times, answers to the session's own effects after their recorded delays. Events at the same time
  keep the order of the recording.
- So a fork without a change equals its parent, to the nanosecond, except for names that derive from
  the recording; the same fork made twice is identical.
- A call that the recording does not have takes the median time of its kind.
- A call without an answer, in a session that ended anyway, hung: it hangs again. If the recording
  itself breaks off, its answer counts as coming after the end.
- The fork ends where the recording ends: if its session has not ended by then, its client leaves.

The model's calls are made as on a server.
- Before the fork's unit the model must reach the state of the recording. It gets the recorded
  inputs, with forced decoding if it supports it (`runtime.model.backends.base`): differences
  from its own decisions are noted, and the recorded decisions are used. Without forced decoding it
  decides itself, and must produce the recorded results.
- An interrupted unit is cut where the recording cut it. A new interruption comes after the unit's
  last step: the unit is complete, and its result is not sent (B6).
- A unit that failed in the recording fails again, without the model: the environment caused it. A
  prompt or a unit that did not fit the context is an answer of the model, and requested again.
- A failure of the model becomes the same event as on a server; one that loses the session there
  ends the fork.

The log is a server's journal, and names its parent. The parent's annotations are not copied. The
errors:

    ForkError
     ├── ForkRefusedError    the request is invalid, or the change is not possible at that unit
     └── CannotForkError     the recording cannot be continued here: its model, or the recording

Messages name an alternative, if there is one. Rules of the client:
- An unchanged frame is passed on verbatim. A changed frame is encoded again by its own dialect,
  from its message: fields that the dialect does not know are lost.
- Sound is replaced by its position in the client's whole sound, sample by sample, so that a unit
  gets it from its first sample on, however it was split. The length stays: silence follows the new
  sound. Pictures and flags stay. What was found in the replaced sound is left out: the words that
  were said in it, and speech that begins in it. Nothing is looked for in the new one.
- A unit is forced to listen by the flag of the append that completes it, as a client does it. That
  flag interrupts the unit in flight (B6), so all earlier units must be finished; an append that
  extends beyond the unit is sent in two pieces.
- A setting is changed in the init, and must be valid for the dialect and the server.

The client sends nothing else, and nothing at another time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Final

import anyio
import attrs

from protocol.machine.core import Phase
from protocol.machine.session import Session
from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values import model as md
from protocol.values.errors import CLOSE_NORMAL, FieldError, LocalProtocolError
from protocol.values.limits import APPEND_SAMPLES_MIN, MS_PER_S
from protocol.values.model import INPUT_RATE_HZ, UNIT_SAMPLES, Costs, Cut, UnitResult
from protocol.values.requests import Append, BadPicture, Init, Request
from protocol.values.state import State
from protocol.wire.codec import parse_frame
from protocol.wire.table import Dialect
from recorder.format.format import LogDamaged, Record
from recorder.format.mapping import EVENT_KINDS, LoggedStep, event_of, fin_fields
from recorder.read.scan import Damage
from runtime.model.backends import base
from runtime.session.journal import Journal
from runtime.settings.settings import nearest

from ..rerun.difference import Difference
from ..rerun.full import RELEASE_WAIT_S, hold
from ..rerun.logic import Replayer
from ..rerun.outputs import compare_outputs
from ..story.model_calls import Call, answered, asked
from ..story.wire import Wire

# -- what a fork changes, and its client -----------------------------------------------------------


Setting = bool | int | float | str
NO_SETTINGS: Final[Mapping[str, Setting]] = MappingProxyType({})


class ForkError(Exception):
    """The fork was not made."""


class ForkRefusedError(ForkError):
    """The request is not possible for this recording."""


class CannotForkError(ForkError):
    """The recording cannot be continued here."""


@attrs.frozen(kw_only=True)
class Change:
    """The changes of a fork; None keeps the recorded value.

    Attributes:
        at: the first changed unit.
        force_listen: that unit has to listen.
        pcm: the sound from that unit on, float32 LE, 16 kHz mono, followed by silence.
        seed: of the session's random choices.
        settings: of the session's init, by name.
        model: another model's name.
    """

    at: int
    force_listen: bool = False
    pcm: bytes | None = attrs.field(default=None, repr=False)
    seed: int | None = None
    settings: Mapping[str, Setting] = NO_SETTINGS
    model: str | None = None


@attrs.frozen(kw_only=True)
class Prefix:
    """The units before the fork: the model's results compared with the recording.

    Of `units`, forced decoding changed the answers of `held`; the results of `otherwise` differ
    nevertheless. `first` is the first difference, in words.
    """

    units: int = 0
    held: int = 0
    otherwise: int = 0
    first: str | None = None


Decisions = tuple[bool, Sequence[int], Sequence[int]]
"""Of a unit: whether it listens, the ids decided, and the speech codes."""
Decided = Mapping[int, Decisions]
"""By unit."""


def decisions_of(result: md.UnitResult) -> Decisions:
    """Return the decisions in a unit's result."""
    return result.is_listen, result.decided_ids, result.codec_ids


@attrs.frozen
class Forked:
    """A fork that was made, from its `unit` on.

    Attributes:
        parent_seq: the parent's event by which the unit began: everything before it is equal.
        units: units started in it.
        prefix: the units before that one.
        ended_early: the fork was still running at the recording's end, so that its client left.
    """

    recording_id: str
    parent: str
    parent_seq: int
    unit: int
    model: str
    units: int
    prefix: Prefix
    ended_early: bool


# -- the client -----------------------------------------------------------------------------------


CONFIG_NAMES: Final = tuple(field.name for field in attrs.fields(md.DuplexConfig))
INIT_NAMES: Final = ("instructions", "max_slice_nums")
SETTING_NAMES: Final = (*INIT_NAMES, *CONFIG_NAMES)
"""The names of `--set`, those of the messages (`requests.Init`, `model.DuplexConfig`)."""


class ForkClient:
    """The client of a fork, whose unit begins at `begin_sample` of the client's sound."""

    def __init__(self, change: Change, connected: ev.ConnectionOpened, begin_sample: int) -> None:
        self._change: Final = change
        self._begin_sample: Final = begin_sample
        self._sent_samples = 0
        self._appending = (0, 0)
        self._is_changed: Final = (
            change.force_listen or change.pcm is not None or bool(change.settings)
        )
        self._wire: Final = Wire(connected)

    def frames_for(self, event: ev.FrameReceived, session: Session) -> tuple[ev.FrameReceived, ...]:
        """Return the client's frames in place of a recorded one, at its time.

        `session` is as before that frame. `ForkRefusedError`: the requested change is not possible.
        """
        self._count_sent(session)
        if not self._is_changed:
            return (event,)
        message = self._wire.request(event.frame)
        if isinstance(message, Append):
            self._appending = (len(message.pcm) // md.SAMPLE_BYTES, session.counts["appends"])
            sent = self._forced(self._sounding(message), session)
        elif isinstance(message, Init) and self._change.settings:
            return (attrs.evolve(event, frame=self._set_up(self._wire.dialect, message)),)
        if not isinstance(message, Append) or sent == (message,):
            return (event,)
        dialect = self._wire.dialect
        try:
            frames = [dialect.encode_request(_without_bad_pictures(one)) for one in sent]
        except LocalProtocolError as error:
            raise ForkRefusedError(
                "--replace-audio, --force-listen: sound can be changed in a session of realtime, "
                f"duplex-v1 or legacy-duplex, and this one is of {dialect.name}"
            ) from error
        return tuple(attrs.evolve(event, frame=frame) for frame in frames)

    # -- sound ----------------------------------------------------------------------------------

    def _count_sent(self, session: Session) -> None:
        samples, appends = self._appending
        if samples and session.counts["appends"] > appends:
            self._sent_samples += samples
        self._appending = (0, 0)

    def _sounding(self, append: Append) -> Append:
        """Replace the sound of an append, from the unit's first sample on."""
        new, samples = self._change.pcm, len(append.pcm) // md.SAMPLE_BYTES
        kept = max(0, self._begin_sample - self._sent_samples)
        if new is None or kept >= samples:
            return append
        start = max(0, self._sent_samples - self._begin_sample) * md.SAMPLE_BYTES
        wanted = (samples - kept) * md.SAMPLE_BYTES
        given = new[start : start + wanted].ljust(wanted, b"\0")
        return attrs.evolve(append, pcm=append.pcm[: kept * md.SAMPLE_BYTES] + given)

    # -- listening ------------------------------------------------------------------------------

    def _forced(self, append: Append, session: Session) -> tuple[Append, ...]:
        """Flag the append that completes the unit, and split off the sound of the next unit."""
        end = self._begin_sample + md.UNIT_SAMPLES - self._sent_samples
        samples = len(append.pcm) // md.SAMPLE_BYTES
        if not self._change.force_listen or not 0 < end <= samples:
            return (append,)
        at = self._change.at
        is_busy = session.phase not in (Phase.IDLE, Phase.OPENING)
        if end > md.UNIT_SAMPLES or session.units_waiting or is_busy:
            raise ForkRefusedError(
                f"--force-listen: the sound of unit {at} came before the model was done with what "
                "came before it, which an interruption would cut too; fork at an earlier unit"
            )
        flagged = attrs.evolve(append, force_listen=True)
        if end == samples:
            return (flagged,)
        if min(end, samples - end) < APPEND_SAMPLES_MIN:
            raise ForkRefusedError(
                f"--force-listen: unit {at} and the next share a piece of sound that is too short "
                f"to be parted: {APPEND_SAMPLES_MIN * 1000 // md.INPUT_RATE_HZ} ms are the least"
            )
        cut = end * md.SAMPLE_BYTES
        rest = attrs.evolve(append, pcm=append.pcm[cut:])
        flagged = attrs.evolve(flagged, pcm=append.pcm[:cut], frames=(), max_slice_nums=None)
        return flagged, rest  # pictures belong to the last sample

    # -- settings -------------------------------------------------------------------------------

    def _set_up(self, dialect: Dialect, recorded: Init) -> str:
        settings = self._change.settings
        config: dict[str, Any] = {n: settings[n] for n in CONFIG_NAMES if n in settings}
        own: dict[str, Any] = {n: settings[n] for n in INIT_NAMES if n in settings}
        changed = attrs.evolve(
            recorded, config=attrs.evolve(recorded.config, **config), ignored=(), **own
        )
        names = ", ".join(settings)
        try:
            frame = dialect.encode_request(changed)
            understood = dialect.parse(Request.INIT, parse_frame(frame), self._wire.context)
        except (LocalProtocolError, FieldError, TypeError) as error:
            raise ForkRefusedError(f"--set {names}: {error}") from error
        if understood != changed:
            raise ForkRefusedError(f"--set {names}: {dialect.name} cannot say it")
        return frame


def _without_bad_pictures(append: Append) -> Append:
    """Leave out the pictures that the recorded session left out: nothing is known of them."""
    good = tuple(frame for frame in append.frames if not isinstance(frame, BadPicture))
    return attrs.evolve(append, frames=good)


def read_setting(text: str) -> tuple[str, Setting]:
    """Read `NAME=VALUE`, the value JSON or text; `ForkRefusedError`: unknown, or no value."""
    name, equals, value = text.partition("=")
    if name not in SETTING_NAMES or not equals:
        known = ", ".join(SETTING_NAMES)
        raise ForkRefusedError(
            f"--set {text}: write NAME=VALUE, with one of {known}{nearest(name, SETTING_NAMES)}"
        )
    with suppress(ValueError):
        read = json.loads(value)
        if name != "instructions" and isinstance(read, bool | int | float | str):
            return name, read
    return name, value


# -- the recording's times ------------------------------------------------------------------------


_NOT_FORKED: Final[Mapping[str, str]] = {
    "chat": "a chat cannot be forked: each turn carries its whole conversation",
    "transcription": "a transcription cannot be forked: transcribe its sound again",
}
"""By mode: why not."""
LAST_SEQ: Final = 1 << 63
"""For events that the recording does not have: they follow recorded events of equal time."""


@attrs.frozen(kw_only=True)
class Answer:
    """The answer to a call, `after_ns` its request.

    Attributes:
        seq: the record that holds the answer; `LAST_SEQ` without one.
        event: the answer, if it was a failure that the environment caused; else None.
        cut: where the unit was interrupted.
        costs: the measured costs of the unit.
        cost_us: the measured cost of finalizing, or of a rebuild.
        steps: the units that a rebuild fed.
    """

    seq: int
    after_ns: int
    event: ev.Event | None = None
    cut: Cut | None = None
    costs: Costs = Costs()
    cost_us: int = 0
    steps: int = 0


class RecordedTimes:
    """The times of a recording; it is replayed, which proves that it is sound.

    `items` are its records in order, and its damage; `at` is the unit of the fork, which began by
    the event `begin_seq`, and in the client's sound at `begin_sample`; `end_ns`: its last record;
    `decided`: of each unit, what its model decided; `fired`: when each timer fired, and the record,
    by its generation and when it was due.

    Raises:
        LogDamaged: it is damaged.
        CannotForkError: it does not replay.
        ForkRefusedError: it has no such unit, or is a chat.
    """

    def __init__(self, items: Iterable[Record | Damage], at: int) -> None:
        self.at: Final = at
        self.begin_seq = -1
        self.begin_sample = self._openings = self._dropped = 0
        self._answers: dict[Call, Answer] = {}
        self._asked_ns: dict[Call, int] = {}
        self._timers: dict[int, int] = {}
        self.fired: dict[tuple[int, int], tuple[int, int]] = {}
        self.decided: dict[int, Decisions] = {}
        replayer = Replayer()
        for step in replayer.steps(items):
            self._note_answer(step)
            for effect in step.effects:
                self._note_question(step.record, effect)
        report = replayer.report()
        if report.damage_count:
            raise LogDamaged(f"a model that missed an input cannot be resumed: {report.damage[0]}")
        if report.divergence is not None:
            text = f"the recording does not replay, from record {report.divergence.seq} on"
            raise CannotForkError(f"{text} (see `antiphon replay`)")
        if replayer.session is None:
            raise CannotForkError("the recording has no session yet")
        self.end_ns, self.units = report.span_ns, report.units
        self._is_finished: Final = replayer.session.is_finished
        if self.connected.mode in _NOT_FORKED:
            raise ForkRefusedError(_NOT_FORKED[self.connected.mode])
        if self.begin_seq < 0:
            there = f"units 0 to {report.units - 1}" if report.units else "no units"
            raise ForkRefusedError(f"there is no unit {at}: the recording has {there}")

    def answer(self, call: Call) -> Answer | None:
        """Return the answer to a call; None: it never comes."""
        recorded = self._answers.get(call)
        if recorded is not None:
            return recorded
        asked_ns = self._asked_ns.get(call)
        if asked_ns is not None and self._is_finished:
            return None
        not_before_ns = 0 if asked_ns is None else self.end_ns - asked_ns
        alike = [answer for (name, _), answer in self._answers.items() if name == call[0]]
        usual = sorted((a for a in alike if a.event is None), key=lambda answer: answer.after_ns)
        if not usual:
            return Answer(seq=LAST_SEQ, after_ns=not_before_ns)
        middle = usual[(len(usual) - 1) // 2]
        after_ns = max(middle.after_ns, not_before_ns)
        return attrs.evolve(middle, seq=LAST_SEQ, after_ns=after_ns, cut=None)

    # -- requests ------------------------------------------------------------------------------

    def _note_question(self, record: Record, effect: ef.Effect) -> None:
        match effect:
            case ef.StartUnit(unit=unit) if unit.index == self.at:
                # Units start in order of arrival, and dropped units came before.
                self.begin_seq = record.seq
                self.begin_sample = (self.at + self._dropped) * UNIT_SAMPLES
            case ef.DropUnit():
                self._dropped += 1
            case ef.SetTimer():
                self._timers[effect.generation] = effect.at_ns
            case ef.OpenBackend():
                self._openings += 1
        call = numbered(asked(effect), self._openings)
        if call is not None:
            self._asked_ns[call] = record.at_ns

    def _note_answer(self, step: LoggedStep) -> None:
        event = step.event
        facts: dict[str, Any] = {}
        match event:
            case ev.ConnectionOpened():
                self.connected = event
            case ev.UnitDone(result=result):
                facts = {"cut": result.cut, "costs": result.costs}
                self.decided[result.index] = decisions_of(result)
            case ev.FinalizeDone(finalized=made):
                facts = {"cost_us": made.cost_us}
            case ev.BackendOpenFailed(context_full=False) | ev.UnitFailed(context_full=False):
                facts = {"event": event}
            case ev.Rebuilt(steps=steps, cost_us=cost_us):
                facts = {"steps": steps, "cost_us": cost_us}
            case ev.FinalizeFailed() | ev.RollbackFailed() | ev.RebuildFailed():
                facts = {"event": event}
            case ev.TimerFired(at_ns=at_ns, generation=generation) if generation in self._timers:
                due_ns = self._timers.pop(generation)
                self.fired[generation, due_ns] = (at_ns, step.record.seq)
        call = numbered(answered(event), self._openings)
        asked_ns = None if call is None else self._asked_ns.get(call)
        if call is not None and asked_ns is not None and call not in self._answers:
            after_ns = step.record.at_ns - asked_ns
            self._answers[call] = Answer(seq=step.record.seq, after_ns=after_ns, **facts)


def numbered(call: Call | None, openings: int) -> Call | None:
    """Number an opening by how often it was asked for by then: a lease may be opened again."""
    return call if call is None or call[0] != "open" else ("open", openings)


# -- the model ------------------------------------------------------------------------------------


CALL_S_MAX: Final = 600
"""A model that needs ten minutes for a second of sound will not finish a session."""

Place = tuple[int, int]
"""The time of an event: nanoseconds, then the recording's order for equal times."""


@attrs.frozen(kw_only=True)
class PendingCall:
    """A call that the session asked for, or a timer that it set, and the place of its answer."""

    place: Place
    effect: ef.Effect
    answer: Answer | None


class ForkedModel:
    """One fork's model; `close` it. `prefix` holds the results for the units before `at`.

    Before the unit `at` decoding is forced; `anyway` goes on if the recorded state is not reached.
    """

    def __init__(self, backend: base.Backend, at: int, *, anyway: bool) -> None:
        self.prefix = Prefix(units=at)
        self._at: Final = at
        self._anyway: Final = anyway
        self._now_ns = 0
        self._model: Final = base.HeldModel(backend=backend, slot=0, now_ns=lambda: self._now_ns)
        self._has_run = False
        self._closing: ef.StartFinalize | ef.Rollback | None = None
        self._interrupted = -1

    def note(self, effect: ef.Effect) -> None:
        """Note how a unit is closed, and which one is interrupted."""
        match effect:
            case ef.StartFinalize() | ef.Rollback():
                self._closing = effect
            case ef.Interrupt(index=index):
                self._interrupted = index

    async def answer(self, due: PendingCall, recorded: ev.Event | None) -> ev.Event:
        """Perform an effect that calls the model, and return the answer.

        `recorded` is the recorded answer, of the units before `at`. `CannotForkError`: the model is
        lost, or does not reach the state of the recording.
        """
        answer, name = due.answer, type(due.effect).__name__
        assert answer is not None, "only a timer comes without being asked"
        self._now_ns = due.place[0]
        try:
            if answer.event is not None:
                self._has_run = False
                return attrs.evolve(answer.event, at_ns=self._now_ns)
            with anyio.fail_after(CALL_S_MAX):
                return await self._call(due.effect, answer, recorded)
        except TimeoutError as error:
            text = f"the model hangs in {name}, {CALL_S_MAX} s by now"
            raise CannotForkError(text) from error
        except base.BackendGone as error:
            raise CannotForkError(f"the model is lost in {name}: {error}") from error
        except base.BackendError as error:
            failed = base.failure_of(due.effect, error, self._now_ns)
            assert failed is not None, f"{name} cannot fail"
            return failed
        except CannotForkError:
            raise
        except Exception as error:  # a bug of the backend; on a server the session ends
            raise CannotForkError(f"the model broke in {name}: {error!r}") from error
        finally:
            if due.effect is self._closing:
                self._closing = None

    async def close(self) -> None:
        """Release the model's session, if it is still open."""
        with anyio.move_on_after(RELEASE_WAIT_S, shield=True):
            await self._model.release()

    async def _call(self, effect: ef.Effect, answer: Answer, recorded: ev.Event | None) -> ev.Event:
        at_ns, model = self._now_ns, self._model
        match effect:
            case ef.OpenBackend():
                await self.close()
                opened = await model.call(effect)
                assert isinstance(opened, ev.BackendOpened)
                if self._at and isinstance(recorded, ev.BackendOpened):
                    self._judge("the opening", compare_outputs(recorded.opened, opened.opened))
                return opened
            case ef.StartUnit(unit=unit):
                self._has_run = True
                cut = answer.cut if unit.index == self._interrupted else None
                result = await self._run(effect, cut, recorded)
                return ev.UnitDone(at_ns=at_ns, result=attrs.evolve(result, costs=answer.costs))
            case ef.StartFinalize(index=index):
                if isinstance(recorded, ev.FinalizeDone):
                    silent = recorded.finalized.silent
                    done = await model.finalize_again(effect, silent, forced=True)
                else:
                    done = await model.call(effect)
                assert isinstance(done, ev.FinalizeDone)
                if isinstance(recorded, ev.FinalizeDone):
                    found = compare_outputs(recorded.finalized, done.finalized)
                    self._judge(f"finalizing unit {index}", found)
                finalized = attrs.evolve(done.finalized, cost_us=answer.cost_us)
                return attrs.evolve(done, finalized=finalized)
            case ef.Rollback(index=index):
                if self._has_run:
                    await model.call(effect)
                return ev.RollbackDone(at_ns=at_ns, index=index)
            case ef.Rebuild(lease=lease):  # the fork's own model has lost nothing but this call
                lost = self._closing
                if isinstance(lost, ef.StartFinalize):
                    await model.finalize_again(lost, None, forced=True)
                elif lost is not None and self._has_run:
                    await model.call(lost)
                return ev.Rebuilt(
                    at_ns=at_ns, lease=lease, steps=answer.steps, cost_us=answer.cost_us
                )
            case ef.Release(lease=lease):
                return ev.BackendReleased(at_ns=at_ns, lease=lease)
        raise AssertionError(f"{type(effect).__name__} asks the model for nothing")

    async def _run(
        self, asked: ef.StartUnit, cut: Cut | None, recorded: ev.Event | None
    ) -> UnitResult:
        opened, unit = self._model.opened, asked.unit
        past = recorded.result if isinstance(recorded, ev.UnitDone) else None
        if past is None or not isinstance(opened, base.Forces):
            done = await self._model.call(asked, cut)
            assert isinstance(done, ev.UnitDone)
            if past is not None:
                self._judge_unit(past, done.result, held_back=False)
            return done.result
        try:
            forced = await opened.run_forced(unit, base.Forced.of(past), cut)
        except (base.ContextFull, base.BackendGone):
            raise
        except base.BackendError as error:
            text = f"unit {unit.index} cannot be made to come out as recorded: {error}"
            raise CannotForkError(f"{text}; fork at unit 0") from error
        self._judge_unit(past, forced.result, held_back=bool(forced.choices))
        return hold(past, forced.result)

    def _judge_unit(self, recorded: UnitResult, made: UnitResult, *, held_back: bool) -> None:
        prefix, found = self.prefix, compare_outputs(recorded, made)
        self.prefix = attrs.evolve(
            prefix, held=prefix.held + held_back, otherwise=prefix.otherwise + (found is not None)
        )
        self._judge(f"unit {recorded.index}", found)

    def _judge(self, where: str, found: Difference | None) -> None:
        """Note a difference; without forced decoding the model is then in another state."""
        if found is None:
            return
        text = f"{where}, {found.path}: recorded {found.recorded}, came out {found.came_out}"
        if self.prefix.first is None:
            self.prefix = attrs.evolve(self.prefix, first=text)
        if not self._anyway and not isinstance(self._model.opened, base.Forces):
            raise CannotForkError(
                f"the model does not reach the recorded state: {text}; fork at unit 0, or --anyway"
            )


# -- the run --------------------------------------------------------------------------------------


NEVER: Final[Place] = (1 << 63, LAST_SEQ)
Items = Iterable[Record | Damage]
Watch = Callable[[int, int], None]
"""Receives the number of finished units, and of all units."""


@attrs.define(eq=False)
class ForkRun:
    """One fork in progress.

    `watch` is called with the number of finished units, and of all.
    `is_reached`: the unit of the fork was started, as required; `ended_early`: the fork was still
    running at the recording's end, so that its client left; `decided`: of each unit, what its model
    decided.
    """

    _times: RecordedTimes
    _change: Change
    model: ForkedModel
    _journal: Journal
    _watch: Watch
    is_reached: bool = attrs.field(default=False, init=False)
    ended_early: bool = attrs.field(default=False, init=False)
    decided: dict[int, Decisions] = attrs.field(factory=dict, init=False)
    _due: dict[Call | str, PendingCall] = attrs.field(factory=dict, init=False)
    _openings: int = attrs.field(default=0, init=False)
    _outside: Iterator[tuple[Place, ev.Event]] = attrs.field(default=iter(()), init=False)
    _upcoming: tuple[Place, ev.Event] | None = attrs.field(default=None, init=False)
    _recorded: dict[int, ev.Event] = attrs.field(factory=dict, init=False)

    async def run(self, connected: ev.ConnectionOpened, items: Items) -> Session:
        """Run the fork to its end, with its first event and the recording's records in order.

        `ForkRefusedError`: the change is not possible; `CannotForkError`: the model is lost, or
        does not reach the state of the recording.
        """
        self._outside = self._read(items)
        self._upcoming = next(self._outside, None)
        client = ForkClient(self._change, connected, self._times.begin_sample)
        event: ev.Event = connected
        try:
            self._journal.append_event(connected)
            session, effects = Session.open(connected)
            await self._perform(session, connected, effects)
            while not session.is_finished:
                event = await self._next(session)
                events: tuple[ev.Event, ...] = (event,)
                if isinstance(event, ev.FrameReceived):
                    events = client.frames_for(event, session)
                for each in events:
                    self._journal.append_event(each)
                    await self._perform(session, each, session.step(each))
        finally:
            await self.model.close()
        await self._journal.finish(event.at_ns, fin_fields(session, session.end_reason))
        return session

    # -- the next event ----------------------------------------------------------------------

    def _read(self, items: Items) -> Iterator[tuple[Place, ev.Event]]:
        """Give the recording's external events; keep the answers of the units before the fork's."""
        begin_ms = self._times.begin_sample * MS_PER_S // INPUT_RATE_HZ
        for item in items:
            if not isinstance(item, Record) or item.kind not in EVENT_KINDS:
                continue
            event = event_of(item.fields, item.at_ns)
            call = answered(event)
            if call is not None:
                if call[0] == "open" or call[1] < self._change.at:
                    self._recorded[item.seq] = event
            elif not isinstance(event, ev.TimerFired | ev.ConnectionOpened) and (
                self._change.pcm is None or _sound_end_ms(event) <= begin_ms
            ):
                yield (item.at_ns, item.seq), event

    async def _next(self, session: Session) -> ev.Event:
        call = min(self._due, key=lambda call: self._due[call].place, default=None)
        due_place = NEVER if call is None else self._due[call].place
        place = min(due_place, NEVER if self._upcoming is None else self._upcoming[0])
        if place[0] > self._times.end_ns and session.state is not State.CLOSED:
            self.ended_early = True
            # A session that can be resumed would wait for its client.
            code = CLOSE_NORMAL if session.is_resumable else 0
            return ev.PeerGone(at_ns=self._times.end_ns, code=code)
        if self._upcoming is not None and place == self._upcoming[0]:
            event = self._upcoming[1]
            self._upcoming = next(self._outside, None)
            if isinstance(event, ev.BackendLost):
                self._due = {name: due for name, due in self._due.items() if due.answer is None}
            return event
        if call is None:
            raise CannotForkError("the recording ends while its session waits")
        return await self._answer(self._due.pop(call))

    async def _answer(self, due: PendingCall) -> ev.Event:
        at_ns, seq = due.place
        if isinstance(due.effect, ef.SetTimer):
            timer = due.effect
            return ev.TimerFired(at_ns=at_ns, name=timer.name, generation=timer.generation)
        event = await self.model.answer(due, self._recorded.pop(seq, None))
        if isinstance(due.effect, ef.StartUnit):
            self._watch(due.effect.unit.index + 1, self._times.units)
        if isinstance(event, ev.UnitDone):
            self.decided[event.result.index] = decisions_of(event.result)
        return event

    # -- effects --------------------------------------------------------------

    async def _perform(
        self, session: Session, event: ev.Event, effects: tuple[ef.Effect, ...]
    ) -> None:
        ready = self._journal.append_effects(session, event, effects)
        for effect in effects:
            self._note(effect, event.at_ns)
        await ready()

    def _note(self, effect: ef.Effect, now_ns: int) -> None:
        """Keep an effect until its answer; a call that hung in the recording has none."""
        self.model.note(effect)
        match effect:
            case ef.SetTimer(name=name):
                due = (effect.generation, effect.at_ns)
                at_ns, seq = self._times.fired.get(due, (effect.at_ns, LAST_SEQ))
                place = (max(at_ns, now_ns), seq)
                self._due[name] = PendingCall(place=place, effect=effect, answer=None)
            case ef.CancelTimer(name=name):
                self._due.pop(name, None)
            case ef.OpenBackend():
                self._openings += 1
            case ef.StartUnit(unit=unit) if unit.index == self._change.at:
                self.is_reached = unit.force_listen or not self._change.force_listen
        call = numbered(asked(effect), self._openings)
        answer = None if call is None else self._times.answer(call)
        if call is not None and answer is not None:
            place = (now_ns + answer.after_ns, answer.seq)
            self._due[call] = PendingCall(place=place, effect=effect, answer=answer)


def _sound_end_ms(event: ev.Event) -> int:
    """The end of the sound in which an event was found, in milliseconds; 0 for other events."""
    if isinstance(event, ev.SpeechStarted):
        return event.at_ms + 1  # its end is kept, for speech that began before
    return event.end_ms if isinstance(event, ev.UserTranscribed) else 0
