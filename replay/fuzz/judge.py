"""The judge of one connection: checks the server's messages against the protocol.

- A message may be undocumented, or not allowed in the state (`protocol.machine.client`, with the
  table of transitions). On `/v1/realtime` the client's init picks the dialect, so all messages must
  fit one dialect.
- An answer may be wrong (`demand`), one too many, or missing. After messages that were sent without
  waiting, the gate is unsure, and answers are only counted.
- A close may have an undocumented code, or one that does not fit; a text may have internals.
- It keeps no time: the player waits, and calls `miss` for a missing answer.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import anyio

from protocol.machine.client import ClientConnection
from protocol.values.errors import (
    ADMISSION_ERRORS,
    CLIENT_ERRORS,
    CLOSE_INVALID_FRAME,
    CLOSE_TOO_BIG,
    ErrorCode,
    RemoteProtocolError,
)
from protocol.values.messages import (
    Closed,
    Created,
    ErrorReport,
    Interrupted,
    Listen,
    Paused,
    Queued,
    QueueUpdate,
    Response,
    Resumed,
    ServerMessage,
    Speech,
    TranscriptDone,
)
from protocol.values.model import UNIT_SAMPLES
from protocol.values.openai import InputStep
from protocol.values.requests import ChooseModel
from protocol.values.state import Course, Gate, State, gate_of

from .case import OPENAI_DIALECTS, Case, Finding, Step
from .closes import Before, wrong_with
from .demand import ANSWERS, MODELS, OUTCOMES, Demand, Reader, pictures_of, samples_of
from .internals import CANARY, sign_of
from .report import SHOWN_CHARS, plain, without_sound
from .schema import problem

_EARLY_ERRORS: Final = (ErrorCode.ITEM_NOT_FOUND, ErrorCode.INVALID_PAYLOAD)
"""Of an item that waits, whose place or id the server does not take."""
FRAMES_A_UNIT: Final = 2
"""In `realtime` a unit's text and sound are separate messages."""
FINDINGS_MAX: Final = 8
"""The first tells most; a broken server would fill the memory."""
TOLD_MAX: Final = 400
"""Lines kept of a server's messages, without sound."""
_SPOILS: Final = {
    "no JSON": CLOSE_INVALID_FRAME,
    "binary": CLOSE_INVALID_FRAME,
    "too big": CLOSE_TOO_BIG,
}
"""The close for an unparsable frame."""
_ASKED: Final = (Created, Paused, Resumed, Interrupted, Response, TranscriptDone)
"""Answers that come once for each request, and only then."""


class Judge:
    """Watches one connection.

    Attributes:
        findings, told: in order; `told` has the steps of a transcript.
        pairs: counts of state, message and answer.
        holds_slot: another client surely holds the only slot.
        broke: the client broke the connection; any end is allowed.
        said: the number of messages sent.
    """

    def __init__(self, case: Case) -> None:
        self.findings: list[Finding] = []
        self.told: list[Step] = []
        self.pairs: Counter[tuple[str, str, str]] = Counter()
        self.holds_slot = False
        self.broke = False
        self.queued = False
        self.close: tuple[int, str] | None = None
        self.owed: Demand | None = None
        self.is_sure = True
        self._case = case
        self._course = case.course
        self._is_openai = case.dialect in OPENAI_DIALECTS
        self._reader = Reader(case.dialect, case.mode, case.course)
        self._ends = {name: ClientConnection(name, case.mode) for name in case.dialects}
        self._state = next(iter(self._ends.values())).state
        self._paused = False
        self.said = 0
        self._has_chosen = False
        self._credits: Counter[type] = Counter(
            {Created: int(case.course is Course.TRANSCRIPTION or self._is_openai)}  # it comes first
        )
        self._errors = self._late = self._pictures = 0
        self._samples = self._samples_max = 0
        self._outcomes = 0
        self._spoiled: set[int] = set()
        self._goodbye: Closed | None = None
        self._admission_error = False
        self._queued_frame: str | bytes | None = None
        self._either: tuple[Demand, Reader] | None = None
        self._changed = anyio.Event()

    # -- the session's state --------------------------------------------------------------------

    @property
    def state(self) -> State:
        """The session's state, as far as the server has told."""
        return State.CLOSED if self.is_over else self._state

    @property
    def has_slot(self) -> bool:
        """Whether the session's turn in the queue has come."""
        waits = (State.QUEUED, State.CONNECTED) if self._is_openai else (State.QUEUED,)
        return self.state not in (*waits, State.CLOSED)

    @property
    def is_over(self) -> bool:
        """Whether the connection is closed."""
        return self.close is not None

    @property
    def dialect_name(self) -> str:
        """The session's dialect; the client's own until it is known."""
        name = self._reader.dialect.name
        return self._case.dialect if name == "opening" else name

    async def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait for a condition, or the end; False after `seconds`."""
        with anyio.move_on_after(seconds):
            while not condition() and not self.is_over:
                changed = self._changed
                await changed.wait()
        return condition() or self.is_over

    # -- the client -----------------------------------------------------------------------------

    def says(self, frame: str | bytes | None) -> None:
        """Note a message that is about to be sent; None is one that is too big."""
        self.said += 1
        message = self._reader.read(frame)
        self._pictures += pictures_of(message)
        for answer in ANSWERS.get(type(message), ()):
            self._credits[answer] += 1
        self._samples_max += samples_of(message)
        if self.owed is not None or not (self.has_slot or self.is_over or self.holds_slot):
            self.is_sure = False
        demand = self._reader.demand_of(frame, self._gate())
        if isinstance(message, ChooseModel) and not (demand.answers and self.is_sure):
            self._has_chosen |= message.model in MODELS
            self._follow_choice()
        if demand.kind in _SPOILS:
            self._spoiled.add(_SPOILS[demand.kind])
        if not self.is_sure:
            self.owed = self.owed or demand
            return
        before, self._samples = self._samples, self._samples + samples_of(demand.message)
        if self._samples // UNIT_SAMPLES > before // UNIT_SAMPLES:
            demand = Demand(kind=demand.kind, gate=demand.gate, answers=OUTCOMES)
        if demand.is_owed:
            self.owed, self._queued_frame, self._either = demand, frame, None
        else:
            self._note(demand, "nothing")

    def _gate(self) -> Gate:
        if self.state is State.ACTIVE and self._paused:
            return Gate.PAUSED
        if self._is_openai and self.state is not State.CLOSED:
            return Gate.OPEN if self.has_slot else Gate.QUEUED
        return gate_of(self._course, self.state)

    def _follow_choice(self) -> None:
        """A transcription with a chosen model is ACTIVE, without a message of the server."""
        for end in self._ends.values():
            if self._has_chosen and end.gate is Gate.UNCHOSEN:
                end.send(ChooseModel(model=""))
                self._state = end.state

    # -- the server -----------------------------------------------------------------------------

    def heard(self, frame: str | bytes) -> None:
        """Judge a message of the server."""
        try:
            body = json.loads(frame)
        except ValueError:
            body = None
        self._tell("receive", without_sound(body))
        if self.close is not None:
            self.found("close", "a message after the close")
        if isinstance(frame, bytes) or not isinstance(body, dict):
            self.found("undocumented", "a message that is no JSON object in text")
        elif self._ends:
            for message in self._read(frame, body):
                self._take(message)
        self._wake()

    def _read(self, frame: str, body: dict[str, Any]) -> tuple[ServerMessage, ...]:
        """Parse it in each dialect that fits so far; none is left if the server is wrong."""
        self._follow_choice()
        found: tuple[ServerMessage, ...] = ()
        why = Finding(kind="undocumented", label="")
        ends, self._ends, spoken = self._ends, {}, self.dialect_name
        for name, end in ends.items():
            wrong = problem(name, self._course, body)
            if wrong:
                label, kind = plain(f"{body.get('type')}: {wrong}"), "undocumented"
                why = Finding(kind=kind, label=label) if name == spoken or not why.label else why
                continue
            try:
                found = end.receive(frame)
            except RemoteProtocolError as error:
                label = plain(f"{body.get('type')}: {error}")
                why = (
                    Finding(kind="answer", label=label) if name == spoken or not why.label else why
                )
                continue
            self._ends[name], self._state = end, end.state
        if not self._ends:
            self._keep(why)
            return ()
        if self.is_sure and self.owed is not None and self.owed.gate is Gate.QUEUED:
            self._judge_by_either()
        return found

    def _judge_by_either(self) -> None:
        """A message sent before `queue_done` may be read before or after it."""
        if self._state is not State.CONNECTED or self._either is not None or self._is_openai:
            return
        reader = copy.copy(self._reader)
        demand = reader.demand_of(self._queued_frame, gate_of(self._course, State.CONNECTED))
        self._either = demand, reader
        self.is_sure = demand.is_owed

    def _take(self, message: ServerMessage) -> None:
        self._choose(message)
        self._doubt(message)
        owed, cls = self.owed, type(message)
        match message:
            case Paused() | Resumed():
                self._paused = cls is Paused
            case Queued() | QueueUpdate():
                self.queued = True
            case Closed():
                self._goodbye = message
            case Listen() | Speech():
                self._take_outcome()
            case ErrorReport():
                self._take_error(message)
        if cls in _ASKED:
            self._credits[cls] -= 1
            if self._credits[cls] < 0:
                self.found("answer", f"a {cls.__name__} without a request")
        if owed is None or not self.is_sure or cls not in owed.answers:
            return
        answer = cls.__name__
        if isinstance(message, ErrorReport):
            answer = f"error {message.code}"
            if owed.code not in (None, message.code):
                self.found("answer", f"{owed.kind} in {owed.gate}: {answer}, not {owed.code}")
        self._note(owed, answer)
        self.owed = None

    def _doubt(self, message: ServerMessage) -> None:
        """The server lacks what it might have, or heard speech: nothing is sure from then on."""
        owed_code = None if self.owed is None else self.owed.code
        code = message.code if isinstance(message, ErrorReport) else None
        is_early = self._is_openai and not self.has_slot and code in _EARLY_ERRORS
        is_heard = isinstance(message, InputStep) and message.kind.startswith("speech")
        if is_heard or ((code is ErrorCode.MODEL_NOT_FOUND or is_early) and owed_code is not code):
            self.is_sure, self.owed = False, None

    def _choose(self, message: ServerMessage) -> None:
        """Find from the answer on which side of `queue_done` a message was read."""
        if self.owed is None or self._either is None:
            return
        code = message.code if isinstance(message, ErrorReport) else None
        demand, reader = self._either
        if type(message) in demand.answers and (code is None or code != self.owed.code):
            self.owed, self._reader, self._either = demand, reader, None

    def _take_outcome(self) -> None:
        self._outcomes += 1
        units = self._samples_max // UNIT_SAMPLES
        if self._outcomes > units * FRAMES_A_UNIT and not self._is_openai:  # it hears silence too
            self.found("answer", "more outcomes than units")

    def _take_error(self, message: ErrorReport) -> None:
        is_named = message.code is ErrorCode.MODEL_NOT_FOUND  # it repeats the client's text
        sign = sign_of(message.message.replace(CANARY, "") if is_named else message.message)
        if sign:
            self.found("internals", f"an error with {sign}", message.message)
        self._admission_error |= message.code in ADMISSION_ERRORS
        if message.code not in CLIENT_ERRORS:
            if self._case.script == "default" and not self._admission_error:
                self.found("crash", f"error {message.code}", message.message)
            return
        self._errors += 1
        is_owed = self.owed is not None and ErrorReport in self.owed.answers
        if self.is_sure and not is_owed and not self._is_beyond_repair():
            self._late += 1
            if self._late > self._pictures:
                self.found("answer", f"an error {message.code} that nothing asked for")
        elif self._errors > self.said + self._pictures + self._is_openai:  # which names a model
            self.found("answer", "more errors than messages")

    def _is_beyond_repair(self) -> bool:
        """A single request is answered by an error before the close (004)."""
        return self._course is Course.REQUEST and self.owed is not None

    def closed(self, code: int, reason: str) -> None:
        """Judge the end of the connection; 1006 where there was no close."""
        if self.close is not None:
            return
        state = self._state
        self.close = (code, reason)
        self._tell("close", {"code": code, "reason": reason})
        if not self.broke:
            self._judge_close(code, reason, state)
        if self.owed is not None and self.is_sure and not self.broke:
            self._note(self.owed, f"close {code}")
            if self.owed.closes and code not in self.owed.closes:
                label = f"{self.owed.kind} in {self.owed.gate}: close {code}, not"
                self.found("close", f"{label} {' or '.join(map(str, self.owed.closes))}", reason)
        self.owed = None
        self._wake()

    def _judge_close(self, code: int, reason: str, state: State) -> None:
        before = Before(
            state=state,
            course=self._course,
            is_default=self._case.script == "default",
            spoiled=self._spoiled,
            admission_error=self._admission_error,
            goodbye=self._goodbye,
            is_silent=self._is_openai,
        )
        for finding in wrong_with(code, reason, before):
            self._keep(finding)

    # -- what the player says -------------------------------------------------------------------

    def miss(self) -> None:
        """The answer is missing for longer than any may take."""
        owed = self.owed
        if owed is not None and owed.is_kept and self._state is State.QUEUED:
            return  # there is no slot yet
        if owed is not None:
            self._note(owed, "hang")
            what = f"{owed.kind} in {owed.gate}" if self.is_sure else "messages in a row"
            self.found("hang", f"no answer to {what}")
        self.owed = None

    def settle(self) -> None:
        """Messages in a row have had their time; the gate stays unknown."""
        self.owed = None

    def did(self, step: Step) -> None:
        """Add a client's step to the transcript."""
        self._tell(step.kind, step.value)

    def _note(self, demand: Demand, answer: str) -> None:
        self.pairs[f"{self.dialect_name} {demand.gate}", demand.kind, answer] += 1

    def found(self, kind: str, label: str, detail: str = "") -> None:
        """Keep a finding."""
        self._keep(Finding(kind=kind, label=label, detail=detail[:SHOWN_CHARS]))

    def _keep(self, finding: Finding) -> None:
        if finding not in self.findings and len(self.findings) < FINDINGS_MAX:
            self.findings.append(finding)

    def _tell(self, kind: str, value: object) -> None:
        if len(self.told) < TOLD_MAX:
            self.told.append(Step(kind=kind, value=value))

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
