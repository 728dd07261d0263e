"""The state machine as data: two tables, read by the server and by the client alike.

QUEUED     connected, waiting for a slot
CONNECTED  holds a slot; the client may say how it wants the session (`OPENING` once it has)
ACTIVE     configured: audio flows in, listens and speech flow out
CLOSED     nothing more is sent; what the model still computes is waited for, then the slot released

`TRANSITIONS` says which server message may cross in which state and where it leads: the server
looks up what it sends, the client what it receives, so the two cannot disagree. `RECEPTION` says
what a client may say in which state: the server answers by it, the client refuses to send by it.
Nothing else decides a transition. A missing entry is an error that names role, state and message.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from .errors import ErrorCode, LocalProtocolError, RemoteProtocolError
from .messages import (
    Closed,
    Created,
    ErrorReport,
    Listen,
    Queued,
    QueueDone,
    QueueUpdate,
    Request,
    ServerMessage,
    Speech,
)


class Role(StrEnum):
    """Which end of the connection is looking."""

    SERVER = "server"
    CLIENT = "client"


class State(StrEnum):
    """Where a session stands (000, State Machine)."""

    QUEUED = "QUEUED"
    CONNECTED = "CONNECTED"
    ACTIVE = "ACTIVE"
    CLOSED = "CLOSED"


class ConnectionEnded:
    """The connection ends without a `session.closed`: before `session.created`, or a lost peer."""


Trigger = type[ServerMessage] | type[ConnectionEnded]

TRANSITIONS: Final[Mapping[State, Mapping[Trigger, State]]] = MappingProxyType(
    {
        State.QUEUED: {
            Queued: State.QUEUED,
            QueueUpdate: State.QUEUED,
            QueueDone: State.CONNECTED,
            ErrorReport: State.QUEUED,
            ConnectionEnded: State.CLOSED,
        },
        State.CONNECTED: {
            Created: State.ACTIVE,
            ErrorReport: State.CONNECTED,
            ConnectionEnded: State.CLOSED,
        },
        State.ACTIVE: {
            Listen: State.ACTIVE,
            Speech: State.ACTIVE,
            ErrorReport: State.ACTIVE,
            Closed: State.CLOSED,
            ConnectionEnded: State.CLOSED,
        },
        State.CLOSED: {},
    }
)


def next_state(role: Role, state: State, trigger: Trigger) -> State:
    """Look up where a message leads.

    Args:
        role: the server, which sends the message, or the client, which receives it.
        state: where the session stands.
        trigger: the message's class, or `ConnectionEnded`.

    Returns:
        The state after it.

    Raises:
        LocalProtocolError: the server may not send it now.
        RemoteProtocolError: the client may not be sent it now.
    """
    try:
        return TRANSITIONS[state][trigger]
    except KeyError:
        text = f"no transition for {trigger.__name__} in state {state} (role {role})"
        if role is Role.SERVER:
            raise LocalProtocolError(text) from None
        raise RemoteProtocolError(text) from None


class Gate(StrEnum):
    """What a client's messages are judged by: the state, with CONNECTED split by the init."""

    QUEUED = "QUEUED"
    CONNECTED = "CONNECTED"
    OPENING = "OPENING"
    """CONNECTED, with an init accepted and the model being opened."""
    ACTIVE = "ACTIVE"
    CLOSED = "CLOSED"


ACCEPT: Final = "accept"
IGNORE: Final = "ignore"
Verdict = str
"""`ACCEPT`, `IGNORE`, or the `ErrorCode` that answers the message."""

RECEPTION: Final[Mapping[Gate, Mapping[Request, Verdict]]] = MappingProxyType(
    {
        Gate.QUEUED: {
            Request.INIT: ErrorCode.NOT_READY,
            Request.APPEND: ErrorCode.NOT_READY,
            Request.CLOSE: ACCEPT,
            Request.MISPLACED: ErrorCode.NOT_READY,
            Request.UNKNOWN: ErrorCode.NOT_READY,
        },
        Gate.CONNECTED: {
            Request.INIT: ACCEPT,
            Request.APPEND: ErrorCode.NOT_READY,
            Request.CLOSE: ACCEPT,
            Request.MISPLACED: ErrorCode.INVALID_EVENT,
            Request.UNKNOWN: ACCEPT,
        },
        Gate.OPENING: {
            Request.INIT: ErrorCode.INVALID_EVENT,
            Request.APPEND: ErrorCode.NOT_READY,
            Request.CLOSE: ACCEPT,
            Request.MISPLACED: ErrorCode.INVALID_EVENT,
            Request.UNKNOWN: ACCEPT,
        },
        Gate.ACTIVE: {
            Request.INIT: ErrorCode.INVALID_EVENT,
            Request.APPEND: ACCEPT,
            Request.CLOSE: ACCEPT,
            Request.MISPLACED: ErrorCode.INVALID_EVENT,
            Request.UNKNOWN: ACCEPT,
        },
        Gate.CLOSED: dict.fromkeys(Request, IGNORE),
    }
)
"""`ACCEPT` on UNKNOWN means that its own parsing says what is wrong (state first, then type)."""


def judge(gate: Gate, request: Request) -> Verdict:
    """Say what becomes of a client's message: `ACCEPT`, `IGNORE`, or an error code."""
    return RECEPTION[gate][request]


def diagram() -> str:
    """Draw `TRANSITIONS` as a Mermaid state diagram; ARCHITECTURE.md holds what this returns."""
    lines = ["stateDiagram-v2", f"    [*] --> {State.QUEUED}: connection opened"]
    for state, row in TRANSITIONS.items():
        labels: dict[State, list[str]] = {}
        for trigger, target in row.items():
            labels.setdefault(target, []).append(trigger.__name__)
        lines += [f"    {state} --> {to}: {', '.join(names)}" for to, names in labels.items()]
    return "\n".join([*lines, f"    {State.CLOSED} --> [*]: slot released"]) + "\n"
