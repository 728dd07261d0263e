"""Plays a transcript against a `Session` alone: no socket, no event loop, no waiting.

What a session wants done is done by a small world on virtual time: a queue and slots (the server's
own, which are pure), timers, media decoded on the spot, and a scripted model whose calls end when
the script says. It holds no rule of the protocol: what may be said and when is the session's.
"""

from __future__ import annotations

import heapq
import itertools
import json
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import attrs

from protocol.machine.session import Session
from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.errors import CLOSE_TRY_LATER, REFUSALS, ErrorCode
from protocol.values.limits import MODES, NS_PER_S, OF_MODE
from protocol.values.messages import ErrorReport
from runtime.media.decoder import MediaDecoder
from runtime.media.speech_detector import SpeechDetector
from runtime.media.voices import VoiceLibrary
from runtime.serve.routing import NotServedError, Route, route
from runtime.settings.settings import MIB, Settings
from runtime.slots.admission import Admission, Refused, Ticket
from runtime.slots.workers import Lease, Pool
from tests.sessions.identities import CountedIdentities
from tests.transcripts.media import make_voices
from tests.transcripts.model import PureModel
from tests.transcripts.reading import SENDS, WARNED_S, Mismatch, Step, Transcript, check, frame_of

PATIENCE_S: Final = 1_000
"""Longer than any limit of a session: what has not come by then never comes."""

Said = str | tuple[int, str]
"""A frame, or the code and reason of a close."""


class Clock:
    """Virtual time, and what is due when."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    @property
    def now_s(self) -> float:
        """The same in seconds."""
        return self.now_ns / NS_PER_S

    def at(self, at_ns: int, call: Callable[[], None]) -> None:
        """Have something done at a time; what is due at the same time keeps its order."""
        heapq.heappush(self._due, (max(at_ns, self.now_ns), next(self._numbers), call))

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Have something done later."""
        self.at(self.now_ns + round(seconds * NS_PER_S), call)

    def advance(self, until_ns: int) -> bool:
        """Do the next thing that is due by then; False where there is none, and it is then."""
        if not self._due or self._due[0][0] > until_ns:
            self.now_ns = max(self.now_ns, until_ns)
            return False
        self.now_ns, _, call = heapq.heappop(self._due)
        call()
        return True


@attrs.define
class Occupant:
    """Another session: a place in the queue, or a slot, or a chat's place."""

    is_chat: bool
    ticket: Ticket | None = None
    lease: Lease | None = None


@attrs.define
class Past:
    """The events of a session that may be forked, and how many of them end each unit."""

    events: list[Any]
    cuts: list[int] = attrs.field(factory=list)


class PureServer:
    """The world around the session."""

    def __init__(self, transcript: Transcript, folder: Path) -> None:
        self.clock = Clock()
        server = dict(transcript.server)
        slots = server.pop("slots", None)
        self.is_loading = server.pop("loading", False)
        self.records = server.pop("record", False)
        voices = VoiceLibrary(make_voices(folder, server.pop("voices", ())))
        self.settings = Settings(model="scripted", **server)
        self.model = PureModel(self.clock, transcript.script, slots, MediaDecoder(voices))
        self.pool = Pool(self.model.backend.info.slots)
        self.identities = CountedIdentities()
        self.admission = Admission(
            self.pool,
            clock_ns=lambda: self.clock.now_ns,
            new_ticket_id=self.identities.ticket_id,
            queue_max=self.settings.queue_max,
            limit_s=self.settings.limit_s,
        )
        self.occupants: list[Occupant | None] = []

    def occupy(self, url: str) -> None:
        """Let another session come before ours."""
        occupant = Occupant(is_chat=self.route(url).mode == "chat")
        self.occupants.append(occupant)
        if not occupant.is_chat:
            occupant.ticket = self.admission.enter(
                "audio",
                on_leased=lambda lease: setattr(occupant, "lease", lease),
                on_moved=lambda _: None,
                on_cancelled=lambda: None,
                on_refused=lambda _: None,
            )

    def vacate(self, number: int) -> None:
        """Let one of them go."""
        occupant, self.occupants[number] = self.occupants[number], None
        assert occupant is not None
        if occupant.lease is not None:
            self.admission.release(occupant.lease)
        elif occupant.ticket is not None:
            self.admission.leave(occupant.ticket)

    def has_room(self) -> ErrorCode | None:
        """Whether one more chat may stay."""
        chats = sum(it is not None and it.is_chat for it in self.occupants) + 1
        if self.admission.is_draining:
            return ErrorCode.SERVICE_UNAVAILABLE
        return ErrorCode.QUEUE_FULL if chats > self.settings.chats_max else None

    def route(self, url: str) -> Route:
        """Say what a client gets at an address."""
        parts = urlsplit(url)
        query = parse_qs(parts.query, keep_blank_values=True)
        return route(parts.path, query, MODES, default=self.settings.default_mode)


class PurePlayer:
    """One client's session in that world, played step by step.

    Args:
        transcript: what is said.
        folder: its own; the server's voices are put there.

    Attributes:
        check: holds what the session says to what the transcript says.
    """

    check = staticmethod(check)

    def __init__(self, transcript: Transcript, folder: Path) -> None:
        self.transcript = transcript
        self.server = PureServer(transcript, folder)
        self.clock = self.server.clock
        self.model = self.server.model
        self.model.post = self.post
        self.detector = SpeechDetector()
        self.said: deque[Said] = deque()
        self.names: dict[str, object] = {}
        self.session: Session | None = None
        self.opened: ev.ConnectionOpened | None = None
        self.refusal: NotServedError | None = None
        self.pasts: dict[str, Past] = {}
        self.began_ns = 0
        self.ticket: Ticket | None = None
        self.lease: Lease | None = None
        self.is_left = self.loses_log = False

    def play(self) -> None:
        """Play it to its end; what is left then must be nothing, and the slot be back (B5).

        Raises:
            Mismatch: naming the line where the session says something else.
        """
        for step in self.transcript.steps:
            try:
                self._play(step)
            except Mismatch as error:
                raise Mismatch(f"{self.transcript.name}:{step.line}: {error}") from None
        self._check_end()

    # -- steps ----------------------------------------------------------------------------------

    def _play(self, step: Step) -> None:
        if step.kind not in {"occupy", "operator"} and not self._is_connected:
            self._connect(self.transcript.connect)
        match step.kind:
            case "connect":
                self._check_end()
                self._connect(step.value.format_map(self.names))
            case kind if kind in SENDS:
                self._send(frame_of(step, self.names))
            case "receive":
                found = self._next()
                if not isinstance(found, str):
                    raise Mismatch(f"a close {found}, not a frame")
                self.check(step.value, json.loads(found), self.names)
            case "close":
                found = self._next()
                if found != (step.value["code"], step.value["reason"]):
                    raise Mismatch(f"{found}, not the close {step.value}")
            case "refused":
                self._check_refusal(step.value)
            case "leave":
                self.is_left = True
                self.post(ev.PeerGone)
            case "wait_s":
                self._wait(step.value)
            case "occupy":
                self.server.occupy(step.value)
            case "vacate":
                self.server.vacate(step.value)
            case "words":
                self.post(ev.UserTranscribed, **step.value)
            case "operator":
                self._operate(step.value)

    def _send(self, frame: str | bytes) -> None:
        """Hand a frame over as a socket does, which gives None for one that is too long."""
        size = len(frame.encode() if isinstance(frame, str) else frame)
        is_too_big = self.opened is not None and size > OF_MODE[self.opened.mode].frame_bytes_max
        self.post(ev.FrameReceived, frame=None if is_too_big else frame)

    def _operate(self, what: str) -> None:
        match what:
            case "warn":
                self.server.admission.drain()
                if self.session is not None:
                    self.post(ev.DrainBegan, wait_s=WARNED_S)
            case "drain":
                self.server.admission.drain()
                if self.session is not None:
                    self.post(ev.Draining)
            case "cancel":
                assert self.ticket is not None
                self.server.admission.cancel(self.ticket.ticket_id)
            case "refresh":
                self.server.admission.refresh()
            case "overrun the log":
                self.post(ev.Flooded)
            case "lose the log":
                self.loses_log = True
            case _:
                raise AssertionError(f"{what} is nothing that an operator does")

    def _check_refusal(self, expected: dict[str, Any]) -> None:
        if self.refusal is None:
            raise Mismatch("the handshake was accepted")
        refusal = self.refusal
        body = {"error": refusal.code, "message": refusal.message, **refusal.details}
        check(expected, {"status": refusal.status, "body": body}, self.names)

    def _next(self) -> Said:
        until_ns = self.clock.now_ns + PATIENCE_S * NS_PER_S
        while not self.said:
            if not self.clock.advance(until_ns):
                raise Mismatch(f"nothing came in {PATIENCE_S} s")
        return self.said.popleft()

    def _wait(self, seconds: float) -> None:
        until_ns = self.clock.now_ns + round(seconds * NS_PER_S)
        while self.clock.advance(until_ns):
            pass

    def _check_end(self) -> None:
        if self.session is None:
            return
        end_ns = self.clock.now_ns + PATIENCE_S * NS_PER_S
        while not self.session.is_finished:
            if not self.clock.advance(end_ns):
                raise Mismatch(f"{self.transcript.name}: the session is not over")
        if self.said and not self.is_left:
            raise Mismatch(f"{self.transcript.name}: more is said: {list(self.said)[:3]}")
        held = [it.lease for it in self.server.occupants if it is not None and it.lease]
        if list(self.server.pool.leases) != held:
            raise Mismatch(f"{self.transcript.name}: the slot is not back")

    # -- the connection -------------------------------------------------------------------------

    @property
    def _is_connected(self) -> bool:
        return self.session is not None or self.refusal is not None or bool(self.said)

    def _connect(self, url: str) -> None:
        try:
            to = self.server.route(url)
        except NotServedError as refusal:
            self.refusal = refusal
            return
        code = ErrorCode.SERVICE_UNAVAILABLE
        if self.server.is_loading or self.server.admission.is_draining:
            is_loading = self.server.is_loading
            text = "the model is being loaded" if is_loading else REFUSALS[code]
            self.said.extend(to.dialect.encode(ErrorReport(code=code, message=text)))
            self.said.append((CLOSE_TRY_LATER, code.value))
            return
        self.opened = self._opened(to)
        if to.fork:
            self._fork(to, self.opened)
            return
        self.began_ns = self.clock.now_ns
        self.session, effects = Session.open(self.opened)
        self.pasts[self.session.session_id] = Past([self.opened])
        self._perform(effects)

    def _fork(self, to: Route, opened: ev.ConnectionOpened) -> None:
        """Begin from the past of the session before, as `runtime.session.forking` does."""
        assert self.server.records
        past = self.pasts[to.fork]
        own = {"recording_id": opened.recording_id, "created_ms": opened.created_ms}
        first, *rest = past.events[: past.cuts[-1 if to.at is None else to.at - 1]]
        self.session, _ = Session.open(attrs.evolve(first, **own))
        for event in rest:
            self.session.step(event)
        self.began_ns = self.clock.now_ns - self.session.now_ns
        self._step(ev.Forked(at_ns=0, limits=opened.limits))

    def _opened(self, to: Route) -> ev.ConnectionOpened:
        settings, info = self.server.settings, self.model.backend.info
        identity = self.server.identities.draw()
        return ev.ConnectionOpened(
            recording_id=identity.recording_id,
            created_ms=identity.created_ms,
            mode=to.mode,
            seed=identity.seed,
            limits=ev.SessionLimits(
                session_s=(
                    settings.limit_live_s
                    if to.endpoint in ("live", "openai")
                    else settings.limit_s(to.mode)
                ),
                init_wait_s=settings.init_wait_s,
                cleanup_wait_s=settings.cleanup_wait_s,
                context_tokens=info.context_limit,
                sliding_windows=info.sliding_windows,
                can_rollback=info.can_rollback,
                close_on_recording_failure=settings.on_recording_failure == "close",
                idle_s=settings.idle_s,
                pause_s=settings.pause_s,
                duplex_tools=info.duplex_tools and OF_MODE[to.mode].work == "unit",
                transcriber=settings.transcriber or "" if to.mode in ("audio", "video") else "",
                **self._model_limits(to),
            ),
            recording="on" if self.server.records else "off",
            endpoint=to.endpoint,
            label=to.label,
            behaviour=self.transcript.behaviour,
            quiet=to.quiet,
            must_record=settings.record_always and self.server.records,
            recording_notice=settings.recording_notice or "",
        )

    def _model_limits(self, to: Route) -> dict[str, Any]:
        """As a server sets them, for a session whose client chooses a model."""
        if to.mode != "transcription" and to.endpoint not in ("live", "openai", "omni"):
            return {}
        settings, name = self.server.settings, self.model.backend.info.name
        names = (name, *settings.served_model_names)
        found: dict[str, Any] = {"models": names}
        if to.mode == "transcription":
            found["sound_bytes"] = settings.transcription_buffer_mb * MIB
        if to.endpoint in ("openai", "omni"):
            can_see = "video" in self.model.backend.info.modes
            found |= {"can_speak": self.model.backend.info.can_speak, "can_see": can_see}
        return found

    def post(self, kind: type[Any], **fields: object) -> None:
        """Tell the session a fact, once those before it are done with."""
        event = kind(at_ns=self.clock.now_ns - self.began_ns, **fields)
        self.clock.at(self.clock.now_ns, lambda: self._step(event))

    def _step(self, event: ev.Event) -> None:
        assert self.session is not None
        event = attrs.evolve(event, at_ns=self.clock.now_ns - self.began_ns)
        effects = self.session.step(event)
        if (past := self.pasts.get(self.session.session_id)) is not None:
            past.events.append(event)
            if any(isinstance(it, ef.StartFinalize) for it in effects):
                past.cuts.append(len(past.events))
        self._perform(effects)

    # -- effects --------------------------------------------------------------------------------

    def _perform(self, effects: tuple[ef.Effect, ...]) -> None:
        for effect in effects:
            self._perform_one(effect)
        for effect in effects:
            if isinstance(effect, ef.DetectSpeech):  # what is found there comes before all else
                for found in self.detector.detect(effect, 0):
                    self._step(found)

    def _perform_one(self, effect: ef.Effect) -> None:
        match effect:
            case ef.Send():
                self.said.append(effect.frame)
                self._lose_log()
            case ef.Close():
                self.said.append((effect.code, effect.reason))
            case ef.Admit():
                self._admit()
            case ef.EnterQueue():
                self._enter_queue(effect)
            case ef.LeaveQueue():
                if self.ticket is not None and self.server.admission.leave(self.ticket):
                    self.post(ev.TicketLeft)
            case ef.DecodeMedia():
                self.model.decode(effect)
            case ef.Rebuild():  # the script needs no past
                assert self.session is not None
                units = self.session.counts["units"]
                self.post(ev.Rebuilt, lease=effect.lease, steps=units)
            case ef.Release():
                self.model.release(lambda: self._released(effect))
            case ef.SetTimer():
                fired = ev.TimerFired(at_ns=0, name=effect.name, generation=effect.generation)
                self.clock.at(self.began_ns + effect.at_ns, lambda: self._step(fired))
            case ef.CancelTimer() | ef.DropUnit() | ef.ForgetRecording() | ef.DetectSpeech():
                pass  # a timer that is set no more is known by its generation
            case ef.CancelDecode():
                pass  # and so is media by its number
            case _:
                self.model.perform(effect)

    def _lose_log(self) -> None:
        """Find out that the log fails: a frame waits until its record is written."""
        if self.loses_log:
            self.loses_log = False
            self.post(ev.RecordingFailed)

    def _admit(self) -> None:
        refused = self.server.has_room()
        if refused is None:
            self.post(ev.Admitted)
        else:
            self.post(ev.AdmissionRefused, code=refused)

    def _enter_queue(self, effect: ef.EnterQueue) -> None:
        try:
            self.ticket = self.server.admission.enter(
                effect.mode,
                on_leased=self._leased,
                on_moved=lambda place: self.post(ev.TicketMoved, place=place),
                on_cancelled=lambda: self.post(ev.TicketCancelled),
                on_refused=lambda code: self.post(ev.AdmissionRefused, code=code),
            )
        except Refused as refused:
            self.post(ev.AdmissionRefused, code=refused.code)

    def _leased(self, lease: Lease) -> None:
        self.lease = lease
        self.post(ev.SlotLeased, lease=lease.generation, slot=lease.slot)

    def _released(self, effect: ef.Release) -> None:
        assert self.lease is not None
        self.server.admission.release(self.lease, condemned=effect.condemn)
        self.post(ev.BackendReleased, lease=effect.lease)
