"""Transcriptions of OpenAI's API: a request is a transcription session of one utterance.

A form (RFC 7578) has the file and the parameters. The file is decoded in a process of its own, and
its sound is the session's. The models transcribe what they hear, without hints and times: a
language and a prompt have no effect, and what needs times is refused by its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from email.message import Message
from email.parser import BytesHeaderParser
from typing import Any, Final

import attrs
import pybase64

from protocol.values.model import INPUT_RATE_HZ, SAMPLE16_BYTES

from ..net.http import bad_request
from .adapters import LocalClient
from .completions import refuse_value, session_error

PARTS_MAX: Final = 32
"""Of a form: there are some fifteen fields."""
HEAD_BYTES_MAX: Final = 4_096
"""Of a part."""
FIELD_CHARS_MAX: Final = 32_768
FORMATS: Final = ("json", "text", "verbose_json")
PIECE_BYTES: Final = 1 << 20
"""Of sound in a message: the session takes one after the other."""
_WITHOUT_EFFECT: Final = frozenset(
    {"language", "languages", "prompt", "keywords", "chunking_strategy"}
)


@attrs.frozen(kw_only=True)
class UploadRequest:
    """A request for a transcription; `language` is the client's own word for it."""

    model: str
    file: bytes = attrs.field(repr=False)
    form: str
    is_stream: bool
    language: str

    @classmethod
    def of(cls, content_type: str, body: bytes) -> UploadRequest:
        """Read a request; raises `CodedError`."""
        fields = read_form(content_type, body)
        texts = {name: _text(name, data) for name, data in fields.items() if name != "file"}
        for name in ("file", "model"):
            if name not in fields:
                raise bad_request("missing_field", f"{name}: is missing", name)
        form = texts.get("response_format", "json")
        if form not in FORMATS:
            text = f"there are {', '.join(FORMATS)}: the model tells no times"
            raise refuse_value("response_format", text)
        if texts.get("temperature", "0") not in ("0", "0.0", ""):
            raise refuse_value("temperature", "the likeliest words are transcribed: 0")
        stream = texts.get("stream", "false").lower()
        if stream not in ("true", "false", "1", "0", ""):
            raise refuse_value("stream", "it is true or false")
        lists = {f"{name}[]" for name in _WITHOUT_EFFECT}
        known = {"model", "response_format", "temperature", "stream", *_WITHOUT_EFFECT, *lists}
        for name in (each.removesuffix("[]") for each in texts.keys() - known):
            text = f"{name[:64]}: not served"
            raise bad_request("unsupported_parameter", text, name[:64])
        return cls(
            model=texts["model"],
            file=fields["file"],
            form=form,
            is_stream=stream in ("true", "1"),
            language=texts.get("language", ""),
        )


def read_form(content_type: str, body: bytes) -> dict[str, bytes]:
    """Read a form's fields, the last of each name; raises `CodedError` for another body."""
    head = Message()
    head["Content-Type"] = content_type
    try:
        boundary = head.get_boundary()
    except (UnicodeError, LookupError):  # of an encoding in its name
        boundary = None
    if head.get_content_type() != "multipart/form-data" or not boundary:
        text = "the body is a form (multipart/form-data)"
        raise bad_request("invalid_form", text)
    line = b"\r\n--" + boundary.encode("latin-1", "replace")
    pieces = (b"\r\n" + body).split(line, PARTS_MAX + 2)
    if len(pieces) > PARTS_MAX + 2 or not pieces[-1].startswith(b"--"):
        text = f"the form has no end, or more than {PARTS_MAX} parts"
        raise bad_request("invalid_form", text)
    fields = {}
    for piece in pieces[1:-1]:
        names, blank, data = piece.partition(b"\r\n\r\n")
        headers = BytesHeaderParser().parsebytes(names.lstrip(b"\r\n")[:HEAD_BYTES_MAX])
        name = headers.get_param("name", header="content-disposition")
        if not blank or not isinstance(name, str):
            raise bad_request("invalid_form", "a part of the form has no name")
        fields[name] = data
    return fields


def _text(name: str, data: bytes) -> str:
    if len(data) > FIELD_CHARS_MAX:
        raise bad_request("invalid_payload", f"{name[:64]}: too long", name[:64])
    return data.decode("utf-8", "replace")


def react(asked: UploadRequest, pcm16: bytes, client: LocalClient, message: dict[str, Any]) -> bool:
    """Send the sound; takes `session.created`, the pieces and `transcription.done`.

    `CodedError`: the session is refused, or fails.
    """
    match message["type"]:
        case "session.created":
            client.ask({"type": "session.update", "model": asked.model})
            client.ask_each(_appends(pcm16))
            client.ask({"type": "input_audio_buffer.commit", "final": True})
        case "transcription.done":
            client.finish()
        case "error":
            client.finish()
            raise session_error({"code": message.get("code"), "message": message.get("error")})
    return message["type"] in ("session.created", "transcription.delta", "transcription.done")


def _appends(pcm16: bytes) -> Iterator[dict[str, Any]]:
    for at in range(0, len(pcm16), PIECE_BYTES):
        sound = pybase64.b64encode(pcm16[at : at + PIECE_BYTES]).decode()
        yield {"type": "input_audio_buffer.append", "audio": sound}


def whole(asked: UploadRequest, done: Mapping[str, Any], pcm16: bytes) -> dict[str, Any]:
    """Write a transcription as JSON."""
    if asked.form != "verbose_json":
        return {"text": done["text"], "usage": usage_of(done)}
    seconds = len(pcm16) / SAMPLE16_BYTES / INPUT_RATE_HZ
    usage = {"type": "duration", "seconds": seconds}
    facts = {"task": "transcribe", "language": asked.language, "duration": seconds}
    return {**facts, "text": done["text"], "usage": usage}


def events(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Write a message of the session as events of a stream."""
    if message["type"] == "transcription.delta":
        yield {"type": "transcript.text.delta", "delta": message["delta"]}
    elif message["type"] == "transcription.done":
        yield {"type": "transcript.text.done", "text": message["text"], "usage": usage_of(message)}


def usage_of(done: Mapping[str, Any]) -> dict[str, Any]:
    """The tokens of an utterance."""
    usage = done["usage"]
    counts = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
    return {"type": "tokens", **counts, "total_tokens": usage["total_tokens"]}
