"""The judge of one connection: checks the server's messages against the protocol.

- A message may be undocumented, or not allowed in the state (`protocol.machine.client`, with the
  table of transitions). On `/v1/realtime` the client's init picks the dialect, so all messages must
  fit one dialect.
- An answer may be wrong, one too many, or missing. What is owed follows from the protocol's tables
  and parsers: a message is judged as a server judges it, JSON, then state, then type, then fields
  (`Reader`). After messages that were sent without waiting, the gate is unsure, and answers are
  only counted.
- A close may have an undocumented code, or one that does not fit.
- A text may have internals: paths, tracebacks, Python classes, object addresses, and the client's
  own text; a path in the client's message is allowed.
- It keeps no time: the player waits, and calls `miss` for a missing answer.
"""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, Final, get_args

import anyio
import attrs

from protocol.machine.client import ClientConnection
from protocol.machine.kind import CLOSE_CODES
from protocol.values import omni as om
from protocol.values import openai as oa
from protocol.values.errors import (
    ADMISSION_ERRORS,
    CLIENT_ERRORS,
    CLOSE_INTERNAL_ERROR,
    CLOSE_INVALID_FRAME,
    CLOSE_MEANINGS,
    CLOSE_NORMAL,
    CLOSE_TOO_BIG,
    CLOSE_TRY_LATER,
    ErrorCode,
    FieldError,
    FrameError,
    RemoteProtocolError,
)
from protocol.values.limits import OF_MODE, Mode
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
    ToolCalled,
    TranscriptDone,
)
from protocol.values.model import (
    SAMPLE16_BYTES,
    SAMPLE_BYTES,
    UNIT_SAMPLES,
    Coding,
    SlidingWindow,
    ToolResult,
)
from protocol.values.openai import InputStep
from protocol.values.requests import (
    Append,
    AppendSound,
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
    TellModel,
)
from protocol.values.state import (
    ACCEPT,
    IGNORE,
    KEEP,
    OPENAI_GATES,
    Gate,
    SessionKind,
    State,
    gate_of,
    judge,
)
from protocol.wire.audio import looks_float32
from protocol.wire.codec import Context, frame_bytes, parse_frame
from protocol.wire.dialects import (
    DIALECTS,
    OMNI,
    OPENAI,
    OPENAI_TRANSCRIPTION,
    OPENING,
    REALTIME,
    choose,
)
from protocol.wire.dialects.shared import is_openai_update
from protocol.wire.table import Dialect
from runtime.commands.schema import END_CLOSES
from tests.fuzz.case import (
    OPENAI_DIALECTS,
    SHOWN_CHARS,
    Case,
    Finding,
    Step,
    described,
    plain,
    problem,
    without_sound,
)

# -- internals in a text --------------------------------------------------------------------------

CANARY: Final = "a canary, which no error may sing"
"""In fields of hostile messages; an error with it echoes the client's text."""

_SIGNS: Final[Mapping[str, re.Pattern[str]]] = {
    "a traceback": re.compile(r"Traceback|File \"|, line \d+"),
    "a path": re.compile(r"(?<![\w$.])/(?:usr|home|opt|var|tmp|etc|srv|root|app|work|lib)/"),
    "a file of Python": re.compile(r"\w\.py\b|site-packages|\w\.so\b"),
    "an exception": re.compile(r"\b[A-Z][A-Za-z]*(?:Error|Exception|Warning|Interrupt)\b"),
    "an object": re.compile(r"<[a-z_.A-Z ]+ (?:object )?at 0x|<class |<function |0x[0-9a-f]{6,}"),
    "a value of Python": re.compile(
        r"\bNoneType\b|\bdict_keys\b|\bb'|\bb\"|\bself\.|__\w+__|NotImplemented"
    ),
    "the client's text": re.compile(re.escape(CANARY)),
}


def sign_of(text: str) -> str:
    """The first kind of internals in a text, or empty."""
    return next((name for name, pattern in _SIGNS.items() if pattern.search(text)), "")


# -- the answers that are owed --------------------------------------------------------------------

ANSWERS: Final[Mapping[type, tuple[type, ...]]] = {
    Init: (Created, om.SessionUpdated, ErrorReport),
    Ask: (Response, ErrorReport),
    Pause: (Paused,),
    Resume: (Resumed,),
    Interrupt: (Interrupted,),
    Commit: (TranscriptDone, ErrorReport),
    oa.Configure: (oa.Configured,),
    oa.CommitSound: (oa.InputStep, ErrorReport),
    oa.ClearSound: (oa.InputStep,),
    oa.CancelResponse: (oa.ReplyStep, oa.ReplyState, ErrorReport),
    oa.CreateItem: (oa.ItemStep, ErrorReport),
    oa.DeleteItem: (oa.ItemDeleted, ErrorReport),
    oa.RetrieveItem: (oa.ItemStep, ErrorReport),
    oa.TruncateItem: (oa.ItemTruncated, ErrorReport),
    om.CommitTurn: (oa.InputStep, ErrorReport),
    om.Heartbeat: (om.HeartbeatAck,),
    om.ClearOutput: (om.OutputCleared,),
    om.AckPlayback: (om.Acknowledged, ErrorReport),
}
"""The answers to a valid message; an `error` where its media may turn out damaged."""
OUTCOMES: Final = (Listen, Speech, ErrorReport)
"""The outcomes of a unit."""
EARLY: Final = (oa.Configure, AppendSound, oa.CreateItem)
"""Messages of `openai` that are taken while the session waits, and answered later or never."""
MODELS: Final = frozenset({"tiny", "scripted"})
"""Possible names of a server's model: it answers nothing to these, or that there is none."""


@attrs.frozen(kw_only=True)
class Demand:
    """The answer owed for a message.

    Attributes:
        kind: for reports: the wire type, or the fault.
        answers: any of these answers it; empty: nothing is owed, or the end.
        code: of the error, where only one is right.
        closes: the close codes, where the end is owed.
        message: the parsed message, if valid.
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
        """Whether an answer or the end must come."""
        return bool(self.answers or self.closes)


class Reader:
    """Reads a client's messages as the server does.

    Attributes:
        dialect: the session's, as far as it is known.
        heard: how the client's sound is written, in OpenAI's dialects.
    """

    def __init__(self, dialect_name: str, mode: Mode, session_kind: SessionKind) -> None:
        self._is_realtime = not dialect_name.startswith("legacy")
        is_open = dialect_name in {"realtime", "duplex-v1"} and session_kind is SessionKind.DUPLEX
        self.dialect: Dialect = OPENING if is_open else DIALECTS[dialect_name]
        self.heard: Coding = "audio/pcm"
        self._mode: Mode = mode
        self._session_kind = session_kind

    def demand_of(self, frame: str | bytes | None, gate: Gate) -> Demand:
        """The demand for a frame, None above the limit; a valid init picks the dialect."""
        frame = self._in_size(frame)
        try:
            body = parse_frame(frame, OF_MODE[self._mode].frame_bytes_max)
        except FrameError as error:
            return self._beyond_repair(frame, gate, error)
        request = self.dialect.classify(body)
        kind = kind_of(body.get("type"), request)
        is_openai = self.dialect in (OPENAI, OPENAI_TRANSCRIPTION)
        if gate in OPENAI_GATES and self._is_realtime and is_openai_update(body) and not is_openai:
            return self._refused(kind, gate, ErrorCode.INVALID_EVENT)
        keeps = gate is Gate.QUEUED and self._session_kind in {SessionKind.DUPLEX, SessionKind.CHAT}
        judged = Gate.WAITING if keeps else gate
        verdict = judge(Gate.OPEN if is_openai and gate is not Gate.CLOSED else judged, request)
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
        if is_openai and gate is Gate.QUEUED:
            if isinstance(message, EARLY):
                return Demand(kind=kind, gate=gate, message=message)
            return self._refused(kind, gate, ErrorCode.NOT_READY)
        if isinstance(message, CloseRequest):
            return Demand(kind=kind, gate=gate, closes=(CLOSE_NORMAL,), message=message)
        if is_openai and isinstance(message, AppendSound) and not self._is_sound(message.pcm16):
            return self._refused(kind, gate, ErrorCode.INVALID_PAYLOAD)
        if isinstance(message, ToolResult):  # of no call
            return self._refused(kind, gate, ErrorCode.INVALID_PAYLOAD)
        if named_by(message) not in {None, *MODELS}:
            return self._refused(kind, gate, ErrorCode.MODEL_NOT_FOUND)
        is_half = isinstance(message, Commit) and not (message.final and message.begins)
        # A turn of chat that is cancelled is answered itself; what has no turn is not.
        is_cut = isinstance(message, oa.CancelResponse) and self.dialect is REALTIME
        answers = () if is_half or is_cut else ANSWERS.get(type(message), ())
        is_kept = self.dialect is OMNI and gate is Gate.CONNECTED  # where it may be queued
        return Demand(kind=kind, gate=gate, answers=answers, message=message, is_kept=is_kept)

    def read(self, frame: str | bytes | None) -> ClientMessage | None:
        """Parse a frame, wherever it is allowed; None if it is always invalid."""
        try:
            body = parse_frame(self._in_size(frame), OF_MODE[self._mode].frame_bytes_max)
            return self._parse(self.dialect.classify(body), body, get_args(SlidingWindow))
        except (FrameError, FieldError):
            return None

    def _in_size(self, frame: str | bytes | None) -> str | bytes | None:
        """The frame as the server gets it: None above the limit."""
        is_too_big = frame is not None and frame_bytes(frame) > OF_MODE[self._mode].frame_bytes_max
        return None if is_too_big else frame

    def _parse(
        self, request: Request, body: Mapping[str, object], windows: tuple[SlidingWindow, ...]
    ) -> ClientMessage:
        return self.dialect.parse(request, body, Context(mode=self._mode, sliding_windows=windows))

    def _is_taken_by_others(self, request: Request, body: Mapping[str, object]) -> bool:
        """Whether a backend with sliding windows could accept it."""
        try:
            self._parse(request, body, get_args(SlidingWindow))
        except FieldError:
            return False
        return True

    def _is_sound(self, data: bytes) -> bool:
        """Whether it is sound in the session's format: whole samples, and not of another form."""
        is_pcm16 = self.heard == "audio/pcm"
        return not (is_pcm16 and (len(data) % SAMPLE16_BYTES or looks_float32(data)))

    def _refused(self, kind: str, gate: Gate, code: ErrorCode) -> Demand:
        is_either = self.dialect is OMNI and gate is Gate.CONNECTED  # it may be queued as well
        told = None if is_either else code
        return Demand(kind=kind, gate=gate, answers=(ErrorReport,), code=told)

    def _beyond_repair(self, frame: str | bytes | None, gate: Gate, error: FrameError) -> Demand:
        kind = "too big" if frame is None else "binary" if isinstance(frame, bytes) else "no JSON"
        is_lenient = self.dialect in (OPENAI, OMNI)
        goes_on = self._session_kind is SessionKind.TRANSCRIPTION or is_lenient
        if goes_on and frame is not None:
            is_binary = isinstance(frame, bytes)
            code = ErrorCode.INVALID_FRAME if is_binary else ErrorCode.INVALID_JSON
            return self._refused(kind, gate, code)
        closes: tuple[int, ...] = (error.close_code,)
        if self._session_kind is SessionKind.REQUEST:
            closes = (CLOSE_NORMAL, CLOSE_TOO_BIG) if frame is None else (CLOSE_NORMAL,)
        return Demand(kind=kind, gate=gate, closes=() if gate is Gate.CLOSED else closes)


def kind_of(name: object, request: Request) -> str:
    """A message's name in reports, without the client's text."""
    known = {message.kind for dialect in DIALECTS for message in described(dialect)} - {""}
    if isinstance(name, str) and name in known:
        return name
    return "request" if request is Request.INIT else "unknown"


def named_by(message: ClientMessage) -> str | None:
    """The model that a message asks for; None if it does not ask for one."""
    match message:
        case ChooseModel(model=name) | oa.Configure(transcriber=name):
            return name
    return None


def samples_of(message: ClientMessage | None) -> int:
    """The samples in a message."""
    return len(message.pcm) // SAMPLE_BYTES if isinstance(message, Append) else 0


def pictures_of(message: ClientMessage | None) -> int:
    """The parts that are checked only after acceptance: pictures, a known model, a free turn."""
    if isinstance(message, See | oa.Respond):
        return 1
    if isinstance(message, ChooseModel):
        return int(message.model in MODELS)
    if isinstance(message, oa.Configure):
        return int(message.voice is not None)
    return len(message.frames) if isinstance(message, Append) else 0


# -- closes ---------------------------------------------------------------------------------------

ABNORMAL: Final = 1006
"""The server went without a close."""
TRANSPORT_CLOSES: Final = (1002, 1007, CLOSE_TOO_BIG)
"""Codes of the WebSocket layer for invalid frames, which the server does not see."""


@attrs.frozen(kw_only=True)
class Before:
    """The connection before its end.

    Attributes:
        is_default: the model makes no errors.
        spoiled: the codes that unparsable frames of the client may cause.
        admission_error: an error said that there is no place.
        goodbye: the session's last message, or None.
        is_silent: the dialect has no message for a session's end.
    """

    state: State
    session_kind: SessionKind
    is_default: bool
    spoiled: Set[int]
    admission_error: bool
    goodbye: Closed | None
    is_silent: bool = False


def wrong_with(code: int, reason: str, before: Before) -> Iterator[Finding]:
    """The findings in a close; `code` is 1006 where there was none."""
    sign = sign_of(reason)
    if sign:
        yield _finding("internals", f"a close with {sign}", reason)
    state, is_ours = before.state, code in before.spoiled
    if code not in CLOSE_MEANINGS:
        what = "no close" if code == ABNORMAL else f"close {code}"
        yield _finding("crash" if code == ABNORMAL else "close", f"{what} in {state}", reason)
    elif code == CLOSE_INTERNAL_ERROR and before.is_default:
        yield _finding("crash", f"close {code} in {state}", reason)
    elif code in (CLOSE_INVALID_FRAME, CLOSE_TOO_BIG) and not is_ours:
        yield _finding("close", f"close {code} without such a frame", reason)
    elif code == CLOSE_TRY_LATER and not before.admission_error:
        yield _finding("close", f"close {code} without an error before", reason)
    elif before.goodbye is not None:
        end = before.goodbye.reason
        due = END_CLOSES.get(end) or (CLOSE_CODES.get(end, CLOSE_NORMAL),)
        if code not in due and not is_ours:  # 000 has one reason for all failures
            yield _finding("close", f"close {code} after {end}", reason)
    elif _owes_a_goodbye(code, reason, before):
        yield _finding("close", f"close {code} in ACTIVE without session.closed", reason)


def _owes_a_goodbye(code: int, reason: str, before: Before) -> bool:
    """Whether `session.closed` was due; 003 has none for a silent client, or one of Realtime's."""
    is_transcription = before.session_kind is SessionKind.TRANSCRIPTION
    ends_bare = code == CLOSE_NORMAL and reason in ("idle", ErrorCode.INVALID_EVENT)
    is_silent = is_transcription and ends_bare
    says = before.state is State.ACTIVE and before.session_kind is not SessionKind.REQUEST
    return says and code not in TRANSPORT_CLOSES and not (is_silent or before.is_silent)


def _finding(kind: str, label: str, reason: str) -> Finding:
    return Finding(kind=kind, label=label, detail=reason[:SHOWN_CHARS])


# -- the judge of a connection --------------------------------------------------------------------

_EARLY_ERRORS: Final = (ErrorCode.ITEM_NOT_FOUND, ErrorCode.INVALID_PAYLOAD)
"""Of an item that waits, whose place or id the server does not take."""
_LATE_ERRORS: Final = (ErrorCode.MODEL_NOT_FOUND, ErrorCode.ACTIVE_RESPONSE, ErrorCode.UNSUPPORTED)
"""What the server lacks: a model by that name, room for another response, a model with tools."""
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
        calls: the ids of the model's calls of tools, in order.
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
        self._session_kind = case.session_kind
        self._is_openai = case.dialect in OPENAI_DIALECTS
        self._reader = Reader(case.dialect, case.mode, case.session_kind)
        self._ends = {name: ClientConnection(name, case.mode) for name in case.dialects}
        self._state = next(iter(self._ends.values())).state
        self._paused = False
        self.said = 0
        self.calls: list[str] = []
        self._answered: set[str] = set()
        self._has_chosen = False
        self._credits: Counter[type] = Counter(
            {
                Created: int(case.session_kind is SessionKind.TRANSCRIPTION or self._is_openai)
            }  # it comes first
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
        if isinstance(message, AppendSound):
            self._samples_max += 2 * len(message.pcm16)  # as G.711, which has most in a byte
        if self.owed is not None or not (self.has_slot or self.is_over or self.holds_slot):
            self.is_sure = False
        demand = self._reader.demand_of(frame, self._gate())
        if isinstance(demand.message, TellModel):
            self.is_sure = False  # some models take events
        if isinstance(message, ToolResult) and demand.code is ErrorCode.INVALID_PAYLOAD:
            demand = self._result(message, demand)
        is_refused = self.is_sure and demand.message is None
        if isinstance(message, ChooseModel | Commit) and not is_refused:
            self._has_chosen |= isinstance(message, Commit) or message.model in MODELS
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

    def _result(self, result: ToolResult, refused: Demand) -> Demand:
        """The demand for a result: only the first of a call is taken, if it comes in time."""
        is_due = result.call_id in self.calls and result.call_id not in self._answered
        self._answered.add(result.call_id)
        if not is_due:
            return refused
        self._pictures += 1  # too late, or too many: it is refused after all
        return Demand(kind=refused.kind, gate=refused.gate, message=result)

    def _gate(self) -> Gate:
        if self.state is State.ACTIVE and self._paused:
            return Gate.PAUSED
        if self._reader.dialect is OMNI and self.state is State.ACTIVE:
            return Gate.STEERED
        if self._is_openai and self.state is not State.CLOSED:
            return Gate.OPEN if self.has_slot else Gate.QUEUED
        return gate_of(self._session_kind, self.state)

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
            self.found("undocumented", "a message that is not a JSON object in text")
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
            wrong = problem(name, self._session_kind, body)
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
        demand = reader.demand_of(self._queued_frame, gate_of(self._session_kind, State.CONNECTED))
        self._either = demand, reader
        self.is_sure = demand.is_owed

    def _take(self, message: ServerMessage) -> None:
        self._choose(message)
        self._doubt(message)
        owed, cls = self.owed, type(message)
        match message:
            case Paused() | Resumed():
                self._paused = cls is Paused
            case oa.Configured():
                self._reader.heard = message.openai.input_format
            case Queued() | QueueUpdate():
                self.queued = True
            case Closed():
                self._goodbye = message
            case Listen() | Speech():
                self._take_outcome()
            case ToolCalled(call=call):
                if call.id in self.calls:
                    self.found("answer", "a call that came before")
                self.calls.append(call.id)
            case ErrorReport():
                self._take_error(message)
        if cls in _ASKED:
            self._credits[cls] -= 1
            at_the_end = cls is TranscriptDone and self._samples_max > 0  # of an open utterance
            if self._credits[cls] < -at_the_end:
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
        was_queued = not self.has_slot or (self.owed is not None and self.owed.gate is Gate.QUEUED)
        is_early = self._is_openai and was_queued and code in _EARLY_ERRORS
        is_heard = isinstance(message, InputStep) and message.kind.startswith(("speech", "timeout"))
        is_late = is_early or code in _LATE_ERRORS
        is_late |= code is ErrorCode.INVALID_PAYLOAD and self._pictures > 0
        if is_heard or (is_late and owed_code is not code):
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
        hears_silence = self._is_openai or self._reader.dialect is OMNI
        if self._outcomes > units * FRAMES_A_UNIT and not hears_silence:
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
        if message.code is ErrorCode.SESSION_EXPIRED and not is_owed:
            return  # its time is over, whatever it asked for
        if self.is_sure and not is_owed and not self._is_beyond_repair():
            self._late += 1
            if self._late > self._pictures:
                self.found("answer", f"an error {message.code} that nothing asked for")
        elif self._errors > self.said + self._pictures + self._is_openai:  # which names a model
            self.found("answer", "more errors than messages")

    def _is_beyond_repair(self) -> bool:
        """A single request is answered by an error before the close (004)."""
        return self._session_kind is SessionKind.REQUEST and self.owed is not None

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
            has_failed = code == CLOSE_INTERNAL_ERROR and self._case.script != "default"
            if self.owed.closes and code not in self.owed.closes and not has_failed:
                label = f"{self.owed.kind} in {self.owed.gate}: close {code}, not"
                self.found("close", f"{label} {' or '.join(map(str, self.owed.closes))}", reason)
        self.owed = None
        self._wake()

    def _judge_close(self, code: int, reason: str, state: State) -> None:
        before = Before(
            state=state,
            session_kind=self._session_kind,
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
        is_omni = self._reader.dialect is OMNI  # which is told of its place where it is CONNECTED
        waits = self._state is State.QUEUED or (
            self.queued and is_omni and self._state is State.CONNECTED
        )
        if owed is not None and owed.is_kept and waits:
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
