"""The wire protocols as one AsyncAPI 3.0 document, for tools that write clients or check messages.

Messages come from `protocol.wire.schema`, states from the tables of `protocol.values.state`, codes
and their meanings from `protocol.values.errors`. Operations are the server's: it receives what
clients send.

AsyncAPI has no place for some of it, which stands in extensions at the top:

- `x-antiphon-states`, by dialect and course: where it begins, which message leads where
  (`transitions`), and what becomes of a client's message in each state (`reception`).
- `x-antiphon-error-codes` and `x-antiphon-close-codes`: what they mean, and what follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any, Final

from protocol.values.errors import CLOSE_MEANINGS, MEANINGS, close_code, error_type
from protocol.values.messages import QueueDone
from protocol.values.requests import Request
from protocol.values.state import BEGINNINGS, RECEPTION, TRANSITIONS, Course, Gate, State
from protocol.wire.dialects import MODES_OF
from protocol.wire.schema.wire import Message, courses, describe, senders

from ...settings.settings import Settings
from .notes import CHANNELS, COURSES, DIALECTS, RULES, Channel

Json = dict[str, Any]

ASYNCAPI: Final = "3.0.0"
BINDING_VERSION: Final = "0.1.0"
"""Of AsyncAPI's binding to WebSockets, which says how the query of an address is described."""

GATES: Final[Mapping[Course, tuple[Gate, ...]]] = {
    Course.DUPLEX: (
        *(Gate.WAITING, Gate.KEPT, Gate.CONNECTED, Gate.OPENING, Gate.ACTIVE, Gate.PAUSED),
    ),
    Course.CHAT: (Gate.WAITING, Gate.KEPT, Gate.CONNECTED, Gate.ACTIVE, Gate.TURN),
    Course.REQUEST: (Gate.CONNECTED, Gate.TURN),
    Course.TRANSCRIPTION: (Gate.QUEUED, Gate.UNCHOSEN, Gate.TRANSCRIBING),
}
"""The gates that judge a client's messages; CLOSED receives nothing."""


def asyncapi() -> Json:
    """Make the document: only JSON values, in an order that reads well."""
    described = {name: describe(name) for name in MODES_OF}
    settings = Settings()
    return {
        "asyncapi": ASYNCAPI,
        "info": {
            "title": "Antiphon",
            "version": version("antiphon"),
            "description": "\n".join(f"- {rule}" for rule in RULES),
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": "application/json",
        "servers": {
            "local": {
                "host": f"{settings.host}:{settings.port}",
                "protocol": "ws",
                "description": "A server started by `antiphon serve`.",
            }
        },
        "channels": {channel.name: _channel(channel, described) for channel in CHANNELS},
        "operations": dict(_operations(described)),
        "components": {
            "messages": {
                message_key(message): _message(message)
                for messages in described.values()
                for message in messages
            }
        },
        "x-antiphon-states": {
            name: {course.value: states(messages, course) for course in courses(name)}
            for name, messages in described.items()
        },
        "x-antiphon-error-codes": error_codes(),
        "x-antiphon-close-codes": {str(code): text for code, text in CLOSE_MEANINGS.items()},
    }


def message_key(message: Message) -> str:
    """Name a message: by its dialect and type, and by its course where another has it otherwise."""
    kind = message.kind or "request"
    if len(courses(message.dialect)) == len(message.courses):
        return f"{message.dialect}.{kind}"
    return f"{message.dialect}.{message.courses[0]}.{kind}"


def error_codes() -> Json:
    """Describe each error code: its meaning, the peer at fault, and the close that follows."""
    return {
        code.value: {"meaning": text, "type": error_type(code), "close": close_code(code)}
        for code, text in MEANINGS.items()
    }


def states(messages: tuple[Message, ...], course: Course) -> Json:
    """Describe a course of sessions in the words of a dialect, whose messages are given.

    Returns `begins`, `transitions` and `reception`.
    """
    frames = senders(messages, course)
    return {
        "begins": BEGINNINGS[course].value,
        "transitions": [
            {"from": state.value, "on": names, "to": target.value}
            for state, target, names in _moves(frames, course)
        ],
        "reception": {
            gate.value: {
                message.kind or "request": str(RECEPTION[gate][message.request])
                for message in messages
                if message.request is not None and course in message.courses
            }
            for gate in _gates(messages, course)
        },
    }


def _gates(messages: tuple[Message, ...], course: Course) -> tuple[Gate, ...]:
    requests = {message.request for message in messages}
    if Request.RESPOND in requests:
        return (Gate.OPEN,)
    return tuple(gate for gate in GATES[course] if gate is not Gate.PAUSED or "pause" in requests)


WITHOUT_A_FRAME: Final[Mapping[str, str]] = {
    "ConnectionEnded": "the connection ends",
    "ModelChosen": "a model is chosen",
}
"""The words for triggers that are not messages."""


def _moves(
    frames: Mapping[type, tuple[str, ...]], course: Course
) -> Iterator[tuple[State, State, list[str]]]:
    """Group the transitions by their target, with the types of frames that make them."""
    for state, row in TRANSITIONS[course].items():
        for target in dict.fromkeys(row.values()):
            names: list[str] = []
            for trigger, leads_to in row.items():
                if leads_to is target:
                    silent = WITHOUT_A_FRAME.get(trigger.__name__)
                    if trigger is QueueDone and not frames[trigger]:
                        silent = "a slot is assigned"  # `openai` has no frame for it
                    names += frames[trigger] if silent is None else [silent]
            if names:
                yield state, target, list(dict.fromkeys(names))


# -- parts of the document ----------------------------------------------------------------------


def _channel(channel: Channel, described: Mapping[str, tuple[Message, ...]]) -> Json:
    modes = list(dict.fromkeys(mode for name in channel.dialects for mode in MODES_OF[name]))
    made: Json = {
        "address": channel.address,
        "title": " and ".join(channel.dialects),
        "description": channel.says,
        "messages": {
            message_key(message): {"$ref": f"#/components/messages/{message_key(message)}"}
            for name in channel.dialects
            for message in described[name]
        },
    }
    binding: Json = {"method": "GET"}
    if "{" in channel.address:
        made["parameters"] = {"session_id": {"description": "The client's own label."}}
    if channel.name == "realtime":
        mode = {"type": "string", "enum": modes, "default": Settings().default_mode}
        binding["query"] = {"type": "object", "properties": {"mode": mode}}
    if channel.query:
        binding["query"] = {"type": "object", "properties": dict(channel.query)}
    made["bindings"] = {"ws": {**binding, "bindingVersion": BINDING_VERSION}}
    return made


def _operations(described: Mapping[str, tuple[Message, ...]]) -> Iterator[tuple[str, Json]]:
    for channel in CHANNELS:
        for name in channel.dialects:
            for course in courses(name):
                for sender, action in (("client", "receive"), ("server", "send")):
                    keys = [
                        message_key(message)
                        for message in described[name]
                        if message.sender == sender and course in message.courses
                    ]
                    place = f"#/channels/{channel.name}"
                    yield (
                        f"{name}-{course}-{action}",
                        {
                            "action": action,
                            "channel": {"$ref": place},
                            "title": f"{name}, {course}: what the {sender} says",
                            "description": f"{DIALECTS[name]} {COURSES[course]}",
                            "messages": [{"$ref": f"{place}/messages/{key}"} for key in keys],
                        },
                    )


def _message(message: Message) -> Json:
    made: Json = {
        "name": message.kind or "request",
        "title": f"{message.kind or 'request'} ({message.dialect})",
        "summary": message.description,
        "payload": message.schema,
        "x-antiphon-canonical": [cls.__name__ for cls in message.canonical],
        "x-antiphon-courses": [course.value for course in message.courses],
    }
    if message.examples:
        made["examples"] = [{"payload": dict(body)} for body in message.examples]
    return made
