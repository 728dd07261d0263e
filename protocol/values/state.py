"""The state machine as data: two tables, read by the server and by the client alike.

QUEUED     connected, waiting for a slot
CONNECTED  the client may send its init (`OPENING` afterwards)
ACTIVE     set up: input for the model flows in, its output flows out
CLOSED     nothing more is sent; the slot is released after the model call in progress

A session is of one of four kinds, by the address and mode of its connection:

DUPLEX         holds a slot to the end; audio in, listens and speech out (000, 001, 002)
CHAT           turns, each of which waits for its own slot while ACTIVE (001, mode=chat)
REQUEST        one turn a connection: CONNECTED until it is read, QUEUED if it must wait, ACTIVE
               from prefill (004)
TRANSCRIPTION  holds a slot to the end; sound in, text out. ACTIVE once a model is chosen, without
               a message about that (003)

`TRANSITIONS` says which server message may cross in which state, and the next state: the server
looks up what it sends, the client what it receives, so the two cannot disagree. `RECEPTION` says
which client message is accepted in which state: the server answers by it, the client refuses to
send by it. Only they decide. A missing entry raises an error with role, state and message.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from . import messages as ms
from .errors import ErrorCode, LocalProtocolError, RemoteProtocolError
from .limits import OF_MODE, Mode
from .omni import ANSWERS as OMNI_ANSWERS
from .openai import ANSWERS, LIVE_ANSWERS, Configured, InputStep, ItemStep
from .requests import Request


class Role(StrEnum):
    """The end of the connection that looks a transition up."""

    SERVER = "server"
    CLIENT = "client"


class State(StrEnum):
    """The state of a session (000, State Machine)."""

    QUEUED = "QUEUED"
    CONNECTED = "CONNECTED"
    ACTIVE = "ACTIVE"
    CLOSED = "CLOSED"


class ConnectionEnded:
    """The connection ends without a `session.closed`: before `session.created`, or a lost peer."""


class ModelChosen:
    """The client chose a model that the server has, and gets no message (003, session.update)."""


class SessionKind(StrEnum):
    """The purpose of a session, and so its way through the states."""

    DUPLEX = "duplex"
    CHAT = "chat"
    REQUEST = "request"
    TRANSCRIPTION = "transcription"


Trigger = type[ms.ServerMessage] | type[ConnectionEnded] | type[ModelChosen]
Row = Mapping[Trigger, State]

_QUEUED: Final[Row] = {
    ms.Queued: State.QUEUED,
    ms.QueueUpdate: State.QUEUED,
    ms.QueueDone: State.CONNECTED,
    ms.ErrorReport: State.QUEUED,
    ConnectionEnded: State.CLOSED,
}
_CONNECTED: Final[Row] = {
    ms.Created: State.ACTIVE,
    ms.ErrorReport: State.CONNECTED,
    ConnectionEnded: State.CLOSED,
}
TRANSITIONS: Final[Mapping[SessionKind, Mapping[State, Row]]] = MappingProxyType(
    {
        SessionKind.DUPLEX: {
            State.QUEUED: _QUEUED,
            State.CONNECTED: _CONNECTED,
            State.ACTIVE: {
                ms.Listen: State.ACTIVE,
                ms.Speech: State.ACTIVE,
                ms.ToolCalled: State.ACTIVE,
                ms.Pending: State.ACTIVE,
                ms.Paused: State.ACTIVE,
                ms.Resumed: State.ACTIVE,
                ms.Interrupted: State.ACTIVE,
                **dict.fromkeys((*LIVE_ANSWERS, *ANSWERS, *OMNI_ANSWERS), State.ACTIVE),
                ms.GoingAway: State.ACTIVE,
                ms.ErrorReport: State.ACTIVE,
                ms.Closed: State.CLOSED,
                ConnectionEnded: State.CLOSED,
            },
            State.CLOSED: {},
        },
        SessionKind.CHAT: {
            State.QUEUED: {
                ms.QueueDone: State.CONNECTED,
                ms.ErrorReport: State.QUEUED,
                ConnectionEnded: State.CLOSED,
            },
            State.CONNECTED: _CONNECTED,
            State.ACTIVE: {
                ms.Queued: State.ACTIVE,
                ms.QueueUpdate: State.ACTIVE,
                ms.Prefilled: State.ACTIVE,
                ms.Delta: State.ACTIVE,
                ms.Response: State.ACTIVE,
                ms.GoingAway: State.ACTIVE,
                ms.ErrorReport: State.ACTIVE,
                ms.Closed: State.CLOSED,
                ConnectionEnded: State.CLOSED,
            },
            State.CLOSED: {},
        },
        SessionKind.REQUEST: {
            State.QUEUED: _QUEUED,
            State.CONNECTED: {
                ms.Queued: State.QUEUED,
                ms.Prefilled: State.ACTIVE,
                ms.ErrorReport: State.CONNECTED,
                ConnectionEnded: State.CLOSED,
            },
            State.ACTIVE: {
                ms.Delta: State.ACTIVE,
                ms.Response: State.ACTIVE,
                ms.ErrorReport: State.ACTIVE,
                ConnectionEnded: State.CLOSED,
            },
            State.CLOSED: {},
        },
        SessionKind.TRANSCRIPTION: {
            State.QUEUED: {
                ms.Queued: State.QUEUED,
                ms.QueueUpdate: State.QUEUED,
                ms.Created: State.CONNECTED,
                ms.ErrorReport: State.QUEUED,
                ms.Closed: State.CLOSED,
                ConnectionEnded: State.CLOSED,
            },
            State.CONNECTED: {
                ModelChosen: State.ACTIVE,
                ms.ErrorReport: State.CONNECTED,
                ms.Closed: State.CLOSED,
                ConnectionEnded: State.CLOSED,
            },
            State.ACTIVE: {
                ModelChosen: State.ACTIVE,
                ms.TranscriptDelta: State.ACTIVE,
                ms.TranscriptDone: State.ACTIVE,
                Configured: State.ACTIVE,
                InputStep: State.ACTIVE,
                ItemStep: State.ACTIVE,
                ms.ErrorReport: State.ACTIVE,
                ms.Closed: State.CLOSED,
                ConnectionEnded: State.CLOSED,
            },
            State.CLOSED: {},
        },
    }
)
BEGINNINGS: Final[Mapping[SessionKind, State]] = MappingProxyType(
    {
        SessionKind.DUPLEX: State.QUEUED,
        SessionKind.CHAT: State.QUEUED,
        SessionKind.REQUEST: State.CONNECTED,
        SessionKind.TRANSCRIPTION: State.QUEUED,
    }
)
"""The first state of each session kind."""


def session_kind_of(mode: Mode, *, is_request: bool) -> SessionKind:
    """Return the kind of a session."""
    match OF_MODE[mode].work:
        case "unit":
            return SessionKind.DUPLEX
        case "turn":
            return SessionKind.REQUEST if is_request else SessionKind.CHAT
        case "chunk":
            return SessionKind.TRANSCRIPTION


def next_state(role: Role, session_kind: SessionKind, state: State, trigger: Trigger) -> State:
    """Look up the state after a message.

    `trigger` is the message's class, `ConnectionEnded` or `ModelChosen`. If it is not allowed now,
    raises `LocalProtocolError` on the server, which would send it, and `RemoteProtocolError` on the
    client, which received it.
    """
    try:
        return TRANSITIONS[session_kind][state][trigger]
    except KeyError:
        text = (
            f"no transition for {trigger.__name__} in state {state} (role {role}, {session_kind})"
        )
        if role is Role.SERVER:
            raise LocalProtocolError(text) from None
        raise RemoteProtocolError(text) from None


class Gate(StrEnum):
    """The key that judges a client's messages: the state, split where more detail matters."""

    QUEUED = "QUEUED"
    WAITING = "QUEUED without an opening message"
    """QUEUED, and an opening message is kept."""
    KEPT = "QUEUED with an opening message"
    """QUEUED, with an opening message that is taken at `queue_done`."""
    CONNECTED = "CONNECTED"
    OPENING = "OPENING"
    """CONNECTED, with an init accepted and the model being opened."""
    ACTIVE = "ACTIVE"
    PAUSED = "PAUSED"
    """ACTIVE, and paused by the client."""
    TURN = "ACTIVE during a turn"
    """A turn of chat is under way, from its question to its answer."""
    UNCHOSEN = "CONNECTED without a model"
    """A transcription before its model is chosen: sound is kept already, and a commit takes the
    server's."""
    TRANSCRIBING = "ACTIVE with a model"
    """A transcription after its model is chosen."""
    OPEN = "open from the connection on"
    """A session of `openai`: it takes settings at once, and sound when it has a slot."""
    STEERED = "ACTIVE in vllm-omni"
    """A session of `vllm-omni` that is set up; its set-up may be repeated."""
    CLOSED = "CLOSED"


ACCEPT: Final = "accept"
KEEP: Final = "keep"
IGNORE: Final = "ignore"
Verdict = str
"""`ACCEPT`, `KEEP`, `IGNORE`, or the `ErrorCode` that answers the message."""

_OF_OPENAI: Final = (
    Request.CLEAR,
    Request.RESPOND,
    Request.CANCEL,
    Request.CREATE_ITEM,
    Request.DELETE_ITEM,
    Request.RETRIEVE_ITEM,
    Request.TRUNCATE_ITEM,
)
_OF_OMNI: Final = (Request.HEARTBEAT, Request.CLEAR_OUTPUT)
_OUT_OF_PLACE: Final = (
    *_OF_OPENAI,
    *_OF_OMNI,
    Request.TOOL_RESULT,
    Request.STANDALONE,
    Request.PAUSE,
    Request.RESUME,
    Request.INTERRUPT,
    Request.MUTE,
    Request.UNMUTE,
    Request.UPDATE,
    Request.COMMIT,
    Request.MISPLACED,
)
"""Requests that only mean something in a session that is set up."""

RECEPTION: Final[Mapping[Gate, Mapping[Request, Verdict]]] = MappingProxyType(
    {
        Gate.QUEUED: {**dict.fromkeys(Request, ErrorCode.NOT_READY), Request.CLOSE: ACCEPT},
        Gate.WAITING: {
            **dict.fromkeys(Request, ErrorCode.NOT_READY),
            Request.INIT: KEEP,
            Request.CLOSE: ACCEPT,
        },
        Gate.KEPT: {
            **dict.fromkeys(Request, ErrorCode.NOT_READY),
            Request.INIT: ErrorCode.INVALID_EVENT,
            Request.CLOSE: ACCEPT,
        },
        Gate.CONNECTED: {
            Request.INIT: ACCEPT,
            Request.APPEND: ErrorCode.NOT_READY,
            Request.SEE: ErrorCode.NOT_READY,
            Request.PLAYED: ErrorCode.NOT_READY,
            Request.CLOSE: ACCEPT,
            **dict.fromkeys(_OUT_OF_PLACE, ErrorCode.INVALID_EVENT),
            Request.REPORT: ACCEPT,
            Request.UNKNOWN: ACCEPT,
        },
        Gate.OPENING: {
            Request.INIT: ErrorCode.INVALID_EVENT,
            Request.APPEND: ErrorCode.NOT_READY,
            Request.SEE: ErrorCode.NOT_READY,
            Request.PLAYED: ErrorCode.NOT_READY,
            Request.CLOSE: ACCEPT,
            **dict.fromkeys(_OUT_OF_PLACE, ErrorCode.INVALID_EVENT),
            Request.REPORT: ACCEPT,
            Request.UNKNOWN: ACCEPT,
        },
        Gate.ACTIVE: {
            **dict.fromkeys(Request, ACCEPT),
            Request.INIT: ErrorCode.INVALID_EVENT,
            Request.RESUME: ErrorCode.INVALID_EVENT,
            Request.COMMIT: ErrorCode.INVALID_EVENT,
            Request.MISPLACED: ErrorCode.INVALID_EVENT,
            **dict.fromkeys((*_OF_OPENAI, *_OF_OMNI), ErrorCode.INVALID_EVENT),
            Request.CANCEL: ACCEPT,
            Request.RESPOND: ACCEPT,
        },
        Gate.PAUSED: {
            **dict.fromkeys(Request, ErrorCode.INVALID_EVENT),
            Request.CLOSE: ACCEPT,
            Request.RESUME: ACCEPT,
            Request.INTERRUPT: ACCEPT,
            Request.REPORT: ACCEPT,
            Request.PLAYED: ACCEPT,
            Request.UNKNOWN: ACCEPT,
        },
        Gate.TURN: {
            **dict.fromkeys(Request, ErrorCode.INVALID_EVENT),
            Request.CLOSE: ACCEPT,
            Request.CANCEL: ACCEPT,
            Request.PLAYED: ACCEPT,
            Request.UNKNOWN: ACCEPT,
        },
        Gate.UNCHOSEN: {
            **dict.fromkeys(Request, ErrorCode.INVALID_EVENT),
            Request.INIT: ACCEPT,
            Request.APPEND: ACCEPT,
            Request.COMMIT: ACCEPT,
            Request.UNKNOWN: ACCEPT,
        },
        Gate.TRANSCRIBING: {
            **dict.fromkeys(Request, ErrorCode.INVALID_EVENT),
            Request.INIT: ACCEPT,
            Request.APPEND: ACCEPT,
            Request.COMMIT: ACCEPT,
            Request.UNKNOWN: ACCEPT,
        },
        Gate.OPEN: {
            **dict.fromkeys(Request, ErrorCode.INVALID_EVENT),
            **dict.fromkeys(_OF_OPENAI, ACCEPT),
            Request.UPDATE: ACCEPT,
            Request.APPEND: ACCEPT,
            Request.COMMIT: ACCEPT,
            Request.UNKNOWN: ACCEPT,
        },
        Gate.STEERED: {
            **dict.fromkeys(Request, ErrorCode.INVALID_EVENT),
            **dict.fromkeys((*_OF_OPENAI, *_OF_OMNI), ACCEPT),
            Request.INIT: ACCEPT,
            Request.APPEND: ACCEPT,
            Request.COMMIT: ACCEPT,
            Request.INTERRUPT: ACCEPT,
            Request.PLAYED: ACCEPT,
            Request.REPORT: ACCEPT,
            Request.CLOSE: ACCEPT,
            Request.UNKNOWN: ACCEPT,
        },
        Gate.CLOSED: dict.fromkeys(Request, IGNORE),
    }
)
"""`ACCEPT` on UNKNOWN means that parsing it gives the error (state first, then type)."""

OPENAI_GATES: Final = frozenset({Gate.QUEUED, Gate.WAITING, Gate.CONNECTED, Gate.UNCHOSEN})
"""Gates at which a `session.update` of OpenAI's API ends the connection: its client can never be
right. In a session that is set up, or is being set up, it is refused like any second init.
"""


def gate_of(session_kind: SessionKind, state: State) -> Gate:
    """Return the gate of a state without further detail."""
    return (_TRANSCRIPTION_GATES if session_kind is SessionKind.TRANSCRIPTION else _GATES)[state]


_GATES: Final[Mapping[State, Gate]] = MappingProxyType({it: Gate(it.value) for it in State})
_TRANSCRIPTION_GATES: Final[Mapping[State, Gate]] = MappingProxyType(
    {**_GATES, State.CONNECTED: Gate.UNCHOSEN, State.ACTIVE: Gate.TRANSCRIBING}
)


def judge(gate: Gate, request: Request) -> Verdict:
    """Return the verdict on a client's message: `ACCEPT`, `KEEP`, `IGNORE`, or an error code."""
    return RECEPTION[gate][request]


def diagram(session_kind: SessionKind) -> str:
    """Draw a session kind as a Mermaid state diagram, as docs/states.md has it."""
    lines = ["stateDiagram-v2", f"    [*] --> {BEGINNINGS[session_kind]}: connection opened"]
    for state, row in TRANSITIONS[session_kind].items():
        labels: dict[State, list[str]] = {}
        for trigger, target in row.items():
            labels.setdefault(target, []).append(trigger.__name__)
        lines += [f"    {state} --> {to}: {', '.join(names)}" for to, names in labels.items()]
    return "\n".join([*lines, f"    {State.CLOSED} --> [*]: slot released"]) + "\n"
