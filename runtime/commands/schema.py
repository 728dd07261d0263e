"""`antiphon dev schema`: the wire protocols as one AsyncAPI 3.0 document, for tools.

Such tools write clients, or check messages; for people there is `docs/protocol.md`, which is made
of the same facts (`docs/site/protocol.py`).

Messages come from `protocol.wire.schema`, states from the tables of `protocol.values.state`, codes
and their meanings from `protocol.values.errors`. Operations are the server's: it receives what
clients send. Notes for authors of clients that no class holds, endpoints and the common rules, take
their facts from the code that acts on them (paths, limits, close codes); only the sentences around
them are written here.

AsyncAPI has no place for some of it, which stands in extensions at the top:

- `x-antiphon-states`, by dialect and session kind: where it begins, which message leads where
  (`transitions`), and what becomes of a client's message in each state (`reception`).
- `x-antiphon-error-codes` and `x-antiphon-close-codes`: what they mean, and what follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import attrs
import click
import orjson
import yaml

from protocol.values import limits
from protocol.values.errors import (
    CLOSE_INTERNAL_ERROR,
    CLOSE_INVALID_FRAME,
    CLOSE_MEANINGS,
    CLOSE_NORMAL,
    CLOSE_TOO_BIG,
    CLOSE_TRY_LATER,
    MEANINGS,
    close_code,
    error_type,
)
from protocol.values.messages import EndReason, QueueDone
from protocol.values.model import INPUT_RATE_HZ, OUTPUT_RATE_HZ
from protocol.values.requests import Request
from protocol.values.state import BEGINNINGS, RECEPTION, TRANSITIONS, Gate, SessionKind, State
from protocol.wire.dialects import MODES_OF
from protocol.wire.schema import Message, describe, senders, session_kinds

from ..serve.routing import AUDIO_LABELS, CHAT_PATH, DUPLEX_PATH, LIVE_PATH, REALTIME_PATH
from ..settings.settings import Settings

# -- notes that no class holds ---------------------------------------------------------------------


MIB: Final = 1024 * 1024


@attrs.frozen(kw_only=True)
class Channel:
    """An endpoint.

    `address` is the path, where `{session_id}` is the client's own label; `query` is the schema of
    each parameter that picks its dialects; `says` describes them, and where the mode stands.
    """

    name: str
    address: str
    dialects: tuple[str, ...]
    says: str
    query: Mapping[str, Mapping[str, object]] = MappingProxyType({})


CHANNELS: Final[tuple[Channel, ...]] = (
    Channel(
        name="realtime",
        address=REALTIME_PATH,
        dialects=("realtime", "duplex-v1", "transcription", "transcription-responses"),
        says="The query's `mode` says what the session carries. Without it the server takes its "
        "default, which is `video` unless its operator says otherwise. The client's first message "
        "picks the dialect, and it stays: `session.init` is `realtime`, `session.update` is "
        "`duplex-v1`. Until then queue events and errors are the same in both. With "
        "`mode=transcription` it is `transcription`, or `transcription-responses` where the client "
        "chooses its model by `session.create`. With `fork=ID&at=UNIT` a session of `video` or "
        "`audio` begins from the past of a recorded one of this address and mode, before that unit "
        "or after its last; the message that sets it up may have no prompt, voice or setting, and "
        "its `prompt_length` is 0.",
    ),
    Channel(
        name="duplex",
        address=f"{DUPLEX_PATH}{{session_id}}",
        dialects=("legacy-duplex",),
        says=f"`session_id` is the client's own label of 1 to {limits.LABEL_CHARS_MAX} printable "
        "characters without a slash. It may repeat. A label that begins with "
        f"{' or '.join(f'`{label}`' for label in AUDIO_LABELS)} is a session without video.",
    ),
    Channel(
        name="chat",
        address=CHAT_PATH,
        dialects=("legacy-chat",),
        says="A connection carries one request and its answer. There are no parameters.",
    ),
    Channel(
        name="live",
        address=LIVE_PATH,
        dialects=("live",),
        says="The WebSocket of OpenAI's Live API, for clients of the `openai` package "
        "(`live.connect`), without parameters. At `/v1/live/sessions/ID/fork?at=UNIT` "
        "(`live.forks.connect`) a session begins from the past of a recorded one, before that "
        "unit or after its last; its `session.start` may only have `audio.format`, "
        "`delegation` and the same `model`.",
    ),
    Channel(
        name="openai",
        address=REALTIME_PATH,
        dialects=("openai",),
        says="The WebSocket of OpenAI's Realtime API (GA), for its clients (`realtime.connect`). "
        "`model` is a name of the server's model, and there is no `mode`. A browser offers the "
        "subprotocols `realtime` and `openai-insecure-api-key.KEY`.",
        query={"model": {"type": "string"}},
    ),
    Channel(
        name="openai-transcription",
        address=REALTIME_PATH,
        dialects=("openai-transcription",),
        says="The transcription sessions of the same API. `model` may name the server's model.",
        query={"intent": {"type": "string", "const": "transcription"}},
    ),
    Channel(
        name="vllm-omni",
        address=REALTIME_PATH,
        dialects=("vllm-omni",),
        says="The duplex WebSocket of vLLM-Omni, for its clients (`DuplexClient`); `/v1/duplex` is "
        "the same. `mode` is `video` where the model sees, unless the query says otherwise. With "
        "`model` and without `autostart=0` the session begins without a message of the client. "
        "Without, the first message may be `session.resume`, which goes on with the session that "
        "it names.",
        query={
            "duplex": {"type": "string", "const": "1"},
            "mode": {"type": "string", "enum": ["video", "audio"]},
            "model": {"type": "string"},
            "autostart": {"type": "string", "enum": ["0", "1"]},
        },
    ),
)

DIALECTS: Final[Mapping[str, str]] = {
    "realtime": "One set of events for full-duplex speech (`mode=video`, `mode=audio`) and for "
    "turns of chat (`mode=chat`), whose answers are spoken only where `tts` is there. A turn may "
    "offer tools, if the model has them: a call is in `response.done`, its result goes into the "
    "next turn's conversation. New clients should speak this one.",
    "duplex-v1": "Full-duplex speech, with text and sound of a unit in one event.",
    "legacy-duplex": "Full-duplex speech, in a session that can be paused.",
    "legacy-chat": "One turn of chat a connection: a request and its answer, which is spoken "
    "unless `tts` says otherwise. Then the connection closes.",
    "transcription": "Sound in, its text out while it comes, utterance by utterance.",
    "live": "OpenAI's Live API: full-duplex speech, 16-bit sound in pieces of any size, and a "
    "second of sound out for each second that came in. Unsupported fields are refused by name.",
    "openai": "OpenAI's Realtime API (GA): a response is one speaking turn of the model. The "
    "server speaks first, and reports where the client speaks. Unsupported fields are refused "
    "by name.",
    "openai-transcription": "OpenAI's Realtime API (GA), where the model transcribes the "
    "client's speech: each utterance is an item, and its text comes while it is spoken.",
    "vllm-omni": "vLLM-Omni's duplex protocol: each second of sound is answered by a listen, or by "
    "a piece of a response, in words of OpenAI's Realtime API. The client says how much it has "
    "played, and comes back to its session by an id and a token.",
    "transcription-responses": "The same with other names, for clients that know these: a client "
    "that chooses its model by `session.create` gets them. Either may send the types of both.",
}
"""The purpose of each dialect."""

SESSION_KINDS: Final[Mapping[SessionKind, str]] = {
    SessionKind.DUPLEX: "The client waits in the queue, sets the session up, and then sends sound "
    f"without a pause, at {INPUT_RATE_HZ} Hz, in pieces of {limits.APPEND_SAMPLES_MAX} samples at "
    f"most, in `duplex-v1` of {limits.APPEND_SAMPLES_MIN} at least, and in `live` and `openai` at "
    f"the rate of its format, in pieces of {limits.APPEND_S_MAX} s at most. Each second of sound "
    "is a *unit*, and gets one outcome: the model listens, or it speaks a second at "
    f"{OUTPUT_RATE_HZ} Hz. When more than {limits.UNITS_PENDING_MAX} units wait, the oldest is "
    f"dropped and counted. A session lasts {limits.LIMIT_VIDEO_S} s with video, "
    f"{limits.LIMIT_AUDIO_S} s without, and {limits.LIMIT_LIVE_S} s in `live` and `openai`, "
    "queueing included, unless the operator sets other limits. It must be set up within "
    f"{limits.INIT_WAIT_S} s of its turn.\n\n"
    "In `realtime` and `duplex-v1` the client may offer tools; `session.created` says whether the "
    "model calls them. A call comes after the outcome of some unit, and the conversation goes on. "
    "Its result, by the call's id, is given to the model with the next second of sound; the model "
    f"decides when to use the result. A call without a result in {limits.CALL_RESULT_S} s is "
    "over: the model is told so, and a later result is refused, as is a second one. At most "
    f"{limits.INPUTS_MAX} results and events wait for the model, and {limits.TEXTS_A_SECOND} "
    "events a second are accepted.",
    SessionKind.CHAT: "The client sets the session up at once, and then asks any number of "
    "questions, each time with the whole conversation; the server keeps no part. Each turn waits "
    f"in the queue. There is one turn at a time. {limits.IDLE_S} s without a turn end the session.",
    SessionKind.REQUEST: "The client sends one message as soon as it is connected. Queue events "
    f"come only when it has to wait. Any `error` is the end: {CLOSE_NORMAL} follows where the "
    f"client made a mistake, {CLOSE_INTERNAL_ERROR} where the model failed, {CLOSE_TRY_LATER} "
    "where the request was turned away.",
    SessionKind.TRANSCRIPTION: "A client that has to wait gets no message until it has a slot; "
    "then it is greeted, and may choose a model by name, which is answered only if there is no "
    f"such model. Sound is 16-bit integers at {INPUT_RATE_HZ} Hz, in pieces of any size. It is "
    "kept from the first piece on, and transcribed from a commit on; a final commit "
    "ends the utterance, which is answered once, after those before it, and what comes next "
    "belongs to the next one. So does what comes after an utterance that the model failed at, or "
    "that outgrew its context: it is answered by an error and its end, and the next commit, final "
    "or not, begins a new one. Text is never taken back. At most "
    f"{limits.SOUND_BYTES_MAX // MIB} MiB of sound and {limits.UTTERANCES_PENDING_MAX} utterances "
    f"may wait. A session lasts {limits.LIMIT_TRANSCRIPTION_S} s, queueing included. It is closed "
    f"with {CLOSE_NORMAL} and the reason `idle` where its client is silent for {limits.IDLE_S} s "
    "and nothing is under way, and with `timeout` where it has chosen no model within "
    f"{limits.INIT_WAIT_S} s. An `error` whose code says how a session ends is its last message.",
}
"""The session kind of a session."""

ENDS: Final[Mapping[EndReason, str]] = {
    "client": "The client ended it.",
    "timeout": "Its time was over, or nothing was sent for too long.",
    "pause_timeout": "It was paused for too long.",
    "context_full": "The model's context is full: what comes next would not fit.",
    "backend_error": "The model was lost, or failed again and again.",
    "server_shutdown": "The server is shutting down.",
    "cancelled": "An operator ended it.",
    "invalid_frame": "The client sent a frame that is beyond repair.",
    "flooded": "The client sent large messages faster than the server can record them.",
    "refused": "A turn of chat could not be given to the model; an `error` came before.",
}
"""The meanings of the ends that a client may receive."""

END_CLOSES: Final[Mapping[EndReason, tuple[int, ...]]] = {
    "invalid_frame": (CLOSE_INVALID_FRAME, CLOSE_TOO_BIG),
    "refused": (CLOSE_TRY_LATER,),
}
"""The close codes of ends without one of their own: the frame's, or the error's."""

RULES: Final[tuple[str, ...]] = (
    "A message is one JSON object in one text frame, in UTF-8, without a key twice, NaN, Infinity "
    f"or lone surrogates. It is at most {limits.FRAME_BYTES_MAX // MIB} MiB long, in chat "
    f"{limits.CHAT_FRAME_BYTES_MAX // MIB} MiB.",
    "A field has exactly the type that is named: neither `true` nor `1.0` is an integer. An "
    "integer is a number, too.",
    "In a client's message an explicit null counts as absent.",
    "A field that is not listed is ignored, and counted; but in an object of settings it is "
    "refused, so that a misspelt setting is noticed. Clients should ignore fields that they do "
    "not know: there may be more of them later.",
    "A message that is wrong gets an `error`, and the session goes on. First the session's state "
    "is looked at, then the message's type, then its fields.",
    f"Sound is float32, little-endian, mono, and finite: {INPUT_RATE_HZ} Hz to the server, "
    f"{OUTPUT_RATE_HZ} Hz from it; to be transcribed, and in `live` and `openai`, it is 16-bit "
    "integers. Bytes are base64 with the standard alphabet and padding, without white space; 16-"
    "bit sound may have line breaks in its base64. Base64 of media may stand in a data URL, whose "
    "media type is not looked at. Samples of one format that look like the other are refused.",
    "A sound file, where there may be one, is a WAV (also one from a pipe, without its sizes), "
    "RF64, AIFF, FLAC, Ogg (Vorbis or Opus) or MP3 of 8 to 192 kHz and up to 8 channels. It is "
    "known by its head; what has no head of a file is float32 samples.",
    "A picture is a JPEG, PNG or WebP, and is turned as its EXIF orientation says. A picture next "
    "to sound that is wrong or damaged is left out, with an `error`; the sound is kept.",
    "The beta of OpenAI's Realtime API is not spoken: the header `OpenAI-Beta` is HTTP 400 with "
    "the list of dialects. An address with `model` and no `mode` (where the default is not "
    "`transcription`), or the subprotocol `realtime`, is `openai`. At an address with a `mode`, "
    "before a session is set up, a `session.update` whose `session.type` is `realtime` gets "
    f"`invalid_event`, and the connection is closed with {CLOSE_NORMAL} at once.",
    f"A paused session ends after {limits.PAUSE_S} s, or earlier if its client says so.",
)
"""The rules of all dialects."""


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
        "x-antiphon-close-codes": {str(code): text for code, text in CLOSE_MEANINGS.items()},
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
        code.value: {"meaning": text, "type": error_type(code), "close": close_code(code)}
        for code, text in MEANINGS.items()
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
    if {Request.UPDATE, Request.RESPOND} <= requests:
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


def _as_json() -> str:
    options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    return orjson.dumps(asyncapi(), option=options).decode()


def _as_yaml() -> str:
    # Through JSON: plain values, none of them twice the same object, which would become an anchor.
    document = orjson.loads(_as_json())
    text: str = yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100)
    return text


FORMATS: Final[Mapping[str, Callable[[], str]]] = {"json": _as_json, "yaml": _as_yaml}


@click.command("schema")
@click.option(
    "--format",
    "form",
    type=click.Choice(list(FORMATS)),
    default="json",
    show_default=True,
    help="The format of the AsyncAPI 3 document.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file to write [default: standard output].",
)
def schema_command(*, form: str, output: Path | None) -> None:
    """Describe the wire protocols of all dialects: every message, field, state and error.

    Messages and fields are those of the tables by which the server itself reads and writes, so they
    are those of the version that prints them.

    \b
    Examples:
      antiphon dev schema --output antiphon.json
      antiphon dev schema --format yaml | less
    """  # noqa: D301 - click takes a backspace to keep the lines
    text = FORMATS[form]()
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        output.write_text(text, "utf-8")
    except OSError as error:
        raise click.ClickException(f"cannot write {output}: {error.strerror}") from None
