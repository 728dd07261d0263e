"""The dialect of 004: a connection is one request, `prefill_done`, `chunk`s, `done`.

The request has no type: every object is one. There is nothing else that a client can say, and no
word for the end: the server closes the connection. See `chat_inputs` for the request's fields.

What 004 cannot show: the ids of session, response and input, why an answer ended, whether it was
streamed, and what it took. The writing side leaves them out; the reading side has empty ids,
`turn_end`, streaming and no metrics.
"""

from __future__ import annotations

from typing import Final

import attrs

from ..codec import Fields, Value, dump_frame, encode_base64
from ..errors import LocalProtocolError
from ..messages import Delta, Metrics, Mode, Prefilled, Response, ServerMessage
from ..requests import Ask, ClientMessage, Request
from . import legacy, shared
from .base import Context, Json, no_frame
from .chat_inputs import ask_fields, read_ask
from .inputs import read_record, record_fields

PREFILL_DONE: Final = "prefill_done"
CHUNK: Final = "chunk"
DONE: Final = "done"


class LegacyChat:
    """The dialect of 004; see `base.Dialect` for what its methods do."""

    @property
    def name(self) -> str:
        """`legacy-chat`."""
        return "legacy-chat"

    def classify(self, _body: Json) -> Request:
        """Say what kind of request a client's message is: all that there can be."""
        return Request.INIT

    def parse(self, _request: Request, body: Json, context: Context) -> ClientMessage:
        """Check every field of the request."""
        fields = Fields(body)
        ask = read_ask(fields, context, speaks=True)
        record = read_record(fields, context)
        return attrs.evolve(ask, record=record, ignored=fields.ignored())

    def encode(self, message: ServerMessage) -> tuple[str, ...]:
        """Write a server's message as a frame."""
        match message:
            case Prefilled(input_tokens=count):
                return (dump_frame({"type": PREFILL_DONE, "input_tokens": count}),)
            case Delta():
                return (_encode_chunk(message),)
            case Response():
                return (_encode_done(message),)
        return (legacy.encode_common(self, message),)

    def encode_request(self, message: ClientMessage) -> str:
        """Write the request as a frame; refuses an id, which 004 cannot say."""
        match message:
            case Ask(input_id=None):
                return dump_frame({**ask_fields(message), **record_fields(message.record)})
            case Ask():
                raise LocalProtocolError("input_id has no field in legacy-chat")
        raise no_frame(self, message)

    def decode(self, body: Json, _mode: Mode = "chat") -> tuple[ServerMessage, ...]:
        """Read a server's message."""
        fields = Fields(body)
        match kind := fields.required("type", Value.text):
            case "prefill_done":
                return (Prefilled(input_tokens=fields.required("input_tokens", Value.integer)),)
            case "chunk":
                return (_decode_chunk(fields),)
            case "done":
                return (_decode_done(fields),)
        return (legacy.decode_common(kind, fields),)


LEGACY_CHAT: Final = LegacyChat()


def _encode_chunk(delta: Delta) -> str:
    return dump_frame(
        {
            "type": CHUNK,
            "text_delta": delta.text or None,
            "audio_data": encode_base64(delta.pcm) or None,
        }
    )


def _decode_chunk(fields: Fields) -> Delta:
    return Delta(
        session_id="",
        response_id="",
        input_id="",
        text=fields.optional("text_delta", Value.text, ""),
        pcm=fields.optional("audio_data", shared.read_output, b""),
    )


def _encode_done(response: Response) -> str:
    recording = response.recording_id
    return dump_frame(
        {
            "type": DONE,
            "text": response.text,
            "generated_tokens": response.generated_tokens,
            "input_tokens": response.input_tokens,
            "audio_data": encode_base64(response.pcm) or None,
            **({"recording_session_id": recording} if recording else {}),
        }
    )


def _decode_done(fields: Fields) -> Response:
    return Response(
        session_id="",
        response_id="",
        input_id="",
        text=fields.required("text", Value.text),
        pcm=fields.optional("audio_data", shared.read_output, b""),
        reason="turn_end",
        streaming=None,
        input_tokens=fields.optional("input_tokens", Value.integer, 0),
        generated_tokens=fields.optional("generated_tokens", Value.integer, 0),
        recording_id=fields.optional("recording_session_id", Value.text, ""),
        metrics=Metrics(kv_cache_length=0, recording="off"),
    )
