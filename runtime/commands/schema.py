"""`antiphon dev schema`: the wire protocols as one AsyncAPI 3.0 document, for tools.

Such tools write clients, or check messages; for people there is `docs/protocol.md`, which is made
of the same facts (`docs/site/protocol.py`).

Messages come from `protocol.wire.schema`, states from the tables of `protocol.values.state`, codes
and their meanings from `protocol.values.errors`. Operations are the server's: it receives what
clients send. Notes for authors of clients that no class holds, endpoints and the common rules, take
their facts from the code that acts on them (paths, limits, close codes); only the sentences around
them are written in `schema.toml`.

What AsyncAPI cannot express is in extensions at the top:

- `x-antiphon-states`, by dialect and session kind: where it begins, which message leads where
  (`transitions`), and what becomes of a client's message in each state (`reception`).
- `x-antiphon-error-codes` and `x-antiphon-close-codes`: what they mean, and what follows.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import attrs
import click
import orjson

from protocol.values import errors, limits, model
from protocol.values.messages import EndReason, QueueDone
from protocol.values.requests import Request
from protocol.values.state import BEGINNINGS, RECEPTION, TRANSITIONS, Gate, SessionKind, State
from protocol.wire.dialects import MODES_OF
from protocol.wire.schema import Message, describe, senders, session_kinds

from ..serve.routing import AUDIO_LABELS, SPOKEN
from ..settings.settings import Settings

# -- notes that no class holds ---------------------------------------------------------------------


MIB: Final = 1024 * 1024


def _sentences() -> dict[str, Any]:
    """Read the sentences, and put in the names that the code acts on."""
    sizes = ((name, size) for name, size in vars(limits).items() if name.endswith("BYTES_MAX"))
    names: dict[str, object] = {name.replace("BYTES_MAX", "MIB"): n // MIB for name, n in sizes}
    names |= {**vars(errors), **vars(limits), **vars(model)}
    names |= {"AUDIO_LABELS": " or ".join(f"`{label}`" for label in AUDIO_LABELS)}
    text = (files(__package__) / "schema.toml").read_text("utf-8")
    return tomllib.loads(text.format_map(names))


_SENTENCES: Final = _sentences()
DIALECTS: Final[Mapping[str, str]] = _SENTENCES["dialects"]
"""The purpose of each dialect."""
SESSION_KINDS: Final[Mapping[SessionKind, str]] = {
    SessionKind[name]: text for name, text in _SENTENCES["session_kinds"].items()
}
"""The session kind of a session."""
ENDS: Final[Mapping[EndReason, str]] = _SENTENCES["ends"]
"""The meanings of the ends that a client may receive."""
END_CLOSES: Final[Mapping[EndReason, tuple[int, ...]]] = {
    "invalid_frame": (errors.CLOSE_INVALID_FRAME, errors.CLOSE_TOO_BIG),
    "refused": (errors.CLOSE_TRY_LATER,),
}
"""The close codes of ends without one of their own: the frame's, or the error's."""
RULES: Final[tuple[str, ...]] = tuple(_SENTENCES["rules"])
"""The rules of all dialects."""


@attrs.frozen
class Channel:
    """An endpoint; `query` is the schema of each parameter that picks its dialects."""

    name: str
    dialects: tuple[str, ...]
    query: Mapping[str, Mapping[str, object]] = MappingProxyType({})

    @property
    def address(self) -> str:
        """The path, where `{session_id}` is the client's own label."""
        return SPOKEN[self.dialects[0]][0].partition("?")[0]

    @property
    def says(self) -> str:
        """Describe the dialects, and where the mode stands."""
        return str(_SENTENCES["channels"][self.name])


CHANNELS: Final[tuple[Channel, ...]] = (
    Channel("realtime", ("realtime", "duplex-v1", "transcription", "transcription-responses")),
    Channel("duplex", ("legacy-duplex",)),
    Channel("chat", ("legacy-chat",)),
    Channel("live", ("live",)),
    Channel("openai", ("openai",), {"model": {"type": "string"}}),
    Channel(
        "openai-transcription",
        ("openai-transcription",),
        {"intent": {"type": "string", "const": "transcription"}},
    ),
    Channel(
        "vllm-omni",
        ("vllm-omni",),
        {
            "duplex": {"type": "string", "const": "1"},
            "mode": {"type": "string", "enum": ["video", "audio"]},
            "model": {"type": "string"},
            "autostart": {"type": "string", "enum": ["0", "1"]},
        },
    ),
)


# -- the document ----------------------------------------------------------------------------------


Json = dict[str, Any]

ASYNCAPI: Final = "3.0.0"
BINDING_VERSION: Final = "0.1.0"
"""Of AsyncAPI's binding to WebSockets, which says how the query of an address is described."""

GATES: Final[Mapping[SessionKind, tuple[Gate, ...]]] = {
    SessionKind.DUPLEX: (
        *(Gate.WAITING, Gate.KEPT, Gate.CONNECTED, Gate.OPENING, Gate.ACTIVE, Gate.PAUSED),
    ),
    SessionKind.CHAT: (Gate.WAITING, Gate.KEPT, Gate.CONNECTED, Gate.ACTIVE, Gate.TURN),
    SessionKind.REQUEST: (Gate.CONNECTED, Gate.TURN),
    SessionKind.TRANSCRIPTION: (Gate.QUEUED, Gate.UNCHOSEN, Gate.TRANSCRIBING),
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
            name: {
                session_kind.value: states(messages, session_kind)
                for session_kind in session_kinds(name)
            }
            for name, messages in described.items()
        },
        "x-antiphon-error-codes": error_codes(),
        "x-antiphon-close-codes": {str(code): text for code, text in errors.CLOSE_MEANINGS.items()},
    }


def message_key(message: Message) -> str:
    """Name a message: by its dialect and type, and by its kind of session where another differs."""
    kind = message.kind or "request"
    if len(session_kinds(message.dialect)) == len(message.session_kinds):
        return f"{message.dialect}.{kind}"
    return f"{message.dialect}.{message.session_kinds[0]}.{kind}"


def error_codes() -> Json:
    """Describe each error code: its meaning, the peer at fault, and the close that follows."""
    return {
        code.value: {
            "meaning": text,
            "type": errors.error_type(code),
            "close": errors.close_code(code),
        }
        for code, text in errors.MEANINGS.items()
    }


def states(messages: tuple[Message, ...], session_kind: SessionKind) -> Json:
    """Describe a kind of session in the words of a dialect, whose messages are given.

    Returns `begins`, `transitions` and `reception`.
    """
    frames = senders(messages, session_kind)
    return {
        "begins": BEGINNINGS[session_kind].value,
        "transitions": [
            {"from": state.value, "on": names, "to": target.value}
            for state, target, names in _moves(frames, session_kind)
        ],
        "reception": {
            gate.value: {
                message.kind or "request": str(RECEPTION[gate][message.request])
                for message in messages
                if message.request is not None and session_kind in message.session_kinds
            }
            for gate in _gates(messages, session_kind)
        },
    }


def _gates(messages: tuple[Message, ...], session_kind: SessionKind) -> tuple[Gate, ...]:
    requests = {message.request for message in messages}
    if {Request.UPDATE, Request.CREATE_ITEM} <= requests:
        return (Gate.OPEN,)
    gates = [it for it in GATES[session_kind] if it is not Gate.PAUSED or "pause" in requests]
    if Request.HEARTBEAT in requests:
        gates[gates.index(Gate.ACTIVE)] = Gate.STEERED
    return tuple(gates)


WITHOUT_A_FRAME: Final[Mapping[str, str]] = {
    "ConnectionEnded": "the connection ends",
    "ModelChosen": "a model is chosen",
}
"""The words for triggers that are not messages."""


def _moves(
    frames: Mapping[type, tuple[str, ...]], session_kind: SessionKind
) -> Iterator[tuple[State, State, list[str]]]:
    """Group the transitions by their target, with the types of frames that make them."""
    for state, row in TRANSITIONS[session_kind].items():
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
            for session_kind in session_kinds(name):
                for sender, action in (("client", "receive"), ("server", "send")):
                    keys = [
                        message_key(message)
                        for message in described[name]
                        if message.sender == sender and session_kind in message.session_kinds
                    ]
                    place = f"#/channels/{channel.name}"
                    yield (
                        f"{name}-{session_kind}-{action}",
                        {
                            "action": action,
                            "channel": {"$ref": place},
                            "title": f"{name}, {session_kind}: what the {sender} says",
                            "description": f"{DIALECTS[name]} {SESSION_KINDS[session_kind]}",
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
        "x-antiphon-session-kinds": [session_kind.value for session_kind in message.session_kinds],
    }
    if message.examples:
        made["examples"] = [{"payload": dict(body)} for body in message.examples]
    return made


# -- the command -----------------------------------------------------------------------------------


@click.command("schema")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file to write [default: standard output].",
)
def schema_command(output: Path | None) -> None:
    """Describe the wire protocols of all dialects: every message, field, state and error.

    It is an AsyncAPI 3 document, in JSON. Messages and fields are those of the tables by which the
    server itself reads and writes, so they are those of the version that prints them.

    \b
    Example:
      antiphon dev schema --output antiphon.json

    \b
    Exit codes:
      0  written
      1  the file cannot be written
      2  an option that cannot be used
      130  interrupted
    """  # noqa: D301 - click takes a backspace to keep the lines
    options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    text = orjson.dumps(asyncapi(), option=options).decode()
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        output.write_text(text, "utf-8")
    except OSError as error:
        raise click.ClickException(f"cannot write {output}: {error.strerror}") from None
