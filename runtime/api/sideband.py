"""A session of `live` as an attached client gets it: frames, made from the records of its log.

OpenAI's Live API calls this the sideband. Its events, of `openai.types.live.ConnectServerEvent`:

- `session.started` comes first, though it is past; a fork's log has several, and the last counts.
  Then comes all that the server sends from `from_seq` on, in order, without the numbers of a
  session that can be resumed.
- Both voices are 16-bit at 24 kHz, in every format of the session. The client's sound is
  `session.input_audio.append`, also while it is muted; a second of the model has its `start_ms` and
  `end_ms`.
- `session.closed` is the last, also where the session lost its client before it was sent.

What the attached client sends is refused: it only listens.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, Final

import orjson

from protocol.values.errors import ErrorCode, FieldError, FrameError
from protocol.values.events import Forked
from protocol.values.frames import Frame
from protocol.values.limits import INPUT_ID_CHARS_MAX, MS_PER_S
from protocol.values.messages import ErrorReport
from protocol.values.model import SAMPLE16_BYTES, Coding
from protocol.values.records import RECORD_NAMES
from protocol.values.requests import AppendSound, Request
from protocol.wire.audio import LIVE_RATE_HZ, Resampler, to_pcm16
from protocol.wire.codec import Context, Value, encode_base64, parse_frame
from protocol.wire.dialects import LIVE, live, openai_shared
from protocol.wire.dialects.shared import SESSION_CLOSED, SESSION_REPLACED, SESSION_RESUMABLE
from protocol.wire.table import refusal
from recorder.read.scan import Damage

from .tail import Item

_UNSENT: Final = (SESSION_RESUMABLE, SESSION_REPLACED)
"""They are about the connection of the session's own client."""
_NUMBERS: Final = ("seq", "ack")
"""Fields of the frames of a session that can be resumed."""
_SOUND: Final = f'{{"type":"{live.OUTPUT_AUDIO}"'
"""How such a frame begins."""
_CONTEXT: Final = Context(mode="audio")
_GONE: Final = "connection_lost"


class Sideband:
    """The frames of one session, from the records of its log in order.

    Attributes:
        is_over: `session.closed` was sent, or the log has its end.
    """

    def __init__(self, from_seq: int) -> None:
        self._from_seq = from_seq
        self._session: Mapping[str, Any] | None = None
        self._past: list[str] = []
        self._coding: Coding = "audio/pcm"
        self._seconds = 0
        self._user = self._model = Resampler(LIVE_RATE_HZ, to_hz=LIVE_RATE_HZ)
        self.is_over = False

    def frames(self, item: Item) -> list[str]:
        """Make the frames of a record or damage; none of what is past or is not sent."""
        made = self._frames(item)
        is_past = isinstance(item, Damage) or item.seq + 1 < self._from_seq
        if is_past and not made:
            return []
        past, self._past = self._past, []
        return past + made

    def _frames(self, item: Item) -> list[str]:
        if isinstance(item, Damage) or self.is_over:
            return []
        frame, is_new = item.fields.get("frame"), item.seq >= self._from_seq
        if item.fields.get("type") == RECORD_NAMES[Forked]:
            self._session, self._past = None, []  # another client got what was sent until here
        if item.kind == "fin":
            self.is_over = True
            return self._closed()
        if not isinstance(frame, str):
            return []
        if item.kind == "rx":
            return self._client_sound(frame) if is_new and self._session is not None else []
        if item.kind != "tx":
            return []
        if frame.startswith(_SOUND):
            return self._second(frame, is_new=is_new)
        return self._server_frame(frame, is_new=is_new)

    def _server_frame(self, frame: str, *, is_new: bool) -> list[str]:
        """Pass on the server's frame, but not its sound."""
        body: dict[str, Any] = orjson.loads(frame)
        kind = body.get("type")
        if kind == live.SESSION_STARTED:
            self._begin(body["session"])
            self._past = [] if is_new else [_written(body)]
        elif kind == SESSION_CLOSED:
            self.is_over = is_new = True
        return [_written(body)] if is_new and kind not in _UNSENT else []

    def _begin(self, session: Mapping[str, Any]) -> None:
        self._session = session
        sound_format = session["audio"]["format"]
        self._coding = sound_format["type"]
        self._user = Resampler(sound_format["rate"], self._coding, LIVE_RATE_HZ)
        self._model = Resampler(sound_format["rate"], self._coding, LIVE_RATE_HZ)

    def _second(self, frame: str, *, is_new: bool) -> list[str]:
        """Give the model's next second its place."""
        start_ms = self._seconds * MS_PER_S
        self._seconds += 1
        if not is_new:
            return []
        sound = Value(path="$.delta", value=orjson.loads(frame)["delta"]).binary()
        delta = encode_base64(to_pcm16(self._model.take(sound)))
        place = {"start_ms": start_ms, "end_ms": start_ms + MS_PER_S}
        return [_written({"type": live.OUTPUT_AUDIO, "delta": delta, **place})]

    def _client_sound(self, frame: str) -> list[str]:
        """Pass on the client's sound; what the session refuses is left out."""
        try:
            body = parse_frame(frame)
            if LIVE.classify(body) is not Request.APPEND:
                return []
            message = LIVE.parse(Request.APPEND, body, _CONTEXT)
        except (FrameError, FieldError):
            return []
        assert isinstance(message, AppendSound)
        if self._coding == "audio/pcm" and len(message.pcm16) % SAMPLE16_BYTES:
            return []
        sound = to_pcm16(self._user.take(message.pcm16))
        return (
            [_written({"type": live.AUDIO_APPEND, "audio": encode_base64(sound)})] if sound else []
        )

    def _closed(self) -> list[str]:
        """Report the end of a session whose client was lost; nothing if it never began."""
        if self._session is None:
            return []
        usage = {"session": self._session, "usage": {"seconds": self._seconds}}
        body = {"type": SESSION_CLOSED, "event_id": _event_id(), "reason": _GONE, **usage}
        return [_written(body)]


def refused(frame: Frame) -> str:
    """Make the `error` that answers an attached client's message.

    `FrameError`: the message cannot be read; the connection is closed.
    """
    body = parse_frame(frame)
    kind, event_id = body.get("type"), body.get("event_id")
    if isinstance(kind, str) and (kind in LIVE.types or kind in live.UNSUPPORTED):
        text = f"$.type: {kind}, an attached client may only listen"
        error = FieldError(ErrorCode.UNSUPPORTED, text)
    else:
        error = refusal(Request.UNKNOWN, body)
    named = isinstance(event_id, str) and len(event_id) <= INPUT_ID_CHARS_MAX
    report = ErrorReport(
        code=error.code, message=error.message, client_event_id=str(event_id) if named else ""
    )
    (answer,) = LIVE.encode(report)
    return answer.replace(openai_shared.EVENT, f'"event_id":"{_event_id()}"', 1)


def _written(body: Mapping[str, Any]) -> str:
    return orjson.dumps({name: it for name, it in body.items() if name not in _NUMBERS}).decode()


def _event_id() -> str:
    return f"event_{secrets.token_hex(6)}"
