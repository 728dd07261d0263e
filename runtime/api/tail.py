"""A log's records while they are written: as JSON lines, or as server-sent events.

Each line is an object: `{"type": "record", "seq", "at_ns", "kind", "fields"}`, `{"type": "damage",
...}`, now and then `{"type": "alive"}`, and at last `{"type": "end", "state"}` with a listing's
state. Bytes are `{"$bytes": 64000}`, and base64 in a frame `<64000 bytes>`; on request bytes are
`{"$base64": ...}` and frames are verbatim.

The lines come from the file: a slow client loses nothing and delays neither the session nor its
log. Memory is bounded by a block of the log and the client's unsent lines. Threads read and encode.

A client that is attached to a session of `live` gets it as frames, made from the records of its
log. OpenAI's Live API calls this the sideband. Its events, of
`openai.types.live.ConnectServerEvent`:

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

import json
import secrets
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence, Sized
from contextlib import aclosing
from functools import partial
from typing import Any, Final, Generic, TypeVar

import anyio
import anyio.to_thread
import attrs
import orjson
import pybase64

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
from recorder.format.encoding import extract
from recorder.format.format import FRAME_KINDS, Record, Unreadable
from recorder.read.reader import LogReader
from recorder.read.scan import Damage
from recorder.storage.listing import State
from recorder.storage.store import LogInfo

from .requests import Write

P = TypeVar("P", bound=Sized)
"""A piece of what is sent: bytes or text."""
Item = Record | Damage

POLL_S: Final = 0.25
"""The recorder's tick, after which blocks are written that no answer needs."""
ALIVE_S: Final = 15.0
"""A proxy drops a connection that is silent for half a minute or more."""
BATCH_BYTES: Final = 256 * 1024
"""About the bytes of one write; a record is never split."""
BATCH_ITEMS: Final = 256
"""Records read in one go, so that skipping thousands does not hold a thread."""


@attrs.frozen(kw_only=True)
class TailFormat:
    """How a log is sent: from `from_seq`, as server-sent events with `seq` as id or JSON lines."""

    from_seq: int = 0
    with_blobs: bool = False
    as_events: bool = False

    @property
    def media_type(self) -> str:
        """The answer's media type."""
        return "text/event-stream" if self.as_events else "application/x-ndjson"

    def line(self, message: Mapping[str, object], seq: int | None = None) -> bytes:
        """Format one object."""
        text = json.dumps(message)  # in ASCII: a log can hold lone surrogates
        if not self.as_events:
            return f"{text}\n".encode()
        name = "" if seq is None else f"id: {seq}\n"
        return f"{name}data: {text}\n\n".encode()

    def lines(self, item: Item) -> tuple[bytes]:
        """Format a record or damage."""
        if isinstance(item, Damage):
            return (self.line({"type": "damage", **attrs.asdict(item)}),)
        return (self.line(_record_json(item, self.with_blobs), item.seq),)


async def send_log(info: LogInfo, form: TailFormat, write: Write) -> None:
    """Send a log to its end, or until cancelled; raises `OSError` if it becomes unreadable."""
    tail = Tail(info, form.lines, from_seq=form.from_seq)
    sent_s = anyio.current_time()
    async with aclosing(follow(tail)) as batches:
        async for lines in batches:
            now_s = anyio.current_time()
            if not lines and now_s - sent_s >= ALIVE_S:
                lines = [form.line({"type": "alive"})]  # noqa: PLW2901 - sent instead
            if lines:
                await write(b"".join(lines))
                sent_s = now_s
    await write(form.line({"type": "end", "state": tail.state}))


async def follow(tail: Tail[P]) -> AsyncGenerator[list[P]]:
    """Yield the pieces of a log, a batch at a time, to its end; empty now and then.

    It closes the tail. `OSError`: the log becomes unreadable.
    """
    in_thread = partial(anyio.to_thread.run_sync, abandon_on_cancel=True)
    try:
        while tail.state is None:
            pieces = await in_thread(tail.read)
            yield pieces or []
            if pieces is None and tail.state is None:
                await anyio.sleep(POLL_S)
    finally:
        tail.close()


class Tail(Generic[P]):
    """A log while it is written; used by one thread at a time.

    Args:
        pieces_of: makes what is sent of a record or damage; called in a thread.
        from_seq: the first record.

    Attributes:
        state: at the log's end, its state in a listing; None before.
    """

    def __init__(
        self, info: LogInfo, pieces_of: Callable[[Item], Sequence[P]], *, from_seq: int = 0
    ) -> None:
        self._info = info
        self._pieces_of = pieces_of
        self._from_seq = from_seq
        self._reader: LogReader | None = None
        self._items: Iterator[Item] | None = None
        self._was_held = True
        self.state: State | None = None

    def close(self) -> None:
        """Close the log."""
        if self._reader is not None:
            self._reader.close()

    def read(self) -> list[P] | None:
        """The next pieces; None if nothing is there now."""
        if self._items is None:
            # Ask whether the log is being written before the read, so that its last records are
            # seen.
            self._was_held = self._is_held()
            self._items = self._begin()
        pieces: list[P] = []
        size = 0
        for _ in range(BATCH_ITEMS):
            item = next(self._items, None)
            if item is None:
                self._items = None
                if not pieces:
                    self._pause()
                return pieces or None
            made = self._pieces_of(item)
            pieces += made
            size += sum(map(len, made))
            if isinstance(item, Record) and item.kind == "fin":
                self.state = "finished"
            if size >= BATCH_BYTES or self.state is not None:
                break
        return pieces

    def _is_held(self) -> bool:
        try:
            return self._info.is_held()
        except FileNotFoundError:  # it was removed: the open file can still be read
            return False

    def _begin(self) -> Iterator[Item]:
        if self._reader is None:
            try:
                self._reader = LogReader(self._info.open())
            except (Unreadable, FileNotFoundError):  # or its head is not written yet
                return iter(())
            if self._from_seq:
                return self._reader.at(self._from_seq)
        return iter(self._reader)

    def _pause(self) -> None:
        """At the end of the file: the log is over, unless it is being written."""
        if self._was_held:
            return
        if self._reader is None:
            self.state = "unreadable"
        else:
            self.state = "finished" if self._reader.is_finished else "crashed"


def _record_json(record: Record, with_blobs: bool) -> dict[str, object]:
    fields = dict(record.fields)
    frame = fields.get("frame")
    if record.kind in FRAME_KINDS and isinstance(frame, str) and not with_blobs:
        fields["frame"] = _elided(frame)
    return {
        "type": "record",
        "seq": record.seq,
        "at_ns": record.at_ns,
        "kind": record.kind,
        "fields": _plain(fields, with_blobs),
    }


def _elided(frame: str) -> str:
    """Replace the base64 in a frame by its length; JSON stays JSON."""
    return "".join(
        piece if isinstance(piece, str) else f"<{len(piece)} bytes>" for piece in extract(frame)
    )


def _plain(value: object, with_blobs: bool) -> object:
    if isinstance(value, bytes):
        if with_blobs:
            return {"$base64": pybase64.b64encode_as_string(value)}
        return {"$bytes": len(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item, with_blobs) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item, with_blobs) for item in value]
    return value


# -- an attached client of a live session ----------------------------------------------------------

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
