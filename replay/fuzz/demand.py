"""What a server owes for a message, read from the tables and the parsers of the protocol.

A message is judged as wire.md has it: JSON, then state, then type, then fields. `demand_of` does so
with `codec`, the dialect's own `classify` and `parse`, and `state.RECEPTION`, and says which answer
follows. It is told the gate; whether that is known is the judge's to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, get_args

import attrs

from protocol.codec import parse_frame
from protocol.dialects import DIALECTS
from protocol.dialects.base import Context, Dialect
from protocol.dialects.opening import OPENING, choose
from protocol.dialects.shared import is_openai_update
from protocol.errors import CLOSE_NORMAL, CLOSE_TOO_BIG, ErrorCode, FieldError, FrameError
from protocol.limits import FRAME_BYTES_MAX_OF
from protocol.messages import (
    Created,
    ErrorReport,
    Interrupted,
    Listen,
    Mode,
    Paused,
    Response,
    Resumed,
    Speech,
    TranscriptDone,
)
from protocol.model import SAMPLE_BYTES, SlidingWindow
from protocol.requests import (
    Append,
    Ask,
    ChooseModel,
    ClientMessage,
    CloseRequest,
    Commit,
    Init,
    Interrupt,
    Pause,
    Request,
    Resume,
    See,
)
from protocol.state import ACCEPT, IGNORE, KEEP, OPENAI_GATES, Course, Gate, judge
from protocol.utf8 import frame_bytes

from .schema import described

ANSWERS: Final[Mapping[type, tuple[type, ...]]] = {
    Init: (Created, ErrorReport),
    Ask: (Response, ErrorReport),
    Pause: (Paused,),
    Resume: (Resumed,),
    Interrupt: (Interrupted,),
    Commit: (TranscriptDone, ErrorReport),
}
"""What answers a message that is in order; an `error` where its media may turn out damaged."""
OUTCOMES: Final = (Listen, Speech, ErrorReport)
"""What becomes of a unit."""
MODELS: Final = frozenset({"tiny", "scripted"})
"""Names that a server's model may have: it says nothing to these, or that there is none."""


@attrs.frozen(kw_only=True)
class Demand:
    """What is owed for a message.

    Attributes:
        kind: the message, for reports: its wire type, or what is wrong with it.
        gate: where the session stood.
        answers: any of these messages answers it; empty: nothing is owed, or the end.
        code: of the error, where only one will do.
        closes: the close codes that end it, where it is owed the end.
        message: the message, where it is in order.
        is_kept: it may be kept, and answered once there is a slot.
    """

    kind: str
    gate: Gate
    answers: tuple[type, ...] = ()
    code: ErrorCode | None = None
    closes: tuple[int, ...] = ()
    message: ClientMessage | None = None
    is_kept: bool = False

    @property
    def is_owed(self) -> bool:
        """Whether anything has to come."""
        return bool(self.answers or self.closes)


class Reader:
    """Reads a client's messages as the server does.

    Args:
        dialect_name: what the client speaks when it speaks as it should.
        mode: of the session.
        course: of the session.
    """

    def __init__(self, dialect_name: str, mode: Mode, course: Course) -> None:
        self._is_realtime = not dialect_name.startswith("legacy")
        is_open = dialect_name in {"realtime", "duplex-v1"} and course is Course.DUPLEX
        self.dialect: Dialect = OPENING if is_open else DIALECTS[dialect_name]
        self._mode: Mode = mode
        self._course = course

    def demand_of(self, frame: str | bytes | None, gate: Gate) -> Demand:
        """Say what is owed for a frame; an init that is welcome picks the dialect.

        Args:
            frame: text, bytes of a binary one, None for one that is too big.
            gate: where the session stands when it comes.
        """
        frame = self._in_size(frame)
        try:
            body = parse_frame(frame, FRAME_BYTES_MAX_OF[self._mode])
        except FrameError as error:
            return self._beyond_repair(frame, gate, error)
        request = self.dialect.classify(body)
        kind = kind_of(body.get("type"), request)
        if gate in OPENAI_GATES and self._is_realtime and is_openai_update(body):
            return self._refused(kind, gate, ErrorCode.INVALID_EVENT)
        keeps = gate is Gate.QUEUED and self._course in {Course.DUPLEX, Course.CHAT}
        verdict = judge(Gate.WAITING if keeps else gate, request)
        if verdict == IGNORE:
            return Demand(kind=kind, gate=gate)
        if verdict == KEEP:
            either = (Created, ErrorReport)
            return Demand(kind=kind, gate=gate, answers=either, is_kept=True)
        if verdict != ACCEPT:
            return self._refused(kind, gate, ErrorCode(verdict))
        if self.dialect is OPENING:
            self.dialect = choose(body) or OPENING
        try:
            message = self._parse(request, body, ("off",))
        except FieldError as error:
            if self._is_taken_by_others(request, body):
                return Demand(kind=kind, gate=gate, answers=(Created, ErrorReport))
            return self._refused(kind, gate, error.code)
        if isinstance(message, CloseRequest):
            return Demand(kind=kind, gate=gate, closes=(CLOSE_NORMAL,), message=message)
        if isinstance(message, ChooseModel) and message.model not in MODELS:
            return self._refused(kind, gate, ErrorCode.MODEL_NOT_FOUND)
        is_begun = isinstance(message, Commit) and not message.final
        answers = () if is_begun else ANSWERS.get(type(message), ())
        return Demand(kind=kind, gate=gate, answers=answers, message=message)

    def read(self, frame: str | bytes | None) -> ClientMessage | None:
        """Say what a frame would be, wherever it is welcome; None where it is in order nowhere."""
        try:
            body = parse_frame(self._in_size(frame), FRAME_BYTES_MAX_OF[self._mode])
            return self._parse(self.dialect.classify(body), body, get_args(SlidingWindow))
        except (FrameError, FieldError):
            return None

    def _in_size(self, frame: str | bytes | None) -> str | bytes | None:
        """Give a frame as the server gets it: None where its bytes are more than a frame's."""
        is_too_big = frame is not None and frame_bytes(frame) > FRAME_BYTES_MAX_OF[self._mode]
        return None if is_too_big else frame

    def _parse(
        self, request: Request, body: Mapping[str, object], windows: tuple[SlidingWindow, ...]
    ) -> ClientMessage:
        return self.dialect.parse(request, body, Context(mode=self._mode, sliding_windows=windows))

    def _is_taken_by_others(self, request: Request, body: Mapping[str, object]) -> bool:
        """Whether another backend, with windows that slide, could take it."""
        try:
            self._parse(request, body, get_args(SlidingWindow))
        except FieldError:
            return False
        return True

    def _refused(self, kind: str, gate: Gate, code: ErrorCode) -> Demand:
        return Demand(kind=kind, gate=gate, answers=(ErrorReport,), code=code)

    def _beyond_repair(self, frame: str | bytes | None, gate: Gate, error: FrameError) -> Demand:
        kind = "too big" if frame is None else "binary" if isinstance(frame, bytes) else "no JSON"
        if self._course is Course.TRANSCRIPTION and frame is not None:
            is_binary = isinstance(frame, bytes)
            code = ErrorCode.INVALID_FRAME if is_binary else ErrorCode.INVALID_JSON
            return self._refused(kind, gate, code)
        closes: tuple[int, ...] = (error.close_code,)
        if self._course is Course.REQUEST:
            closes = (CLOSE_NORMAL, CLOSE_TOO_BIG) if frame is None else (CLOSE_NORMAL,)
        return Demand(kind=kind, gate=gate, closes=() if gate is Gate.CLOSED else closes)


def kind_of(name: object, request: Request) -> str:
    """Name a message for a report; a text of the client's own is not shown."""
    known = {message.kind for dialect in DIALECTS for message in described(dialect)} - {""}
    if isinstance(name, str) and name in known:
        return name
    return "request" if request is Request.INIT else "unknown"


def samples_of(message: ClientMessage | None) -> int:
    """Count the samples that a message brings."""
    return len(message.pcm) // SAMPLE_BYTES if isinstance(message, Append) else 0


def pictures_of(message: ClientMessage | None) -> int:
    """Count what of a message is looked at only after it was accepted: pictures, a known model."""
    if isinstance(message, See):
        return 1
    if isinstance(message, ChooseModel):
        return int(message.model in MODELS)
    return len(message.frames) if isinstance(message, Append) else 0
